"""Health and reflection as clients of gRPC ask for them, and the door for clients from outside."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from seriatim.broker_group.process import BrokerSettings, serve
from seriatim.broker_group.store import Store
from seriatim.cli.embedded.ports import free_port
from seriatim.cli.embedded.zookeeper import EmbeddedZooKeeper
from seriatim.cli.main import run
from seriatim.coordinator.process import CoordinatorProcess, CoordinatorSettings
from seriatim.protocol import rpc
from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.errors import DiskFailed, InvalidArgument, Unreachable
from seriatim.protocol.health import HealthServer, ask
from seriatim.protocol.seriatim_pb2 import DescribeClusterRequest, ListGroupsRequest
from seriatim.protocol.zookeeper import path_of

PATIENT = ("--timeout", "30")
SESSION_MS = 20_000
"""Longer than this process stands still: servers stay ready."""


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run_it(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run_it


@asynccontextmanager
async def coordinator(zookeeper: str, cluster: str, **settings: str) -> AsyncIterator[CoordinatorProcess]:
    process = CoordinatorProcess(CoordinatorSettings(zookeeper, cluster, session_timeout_ms=SESSION_MS, **settings))
    await process.start()
    work = asyncio.create_task(process.run())
    try:
        yield process
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await process.stop()


@asynccontextmanager
async def broker(settings: BrokerSettings) -> AsyncIterator[str]:
    """A broker that has registered; its address."""
    ready, stop = asyncio.get_running_loop().create_future(), asyncio.Event()
    serving = asyncio.create_task(serve(settings, lambda _name, address: ready.set_result(address), stop))
    done, _ = await asyncio.wait((ready, serving), timeout=60, return_when=asyncio.FIRST_COMPLETED)
    assert ready in done, serving
    try:
        yield ready.result()
    finally:
        stop.set()
        await serving


async def status(address: str, service: str = "") -> str:
    return await asyncio.to_thread(ask, address, service, 30.0)


def described(address: str) -> tuple[list[str], list[str]]:
    """By reflection: the services of a server, and the methods of its own one."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        services = sorted(database.get_services())
        own = next(name for name in services if name.startswith("seriatim."))
        file = database.FindFileContainingSymbol(own)
        methods = [method.name for one in file.service if own.endswith(f".{one.name}") for method in one.method]
        return services, methods


@in_a_loop
async def test_servers_answer_for_their_health_and_describe_themselves(
    zookeeper: str, cluster_name: str, tmp_path: Path
) -> None:
    settings = BrokerSettings(zookeeper, cluster_name, "g1", "a", tmp_path, session_timeout_ms=SESSION_MS)
    async with coordinator(zookeeper, cluster_name) as process, broker(settings) as address:
        for server, own in ((process.address, "seriatim.v1.Coordinator"), (address, "seriatim.v1.Broker")):
            assert [await status(server, name) for name in ("", own, "live")] == ["SERVING"] * 3
            assert await status(server, "elsewhere") == "SERVICE_UNKNOWN"
            services, methods = await asyncio.to_thread(described, server)
            assert services == ["grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", own]
            assert {"AcquireSend", "Append"} & set(methods)
    assert await status(address) == "UNREACHABLE"


