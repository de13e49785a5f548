"""What is handed out, passed and committed by itself, with deliveries put by hand: whatever interrupts, nothing is lost or passed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from seriatim.consumer import client, fetching, handover, loop, range_reader
from seriatim.consumer.client import Consumer
from seriatim.consumer.core import handed_out
from seriatim.consumer.core.rows import Delivery
from seriatim.consumer.core.view import ChainView, Grant, LinkView, Place, Side
from seriatim.consumer.fetching import Fetcher
from seriatim.consumer.loop import LoopThread
from seriatim.consumer.range_reader import RangeReader
from seriatim.consumer.subscriber import Subscriber
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch import RecordColumns, encode
from seriatim.protocol.chain import LinkState
from seriatim.protocol.clock import boottime_s
from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.errors import (
    DeadlineOver,
    Fenced,
    InvalidArgument,
    MalformedFrame,
    NotElected,
    OlderGeneration,
    UnknownQueue,
    UnknownSubscription,
)
from seriatim.protocol.names import ChainVersion, Epoch, Generation, Incarnation, Index, Offset, SubscriptionId, Token
from tests.forks import in_a_fork
from tests.interruption import Interruption

BEFORE_ALL = Place(Epoch(1), Index(0))
SIDES = [Side("g1", member, f"{member}:1", Incarnation(member, 1)) for member in "ab"]


class NoThread:
    def check_may_wait(self) -> None: ...

    def tell(self, *_: object) -> None: ...

    def close(self) -> None: ...


class Session:
    """Takes commits down as the real one does: it knows the grant, and not whose term a place is of."""

    def __init__(self, view: object) -> None:
        self.view = view
        self.commits: list[Place] = []

    async def commit(self, place: Place) -> None:
        self.commits.append(place)


def delivery(epoch: int, base: int, first_seq: int, count: int, marks: dict[str, int] | None = None) -> Delivery:
    columns = RecordColumns([b"v"] * count, list(range(first_seq, first_seq + count)), "s", [1] * count)
    return Delivery(Epoch(epoch), Offset(base), encode(columns, Index(0)), Index(0), Index(count), marks)


def elected(*deliveries: Delivery) -> Consumer:
    consumer = Consumer("127.0.0.1:1", "q")
    consumer._thread = NoThread()
    hand_over = consumer._hand_over
    hand_over.begin()
    hand_over.renew(boottime_s() + 60)
    for one in deliveries:
        hand_over.put(one)
    return consumer


def passed(consumer: Consumer) -> Place:
    return consumer._handed_out.passed(consumer._hand_over.term) or BEFORE_ALL


def to_commit(consumer: Consumer) -> Place:
    """By `commit()`."""
    consumer._session = Session(object())
    return consumer._place_to_commit(None)[1]


def offsets(records) -> list[int]:
    return [record.offset for record in records]


def test_what_a_poll_returned_is_not_passed_by_the_batch_of_resends_behind_it() -> None:
    """As after each switch under load. What is passed is committed by itself: a crash would have lost all ten."""
    consumer = elected(delivery(1, 0, 0, 10), delivery(2, 10, 5, 5, {"s": 9}), delivery(2, 15, 10, 5))
    assert offsets(consumer.poll(10, 0)) == list(range(10))
    assert passed(consumer) == BEFORE_ALL
    consumer = elected(delivery(1, 0, 0, 10), delivery(2, 10, 5, 5, {"s": 9}))
    assert offsets(consumer.poll(500, 0)) == list(range(10))
    assert passed(consumer) == BEFORE_ALL
    assert consumer.poll(500, 0) == []
    assert passed(consumer) == Place(Epoch(2), Index(5))


@pytest.mark.parametrize("max_records", [3, 10, 15, 500])
def test_polls_pass_what_the_polls_before_them_returned(max_records) -> None:
    consumer = elected(*(delivery(epoch, 10 * epoch - 10, 10 * epoch - 10, 10) for epoch in (1, 2, 3)))
    before, found = BEFORE_ALL, []
    while records := consumer.poll(max_records, 0):
        assert passed(consumer) == before  # also where it goes on from the rest of a batch into the next one
        found += records
        before = Place(records[-1].epoch, Index(records[-1].index + 1))
    assert offsets(found) == list(range(30))
    assert passed(consumer) == before


def test_a_poll_ends_where_what_it_found_takes_as_much_as_may_be_fetched_ahead() -> None:
    """Batches that are compressed to a hundredth lie in their thousands in what may be fetched ahead: `consume` took 2.9 GiB."""

    def compressed(at: int) -> Delivery:
        batch = encode(RecordColumns([bytes(100_000)] * 10, list(range(10)), "s", [1] * 10), Index(0), compress=True)
        assert batch.size_bytes < 10_000
        return Delivery(Epoch(1), Offset(10 * at), batch, Index(0), Index(10), None)

    for prefetch_bytes, counts in ((1, [10] * 5), (2_500_000, [30, 20]), (100_000_000, [50])):
        consumer = elected(*map(compressed, range(5)))
        consumer._prefetch_bytes = prefetch_bytes
        assert [len(consumer.poll(500, 0)) for _ in counts] == counts
        assert consumer.poll(500, 0) == []
    consumer = elected(*map(compressed, range(5)))
    consumer._prefetch_bytes = 1_500_000
    assert [len(consumer.poll(15, 0)) for _ in range(4)] == [15, 15, 15, 5]


def test_what_a_poll_found_before_a_batch_that_cannot_be_read_is_returned(monkeypatch) -> None:
    readable = handover.decoded

    def decoded(one: Delivery):
        if one.epoch == 2:
            raise MalformedFrame("written by a later version")
        return readable(one)

    monkeypatch.setattr(handover, "decoded", decoded)
    consumer = elected(delivery(1, 0, 0, 10), delivery(2, 10, 10, 5))
    assert offsets(consumer.poll(500, 0)) == list(range(10))
    for _ in range(2):
        with pytest.raises(MalformedFrame):
            consumer.poll(500, 0)
    assert passed(consumer) == Place(Epoch(1), Index(10))


class Delivered:
    """A session of which all is delivered, as the cluster says; `does` happens while it is asked."""

    def __init__(self, does: Callable[[], object] = lambda: None) -> None:
        self._does = does

    async def is_all_delivered(self, _within_s: float) -> bool:
        self._does()
        return True


def test_who_is_at_the_end_has_handed_out_all_that_is_delivered(monkeypatch) -> None:
    monkeypatch.setattr(NoThread, "run", lambda _, coroutine, *__: asyncio.run(coroutine), raising=False)
    consumer = elected(delivery(1, 0, 0, 4), delivery(2, 4, 2, 2, {"s": 3}))
    hand_over, consumer._session = consumer._hand_over, Delivered()
    assert not consumer.is_at_end()
    assert len(consumer.poll(3, 0)) == 3
    assert not consumer.is_at_end()
    assert len(consumer.poll(3, 0)) == 1
    assert consumer.poll(3, 0) == []  # re-sends
    assert consumer.is_at_end()
    consumer._session = Delivered(lambda: hand_over.put(delivery(2, 6, 4, 1)))
    assert not consumer.is_at_end()
    assert len(consumer.poll(3, 0)) == 1
    consumer._session = Delivered(hand_over.begin)  # from where it is committed
    assert not consumer.is_at_end()
    consumer._session = Delivered()
    hand_over.end()
    assert not consumer.is_at_end()


@pytest.mark.parametrize("at", [2, 3])
def test_a_poll_that_is_interrupted_has_handed_nothing_out(monkeypatch, at) -> None:
    consumer = elected(delivery(1, 0, 0, 10), delivery(2, 10, 10, 10), delivery(2, 20, 20, 10))
    assert offsets(consumer.poll(4, 0)) == [0, 1, 2, 3]
    take, takes = consumer._hand_over.take, [1]

    def interrupted(*arguments):
        takes.append(1)
        if len(takes) == at:
            raise KeyboardInterrupt  # while that batch is decoded
        return take(*arguments)

    monkeypatch.setattr(consumer._hand_over, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        consumer.poll(500, 0)
    assert passed(consumer) == Place(Epoch(1), Index(4))
    assert to_commit(consumer) == Place(Epoch(1), Index(4))  # what `commit()` would commit
    assert offsets(consumer.poll(500, 0)) == list(range(4, 30))


HAND_OUT = (client.__file__, handed_out.__file__, handover.__file__)


class CtrlC:
    """Raises KeyboardInterrupt behind the call of this number, in the files that hand records out: there the interpreter looks for signals."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in HAND_OUT or frame.f_code.co_name == "poll":
            return None
        if event == "return":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def test_wherever_a_poll_is_interrupted_each_record_is_handed_out_once() -> None:
    """It is decided by its place, and not by luck: a batch that the loop's side had given away already was in nobody's hands."""
    number = 0
    while True:
        number += 1
        consumer = elected(
            delivery(1, 0, 0, 4), delivery(2, 4, 2, 2, {"s": 3}), delivery(2, 6, 4, 4), delivery(2, 10, 8, 4)
        )
        found = offsets(consumer.poll(2, 0))
        before, ctrl_c = sys.gettrace(), CtrlC(number)
        sys.settrace(ctrl_c)
        try:
            found += offsets(consumer.poll(7, 0))
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        while more := offsets(consumer.poll(3, 0)):
            found += more
        assert found == [0, 1, 2, 3, *range(6, 14)], f"interrupted at {number}"
        if ctrl_c.left > 0:
            break
    assert number > 10


