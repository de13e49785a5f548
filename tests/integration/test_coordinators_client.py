from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from seriatim.cli.embedded.ports import free_port
from seriatim.protocol import coordinators as coordinators_module
from seriatim.protocol import rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.coordinators import COMPARED_EVERY, SILENCE_S, Coordinators, may_overlap
from seriatim.protocol.errors import DeadlineOver, Fenced, InvalidArgument, UnknownQueue, Unreachable, Waiting
from seriatim.protocol.registration import CoordinatorRegistration
from seriatim.protocol.seriatim_pb2_grpc import CoordinatorServicer, add_CoordinatorServicer_to_server

DEADLINE_S = 60


class Coordinator(CoordinatorServicer):
    """Answers at once, or never."""

    def __init__(self, version=0, *, is_silent=False):
        self.version = version
        self.cluster = "one"
        self.named = []
        self.is_outside = None
        self.is_silent = is_silent
        self.calls = []
        self.is_asked = asyncio.Event()

    async def _silence(self):
        """Until the server ends."""
        self.is_asked.set()
        await asyncio.Event().wait()

    async def _answer(self, request):
        self.calls.append(request)
        if self.is_silent:
            await self._silence()
        return pb.QueueView(queue=request.queue, chain_version=self.version)

    @rpc.answers_errors
    async def DescribeQueue(self, request, context):  # noqa: N802 - gRPC's name
        if request.queue == "none":
            raise UnknownQueue("there is no queue none")
        if request.queue == "later":
            raise Unreachable("ZooKeeper didn't answer: ConnectionLoss")
        return await self._answer(request)

    @rpc.answers_errors
    async def DescribeCluster(self, request, context):  # noqa: N802 - gRPC's name
        if self.is_silent:
            await self._silence()
        return pb.DescribeClusterReply(cluster=self.cluster, coordinators=self.named, is_outside=self.is_outside)

    @rpc.answers_errors
    async def AcquireSend(self, request, context):  # noqa: N802 - gRPC's name
        if request.failed_epoch == 99:
            raise Fenced("overtaken")
        self.calls.append(request)
        if self.is_silent:
            await self._silence()
        return pb.AcquireSendReply(token=7, grant=pb.SendGrant(epoch=self.version))

    @rpc.answers_errors
    async def RemoveGroup(self, request, context):  # noqa: N802 - gRPC's name
        reasons = {f"queue orders-{number}": "3 of its links are there" for number in range(1000)}
        if request.group == "g1":
            raise Waiting("group g1 can't be removed now", reasons=reasons)
        raise InvalidArgument(f"{request.group!r} can't name a group")

    async def CreateQueue(self, request, context):  # noqa: N802 - gRPC's name
        return await self._answer(request)

    async def WatchQueue(self, request, context):  # noqa: N802 - gRPC's name
        yield pb.QueueView(queue=request.queue, chain_version=self.version, cluster=self.cluster)


class Elsewhere(Coordinator):
    """Of another cluster, which has no such queue, or another one of its name."""

    def __init__(self, *, has_one=False):
        super().__init__(9)
        self.cluster = "other"
        self.has_one = has_one
        self.named = ["127.0.0.1:1"]

    @rpc.answers_errors
    async def AcquireSend(self, request, context):  # noqa: N802 - gRPC's name
        raise UnknownQueue("there is no queue with id 7")

    @rpc.stream_answers_errors
    async def WatchQueue(self, request, context):  # noqa: N802 - gRPC's name
        self.is_asked.set()
        if not self.has_one:
            raise UnknownQueue("there is no queue q")
        yield pb.QueueView(queue=request.queue, chain_version=self.version, cluster=self.cluster)
        await self._silence()


async def start(servicer, port=0):
    server = rpc.server()
    add_CoordinatorServicer_to_server(servicer, server)
    port = rpc.listen(server, f"127.0.0.1:{port}")
    await server.start()
    return server, f"127.0.0.1:{port}"


def test_one_that_is_gone_is_passed_over_and_asked_last_from_then_on():
    async def scenario():
        servicer = Coordinator(5)
        server, living = await start(servicer)
        dead = f"127.0.0.1:{free_port()}"
        async with Coordinators(f"{dead}, {living}") as coordinators:
            for _ in range(2):
                view = await coordinators.call("DescribeQueue", pb.QueueRequest(queue="q"))
                assert view.chain_version == 5
            assert coordinators._addresses == [living, dead]
        await server.stop(None)
        assert all(call.cause_id.startswith("DescribeQueue-") for call in servicer.calls)

    asyncio.run(scenario())


