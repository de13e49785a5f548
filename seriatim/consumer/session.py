"""A reader's place among the readers of a subscription: election, token, grant, cursor.

One `ReaderSession` lives on one loop. It stands for election for as long as it runs; while elected it has a grant,
keeps the cursor's commits going, and feeds the fetcher where there is one. What follows from what it hears is decided in
`core.tenure` and `core.cursor`. Nothing of what the reader may do rests on a callback arriving in time: handing out is allowed
up to a moment of its own clock, moved on by each write to its own election node that ZooKeeper answered (H8; reads and
pings prove nothing, H10).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, assert_never

from seriatim.consumer.commits import Commits
from seriatim.consumer.core import cursor, reading_events, tenure
from seriatim.consumer.core.following import Following
from seriatim.consumer.core.rows import Delivery
from seriatim.consumer.core.view import ChainView, Grant, Place
from seriatim.consumer.fetching import Fetcher
from seriatim.consumer.transport import Members
from seriatim.consumer.views import chain_view
from seriatim.protocol import ensemble, log
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.clock import boottime_s
from seriatim.protocol.coordinators import CALL_TIMEOUT_S, Coordinators
from seriatim.protocol.election import Election, Standing, check_name, made_up_name
from seriatim.protocol.errors import (
    DeadlineOver,
    Fenced,
    NotElected,
    SeriatimError,
    SubscriptionExists,
    UnknownSubscription,
    Unreachable,
    Waiting,
    copied,
    defect,
)
from seriatim.protocol.flag import is_set_within
from seriatim.protocol.lease import renewal_interval_s
from seriatim.protocol.names import Epoch, Generation, Index, QueueId, SubscriptionId, Token
from seriatim.protocol.nodes import Paths
from seriatim.protocol.timeouts import SESSION_MAX_S, check_seconds
from seriatim.protocol.zookeeper import NoNode, SessionExpired, SessionState, ZooKeeperSession

_log = log.logger("consumer")

_ACQUIRE_TIMEOUT_S = 5.0
_LAST_STEP_S = 1.0


@dataclass(frozen=True, slots=True)
class ReaderSettings:
    """`start`: where a subscription that isn't there yet starts: earliest, latest or an offset. Times in seconds.

    `name`: of this instance in its election; empty: one is made up. Raises InvalidArgument for what can't be.
    """

    queue: str
    subscription: str
    start: str = "earliest"
    is_created: bool = True
    session_timeout_s: float = 4.0
    connect_timeout_s: float = 10.0
    name: str = ""

    def __post_init__(self) -> None:
        if self.name:
            check_name(self.name, "reader")
        check_seconds("session_timeout_s", self.session_timeout_s, most=SESSION_MAX_S)
        check_seconds("connect_timeout_s", self.connect_timeout_s, may_be_zero=True)

    @property
    def instance(self) -> str:
        """Name of this instance in its election."""
        return self.name or made_up_name()


def _left_s(deadline_s: float) -> float:
    return max(_LAST_STEP_S, deadline_s - boottime_s())


class ReaderSession:
    """See the module. `connect`, then `run` as a task until cancelled, then `close`.

    `on_grant(grant, place)`: a term begins, or the subscription was sought; `on_lease(valid_until_s)`: what it does
    may be done until then, by `boottime_s` (0: it must have stopped); `on_end`: the term is over.
    """

    def __init__(
        self,
        coordinators: str | Iterable[str] | None,
        settings: ReaderSettings,
        *,
        on_grant: Callable[[Grant, Place], object],
        on_lease: Callable[[float], object],
        on_end: Callable[[], object],
        on_failure: Callable[[SeriatimError], object],
    ) -> None:
        self.settings = settings
        self.coordinators = Coordinators(coordinators)
        self.members = Members()
        self._fetcher: Fetcher | None = None
        self._commits = Commits(self.members, self._acquire, self._start_reading, self._or_fail)
        self._on_grant = on_grant
        self._on_lease = on_lease
        self._on_end = on_end
        self._on_failure = on_failure
        self._zookeeper: ZooKeeperSession | None = None
        self._election: Election | None = None
        self._paths = Paths("")
        self._following = Following(QueueId(0), SubscriptionId(0))
        self._tenure = tenure.Tenure()
        self._asking: asyncio.Task[None] | None = None
        self._cause_id = ""
        self._renewal = asyncio.Event()

    @property
    def view(self) -> ChainView | None:
        """The queue, as far as this reader was told; None before anything was."""
        return self._following.view

    @property
    def grant(self) -> Grant | None:
        """What this reader holds; None while it holds nothing."""
        return self._commits.state.grant

    @property
    def waiting_for(self) -> str:
        """Why nothing is granted, for a person."""
        return self._tenure.waiting_for

    @property
    def is_connected(self) -> bool:
        """Whether its ZooKeeper session is known to stand. From any thread."""
        return self._zookeeper is not None and self._zookeeper.state is SessionState.CONNECTED and self.is_live

    @property
    def is_live(self) -> bool:
        """Whether its loop turns, as far as its ZooKeeper session tells. From any thread."""
        return self._zookeeper is None or not self._zookeeper.stands_still

    # ---- life

    async def connect(self) -> None:
        """Find the cluster, the queue and the subscription, and open a session with ZooKeeper.

        Each step has what is left of the time, or a second: who was found is asked. Raises Unreachable, UnknownQueue, UnknownSubscription.
        """
        settings = self.settings
        deadline_s = boottime_s() + settings.connect_timeout_s
        cluster = await self.coordinators.call_within(
            "DescribeCluster", pb.DescribeClusterRequest(), settings.connect_timeout_s
        )
        self._paths = Paths(cluster.cluster)
        view = await self._describe(_left_s(deadline_s))
        subscription_id = await self._find_subscription(view, deadline_s)
        self._following = Following(QueueId(view.queue_id), subscription_id)
        session = ZooKeeperSession(cluster.zookeeper, settings.session_timeout_s)
        await session.start(_left_s(deadline_s))
        self._zookeeper = session
        self._election = Election(session, self._line, settings.instance, self._standing_changed)

    async def _find_subscription(self, view: ChainView, deadline_s: float) -> SubscriptionId:
        """The subscription's id; it is made where it isn't there. Raises UnknownSubscription, Unreachable, DeadlineOver."""
        settings = self.settings
        for one in view.subscriptions:
            if one.name == settings.subscription:
                return one.subscription_id
        if not settings.is_created:
            raise UnknownSubscription(
                f"queue {settings.queue!r} has no subscription {settings.subscription!r}", queue=settings.queue
            )
        request = pb.CreateSubscriptionRequest(
            queue=settings.queue,
            subscription=settings.subscription,
            **{"from": settings.start},
            cause_id=log.new_cause_id("create-subscription"),
        )
        try:
            made = await self.coordinators.call_within("CreateSubscription", request, _left_s(deadline_s))
        except (SubscriptionExists, DeadlineOver) as error:
            # Who said nothing may have made it: the chain tells, and who answers that is asked the next time.
            if isinstance(error, DeadlineOver) and boottime_s() >= deadline_s:
                raise
            return await self._find_subscription(await self._describe(_left_s(deadline_s)), deadline_s)
        return SubscriptionId(made.subscription_id)

    def fetch(self, limit_bytes: int, on_delivery: Callable[[Delivery], object]) -> Fetcher:
        """Read while elected; this is who does. Arguments as of `Fetcher`."""
        on_missed = self.coordinators.compare_watches
        self._fetcher = Fetcher(self.members, limit_bytes, on_delivery, self._refused, on_missed, self._failed)
        return self._fetcher

    async def run(self) -> None:
        """Stand for election, and act while elected, until cancelled."""
        await self._or_fail(self._stand())

    async def _stand(self) -> None:
        election, session = self._election, self._zookeeper
        if election is None or session is None:
            raise Unreachable("the reader isn't connected")
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(ensemble.follow(session, self.coordinators, self._paths))
                tasks.create_task(self._watch())
                tasks.create_task(self._renew())
                tasks.create_task(election.run())
        except* SeriatimError as failures:
            error = failures.exceptions[0]
            self._failed(error if isinstance(error, SeriatimError) else Unreachable(str(error)))

    async def close(self) -> None:
        """Give the election node back and close every connection."""
        self._happened(tenure.Deposed("closed"))
        await self._commits.close()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        if self._fetcher is not None:
            await self._fetcher.stop()
        if self._zookeeper is not None:
            await self._zookeeper.stop()
        await self.members.close()
        await self.coordinators.close()

    def leave(self) -> None:
        """On any thread, behind `close`: end the ZooKeeper session, also where that was cut off before.

        kazoo's thread would keep it alive as long as this process lives, and its node elected, before all who come after it.
        """
        if self._zookeeper is not None:
            self._zookeeper.end()

    # ---- election and lease

    @property
    def _line(self) -> str:
        """Where this subscription's readers stand for election."""
        return self._paths.readers(self._following.queue_id, self._following.subscription_id)

    @property
    def standing(self) -> Standing:
        return Standing.OUT if self._election is None else self._election.standing

    def _standing_changed(self, standing: Standing) -> None:
        if standing is Standing.ELECTED and self._election is not None:
            self._happened(tenure.Elected(self._election.node))
        elif standing is Standing.UNSURE:
            self._happened(tenure.Unsure())
        else:
            waiting_for = "another reader is elected" if standing is Standing.WAITING else "ZooKeeper"
            self._happened(tenure.Deposed(f"standing is {standing}", waiting_for))

    def _happened(self, event: tenure.Event) -> None:
        """Step the core and carry out its orders."""
        self._tenure, effects = tenure.decide(self._tenure, event)
        for effect in effects:
            match effect:
                case tenure.Prove():
                    self._renewal.set()
                case tenure.Ask():
                    self._asking = asyncio.create_task(self._or_fail(self._ask(effect)))
                case tenure.AskAfter(pause_s):
                    self._asking = asyncio.create_task(self._or_fail(self._tick_after(pause_s)))
                case tenure.TakeUp(granted):
                    self._take_up(granted)
                case tenure.ActUntil(until_s):
                    self._on_lease(until_s)
                case tenure.EndTerm(reason):
                    self._end_term(reason)
                case _:
                    assert_never(effect)

    def _end_term(self, reason: str) -> None:
        grant = self.grant
        self._commits.happened(cursor.Deposed())
        if grant is not None:
            _log.info("deposed", queue=self.settings.queue, token=grant.token, reason=reason)
            self._on_end()
        if self._fetcher is not None:
            self._fetcher.happened(reading_events.Stopped())
        self._commits.give_up(
            Fenced(
                "this reader is no longer elected: what isn't committed by now, as this commit may be, is handed out again"
            )
        )

    def _failed(self, error: SeriatimError) -> None:
        """What no waiting mends, as that the queue was deleted: who waits for a commit is told the same as who reads."""
        self._on_failure(error)
        self._commits.give_up(copied(error))
        self._happened(tenure.Failed(str(error)))

    async def _or_fail(self, work: Coroutine[Any, Any, None]) -> None:
        """Of a task that nobody looks at: a bug of our own ends the reader, and says so, where it would else wait for ever."""
        try:
            await work
        except Exception as error:
            _log.exception("reader failed", queue=self.settings.queue)
            self._failed(defect(error, "a reader"))

    async def _renew(self) -> None:
        """Prove again and again that the session lives: by a write, counted from before it was sent (H8, H10)."""
        session = self._zookeeper
        while session is not None:
            sent_s = boottime_s()
            try:
                await self._prove(session, sent_s)
            except (NoNode, SessionExpired, Unreachable) as error:
                _log.debug("lease not renewed", error=error)
            left_s = renewal_interval_s(session.session_timeout_s) - (boottime_s() - sent_s)
            await is_set_within(self._renewal, max(0.02, left_s))
            self._renewal.clear()

    async def _prove(self, session: ZooKeeperSession, sent_s: float) -> None:
        node = self._tenure.lease.holder
        if self._tenure.is_elected:
            await session.set(f"{self._line}/{node}", b"")
            self._happened(tenure.Proved(node, sent_s, session.session_timeout_s))

    # ---- the grant

    def _acquire(self) -> None:
        self._happened(tenure.Wanted())

    async def _tick_after(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        self._happened(tenure.Tick())

    async def _ask(self, order: tenure.Ask) -> None:
        if not order.is_again:
            self._cause_id = log.new_cause_id("acquire-read")
        answer = await self._answer(order)
        if answer is not None:
            self._happened(answer)
        if self.waiting_for:
            _log.debug("no grant yet", queue=self.settings.queue, waiting_for=self.waiting_for, cause_id=self._cause_id)
        self._happened(tenure.AskEnded())

    async def _answer(self, order: tenure.Ask) -> tenure.Event | None:
        """What a coordinator says; None where this reader has failed by it."""
        request = pb.AcquireReadRequest(
            queue=self.settings.queue,
            subscription=self.settings.subscription,
            queue_id=self._following.queue_id,
            election_node=order.node,
            token=order.token,
            cause_id=self._cause_id,
        )
        try:
            reply = await self.coordinators.call_within("AcquireRead", request, _ACQUIRE_TIMEOUT_S)
            return self._read(reply, order.node)
        except Fenced as error:
            return tenure.Overtaken(error.message)
        except NotElected as error:
            # Ours may lag behind, and will tell; or it is another ensemble's.
            if self._election is not None:
                self._election.contradicted()
            return tenure.Unanswered(error.message)
        except SeriatimError as error:
            if error.can_retry:
                return tenure.Unanswered(str(error))
            self._failed(error)
            return None

    def _read(self, reply: pb.AcquireReadReply, node: str) -> tenure.Answered:
        """Raises UnknownSubscription, and IncompatibleVersion as `chain_view`."""
        token = Token(reply.token)
        if reply.WhichOneof("kind") != "grant":
            reasons = "; ".join(f"{one.what}: {one.reason}" for one in reply.wait.reasons) or "the coordinator"
            retry_after_s = max(0.02, reply.wait.retry_after_ms / 1000)
            return tenure.Answered(node, token, waiting_for=reasons, retry_after_s=retry_after_s)
        if reply.grant.subscription_id != self._following.subscription_id:
            # Who reads that one was elected among its readers, and has its token (H16).
            raise UnknownSubscription(
                f"subscription {self.settings.subscription!r} of queue {self.settings.queue!r} was deleted and made again",
                queue=self.settings.queue,
            )
        grant = Grant(self._following.subscription_id, Generation(reply.grant.generation), token)
        head = Place(Epoch(reply.grant.epoch), Index(reply.grant.index))
        return tenure.Answered(node, token, cursor.Granted(chain_view(reply.grant.view), grant, head))

    def _take_up(self, granted: cursor.Granted) -> None:
        view, head = granted.view, granted.head
        _log.info("granted", queue=view.queue, token=granted.grant.token, epoch=head.epoch, index=head.index)
        self._following = self._following.granted(view)
        self._commits.happened(granted)
        self._see(self.view or view)
        if self._fetcher is not None:
            self._fetcher.happened(reading_events.Drained(head.epoch))

    def _refused(self, error: SeriatimError) -> None:
        """A member refused this reader's token or generation: a coordinator knows what holds."""
        _log.info("refused by a member", queue=self.settings.queue, code=error.code, reason=error.message)
        self._acquire()

    # ---- the queue

    async def _describe(self, within_s: float = CALL_TIMEOUT_S, *, only_chain: bool = True) -> ChainView:
        request = pb.QueueRequest(queue=self.settings.queue, only_chain=only_chain, no_elections=True)
        return chain_view(await self.coordinators.call_within("DescribeQueue", request, within_s))

    async def look(self) -> ChainView:
        """The newest view of the queue, with what a coordinator shows now; the watch may be behind."""
        view = await self._describe()
        self._see(view)
        return self.view or view

    async def is_all_delivered(self, within_s: float) -> bool:
        """Whether all that was acknowledged before is delivered, as the cluster tells now; False where nobody can tell.

        Raises Unreachable where no coordinator answers within `within_s`.
        """
        view = await self._describe(within_s, only_chain=False)
        self._see(view)
        return self.view is view and self._fetcher is not None and self._fetcher.settled.has_all_of(view)

    async def _watch(self) -> None:
        async for queue_view in self.coordinators.watch(self.settings.queue):
            view = chain_view(queue_view)
            self._see(view)
            gone = self._following.what_is_gone(view, self.settings.queue, self.settings.subscription)
            if gone is not None:
                raise gone

    def _see(self, view: ChainView) -> None:
        self._following = self._following.told(view)
        if self.view is not view or self.grant is None:
            return
        self._commits.happened(cursor.ViewChanged(view))
        if self._fetcher is not None:
            self._fetcher.happened(reading_events.ViewChanged(view))
            self.members.connect(view.ahead)

    # ---- the cursor

    @property
    def committed(self) -> Place:
        """What the members have, while there is a grant."""
        return self._commits.state.committed

    async def commit(self, place: Place) -> None:
        """Commit everything before `place`, and wait until the members have it.

        Raises NotElected without a grant, Fenced where the term ends first, OlderGeneration where somebody seeks.
        """
        if self.grant is None:
            raise NotElected("this reader isn't elected", queue=self.settings.queue)
        await self._commits.commit(place)

    def ask_commit(self, place: Place) -> None:
        """Commit everything before `place`, some time soon."""
        if self.grant is not None:
            self._commits.ask(place)

    def _start_reading(self, start: cursor.StartReading) -> None:
        self._on_grant(start.grant, start.place)
        if self._fetcher is not None:
            self._fetcher.happened(reading_events.ReadFrom(start.view, start.place, start.is_end, grant=start.grant))

    # ---- seek

    async def seek(self, to: str, timeout_s: float) -> None:
        """Move the very subscription that this reader stands for (H16), and wait until its grant is of there, or it isn't elected.

        Raises Waiting where nobody could tell where that is, DeadlineOver where it may have been moved, or was.
        """
        deadline_s = boottime_s() + timeout_s
        moved = await self._sought(to, deadline_s)
        generation = Generation(moved.generation)
        if self.grant is not None and self.grant.generation < generation:
            self._acquire()
        while self.grant is not None and self.grant.generation < generation:
            if boottime_s() > deadline_s:
                raise DeadlineOver(
                    f"the subscription was moved, but within {timeout_s} s this reader wasn't granted its new position"
                )
            await asyncio.sleep(0.01)

    async def _sought(self, to: str, deadline_s: float) -> pb.SubscriptionView:
        request = pb.SeekSubscriptionRequest(
            queue=self.settings.queue,
            subscription=self.settings.subscription,
            to=to,
            cause_id=log.new_cause_id("seek"),
            queue_id=self._following.queue_id,
            subscription_id=self._following.subscription_id,
        )
        while True:
            # A coordinator that stands still is found out first: who moves a subscription is asked once, and waited for to the end.
            await self.coordinators.call_within(
                "DescribeCluster", pb.DescribeClusterRequest(), deadline_s - boottime_s()
            )
            left_s = deadline_s - boottime_s()
            try:
                moved: pb.SubscriptionView = await self.coordinators.call_within(
                    "SeekSubscription", request, left_s, left_s
                )
            except Waiting:  # in the middle of a switch, say; nothing was done
                if boottime_s() + tenure.RETRY_S >= deadline_s:
                    raise
            else:
                return moved
            await asyncio.sleep(tenure.RETRY_S)
