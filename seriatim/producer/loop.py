"""The producer's own thread: an asyncio loop that runs the core's effects and hands it what comes of them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_never

from seriatim.producer.buffer import Buffer
from seriatim.producer.core import events
from seriatim.producer.core.sender import decide, wake_at_s
from seriatim.producer.core.sender_state import Phase, SenderSettings, SenderState
from seriatim.producer.handle import SharedBatch
from seriatim.producer.route import Route
from seriatim.producer.terms import Elected, Terms
from seriatim.protocol import ensemble, log, rpc
from seriatim.protocol.batch import encode
from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.election import Election, Standing
from seriatim.protocol.errors import (
    BugError,
    CallerError,
    DeadlineOver,
    InvalidArgument,
    NotElected,
    SeriatimError,
    Unreachable,
    Waiting,
    WorldError,
)
from seriatim.protocol.flag import set_from_anywhere
from seriatim.protocol.names import Epoch, Index, QueueId, Token
from seriatim.protocol.nodes import Paths
from seriatim.protocol.seriatim_pb2 import (
    AcquireSendReply,
    AcquireSendRequest,
    DescribeClusterRequest,
    QueueRequest,
    SendGrant,
)
from seriatim.protocol.zookeeper import SessionState, ZooKeeperSession

_log = log.logger("producer")

ACQUIRE_TIMEOUT_S = 5.0
_CONNECT_RETRY_S = 0.5
_LAST_S = 30.0
"""So long a producer that was dropped goes on with what it has, as `close` does."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """`queue` and `name` as the user gave them; `session_timeout_s` of the ZooKeeper session."""

    queue: str
    name: str
    session_timeout_s: float
    is_compressing: bool


class SendingLoop:
    """Runs one sender until `close`.

    `terms` are told on its thread. An error that ends the sender is put into the buffer, where the application meets it.
    """

    def __init__(
        self,
        settings: LoopSettings,
        sender_settings: SenderSettings,
        buffer: Buffer,
        coordinators: Coordinators,
        terms: Terms,
    ) -> None:
        self._settings = settings
        self._sender_settings = sender_settings
        self._buffer = buffer
        self._coordinators = coordinators
        self._terms = terms
        self._state = SenderState()
        self._batches: dict[int, SharedBatch] = {}
        self._route = Route(self._spawn, self._handle)
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._election: Election | None = None
        self._session: ZooKeeperSession | None = None
        self._election_task: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._master = ""
        self._failure: Unreachable | None = None
        """Of the last link, as long as nothing has ended as stored since."""
        self._cluster = ""
        self._queue_id = QueueId(0)
        self._loop = asyncio.new_event_loop()
        self._is_wake_due = False
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"seriatim-producer-{settings.queue}", daemon=True)

    def start(self) -> None:
        self._buffer.wake = self._wake
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Leave the election and end the thread, waiting so long for it. What isn't complete fails as outcome unknown."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._closing.set)
            if timeout_s:
                self._thread.join(timeout_s)

    def close_behind_last(self) -> bool:
        """Close once all that was sent is at its end, by another thread, and not waited for. False: it is closed already, or not of this process.

        As a finalizer's work, which may have interrupted anybody: no lock is taken, and nothing logged, before that thread has its turn.
        """
        if self._closing.is_set() or self._buffer.ends.is_in_parent:
            return False
        try:
            self._loop.call_soon_threadsafe(self._dropped)
        except RuntimeError:
            return False
        return True

    def _dropped(self) -> None:
        _log.warning("not closed, and nobody has it any more: it closes itself", queue=self._settings.queue)
        self._spawn(self._close_behind_last())

    async def _close_behind_last(self) -> None:
        try:
            async with asyncio.timeout(_LAST_S):
                await all_done(self._buffer.flush()[0])
        except TimeoutError:
            pass
        finally:
            self._closing.set()

    def tell_what_is_left(self) -> None:
        """Where the process ends: nobody waits for this thread then, and what `send` took went without a word."""
        if not (self._closing.is_set() or self._buffer.ends.is_in_parent):
            incomplete, _ = self._buffer.flush()
            if incomplete:
                records = sum(shared.count for shared in incomplete)
                _log.warning(
                    "not closed at the end of the process: records may be lost",
                    queue=self._settings.queue,
                    records=records,
                )

    @property
    def is_live(self) -> bool:
        """Whether it turns, as far as its session tells. From any thread."""
        session = self._session
        return self._thread.is_alive() and not (session is not None and session.stands_still)

    @property
    def is_connected(self) -> bool:
        """Whether its ZooKeeper session is known to stand. From any thread."""
        session = self._session
        return session is not None and session.state is SessionState.CONNECTED and self.is_live

    def stand_again(self) -> None:
        """Leave the election and stand for it anew, with a new token and a new resume point. From any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._handle, events.Withdrawn())

    # ---- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._buffer.ends.own_thread = threading.get_ident()
        self._loop.set_exception_handler(rpc.ignore_shared_poller)
        asyncio.set_event_loop(self._loop)
        try:
            self._run_main()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            rpc.forget(self._loop)
            self._loop.close()
            self._buffer.ends.own_thread = None  # another thread may have the same number from now on

    def _run_main(self) -> None:
        """Until the end, whatever comes: no record stays without one, and the session doesn't outlive its thread."""
        main = self._loop.create_task(self._main())
        while not main.done():
            try:
                self._loop.run_until_complete(main)
            except asyncio.CancelledError:
                continue  # as asked for below
            except BaseException as error:  # SystemExit, above all, leaves a loop at once
                _log.exception("producer stopped", queue=self._settings.queue)
                self._give_up(_as_ours(error))
                if not main.cancelling():
                    main.cancel()

    def _give_up(self, error: SeriatimError) -> None:
        self._buffer.stop(error)
        self._buffer.depose(str(error), self._batches.values())
        self._batches.clear()

    async def _main(self) -> None:
        closing = asyncio.create_task(self._closing.wait())
        connecting = asyncio.create_task(self._connect())
        try:
            await asyncio.wait((connecting, closing), return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                return
            session = self._session = await connecting
            paths = Paths(self._cluster)
            path = paths.senders(self._queue_id)
            self._election = Election(session, path, self._settings.name, self._standing_changed)
            self._stand()
            self._spawn(ensemble.follow(session, self._coordinators, paths))
            await closing
            self._handle(events.Closed())
        except Exception as error:
            if not isinstance(error, CallerError):
                _log.exception("producer stopped", queue=self._settings.queue)
            self._give_up(_as_ours(error))
            await closing
        finally:
            closing.cancel()
            connecting.cancel()
            (connected,) = await asyncio.gather(connecting, return_exceptions=True)
            await self._end(None if isinstance(connected, BaseException) else connected)

    async def _end(self, session: ZooKeeperSession | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._give_up(InvalidArgument("the producer was closed"))
            if session is not None:
                await session.stop()
        await self._route.close()
        await self._coordinators.close()

    async def _connect(self) -> ZooKeeperSession:
        """Learn where ZooKeeper is and which queue is meant, and start a session; again and again until it works."""
        told = ""
        while True:
            try:
                cluster = await self._coordinators.call("DescribeCluster", DescribeClusterRequest(), ACQUIRE_TIMEOUT_S)
                cause_id = log.new_cause_id("producer-start")
                asked = QueueRequest(queue=self._settings.queue, cause_id=cause_id, only_chain=True)
                view = await self._coordinators.call("DescribeQueue", asked, ACQUIRE_TIMEOUT_S)
                self._cluster = cluster.cluster
                self._queue_id = QueueId(view.queue_id)
                session = ZooKeeperSession(cluster.zookeeper, self._settings.session_timeout_s)
                await session.start(ACQUIRE_TIMEOUT_S)
                self._buffer.note(NotElected("not in line of the queue's senders yet"))
                return session
            except (WorldError, BugError) as error:
                self._buffer.note(error)
                if told != (told := error.message):
                    _log.warning("not connected yet", queue=self._settings.queue, error=told)
                await asyncio.sleep(_CONNECT_RETRY_S)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """A bug of our own: the sender ends, and says so; what isn't complete ends as unknown, also what the core doesn't know of."""
        reason = _as_ours(error)
        _log.error("producer stopped", queue=self._settings.queue, error=reason)
        self._give_up(reason)
        try:
            if self._state.phase is not Phase.ENDED:
                self._step(events.Closed())
        finally:
            self._leave()

    # ---- events ------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """From any thread, with the buffer's lock held: there is something to take."""
        if not self._is_wake_due:
            try:
                self._is_wake_due = True
                self._loop.call_soon_threadsafe(self._woken)
            except RuntimeError:
                return  # the loop is closed: the buffer is stopped or will be at once
            except BaseException:
                self._is_wake_due = False  # by Ctrl-C, say: it may not have been called
                raise

    def _woken(self) -> None:
        self._is_wake_due = False
        self._go_on()

    def _stand(self) -> None:
        if self._election is not None:
            self._election_task = self._spawn(self._election.run())

    def _standing_changed(self, standing: Standing) -> None:
        if self._state.phase is Phase.ENDED:
            return
        if standing is Standing.ELECTED:
            self._buffer.note(
                NotElected("first in line of the queue's senders: a coordinator was asked, and hasn't answered yet")
            )
            self._handle(events.Elected())
        else:
            reason = self._why_not_elected(standing)
            self._handle(events.Deposed(reason))
            self._buffer.note(NotElected(reason))  # also where it stood by: for something else than before

    def _why_not_elected(self, standing: Standing) -> str:
        if standing is Standing.WAITING:
            return "standing by: not first in line of the queue's senders"
        if self._session is None or self._session.state is not SessionState.CONNECTED:
            return "ZooKeeper doesn't answer: nobody can tell who is first in line of the queue's senders"
        return "its place in line of the queue's senders is gone"

    def _ticked(self) -> None:
        self._timer = None
        self._handle(events.Tick())

    def _handle(self, event: events.Event) -> None:
        try:
            self._step(event)
        except Exception as error:
            self._fail(error)
            return
        self._go_on()

    def _step(self, event: events.Event) -> None:
        self._state, effects = decide(self._state, event, time.monotonic(), self._sender_settings)
        for effect in effects:
            self._run_effect(effect)

    def _go_on(self) -> None:
        """Take what may be sent now, and set the one timer."""
        try:
            self._take()
        except Exception as error:  # whatever it is: with the next batch there would be a hole in the order
            self._fail(error)
            return
        if self._state.phase is Phase.SENDING and not self._batches and self._buffer.is_spent:
            self._handle(events.Withdrawn())  # and all is complete: nothing of it ends as unknown
            return
        due_at_s = wake_at_s(self._state, self._sender_settings)
        if self._has_window():
            closes_in_s = self._buffer.closes_in_s(self._state.in_flight)
            if closes_in_s is not None:
                closes_at_s = time.monotonic() + closes_in_s
                due_at_s = closes_at_s if due_at_s is None else min(due_at_s, closes_at_s)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_at_s is not None:
            self._timer = self._loop.call_later(max(0.0, due_at_s - time.monotonic()), self._ticked)

    def _has_window(self) -> bool:
        state, settings = self._state, self._sender_settings
        return (
            state.phase is Phase.SENDING
            and state.in_flight == len(state.pending)
            and state.in_flight < settings.window_batches
            and state.in_flight_bytes < settings.window_bytes
        )

    def _take(self) -> None:
        while self._has_window():
            taken = self._buffer.take(self._state.in_flight)
            if taken is None:
                return
            shared, columns = taken
            self._batches[shared.number] = shared
            batch = encode(columns, self._state.next_index, compress=self._settings.is_compressing)  # where it will go
            self._step(events.BatchClosed(shared.number, batch))

    # ---- effects -----------------------------------------------------------------------------------------------

    def _run_effect(self, effect: events.Effect) -> None:
        match effect:
            case events.Send():
                self._route.send(effect.batch)
            case events.Complete() | events.Resume():
                self._end_records(effect)
            case events.FailAll():
                self._end_term(effect.reason)
            case events.Acquire():
                self._asking = self._spawn(self._acquire(effect))
            case events.OpenStream():
                self._route.open(effect, self._cluster, self._queue_id)
            case events.CloseStream():
                self._route.close_stream()
            case events.TellElected(token, grant):
                self._buffer.elect(token, grant.resume_point, grant.held)
                _log.info("elected", queue=self._settings.queue, token=token)
                self._terms.begin(Elected(token, grant.resume_point, grant.held, grant.given_up_from))
            case events.TellDeposed():
                _log.info("deposed", queue=self._settings.queue, reason=effect.reason)
                self._terms.depose(effect.reason)
            case events.StandAgain():
                self._spawn(self._stand_again())
            case events.Stop():
                _log.error("producer stopped", queue=self._settings.queue, error=effect.error)
                self._give_up(effect.error)
                self._leave()
            case _:
                assert_never(effect)

    def _end_term(self, reason: str) -> None:
        self._failure = None
        if self._asking is not None:
            self._asking.cancel()  # its token, which nobody waits for any more, would fence the next term's
        failed = [self._batches[number] for number in sorted(self._batches)]
        self._batches.clear()
        self._buffer.depose(reason, failed)

    def _end_records(self, effect: events.Complete | events.Resume) -> None:
        if self._failure is not None:
            self._failure = None
            self._buffer.note(_full())
        shared = self._batches[effect.number]
        if isinstance(effect, events.Complete):
            shared.epoch, shared.first_index, shared.base = effect.epoch, effect.first_index, effect.base
        else:
            shared.resume(effect.marks)
            if not effect.is_whole:
                return
        del self._batches[effect.number]
        self._buffer.complete(shared)

    def _leave(self) -> None:
        """Let another instance be elected: this one is done."""
        if self._election_task is not None:
            self._election_task.cancel()

    async def _stand_again(self) -> None:
        task = self._election_task
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._stand()

    async def _acquire(self, effect: events.Acquire) -> None:
        request = AcquireSendRequest(
            queue=self._settings.queue,
            queue_id=self._queue_id,
            election_node="" if self._election is None else self._election.node,
            token=effect.token,
            failed_epoch=effect.failed_epoch,
            failure=effect.failure,
            cause_id=log.new_cause_id("acquire-send"),
        )
        if effect.failed_epoch:
            _log.info(
                "link failed", queue=self._settings.queue, epoch=effect.failed_epoch, failure=effect.failure,
                cause_id=request.cause_id,
            )  # fmt: skip
            self._failure = Unreachable(f"the master at {self._master} failed: {effect.failure}")
            self._buffer.note(self._failure)
        try:
            reply: AcquireSendReply = await self._coordinators.call("AcquireSend", request, ACQUIRE_TIMEOUT_S)
        except SeriatimError as error:
            self._buffer.note(error)
            if isinstance(error, NotElected) and self._election is not None:
                self._election.contradicted()
            self._handle(events.AcquireFailed(effect.request, error))
            return
        token = Token(reply.token)
        if reply.WhichOneof("kind") == "wait":
            reasons = [f"{reason.what}: {reason.reason}" for reason in reply.wait.reasons]
            self._buffer.note(Waiting(f"no group can take records ({'; '.join(reasons)})", reasons=reasons))
            self._handle(events.WaitAnswered(effect.request, token, reply.wait.retry_after_ms / 1000))
        else:
            self._note_grant(reply.grant, request.cause_id)
            self._handle(events.Granted(effect.request, token, _as_event(reply.grant)))

    def _note_grant(self, grant: SendGrant, cause_id: str) -> None:
        self._buffer.set_record_limit(grant.max_record_bytes)
        _log.info("granted", queue=self._settings.queue, epoch=grant.epoch, master=grant.master.address,
                  next_index=grant.next_index, cause_id=cause_id)  # fmt: skip
        self._master = grant.master.address
        self._buffer.note(self._failure or _full())


def _as_event(grant: SendGrant) -> events.Grant:
    return events.Grant(
        Epoch(grant.epoch),
        Index(grant.next_index),
        dict(grant.resume_point) if grant.is_resume_known else None,
        grant.base if grant.has_base else None,
        grant,
        dict(grant.held),
        dict(grant.given_up_from),
    )


async def all_done(batches: Iterable[SharedBatch]) -> None:
    """Wait until all of them are at their end, on any loop."""
    loop = asyncio.get_running_loop()
    for shared in batches:
        is_done = asyncio.Event()
        shared.when_done(partial(set_from_anywhere, is_done, loop))
        await is_done.wait()


def _full() -> SeriatimError:
    """What is waited for where nothing is wrong."""
    return DeadlineOver("the buffer is full: records come faster than they are stored")


def _as_ours(error: BaseException) -> SeriatimError:
    return error if isinstance(error, SeriatimError) else BugError(f"{type(error).__name__}: {error}")
