"""The cursor: how far the application is, and what of that the members have.

Problem: a commit counts only in the head of the consume list, at members that were told this reader's token and the
subscription's generation; the application may be links ahead of that.

Idea: two places. `wanted` is before the first record the application is not done with; `committed` is what the
members have. `committed` follows `wanted`: inside the head link by commits; at the head's recorded end it waits
until the coordinator took the link off the consume list, and then asks for the next head with the same token. Where the
members' report isn't taken, as of a cursor that isn't marked as this reader's, the link stays listed: then it asks all the
same, ever more seldom, and who is asked where to read takes the link off itself.

`decide` is as in `reading`. The shell answers AcquireAgain with Granted sooner or later, or with Deposed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from seriatim.consumer.core.view import START, ChainView, Grant, LinkView, Place, Side, SubscriptionView
from seriatim.protocol.chain import LinkState
from seriatim.protocol.names import Epoch, Index
from seriatim.protocol.patience import backoff_s

RETRY_FIRST_S = 0.05
RETRY_MAX_S = 1.0
LEAVE_FIRST_S = 5.0
"""A link that was read to its end is off the consume list long before, where the members' report of it is taken."""
LEAVE_MAX_S = 60.0


# ---- events ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Granted:
    """A coordinator's answer: the head of the consume list and the cursor in it; epoch 0: the list is empty."""

    view: ChainView
    grant: Grant
    head: Place


@dataclass(frozen=True, slots=True)
class Deposed:
    """Somebody else is elected, or nobody can tell: nothing is committed any more."""


@dataclass(frozen=True, slots=True)
class ViewChanged:
    view: ChainView


@dataclass(frozen=True, slots=True)
class CommitAsked:
    """The application is done with everything before `place`."""

    place: Place


@dataclass(frozen=True, slots=True)
class Committed:
    commit_id: int


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """`is_grant_old`: the member was told another token or generation, or none. `is_beyond`: the link there isn't committed so far."""

    commit_id: int
    reason: str
    is_grant_old: bool
    is_beyond: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """The time that was asked for has come."""


Event = Granted | Deposed | ViewChanged | CommitAsked | Committed | CommitFailed | Tick


# ---- effects ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit the cursor `index` in link `epoch` at this member, in the name of `grant`, whatever is granted by the time it is sent."""

    commit_id: int
    grant: Grant
    epoch: Epoch
    index: Index
    side: Side


@dataclass(frozen=True, slots=True)
class AcquireAgain:
    """Ask a coordinator with the same token."""


@dataclass(frozen=True, slots=True)
class StartReading:
    """From here, in the name of `grant`: a new term of this reader, or a subscription that was sought. `is_end`: nothing is left of that link."""

    view: ChainView
    grant: Grant
    place: Place
    is_end: bool


