"""gRPC's own health checking and reflection, for every server: what `grpcurl`, load balancers and Kubernetes' probes ask.

A server answers for several service names: the empty one and its own say whether it can do its work now (readiness);
`live` says only that its loop turns (liveness: a process that waits for ZooKeeper is not helped by a restart); a client
process that stands for election adds `elected`.
"""

# ruff: noqa: N802, ARG002 - the methods' names and parameters are the protocol's

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Self

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from seriatim.protocol import rpc
from seriatim.protocol.errors import InvalidArgument
from seriatim.protocol.names import checked_address

Claim = Callable[[], bool]
"""Looked at when somebody asks, so that no answer is older than its question. Called on any thread."""

READY: Final = ""
LIVE: Final = "live"
ELECTED: Final = "elected"
_LOOK_EVERY_S: Final = 0.5
_THREADS: Final = 12
_KEPT: Final = 4
"""So many of them who watch may keep, and so many who ask by reflection; whoever only asks is to find one."""


class _Answers:
    """What both kinds of servers answer."""

    def __init__(self, claims: Mapping[str, Claim]) -> None:
        self._claims = claims

    def status(self, service: str) -> Any:
        claim = self._claims.get(service)
        if claim is None:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        return health_pb2.HealthCheckResponse.SERVING if claim() else health_pb2.HealthCheckResponse.NOT_SERVING

    def answer(self, service: str) -> Any:
        return health_pb2.HealthCheckResponse(status=self.status(service))

    def all(self) -> Any:
        return health_pb2.HealthListResponse(statuses={service: self.answer(service) for service in self._claims})

    def is_known(self, service: str) -> bool:
        return service in self._claims


class _HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # generated without types
    """For an asyncio server."""

    def __init__(self, answers: _Answers) -> None:
        self._answers = answers

    async def Check(self, request: Any, context: Any) -> Any:
        if not self._answers.is_known(request.service):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
        return self._answers.answer(request.service)

    async def List(self, request: Any, context: Any) -> Any:
        return self._answers.all()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        told = None
        while True:
            status = self._answers.status(request.service)
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(_LOOK_EVERY_S)


class _BlockingHealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # generated without types
    """For a server on threads."""

    def __init__(self, answers: _Answers) -> None:
        self._answers = answers
        self._room = threading.Semaphore(_KEPT)

    def Check(self, request: Any, context: Any) -> Any:
        if not self._answers.is_known(request.service):
            context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
        return self._answers.answer(request.service)

    def List(self, request: Any, context: Any) -> Any:
        return self._answers.all()

    def Watch(self, request: Any, context: Any) -> Iterator[Any]:
        with _kept(self._room, context):
            told = None
            while context.is_active():
                status = self._answers.status(request.service)
                if status != told:
                    told = status
                    yield health_pb2.HealthCheckResponse(status=status)
                time.sleep(_LOOK_EVERY_S)


class _BlockingReflection(reflection.ReflectionServicer):
    """The same: a call lasts as long as the caller may ask something more."""

    def __init__(self) -> None:
        super().__init__((health.SERVICE_NAME, reflection.SERVICE_NAME))
        self._room = threading.Semaphore(_KEPT)

    def ServerReflectionInfo(self, request_iterator: Any, context: Any) -> Iterator[Any]:  # type: ignore[override] # its types know no answers
        answers: Any = super().ServerReflectionInfo
        with _kept(self._room, context):
            yield from answers(request_iterator, context)


@contextlib.contextmanager
def _kept(room: threading.Semaphore, context: Any) -> Iterator[None]:
    """A thread is, meanwhile; a call that finds no room ends."""
    if not room.acquire(blocking=False):
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_KEPT} such calls last already; `Check` answers everybody")
    try:
        yield
    finally:
        room.release()


def add_health(server: grpc.aio.Server, service: str, is_ready: Claim) -> None:
    """Let a server answer for its health, and say by reflection what it serves. `service`: its own full name."""
    # Said by the loop itself: where that stands still, nobody is answered.
    answers = _Answers({READY: is_ready, service: is_ready, LIVE: lambda: True})
    health_pb2_grpc.add_HealthServicer_to_server(_HealthServicer(answers), server)
    services = service, health.SERVICE_NAME, reflection.SERVICE_NAME
    reflection.enable_server_reflection(services, server)


class HealthServer:
    """Health of a process that serves nothing else: a sender or a reader. Its own threads; a context manager."""

    def __init__(self, address: str, claims: Mapping[str, Claim]) -> None:
        """Nothing listens yet. `claims`: by service name, `live` among them: these threads go on where the process's loop stands still."""
        self._address = address
        self._answers = _Answers(claims)
        self._server: grpc.Server | None = None
        self.port = 0

    def __enter__(self) -> Self:
        """Raises InvalidArgument where the address can't be listened on."""
        checked_address(self._address, "what listens for health checks", least_port=0)
        server = grpc.server(ThreadPoolExecutor(_THREADS), options=rpc.server_options())
        health_pb2_grpc.add_HealthServicer_to_server(_BlockingHealthServicer(self._answers), server)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(_BlockingReflection(), server)
        try:
            self.port = server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise InvalidArgument(f"can't listen on {self._address} for health checks") from error
        server.start()
        self._server = server
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None


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
