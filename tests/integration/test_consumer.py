"""The consumer library over real gRPC and a real ZooKeeper; coordinator and members are small fakes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from seriatim.cli.embedded.zookeeper import EmbeddedZooKeeper
from seriatim.consumer import Consumer, RangeReader, Subscriber
from seriatim.consumer.core.rows import Delivery
from seriatim.consumer.core.view import Place
from seriatim.consumer.loop import LoopThread
from seriatim.consumer.session import ReaderSession
from seriatim.consumer.subscriber import Term
from seriatim.protocol import coordinators, rpc
from seriatim.protocol.errors import IncompatibleVersion, InvalidArgument, NotElected, UnknownQueue, Unreachable
from seriatim.protocol.record import Record
from tests.integration.consumer_fakes import FakeCluster
from tests.waiting import wait_until

WAIT_S = 60.0


@pytest.fixture
def cluster(zookeeper_server: EmbeddedZooKeeper, cluster_name: str) -> Iterator[FakeCluster]:
    with FakeCluster(zookeeper_server.address, cluster_name) as made:
        yield made


def new(cluster: FakeCluster, **settings: Any) -> Consumer:
    """A consumer that stays elected where this machine stands still for a moment."""
    return Consumer(cluster.coordinator, "q", **{"session_timeout_s": 20, "connect_timeout_s": WAIT_S, **settings})


def taken(consumer: Consumer, count: int) -> list[Record]:
    """So many records, in as many polls as it takes."""
    found: list[Record] = []
    while len(found) < count:
        more = consumer.poll(count - len(found), WAIT_S)
        assert more, f"{len(found)} of {count}"
        found += more
    return found


def numbered(first: int, count: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


def test_reads_across_links_without_resends_and_commits_to_the_end(cluster: FakeCluster) -> None:
    cluster.append(numbered(0, 10), 0)
    cluster.switch()
    cluster.append(numbered(5, 10), 5)
    cluster.switch()
    cluster.append(numbered(15, 5), 15)
    with new(cluster, idle_timeout_s=1.0, auto_commit_ms=100) as consumer:
        records = taken(consumer, 20)
        assert list(consumer) == []  # idle
        assert [record.value for record in records] == numbered(0, 20)
        assert [record.offset for record in records] == [*range(10), *range(15, 25)]
        assert consumer.duplicates_dropped == 5
        wait_until(lambda: cluster.cursor_offset("default") == 25)


def test_who_is_elected_and_not_told_where_to_read_is_idle_after_the_time_for_connecting(cluster: FakeCluster) -> None:
    """The head's group was down: iteration ended for no `idle_timeout_s`."""
    cluster.append(numbered(0, 10), 0)
    cluster.nobody_tells = "no member of g1 is registered"
    with new(cluster, idle_timeout_s=0.01) as consumer:
        consumer._settings = replace(consumer._settings, connect_timeout_s=0.05)
        assert list(consumer) == []
        wait_until(lambda: consumer.waiting_for == "g1: no member of g1 is registered")
        assert asyncio.run(all_of(consumer)) == []
        cluster.nobody_tells = ""
        assert [record.value for record in taken(consumer, 10)] == numbered(0, 10)


def test_a_consumer_whose_loop_stands_still_is_neither_connected_nor_first_in_line_nor_live(
    cluster: FakeCluster,
) -> None:
    """It said so for ever, beside the one that was elected by then."""
    cluster.append(numbered(0, 1), 0)
    stands, goes_on = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        goes_on.wait()

    with new(cluster, session_timeout_s=4, on_elected=stand) as consumer:
        try:
            assert consumer.is_live
            assert stands.wait(WAIT_S)
            wait_until(lambda: not consumer.is_live)
            assert (consumer.is_connected, consumer.is_first_in_line, consumer.is_elected) == (False, False, False)
        finally:
            goes_on.set()
        wait_until(lambda: consumer.is_live and consumer.is_connected)