def test_an_answer_that_is_an_error_is_final():
    async def scenario():
        server, address = await start(Coordinator())
        async with Coordinators(address) as coordinators:
            with pytest.raises(UnknownQueue):
                await coordinators.call("DescribeQueue", pb.QueueRequest(queue="none"))
        await server.stop(None)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("group", "error", "said"),
    [
        ("g1", Waiting, "group g1 can't be removed now"),
        ("x" * 50_000, InvalidArgument, "'" + "x" * 499 + "…"),
        ("%é" * 9_000, InvalidArgument, "'" + "%é" * 249 + "%…"),
    ],
    ids=["details", "message", "escaped"],
)
def test_an_error_that_is_too_long_for_grpc_is_told_all_the_same(group, error, said):
    """A thousand queues stand against it, or somebody's input is in its message."""

    async def scenario():
        server, address = await start(Coordinator())
        async with Coordinators(address) as coordinators:
            with pytest.raises(error) as caught:
                await coordinators.call("RemoveGroup", pb.GroupRequest(group=group))
        assert caught.value.message == said
        await server.stop(None)

    asyncio.run(scenario())


def test_a_coordinator_that_can_t_do_it_is_not_said_to_be_gone():
    async def scenario():
        server, answering = await start(Coordinator())
        gone = f"127.0.0.1:{free_port()}"
        async with Coordinators([answering, gone]) as coordinators:
            with pytest.raises(Unreachable, match=r"no coordinator can do that now at .*: ZooKeeper didn't answer"):
                await coordinators.call("DescribeQueue", pb.QueueRequest(queue="later"))
        await server.stop(None)
        async with Coordinators(gone) as coordinators:
            with pytest.raises(Unreachable, match=r"no coordinator answers at .*: Connection refused"):
                await coordinators.call("DescribeQueue", pb.QueueRequest(queue="later"))

    asyncio.run(scenario())


def test_why_a_connection_ends_is_told_without_grpc_s_own_words():
    """As where containers' proxy takes it for a coordinator that is down: which words depends on chance, and `produce` told each anew."""

    async def scenario():
        async def ends(_, writer):
            writer.close()

        async with await asyncio.start_server(ends, "127.0.0.1", 0) as server:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with Coordinators(address) as coordinators:
                with pytest.raises(Unreachable) as told:
                    await coordinators.call("DescribeQueue", pb.QueueRequest(queue="q"))
        assert told.value.message.startswith(f"no coordinator answers at {address}: ")
        assert "addresses" not in told.value.message

    asyncio.run(scenario())


def test_a_silent_one_is_passed_over_for_a_question_but_a_change_isn_t_asked_for_twice():
    async def scenario():
        silent, answering = Coordinator(is_silent=True), Coordinator(9)
        servers, addresses = zip(*[await start(one) for one in (silent, answering)], strict=True)
        async with Coordinators(",".join(addresses)) as coordinators:
            with pytest.raises(DeadlineOver, match="may have done it"):
                await coordinators.call("CreateQueue", pb.CreateQueueRequest(queue="q"), 3)
            assert (len(silent.calls), len(answering.calls)) == (1, 0)
            view = await coordinators.call("DescribeQueue", pb.QueueRequest(queue="q"), DEADLINE_S)
            assert view.chain_version == 9
        for server in servers:
            await server.stop(None)

    asyncio.run(scenario())


class Damaged:
    """What was an answer when it was sent."""

    def SerializeToString(self):  # noqa: N802 - protobuf's
        return b"\xff"


class DamagedOnce(Coordinator):
    """Its first answers of each kind are damaged on their way."""

    async def DescribeCluster(self, request, context):  # noqa: N802 - gRPC's name
        return pb.DescribeClusterReply()

    async def DescribeQueue(self, request, context):  # noqa: N802 - gRPC's name
        return await self._damaged(request)

    async def CreateQueue(self, request, context):  # noqa: N802 - gRPC's name
        return await self._damaged(request)

    async def AcquireSend(self, request, context):  # noqa: N802 - gRPC's name
        self.calls.append(request)
        return Damaged() if len(self.calls) == 1 else pb.AcquireSendReply(token=7)

    async def _damaged(self, request):
        self.calls.append(request)
        return Damaged() if len(self.calls) == 1 else pb.QueueView(queue=request.queue)


