"""The other member of the group: who it is, and whether it can be reached.

Each member keeps one Connect stream open to the other and says something on it twice a second. A broken connection is
seen at once, a silent one after `SILENCE_S`. `connected` is shown in this member's registration, so that a coordinator
sees whether both can reach each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from seriatim.protocol import batch_streams, log, rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch_streams import BatchStub
from seriatim.protocol.direct_calls import DirectCalls
from seriatim.protocol.errors import DeadlineOver, IncompatibleVersion, SeriatimError, Unreachable
from seriatim.protocol.incarnations import as_message
from seriatim.protocol.names import Incarnation, QueueId
from seriatim.protocol.streams import read, write

_log = log.logger("broker.peer")

BEAT_S = 0.5
SILENCE_S = 1.5
RETRY_S = 0.1


class Registered(NamedTuple):
    """What ZooKeeper says of the peer. `direct`: where it can be talked to without gRPC; empty: nowhere."""

    incarnation: Incarnation
    address: str
    direct: str = ""


def of_peer(error: SeriatimError) -> SeriatimError:
    """What the peer answered, as this member tells it: whoever reads that is to look at the other one's disk, and not to replace this one's."""
    if isinstance(error, (Unreachable, DeadlineOver)):
        return error  # it said nothing
    found = type(error)(f"the other member says: {error.message}")
    found.details = error.details
    return found


class Peer:
    """See the module. `changed` is called when `connected` changed.

    `set_back`: queues of which its disk knows more than their chains, as it said when it had compared them last.
    """

    def __init__(self, cluster: str, me: Incarnation) -> None:
        self._cluster = cluster
        self._me = as_message(me)
        self._connections: rpc.Connections[Any] = rpc.Connections(BatchStub, has_batches=True)
        self._calls = DirectCalls()
        self._task: asyncio.Task[None] | None = None
        self.registered: Registered | None = None
        self.connected: Incarnation | None = None
        self.set_back: tuple[QueueId, ...] = ()
        self.changed: Callable[[], None] = lambda: None

    def stub(self, address: str) -> Any:
        """A stub for an address; one channel each."""
        return self._connections.stub(address)

    def to_call(self) -> Registered:
        """The peer that is registered now, connected or not. Raises Unreachable where it isn't."""
        if self.registered is None:
            raise Unreachable("the other member isn't registered")
        return self.registered

    async def call(self, to: Registered, method: Callable[[Any], Any], request: object, timeout_s: float) -> Any:
        """A unary call, by the stub's method where it isn't taken directly. Raises SeriatimErrors, `of_peer`."""
        stub = self.stub(to.address)  # now: later nobody may be there, and be forgotten
        try:
            return await self._calls.call(to.direct, lambda: method(stub), request, timeout_s)
        except SeriatimError as error:
            raise of_peer(error) from error.__cause__

    def register(self, registered: Registered | None) -> None:
        """Follow what ZooKeeper says of the peer; None: it isn't registered."""
        if registered == self.registered:
            return
        self.registered = registered
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._disconnected()
        self._calls.keep_only(() if registered is None else (registered.direct,))
        if registered is not None:
            self._task = asyncio.get_running_loop().create_task(self._keep_connected(registered), name="peer")

    def _disconnected(self) -> None:
        if self.connected is not None:
            _log.info("peer lost", peer=self.connected)
            self.connected = None
            self.changed()

    async def _keep_connected(self, registered: Registered) -> None:
        incarnation, address, direct = registered
        await self._connections.forget_dead((address,))
        is_told = False
        while True:
            try:
                await self._converse(incarnation, await batch_streams.connect(direct, lambda: self.stub(address)))
            except IncompatibleVersion:
                direct = ""  # one of an earlier version takes no Connect there
            except (SeriatimError, TimeoutError) as error:
                if self.connected is not None or not is_told:
                    reason = str(error) or "no answer in time"
                    where = {"address": address, "direct": direct}
                    _log.warning("peer doesn't answer", peer=incarnation, **where, reason=reason)
                is_told = True
            self._disconnected()
            await asyncio.sleep(RETRY_S)

    async def _converse(self, incarnation: Incarnation, call: Any) -> None:
        message = pb.ConnectRequest(cluster=self._cluster, to=as_message(incarnation), **{"from": self._me})
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    await write(call, message)
                    reply = await read(call)
                if reply is None:
                    return
                if self.connected is None:
                    self.connected = incarnation
                    _log.info("peer connected", peer=incarnation)
                    self.changed()
                await asyncio.sleep(BEAT_S)
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._calls.close()
        self.register(None)
        await self._connections.close()
