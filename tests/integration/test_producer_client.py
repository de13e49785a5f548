"""The whole producer over real gRPC and a real ZooKeeper, against a small coordinator and master that do what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Self

import grpc
import pytest
from kazoo.client import KazooClient

from seriatim.producer import Acknowledged, Elected, Producer, loop
from seriatim.producer import client as client_module
from seriatim.producer.core import sequencing
from seriatim.producer.handle import _set_from_thread
from seriatim.producer.terms import Terms
from seriatim.protocol import batch as batches
from seriatim.protocol import errors, rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.flag import set_from_anywhere
from seriatim.protocol.health import ELECTED, LIVE, READY, HealthServer, ask
from seriatim.protocol.marks import is_resend, overlaps, raised
from seriatim.protocol.names import COUNTER_BITS
from seriatim.protocol.seriatim_pb2_grpc import (
    BrokerServicer,
    CoordinatorServicer,
    add_BrokerServicer_to_server,
    add_CoordinatorServicer_to_server,
)
from seriatim.protocol.zookeeper_threads import Handler
from tests.forks import in_a_fork
from tests.integration.test_zookeeper_cut_off import Path
from tests.interruption import Interruption
from tests.waiting import wait_until

QUEUE_ID = 7
WAIT_S = 60.0

pytestmark = pytest.mark.timeout(300)


class SmallCluster(CoordinatorServicer, BrokerServicer):
    """One coordinator and one master in one process: links follow one another, each is a list of batches.

    Control: `reply_with` answers AcquireSend instead, `refuse_at` refuses the next batch, links in `silent_epochs`
    acknowledge nothing, `break_streams` ends them. While `held_up` isn't set AcquireSend waits; `answered`: calls that are over.
    """

    def __init__(self, zookeeper: str) -> None:
        self.zookeeper = zookeeper
        self.token = 0
        self.epoch = 1
        self.links: dict[int, list[batches.EncodedBatch]] = {1: []}
        self.marks: dict[str, int] = {}
        self.marks_on_two: dict[str, int] = {}
        self.is_resume_known = True
        self.next_master = ""
        self.wrong_address = ""
        self.silent_epochs: set[int] = set()
        self.reply_with: list[Any] = []
        self.refuse_with: list[errors.SeriatimError] = []
        self.acquired: list[pb.AcquireSendRequest] = []
        self.held_up: asyncio.Event | None = None
        self.answered = 0
        self.max_record_bytes = 1000
        self.streams: set[Any] = set()
        self.loop = asyncio.new_event_loop()
        self.port = 0
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self.loop.run_until_complete(self._serve()))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self.loop.close()

    async def _serve(self) -> None:
        self.loop.set_exception_handler(lambda loop, context: None)
        server = rpc.server()
        add_CoordinatorServicer_to_server(self, server)
        add_BrokerServicer_to_server(self, server)
        self.port = rpc.listen(server, "127.0.0.1:0")
        await server.start()
        self._ready.set()
        await self._stop.wait()
        await server.stop(0)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def break_streams(self) -> None:
        """As a master that is gone does: who sends is told. (Of a handler that is cancelled gRPC tells nobody.)"""

        async def end() -> None:
            for context in list(self.streams):
                with contextlib.suppress(grpc.aio.AbortError):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")

        asyncio.run_coroutine_threadsafe(end(), self.loop)

    def values(self) -> list[bytes]:
        """What a reader would get: all links in order, without re-sends."""
        values: list[bytes] = []
        marks: dict[str, int] = {}
        for epoch in sorted(self.links):
            for one in self.links[epoch]:
                columns = batches.decode(one)
                for row, value in enumerate(columns.values):
                    if columns.seqs[row] > marks.get(columns.source_of(row), -1):
                        marks[columns.source_of(row)] = columns.seqs[row]
                        values.append(value)
        return values

    def end(self) -> int:
        link = self.links[self.epoch]
        return link[-1].header.end_index if link else 0

    # ---- coordinator ---------------------------------------------------------------------------------------

    async def DescribeCluster(self, request: Any, context: Any) -> pb.DescribeClusterReply:  # noqa: N802
        return pb.DescribeClusterReply(cluster="test", zookeeper=self.zookeeper)

    @rpc.answers_errors
    async def DescribeQueue(self, request: Any, context: Any) -> pb.QueueView:  # noqa: N802
        if request.queue != "q":
            raise errors.UnknownQueue(f"no queue {request.queue!r}")
        return pb.QueueView(queue_id=QUEUE_ID, queue="q")

    @rpc.answers_errors
    async def AcquireSend(self, request: Any, context: Any) -> pb.AcquireSendReply:  # noqa: N802
        self.acquired.append(request)
        try:
            if self.held_up is not None:
                await self.held_up.wait()
            return self._granted(request)
        finally:
            self.answered += 1

    def _granted(self, request: Any) -> pb.AcquireSendReply:
        if self.reply_with:
            answer = self.reply_with.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        if request.token == 0:
            self.token += 1
        elif request.token < self.token:
            raise errors.Fenced("a newer sender was elected")
        if request.failed_epoch == self.epoch:
            self.epoch += 1
            self.links[self.epoch] = []
        elif request.token == 0:
            self.marks_on_two = dict(self.marks)
        member = pb.LinkMember(group="g1", member="a", address=self.wrong_address or self.address)
        grant = pb.SendGrant(
            epoch=self.epoch, master=member, slave=member, next_index=self.end(), is_resume_known=self.is_resume_known,
            resume_point=self.marks_on_two, max_record_bytes=self.max_record_bytes, has_base=True,
            base=sum(link[-1].header.end_index for epoch, link in self.links.items() if link and epoch < self.epoch),
            next_master=self.next_master,
        )  # fmt: skip
        return pb.AcquireSendReply(grant=grant, queue_id=QUEUE_ID, token=self.token)

    # ---- master --------------------------------------------------------------------------------------------

    @rpc.stream_answers_errors
    async def Append(self, requests: Any, context: Any) -> AsyncIterator[pb.AppendReply]:  # noqa: N802
        self.streams.add(context)
        try:
            async for request in requests:
                if request.WhichOneof("kind") == "open":
                    if request.open.token < self.token:
                        raise errors.Fenced("a newer sender was elected")
                    yield pb.AppendReply(next_index=request.open.next_index)  # as a master does: it is there
                    continue
                try:
                    self._take(batches.parse(request.batch.header, request.batch.payload))
                except errors.SeriatimError as refusal:
                    yield pb.AppendReply(refusal=errors.to_wire(refusal))
                    async for _ in requests:  # as a master does: nothing more is taken
                        continue
                    return
                if self.epoch not in self.silent_epochs:
                    self.marks_on_two = dict(self.marks)
                    yield pb.AppendReply(next_index=self.end())
        finally:
            self.streams.discard(context)

    def _take(self, one: batches.EncodedBatch) -> None:
        if self.refuse_with:
            raise self.refuse_with.pop(0)
        if overlaps(self.marks_on_two, one.header.spans):
            kind = errors.Resend if is_resend(self.marks_on_two, one.header.spans) else errors.PartlyResend
            raise kind("stored before", marks=self.marks_on_two)
        if one.header.first_index != self.end():
            raise errors.WrongIndex("wrong index", next_index=self.end())
        self.links[self.epoch].append(one)
        self.marks = raised(self.marks, one.header.spans)


@pytest.fixture
def cluster(zookeeper: str) -> Iterator[SmallCluster]:
    with SmallCluster(zookeeper) as small:
        yield small


def new(cluster: SmallCluster, name: str = "p", **settings: Any) -> Producer:
    """A producer that gives neither its session nor a link up because this machine stands still for a moment."""
    patient = {"max_block_s": WAIT_S, "session_timeout_s": 20, "acknowledgement_deadline_s": 5}
    return Producer(cluster.address, "q", name, **{**patient, **settings})


def test_records_arrive_in_order_with_their_places(cluster: SmallCluster) -> None:
    with new(cluster) as producer:
        handles = [producer.send(b"%d" % number) for number in range(20_000)]
        ends = [handle.result(WAIT_S) for handle in handles]
    assert cluster.values() == [b"%d" % number for number in range(20_000)]
    assert [end.offset for end in ends] == list(range(20_000))
    assert ends[0] == Acknowledged(1, 0, 0, "p", 1 << 40)


def test_a_term_whose_seqs_are_spent_is_followed_by_another_and_nothing_ends_as_unknown(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequencing, "SPARE_SEQS", (1 << COUNTER_BITS) - 1000)
    deposed: list[str] = []
    with new(cluster, batch_bytes=2000, on_deposed=deposed.append) as producer:
        handles = [producer.send(b"%d" % number) for number in range(5000)]
        ends = [handle.result(WAIT_S) for handle in handles]
    assert cluster.values() == [b"%d" % number for number in range(5000)]
    terms = [end.seq >> COUNTER_BITS for end in ends]
    assert sorted(set(terms)) == list(range(1, max(terms) + 1))
    assert 4 <= max(terms) <= 6
    assert len(deposed) >= max(terms) - 1
    counters = [end.seq - (end.seq >> COUNTER_BITS << COUNTER_BITS) for end in ends]
    assert max(counters) < 1100  # no more than the batch that was open


def test_a_lone_record_leaves_at_once(cluster: SmallCluster) -> None:
    with new(cluster, linger_ms=60_000) as producer:
        producer.send(b"first").result(WAIT_S)
        assert producer.send(b"second", key=b"k", headers={"h": b"1"}).result(30).index == 1
    columns = batches.decode(cluster.links[1][1])
    assert columns.keys == [b"k"]
    assert columns.headers == [(("h", b"1"),)]


@pytest.mark.parametrize(
    "harm",
    [
        lambda cluster: cluster.break_streams(),
        lambda cluster: cluster.refuse_with.append(errors.PeerLost("no slave")),
        lambda cluster: cluster.refuse_with.append(errors.WrongIndex("other")),
        lambda cluster: cluster.refuse_with.append(errors.OlderVersion("older")),
    ],
)
def test_a_failure_loses_and_reorders_nothing(cluster: SmallCluster, harm: Callable[[SmallCluster], None]) -> None:
    with new(cluster, batch_bytes=2000, acknowledgement_deadline_s=0.3) as producer:
        for number in range(10_000):
            if number in (2000, 5000, 9000):
                harm(cluster)
            producer.send(b"%d" % number)
    assert cluster.values() == [b"%d" % number for number in range(10_000)]


def test_a_silent_master_is_given_up_and_its_records_sent_again(cluster: SmallCluster) -> None:
    with new(cluster, acknowledgement_deadline_s=0.3) as producer:
        producer.send(b"1").result(WAIT_S)
        cluster.silent_epochs = {1}
        lost = producer.send(b"2")
        assert lost.result(WAIT_S).epoch > 1
    assert cluster.acquired[1].failed_epoch == 1
    assert cluster.values() == [b"1", b"2"]


def test_a_master_that_is_not_reached_is_named_until_one_is(cluster: SmallCluster) -> None:
    cluster.wrong_address = "127.0.0.1:1"
    with new(cluster, batch_bytes=100, max_buffer_bytes=100, max_block_s=0) as producer:
        producer.wait_until_elected(WAIT_S)
        producer.send(b"1")
        wait_until(lambda: len(cluster.acquired) > 2)
        with pytest.raises(errors.DeadlineOver, match=r"the master at 127\.0\.0\.1:1 failed"):
            producer.flush(0)
        with pytest.raises(errors.Unreachable, match=r"the master at 127\.0\.0\.1:1 failed"):
            producer.send(b"2", key=b"no room")
        cluster.wrong_address = ""
        producer.flush(WAIT_S)
        assert isinstance(producer._buffer.problem, errors.NotElected)
    assert cluster.values() == [b"1"]


def test_the_next_master_is_connected_to_before_it_is_needed(cluster: SmallCluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(WAIT_S)
        cluster.next_master = f"127.0.0.1:{listening.getsockname()[1]}"
        with new(cluster) as producer:
            producer.send(b"1").result(WAIT_S)
            connection, _ = listening.accept()
            connection.close()


def test_waiting_for_a_group_holds_the_sender_back(cluster: SmallCluster) -> None:
    reasons = [pb.WaitReason(what="g1", reason="not registered")]
    cluster.reply_with += [pb.AcquireSendReply(wait=pb.Wait(retry_after_ms=50, reasons=reasons), token=1)] * 10_000
    cluster.token = 1
    with new(cluster, max_block_s=0.3) as producer:
        wait_until(lambda: len(cluster.acquired) > 1)  # who asks again knows the first answer
        with pytest.raises(errors.Waiting, match="g1: not registered"):
            producer.send(b"1")
        cluster.loop.call_soon_threadsafe(cluster.reply_with.clear)
        producer.wait_until_elected(WAIT_S)
        producer.send(b"1")
    assert cluster.values() == [b"1"]


def test_waiting_without_a_token_is_waited_out(cluster: SmallCluster) -> None:
    reasons = [pb.WaitReason(what="chain", reason="it keeps changing")]
    cluster.reply_with.append(pb.AcquireSendReply(wait=pb.Wait(retry_after_ms=50, reasons=reasons), queue_id=QUEUE_ID))
    with new(cluster) as producer:
        producer.send(b"1").result(WAIT_S)
    assert cluster.values() == [b"1"]


def test_seqs_of_the_users_go_on_from_the_resume_point(cluster: SmallCluster) -> None:
    with new(cluster) as first:
        for seq in range(10):
            first.send(b"%d" % seq, seq=seq)
        with pytest.raises(errors.SeqNotRising):
            first.send(b"again", seq=9)
    with new(cluster) as second:
        assert second.wait_until_elected(WAIT_S) == Elected(2, {"p": 9})
        ends = [second.send(b"%d" % seq, seq=seq).result(WAIT_S) for seq in range(5, 15)]
    assert [end.epoch for end in ends] == [None] * 5 + [1] * 5
    assert [end.seq for end in ends] == list(range(5, 15))
    assert cluster.values() == [b"%d" % seq for seq in range(15)]


def test_automatic_seqs_below_what_one_copy_may_hold_are_refused(cluster: SmallCluster) -> None:
    member = pb.LinkMember(group="g1", member="a", address=cluster.address)
    grant = pb.SendGrant(epoch=1, master=member, slave=member, is_resume_known=True, held={"p": 1 << 60})
    cluster.reply_with.append(pb.AcquireSendReply(grant=grant, queue_id=QUEUE_ID, token=1))
    cluster.token = 1
    with new(cluster) as producer:
        with pytest.raises(errors.InvalidArgument, match="a source has either those or the user's"):
            producer.send(b"1")
        producer.send(b"2", seq=(1 << 60) + 1).result(WAIT_S)
    assert cluster.values() == [b"2"]


def test_an_unknown_resume_point_is_settled_by_the_master(cluster: SmallCluster) -> None:
    with new(cluster) as first:
        first.send_many([b"0", b"1", b"2"], seqs=[0, 1, 2])
    cluster.is_resume_known = False
    with new(cluster) as second:
        assert second.wait_until_elected(WAIT_S).resume_point is None
        handles = second.send_many([b"%d" % seq for seq in range(6)], seqs=range(6))
        ends = [handle.result(WAIT_S) for handle in handles]
    assert [end.seq for end in ends] == list(range(6))
    assert cluster.values() == [b"%d" % seq for seq in range(6)]


def test_an_overtaken_sender_ends_its_records_as_unknown_and_never_sends_them_again(cluster: SmallCluster) -> None:
    told: list[str] = []
    with new(cluster, on_elected=lambda elected: told.append(f"elected {elected.token}"),
             on_deposed=lambda reason: told.append("deposed")) as producer:  # fmt: skip
        producer.send(b"0", seq=0).result(WAIT_S)
        cluster.silent_epochs = {1}
        lost = producer.send(b"1", seq=1)
        wait_until(lambda: cluster.end() == 2)
        cluster.token = 5
        cluster.refuse_with.append(errors.Fenced("token 5"))
        also_lost = producer.send(b"2", seq=2)
        for handle in (lost, also_lost):
            with pytest.raises(errors.OutcomeUnknown):
                handle.result(WAIT_S)
        cluster.silent_epochs = set()
        with pytest.raises(errors.NotElected, match="resume point"):
            producer.send(b"3", seq=3)
        elected = producer.wait_until_elected(WAIT_S)
        assert elected.token == 6
        assert elected.resume_point == {"p": 1}
        assert (
            producer.send(b"2", seq=2).result(WAIT_S).source == "p"
        )  # and to flush, and close, says nothing of them once more
    assert cluster.values() == [b"0", b"1", b"2"]
    assert told == ["elected 1", "deposed", "elected 6", "deposed"]


def test_two_instances_one_sends_the_other_takes_over(cluster: SmallCluster) -> None:
    first = new(cluster, "first")
    first.send(b"1").result(WAIT_S)
    second = new(cluster, "second", max_block_s=0.2)
    with pytest.raises(errors.NotElected):
        second.send(b"2")
    wait_until(lambda: second.is_connected)
    assert first.is_elected
    assert not second.is_elected
    first.close()
    second.wait_until_elected(WAIT_S)
    second.send(b"2").result(WAIT_S)
    second.close()
    assert cluster.values() == [b"1", b"2"]


def test_a_producer_that_meets_a_limit_of_its_process_while_it_connects_is_elected_behind_it(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped for good by what had passed a moment later."""
    met, opened = list[str](), Handler.create_socket_pair

    def open_next(handler: Handler) -> Any:
        met.append("")
        if len(met) < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(handler)

    monkeypatch.setattr(Handler, "create_socket_pair", open_next)
    with new(cluster) as producer:
        producer.wait_until_elected(WAIT_S)
        producer.send(b"1").result(WAIT_S)
    assert len(met) == 3