@pytest.fixture
def written_as_it_is(monkeypatch):
    """A server's answers are written by themselves, be they messages or not."""
    handler = grpc.unary_unary_rpc_method_handler

    def written(method, request_deserializer=None, response_serializer=None):
        del response_serializer
        return handler(method, request_deserializer, lambda answer: answer.SerializeToString())

    monkeypatch.setattr(grpc, "unary_unary_rpc_method_handler", written)


@pytest.mark.usefixtures("written_as_it_is")
@pytest.mark.parametrize(
    ("method", "request_"),
    [("DescribeQueue", pb.QueueRequest(queue="q")), ("AcquireSend", pb.AcquireSendRequest())],
)
def test_an_answer_that_was_damaged_on_its_way_is_asked_for_again(method, request_):
    """gRPC hands on None for it. A reader's loop ended by that unseen, and the reader stood still for ever; a sender ended by a defect."""

    async def scenario():
        servicer = DamagedOnce()
        server, address = await start(servicer)
        async with Coordinators(address) as coordinators:
            assert await coordinators.call_within(method, request_, DEADLINE_S)
        assert len(servicer.calls) == 2
        await server.stop(None)

    asyncio.run(scenario())


@pytest.mark.usefixtures("written_as_it_is")
def test_what_was_done_by_a_call_whose_answer_was_damaged_isn_t_asked_for_twice():
    async def scenario():
        servicer = DamagedOnce()
        server, address = await start(servicer)
        async with Coordinators(address) as coordinators:
            with pytest.raises(DeadlineOver, match="may have done it: the answer was damaged"):
                await coordinators.call_within("CreateQueue", pb.CreateQueueRequest(queue="q"), DEADLINE_S)
        assert len(servicer.calls) == 1
        await server.stop(None)

    asyncio.run(scenario())


def test_a_request_that_was_damaged_on_its_way_is_made_again_for_nothing_was_done():
    """A server tells of a defect of its own, and the caller ended by it."""
    requests = []
    encode = pb.CreateQueueRequest.SerializeToString

    def damaged_once(request):
        requests.append(request)
        return b"\xff" if len(requests) == 1 else encode(request)

    async def scenario():
        servicer = Coordinator(5)
        server, address = await start(servicer)
        async with Coordinators(address) as coordinators:
            coordinators._stub(address).CreateQueue._request_serializer = damaged_once
            assert await coordinators.call_within("CreateQueue", pb.CreateQueueRequest(queue="q"), DEADLINE_S)
        assert (len(requests), len(servicer.calls)) == (2, 1)
        await server.stop(None)

    asyncio.run(scenario())


async def acquired(requests, *servicers, then=lambda: None):
    """The epochs granted, how long each took, and in which order the coordinators are asked from then on.

    `then` is called after each answer.
    """
    servers, addresses = zip(*[await start(one) for one in servicers], strict=True)
    granted = []
    try:
        async with Coordinators(",".join(addresses)) as coordinators:
            for request in requests:
                begun_s = time.monotonic()
                reply = await coordinators.call("AcquireSend", request, DEADLINE_S)
                granted.append((reply.grant.epoch, time.monotonic() - begun_s))
                then()
            return granted, [addresses.index(address) for address in coordinators._addresses]
    finally:
        for server in servers:
            await server.stop(None)


def test_beside_a_silent_one_another_is_asked_and_is_the_first_to_be_asked_from_then_on(monkeypatch):
    class Answering(Coordinator):
        async def AcquireSend(self, request, context):  # noqa: N802 - gRPC's name
            await silent.is_asked.wait()
            return await super().AcquireSend(request, context)

    def wait_longer():
        """The first one asked is the only one, also where it is slow."""
        monkeypatch.setattr(coordinators_module, "SILENCE_S", DEADLINE_S)

    silent, answering = Coordinator(is_silent=True), Answering(3)
    requests = [pb.AcquireSendRequest(token=7, failed_epoch=epoch) for epoch in (1, 2)]
    granted, order = asyncio.run(acquired(requests, silent, answering, then=wait_longer))
    assert [epoch for epoch, _ in granted] == [3, 3]
    assert SILENCE_S <= granted[0][1] < DEADLINE_S / 2
    assert granted[1][1] < DEADLINE_S / 2
    assert (len(silent.calls), len(answering.calls), order) == (1, 2, [1, 0])


