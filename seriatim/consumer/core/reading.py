"""Reading a queue: from link to link by the chain, from one member to the other.

Problem: read every committed record of a queue once and in order, while links are sealed and made, members die and
come back empty, and the reader itself may be told to start elsewhere.

Idea: one place, `at`: the start of the next batch to take in. It moves over a batch that starts exactly there, and
from a link's recorded end to the start of the chain's next link, and in no other way. Whatever goes wrong with a
member only closes the fetch; it is opened again at `at`, at the other member or later.

Rules (protocol.md 6):
- a link that is opening is *not yet*; a lost one stops the reading, with a reason; only a recorded end is an end;
- a place beyond the end counts as the end (H22); batches beyond it are not taken in;
- what was committed by whoever read before is read on to its end all the same; only what the chain has let go isn't waited for;
- marks belong to the place: those of the link's start and what the member says about the first batch's start, raised
  by each batch. They go over with the reader to the next link (H6);
- fetched ahead of the application, across links, within `limit_bytes`.

`decide(state, event, now_s)` gives the next state and orders in the order in which they have to be carried out.
`now_s` is any clock that never goes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

from seriatim.consumer.core.reading_events import (
    BatchesArrived,
    CloseFetch,
    Deliver,
    Drained,
    Effect,
    EndReached,
    Event,
    FetchFailed,
    GiveCredit,
    Heard,
    LookAtChain,
    OpenFetch,
    ReadFrom,
    RowsTaken,
    StartArrived,
    Stopped,
    Tick,
    ViewChanged,
    WakeAt,
)
from seriatim.consumer.core.rows import Delivery
from seriatim.consumer.core.view import NOBODYS, ChainView, Grant, LinkView, Place, Side
from seriatim.protocol.batch import BatchHeader
from seriatim.protocol.chain import LinkState
from seriatim.protocol.marks import merged, overlaps, raised
from seriatim.protocol.names import Epoch, Incarnation, Index, Offset, beyond_abandoned
from seriatim.protocol.patience import Patience, backoff_s

RETRY_FIRST_S = 0.05
RETRY_MAX_S = 2.0
STALL_S = 1.0
"""A member that gives nothing of a link whose end is known, and doesn't say that it could, for so long, is left for the other one."""
OWED_S = 10.0
"""So long a member may give nothing of what it says is committed: longer than any way there and back, for whoever is left so is asked in vain again."""
SILENCE_S = 0.3
"""A member that isn't heard for so long is left for the other one; longer where the path is slow (`Patience`)."""
BEHIND_FIRST_S, BEHIND_MAX_S = 0.3, 5.0
"""So long the chain may be shown as it was before a switch that began; twice as long each time that it was looked at in vain."""
LATE_S = 0.1
"""A look later than this says that this process stood still, not that the member did."""