class Loop:
    """What its thread does, waited for by a signal's handler."""

    def __init__(self, does: Callable[[], object]) -> None:
        self._thread = threading.Thread(target=does, daemon=True)

    def wait_for(self) -> None:
        self._thread.start()
        self._thread.join(60)
        assert not self._thread.is_alive(), "it waits for what was interrupted"


def test_the_loop_s_thread_waits_for_nothing_that_a_signal_s_handler_may_have_interrupted() -> None:
    """Else a handler of SIGTERM that closes the consumer, under load, would wait for ever: for the loop, which waited for a lock."""
    number = 0
    while True:
        number += 1
        consumer = elected(delivery(1, 0, 0, 2), delivery(1, 2, 2, 2))
        fetcher = consumer._fetcher = Fetcher(None, 8, print, print, print, print)

        def loop_s(consumer: Consumer = consumer, fetcher: Fetcher = fetcher) -> None:
            fetcher.tell_taken()
            consumer._hand_over.renew(boottime_s() + 60)

        with Interruption(number, Loop(loop_s).wait_for, *HAND_OUT[1:], fetching.__file__) as interruption:
            while consumer.poll(3, 0.001):
                pass
        if not interruption.has_come:
            break
    assert number > 20


def test_nor_for_anything_of_who_reads_a_range() -> None:
    number = 0
    while True:
        number += 1
        reader = RangeReader("127.0.0.1:1", "q", timeout_s=0.001)
        fetcher = reader._fetcher = Fetcher(None, 8, reader._put, print, print, print)
        reader._put(delivery(1, 0, 0, 2))

        def loop_s(reader: RangeReader = reader) -> None:
            reader._fail(Fenced("another reads"))

        with Interruption(number, Loop(loop_s).wait_for, range_reader.__file__) as interruption:
            assert reader._next(fetcher) is not None
            with pytest.raises((Fenced, DeadlineOver)):
                reader._next(fetcher)
        reader.close()
        if not interruption.has_come:
            break
    assert number > 10