def test_without_a_token_only_who_answers_is_asked_for_one_and_once():
    """Each asking takes the next token: the sender would be overtaken by its own second question."""
    silent, answering = Coordinator(is_silent=True), Coordinator(3)
    granted, order = asyncio.run(acquired([pb.AcquireSendRequest(election_node="n-1")], silent, answering))
    assert granted[0][0] == 3
    assert granted[0][1] < DEADLINE_S / 2
    assert (silent.calls, len(answering.calls), order) == ([], 1, [1, 0])


def test_one_that_answers_late_but_first_counts_and_stays_first():
    is_other_asked = asyncio.Event()

    class Slow(Coordinator):
        async def AcquireSend(self, request, context):  # noqa: N802 - gRPC's name
            await is_other_asked.wait()
            return pb.AcquireSendReply(token=7, grant=pb.SendGrant(epoch=4))

    class Other(Coordinator):
        async def AcquireSend(self, request, context):  # noqa: N802 - gRPC's name
            is_other_asked.set()
            return await super().AcquireSend(request, context)

    slow, other = Slow(), Other(is_silent=True)
    granted, order = asyncio.run(acquired([pb.AcquireSendRequest(token=7)], slow, other))
    assert (granted[0][0], len(other.calls), order) == (4, 1, [0, 1])


def test_a_refusal_of_the_second_is_final_too():
    silent = Coordinator(is_silent=True)
    silent.AcquireSend = silent.DescribeCluster
    with pytest.raises(Fenced):
        asyncio.run(acquired([pb.AcquireSendRequest(token=7, failed_epoch=99)], silent, Coordinator()))


@pytest.mark.parametrize(
    ("method", "request_", "may"),
    [
        ("DescribeQueue", pb.QueueRequest(queue="q"), True),
        ("ListQueues", pb.ListQueuesRequest(), False),
        ("ListGroups", pb.ListGroupsRequest(), False),
        ("AcquireSend", pb.AcquireSendRequest(token=1), True),
        ("AcquireSend", pb.AcquireSendRequest(), False),
        ("AcquireRead", pb.AcquireReadRequest(), False),
        ("CreateQueue", pb.CreateQueueRequest(queue="q"), False),
        ("RotateQueue", pb.QueueRequest(queue="q"), False),
    ],
)
def test_only_what_changes_nothing_the_second_time_is_asked_of_two(method, request_, may):
    assert may_overlap(method, request_) is may


@pytest.mark.parametrize("is_first_silent", [False, True])
def test_a_list_of_all_queues_is_made_by_one_coordinator_however_long_it_takes(is_first_silent):
    """With thousands of queues a second one was as busy with it as the first, and nobody did anything else meanwhile."""

    class Listing(Coordinator):
        async def ListQueues(self, request, context):  # noqa: N802 - gRPC's name
            self.calls.append(request)
            await asyncio.sleep(5 * SILENCE_S)
            return pb.ListQueuesReply(queues=[pb.QueueView(chain_version=self.version)])

    async def scenario():
        servicers = Listing(1, is_silent=is_first_silent), Listing(2)
        servers = [await start(one) for one in servicers]
        async with Coordinators(",".join(address for _, address in servers)) as coordinators:
            reply = await coordinators.call("ListQueues", pb.ListQueuesRequest(), DEADLINE_S)
        for server, _ in servers:
            await server.stop(None)
        asked = [one.version for one in servicers if one.calls]
        assert asked == [view.chain_version for view in reply.queues]
        assert not is_first_silent or asked == [2]

    asyncio.run(scenario())


def test_nobody_there_names_all_that_were_asked():
    async def scenario():
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        async with Coordinators(",".join(addresses)) as coordinators:
            with pytest.raises(Unreachable) as caught:
                await coordinators.call("DescribeQueue", pb.QueueRequest(queue="q"))
        assert all(address in caught.value.message for address in addresses)

    asyncio.run(scenario())


