"""What users run: senders that go on where the queue stands, and readers that tell all they are handed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from types import MethodType
from typing import Any
from unittest import mock

from seriatim.consumer import Consumer, RangeReader, range_reader
from seriatim.consumer.core.rows import decoded
from seriatim.consumer.core.view import Grant, Place
from seriatim.consumer.range_reader import Positions
from seriatim.consumer.session import ReaderSession
from seriatim.consumer.spark.ranges import offset_after, promised_ranges
from seriatim.producer.buffer import Buffer
from seriatim.producer.core.batching import BatchLimits
from seriatim.producer.core.sender import SenderSettings
from seriatim.producer.handle import Handle
from seriatim.producer.loop import LoopSettings, SendingLoop
from seriatim.producer.terms import Elected, Terms
from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.errors import (
    BugError,
    DeadlineOver,
    InvalidArgument,
    OutcomeUnknown,
    RecordTooLarge,
    SeriatimError,
    UnknownSubscription,
)
from seriatim.protocol.names import Epoch, Generation, Index, Offset, SubscriptionId, Token, automatic_seq
from seriatim.protocol.record import Headers, Record
from tests.simulation.ledger import Violation
from tests.simulation.loop import Process
from tests.simulation.queue import Queue
from tests.simulation.world import World

LOG = "log"
MOST_SEEKS = 2
"""Of a reader's own: one that goes back again and again never comes to the end."""
CALL_S = 3.0
"""So long an application waits for a call."""
SMALL_BYTES = 64
"""The limit of a record of some queues."""


def value_of(source: str, seq: int, queue: int) -> bytes:
    """`queue`: its number, so that no two queues have the same."""
    return f"{source}:{seq}:{queue}:{seq * 7919 % 104729}".encode()


def key_of(seq: int) -> bytes | None:
    """Some records have one."""
    return None if seq % 3 else b"%d" % (seq % 7)


def headers_of(seq: int) -> Headers:
    """Some records have one."""
    return () if seq % 4 else (("of", b"%d" % (seq % 5)),)