def test_a_subscriber_whose_loop_stands_still_is_neither_connected_nor_live(cluster: FakeCluster) -> None:
    goes_on = threading.Event()
    subscriber = Subscriber(
        cluster.coordinator, "q", session_timeout_s=4, connect_timeout_s=WAIT_S, on_elected=lambda _: goes_on.wait()
    )
    with subscriber:
        try:
            wait_until(lambda: not subscriber.is_live)
            assert not subscriber.is_connected
            assert subscriber.term is None
        finally:
            goes_on.set()
        wait_until(lambda: subscriber.is_live and subscriber.is_connected)


async def all_of(consumer: Consumer) -> list[Record]:
    return [record async for record in consumer]


def test_the_record_in_hand_is_not_committed_by_itself(cluster: FakeCluster) -> None:
    cluster.append(numbered(0, 10), 0)
    with new(cluster, auto_commit_ms=50) as consumer:
        for record in consumer:
            if record.offset == 4:
                break
    assert cluster.cursor_offset("default") == 4
    with new(cluster, auto_commit_ms=None) as consumer:
        records = iter(consumer)
        assert next(records).offset == 4
        consumer.commit()
        assert cluster.cursor_offset("default") == 5
        second = next(records)
        with pytest.raises(InvalidArgument):
            consumer.commit(second._replace(index=second.index + 1))
        consumer.commit(second)
    assert cluster.cursor_offset("default") == 6


def test_a_loop_of_polls_and_commits_needs_no_records_and_no_election(cluster: FakeCluster) -> None:
    first, second = (new(cluster, auto_commit_ms=None, name=name) for name in ("first", "second"))
    with first:
        assert first.poll(10, 0.3) == []
        first.commit()
        cluster.append(numbered(0, 3), 0)
        assert len(first.poll(3, WAIT_S)) == 3
        with second:
            assert second.poll(1, 0.3) == []
            second.commit()
            first.commit()
            assert cluster.cursor_offset("default") == 3
            assert first.poll(1, 0.1) == []
            first.commit()
            cluster.append(numbered(3, 2), 3)
            assert len(first.poll(2, WAIT_S)) == 2
            first._hand_over.end()
            # Of what it was handed last it isn't known whether anybody has committed it.
            with pytest.raises(NotElected):
                first.commit()


def test_poll_follows_what_is_appended(cluster: FakeCluster) -> None:
    with new(cluster) as consumer:
        assert consumer.poll(10, 0.3) == []
        cluster.append(numbered(0, 3), 0)
        assert [record.value for record in consumer.poll(2, WAIT_S)] == numbered(0, 2)
        assert [record.value for record in consumer.poll(2, WAIT_S)] == numbered(2, 1)
        cluster.switch()
        cluster.append(numbered(3, 3), 3)
        assert [record.value for record in consumer.poll(5, WAIT_S)] == numbered(3, 3)


