"""How long a connection is waited for, and when one that says nothing is given up."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from threading import Thread
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from seriatim.consumer.loop import LoopThread
from seriatim.producer.client import Producer
from seriatim.protocol import rpc
from seriatim.protocol.errors import Unreachable
from tests.waiting import wait_until

SERVER = """
import asyncio
from seriatim.protocol import rpc
from seriatim.protocol.health import add_health

async def serve():
    server = rpc.server()
    add_health(server, "test", lambda: True)
    port = rpc.listen(server, "127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()

asyncio.run(serve())
"""
WAIT_S = 60.0


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process of its own with Seriatim's limits, and its port."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def test_a_connection_that_says_nothing_any_more_is_given_up(server: tuple[subprocess.Popen[str], int]) -> None:
    """Its stream has nothing to say either, and no deadline: only a keep-alive tells. gRPC's own would take a minute."""
    process, port = server

    async def scenario() -> None:
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            process.send_signal(signal.SIGSTOP)
            async with asyncio.timeout(45):
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await watch.read()
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(scenario())


def test_a_call_whose_channel_is_closed_has_an_error_and_its_task_goes_on(
    server: tuple[subprocess.Popen[str], int],
) -> None:
    process, port = server

    async def scenario() -> None:
        connections = rpc.Connections(health_pb2_grpc.HealthStub)
        check = connections.stub(f"127.0.0.1:{port}").Check
        await rpc.call(check, health_pb2.HealthCheckRequest(), WAIT_S)
        process.send_signal(signal.SIGSTOP)
        closed, given_up = (
            asyncio.create_task(rpc.call(check, health_pb2.HealthCheckRequest(), WAIT_S)) for _ in range(2)
        )
        await asyncio.sleep(0.1)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        await connections.close()
        with pytest.raises(Unreachable, match="was closed"):
            await closed

    asyncio.run(scenario())


def test_an_address_where_nobody_answers_is_forgotten_once_it_is_nobody_s(
    server: tuple[subprocess.Popen[str], int],
) -> None:
    """A member that came back elsewhere: its old address was tried twice a second, for as long as the process lived."""
    _, port = server

    async def scenario() -> None:
        connections = rpc.Connections(health_pb2_grpc.HealthStub)
        alive, dead, known = (f"127.0.0.1:{number}" for number in (port, 1, 2))
        await rpc.call(connections.stub(alive).Check, health_pb2.HealthCheckRequest(), WAIT_S)
        for address in (dead, known):
            with pytest.raises(Unreachable):
                await rpc.call(connections.stub(address).Check, health_pb2.HealthCheckRequest(), WAIT_S)
        gone, _ = connections._at(dead)
        await connections.forget_dead({known})
        assert gone.get_state() is grpc.ChannelConnectivity.SHUTDOWN
        assert set(connections._found) == {alive, known}
        await connections.close()

    asyncio.run(scenario())


def test_clients_that_come_and_go_beside_one_that_stays_leave_no_loop_in_memory(
    server: tuple[subprocess.Popen[str], int],
) -> None:
    """gRPC knows each loop that it was used from until nothing uses it any more: some 5 KB for each client that was ever opened."""
    address = f"127.0.0.1:{server[1]}"

    async def used() -> None:
        async with rpc.channel(address) as to:
            await health_pb2_grpc.HealthStub(to).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)

    def read() -> Any:
        thread = LoopThread("reads")
        thread.run(used(), WAIT_S)
        thread.close()
        return weakref.ref(thread._loop)

    def send() -> Any:
        producer = Producer(address, "orders")
        wait_until(lambda: isinstance(producer._buffer.problem, Unreachable))  # no coordinator is there
        producer.abort()
        return weakref.ref(producer._loop._loop)

    async def scenario() -> None:
        async with rpc.channel(address) as stays:
            check = health_pb2_grpc.HealthStub(stays).Check
            await check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
            for come_and_go in (read, send):
                loop = await asyncio.to_thread(come_and_go)
                gc.collect()
                assert loop() is None, come_and_go.__name__
            await check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)

    asyncio.run(scenario())


