"""gRPC's own health checking and reflection, for every server: what `grpcurl`, load balancers and Kubernetes' probes ask.

A server answers for several service names: the empty one and its own say whether it can do its work now (readiness);
`live` says only that its loop turns (liveness: a process that waits for ZooKeeper is not helped by a restart); a client
process that stands for election adds `elected`.
"""

# ruff: noqa: N802, ARG002 - the methods' names and parameters are the protocol's

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final, Self

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from seriatim.protocol import rpc
from seriatim.protocol.errors import InvalidArgument
from seriatim.protocol.flag import set_from_anywhere
from seriatim.protocol.names import checked_address

Claim = Callable[[], bool]
"""Looked at when somebody asks, so that no answer is older than its question. Called on any thread."""

READY: Final = ""
LIVE: Final = "live"
ELECTED: Final = "elected"
_LOOK_EVERY_S: Final = 0.5


class _HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # generated without types
    def __init__(self, claims: Mapping[str, Claim]) -> None:
        self._claims = claims

    def _status(self, service: str) -> Any:
        claim = self._claims.get(service)
        if claim is None:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        return health_pb2.HealthCheckResponse.SERVING if claim() else health_pb2.HealthCheckResponse.NOT_SERVING

    def _answer(self, service: str) -> Any:
        return health_pb2.HealthCheckResponse(status=self._status(service))

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in self._claims:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
        return self._answer(request.service)

    async def List(self, request: Any, context: Any) -> Any:
        return health_pb2.HealthListResponse(statuses={service: self._answer(service) for service in self._claims})

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        told = None
        while True:
            status = self._status(request.service)
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(_LOOK_EVERY_S)


def _add(server: grpc.aio.Server, claims: Mapping[str, Claim], *services: str) -> None:
    health_pb2_grpc.add_HealthServicer_to_server(_HealthServicer(claims), server)
    reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)


def add_health(server: grpc.aio.Server, service: str, is_ready: Claim) -> None:
    """Let a server answer for its health, and say by reflection what it serves. `service`: its own full name."""
    # Said by the loop itself: where that stands still, nobody is answered.
    _add(server, {READY: is_ready, service: is_ready, LIVE: lambda: True}, service)


class HealthServer:
    """Health of a process that serves nothing else: a sender or a reader. On a loop and a thread of its own; a context manager.

    Not on several threads: each who says later, or never, what he asks would keep one, and whoever only asks is to find one.
    """

    def __init__(self, address: str, claims: Mapping[str, Claim]) -> None:
        """Nothing listens yet. `claims`: by service name, `live` among them: this loop goes on where the process's stands still."""
        self._address = address
        self._claims = claims
        self._is_over = asyncio.Event()
        self._running: tuple[asyncio.AbstractEventLoop, threading.Thread] | None = None
        self.port = 0

    def __enter__(self) -> Self:
        """Raises InvalidArgument where the address can't be listened on."""
        checked_address(self._address, "what listens for health checks", least_port=0)
        loop, listening = asyncio.new_event_loop(), Future[int]()
        loop.set_exception_handler(rpc.ignore_shared_poller)
        thread = threading.Thread(target=self._run, args=(loop, listening), name="health", daemon=True)
        thread.start()
        self._running = loop, thread
        self.port = listening.result()
        return self

    def __exit__(self, *_: object) -> None:
        if self._running is not None:
            loop, thread = self._running
            set_from_anywhere(self._is_over, loop)
            thread.join()

    def _run(self, loop: asyncio.AbstractEventLoop, listening: Future[int]) -> None:
        try:
            loop.run_until_complete(self._serve(listening))
            loop.run_until_complete(loop.shutdown_asyncgens())
        except BaseException as error:
            if listening.done():
                raise
            listening.set_exception(error)  # who waits for the port raises it
        finally:
            rpc.forget(loop)
            loop.close()

    async def _serve(self, listening: Future[int]) -> None:
        server = rpc.server()
        _add(server, self._claims)
        try:
            port = server.add_insecure_port(self._address)
            await server.start()
        except RuntimeError as error:
            raise InvalidArgument(f"can't listen on {self._address} for health checks") from error
        listening.set_result(port)
        await self._is_over.wait()
        await server.stop(None)


def ask(address: str, service: str, timeout_s: float) -> str:
    """What a server says of itself: SERVING, NOT_SERVING, SERVICE_UNKNOWN; UNREACHABLE where nobody answers."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
            )
        except grpc.RpcError as error:
            code = error.code()
            return "SERVICE_UNKNOWN" if code is grpc.StatusCode.NOT_FOUND else "UNREACHABLE"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