class Sender:
    """One instance. `has_own_seqs`: as with a database's log, all instances send one sequence, each from the resume point, but
    for what was acknowledged and which the log has let go since: that, the chain has to hold; else each record gets an automatic seq, and `name`, the instance's own or that of all, as its source.
    """

    def __init__(self, world: World, queue: Queue, name: str, *, has_own_seqs: bool, pause_s: float) -> None:
        self._world = world
        self._queue = queue
        self._name = name
        self._has_own_seqs = has_own_seqs
        self._pause_s = pause_s
        self._elected: Elected | None = None
        self._is_new = False
        self._next_seq = 0
        self._sent_in_term = 0
        self._incomplete: set[Handle] = set()

    async def main(self) -> None:
        """One producer after the other, as a supervisor would start them, until this is asked to stop."""
        process = self._world.running()
        while not process.is_stopping:
            await self._produce(process)
            self._elected = None
            await asyncio.sleep(0.5)

    async def _produce(self, process: Process) -> None:
        self._incomplete = set()
        world = self._world
        sizes = world.limits.sizes
        buffer = Buffer(self._name, BatchLimits(sizes.batch_bytes, 0.005), sizes.buffer_bytes, 1.0)
        with mock.patch("asyncio.new_event_loop", lambda: world.loop):  # noqa: PT008 - a mock takes a millisecond to make
            sending = SendingLoop(
                LoopSettings(self._queue.name, self._name, 4.0, is_compressing=False),
                SenderSettings(window_bytes=sizes.window_bytes, window_batches=sizes.window_batches),
                buffer,
                Coordinators(world.coordinator_addresses),
                Terms(self._on_elected, self._on_deposed),
            )
        buffer.wake = sending._wake
        buffer.ends.own_thread = threading.get_ident()  # so that nothing waits here: what would have to is refused
        buffer.when_stopped(sending._closing.set)
        running = asyncio.ensure_future(sending._main())
        while not sending._closing.is_set():
            await asyncio.sleep(self._pause_s)
            if self._elected is not None and not self._queue.is_draining:
                self._send(buffer, sending)
            if process.is_stopping:
                await self._close(buffer, sending, process.patience_s)
        await running
        if self._incomplete:
            world.violated(Violation(f"12: {self._name} is closed, and {len(self._incomplete)} records have no end"))
        if isinstance(buffer.stopped, BugError):
            world.loop.problems.append(f"a producer stopped: {buffer.stopped}")

    async def _close(self, buffer: Buffer, sending: SendingLoop, patience_s: float) -> None:
        """As Producer.close, which waits on a thread of the application's: what was sent before is at its end, or late; then it leaves."""
        incomplete, _ = buffer.flush()
        ends = []
        for shared in incomplete:
            end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            shared.when_done(partial(end.set_result, None))
            ends.append(end)
        if ends:
            await asyncio.wait(ends, timeout=patience_s)
        sending._closing.set()

    def _on_elected(self, elected: Elected) -> None:
        self._elected, self._is_new, self._sent_in_term = elected, True, 0

    def _on_deposed(self, _: str) -> None:
        self._elected = None

    def _send(self, buffer: Buffer, sending: SendingLoop) -> None:
        elected = self._elected
        assert elected is not None
        if self._is_new and self._has_own_seqs:
            if elected.resume_point is None:
                self._elected = None
                sending.stand_again()
                return
            stored = elected.resume_point.get(LOG, -1)
            for seq in range(stored + 1):
                sent = self._queue.ledger.sent.get((LOG, seq))
                if sent is None or sent.acknowledged_at_s is None:
                    self._told(LOG, seq, None, None)
            self._next_seq = self._let_go(stored, elected) + 1
            buffer.take_up(elected.token)
        self._is_new = False
        for _ in range(self._world.chance.randint(1, 4)):
            self._send_one(buffer, elected)

    def _let_go(self, stored: int, elected: Elected) -> int:
        """Up to where nothing can be sent again: all has been acknowledged."""
        ledger = self._queue.ledger
        seq = stored
        while (sent := ledger.sent.get((LOG, seq + 1))) is not None and sent.acknowledged_at_s is not None:
            seq += 1
        if seq > max(stored, elected.held.get(LOG, -1)):
            if ledger.given_up:
                return stored  # as a new snapshot of what was lost
            self._world.violated(Violation(f"8: {LOG}:{seq} was acknowledged, the chain holds {dict(elected.held)}"))
        return seq

    def _send_one(self, buffer: Buffer, elected: Elected) -> None:
        if self._has_own_seqs:
            source, seq = LOG, self._next_seq
        else:
            source, seq = self._name, automatic_seq(elected.token, self._sent_in_term)
        value = value_of(source, seq, self._queue.number)
        own_seq, own_source = (seq, source) if self._has_own_seqs else (None, None)
        key, headers = key_of(seq), headers_of(seq)
        try:
            try:
                # A log's record is the same whoever sends it, whatever the limit is by then.
                filled = value if self._has_own_seqs or seq % 5 else value.ljust(16 * SMALL_BYTES)
                handle = buffer.send(filled, key, headers, own_seq, own_source, None)
            except RecordTooLarge:
                filled = value
                handle = buffer.send(filled, key, headers, own_seq, own_source, None)
        except InvalidArgument:
            return  # it would have to wait
        except SeriatimError:
            return
        self._queue.ledger.sending(source, seq, filled, key, headers)
        if self._has_own_seqs:
            self._next_seq += 1
        else:
            self._sent_in_term += 1
        self._incomplete.add(handle)
        handle.add_done_callback(self._ended)

    def _ended(self, handle: Handle) -> None:
        self._incomplete.discard(handle)
        try:
            end = handle.result(0)
        except OutcomeUnknown:
            self._queue.ledger.unknown += 1
            return
        place = None if end.epoch is None or end.index is None else (end.epoch, end.index)
        self._told(end.source, end.seq, end.offset, place)

    def _told(self, source: str, seq: int, offset: int | None, place: tuple[int, int] | None) -> None:
        self._world.told(self._queue.ledger.told_kept, source, seq, offset, place)


