"""Carries out what a procedure of the core orders, and tells it what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from seriatim.coordinator.core import acquire_read, acquire_send, background, chain
from seriatim.coordinator.core.acquire_read import ReadRequest
from seriatim.coordinator.core.acquire_send import SendRequest
from seriatim.coordinator.core.background import TellEnd
from seriatim.coordinator.core.events import (
    Answer,
    ChainConflict,
    ChainRead,
    ChainWritten,
    Effect,
    Effects,
    ElectionSeen,
    Event,
    KeptSealsRead,
    LinkClosed,
    LinkOpened,
    LookUpElection,
    LookUpSessions,
    OpenFailed,
    ReadChain,
    ReaderNotTold,
    ReaderTold,
    ReadGrant,
    ReadKeptSeals,
    Refused,
    SealAnswered,
    SealFailed,
    SendGrant,
    SendOpen,
    SendSeal,
    SessionsSeen,
    TellReader,
    Wait,
    WakeAfter,
    Woken,
    WriteChain,
)
from seriatim.coordinator.core.seal import Wholeness
from seriatim.coordinator.members import Members
from seriatim.coordinator.store import Store
from seriatim.protocol import log
from seriatim.protocol.chain import ChainDocument, LinkState
from seriatim.protocol.clock import now_ms
from seriatim.protocol.errors import BugError, DeadlineOver, InvariantBroken, SeriatimError
from seriatim.protocol.names import Epoch, Index, QueueId, Token
from seriatim.protocol.sharing import shared

_log = log.logger("coordinator")
GIVE_WAY_S = 0.1
"""So long what nobody waits for gives way to a switch; one that waits for members is not to hold it up."""
ENDS_AFTER_S = 0.2
"""So long whoever writes a link's end leaves it to the elected coordinator to tell the members, which does so at once."""
State = TypeVar("State")
Result = SendGrant | ReadGrant | LinkClosed | Wait


