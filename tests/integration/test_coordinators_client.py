from __future__ import annotations

import asyncio

import pytest

from seriatim.cli.embedded.ports import free_port
from seriatim.protocol import rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.errors import DeadlineOver, InvalidArgument, UnknownQueue, Unreachable
from seriatim.protocol.seriatim_pb2_grpc import CoordinatorServicer, add_CoordinatorServicer_to_server


class Coordinator(CoordinatorServicer):
    """Answers at once, or never."""

    def __init__(self, version=0, *, is_silent=False):
        self.version = version
        self.is_silent = is_silent
        self.calls = []

    async def _answer(self, request):
        self.calls.append(request)
        if self.is_silent:
            await asyncio.sleep(60)
        return pb.QueueView(queue=request.queue, chain_version=self.version)

    @rpc.answers_errors
    async def DescribeQueue(self, request, context):  # noqa: N802 - gRPC's name
        if request.queue == "none":
            raise UnknownQueue("there is no queue none")
        return await self._answer(request)

    async def CreateQueue(self, request, context):  # noqa: N802 - gRPC's name
        return await self._answer(request)

    async def WatchQueue(self, request, context):  # noqa: N802 - gRPC's name
        yield pb.QueueView(queue=request.queue, chain_version=self.version)


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


def test_a_silent_one_is_passed_over_for_a_question_but_a_change_isn_t_asked_for_twice():
    async def scenario():
        silent, answering = Coordinator(is_silent=True), Coordinator(9)
        servers, addresses = zip(*[await start(one) for one in (silent, answering)], strict=True)
        async with Coordinators(",".join(addresses)) as coordinators:
            with pytest.raises(DeadlineOver, match="may have done it"):
                await coordinators.call("CreateQueue", pb.CreateQueueRequest(queue="q"), 0.3)
            assert (len(silent.calls), len(answering.calls)) == (1, 0)
            view = await coordinators.call("DescribeQueue", pb.QueueRequest(queue="q"), 0.3)
            assert view.chain_version == 9
        for server in servers:
            await server.stop(None)

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
            waiting = asyncio.create_task(coordinators.call_within("DescribeQueue", pb.QueueRequest(queue="q"), 20))
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

    asyncio.run(asyncio.wait_for(scenario(), 20))