def test_a_producer_whose_loop_stands_still_says_neither_that_it_is_elected_nor_connected_nor_live(
    cluster: SmallCluster,
) -> None:
    """Its health's own threads said all of it for ever, beside the one that was elected by then."""
    goes_on = threading.Event()
    first = new(cluster, "first", session_timeout_s=4, on_elected=lambda _: goes_on.wait())
    claims = {
        READY: lambda: first.is_connected, ELECTED: lambda: first.is_elected, LIVE: lambda: first.is_live,
    }  # fmt: skip
    second = None
    try:
        assert first.is_live
        first.wait_until_elected(WAIT_S)
        with HealthServer("127.0.0.1:0", claims) as server:
            wait_until(lambda: not first.is_live)
            assert not first.is_connected
            assert not first.is_elected
            answers = [ask(f"127.0.0.1:{server.port}", service, WAIT_S) for service in claims]
            assert answers == ["NOT_SERVING"] * 3
            second = new(cluster, "second")
            second.wait_until_elected(WAIT_S)
            assert not first.is_elected
            goes_on.set()
            wait_until(lambda: first.is_live and first.is_connected)
    finally:
        goes_on.set()
        first.close()
        if second is not None:
            second.close()


def test_an_election_node_that_is_gone_deposes_its_owner(cluster: SmallCluster, zookeeper: str) -> None:
    client = KazooClient(zookeeper)
    client.start(timeout=WAIT_S)
    with new(cluster) as producer:
        producer.wait_until_elected(WAIT_S)
        path = f"/seriatim/test/queues/{QUEUE_ID}/senders"
        (node,) = client.get_children(path)
        client.delete(f"{path}/{node}")
        wait_until(lambda: cluster.token == 2)
        assert producer.wait_until_elected(WAIT_S).token == 2
    client.stop()
    client.close()