def test_where_a_queue_ends_is_asked_of_members_and_of_nobody_s_election(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay asks with each micro-batch: of a queue with 200 subscriptions it had ZooKeeper asked 201 times."""
    asked = []

    async def told(_: object, __: str, request: pb.QueueRequest, *___: object) -> pb.QueueView:
        asked.append((request.only_chain, request.no_elections))
        return pb.QueueView(queue="q")

    monkeypatch.setattr(Coordinators, "call_within", told)
    with RangeReader("127.0.0.1:1", "q") as reader:
        assert reader.positions().end == 0
    assert asked == [(False, True)]


class ClosedMeanwhile:
    """Stands for what a consumer calls while another thread, or a signal's handler, closes it: that is done when it returns."""

    def __init__(self, consumer: Consumer, answer: object = None) -> None:
        self._consumer = consumer
        self._answer = answer

    def __call__(self, *_: object) -> Any:
        thread, self._consumer._thread = self._consumer._thread, None
        self._consumer._hand_over.close()
        thread.close()
        return self._answer


@pytest.mark.parametrize("interrupted", ["open", "_is_committed"])
@pytest.mark.parametrize(
    "commit", [Consumer.commit, lambda consumer: asyncio.run(consumer.commit_async())], ids=["commit", "commit_async"]
)
def test_who_commits_while_it_is_closed_is_told_so(commit, interrupted) -> None:
    """`close` and `commit` may be called by any thread: what wasn't committed isn't said to be."""
    consumer = elected(delivery(1, 0, 0, 4))
    consumer._session, consumer._thread = Session(object()), LoopThread("closed meanwhile")
    assert len(consumer.poll(500, 0)) == 4
    setattr(consumer, interrupted, ClosedMeanwhile(consumer, answer=False))
    with pytest.raises(InvalidArgument):
        commit(consumer)


def test_a_poll_in_the_middle_of_which_it_is_closed_returns_nothing() -> None:
    consumer = elected(delivery(1, 0, 0, 4), delivery(1, 4, 4, 4))
    consumer._thread, consumer._fetcher = LoopThread("closed meanwhile"), Fetcher(None, 8, print, print, print, print)
    consumer._fetcher.taken = ClosedMeanwhile(consumer, answer=True)
    assert consumer.poll(500, 0) == []


def test_what_was_taken_before_an_interruption_is_told_after_it() -> None:
    """Else the member that is read never hears of the room again: after 16 MB nothing came any more, in a notebook that went on."""
    consumer = elected(*(delivery(1, 4 * at, 4 * at, 4) for at in range(3)))
    told: list[object] = []

    class Thread(NoThread):
        def tell(self, *_: object) -> None:
            told.append(consumer._handed_out.in_hand)
            if len(told) == 1:
                raise KeyboardInterrupt

    consumer._thread, consumer._fetcher = Thread(), Fetcher(None, 8, print, print, print, print)
    with pytest.raises(KeyboardInterrupt):
        consumer.poll(4, 0)
    assert offsets(consumer.poll(500, 0)) == list(range(12))
    assert len(told) > 1


def test_a_forked_process_is_handed_nothing_of_what_its_parent_reads() -> None:
    """Both would have had the next records; and the child would have waited for more for ever, or 20 s for what it can't close."""
    consumer = elected(delivery(1, 0, 0, 4), delivery(1, 4, 4, 4))
    consumer._thread = LoopThread("the parent's")
    records = iter(consumer)
    assert next(records).offset == 0
    opening = threading.Thread(target=consumer._opening.acquire)  # which never lets go
    opening.start()
    opening.join()
    said = in_a_fork(
        lambda: next(records),
        lambda: next(iter(consumer)),
        lambda: consumer.poll(5, 0),
        consumer.commit,
        lambda: consumer.seek(0),
        lambda: consumer.run(print),
        consumer.close,
    )
    assert [one.split(":")[0] for one in said] == ["InvalidArgument"] * 6 + ["returned"]
    assert all("before a fork" in one for one in said[:6])
    assert [next(records).offset for _ in range(7)] == list(range(1, 8))
    consumer._thread.close()


FORK = """
import gc
from contextlib import suppress
from seriatim import Consumer
from seriatim.protocol.errors import Unreachable
from tests.forks import in_a_fork
gc.disable()
consumer, other = (Consumer("127.0.0.1:1", "q", connect_timeout_s=0) for _ in range(2))
with suppress(Unreachable):
    consumer.open()
print(in_a_fork(other.open))
"""


def test_a_process_whose_parent_failed_to_open_a_consumer_may_open_one() -> None:
    """What went wrong kept the channel that was closed, and with it gRPC, until Python's collector came by."""
    done = subprocess.run((sys.executable, "-c", FORK), capture_output=True, text=True, timeout=60, check=True)
    assert "Unreachable: no coordinator answers" in done.stdout


def grant_of(generation: int, token: int) -> Grant:
    return Grant(SubscriptionId(1), Generation(generation), Token(token))


@pytest.fixture
def subscriber() -> Iterator[Subscriber]:
    """Elected under generation 1 and token 1, of a queue whose one link is open."""
    link = LinkView(Epoch(1), LinkState.OPEN, Offset(0), None, SIDES[0], SIDES[1], {})
    found = Subscriber("127.0.0.1:1", "q")
    found._session = Session(ChainView("c", 1, "q", ChainVersion(1), (link,)))
    found._granted(grant_of(1, 1), BEFORE_ALL)
    found._leased(boottime_s() + 60)
    thread = found._thread = LoopThread("subscriber")
    yield found
    thread.close()


@pytest.mark.parametrize(
    ("generation", "token", "error"), [(2, 1, OlderGeneration), (1, 2, Fenced), (2, 2, OlderGeneration)]
)
def test_a_subscriber_commits_nothing_of_what_was_read_in_an_earlier_term(subscriber, generation, token, error) -> None:
    """It undid the seek that had begun the present one: the records sought back to were never read again."""
    first = subscriber.wait_elected(0)
    subscriber.commit(4)
    subscriber._granted(grant_of(generation, token), BEFORE_ALL)
    with pytest.raises(error):
        subscriber.commit(6)
    second = subscriber.term
    with pytest.raises(error):
        subscriber.commit(6, term=first)
    subscriber.commit(2)
    subscriber.commit(3, term=second)
    subscriber._ended()
    with pytest.raises(NotElected):
        subscriber.commit(7, term=second)
    assert [place.index for place in subscriber._session.commits] == [4, 2, 3]


def test_nor_where_that_ends_while_it_looks_for_the_offset(subscriber) -> None:
    session, view = subscriber._session, subscriber._session.view
    session.view = ChainView("c", 1, "q", ChainVersion(0))

    async def look() -> ChainView:
        subscriber._granted(grant_of(2, 1), BEFORE_ALL)
        return view

    session.look = look
    with pytest.raises(OlderGeneration):
        subscriber.commit(4)
    assert session.commits == []


def test_a_subscriber_s_term_is_known_to_who_is_called_back_and_to_who_has_committed_in_it(subscriber) -> None:
    subscriber.commit(1)
    subscriber._granted(grant_of(2, 1), BEFORE_ALL)
    with pytest.raises(OlderGeneration):  # nobody was told
        subscriber.commit(2)
    subscriber._on_elected = print
    subscriber._granted(grant_of(3, 1), BEFORE_ALL)
    subscriber.commit(3)
    assert [place.index for place in subscriber._session.commits] == [1, 3]


def test_a_forked_process_has_no_term_of_its_parent_s() -> None:
    """Both would have written elsewhere under one token, which fences neither of them."""
    subscriber = Subscriber("127.0.0.1:1", "q")
    subscriber._granted(grant_of(1, 1), BEFORE_ALL)
    subscriber._leased(boottime_s() + 60)
    thread = subscriber._thread = LoopThread("the parent's")
    subscriber._session = Session(object())
    said = in_a_fork(
        lambda: subscriber.term,
        lambda: subscriber.wait_elected(0),
        lambda: subscriber.commit(1),
        subscriber.open,
        subscriber.close,
    )
    assert [one.split(":")[0] for one in said] == ["InvalidArgument"] * 4 + ["returned"]
    assert all("before a fork" in one for one in said[:4])
    assert subscriber.term is not None
    thread.close()


class CtrlCWhileClosing(CtrlC):
    """As CtrlC, in front of a call as well, and in what ends the loop's thread."""

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in (*HAND_OUT, loop.__file__):
            return None
        if event in ("call", "return"):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


class Left(Session):
    """Knows whether its place was given back: then another reader can be elected."""

    is_left = False

    async def close(self) -> None:
        self.leave()

    def leave(self) -> None:
        self.is_left = True


@pytest.mark.filterwarnings("ignore")  # of a coroutine that wasn't come to
def test_a_consumer_whose_closing_was_interrupted_wherever_that_was_is_closed_by_closing_it_again() -> None:
    """Else it stayed elected as long as its process lived, as a notebook's does, and nothing closed it any more."""
    number = 0
    while True:
        number += 1
        consumer = elected(delivery(1, 0, 0, 4))
        consumer._auto_commit_ms = None
        thread = consumer._thread = LoopThread("closed twice")
        session = consumer._session = Left(object())
        before, ctrl_c = sys.gettrace(), CtrlCWhileClosing(number)
        sys.settrace(ctrl_c)
        try:
            consumer.close()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        consumer.close()
        assert session.is_left, f"interrupted at {number}"
        assert not thread.is_running, f"interrupted at {number}"
        if ctrl_c.left > 0:
            break
    assert number > 20


def test_on_deposed_is_told_by_the_reader_s_own_clock() -> None:
    """ZooKeeper answers pings, and no write: nothing is handed out any more, and the next reader is elected, before the session is known to be lost."""

    async def lapse() -> None:
        deposed = asyncio.Event()
        consumer = Consumer("127.0.0.1:1", "q", on_deposed=deposed.set)
        consumer._leased(boottime_s() + 60)
        consumer._leased(boottime_s() + 0.01)
        async with asyncio.timeout(60):
            await deposed.wait()

    asyncio.run(lapse())


class Threads(ThreadPoolExecutor):
    """A loop's threads, counted as often as one is asked for."""

    asked = 0

    def submit(self, *arguments: Any, **keywords: Any) -> Any:
        self.asked += 1
        return super().submit(*arguments, **keywords)


def test_who_awaits_records_keeps_none_of_its_loop_s_threads() -> None:
    """There are some six, for look-ups of names, too: with twelve consumers whatever needed one took 0.7 s, each record of a quiet queue as well."""

    async def read() -> tuple[list[int], int]:
        threads = Threads()
        asyncio.get_running_loop().set_default_executor(threads)
        consumer = elected(delivery(1, 0, 0, 2))
        records = aiter(consumer)
        found = [(await anext(records)).offset for _ in range(2)]
        asked = threads.asked  # to open it
        awaited = asyncio.ensure_future(anext(records))
        await asyncio.sleep(0)  # it waits
        threading.Thread(target=consumer._hand_over.put, args=(delivery(1, 2, 2, 1),)).start()
        return [*found, (await awaited).offset], threads.asked - asked

    assert asyncio.run(read()) == ([0, 1, 2], 0)


@pytest.mark.parametrize("records_a_batch", [1, 3 * client.RECORDS_A_TURN])
def test_who_awaits_records_of_a_backlog_can_be_cancelled(records_a_batch: int) -> None:
    """Nothing else came to its turn until all of it was read, a time-out neither. The next one goes on behind what was handed out."""
    batches = 3 * client.RECORDS_A_TURN // records_a_batch
    consumer = elected(
        *(delivery(1, at, at, records_a_batch) for at in range(0, batches * records_a_batch, records_a_batch))
    )

    async def read() -> list[int]:
        found: list[int] = []

        async def each() -> None:
            async for record in consumer:
                found.append(record.offset)
                if len(found) == client.RECORDS_A_TURN // 2:
                    asyncio.get_running_loop().call_soon(reading.cancel)

        reading = asyncio.create_task(each())
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(60):
                await reading
        return found

    found = asyncio.run(read())
    assert found == list(range(client.RECORDS_A_TURN))
    in_hand = consumer._handed_out.in_hand
    assert in_hand.passed == in_hand.row  # by that it has asked for more, and the next reader goes on there, too
    assert consumer.poll(1, 0)[0].offset == client.RECORDS_A_TURN


def handled_while_closing(consumer: Consumer, handled: list[int]) -> None:
    """As `Consumer.close` begins, in another thread: the hand-over is closed, then the last commit is waited for, the lease goes on."""
    blocked = threading.Event()

    def handler(record) -> None:
        handled.append(record.offset)
        if record.offset == 3:
            blocked.set()
            raise ValueError("not now")

    working = threading.Thread(target=consumer.run, args=(handler,), kwargs={"backoff_s": 600.0}, daemon=True)
    working.start()
    assert blocked.wait(60)
    consumer._hand_over.close()
    working.join(60)
    assert not working.is_alive()


def test_nothing_passes_a_blocked_record_while_the_consumer_is_closed() -> None:
    handled: list[int] = []
    consumer = elected(delivery(1, 0, 0, 10))
    handled_while_closing(consumer, handled)
    assert handled == [0, 1, 2, 3]
    assert passed(consumer) == Place(Epoch(1), Index(3))


class _TextlessError(Exception):
    def __str__(self) -> str:
        return str(self.args[1])


def test_an_error_whose_text_cannot_be_made_is_one_as_any_other(caplog) -> None:
    """It ended `run` while it was logged."""
    consumer = elected(delivery(1, 0, 0, 2))
    tries, parked = [], []

    def handler(record) -> None:
        tries.append(record.offset)
        raise _TextlessError

    def park(record, error) -> None:
        if len(tries) == 1:
            raise error
        parked.append(record.offset)
        if record.offset == 1:
            consumer._hand_over.close()

    consumer.run(handler, park, backoff_s=0.001)
    assert (tries, parked) == ([0, 0, 1], [0, 1])
    assert caplog.text.count("_TextlessError: (its text can't be made: IndexError)") == 3


def test_a_record_that_cannot_be_parked_blocks_the_queue() -> None:
    consumer = elected(delivery(1, 0, 0, 3))
    handled, parked, tries = [], [], []

    def handler(record) -> None:
        if record.offset == 0:
            raise ValueError("bad")
        handled.append(record.offset)
        if record.offset == 2:
            consumer._hand_over.close()

    def park(record, _error) -> None:
        tries.append(record.offset)
        if len(tries) < 3:
            raise OSError("the table for parked records can't be reached")
        parked.append(record.offset)

    consumer.run(handler, park, backoff_s=0.001)
    assert (tries, parked, handled) == ([0, 0, 0], [0], [1, 2])


@pytest.mark.parametrize("of", ["handler", "park"])
def test_a_handler_that_would_have_to_be_awaited_is_refused_and_its_record_is_not_done(of) -> None:
    """Nothing of it ran, and each record was committed as handled, or parked."""
    consumer = elected(delivery(1, 0, 0, 3))
    consumer._idle_timeout_s = 0
    handled: list[int] = []

    async def awaited(record, _error=None) -> None:
        handled.append(record.offset)

    def failing(record) -> None:
        if record.offset == 1:
            raise ValueError("bad")
        handled.append(record.offset)

    with pytest.raises(InvalidArgument, match="plain function"):
        consumer.run(*((awaited,) if of == "handler" else (failing, awaited)))
    assert handled == ([] if of == "handler" else [0])
    assert passed(consumer) == to_commit(consumer) == Place(Epoch(1), Index(len(handled)))


def test_what_is_logged_of_a_record_that_failed_says_the_kind_of_its_error(caplog) -> None:
    """Of a KeyError there was only the key, of a failed assertion nothing, and nobody keeps more of a parked record."""
    consumer = elected(delivery(1, 0, 0, 2))
    tries: list[int] = []

    def handler(record) -> None:
        tries.append(record.offset)
        if record.offset == 1:
            consumer._hand_over.close()
        raise KeyError("id")

    def park(_record, _error) -> None:
        if len(tries) == 1:
            raise AssertionError

    consumer.run(handler, park, backoff_s=0.001)
    assert tries == [0, 0, 1]
    said = [record.getMessage() for record in caplog.records]
    assert [line.split()[1] for line in said] == ["blocked", "parked", "parked"]
    assert said[0].endswith("error='AssertionError: '")
    assert all(line.endswith("""error="KeyError: 'id'\"""") for line in said[1:])


def begin_at(consumer: Consumer, offset: int) -> None:
    """Another term, from there on, one record."""
    consumer._hand_over.begin()
    consumer._hand_over.put(delivery(2, offset, offset, 1))


@pytest.mark.parametrize("backoff_s", [0.0, 0.001, 0.02])
@pytest.mark.parametrize("comes", ["while it is tried", "while it is waited for"])
def test_a_record_that_fails_when_its_term_is_over_is_neither_tried_again_nor_parked(comes, backoff_s) -> None:
    """Another reader may be past it by then, or an operator, who sought past what never works: it blocked the queue for ever."""
    consumer = elected(delivery(1, 0, 0, 4))
    handled, parked = [], []

    def handler(record) -> None:
        handled.append(record.offset)
        if record.offset == 10 or len(handled) > 20:
            consumer._hand_over.close()
        if record.offset == 1:
            if comes == "while it is tried":
                consumer._hand_over.end()
                begin_at(consumer, 10)
            raise ValueError("the database's connection broke")

    def park(record, _error) -> None:
        parked.append(record.offset)
        begin_at(consumer, 10)
        raise OSError("the table for parked records can't be reached")

    consumer.run(handler, park, backoff_s=backoff_s)
    assert (handled, parked, consumer.blocked) == ([0, 1, 10], [1] * (comes == "while it is waited for"), None)


def test_a_record_that_fails_when_its_lease_has_lapsed_is_tried_again_first_when_that_goes_on() -> None:
    """Not parked, as nobody can tell whether another is elected; and not given up, as nobody need be."""
    consumer = elected(delivery(1, 0, 0, 2))
    handled, parked = [], []

    def handler(record) -> None:
        handled.append(record.offset)
        if record.offset == 1:
            consumer._hand_over.close()
        if len(handled) == 1:
            consumer._hand_over.renew(0.0)
            threading.Timer(0.05, consumer._hand_over.renew, (boottime_s() + 60,)).start()
            raise ValueError("not now")

    consumer.run(handler, lambda record, _error: parked.append(record.offset), backoff_s=0.001)
    assert (handled, parked) == ([0, 0, 1], [])


def test_a_record_whose_handler_was_interrupted_is_the_first_of_the_next_run() -> None:
    consumer = elected(delivery(1, 0, 0, 5))
    handled: list[int] = []

    def interrupted(record) -> None:
        if record.offset == 2:
            raise KeyboardInterrupt
        handled.append(record.offset)

    with pytest.raises(KeyboardInterrupt):
        consumer.run(interrupted)
    assert passed(consumer) == to_commit(consumer) == Place(Epoch(1), Index(2))

    def handler(record) -> None:
        handled.append(record.offset)
        if record.offset == 4:
            consumer._hand_over.close()

    consumer.run(handler)
    assert handled == [0, 1, 2, 3, 4]


def test_a_commit_that_was_asked_for_in_an_earlier_term_does_not_reach_the_next_one() -> None:
    """A seek takes effect between the look at what was handed out, on the application's thread, and the commit on the loop."""
    consumer = elected(delivery(1, 0, 0, 10))
    session = consumer._session = Session(object())
    assert len(consumer.poll(500, 0)) == 10
    looked_at = consumer._place_to_commit(None)
    consumer._hand_over.begin()
    with pytest.raises(Fenced):
        asyncio.run(consumer._commit(looked_at))
    assert session.commits == []


def test_who_commits_in_a_queue_that_was_deleted_is_told_so() -> None:
    """Before he looks, and between the look and the commit: not that nobody is elected, or that it will be handed out again."""
    consumer = elected(delivery(1, 0, 0, 10))
    consumer._session = Session(object())
    assert len(consumer.poll(500, 0)) == 10
    looked_at = consumer._place_to_commit(None)
    consumer._hand_over.fail(UnknownQueue("queue 'q' was deleted"))
    consumer._hand_over.end()
    with pytest.raises(UnknownQueue):
        consumer._place_to_commit(None)
    with pytest.raises(UnknownQueue):
        asyncio.run(consumer._commit(looked_at))


def test_who_seeks_in_a_queue_that_was_deleted_is_told_so() -> None:
    """A coordinator goes by the name: it moved the readers of the queue made under that name since, and this one was told of success."""
    consumer = elected()
    consumer._session = Session(object())
    consumer._hand_over.fail(UnknownQueue("queue 'q' was deleted"))
    with pytest.raises(UnknownQueue):
        consumer.seek(0)


def test_an_application_that_asks_again_and_again_is_told_without_what_was_told_before() -> None:
    """As one that waits for its deleted queue to be made again: one error kept the frames of all its calls, with what was in them."""
    consumer, subscriber = elected(), Subscriber("127.0.0.1:1", "q")
    error = UnknownSubscription("queue 'q' was deleted", queue="q")
    consumer._hand_over.fail(error)
    subscriber._error = error
    for ask in (consumer.poll, lambda: subscriber.term):
        frames = []
        for _ in range(3):
            with pytest.raises(UnknownSubscription) as told:
                ask()
            assert (told.value.message, told.value.details) == (error.message, error.details)
            frames.append(len(list(traceback.walk_tb(told.value.__traceback__))))
        assert frames == frames[:1] * 3