@dataclass(frozen=True, slots=True)
class Refuse:
    """Who wants everything before `place` committed, or more, is wrong: there is less."""

    place: Place
    reason: str


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send a Tick then; takes the place of an earlier order."""

    at_s: float


Effect = Commit | AcquireAgain | StartReading | Refuse | WakeAt


@dataclass(frozen=True, slots=True)
class CursorState:
    """State. Nothing happens without a grant.

    grant: what this reader holds; None while it holds nothing. Whoever acts in its name is handed it from here.
    head: epoch that takes this reader's commits; 0: the consume list is empty.
    committed <= wanted: see the module. Beyond what there is, `wanted` falls back to `committed`.
    in_flight: the only commit on its way.
    beyond: the newest commit that a member has less for; the other one may know more, until it says the same of the next.
    leave_at_s: when a coordinator is asked, as the head is committed to its end and listed still; None: it isn't there.
    leaves: how often one was asked for that.
    """

    view: ChainView | None = None
    grant: Grant | None = None
    head: Epoch = Epoch(0)
    committed: Place = START
    wanted: Place = START
    in_flight: Commit | None = None
    beyond: Commit | None = None
    next_commit_id: int = 1
    is_acquiring: bool = False
    failures: int = 0
    failure: str = ""
    avoid: str = ""
    retry_at_s: float = 0.0
    leave_at_s: float | None = None
    leaves: int = 0
    waiting_for: str = ""


Step = tuple[CursorState, list[Effect]]


def decide(state: CursorState, event: Event, now_s: float) -> Step:
    """What follows from `event`."""
    effects: list[Effect] = []
    match event:
        case Granted():
            state, effects = _granted(state, event)
        case Deposed():
            return CursorState(next_commit_id=state.next_commit_id), []
        case ViewChanged(view):
            if state.view is not None and view.version < state.view.version:
                return state, []
            state = replace(state, view=view)
        case CommitAsked(place):
            state = replace(state, wanted=place) if place > state.wanted else state
        case Committed(commit_id):
            if state.in_flight is None or state.in_flight.commit_id != commit_id:
                return state, []
            reached = Place(state.in_flight.epoch, state.in_flight.index)
            state = replace(
                state, in_flight=None, committed=max(state.committed, reached), failures=0, failure="", avoid=""
            )
        case CommitFailed():
            if state.in_flight is None or state.in_flight.commit_id != event.commit_id:
                return state, []
            state, effects = _failed(state, event, now_s)
        case Tick():
            pass
        case _:
            assert_never(event)
    state, more = _settled(state, now_s)
    return state, effects + more


def _granted(state: CursorState, event: Granted) -> Step:
    place, is_end = event.head, False
    if place.epoch == 0:
        place, is_end = _behind_all(event.view), True
    is_going_on = state.grant is not None and _is_same_cursor(state.grant, event.grant)
    after = replace(
        state,
        view=event.view,
        grant=event.grant,
        head=event.head.epoch,
        is_acquiring=False,
        in_flight=None,
        committed=place,
        wanted=max(state.wanted, place) if is_going_on else place,
        leave_at_s=None,
        leaves=state.leaves if is_going_on and event.head.epoch == state.head else 0,
    )
    if is_going_on:
        # Nothing is left on the list: all that was wanted is committed, but for what is in links listed since. In a queue
        # without links it is in one that was let go.
        newest = event.view if state.view is None or state.view.version < event.view.version else state.view
        if is_end and (after.wanted.epoch <= place.epoch or newest.link(after.wanted.epoch) is None):
            after = replace(after, committed=after.wanted)
        return after, []
    after = replace(after, failures=0, failure="", avoid="", retry_at_s=0.0)
    return after, [StartReading(event.view, event.grant, place, is_end)]


def _is_same_cursor(before: Grant, after: Grant) -> bool:
    return (before.subscription_id, before.generation) == (after.subscription_id, after.generation)


def _behind_all(view: ChainView) -> Place:
    """Where a reader stands whose consume list is empty: behind the last link, all of which are sealed."""
    if not view.links:
        return START
    last = view.links[-1]
    return Place(last.epoch, last.end or Index(0))


def _failed(state: CursorState, event: CommitFailed, now_s: float) -> Step:
    """The other member is tried at once; when both failed, the token is told again, and then after a while."""
    order = state.in_flight
    if order is not None and event.is_beyond:
        if _is_beyond_both(state, order):
            refused = Refuse(Place(order.epoch, order.index), event.reason)
            return replace(state, in_flight=None, wanted=state.committed, failures=0, failure="", avoid=""), [refused]
        state = replace(state, beyond=order)
    failures = state.failures + 1
    is_second = failures % 2 == 0
    wait_s = backoff_s(RETRY_FIRST_S, RETRY_MAX_S, failures // 2) if is_second else 0.0
    state = replace(
        state,
        in_flight=None,
        failures=failures,
        failure=event.reason,
        avoid="" if order is None else order.side.member,
        retry_at_s=now_s + wait_s,
    )
    if (event.is_grant_old or is_second) and not state.is_acquiring:
        return replace(state, is_acquiring=True), [AcquireAgain()]
    return state, []


def _is_beyond_both(state: CursorState, order: Commit) -> bool:
    """Whether both members of an open link, one after the other, have less than `order` says.

    One that has less may lag behind the other, from which the records came. In a link that is no longer open both may, until
    the end is recorded, beyond which nothing is ordered.
    """
    link = None if state.view is None else state.view.link(order.epoch)
    before = state.beyond
    return (
        link is not None
        and link.state is LinkState.OPEN
        and before is not None
        and before.commit_id + 1 == order.commit_id
        and (before.grant, before.epoch) == (order.grant, order.epoch)
        and before.side.member != order.side.member
    )


def _settled(state: CursorState, now_s: float) -> Step:
    view, grant = state.view, state.grant
    if grant is None or view is None or state.is_acquiring:
        return state, []
    subscription = view.subscription(grant.subscription_id)
    if subscription is None or view.is_deleted:
        return _waiting(state, "nothing: the subscription was deleted"), []
    if _is_grant_over(grant, state.head, subscription):
        # A commit under way is void or repeated: the new grant says where the cursor is.
        return replace(state, is_acquiring=True, in_flight=None), [AcquireAgain()]
    link = view.link(state.head)
    if link is None or state.in_flight is not None:
        return state, []
    if link.end is not None and state.committed >= Place(link.epoch, link.end):
        return _at_end(state, link, now_s)
    target = _target(state, link)
    if state.committed.epoch != link.epoch or target <= state.committed.index:
        return _waiting(state, ""), []
    if now_s < state.retry_at_s:
        return _waiting(state, state.failure), [WakeAt(state.retry_at_s)]
    side = link.choice(state.avoid)
    if side is None:
        return _waiting(state, link.nobody_there), []
    order = Commit(state.next_commit_id, grant, link.epoch, target, side)
    return replace(state, in_flight=order, next_commit_id=state.next_commit_id + 1, waiting_for=""), [order]


def _at_end(state: CursorState, link: LinkView, now_s: float) -> Step:
    """The head is to leave the consume list. Members see to that; where they can't, a coordinator does when it is asked where to read."""
    if not link.registered:  # nor could a coordinator: nobody tells it how far the link was read
        return _waiting(state, link.nobody_there), []
    state = _waiting(state, f"link {link.epoch}, read to its end, to leave the consume list")
    wait_s = backoff_s(LEAVE_FIRST_S, LEAVE_MAX_S, state.leaves)
    at_s = now_s + wait_s if state.leave_at_s is None else state.leave_at_s
    if now_s < at_s:
        return replace(state, leave_at_s=at_s), [WakeAt(at_s)]
    return replace(state, is_acquiring=True, leave_at_s=None, leaves=state.leaves + 1), [AcquireAgain()]


def _waiting(state: CursorState, reason: str) -> CursorState:
    return state if state.waiting_for == reason else replace(state, waiting_for=reason)


def _is_grant_over(grant: Grant, head: Epoch, subscription: SubscriptionView) -> bool:
    """Whether the subscription was sought, or the head link left the consume list, or the list has one again."""
    if subscription.generation != grant.generation:
        return True
    if head == 0:
        return bool(subscription.consume_list)
    return head not in subscription.consume_list


def _target(state: CursorState, link: LinkView) -> Index:
    """How far the head link can be committed: to its recorded end, where the application is beyond it (H22)."""
    if state.wanted.epoch < link.epoch:
        return Index(0)
    if state.wanted.epoch == link.epoch:
        return state.wanted.index if link.end is None else min(state.wanted.index, link.end)
    return Index(0) if link.end is None else link.end
