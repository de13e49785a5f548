"""One coordinator's process: it registers, serves, stands for election, and stops cleanly on SIGTERM and SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc.aio

from seriatim.coordinator.administration import Operations
from seriatim.coordinator.background import BackgroundWork
from seriatim.coordinator.description import Description
from seriatim.coordinator.execution import Execution
from seriatim.coordinator.members import Members
from seriatim.coordinator.outside import AnswersOutside
from seriatim.coordinator.service import CoordinatorService
from seriatim.coordinator.store import Store
from seriatim.protocol import log, rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.checksums import CheckedServer
from seriatim.protocol.election import Election, Standing
from seriatim.protocol.errors import InvalidArgument, WorldError
from seriatim.protocol.flag import until_set
from seriatim.protocol.health import add_health
from seriatim.protocol.names import check_served, checked_address, checked_name
from seriatim.protocol.registration import CoordinatorRegistration
from seriatim.protocol.seriatim_pb2_grpc import add_CoordinatorServicer_to_server
from seriatim.protocol.zookeeper import (
    MILLISECONDS_MAX,
    NodeExists,
    NoNode,
    SessionState,
    ZooKeeperSession,
    check_hosts,
    path_of,
)

_log = log.logger("coordinator")
STOP_GRACE_S = 1.0
REGISTER_RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """Settings of one coordinator.

    `advertise`: the address that others reach it by, where it isn't `listen`. `member_timeout_ms`: deadline of each call
    to a member. `call_timeout_ms`: after that long a call that waits for members is answered with an error.

    `listen_outside`: a second door, whose callers are answered in addresses that reach from outside of the cluster's
    network (`outside`). `advertise_outside`: what this coordinator's second door is reached by from there.
    `zookeeper_outside`: what ZooKeeper is reached by from there.
    """

    zookeeper: str
    cluster: str = "main"
    listen: str = "127.0.0.1:0"
    advertise: str = ""
    listen_outside: str = ""
    advertise_outside: str = ""
    zookeeper_outside: str = ""
    name: str = ""
    session_timeout_ms: int = 4000
    member_timeout_ms: int = 1000
    call_timeout_ms: int = 8000

    def check(self) -> None:
        """Raises InvalidArgument."""
        for key in ("session_timeout_ms", "member_timeout_ms", "call_timeout_ms"):
            if not 0 < getattr(self, key) <= MILLISECONDS_MAX:
                raise InvalidArgument(f"{key} has to be more than 0, and {MILLISECONDS_MAX} at most")
        check_hosts(self.zookeeper, "zookeeper")
        checked_name(self.cluster, "cluster")
        if self.name:
            checked_name(self.name, "coordinator")
        check_served(self.listen, self.advertise)
        if self.listen_outside:
            checked_address(self.listen_outside, "listen_outside", least_port=0)
        if self.advertise_outside:
            checked_address(self.advertise_outside, "advertise_outside")
        if self.zookeeper_outside:
            check_hosts(self.zookeeper_outside, "zookeeper_outside")
            if path_of(self.zookeeper_outside) != path_of(self.zookeeper):
                raise InvalidArgument(
                    "zookeeper_outside has to have the path of zookeeper: senders and readers outside would stand for election elsewhere"
                )
        if self.listen_outside and not (self.advertise_outside and self.zookeeper_outside):
            raise InvalidArgument(
                "listen_outside needs advertise_outside and zookeeper_outside: what callers there are told"
            )


class CoordinatorProcess:
    """A coordinator that can also run inside another process's loop: `live` until cancelled, or `start`, `run` until cancelled, `stop`."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        settings.check()
        self._settings = settings
        self.name = settings.name or f"coordinator-{os.urandom(4).hex()}"
        self.address = ""
        self.port = 0
        self._session = ZooKeeperSession(settings.zookeeper, settings.session_timeout_ms / 1000)
        self._store = Store(self._session, settings.cluster)
        self._members = Members(self._store, settings.member_timeout_ms / 1000)
        self._execution = Execution(self._store, self._members, settings.call_timeout_ms / 1000, self._is_elected)
        self._election = Election(
            self._session,
            self._store.paths.coordinator_election,
            self.name,
            self._standing_changed,
            gives_way=True,
        )
        self._description = Description(self._store, self._members)
        self._operations = Operations(self._store, self._execution, self._description)
        self._background = BackgroundWork(
            self._store,
            self._members,
            self._execution,
            self._operations.rotate_aged,
            self._is_elected,
            self._election.give_way,
        )
        self._register = asyncio.Event()
        self._server = rpc.server()
        self._outside_server = rpc.server([AnswersOutside(self._outside_addresses)])
        self._is_stopping = False
        self._name_owner = 0

    async def live(self, ready: Callable[[str, str], None]) -> None:
        """All of it, until cancelled; `ready(name, address)` is called when it serves. However it ends, it stops."""
        try:
            await self.start()
            ready(self.name, self.address)
            await self.run()
        finally:
            await self.stop()

    async def start(self) -> None:
        """Connect, serve and register. Raises Unreachable where ZooKeeper never answered, and InvalidArgument."""
        await self._session.start()
        self._session.on_state(self._session_changed)
        await self._done(self._store.start)
        self._store.on_change(self._members.connect)
        self._members.connect()
        service = CoordinatorService(self._store, self._members, self._execution, self._description, self._operations)
        self._serve(service, self._server)
        self.port = rpc.listen(self._server, self._settings.listen)
        host = self._settings.listen.rsplit(":", 1)[0]
        self.address = self._settings.advertise or f"{host}:{self.port}"
        await self._server.start()
        if self._settings.listen_outside:
            self._serve(service, self._outside_server)
            rpc.listen(self._outside_server, self._settings.listen_outside)
            await self._outside_server.start()
        await self._done(self._registered)

    async def run(self) -> None:
        """Work until cancelled. Raises IncompatibleVersion once a newer version has written a chain that this one can't read."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._store.run())
                tasks.create_task(self._election.run())
                tasks.create_task(self._background.run())
                tasks.create_task(self._stay_registered())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # by itself it says how the process ends

    async def stop(self) -> None:
        """Let calls under way finish for a moment, then close everything."""
        self._is_stopping = True
        await asyncio.gather(self._server.stop(STOP_GRACE_S), self._outside_server.stop(STOP_GRACE_S))
        await self._execution.close()
        await self._members.close()
        await self._session.stop()

    def _serve(self, service: CoordinatorService, server: grpc.aio.Server) -> None:
        to: Any = CheckedServer(server)
        add_CoordinatorServicer_to_server(service, to)
        add_health(server, pb.DESCRIPTOR.services_by_name["Coordinator"].full_name, self._is_ready)

    def _is_ready(self) -> bool:
        """Whether it can decide anything now: without ZooKeeper it can't."""
        return self._session.state is SessionState.CONNECTED and not self._is_stopping

    async def _outside_addresses(self) -> Mapping[str, str]:
        return {**await self._store.outside_addresses(), self._settings.zookeeper: self._settings.zookeeper_outside}

    def _is_elected(self) -> bool:
        return self._election.standing is Standing.ELECTED

    def _standing_changed(self, standing: Standing) -> None:
        if standing is Standing.ELECTED:
            self._background.wake()

    def _session_changed(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            self._register.set()

    async def _stay_registered(self) -> None:
        """Register again whenever a new session took the place of a lost one, or somebody deleted the node."""
        while True:
            await self._register.wait()
            self._register.clear()
            await self._done(self._registered)

    async def _done(self, step: Callable[[], Awaitable[None]]) -> None:
        """A connection that breaks, or a session that ends, in the midst of a step is waited out."""
        told = ""
        while True:
            try:
                return await step()
            except (WorldError, NoNode) as error:
                if told != (told := repr(error)):
                    _log.warning("ZooKeeper can't be asked now", error=told)
                await asyncio.sleep(REGISTER_RETRY_S)

    async def _registered(self) -> None:
        path = f"{self._store.paths.coordinators}/{self.name}"
        data = CoordinatorRegistration(self.address, self._settings.advertise_outside).encode()
        try:
            await self._session.create(path, data, ephemeral=True, parents=True)
        except NodeExists:
            owner = 0
            with contextlib.suppress(NoNode):  # it has gone between the two looks
                owner = await self._session.owner(path)
            if owner != self._session.session_id:
                # Left by this name's earlier session or process, it goes with that session, and is made again then; or another one has it.
                if owner != self._name_owner:
                    _log.warning(
                        "not registered yet: another session has this name", name=self.name, session=hex(owner)
                    )
                self._name_owner = owner
                await asyncio.sleep(REGISTER_RETRY_S)
                self._register.set()
                return
        # Clients find coordinators by these nodes; what was damaged on its way there is none.
        with contextlib.suppress(NoNode):
            found, _ = await self._session.get(path, self._register.set)
            if found == data:
                return
            await self._session.set(path, data)
        self._register.set()


async def serve(settings: CoordinatorSettings, ready: Callable[[str, str], None], stop: asyncio.Event) -> None:
    """Run one coordinator until `stop` is set; `ready(name, address)` is called when it serves."""
    await until_set(stop, CoordinatorProcess(settings).live(ready))