def test_one_that_comes_up_in_time_is_waited_for():
    async def scenario():
        port = free_port()
        async with Coordinators(f"127.0.0.1:{port}") as coordinators:
            with pytest.raises(Unreachable):
                await coordinators.call_within("DescribeQueue", pb.QueueRequest(queue="q"), 0.3)
            waiting = asyncio.create_task(
                coordinators.call_within("DescribeQueue", pb.QueueRequest(queue="q"), DEADLINE_S)
            )
            await asyncio.sleep(0.3)
            assert not waiting.done()
            server, _ = await start(Coordinator(4), port)
            assert (await waiting).chain_version == 4
        await server.stop(None)

    asyncio.run(scenario())


@pytest.mark.parametrize("addresses", ["", ",", "host", "host:", ":1", "host:0", "host:99999"])
def test_what_is_no_address_is_refused(addresses):
    with pytest.raises(InvalidArgument):
        Coordinators(addresses)


def test_a_watch_goes_on_at_another_coordinator():
    async def scenario():
        (first, one), (second, two) = [await start(Coordinator(version)) for version in (1, 2)]
        seen = []
        async with Coordinators(f"{one},{two}") as coordinators:
            async for view in coordinators.watch("q"):
                seen.append(view.chain_version)
                if len(seen) == 1:
                    await first.stop(None)
                if len(seen) == 2:
                    break
        await second.stop(None)
        assert seen == [1, 2]

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


@pytest.mark.parametrize("has_token", [True, False])
def test_another_cluster_s_coordinator_at_a_known_address_ends_and_leads_nobody(has_token):
    """One that coordinated months ago, and whose address was handed on: senders ended, as their queue was deleted, once they were led there."""

    async def scenario():
        ours, theirs = Coordinator(1), Elsewhere()
        (server, one), (other, two) = await start(ours), await start(theirs)
        ours.named = [one]
        request = pb.AcquireSendRequest(queue="q", queue_id=7, token=3 if has_token else 0)
        async with Coordinators(f"{one},{two}") as coordinators:
            described = await coordinators.call("DescribeCluster", pb.DescribeClusterRequest())
            await server.stop(None)
            for method, asked in (("AcquireSend", request), ("DescribeCluster", pb.DescribeClusterRequest())):
                with pytest.raises(Unreachable, match="is a coordinator of cluster 'other', and not of 'one'"):
                    await coordinators.call(method, asked)
            server, _ = await start(ours, int(one.rsplit(":", 1)[1]))
            granted = await coordinators.call_within("AcquireSend", request, DEADLINE_S)
            assert (described.cluster, granted.grant.epoch) == ("one", 1)
            assert set(coordinators._addresses) == {one, two}
        await server.stop(None)
        await other.stop(None)

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


@pytest.mark.parametrize("has_one", [True, False])
def test_a_watch_passes_over_another_cluster_s_coordinator(has_one):
    async def scenario():
        ours, theirs = Coordinator(1), Elsewhere(has_one=has_one)
        (server, one), (other, two) = await start(ours), await start(theirs)

        async def come_back():
            await theirs.is_asked.wait()
            return await start(Coordinator(2), int(one.rsplit(":", 1)[1]))

        coming = asyncio.create_task(come_back())
        async with Coordinators(f"{one},{two}") as coordinators:
            await coordinators.call("DescribeCluster", pb.DescribeClusterRequest())
            seen = []
            async for view in coordinators.watch("q"):
                seen.append(view.chain_version)
                await server.stop(None)
                if seen[-1] != 1:
                    break
            assert seen == [1, 2]
        server, _ = await coming
        await server.stop(None)
        await other.stop(None)

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


async def versions_seen(first, other, *, changed_after_s=DEADLINE_S, between=(), then=lambda: None):
    """What a watch that begins at `first` tells, until it tells version 2, which `other` has so long after its first word at the latest.

    `then` is called behind each.
    """
    servers, (one, two) = zip(*[await start(servicer) for servicer in (first, other)], strict=True)
    seen = []
    async with Coordinators([one, *between, two]) as coordinators:
        async for view in coordinators.watch("q"):
            seen.append(view.chain_version)
            if seen[-1] == 2:
                break
            asyncio.get_running_loop().call_later(changed_after_s, setattr, other, "version", 2)
            then()
    for server in servers:
        await server.stop(None)
    return seen


