"""Calls to any coordinator: they are found in ZooKeeper, and any serves any request."""

from __future__ import annotations

from typing import Any

from seriatim.protocol import rpc
from seriatim.protocol.errors import DeadlineOver, SeriatimError, Unreachable
from seriatim.protocol.nodes import Paths, read_coordinators
from seriatim.protocol.seriatim_pb2_grpc import CoordinatorStub
from seriatim.protocol.zookeeper import NoNode, ZooKeeperSession


def nobody_answers(error: SeriatimError) -> bool:
    """Whether whatever else is asked meets the same. Who answers may be unable to serve one queue, as where bits have changed in its chain."""
    return isinstance(error, DeadlineOver) or (isinstance(error, Unreachable) and not rpc.is_answer(error))


class Coordinators:
    """One channel for each coordinator that was registered when last looked at."""

    def __init__(self, session: ZooKeeperSession, paths: Paths) -> None:
        self._session = session
        self._paths = paths
        self._connections: rpc.Connections[Any] = rpc.Connections(rpc.checked(CoordinatorStub))

    async def _addresses(self) -> list[str]:
        try:
            names = await self._session.children(self._paths.coordinators)
        except NoNode:
            return []
        found = await read_coordinators(self._session, self._paths, sorted(names))
        return [one.address for one in found.values()]

    async def call(self, method: str, request: object, timeout_s: float) -> Any:
        """The first answer of any coordinator to a unary call.

        Raises Unreachable where none answers, or what one of them says why it can't do that.
        """
        failure: SeriatimError | None = None
        addresses = await self._addresses()
        await self._connections.forget_dead(addresses)
        for address in addresses:
            try:
                return await rpc.call(getattr(self._connections.stub(address), method), request, timeout_s)
            except (Unreachable, DeadlineOver) as error:
                if failure is None or not rpc.is_answer(failure):
                    failure = error
        if failure is not None and rpc.is_answer(failure):
            raise failure
        raise Unreachable("no coordinator answers") from failure

    async def close(self) -> None:
        await self._connections.close()