class _Thread:
    """Stands for a reader's own thread: all runs on the one loop."""

    def __init__(self, _: str = "") -> None:
        self.is_running = True

    def tell(self, function: Callable[..., object], *arguments: object) -> None:
        asyncio.get_running_loop().call_soon(function, *arguments)

    def check_may_wait(self) -> None: ...

    def end_when_dropped(self, *_: object) -> None: ...

    def end(self, last: Coroutine[Any, Any, object], timeout_s: float, behind: Callable[[], object]) -> None:
        """Nobody waits for it here: that is `ended`."""
        self.is_running = False

        async def end() -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    await last
            finally:
                behind()

        self.ended = asyncio.ensure_future(end())


class Reader:
    """One instance of a subscription's readers. `pace`: it takes at most so many records at a time, each 0.1 s. `polls`: by `poll`, not one by one.

    `acts`: by this it commits when and as far as it likes, seeks, and asks whether it has all; None: it commits by itself.
    """

    def __init__(
        self,
        world: World,
        queue: Queue,
        name: str,
        subscription: str,
        pace: int = 1000,
        *,
        polls: bool = False,
        acts: random.Random | None = None,
    ) -> None:
        self._world = world
        self._queue = queue
        self._polls = polls
        self._acts = acts
        self._seeks = 0
        self._name = name
        self._subscription = subscription
        self._pace = pace

    async def main(self) -> None:
        """One consumer after the other, as a supervisor would start them where its subscription was deleted."""
        while await self._consume():
            pass

    async def _consume(self) -> bool:
        """A life of it, until this is asked to stop; or True: its subscription was deleted."""
        self._life = object()
        self._grants: dict[int, Grant] = {}
        self._in_hand: list[Record] = []
        self._term = 0
        self._done: tuple[int, Record] | None = None
        self._handed_lately: list[Record] = []
        self._sought = 0
        process = self._world.running()
        self._world.cancel_at_stop()
        consumer = Consumer(
            self._world.coordinator_addresses,
            self._queue.name,
            self._subscription,
            prefetch_bytes=self._world.limits.sizes.prefetch_bytes,
            auto_commit_ms=None if self._acts else 200,
            connect_timeout_s=60.0,
            name=self._name,
        )
        granted = consumer._granted

        def told(_: Consumer, grant: Grant, place: Place) -> None:
            begins = self._queue.ledger.read_granted
            self._world.told(begins, self._subscription, self._life, grant, place.epoch, place.index)
            granted(grant, place)
            self._grants[consumer._hand_over.term] = grant

        consumer._granted = MethodType(told, consumer)  # type: ignore[method-assign]
        while True:
            try:
                await consumer._start()
                break
            except SeriatimError:
                await asyncio.sleep(0.2)
        self._world.at_stop(lambda: None)
        thread = _Thread()
        consumer._thread = thread  # type: ignore[assignment]
        session = consumer._session
        assert session is not None
        self._check_commits(session)
        while True:
            await asyncio.sleep(0.1)
            if process.is_stopping:
                self._note_committed(session)
                self._note_done(consumer)
                consumer.close()
                await thread.ended
                return False
            try:
                consumer._hand_over.check()
            except UnknownSubscription:
                if self._subscription not in self._queue.ledger.deleted:
                    raise
                consumer.close()
                await thread.ended
                return True
            (self._poll if self._polls else self._iterate)(consumer)
            if self._acts:
                await self._act(self._acts, consumer, session)
            self._note_committed(session)

    def _note_committed(self, session: ReaderSession) -> None:
        if session.grant is not None:
            committed = session.committed
            self._queue.ledger.committed(self._subscription, session.grant, committed.epoch, committed.index)

    def _ask_for_more(self) -> None:
        """The application is done with what it has in hand."""
        if self._in_hand:
            self._done = self._term, self._in_hand[-1]
        self._in_hand = []

    def _note_done(self, consumer: Consumer) -> None:
        """It closes: up to where it is done with what it was handed in this term."""
        self._queue.ledger.done.pop(self._name, None)
        if self._acts:
            return  # nothing is committed at the end
        term, record = self._done or (0, None)
        if record is not None and term == consumer._hand_over.term:
            self._queue.ledger.done[self._name] = self._grants[term].generation, (record.epoch, record.index + 1)

    def _check_commits(self, session: ReaderSession) -> None:
        """What is committed by itself, also at the end, is what the application is done with."""
        ask_commit, commit = session.ask_commit, session.commit

        def check(place: Place) -> None:
            in_hand = next((one for one in self._in_hand if (one.epoch, one.index) < (place.epoch, place.index)), None)
            if in_hand is not None:
                found = f"6: {self._subscription} commits up to {place} while {in_hand.offset} is in hand"
                self._world.violated(Violation(found))

        def ask_checked(place: Place) -> None:
            check(place)
            ask_commit(place)

        async def commit_checked(place: Place) -> None:
            check(place)
            grant = session.grant
            await commit(place)
            assert grant is not None
            self._queue.ledger.committed(self._subscription, grant, place.epoch, place.index)

        session.ask_commit = ask_checked  # type: ignore[method-assign]
        session.commit = commit_checked  # type: ignore[method-assign]

    # ---- of its own accord

    async def _act(self, chance: random.Random, consumer: Consumer, session: ReaderSession) -> None:
        """A call of the application's, which waits for it, or none. What is refused, or takes long, is left."""
        call = chance.random()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CALL_S):
                if call < 0.02 and self._seeks < MOST_SEEKS and self._world.may_seek and not self._queue.is_draining:
                    self._seeks += 1
                    await self._seek(chance, session)
                elif call < 0.4:
                    await self._commit(chance, consumer)
                elif call < 0.45:
                    await self._ask_for_end(consumer, session)

    async def _seek(self, chance: random.Random, session: ReaderSession) -> None:
        """Back, over nothing that wasn't read before. What is handed out once that is answered is of there (6)."""
        ledger = self._queue.ledger
        progress = ledger.progress[self._subscription]
        reached = max(progress.delivered, default=0)
        to = "earliest" if ledger.given_up else str(chance.randint(0, reached))
        before = progress.generation
        try:
            await session.seek(to, CALL_S)
        except SeriatimError:
            return
        self._sought = before + 1

    async def _commit(self, chance: random.Random, consumer: Consumer) -> None:
        """All that it was handed, or up to one of its last records: it is done with that."""
        what = chance.choice((None, None, None, *self._handed_lately))
        if consumer._is_committed(what):
            return
        try:
            place = consumer._place_to_commit(what)
        except InvalidArgument as error:
            self._world.violated(Violation(f"6: {self._subscription} can't commit what it was handed: {error}"))
            return
        except SeriatimError:
            return
        self._in_hand = [one for one in self._in_hand if Place(Epoch(one.epoch), Index(one.index)) >= place[1]]
        with contextlib.suppress(SeriatimError):
            await consumer._commit(place)

    async def _ask_for_end(self, consumer: Consumer, session: ReaderSession) -> None:
        """Where it is told to have all, it has all that was acknowledged before it asked (`Consumer.is_at_end`)."""
        ledger, hand_over = self._queue.ledger, consumer._hand_over
        kept = [one for one, sent in ledger.sent.items() if sent.acknowledged_at_s is not None]
        progress, term = ledger.progress[self._subscription], hand_over.term
        if not hand_over.is_open:
            return
        try:
            is_all = await session.is_all_delivered(CALL_S)
        except SeriatimError:
            return
        if not is_all or hand_over.term != term or not consumer._has_all_of(term):
            return
        start = progress.start
        if ledger.given_up or start is None or self._grants[term].generation != progress.generation:
            return
        for identity in kept:
            place = ledger.places.get(identity, ledger.sent[identity].offset or 0)
            if place >= start and place not in progress.delivered:
                self._world.violated(
                    Violation(f"9: {self._subscription} is told to have all, and wasn't handed {identity}")
                )

    def _handed(self, term: int, record: Record) -> None:
        if self._term != term:
            self._handed_lately = []
        self._term = term
        self._handed_lately = [*self._handed_lately[-9:], record]
        delivered = self._queue.ledger.delivered
        grant = self._grants[term]
        if grant.generation < min(self._sought, self._queue.ledger.progress[self._subscription].generation):
            self._world.violated(Violation(f"6: {self._subscription} is handed {record.offset} of before it sought"))
        self._world.told(delivered, self._subscription, (self._life, grant), grant, record)

    def _poll(self, consumer: Consumer) -> None:
        self._ask_for_more()
        self._in_hand = consumer.poll(self._pace, 0)
        for record in self._in_hand:
            self._handed(consumer._handed_out.term, record)

    def _iterate(self, consumer: Consumer) -> None:
        left = self._pace
        while left:
            self._ask_for_more()
            consumer._handed_out.move_past()
            chunk = consumer._take()
            if chunk is None:
                return
            for record in consumer._records_left(chunk):
                self._ask_for_more()
                self._in_hand = [record]
                self._handed(chunk.term, record)
                left -= 1
                if not left:
                    break