@pytest.mark.parametrize("tells_first", [True, False])
def test_a_watch_that_is_silent_is_left_for_a_coordinator_that_tells_more(monkeypatch, tells_first):
    """Its process stands still, as one whose log nobody takes: a watch ended never, and its readers waited for ever."""

    class Stuck(Coordinator):
        async def WatchQueue(self, request, context):  # noqa: N802 - gRPC's name
            if tells_first:
                yield pb.QueueView(queue=request.queue, chain_version=self.version)
            await self._silence()

    def soon_quiet():
        """Not before its first word, which may take a while."""
        monkeypatch.setattr(coordinators_module, "QUIET_S", 0.3)

    monkeypatch.setattr(coordinators_module, "QUIET_S", DEADLINE_S if tells_first else 0.3)

    async def scenario():
        stuck, other = Stuck(1), Coordinator(1 if tells_first else 2)
        gone = f"127.0.0.1:{free_port()}"
        seen = await versions_seen(stuck, other, changed_after_s=0.5, between=[gone], then=soon_quiet)
        assert seen == ([1, 2] if tells_first else [2])

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_a_watch_is_compared_at_once_where_there_is_doubt(monkeypatch):
    """Its coordinator stands still, and whoever watches has a sign that something happened."""
    monkeypatch.setattr(coordinators_module, "QUIET_S", DEADLINE_S)

    class Still(Coordinator):
        async def WatchQueue(self, request, context):  # noqa: N802 - gRPC's name
            self.calls.append(request)
            yield pb.QueueView(queue=request.queue, chain_version=self.version)
            await self._silence()

    async def scenario():
        first, other = Still(1), Still(1)
        servers, addresses = zip(*[await start(servicer) for servicer in (first, other)], strict=True)
        seen = []

        async def watch():
            async for view in coordinators.watch("q"):
                seen.append(view.chain_version)  # noqa: PERF401 - as they come

        async with Coordinators(addresses) as coordinators:
            watching = asyncio.create_task(watch())
            await until(lambda: seen)
            coordinators.compare_watches()
            await until(lambda: other.calls)  # which knows nothing more yet
            other.version = 2
            coordinators.compare_watches()
            await until(lambda: len(seen) > 1)
            watching.cancel()
        for server in servers:
            await server.stop(None)
        assert seen == [1, 2]
        assert len(first.calls) == 1

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_a_watch_that_beats_is_compared_with_another_coordinator_s_but_rarely(monkeypatch):
    """Thousands of readers of quiet queues, each of which looked ten times as often, kept a coordinator busy."""

    class Beating(Coordinator):
        beats = 0

        async def WatchQueue(self, request, context):  # noqa: N802 - gRPC's name
            yield pb.QueueView(queue=request.queue, chain_version=self.version)
            while request.wants_beats:
                await asyncio.sleep(0.02)
                self.beats += 1
                yield pb.QueueView(is_beat=True)

    class Counting(Coordinator):
        async def WatchQueue(self, request, context):  # noqa: N802 - gRPC's name
            self.calls.append(beating.beats)
            if len(self.calls) > 2:
                self.version = 2
            yield pb.QueueView(queue=request.queue, chain_version=self.version)

    beating, other = Beating(1), Counting(1)
    monkeypatch.setattr(coordinators_module, "QUIET_S", DEADLINE_S)

    async def scenario():
        assert await versions_seen(beating, other) == [1, 2]
        asked = other.calls[:3]  # then the watch goes on there
        assert all(beats >= COMPARED_EVERY * count for count, beats in enumerate(asked, 1))

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


async def until(is_so):
    while not is_so():  # noqa: ASYNC110 - nobody tells of it
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("watches", [False, True])
def test_who_is_told_of_two_coordinators_finds_those_that_took_their_places(monkeypatch, watches):
    """A sender asks nothing from one switch to the next; once those it knew were gone it stood still for ever, as readers did."""
    monkeypatch.setattr(coordinators_module, "LOOK_S", DEADLINE_S if watches else 0.1)

    async def scenario():
        servicers = [Coordinator(version) for version in (1, 2, 3)]
        servers, (one, two, three) = zip(*[await start(servicer) for servicer in servicers], strict=True)
        servicers[0].named = [one, two]
        servicers[1].named = servicers[2].named = [two, three]
        seen = []

        async def watch():
            async for view in coordinators.watch("q"):
                seen.append(view.chain_version)  # noqa: PERF401 - as they come

        async with Coordinators(one) as coordinators:
            assert (await coordinators.call("DescribeCluster", pb.DescribeClusterRequest())).coordinators == [one, two]
            watching = asyncio.create_task(watch()) if watches else None
            if watches:
                await until(lambda: seen)
            await servers[0].stop(None)
            await until(lambda: three in coordinators._addresses)
            await servers[1].stop(None)
            if watches:
                await until(lambda: seen[-1] == 3)
            view = await coordinators.call_within("DescribeQueue", pb.QueueRequest(queue="q"), DEADLINE_S)
            assert view.chain_version == 3
            if watching is not None:
                watching.cancel()
        await servers[2].stop(None)

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