def test_reads_on_though_nobody_tells_of_the_end_of_a_link(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its coordinator stands still, and the members are cut off from ZooKeeper: it waited for ten seconds."""
    monkeypatch.setattr(coordinators, "QUIET_S", 1000.0)
    cluster.are_members_told = False
    cluster.append(numbered(0, 3), 0)
    with Consumer([cluster.addresses["still"], cluster.coordinator], "q", session_timeout_s=20) as consumer:
        assert [record.value for record in taken(consumer, 3)] == numbered(0, 3)
        cluster.switch()
        cluster.append(numbered(3, 3), 3)
        assert [record.value for record in taken(consumer, 3)] == numbered(3, 3)


def test_goes_to_the_other_member_when_one_dies(cluster: FakeCluster) -> None:
    with new(cluster) as consumer:
        cluster.append(numbered(0, 3), 0)
        records = iter(consumer)
        assert [next(records).value for _ in range(3)] == numbered(0, 3)
        assert cluster.fetches[0][0] == "b"
        cluster.kill_member("b")
        cluster.append(numbered(3, 3), 3)
        assert [next(records).value for _ in range(3)] == numbered(3, 3)
        assert ("a", 1, 3) in cluster.fetches
        consumer.commit()
        assert cluster.cursor_offset("default") == 6


def test_the_standby_takes_over_at_the_committed_cursor(cluster: FakeCluster) -> None:
    cluster.append(numbered(0, 10), 0)
    first = new(cluster, auto_commit_ms=None, name="first")
    second = new(cluster, auto_commit_ms=None, name="second")
    with first:
        first.commit(taken(first, 6)[3])
        with second:
            assert second.poll(1, 0.5) == []
            wait_until(lambda: "another reader" in second.waiting_for)
            first.close()
            assert [record.offset for record in taken(second, 6)] == list(range(4, 10))


@pytest.mark.parametrize("kind", ["consumer", "subscriber"])
def test_a_reader_that_nobody_has_any_more_resigns(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """It stayed elected as long as its process lived, and no other reader was handed anything."""
    cluster.append(numbered(0, 10), 0)

    def drop() -> None:
        if kind == "consumer":
            for record in new(cluster, session_timeout_s=40):
                assert record.offset == 0
                return
        subscriber = Subscriber(cluster.coordinator, "q", session_timeout_s=40, connect_timeout_s=WAIT_S).open()
        term = subscriber.wait_elected(WAIT_S)
        subscriber.ask_commit(0, term=term)

    def drop_and_read_on() -> None:
        drop()
        with new(cluster, name="another") as another:
            assert another.poll(10, 35)  # before the session would be over by itself

    with pytest.warns(ResourceWarning, match=f"unclosed {kind} of queue 'q'"):
        drop_and_read_on()
    assert "nobody has it any more" in caplog.text


def test_seek_starts_again_there(cluster: FakeCluster) -> None:
    cluster.append(numbered(0, 10), 0)
    cluster.switch()
    cluster.append(numbered(10, 10), 10)
    with new(cluster) as consumer:
        assert len(consumer.poll(15, WAIT_S)) > 0
        consumer.seek(7)
        assert consumer.poll(1, WAIT_S)[0].offset == 7
        consumer.seek(12)
        assert consumer.poll(1, WAIT_S)[0].offset == 12
    assert cluster.meant == [(1, 1)] * 2


def test_async_iteration(cluster: FakeCluster) -> None:
    cluster.append(numbered(0, 5), 0)

    async def read() -> list[bytes]:
        async with new(cluster, idle_timeout_s=WAIT_S) as consumer:
            found = []
            async for record in consumer:
                found.append(record.value)
                if len(found) == 5:
                    break
            await consumer.commit_async()
            consumer._idle_timeout_s = 0.5
            return found + [record.value async for record in consumer]  # until it is idle

    assert asyncio.run(read()) == numbered(0, 5)
    assert cluster.cursor_offset("default") == 5


def test_a_failing_handler_blocks_the_queue_until_it_works(cluster: FakeCluster) -> None:
    cluster.append(numbered(0, 4), 0)
    done: list[int] = []
    failures = iter([ValueError("first"), ValueError("second")])
    seen: list[str] = []

    with new(cluster) as consumer:

        def handle(record) -> None:
            if record.offset == 2:
                if consumer.blocked is not None:
                    seen.append(str(consumer.blocked.error))
                for failure in failures:
                    raise failure
            done.append(record.offset)
            if record.offset == 3:
                consumer.close()

        consumer.run(handle, backoff_s=0.01)
        assert consumer.blocked is None
    assert done == [0, 1, 2, 3]
    assert seen == ["first", "second"]


def test_a_parked_record_is_passed(cluster: FakeCluster) -> None:
    cluster.append(numbered(0, 4), 0)
    parked: list[tuple[int, str]] = []
    done: list[int] = []

    def handle(record) -> None:
        if record.offset == 1:
            raise ValueError("bad")
        done.append(record.offset)
        if record.offset == 3:
            consumer.close()

    with new(cluster) as consumer:
        consumer.run(handle, park=lambda record, error: parked.append((record.offset, str(error))))
    assert done == [0, 2, 3]
    assert parked == [(1, "bad")]


def test_close_ends_an_iteration_in_another_thread(cluster: FakeCluster) -> None:
    consumer = new(cluster).open()
    ended = threading.Event()

    def read() -> None:
        for _ in consumer:
            pass
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    time.sleep(0.2)
    consumer.close()
    assert ended.wait(WAIT_S)


def test_a_range_drops_the_same_resends(cluster: FakeCluster) -> None:
    cluster.append(numbered(0, 10), 0)
    cluster.switch()
    cluster.append(numbered(5, 10), 5)
    with RangeReader(cluster.coordinator, "q") as reader:
        positions = reader.positions()
        assert (positions.earliest, positions.end) == (0, 20)
        assert [record.offset for record in reader.read(3, 17)] == [*range(3, 10), 15, 16]
        assert reader.duplicates_dropped == 5
        rows = list(reader.read_columns(16, 20))
        assert [list(one.offsets) for one in rows] == [[16, 17, 18, 19]]
        assert rows[0].columns.values == numbered(11, 4)


def test_a_range_whose_reader_was_closed_does_not_end_as_if_all_were_read(cluster: FakeCluster) -> None:
    cluster.append(numbered(0, 10), 0)
    with RangeReader(cluster.coordinator, "q") as reader:
        left, going_on = reader.read(0, 20), reader.read(5, 20)
        assert next(left).offset == 0
        with pytest.raises(InvalidArgument, match="reading already"):
            next(going_on)
    with pytest.raises(InvalidArgument, match="closed before all"):
        list(left)
    with RangeReader(cluster.coordinator, "q") as reader:
        left = reader.read(0, 20)
        assert next(left).offset == 0
    left.close()


UNKNOWN_STATE = "link 2 is 'mirrored', which this version doesn't know"


@pytest.mark.parametrize("is_range", [False, True])
def test_what_a_newer_coordinator_tells_of_a_link_and_is_not_known_ends_a_reader_in_a_line(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture, *, is_range: bool
) -> None:
    """It stood still without a word (a range, until its time-out), or ended with a trace, as by a defect of its own."""
    cluster.append(numbered(0, 10), 0)
    if is_range:
        with RangeReader(cluster.coordinator, "q", timeout_s=WAIT_S) as reader:
            records = reader.read(0, 20)
            assert [next(records).value for _ in range(10)] == numbered(0, 10)
            cluster.switch(next_is="mirrored")
            with pytest.raises(IncompatibleVersion, match=UNKNOWN_STATE):
                next(records)
    else:
        with new(cluster) as consumer:
            taken(consumer, 10)
            cluster.switch(next_is="mirrored")
            with pytest.raises(IncompatibleVersion, match=UNKNOWN_STATE):
                consumer.poll(1, WAIT_S)
    assert "Traceback" not in caplog.text


def test_a_range_reader_may_be_closed_twice(cluster: FakeCluster) -> None:
    with RangeReader(cluster.coordinator, "q") as reader:
        reader.close()
    with pytest.raises(InvalidArgument, match="closed"):
        reader.positions()


def test_a_range_reader_that_cannot_be_leaves_no_thread() -> None:
    with pytest.raises(InvalidArgument):
        RangeReader("nowhere", "left")
    assert not any("range-left" in thread.name for thread in threading.enumerate())


LEFT = """
import os, signal, sys
from seriatim.consumer import RangeReader

def new():
    return RangeReader(sys.argv[1], "q")

with new() as reader:
    print(len(list(reader.read(0, 5))), flush=True)
if not (child := os.fork()):
    signal.alarm(60)
    with new() as reader:
        print(len(list(reader.read(5, 9))), flush=True)
    os._exit(0)
os.waitpid(child, 0)
left = new().read(0, 20)
print(next(left).offset)
"""


def test_what_is_left_of_a_range_reader_holds_up_neither_a_fork_nor_the_end_of_its_process(
    cluster: FakeCluster,
) -> None:
    """A call that it had broken off kept gRPC's threads, and the child crashed; an iterator that was left waited for a loop that ran no more."""
    cluster.append(numbered(0, 10), 0)
    command = (sys.executable, "-c", LEFT, cluster.coordinator)
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["5", "4", "0"]), done.stderr
    assert "Traceback" not in done.stderr