# ---- state -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fetch:
    """An open stream.

    credit_bytes: what the member may still send; may fall below 0 by one batch. is_answered: it said something.
    owes_until_s: when it is left, because it says, having credit, that more is committed than it gave; None where it doesn't.
    is_sealed: it says that it takes no more records of the link, and was told no end.
    """

    fetch_id: int
    member: str
    incarnation: Incarnation | None
    credit_bytes: int
    is_answered: bool = False
    owes_until_s: float | None = None
    is_sealed: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """State. Nothing is read while `at` is None.

    grant: in whose name it is read.
    at: before the next batch to take in; where `marks` is None, any place inside the link, not yet matched to a batch.
    skip_below: records of `at`'s link below it were not asked for; since: nor those below this offset, in whatever link.
    marks: at `at`; None until a member said them.
    is_at_end: `at` is the recorded end of its link. end_offset: that end as an offset; None where nobody knows it yet.
    head: all links before it are committed to their ends, as a coordinator told; the chain may let them go.
    buffered_bytes: delivered and not taken; buffered_bytes + credit <= limit_bytes, but for the last batch sent.
    failures: in a row, since something arrived, or the link's end or members changed; the next try is at `retry_at_s`, at another
    member than `avoid`.
    heard_at_s: when the fetch was opened, or its member said something last; is_excused: a late look was put down to
    this process since. patience: of the path that this reader stands behind; outlives what it reads.
    waiting_for: why nothing can be fetched now; empty while something is.
    look_at_s: when the chain is looked at elsewhere, for it should show more than it does; None where it needn't. looks: how often it was.
    """

    limit_bytes: int
    view: ChainView | None = None
    grant: Grant = NOBODYS
    at: Place | None = None
    skip_below: Index = Index(0)
    since: Offset = Offset(0)
    until: Offset | None = None
    marks: Mapping[str, int] | None = None
    is_at_end: bool = False
    end_offset: Offset | None = None
    head: Epoch = Epoch(0)
    fetch: Fetch | None = None
    next_fetch_id: int = 1
    buffered_bytes: int = 0
    failures: int = 0
    failure: str = ""
    avoid: str = ""
    retry_at_s: float = 0.0
    progress_at_s: float = 0.0
    heard_at_s: float = 0.0
    is_excused: bool = False
    patience: Patience = field(default_factory=Patience)
    waiting_for: str = ""
    look_at_s: float | None = None
    looks: int = 0

    @property
    def room_bytes(self) -> int:
        """What may still be fetched ahead; what a large batch took beyond its credit is given back with it."""
        promised = 0 if self.fetch is None else self.fetch.credit_bytes
        return self.limit_bytes - self.buffered_bytes - promised

    @property
    def is_cut_off(self) -> bool:
        """Whether what comes next of a range was let go."""
        if not self.is_at_end or self.view is None or self.at is None:
            return False
        following = self.view.next_after(self.at.epoch)
        return following is not None and _is_gap_before(self, following)

    @property
    def is_done(self) -> bool:
        """Whether all below `until` is delivered."""
        if self.until is None or self.view is None or self.at is None:
            return False
        link = self.view.link(self.at.epoch)
        return link is not None and link.base is not None and link.base + self.at.index >= self.until

    def has_all_of(self, view: ChainView) -> bool:
        """Whether all that was acknowledged before `view` was made is delivered; False where nobody told. It is of a DescribeQueue, and was seen."""
        if self.at is None or not view.is_latest_known:
            return False
        if self.is_at_end:  # of a link that the chain may have let go
            return view.next_after(self.at.epoch) is None
        reached = view.offset_of(self.at)
        return reached is not None and reached >= view.latest


Step = tuple[Reading, list[Effect]]