@in_a_loop
async def test_a_broker_whose_disk_failed_lives_but_is_not_ready(
    zookeeper: str, cluster_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes nothing more until it is started again, and said that it can do its work."""
    settings = BrokerSettings(zookeeper, cluster_name, "g1", "a", tmp_path, session_timeout_ms=SESSION_MS)
    async with broker(settings) as address:
        assert await status(address) == "SERVING"
        monkeypatch.setattr(Store, "failure", DiskFailed("the disk failed: [Errno 5] Input/output error"))
        assert (await status(address), await status(address, "live")) == ("NOT_SERVING", "SERVING")


@in_a_loop
async def test_without_zookeeper_a_server_lives_but_is_not_ready(cluster_name: str, tmp_path: Path) -> None:
    with EmbeddedZooKeeper(tmp_path / "zookeeper") as own_zookeeper:
        settings = BrokerSettings(
            own_zookeeper.address, cluster_name, "g1", "a", tmp_path / "a", session_timeout_ms=1000
        )
        door = f"127.0.0.1:{free_port()}"
        outside = {"listen_outside": door, "advertise_outside": door, "zookeeper_outside": own_zookeeper.address}
        async with coordinator(own_zookeeper.address, cluster_name, **outside) as process, broker(settings) as address:
            assert own_zookeeper.supervisor is not None
            await asyncio.to_thread(own_zookeeper.supervisor.stop, "zookeeper")
            for server in (process.address, door, address):
                async with rpc.channel(server) as channel:
                    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
                    async for reply in watch:
                        if reply.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                            break
                    watch.cancel()
                assert (await status(server), await status(server, "live")) == ("NOT_SERVING", "SERVING")
            async with Coordinators(door) as client:
                with pytest.raises(Unreachable):
                    await client.call("ListGroups", ListGroupsRequest())


@in_a_loop
async def test_who_comes_from_outside_is_told_addresses_that_reach_from_there(
    zookeeper: str, cluster_name: str, tmp_path: Path
) -> None:
    # Names of inside, which nobody here can look up; from outside all of it is on this machine.
    door, port = f"127.0.0.1:{free_port()}", free_port()
    settings = BrokerSettings(
        zookeeper, cluster_name, "g1", "a", tmp_path, f"127.0.0.1:{port}", "g1-a:7000", f"127.0.0.1:{port}", SESSION_MS
    )
    zookeeper_outside = f"outside:2181/{path_of(zookeeper)}"
    inside_and_out = {
        "advertise": "c1:7000", "listen_outside": door, "advertise_outside": door, "zookeeper_outside": zookeeper_outside,
    }  # fmt: skip
    async with coordinator(zookeeper, cluster_name, **inside_and_out) as process, broker(settings):
        inside = f"127.0.0.1:{process.port}"
        for address, coordinators, zookeepers, member in (
            (inside, ["c1:7000"], zookeeper, "g1-a:7000"),
            (door, [door], zookeeper_outside, f"127.0.0.1:{port}"),
        ):
            async with Coordinators(address) as client:
                cluster = await client.call("DescribeCluster", DescribeClusterRequest())
                assert (list(cluster.coordinators), cluster.zookeeper) == (coordinators, zookeepers)
                groups = await client.call("ListGroups", ListGroupsRequest())
                assert [one.address for group in groups.groups for one in group.members] == [member, ""]
        assert await status(f"127.0.0.1:{port}") == "SERVING"


def test_a_door_for_outside_needs_what_to_tell_there() -> None:
    with pytest.raises(InvalidArgument, match="zookeeper_outside"):
        CoordinatorSettings("z:2181", listen_outside="0.0.0.0:1").check()


def watching(channel: grpc.Channel, _: threading.Event) -> Any:
    call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
    next(call)
    return call


def reflecting(channel: grpc.Channel, is_over: threading.Event) -> Any:
    """As a tool does that may ask something more."""
    asked = chain([reflection_pb2.ServerReflectionRequest(list_services="")], iter(is_over.wait, True))
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked, timeout=60)
    next(call)
    return call


def silent(channel: grpc.Channel, is_over: threading.Event) -> Any:
    """Who calls, and never says what he asks."""
    return channel.stream_unary("/grpc.health.v1.Health/Check").future(iter(is_over.wait, True), timeout=60)


@pytest.mark.parametrize("begin", [watching, reflecting, silent])
def test_many_who_keep_a_call_keep_nobody_from_asking(begin: Callable[[grpc.Channel, threading.Event], Any]) -> None:
    """As load balancers, and tools, do; a probe that isn't answered ends the process."""
    is_over = threading.Event()
    with HealthServer("127.0.0.1:0", {"": lambda: True}) as server, contextlib.ExitStack() as calls:
        address = f"127.0.0.1:{server.port}"
        channel = calls.enter_context(grpc.insecure_channel(address))
        calls.callback(is_over.set)
        for _ in range(20):
            calls.callback(begin(channel, is_over).cancel)
        assert ask(address, "", 30) == "SERVING"


def test_who_is_gone_without_a_word_keeps_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left alone, gRPC asks after two hours whether a caller is still there, and keeps what it has of him."""
    quick = [(name, 100 if name == "grpc.keepalive_time_ms" else value) for name, value in rpc._SERVER_OPTIONS]
    monkeypatch.setattr(rpc, "_SERVER_OPTIONS", quick)
    with (
        HealthServer("127.0.0.1:0", {"": lambda: True}) as server,
        socket.create_connection(("127.0.0.1", server.port), 60) as silent,
    ):
        silent.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000000000040100000000"))
        while silent.recv(4096):
            pass


def test_a_process_that_serves_nothing_else_answers_for_its_health(capsys: pytest.CaptureFixture[str]) -> None:
    is_elected = False
    with HealthServer("127.0.0.1:0", {"": lambda: True, "elected": lambda: is_elected}) as server:
        address = f"127.0.0.1:{server.port}"
        assert run(["health", *PATIENT, address]) == 0
        assert run(["health", *PATIENT, address, "--service", "elected", "--json"]) == 1
        is_elected = True
        assert run(["health", *PATIENT, address, "--service", "elected"]) == 0
        assert run(["health", *PATIENT, address, "--service", "nobody"]) == 2
        with pytest.raises(InvalidArgument, match="health"), HealthServer(address, {}):
            pass
    assert run(["health", address, "--timeout", "1"]) == 3
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "SERVING"
    assert json.loads(printed[1]) == {"address": address, "service": "elected", "status": "NOT_SERVING"}


def test_the_answer_is_told_also_where_nobody_reads_what_is_printed():
    reading, writing = os.pipe()
    os.close(reading)
    with HealthServer("127.0.0.1:0", {"": lambda: False}) as server, os.fdopen(writing) as output:
        command = [sys.executable, "-m", "seriatim.cli.main", "health", f"127.0.0.1:{server.port}", *PATIENT]
        assert subprocess.run(command, stdout=output, check=False).returncode == 1


def test_a_server_whose_log_nobody_takes_serves(zookeeper: str, cluster_name: str) -> None:
    """Its event loop stood still in the first line that found no room, and its threads kept its session and its connections."""
    command = (
        sys.executable, "-m", "seriatim.cli.main", "coordinator", "--zookeeper", zookeeper, "--cluster", cluster_name, "--log-level", "DEBUG",
    )  # fmt: skip
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x")
    os.set_blocking(writing, True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writing, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[-1]
            assert ask(address, "", 30.0) == "SERVING"
            server.terminate()
            assert server.wait(60) == 0
        finally:
            server.kill()
            os.close(reading)
            os.close(writing)
