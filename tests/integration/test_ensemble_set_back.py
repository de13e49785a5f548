"""An ensemble that is given an older copy of its data while all others run on.

Each election of a leader makes all later numbers of ZooKeeper's higher than those before, so it lets in again who has seen more
than it has, mostly into the very sessions of before.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from seriatim.cli import coordinators
from seriatim.cli.embedded import zookeeper
from seriatim.cli.embedded.ports import LOCALHOST, free_port
from seriatim.producer import Handle, Producer
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.errors import OutcomeUnknown, SeriatimError
from seriatim.protocol.zookeeper import SessionState, ZooKeeperSession
from tests.commands import ended
from tests.waiting import wait_until

SERIATIM = (sys.executable, "-m", "seriatim.cli.main")
SERVERS = (1, 2, 3)
MEMBERS = ("g1-a", "g1-b", "g2-a", "g2-b")
SESSION_S = 20
"""Longer than a machine stands still, and than the ensemble is away: the sessions outlive that."""


class Cluster:
    """An ensemble of three, two coordinators and two groups; every server is a process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = {server: free_port() for server in SERVERS}
        self._voters = {f"server.{one}": f"{LOCALHOST}:{free_port()}:{free_port()}" for one in SERVERS}
        self.zookeeper = ",".join(f"{LOCALHOST}:{port}" for port in self._ports.values())
        self._coordinators = {name: f"{LOCALHOST}:{free_port()}" for name in ("c1", "c2")}
        self.coordinators = list(self._coordinators.values())
        self._environment = os.environ | {"SERIATIM_COORDINATOR": ",".join(self.coordinators)}

    def start_ensemble(self) -> None:
        for server in SERVERS:
            directory = self._directory / f"zookeeper-{server}"
            data = directory / "data"
            data.mkdir(parents=True, exist_ok=True)
            (data / "myid").write_text(f"{server}\n")
            settings = {
                "dataDir": data, "clientPort": self._ports[server], "clientPortAddress": LOCALHOST, "tickTime": 100,
                "initLimit": 50, "syncLimit": 15, "maxSessionTimeout": 60_000, "maxClientCnxns": 0,
                "admin.enableServer": "false", "4lw.commands.whitelist": "srvr", **self._voters,
            }  # fmt: skip
            self._run(f"zookeeper-{server}", zookeeper.server_command(directory, settings))
        wait_until(lambda: all(zookeeper.answers(LOCALHOST, port) for port in self._ports.values()))

    def start_coordinators(self) -> None:
        for name, address in self._coordinators.items():
            self._serve(name, "coordinator", "--name", name, "--listen", address)

    def start_members(self) -> None:
        for name in MEMBERS:
            group, member = name.split("-")
            place = ("--cluster", "main", "--group", group, "--member", member)
            self._serve(name, "broker", *place, "--dir", str(self._directory / name))

    def kill_coordinators(self) -> None:
        self._kill(*self._coordinators)

    def copied(self) -> dict[int, Path]:
        """The data of each server as they are now."""
        return {
            server: shutil.copytree(self._directory / f"zookeeper-{server}/data", self._directory / f"copy-{server}")
            for server in SERVERS
        }

    def set_back(self, copies: dict[int, Path]) -> None:
        """As in the midst of a disaster: the servers end, and start with the data of before."""
        self._kill(*(f"zookeeper-{server}" for server in SERVERS))
        for server, copy in copies.items():
            data = self._directory / f"zookeeper-{server}/data"
            shutil.rmtree(data)
            shutil.copytree(copy, data)
        self.start_ensemble()

    def asked(self, *arguments: str) -> str:
        """What a command says, once it is done."""
        done = self.tried(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def tried(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return ended((*SERIATIM, *arguments), 100, self._environment)

    def end(self) -> None:
        self._kill(*self._processes)

    def _serve(self, name: str, *arguments: str) -> None:
        self._run(
            name, (*SERIATIM, *arguments, "--zookeeper", self.zookeeper, "--session-timeout-ms", str(SESSION_S * 1000))
        )

    def _run(self, name: str, command: tuple[str, ...]) -> None:
        with (self._directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def _kill(self, *names: str) -> None:
        for name in names:
            self._processes[name].kill()
        for name in names:
            self._processes.pop(name).wait()


@contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    started = Cluster(directory)
    try:
        started.start_ensemble()
        started.start_coordinators()
        started.start_members()
        wait_until(lambda: all_in_sync(started))
        yield started
    finally:
        started.end()


def all_in_sync(it: Cluster) -> bool:
    try:
        groups = coordinators.call(",".join(it.coordinators), "ListGroups", pb.ListGroupsRequest()).groups
    except SeriatimError:
        return False
    members = [member for group in groups for member in group.members]
    return len(members) == len(MEMBERS) and all(one.is_in_sync and one.is_peer_connected for one in members)


class Sending:
    """A producer that sends a record each hundredth of a second; where each was stored is kept."""

    def __init__(self, it: Cluster) -> None:
        self._producer = Producer(it.coordinators, "orders", name="shop", session_timeout_s=SESSION_S)
        self._handles: list[tuple[str, Handle]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def _send(self) -> None:
        number = 0
        while not self._is_over.wait(0.01):
            value = str(number)
            with contextlib.suppress(SeriatimError):  # while nobody can tell whether it is elected
                self._handles.append((value, self._producer.send(value.encode())))
            number += 1

    def acknowledged(self) -> dict[int, str]:
        """Values by offset."""
        found = {}
        for value, handle in list(self._handles):
            with contextlib.suppress(SeriatimError):  # it can't be told what became of it
                if handle.done() and (offset := handle.result(0).offset) is not None:
                    found[offset] = value
        return found

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()
        with contextlib.suppress(OutcomeUnknown):  # of what was under way when ZooKeeper ended
            self._producer.close()


@contextmanager
def sending(it: Cluster) -> Iterator[Sending]:
    started = Sending(it)
    try:
        yield started
    finally:
        started.end()


@pytest.mark.slow
def test_each_leader_of_an_ensemble_has_a_higher_number_than_those_before(tmp_path: Path) -> None:
    """By these a coordinator tells what was said before ZooKeeper was set back."""
    it = Cluster(tmp_path)

    async def scenario() -> None:
        session = ZooKeeperSession(it.zookeeper, SESSION_S)
        await session.start(60)
        await session.create("/said", ephemeral=True)
        first = await session.leader_of("/said")
        assert first == session.leader > 0
        is_back = asyncio.Event()
        session.on_state(lambda state: is_back.set() if state is SessionState.CONNECTED else is_back.clear())
        it.set_back(it.copied())
        late = ZooKeeperSession(it.zookeeper, SESSION_S)
        await late.start(60)
        assert await late.leader_of("/said") == first < late.leader
        await is_back.wait()
        await session.set("/said", b"")
        await late.sync("/said")
        assert await late.leader_of("/said") == late.leader == session.leader
        await session.stop()
        await late.stop()

    try:
        it.start_ensemble()
        asyncio.run(asyncio.wait_for(scenario(), 100))
    finally:
        it.end()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("are_coordinators_new", [False, True])
def test_an_ensemble_set_back_under_all_who_run_is_noticed_before_anything_is_sent(
    tmp_path: Path, are_coordinators_new: bool
) -> None:
    """The old chain's next links would be given to groups that have others under these numbers, and their records skipped.

    Coordinators that live know what they have seen; new ones wait for what the members' disks say.
    """
    with cluster(tmp_path) as it:
        it.asked("queue", "create", "orders", "--readmit", "in-sync")
        with sending(it) as shop:
            wait_until(lambda: len(shop.acknowledged()) > 100)
            copies = it.copied()
            for _ in range(2):
                wait_until(lambda: all_in_sync(it))
                it.asked("queue", "rotate", "orders")
                before = len(shop.acknowledged())
                wait_until(lambda before=before: len(shop.acknowledged()) > before + 100)
            if are_coordinators_new:
                it.kill_coordinators()
            it.set_back(copies)
            before = shop.acknowledged()
            if are_coordinators_new:
                it.start_coordinators()
            # What is written to the old chain gives it the versions that members were told of the one before.
            for number in range(6):
                it.tried("subscription", "create", f"late-{number}", "--queue", "orders")
            wait_until(lambda: "the chain none after" in it.tried("status", "orders").stdout)
            time.sleep(1)  # for who would send
            assert shop.acknowledged() == before

            recover = "queue", "recover", "orders", "--confirm", "orders", "--json"
            wait_until(lambda: '"is_done": true' in it.tried(*recover).stdout)
            wait_until(lambda: len(shop.acknowledged()) > len(before) + 100)
        acknowledged = shop.acknowledged()
        read = it.asked("consume", "--queue", "orders", "--subscription", "all", "--idle-exit", "5", "--json")
        records = {one["offset"]: one["value"] for one in map(json.loads, read.splitlines())}
        values = [int(value) for value in records.values()]
        assert list(records) == sorted(records)
        assert values == sorted(set(values))
        assert set(acknowledged.values()) <= set(records.values())
        # Where a member was late to answer its seal, what was on its way was sent again: acknowledged there, and read where it was before.
        found = {value: offset for offset, value in records.items()}
        assert all(
            records.get(offset, value) == value and found[value] <= offset for offset, value in acknowledged.items()
        )