@pytest.mark.parametrize("is_outside", [False, True])
def test_where_all_that_were_known_were_replaced_since_the_last_look_zookeeper_is_asked(monkeypatch, is_outside):
    """A sender whose coordinators were replaced within the minute between two looks stood still for ever."""
    monkeypatch.setattr(coordinators_module, "LOOK_S", DEADLINE_S)

    async def scenario():
        old, new = Coordinator(1), Coordinator(2)
        old.is_outside = is_outside
        (server, known), (later, address) = await start(old), await start(new)
        elsewhere = f"127.0.0.1:{free_port()}"
        found = [CoordinatorRegistration(address)]
        if is_outside:
            found = [CoordinatorRegistration(elsewhere, address)]

        async def registered():
            return dict(enumerate(found))

        async with Coordinators(known) as coordinators:
            coordinators.registered = registered
            await coordinators.call("DescribeCluster", pb.DescribeClusterRequest())
            await server.stop(None)
            view = await coordinators.call_within("DescribeQueue", pb.QueueRequest(queue="q"), DEADLINE_S)
            assert view.chain_version == 2
            assert elsewhere not in coordinators._addresses
        await later.stop(None)

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_zookeeper_isn_t_asked_by_who_wasn_t_told_which_addresses_reach_from_there(monkeypatch):
    """By a coordinator of an earlier version: at an address from within another network there may be anybody."""
    monkeypatch.setattr(coordinators_module, "MISSED_S", 0.1)

    async def scenario():
        server, known = await start(Coordinator())

        async def registered():
            raise AssertionError("asked")

        async with Coordinators(known) as coordinators:
            coordinators.registered = registered
            await coordinators.call("DescribeCluster", pb.DescribeClusterRequest())
            await server.stop(None)
            for _ in range(20):
                with pytest.raises(Unreachable):
                    await coordinators.call("DescribeQueue", pb.QueueRequest(queue="q"))
                await asyncio.sleep(0.05)
            assert coordinators._looking is not None
            assert not coordinators._looking.done()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_who_was_neither_given_nor_is_named_twice_over_is_forgotten_but_nobody_for_one_answer_s_sake():
    async def scenario():
        servicer = Coordinator()
        server, given = await start(servicer)
        other = f"127.0.0.1:{free_port()}"
        async with Coordinators([given, other]) as coordinators:
            for number in range(10):
                servicer.named = [f"127.0.0.1:{1000 + number}"] if number < 9 else []
                await coordinators.call("DescribeCluster", pb.DescribeClusterRequest())
                assert f"127.0.0.1:{999 + min(number + 1, 9)}" in coordinators._addresses
                assert {given, other} < {*coordinators._addresses}
                assert len(coordinators._addresses) <= 4
            await coordinators.call("DescribeCluster", pb.DescribeClusterRequest())
            assert {given, other} == {*coordinators._addresses}
        await server.stop(None)

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_that_nobody_answers_is_told_until_somebody_does(monkeypatch):
    monkeypatch.setattr(coordinators_module, "MISSED_S", 0.1)

    async def scenario():
        port = free_port()
        async with Coordinators(f"127.0.0.1:{port}") as coordinators:
            assert coordinators.problem == ""
            with pytest.raises(Unreachable):
                await coordinators.call("DescribeQueue", pb.QueueRequest(queue="q"))
            assert coordinators.problem.startswith(f"no coordinator answers at 127.0.0.1:{port}")
            server, _ = await start(Coordinator(), port)
            await coordinators.call_within("DescribeQueue", pb.QueueRequest(queue="q"), DEADLINE_S)
            assert coordinators.problem == ""
        await server.stop(None)

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