def test_clients_that_are_closed_while_they_wait_for_an_answer_leave_no_loop_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind the last client that is there gRPC ends at once, with what was cancelled a moment before still under way: some 5 KB, every second time."""
    monkeypatch.setattr(rpc, "HANDED_BACK_S", 0.2)

    def waits_for_nobody(port: int) -> Any:
        producer = Producer(f"127.0.0.1:{port}", "orders")
        producer.abort()
        return weakref.ref(producer._loop._loop)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        loops = [waits_for_nobody(silent.getsockname()[1]) for _ in range(8)]
    gc.collect()
    assert [loop() for loop in loops[:-1]] == [None] * 7  # gRPC knows the last one until it is used again


@pytest.mark.parametrize("delay_s", [0.1, 0.6])
def test_a_connection_to_far_away_is_waited_for(server: tuple[subprocess.Popen[str], int], delay_s: float) -> None:
    """What either side says is so long on its way; calls aren't repeated by gRPC, so the first attempt has to do."""
    _, port = server

    async def scenario(far_port: int) -> None:
        async with rpc.channel(f"127.0.0.1:{far_port}") as channel:
            asked = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
            assert (await asked).status == health_pb2.HealthCheckResponse.SERVING

    with socket.create_server(("127.0.0.1", 0)) as far:
        Thread(target=carry_all, args=(far, port, delay_s), daemon=True).start()
        asyncio.run(scenario(far.getsockname()[1]))


def carry_all(far: socket.socket, port: int, delay_s: float) -> None:
    """Until it is closed: what comes to `far` goes on to `port` later, and the answers go back later."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
        while True:
            near = opened.enter_context(far.accept()[0])
            server = opened.enter_context(socket.create_connection(("127.0.0.1", port)))
            for source, target in ((near, server), (server, near)):
                Thread(target=carry, args=(source, target, delay_s), daemon=True).start()


def carry(source: socket.socket, target: socket.socket, delay_s: float) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            time.sleep(delay_s)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def test_what_grpc_means_for_another_loop_is_no_error_and_all_else_is() -> None:
    class Poller:
        def __repr__(self) -> str:
            return "<Handle PollerCompletionQueue._handle_events()>"

    told: list[Exception] = []
    loop = asyncio.new_event_loop()
    loop.default_exception_handler = lambda context: told.append(context["exception"])  # type: ignore[method-assign]
    ours, closed = RuntimeError("ours"), RuntimeError("Event loop is closed")
    try:
        for error, handle in ((BlockingIOError(), Poller()), (closed, Poller()), (ours, None), (closed, None)):
            rpc.ignore_shared_poller(loop, {"exception": error, "handle": handle})
    finally:
        loop.close()
    assert told == [ours, closed]


ENDING = """
import asyncio, threading
from seriatim.protocol import rpc
from seriatim.protocol.batch_streams import BatchStub
from seriatim.protocol.errors import SeriatimError
from seriatim.protocol.seriatim_pb2 import ListCursorsRequest

rpc.HANDED_BACK_S = 0  # in which it mostly ends

async def use():
    connections = rpc.Connections(BatchStub)
    try:
        await rpc.call(connections.stub("127.0.0.1:9").ListCursors, ListCursorsRequest(), 1)
    except SeriatimError:
        pass
    await connections.close()

def is_there():
    return not rpc._THREADS.isdisjoint(rpc._threads())

worker = threading.Thread(target=lambda: asyncio.run(use()))
worker.start()
worker.join()
before = is_there()
rpc._process._let_go()
print(before, is_there())
"""


def test_a_fork_waits_until_grpc_has_ended() -> None:
    """Where it came within the ten milliseconds that this takes, a lock was held for ever in the new process, once in a hundred times."""
    command = (sys.executable, "-c", ENDING)
    said = set[str]()
    for _ in range(30):  # on a busy machine it has often ended before it is looked for
        said.add(subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout)
        if "True False\n" in said:
            break
    assert said - {"False False\n"} == {"True False\n"}