def test_a_range_is_not_over_before_its_last_batch_is_where_the_caller_looks(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its core knew that all was read, its caller looked for it just then, and the range ended without what was on its way between them."""
    cluster.append(numbered(0, 10), 0)
    put = RangeReader._put

    def late(self: RangeReader, delivery: Delivery) -> None:
        time.sleep(0.5)  # the caller looks five times a second
        put(self, delivery)

    monkeypatch.setattr(RangeReader, "_put", late)
    with RangeReader(cluster.coordinator, "q") as reader:
        assert [record.offset for record in reader.read(0, 10)] == list(range(10))


def test_a_range_that_was_left_twice_interrupted_gives_nothing_to_the_next_one(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a second Ctrl-C while it ends: what it had fetched still came, among what is read next."""
    cluster.append(numbered(0, 10), 0)
    with RangeReader(cluster.coordinator, "q") as reader:
        left, run = reader.read_columns(0, 1000), reader._thread.run
        assert len(next(left).offsets) == 10

        def interrupted(coroutine: Any) -> None:
            async def begun() -> None:
                ending = asyncio.ensure_future(coroutine)
                await asyncio.sleep(0)
                ending.cancel()
                await asyncio.gather(ending, return_exceptions=True)

            run(begun())
            raise KeyboardInterrupt

        monkeypatch.setattr(reader._thread, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            left.close()
        monkeypatch.undo()
        going_on = reader.read(0, 15)
        assert next(going_on).offset == 0
        cluster.append(numbered(10, 10), 10)
        assert [record.offset for record in going_on] == list(range(1, 15))


def test_a_range_behind_links_that_were_all_dropped_is_waited_for(cluster: FakeCluster) -> None:
    cluster.append(numbered(0, 10), 0)
    cluster.drop_all()
    with RangeReader(cluster.coordinator, "q") as reader:
        positions = reader.positions()
        assert (positions.earliest, positions.end, positions.spans) == (10, 10, ())
        with pytest.raises(InvalidArgument, match="no longer kept, the first one is 10"):
            next(reader.read(9, 12))
        found: list[int] = []
        reading = threading.Thread(target=lambda: found.extend(one.offset for one in reader.read(10, 13)), daemon=True)
        reading.start()
        wait_until(lambda: reader._fetcher is not None and reader._fetcher.state.waiting_for == "the next link")
        cluster.open_next()
        cluster.append(numbered(8, 5), 8)
        reading.join(WAIT_S)
        assert (found, reader.duplicates_dropped) == ([12], 2)


def test_a_reader_of_a_queue_without_links_is_where_the_next_one_starts(cluster: FakeCluster) -> None:
    cluster.append(numbered(0, 10), 0)
    cluster.drop_all()
    with Subscriber(cluster.coordinator, "q", "replay", session_timeout_s=20) as subscriber:
        assert subscriber.wait_elected(WAIT_S).cursor_offset == 10
        subscriber.commit(10, timeout_s=WAIT_S)
        with pytest.raises(InvalidArgument):
            subscriber.commit(9)
        cluster.open_next()
        cluster.append(numbered(10, 5), 10)
        subscriber.commit(13, timeout_s=WAIT_S)
        assert cluster.cursor_offset("replay") == 13


def test_subscriber_commits_by_offset(cluster: FakeCluster) -> None:
    cluster.append(numbered(0, 10), 0)
    cluster.switch()
    cluster.append(numbered(10, 10), 10)
    with Subscriber(cluster.coordinator, "q", "replay", session_timeout_s=20) as subscriber:
        term = subscriber.wait_elected(WAIT_S)
        assert (term.token, term.cursor_offset) == (1, 0)
        subscriber.commit(4)
        assert cluster.cursor_offset("replay") == 4
        subscriber.commit(13)
        assert cluster.cursor_offset("replay") == 13
    with Subscriber(cluster.coordinator, "q", "replay", session_timeout_s=20) as subscriber:
        term = subscriber.wait_elected(WAIT_S)
        assert (term.token, term.cursor_offset) == (2, 13)


def test_what_a_subscriber_is_asked_to_commit_some_time_soon_is_committed_as_long_as_its_term_goes_on(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.append(numbered(0, 20), 0)
    tried: list[int] = []
    commit = ReaderSession.commit

    async def commit_late(self: ReaderSession, place: Place) -> None:
        tried.append(place.index)
        if len(tried) <= 2:
            raise Unreachable("nobody tells where that is")
        await commit(self, place)

    monkeypatch.setattr(ReaderSession, "commit", commit_late)
    with Subscriber(cluster.coordinator, "q", "replay", session_timeout_s=20) as subscriber:
        before = subscriber.wait_elected(WAIT_S)
        for offset in (3, 4, 13):
            subscriber.ask_commit(offset, term=before)
        wait_until(lambda: cluster.cursor_offset("replay") == 13)
        assert len(tried) <= 5  # the last one counts, and is tried again
        subscriber.seek(4, timeout_s=WAIT_S)
        subscriber.ask_commit(15, term=before)
        time.sleep(0.5)
        assert cluster.cursor_offset("replay") == 4
        subscriber.ask_commit(5, term=subscriber.wait_elected(WAIT_S))
        wait_until(lambda: cluster.cursor_offset("replay") == 5)
    subscriber.ask_commit(6, term=before)


def test_a_subscriber_seeks_and_is_elected_anew_there(cluster: FakeCluster) -> None:
    cluster.append(numbered(0, 10), 0)
    cluster.switch()
    cluster.append(numbered(10, 10), 10)
    terms: list[Term] = []
    with Subscriber(cluster.coordinator, "q", "replay", session_timeout_s=20, on_elected=terms.append) as subscriber:
        before = subscriber.wait_elected(WAIT_S)
        subscriber.commit(13, timeout_s=WAIT_S)
        subscriber.seek(4, timeout_s=WAIT_S)
        assert subscriber.term == terms[-1] == replace(before, generation=2, cursor_offset=4)
        assert cluster.cursor_offset("replay") == 4
        subscriber.commit(5, timeout_s=WAIT_S)
        assert cluster.cursor_offset("replay") == 5
    with pytest.raises(NotElected):
        subscriber.seek(4)


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_commit_in_a_link_that_nobody_told_of_yet_is_a_commit_there(
    zookeeper_server: EmbeddedZooKeeper, cluster_name: str, monkeypatch: pytest.MonkeyPatch, is_dropped: bool
) -> None:
    @rpc.stream_answers_errors
    async def told_late(self: FakeCluster, request: Any, context: Any) -> Any:
        while True:
            yield self.view()
            await asyncio.sleep(2)

    monkeypatch.setattr(FakeCluster, "WatchQueue", told_late)
    with FakeCluster(zookeeper_server.address, cluster_name) as cluster:
        cluster.append(numbered(0, 10), 0)
        if is_dropped:
            cluster.drop_all()
        with Subscriber(cluster.coordinator, "q", "replay", session_timeout_s=20) as subscriber:
            assert subscriber.wait_elected(WAIT_S).cursor_offset == (10 if is_dropped else 0)
            if is_dropped:
                cluster.open_next()
            else:
                cluster.switch()
            cluster.append(numbered(10, 5), 10)
            subscriber.commit(13, timeout_s=WAIT_S)
            assert cluster.cursor_offset("replay") == 13
            with pytest.raises(InvalidArgument, match="committed up to 5"):
                subscriber.commit(16, timeout_s=WAIT_S)


def test_a_commit_beyond_the_end_is_refused_and_keeps_no_other_from_its_place(cluster: FakeCluster) -> None:
    cluster.append(numbered(0, 10), 0)
    with Subscriber(cluster.coordinator, "q", "replay", session_timeout_s=20) as subscriber:
        subscriber.wait_elected(WAIT_S)
        subscriber.commit(4, timeout_s=WAIT_S)
        refused: list[str] = []

        def commit_beyond() -> None:
            with pytest.raises(InvalidArgument) as error:
                subscriber.commit(1000, timeout_s=WAIT_S)
            refused.append(str(error.value))

        threads = [threading.Thread(target=commit_beyond) for _ in range(2)]
        threads += [threading.Thread(target=subscriber.commit, args=(7,), kwargs={"timeout_s": WAIT_S})]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert ["can't be at 1000: the link is committed up to 10" in one for one in refused] == [True, True]
        assert cluster.cursor_offset("replay") == 7
        subscriber.commit(10, timeout_s=WAIT_S)
        assert cluster.cursor_offset("replay") == 10


@pytest.mark.parametrize("failure", [RuntimeError("the application's own"), SystemExit("the application's own")])
@pytest.mark.parametrize("client", [Consumer, Subscriber])
def test_a_callback_that_fails_is_logged_and_keeps_nothing_from_its_way(
    cluster: FakeCluster, client: Any, failure: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[str] = []

    def fail(*_: object) -> None:
        called.append("it")
        raise failure

    settings: dict[str, Any] = {"session_timeout_s": 60, "on_elected": fail, "on_deposed": fail}
    cluster.append(numbered(0, 2), 0)
    with client(cluster.coordinator, "q", name="first", **settings) as first:
        if isinstance(first, Consumer):
            assert first.poll(1, WAIT_S)
        else:
            first.wait_elected(WAIT_S)
        wait_until(lambda: len(called) == 1)
    assert len(called) == 2
    assert caplog.text.count(f"{type(failure).__name__}: the application's own") == 2
    # Its session has ended with it: nobody has to wait for that.
    with Subscriber(cluster.coordinator, "q", session_timeout_s=20) as second:
        assert second.wait_elected(50).token == 2


def is_done(work: Callable[[], object]) -> bool:
    """Whether it comes to its end."""
    working = threading.Thread(target=work, daemon=True)
    working.start()
    working.join(WAIT_S)
    return not working.is_alive()


def test_a_callback_that_would_wait_for_its_own_consumer_is_told_so(cluster: FakeCluster) -> None:
    """Committing when deposed is what other clients let one do; here the loop's thread waited for itself, and `close` for that."""
    cluster.append(numbered(0, 2), 0)
    refused: list[str] = []

    def refuse(*calls: Callable[[], object]) -> None:
        for call in calls:
            with pytest.raises(InvalidArgument) as error:
                call()
            refused.append(str(error.value))

    was_elected = threading.Event()

    def elected() -> None:
        refuse(consumer.close, lambda: consumer.seek(0), consumer.poll, lambda: next(iter(consumer)))
        was_elected.set()

    consumer = new(cluster, on_elected=elected, on_deposed=lambda: refuse(consumer.close, consumer.commit))
    assert len(taken(consumer, 2)) == 2
    assert was_elected.wait(WAIT_S)  # records don't wait for it, and closed is what the rest of it would be told
    assert is_done(consumer.close)
    assert [("callback" in one, "closed" in one) for one in refused] == [(True, False)] * 5 + [(False, True)]


def test_a_subscriber_s_callback_that_would_wait_for_it_is_told_so(cluster: FakeCluster) -> None:
    is_open, refused = threading.Event(), threading.Event()

    def close(*_: object) -> None:
        is_open.wait(WAIT_S)
        with pytest.raises(InvalidArgument):
            subscriber.close()
        refused.set()

    subscriber = Subscriber(cluster.coordinator, "q", session_timeout_s=20, on_elected=close).open()
    is_open.set()
    subscriber.wait_elected(WAIT_S)
    assert refused.wait(WAIT_S)
    subscriber.close()


@pytest.mark.parametrize("client", [Consumer, Subscriber])
def test_who_is_interrupted_while_closing_stays_elected_no_longer(
    cluster: FakeCluster, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a second Ctrl-C, or because that takes too long; the process lives on, as a notebook's does, and with it kazoo's thread."""
    cluster.append(numbered(0, 2), 0)
    first = client(cluster.coordinator, "q", session_timeout_s=20).open()
    if isinstance(first, Consumer):
        taken(first, 1)
    else:
        first.wait_elected(WAIT_S)

    def interrupted(coroutine: Any, *_: object) -> None:
        coroutine.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(first._thread, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        first.close()
    with Subscriber(cluster.coordinator, "q", session_timeout_s=20) as second:
        assert second.wait_elected(WAIT_S).token == 2


def test_a_signal_s_handler_may_close_a_consumer_that_is_being_opened_or_closed(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs on the thread that opens or closes, in the middle of that."""
    run, calls = LoopThread.run, list[str]()

    def interrupted(self: LoopThread, coroutine: Any, *arguments: Any) -> Any:
        calls.append(coroutine.__name__)
        consumer.close()
        return run(self, coroutine, *arguments)

    monkeypatch.setattr(LoopThread, "run", interrupted)

    def open_it() -> None:
        with pytest.raises(InvalidArgument, match="closed"):
            consumer.open()

    consumer = new(cluster)
    assert is_done(open_it)
    monkeypatch.undo()
    consumer = new(cluster).open()
    monkeypatch.setattr(LoopThread, "run", interrupted)
    assert is_done(consumer.close)
    monkeypatch.undo()
    assert calls == ["_start", "_stop", "_stop"]
    with Subscriber(cluster.coordinator, "q", session_timeout_s=20) as second:
        second.wait_elected(WAIT_S)


def test_a_consumer_whose_opening_nobody_waits_for_any_more_is_closed(
    zookeeper_server: EmbeddedZooKeeper, cluster_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`async with` never comes to its end where it is cancelled at its beginning, as by a time-out."""
    asked, may_answer, describe = threading.Event(), threading.Event(), FakeCluster.DescribeQueue

    async def late(self: FakeCluster, request: Any, context: Any) -> Any:
        asked.set()
        await asyncio.to_thread(may_answer.wait, WAIT_S)
        return await describe(self, request, context)

    monkeypatch.setattr(FakeCluster, "DescribeQueue", late)

    async def give_up(cluster: FakeCluster) -> None:
        entering = asyncio.ensure_future(new(cluster).__aenter__())
        await asyncio.to_thread(asked.wait, WAIT_S)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        may_answer.set()

    with FakeCluster(zookeeper_server.address, cluster_name) as cluster:
        asyncio.run(give_up(cluster))
        with Subscriber(cluster.coordinator, "q", session_timeout_s=20) as second:
            second.wait_elected(WAIT_S)


def test_what_is_wrong_is_said_at_once(cluster: FakeCluster) -> None:
    with pytest.raises(UnknownQueue):
        Consumer(cluster.coordinator, "nothing").open()
    with pytest.raises(Unreachable):
        Consumer("127.0.0.1:1", "q", connect_timeout_s=0.5).open()
    with new(cluster) as consumer:
        cluster.append(numbered(0, 1), 0)
        for max_records in (0, -1):
            with pytest.raises(InvalidArgument):
                consumer.poll(max_records)
        assert taken(consumer, 1)[0].offset == 0