class Replay:
    """Reads by offset, from where it was, as a replay does that keeps its own position; a life begins at the first record kept.

    As through Spark: one look at the queue says how far a micro-batch goes, another one what each of its tasks reads, and those
    ask another coordinator, which may be behind.
    """

    NAME = "replay"
    WAIT_S = 10.0

    def __init__(self, world: World, queue: Queue) -> None:
        self._world = world
        self._queue = queue
        self._grant = Grant(SubscriptionId(0), Generation(0), Token(0))

    async def main(self) -> None:
        self._world.cancel_at_stop()
        with mock.patch.object(range_reader, "LoopThread", _Thread):
            prefetch_bytes = self._world.limits.sizes.range_bytes
            addresses = self._world.coordinator_addresses
            driver = RangeReader(addresses, self._queue.name, prefetch_bytes=prefetch_bytes)
            task = RangeReader(addresses.split(",")[::-1], self._queue.name, prefetch_bytes=prefetch_bytes)
        position, known = -1, self._numbering()
        while True:
            await asyncio.sleep(0.3)
            if known != self._numbering():
                position, known = -1, self._numbering()
            with contextlib.suppress(SeriatimError):
                position = await self._read_on(driver, task, position)

    def _numbering(self) -> tuple[int, int]:
        """Changes where offsets stand for other records than before."""
        return self._queue.number, len(self._queue.ledger.given_up)

    async def _read_on(self, driver: RangeReader, task: RangeReader, position: int) -> int:
        """A micro-batch. Returns where the next one begins; raises SeriatimError."""
        chance, numbering = self._world.chance, self._numbering()
        positions = Positions.seen(await driver._describe())
        progress = self._queue.ledger.progress[self.NAME]
        if position < positions.earliest:
            position = progress.start = positions.earliest
        end = max(position, offset_after(positions.spans, position, chance.choice((5, 20, 1000)), positions.end))
        if chance.random() < 0.2:
            await asyncio.sleep(chance.random())
        positions = Positions.seen(await driver._describe())
        if position < positions.earliest:
            return position  # retention was quicker
        session = object()
        for part in promised_ranges(positions, position, end, chance.choice((3, 1000))):
            if numbering == self._numbering():
                await self._read(task, part, numbering, session)
        return end if numbering == self._numbering() else position

    async def _read(self, reader: RangeReader, wanted: range, numbering: object, session: object) -> None:
        """What a task does, until offsets stand for other records. Raises SeriatimError."""
        loop = asyncio.get_running_loop()
        fetcher = await reader._begin(Offset(wanted.start), Offset(wanted.stop))
        deadline_s = loop.time() + self.WAIT_S
        try:
            while not fetcher.state.is_done or reader._waiting:
                if numbering != self._numbering():
                    return
                if reader._error is not None:
                    raise reader._error
                if loop.time() > deadline_s:
                    raise DeadlineOver("nothing came")
                while reader._waiting:
                    delivery = reader._waiting.popleft()
                    for record in decoded(delivery).records(self._queue.name):
                        self._checked(record, wanted, session)
                    if fetcher.taken(delivery.size_bytes):
                        reader._tell_taken(fetcher)
                await asyncio.sleep(0.02)
        finally:
            await reader._end()

    def _checked(self, record: Record, wanted: range, session: object) -> None:
        if record.offset not in wanted:
            self._world.violated(Violation(f"9: {record.offset} was read, {wanted} was asked for"))
        self._world.told(self._queue.ledger.delivered, self.NAME, session, self._grant, record)