def test_what_a_term_that_is_over_has_asked_for_fences_nobody(
    cluster: SmallCluster, zookeeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node goes while a coordinator is slow to give it a token; for the next one it is given one at once."""
    monkeypatch.setattr(loop, "ACQUIRE_TIMEOUT_S", 2 * WAIT_S)
    client = KazooClient(zookeeper)
    client.start(timeout=WAIT_S)
    path = f"/seriatim/test/queues/{QUEUE_ID}/senders"
    cluster.held_up = asyncio.Event()
    with new(cluster) as producer:
        wait_until(lambda: len(cluster.acquired) == 1)
        cluster.held_up = None
        (node,) = client.get_children(path)
        client.delete(f"{path}/{node}")
        assert producer.wait_until_elected(WAIT_S).token == 1
        wait_until(lambda: cluster.answered == 2)  # and nobody has let the first one go on
        assert cluster.token == 1
        producer.send(b"1").result(WAIT_S)
    client.stop()
    client.close()


def test_who_is_first_in_line_is_not_said_to_stand_by(cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seriatim.producer.loop.ACQUIRE_TIMEOUT_S", WAIT_S)
    cluster.held_up = asyncio.Event()
    with new(cluster) as producer:
        wait_until(lambda: cluster.acquired)
        with pytest.raises(errors.NotElected, match="first in line of the queue's senders: a coordinator was asked"):
            producer.wait_until_elected(0)
        cluster.loop.call_soon_threadsafe(cluster.held_up.set)
        assert producer.wait_until_elected(WAIT_S).token == 1


def waits_for(producer: Producer) -> str:
    try:
        producer.wait_until_elected(0)
    except errors.NotElected as error:
        return error.message
    return ""


def test_who_is_not_elected_because_zookeeper_does_not_answer_says_that_and_not_that_it_stands_by(
    cluster: SmallCluster, zookeeper: str
) -> None:
    """It was `the election says unsure` of the one, and `not first in line` of the other, for as long as nobody could be elected."""
    path = Path(zookeeper)

    def done(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, cluster.loop).result(WAIT_S)

    cluster.zookeeper = done(path.lay())
    deposed: list[str] = []
    with new(cluster, on_deposed=deposed.append) as first:
        first.wait_until_elected(WAIT_S)
        with new(cluster) as second:
            wait_until(lambda: "standing by: not first in line" in waits_for(second))
            done(path.cut())
            wait_until(lambda: all("ZooKeeper doesn't answer" in waits_for(one) for one in (first, second)))
            assert "ZooKeeper doesn't answer" in deposed[0]
            done(path.lay())
            first.wait_until_elected(WAIT_S)
            wait_until(lambda: "standing by: not first in line" in waits_for(second))
    done(path.cut())


def test_who_stands_again_waits_for_the_next_term(cluster: SmallCluster) -> None:
    with new(cluster) as producer:
        for token in range(1, 6):
            assert producer.wait_until_elected(WAIT_S).token == token
            producer.stand_again()
            assert not producer.is_elected


def test_bad_records_are_refused_at_once_and_harm_nothing(cluster: SmallCluster) -> None:
    with new(cluster) as producer:
        producer.send(b"1").result(WAIT_S)
        with pytest.raises(errors.RecordTooLarge, match="over the limit of 1000"):
            producer.send(b"x" * 1001)
        with pytest.raises(errors.InvalidArgument):
            producer.send("text")  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidArgument):
            producer.send(b"1", source="s")
        with pytest.raises(errors.InvalidArgument, match="automatic"):
            producer.send(b"1", seq=1)
        producer.send(b"x" * 1000, seq=1, source="s").result(WAIT_S)
    assert len(cluster.values()) == 2


def test_the_buffer_is_bounded_and_its_room_comes_back(cluster: SmallCluster) -> None:
    with new(cluster, max_block_s=0.3, max_buffer_bytes=4000, batch_bytes=1000) as producer:
        producer.wait_until_elected(WAIT_S)
        producer.send(b"first").result(WAIT_S)
        cluster.silent_epochs = {*range(100)}
        sent = 0
        with contextlib.suppress(errors.DeadlineOver):
            while sent < 100:
                producer.send(b"x" * 100)
                sent += 1
        with pytest.raises(errors.DeadlineOver, match="buffer is full"):
            producer.send(b"x" * 100)
        assert sent * 132 <= 4000
        cluster.silent_epochs = set()
        cluster.break_streams()
        producer.flush(WAIT_S)
    assert len(cluster.values()) == sent + 1


def test_unknown_queues_and_dead_addresses_are_told_apart(cluster: SmallCluster) -> None:
    with pytest.raises(errors.UnknownQueue), Producer(cluster.address, "none") as producer:
        producer.wait_until_elected(WAIT_S)
    producer = Producer("127.0.0.1:1", "q", max_block_s=0.1)

    def has_asked() -> bool:
        try:
            producer.wait_until_elected(0)
        except errors.SeriatimError as error:
            return isinstance(error, errors.Unreachable)
        return False

    wait_until(has_asked)
    with pytest.raises(errors.Unreachable, match=r"127\.0\.0\.1:1"):
        producer.send(b"1")
    producer.abort()
    with pytest.raises(errors.InvalidArgument):
        Producer("nowhere", "q")


@pytest.mark.parametrize(
    "settings",
    [
        *({"name": name} for name in ("", "a/b", "a\nb", "\x00", "\x7f", "\ud800", "\U0001f600", 7)),
        {"queue": 7},
        *({"session_timeout_s": value} for value in (0, -1, None, "4", float("nan"), float("inf"))),
        *({"acknowledgement_deadline_s": value} for value in (0, -1, None, float("inf"))),
        *({"max_block_s": value} for value in (-1, None, float("inf"))),
        *({"linger_ms": value} for value in (-1, None, float("nan"))),
    ],
)
def test_settings_that_cannot_be_are_refused_at_once(settings: dict[str, Any]) -> None:
    before = set(threading.enumerate())  # gRPC's may end meanwhile, when what was closed before is collected
    with pytest.raises(errors.InvalidArgument):
        Producer("127.0.0.1:1", **{"queue": "q", "name": "n", **settings})
    assert set(threading.enumerate()) <= before


def test_a_name_is_any_text_that_zookeeper_takes(cluster: SmallCluster) -> None:
    with new(cluster, "Kasse 1 (Zürich) 漢\ufeff") as producer:
        producer.send(b"1").result(WAIT_S)


def test_a_time_that_cannot_be_waited_for_is_refused_and_closes_nothing(cluster: SmallCluster) -> None:
    with new(cluster) as producer:
        for wait in (producer.wait_until_elected, producer.close):
            with pytest.raises(errors.InvalidArgument):
                wait(float("inf"))
        producer.send(b"1").result(WAIT_S)


def exit_now(_: object) -> None:
    """A callback that ends the program, as it thinks."""
    sys.exit(1)


def test_callbacks_that_exit_end_neither_the_producer_nor_its_records(cluster: SmallCluster) -> None:
    with new(cluster, on_elected=exit_now, on_deposed=exit_now) as producer:
        producer.wait_until_elected(WAIT_S)
        cluster.silent_epochs = {1}
        handle = producer.send(b"1")
        handle.add_done_callback(exit_now)
        cluster.silent_epochs = set()
        cluster.break_streams()
        handle.result(WAIT_S)
        producer.stand_again()
        wait_until(lambda: cluster.token == 2)
        producer.wait_until_elected(WAIT_S)
        producer.send(b"2").result(WAIT_S)
    assert cluster.values() == [b"1", b"2"]


def test_an_exit_that_nobody_foresaw_ends_every_record_and_leaves_the_election(cluster: SmallCluster) -> None:
    with new(cluster, session_timeout_s=40) as producer:
        producer.wait_until_elected(WAIT_S)
        cluster.silent_epochs = {*range(100)}
        handle = producer.send(b"1")
        wait_until(lambda: cluster.end() == 1)
        producer._loop._loop.call_soon_threadsafe(sys.exit, 1)
        with pytest.raises(errors.OutcomeUnknown, match="SystemExit"):
            handle.result(WAIT_S)
        with pytest.raises(errors.BugError, match="SystemExit"):
            producer.send(b"2")
        cluster.silent_epochs = set()
        with new(cluster, "another") as another:
            another.wait_until_elected(35)  # before the session would be over by itself


def test_a_batch_that_cannot_be_made_ends_the_producer_instead_of_being_passed_over(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(columns: batches.RecordColumns, *arguments: Any, **keywords: Any) -> batches.EncodedBatch:
        if columns.values[0] == b"1":
            raise MemoryError
        return batches.encode(columns, *arguments, **keywords)

    monkeypatch.setattr(loop, "encode", encode)
    producer = new(cluster)
    producer.send(b"0").result(WAIT_S)
    with pytest.raises(errors.OutcomeUnknown, match="MemoryError"):
        producer.send(b"1").result(WAIT_S)
    with pytest.raises(errors.BugError, match="MemoryError"):
        producer.send(b"2")
    producer.abort()
    assert cluster.values() == [b"0"]


def test_whatever_would_wait_in_a_callback_is_refused_there(cluster: SmallCluster) -> None:
    refused: list[str] = []

    def try_all(*waits: Callable[[], object]) -> None:
        for wait in waits:
            try:
                wait()
            except errors.InvalidArgument:
                refused.append(wait.__name__)

    with new(cluster, batch_bytes=40, on_deposed=lambda _: try_all(producer.wait_until_elected)) as producer:
        producer.wait_until_elected(WAIT_S)
        cluster.silent_epochs = {*range(100)}
        first, other = producer.send(b"1"), producer.send(b"2")
        wait_until(lambda: cluster.end() == 2)
        first.add_done_callback(lambda _: try_all(producer.flush, producer.close, other.result))
        first.add_done_callback(lambda _: producer.send(b"3"))  # there is room: it needn't wait
        cluster.silent_epochs = set()
        cluster.break_streams()
        other.result(WAIT_S)
        producer.flush(WAIT_S)
    assert refused == ["flush", "close", "result", "wait_until_elected"]
    assert cluster.values() == [b"1", b"2", b"3"]


def test_a_callback_may_abort(cluster: SmallCluster) -> None:
    producer = new(cluster)
    producer.wait_until_elected(WAIT_S)
    handle = producer.send(b"1")
    handle.add_done_callback(lambda _: producer.abort())
    handle.result(WAIT_S)
    wait_until(lambda: not producer._loop._thread.is_alive())
    with pytest.raises(errors.InvalidArgument, match="closed"):
        producer.send(b"2")


def test_to_abort_ends_a_close_that_waits_for_who_never_answers(cluster: SmallCluster) -> None:
    ends: list[errors.SeriatimError] = []

    def close() -> None:
        try:
            producer.close(None)
        except errors.SeriatimError as error:
            ends.append(error)

    producer = new(cluster)
    producer.wait_until_elected(WAIT_S)
    cluster.silent_epochs = {*range(100)}
    handle = producer.send(b"1")
    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    wait_until(lambda: len(handle.batch._waiting) == 1)
    producer.abort()
    closing.join(WAIT_S)
    assert [type(one) for one in ends] == [errors.OutcomeUnknown]
    assert not producer._loop._thread.is_alive()


def test_from_asyncio(cluster: SmallCluster) -> None:
    async def main() -> list[int | None]:
        async with new(cluster, batch_bytes=1000, max_buffer_bytes=3000) as producer:
            elected = await producer.wait_until_elected_async()
            assert elected.token == 1
            handles = [await producer.send_async(b"%d" % number) for number in range(500)]
            await producer.flush_async()
            return [(await handle).offset for handle in handles]

    assert asyncio.run(main()) == list(range(500))
    assert cluster.values() == [b"%d" % number for number in range(500)]


def test_a_flush_from_asyncio_waits_for_nothing_that_others_send_meanwhile(cluster: SmallCluster) -> None:
    async def main() -> None:
        async with new(cluster) as producer:
            await producer.wait_until_elected_async()
            is_over = False

            async def send_on() -> None:
                while not is_over:
                    await producer.send_async(b"other's")
                    await asyncio.sleep(0)

            other = asyncio.create_task(send_on())
            for _ in range(50):
                handle = await producer.send_async(b"own")
                await producer.flush_async()
                assert handle.done()
            is_over = True
            await other

    asyncio.run(main())


class _Deposed(Terms):
    """As if the instance were deposed as soon as somebody has seen that it is elected."""

    seen: Any = None

    @property
    def elected(self) -> Any:
        seen, self.seen = self.seen, None
        return seen

    @elected.setter
    def elected(self, elected: Any) -> None:
        self.seen = elected


def test_who_waits_is_told_of_a_term_that_ends_at_that_moment(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "Terms", _Deposed)
    with new(cluster) as producer:
        elected = producer.wait_until_elected(WAIT_S)
        producer._terms.elected = elected
        assert asyncio.run(producer.wait_until_elected_async()).token == elected.token


def test_a_signal_s_handler_may_abort_the_producer_that_it_has_interrupted_somebody_waiting_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread waited ten seconds for a lock that the waiting one held, with the session, and its place in the election, kept."""

    async def call(*_: object) -> None:
        raise errors.Unreachable("no coordinator can do that now")

    monkeypatch.setattr(Coordinators, "call", call)

    def abort() -> None:
        producer.abort()
        assert not producer._loop._thread.is_alive()

    number = 0
    while True:
        number += 1
        producer = Producer("127.0.0.1:1", "orders")
        try:
            with (
                Interruption(number, abort, client_module.__file__, threading.__file__) as interruption,
                pytest.raises((errors.InvalidArgument, errors.NotElected, errors.Unreachable)),
            ):
                producer.wait_until_elected(0.001)
        finally:
            producer.abort()
        if not interruption.has_come:
            break
    assert number > 10


def test_who_stands_by_leaves_no_waiters_behind(cluster: SmallCluster) -> None:
    async def main(producer: Producer) -> None:
        for _ in range(20):
            with pytest.raises(errors.SeriatimError):
                await producer.send_async(b"given up by itself")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(producer.wait_until_elected_async(), 0.001)
        patient = asyncio.create_task(other.send_async(b"given up by its caller"))
        await asyncio.sleep(0)
        assert other._buffer._waiters
        patient.cancel()
        await asyncio.gather(patient, return_exceptions=True)

    with new(cluster) as elected:
        elected.wait_until_elected(WAIT_S)
        producer, other = new(cluster, max_block_s=0.001), new(cluster)
        asyncio.run(main(producer))
        assert not producer._buffer._waiters
        assert not producer._terms.waiters
        assert not other._buffer._waiters
        producer.abort()
        other.abort()


class _ClosedLoop:
    """Closed between somebody's look at it and the call."""

    def is_closed(self) -> bool:
        return False

    def call_soon_threadsafe(self, *_: object) -> None:
        raise RuntimeError("Event loop is closed")


def test_whoever_waits_on_a_loop_that_is_closed_meanwhile_harms_nobody(
    cluster: SmallCluster, caplog: pytest.LogCaptureFixture
) -> None:
    closed: Any = _ClosedLoop()
    with new(cluster) as producer:
        producer.send(b"0").result(WAIT_S)
        cluster.silent_epochs = {*range(100)}
        handle = producer.send(b"1")
        handle.batch.when_done(partial(_set_from_thread, closed, closed))
        producer._buffer._waiters = {partial(set_from_anywhere, asyncio.Event(), closed): None}
        cluster.silent_epochs = set()
        cluster.break_streams()
        assert handle.result(WAIT_S).seq
        producer.send(b"2").result(WAIT_S)
    assert "callback" not in caplog.text


def test_why_a_sender_isn_t_connected_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[str] = []

    async def call(_: Coordinators, method: str, *__: object) -> None:
        tries.append(method)
        raise errors.Unreachable("no coordinator can do that now")

    monkeypatch.setattr(Coordinators, "call", call)
    monkeypatch.setattr(loop, "_CONNECT_RETRY_S", 0.001)
    with Producer("127.0.0.1:1", "orders"):
        wait_until(lambda: len(tries) > 10)
    assert caplog.text.count("not connected yet") == 1


def test_a_forked_process_is_told_that_the_producer_runs_in_its_parent(cluster: SmallCluster) -> None:
    with new(cluster) as producer:
        done = producer.send(b"1")
        done.result(WAIT_S)
        cluster.silent_epochs = {*range(100)}
        handle = producer.send(b"2")
        with producer._buffer._lock, handle.batch._ends.lock:  # as another thread may
            said = in_a_fork(
                lambda: producer.send(b"3"),
                lambda: producer.send_many([b"3"]),
                handle.result,
                lambda: handle.add_done_callback(print),
                producer.flush,
                producer.wait_until_elected,
                done.result,
                producer.stand_again,
                producer.close,
                producer.abort,
            )
        assert [one.split(":")[0] for one in said] == ["InvalidArgument"] * 6 + ["returned"] * 4
        assert all("before a fork" in one for one in said[:6])
        cluster.silent_epochs = set()
        cluster.break_streams()
        producer.send(b"4").result(WAIT_S)
    assert cluster.values() == [b"1", b"2", b"4"]


def test_each_thread_that_flushes_hears_of_a_failure(cluster: SmallCluster) -> None:
    told: list[str] = []

    def flush() -> None:
        try:
            producer.flush(WAIT_S)
        except errors.OutcomeUnknown:
            told.append("unknown")

    with new(cluster) as producer:
        producer.send(b"0").result(WAIT_S)
        cluster.silent_epochs = {*range(100)}
        handle = producer.send(b"1")
        threads = [threading.Thread(target=flush) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(handle.batch._waiting) == 2)
        producer.stand_again()
        for thread in threads:
            thread.join()
        assert told == ["unknown", "unknown"]
        cluster.silent_epochs = set()
        producer.flush(WAIT_S)  # told once


def test_who_asks_no_handle_hears_of_a_failure_when_it_closes(cluster: SmallCluster) -> None:
    producer = new(cluster)
    producer.wait_until_elected(WAIT_S)
    cluster.silent_epochs = {*range(100)}
    handle = producer.send(b"1")
    producer.stand_again()
    wait_until(handle.done)
    with pytest.raises(errors.OutcomeUnknown):
        producer.close()
    assert not producer._loop._thread.is_alive()


def test_a_producer_that_nobody_has_any_more_sends_what_it_was_given_and_leaves_the_election(
    cluster: SmallCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """It stayed elected as long as its process lived, and nobody else could send."""
    with pytest.warns(ResourceWarning, match="unclosed producer of queue 'q'"):
        handle = new(cluster, session_timeout_s=40).send(b"1")
    handle.result(WAIT_S)
    with new(cluster, "another") as another:
        another.wait_until_elected(35)  # before the session would be over by itself
        another.send(b"2").result(WAIT_S)
    assert cluster.values() == [b"1", b"2"]
    assert "nobody has it any more" in caplog.text


def test_who_has_its_send_has_the_producer(cluster: SmallCluster) -> None:
    send = new(cluster, session_timeout_s=40).send
    for number in range(3):
        send(b"%d" % number).result(WAIT_S)
    with pytest.warns(ResourceWarning, match="unclosed producer"):
        del send
    with new(cluster, "another") as another:
        another.wait_until_elected(35)
    assert cluster.values() == [b"0", b"1", b"2"]


def test_many_at_once_from_many_threads(cluster: SmallCluster) -> None:
    with new(cluster, batch_bytes=3000) as producer:
        producer.wait_until_elected(WAIT_S)

        def work(who: int) -> None:
            for start in range(0, 2000, 100):
                many = producer.send_many([b"%d %d" % (who, number) for number in range(start, start + 100)])
                assert len(many) == 100
                many[-1].result(WAIT_S)

        threads = [threading.Thread(target=work, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    values = cluster.values()
    assert len(values) == 8000
    for who in range(4):
        own = [int(value.split()[1]) for value in values if value.startswith(b"%d " % who)]
        assert own == list(range(2000))