def asked_for_bytes(limit_bytes: int) -> int:
    """Room for less isn't asked for, batch by batch: a message costs more than a late one does."""
    return max(1, limit_bytes // 4)


def decide(state: Reading, event: Event, now_s: float) -> Step:
    """What follows from `event`."""
    match event:
        case ReadFrom():
            state, effects = _restarted(state, event, now_s)
        case Stopped():
            state, effects = _closed(state)
            return replace(state, at=None, buffered_bytes=0, waiting_for="being elected"), effects
        case ViewChanged(view):
            state, effects = _seen(state, view, now_s)
        case Drained(head):
            state, effects = replace(state, head=max(state.head, head)), []
        case RowsTaken(size_bytes):
            state, effects = replace(state, buffered_bytes=max(0, state.buffered_bytes - size_bytes)), []
        case Tick():
            effects = []
        case StartArrived() | BatchesArrived() | EndReached() | FetchFailed() | Heard():
            if state.fetch is None or state.fetch.fetch_id != event.fetch_id:
                return state, []
            state = _heard(state, state.fetch, now_s)
            if isinstance(event, Heard):
                state, effects = _reminded(state, event.committed, now_s)
                if state.fetch is not None:
                    state = replace(state, fetch=replace(state.fetch, is_sealed=event.is_sealed))
                    state, looks = _looked(state, now_s)
                    return state, effects + looks
            else:
                state, effects = _answered(state, event, now_s)
        case _:
            assert_never(event)
    state, more = _settled(state, now_s)
    state, looks = _looked(state, now_s)
    return state, effects + more + looks


def next_look_s(state: Reading, now_s: float) -> float | None:
    """When a Tick is wanted to see whether the member has fallen silent; None: nothing is fetched.

    One that is silent already, and that is read for want of another, is looked at again after a while.
    """
    silent_s = _silent_at_s(state)
    return silent_s if silent_s is None or silent_s > now_s else now_s + SILENCE_S


def _silent_at_s(state: Reading) -> float | None:
    if state.fetch is None:
        return None
    return state.heard_at_s + state.patience.limit_s(SILENCE_S, is_answered=state.fetch.is_answered)


def _heard(state: Reading, fetch: Fetch, now_s: float) -> Reading:
    """The member said something."""
    after_s = now_s - state.heard_at_s
    if fetch.is_answered:
        patience = state.patience.heard(after_s, SILENCE_S)
    else:
        fetch, patience = replace(fetch, is_answered=True), state.patience.answered(after_s)
    return replace(state, fetch=fetch, patience=patience, heard_at_s=now_s, is_excused=False)


def _reminded(state: Reading, committed: Index, now_s: float) -> Step:
    """The member gave nothing, and says how much is committed: it's left where it owes some of that, as one that never got its credit does.

    Words come in order, so between two of them it gave nothing. The first may be just before a batch that takes long to arrive; and all that
    it said before the credit was there arrive behind that, for as long as the way there and back takes.
    """
    patient_s = max(OWED_S, state.patience.limit_s(SILENCE_S))
    if now_s - state.progress_at_s > STALL_S:
        # Who speaks for so long and gives nothing has nothing to give; a beat alone may be from before the credit.
        state = replace(state, patience=state.patience.arrived())
    fetch, at = state.fetch, state.at
    if fetch is None or at is None:
        return state, []
    if fetch.credit_bytes <= 0 or committed <= at.index:
        return replace(state, fetch=replace(fetch, owes_until_s=None)), []
    if fetch.owes_until_s is None:
        return replace(state, fetch=replace(fetch, owes_until_s=now_s + patient_s)), []
    if now_s < fetch.owes_until_s:
        return state, []
    return _failed(state, "it sends nothing of what it says is committed", now_s, order_close=True)


def _restarted(state: Reading, event: ReadFrom, now_s: float) -> Step:
    state, effects = _closed(state)
    state = Reading(
        state.limit_bytes,
        view=event.view,
        grant=event.grant,
        at=event.place,
        skip_below=event.place.index,
        since=event.since,
        until=event.until,
        is_at_end=event.is_end,
        end_offset=event.since if event.is_end else None,
        next_fetch_id=state.next_fetch_id,
        progress_at_s=now_s,
        patience=state.patience,
    )
    return state, effects


def _closed(state: Reading) -> Step:
    if state.fetch is None:
        return state, []
    return replace(state, fetch=None), [CloseFetch(state.fetch.fetch_id)]


def _seen(state: Reading, view: ChainView, now_s: float) -> Step:
    if state.view is not None and view.queue_id != state.view.queue_id:
        # A queue of the same name made later is another queue (H16).
        view = replace(state.view, is_deleted=True)
    elif state.view is not None and view.version < state.view.version:
        return state, []  # from a coordinator that lags behind the one asked before
    before = None if state.view is None or state.at is None else state.view.link(state.at.epoch)
    after = None if state.at is None else view.link(state.at.epoch)
    state = replace(state, view=view)
    if before is None or after is None:
        return state, []
    if before.end != after.end:  # and what failed for want of it may work now, or as soon as its members know, too
        state = replace(state, progress_at_s=now_s, retry_at_s=now_s, failures=0)
    if before.end is None and _is_to_be_left(state, after):
        return _failed(state, "it didn't answer when the link was sealed", now_s, order_close=True)
    if (before.master, before.slave) == (after.master, after.slave):
        return state, []
    # Somebody came or went: what failed before may work now, and who served may be gone.
    state = replace(state, retry_at_s=now_s, failures=0)
    fetch = state.fetch
    if fetch is None or after.side(fetch.member).incarnation == fetch.incarnation:
        return state, []
    return _failed(state, "it is no longer registered as it was", now_s, order_close=True)


def _is_to_be_left(state: Reading, link: LinkView) -> bool:
    """Whether an end was recorded without the member that is read, by the other one, and records are still to come."""
    fetch, at = state.fetch, state.at
    if fetch is None or at is None or link.end is None or at.index >= link.end or fetch.member in link.answered:
        return False
    return any(side.member in link.answered for side in link.registered)


def _answered(state: Reading, event: StartArrived | BatchesArrived | EndReached | FetchFailed, now_s: float) -> Step:
    match event:
        case StartArrived():
            return _started(state, event, now_s)
        case BatchesArrived():
            return _taken_in(state, event, now_s)
        case EndReached(_, end):
            if state.at is None or state.at.index != end or state.marks is None:
                return _failed(state, f"the member ended at {end}, not having sent all", now_s, order_close=True)
            at_end = _at_end(state, _current(state), state.at)
            return replace(at_end, fetch=None), [CloseFetch(event.fetch_id)]
        case FetchFailed(_, reason):
            return _failed(state, reason, now_s, order_close=False)
        case _:
            assert_never(event)


def _started(state: Reading, event: StartArrived, now_s: float) -> Step:
    link = _current(state)
    if link is None or state.at is None:
        return state, []
    if event.index > state.at.index:
        return _failed(state, f"the member starts at {event.index}, behind {state.at.index}", now_s, order_close=True)
    if state.marks is None:
        return replace(
            state,
            at=Place(state.at.epoch, event.index),
            marks=merged(link.marks, event.marks),
            progress_at_s=now_s,
        ), []
    return replace(state, marks=merged(state.marks, event.marks), progress_at_s=now_s), []


def _taken_in(state: Reading, event: BatchesArrived, now_s: float) -> Step:
    link, at, marks, fetch = _current(state), state.at, state.marks, state.fetch
    if link is None or at is None or fetch is None or link.base is None:
        return state, []
    if marks is None:
        return _failed(state, "the member sent a batch before saying where it starts", now_s, order_close=True)
    credit_bytes = fetch.credit_bytes - sum(batch.size_bytes for batch in event.batches)
    state = replace(state, fetch=replace(fetch, credit_bytes=credit_bytes, owes_until_s=None), progress_at_s=now_s)
    limit = None if state.until is None else Index(state.until - link.base)
    lowest = Index(max(state.skip_below, state.since - link.base))
    index, buffered_bytes, wrong = at.index, state.buffered_bytes, ""
    effects: list[Effect] = []
    for batch in event.batches:
        header = batch.header
        if header.end_index <= index:
            continue
        wrong = _what_is_wrong(header, index, link)
        if wrong:
            break
        start, stop = max(header.first_index, lowest), header.end_index
        if limit is not None:
            stop = min(stop, limit)
        if start < stop:
            has_resends = overlaps(marks, header.spans)
            delivery = Delivery(link.epoch, link.base, batch, start, stop, marks if has_resends else None)
            effects.append(Deliver(delivery))
            buffered_bytes += delivery.size_bytes
        index, marks = header.end_index, raised(marks, header.spans)
    if index > at.index:
        state = replace(
            state,
            at=Place(at.epoch, index),
            marks=marks,
            buffered_bytes=buffered_bytes,
            failures=0,
            patience=state.patience.arrived(),
        )
    if wrong:
        state, closed = _failed(state, wrong, now_s, order_close=True)
        effects += closed
    return state, effects


def _what_is_wrong(header: BatchHeader, index: Index, link: LinkView) -> str:
    """Why a batch that came can't be the next one; "" where it is."""
    if header.first_index != index:
        return f"the member sent index {header.first_index} after {index}"
    if link.end is not None and header.end_index > link.end:
        return f"the member sent a batch over the end {link.end}"
    return ""


def _failed(state: Reading, reason: str, now_s: float, *, order_close: bool) -> Step:
    """Give the fetch up. The other member is tried at once; when both failed, after a while."""
    fetch, link = state.fetch, _current(state)
    if fetch is None:
        return state, []
    failures = state.failures + 1
    if failures % 2 == 1 and link is not None and _is_another_there(link, fetch):
        retry_at_s = now_s
    else:
        retry_at_s = now_s + backoff_s(RETRY_FIRST_S, RETRY_MAX_S, failures // 2)
    state = replace(
        state,
        fetch=None,
        failures=failures,
        failure=f"{link.side(fetch.member)}: {reason}" if link is not None else reason,
        avoid=fetch.member,
        retry_at_s=retry_at_s,
    )
    return state, [CloseFetch(fetch.fetch_id)] if order_close else []


def _current(state: Reading) -> LinkView | None:
    return None if state.view is None or state.at is None else state.view.link(state.at.epoch)


# ---- where to go on --------------------------------------------------------------------------------------------


def _settled(state: Reading, now_s: float) -> Step:
    """Move over recorded ends; then keep a fetch open, or say what is waited for."""
    effects: list[Effect] = []
    view = state.view
    while state.at is not None and view is not None:
        at = state.at
        if at.epoch < state.head and not state.is_at_end and view.link(at.epoch) is None:
            state, closed = _closed(state)
            effects += closed
            state = _at_end(state, None, at)
        reason, link = _whereabouts(state, view, at)
        if reason:
            state, closed = _closed(state)
            return _waiting(state, reason), effects + closed
        if link is None:  # its end was left behind; the chain's next link follows
            following = view.next_after(at.epoch)
            if following is None:
                return _waiting(state, "the next link"), effects
            if _is_gap_before(state, following):
                return _waiting(state, f"offset {state.end_offset}, which is no longer kept"), effects
            state = _entered(state, following)
            continue
        if link.end is not None and at.index >= link.end:
            state, closed = _closed(state)
            effects += closed
            state = _at_end(state, link, Place(link.epoch, link.end))
            continue
        state, more = _fetching(state, link, now_s)
        return state, effects + more
    return state, effects


def _at_end(state: Reading, link: LinkView | None, end: Place) -> Reading:
    base = None if link is None else link.base
    return replace(state, at=end, is_at_end=True, end_offset=None if base is None else Offset(base + end.index))


def _is_gap_before(state: Reading, following: LinkView) -> bool:
    """Whether records of a range were let go between the end that was reached and the next link that is kept.

    Only who reads for no subscription can come too late. What an operator gave up leaves a gap as well, and is no loss (H21): up to the
    base that the next link had by then, or else beyond any index.
    """
    at, base, link = state.end_offset, following.base, _current(state)
    if state.until is None or at is None or base is None or base <= at:
        return False
    is_next = state.at is not None and following.epoch == state.at.epoch + 1
    is_given_up = link is not None and link.is_abandoned
    return not (is_next or is_given_up or base == beyond_abandoned(at))


def _waiting(state: Reading, reason: str) -> Reading:
    return state if state.waiting_for == reason else replace(state, waiting_for=reason)


def _entered(state: Reading, link: LinkView) -> Reading:
    """At the start of the chain's next link, with the marks brought along."""
    marks = state.marks
    if marks is not None and link.are_marks_known:
        marks = merged(marks, link.marks)
    return replace(
        state, at=Place(link.epoch, Index(0)), skip_below=Index(0), marks=marks, is_at_end=False, failures=0, avoid=""
    )


def _whereabouts(state: Reading, view: ChainView, at: Place) -> tuple[str, LinkView | None]:
    """What stands in the way, or else the link to read; neither where its end was reached."""
    if view.is_deleted:
        return "nothing: the queue was deleted", None
    if state.is_at_end:
        return "", None
    link = view.link(at.epoch)
    if link is None:
        return f"link {at.epoch}, which the chain doesn't have", None
    if link.state is LinkState.OPENING:
        return f"link {at.epoch} to be opened", None
    if link.state is LinkState.LOST:
        return f"the end of link {at.epoch}, which is lost until {link.master} or {link.slave} is back", None
    if link.base is None or not (link.are_marks_known or state.marks is not None):
        return f"the base of link {at.epoch}: the end of an earlier link is lost", None
    if state.is_done:
        return "nothing: all that was asked for is read", None
    return "", link


def _fetching(state: Reading, link: LinkView, now_s: float) -> Step:
    """A fetch is open and gets its credit, or is opened, or has to wait."""
    state, effects = _watched(state, link, now_s)
    fetch = state.fetch
    if fetch is not None:
        more_bytes = _more_credit(state, fetch)
        if more_bytes:
            effects.append(GiveCredit(fetch.fetch_id, more_bytes))
            state = replace(
                state,
                fetch=replace(fetch, credit_bytes=fetch.credit_bytes + more_bytes),
                progress_at_s=now_s if fetch.credit_bytes <= 0 else state.progress_at_s,
            )
        return _waiting(state, ""), effects
    if state.room_bytes < asked_for_bytes(state.limit_bytes):
        return _waiting(state, ""), effects
    # First who had it all when its end was recorded.
    side = link.choice(state.avoid, () if link.end is None else link.answered)
    if side is None:
        return _waiting(state, link.nobody_there), effects
    if now_s < state.retry_at_s:
        return _waiting(state, state.failure), [*effects, WakeAt(state.retry_at_s)]
    return _opened(state, link, side, now_s, effects)


def _more_credit(state: Reading, fetch: Fetch) -> int:
    """What the member may send besides. After silences for one batch, and when it has answered: see `Patience`."""
    if state.patience.is_tried:
        return 1 - fetch.credit_bytes if fetch.is_answered and fetch.credit_bytes <= 0 else 0
    return state.room_bytes if state.room_bytes >= asked_for_bytes(state.limit_bytes) else 0


def _watched(state: Reading, link: LinkView, now_s: float) -> Step:
    """A member that says nothing, or speaks and gives nothing of a sealed link, is left for the other one."""
    fetch, silent_s = state.fetch, _silent_at_s(state)
    if fetch is None or silent_s is None:
        return state, []
    is_owing = link.end is not None and fetch.credit_bytes > 0
    if now_s > silent_s + LATE_S and not state.is_excused:
        # This process slept: what the member said meanwhile hasn't been read yet.
        state = replace(state, heard_at_s=now_s, progress_at_s=now_s, is_excused=True)
    elif now_s >= silent_s and (is_owing or _is_another_there(link, fetch)):
        state = replace(state, patience=state.patience.left())
        return _failed(state, f"it said nothing for {now_s - state.heard_at_s:.3f} s", now_s, order_close=True)
    if not is_owing:
        return state, []
    stalled_at_s = state.progress_at_s + STALL_S
    if now_s < stalled_at_s:
        return state, [WakeAt(stalled_at_s)]
    if state.heard_at_s > state.progress_at_s and fetch.owes_until_s is None:
        return _failed(state, "it sends nothing of a sealed link", now_s, order_close=True)
    return state, []  # what it owes may be on its way: a batch can take longer than that


def _looked(state: Reading, now_s: float) -> Step:
    """Where the chain should show more by now than it does, whoever tells of it may stand still: it is looked at elsewhere."""
    if not _is_behind(state):
        return (state, []) if state.look_at_s is None else (replace(state, look_at_s=None, looks=0), [])
    effects: list[Effect] = []
    if state.look_at_s is None:
        state = replace(state, look_at_s=now_s + BEHIND_FIRST_S)
    elif now_s >= state.look_at_s:
        looks = state.looks + 1
        state = replace(state, look_at_s=now_s + backoff_s(BEHIND_FIRST_S, BEHIND_MAX_S, looks), looks=looks)
        effects.append(LookAtChain())
    if state.fetch is None and state.look_at_s is not None:  # else its member's beats come often enough
        effects.append(WakeAt(state.look_at_s))
    return state, effects


def _is_behind(state: Reading) -> bool:
    """Whether the view is older than what a member says of the link, or shows it as being opened, which takes a moment."""
    link, fetch = _current(state), state.fetch
    if link is None or link.end is not None:
        return False
    return state.is_at_end or link.state is LinkState.OPENING or (fetch is not None and fetch.is_sealed)


def _is_another_there(link: LinkView, fetch: Fetch) -> bool:
    return any(side.member != fetch.member for side in link.registered)


def _opened(state: Reading, link: LinkView, side: Side, now_s: float, effects: list[Effect]) -> Step:
    at = state.at or Place(link.epoch, Index(0))
    credit_bytes = 0 if state.patience.is_tried else state.room_bytes
    fetch = Fetch(state.next_fetch_id, side.member, side.incarnation, credit_bytes)
    effects.append(OpenFetch(fetch.fetch_id, link.epoch, side, at.index, fetch.credit_bytes))
    if link.end is not None:
        effects.append(WakeAt(now_s + STALL_S))
    return replace(
        state,
        fetch=fetch,
        next_fetch_id=state.next_fetch_id + 1,
        progress_at_s=now_s,
        heard_at_s=now_s,
        is_excused=False,
        waiting_for="",
    ), effects