class Execution:
    """Runs procedures. `timeout_s`: after that long, the caller is told to come again. `is_elected`: among the coordinators."""

    def __init__(self, store: Store, members: Members, timeout_s: float, is_elected: Callable[[], bool]) -> None:
        self._store = store
        self._members = members
        self._timeout_s = timeout_s
        self._is_elected = is_elected
        self._tasks: set[asyncio.Task[None]] = set()
        self._switches: dict[tuple[QueueId, Token, Epoch], asyncio.Task[Result]] = {}
        self._slow_switches: dict[QueueId, tuple[Epoch, LinkState] | None] = {}

    async def close(self) -> None:
        """Give up what is still on its way to members."""
        under_way = [*self._switches.values(), *self._tasks]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    async def give_way(self) -> None:
        """Wait until the switches that senders wait for here are done, but no longer than GIVE_WAY_S."""
        if self._switches:
            await asyncio.wait(set(self._switches.values()), timeout=GIVE_WAY_S)

    async def give_way_in(self, queue_id: QueueId) -> None:
        """Wait until this queue is in no switch, whoever makes it, as far as its chain is known here; no longer than GIVE_WAY_S.

        A write between two of a switch's own costs it a compare-and-set, and the sender that waits a reading, a decision and a write.
        A switch that was waited for in vain holds up nothing more: it waits for members.
        """
        changed = asyncio.Event()
        stop = self._store.on_change(changed.set)
        try:
            async with asyncio.timeout(GIVE_WAY_S):
                while self._switch(queue_id) not in (None, self._slow_switches.get(queue_id)):
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            kept = {one: slow for one, slow in self._slow_switches.items() if one in self._store.chains}
            self._slow_switches = {**kept, queue_id: self._switch(queue_id)}
        finally:
            stop()

    def _switch(self, queue_id: QueueId) -> tuple[Epoch, LinkState] | None:
        seen = self._store.chains.get(queue_id)
        return None if seen is None else chain.switch_of(seen.document)

    async def acquire_send(self, queue_id: QueueId, request: SendRequest, cause_id: str) -> Result:
        """Run AcquireSend. Raises as `run`.

        Whoever reports the same failure under the same token while a switch is under way shares its answer: a planned
        switch and the sender that meets it, a sender that asks again.
        """
        begun = acquire_send.start(request)
        if request.token == 0 or request.failed_epoch == 0:
            return await self.run(queue_id, begun, acquire_send.step, cause_id)
        key = queue_id, request.token, request.failed_epoch
        switch = self._switches.get(key)
        if switch is None:
            work = self.run(queue_id, begun, acquire_send.step, cause_id)
            switch = self._switches[key] = asyncio.get_running_loop().create_task(work)
            switch.add_done_callback(lambda _: self._switches.pop(key))
        return await shared(switch)

    async def acquire_read(self, queue_id: QueueId, request: ReadRequest, cause_id: str) -> Result:
        """Run AcquireRead. Raises as `run`."""
        return await self.run(queue_id, acquire_read.start(request), acquire_read.step, cause_id)

    async def run(
        self,
        queue_id: QueueId,
        begun: tuple[State, Effects],
        step: Callable[[State, Event, int], tuple[State, Effects]],
        cause_id: str,
    ) -> Result:
        """Run a procedure to its answer.

        Raises what ZooKeeper raised, the error of a `Refused`, or DeadlineOver. A call under way to a member is left to
        its own deadline: it may have begun to do what it was told.
        """
        run = _Run(self._store, self._members, queue_id, cause_id)
        turn = _Turn(self._store.lines.of(queue_id))
        state, effects = begun
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    await turn.suit(effects)
                    for effect in effects:
                        if isinstance(effect, Answer):
                            if isinstance(effect.result, Refused):
                                raise effect.result.error
                            return effect.result
                        self._spawn(run.carry_out(effect))
                    event = await run.next_event()
                    state, effects = step(state, event, now_ms())
        except TimeoutError as error:
            raise DeadlineOver(f"not done within {self._timeout_s} s", cause_id=cause_id) from error
        finally:
            turn.end()
            if run.ends and not self._is_elected():
                self._spawn(self._tell_ends(run.ends, cause_id))

    async def _tell_ends(self, ends: Sequence[TellEnd], cause_id: str) -> None:
        """Once: the elected coordinator, this one or the next, tells them until they have it."""
        await asyncio.sleep(ENDS_AFTER_S)
        await asyncio.gather(*(self._tell_end(end, cause_id) for end in ends))

    async def _tell_end(self, end: TellEnd, cause_id: str) -> None:
        try:
            await self._members.record_end(end, cause_id)
        except SeriatimError as error:
            _log.debug("end not told", member=end.member, epoch=end.link.epoch, error=error, cause_id=cause_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Turn:
    """Of one run, in its queue's line: from reading to writing. Behind that members are asked, and nobody waits for those but who asks."""

    def __init__(self, line: asyncio.Lock) -> None:
        self._line = line
        self._has_come = False

    async def suit(self, effects: Effects) -> None:
        """Before these are carried out: wait for it where they lead to a write, end it where they no longer do."""
        if not all(isinstance(one, ReadChain | LookUpElection | WriteChain) for one in effects):
            self.end()
        elif not self._has_come and any(isinstance(one, ReadChain) and one.leads_to_write for one in effects):
            await self._line.acquire()
            self._has_come = True

    def end(self) -> None:
        if self._has_come:
            self._has_come = False
            self._line.release()


class _Run:
    """One run of one procedure: its round, the chain it read last, and what it is still to be told. `ends`: that it has recorded."""

    def __init__(self, store: Store, members: Members, queue_id: QueueId, cause_id: str) -> None:
        self._store = store
        self._members = members
        self._queue_id = queue_id
        self._cause_id = cause_id
        self.ends: tuple[TellEnd, ...] = ()
        self._round = 0
        self._queue: ChainDocument | None = None
        self._told: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()

    async def next_event(self) -> Event:
        """What an effect of this round brought next. Raises what ZooKeeper raised."""
        while True:
            number, event = await self._told.get()
            if isinstance(event, Exception):
                raise event
            if number == self._round:
                return event

    def carry_out(self, effect: Effect) -> Coroutine[Any, Any, None]:
        """Begin with an effect; the coroutine brings its event."""
        if isinstance(effect, ReadChain | WriteChain):
            self._round += 1
        return self._bring(effect, self._round)

    async def _bring(self, effect: Effect, number: int) -> None:
        try:
            event: Event | Exception = await self._event(effect)
        except Exception as error:  # handed to the procedure's caller, whatever it is
            event = error
        self._told.put_nowait((number, event))

    async def _event(self, effect: Effect) -> Event:
        match effect:
            case ReadChain():
                return await self._chain_read(effect)
            case WriteChain():
                return await self._written(effect)
            case LookUpSessions(group):
                return SessionsSeen(await self._store.look_up_registry([group]))
            case LookUpElection(subscription_id):
                return ElectionSeen(await self._store.first_in_line(self._queue_id, subscription_id))
            case ReadKeptSeals(link):
                return KeptSealsRead(await self._store.kept_seals(self._queue_id, link.epoch))
            case WakeAfter(delay_ms):
                await asyncio.sleep(delay_ms / 1000)
                return Woken()
            case SendOpen():
                return await self._opened(effect)
            case SendSeal():
                return await self._sealed(effect)
            case TellReader():
                return await self._reader_told(effect)
            case Answer():
                raise InvariantBroken("an answer is no order to carry out")

    async def _chain_read(self, effect: ReadChain) -> Event:
        seen = self._store.chains.get(self._queue_id) if effect.may_be_remembered else None
        if seen is not None:
            self._queue = seen.document
            return ChainRead(seen.document, seen.version, self._store.registry, is_remembered=True)
        if effect.is_newest:
            await self._store.catch_up()
        self._queue, version = await self._store.read_chain(self._queue_id)
        return ChainRead(self._queue, version, self._store.registry)

    async def _written(self, effect: WriteChain) -> Event:
        is_late = await self._leads_to_drained(effect.document)
        version = None if is_late else await self._store.write_chain(effect.document, effect.expected)
        keys = {"queue": effect.document.name, "what": effect.what, "cause_id": self._cause_id}
        if version is None:
            _log.info("chain had changed", **keys)
            return ChainConflict()
        _log.info("chain written", **keys, version=version)
        if self._queue is not None:
            self.ends += background.ends_written(self._queue, effect.document, version, self._store.registry)
        self._queue = effect.document
        return ChainWritten(version)

    async def _leads_to_drained(self, document: ChainDocument) -> bool:
        """Whether a link would be listed for a group that comes back to the send list with it, and is being drained by now.

        Whoever drains it has set the mark before writing the chain that was read, but what is remembered may show that later; no
        compare-and-set would refuse the write. A group that was on the send list then is off it after a drain, unless the queue was
        made meanwhile: its first link's is looked up, too.
        """
        before, last = self._queue, document.last_link
        if before is None or last is None or last.state is not LinkState.OPENING:
            return False
        would_be_off = before.next_epoch > 1 and last.group != chain.serving(before)
        if last.group in before.send_list and (last == before.last_link or would_be_off):
            return False
        return (await self._store.look_up_registry([last.group])).group(last.group).is_draining

    async def _opened(self, effect: SendOpen) -> Event:
        place = effect.side.name.member
        if self._queue is None:
            raise InvariantBroken("OpenLink before the chain was read")
        try:
            return LinkOpened(place, await self._members.open_link(effect, self._queue, self._cause_id))
        except SeriatimError as error:
            self._note_failure("link not opened", effect.side.name, effect.link.epoch, error)
            return OpenFailed(place, error)

    async def _sealed(self, effect: SendSeal) -> Event:
        place = effect.side.name.member
        try:
            answer = await self._members.seal(effect, self._queue_id, self._cause_id)
        except SeriatimError as error:
            self._note_failure("link not sealed", effect.side.name, effect.link.epoch, error)
            return SealFailed(place, error)
        if answer.wholeness is not Wholeness.WHOLE:
            _log.lasting(
                "seal not whole",
                member=effect.side.name,
                epoch=effect.link.epoch,
                answer=answer.wholeness,
                reason=answer.reason,
                cause_id=self._cause_id,
            )
        return SealAnswered(place, answer)

    async def _reader_told(self, effect: TellReader) -> Event:
        place = effect.member.member
        try:
            reply = await self._members.tell_reader(effect, self._queue_id, self._cause_id)
        except SeriatimError as error:
            self._note_failure("reader not told", effect.member, effect.link.epoch, error)
            return ReaderNotTold(place, error)
        cursor = Index(reply.cursor) if reply.has_cursor else None
        return ReaderTold(place, cursor, reply.is_stale, Token(reply.by))

    def _note_failure(self, what: str, member: object, epoch: int, error: SeriatimError) -> None:
        """A link may be lost for days, and is tried again each second."""
        note = _log.error if isinstance(error, BugError) else _log.lasting
        note(
            what,
            queue_id=self._queue_id,
            epoch=epoch,
            member=member,
            code=error.code,
            reason=error.message,
            cause_id=self._cause_id,
        )
