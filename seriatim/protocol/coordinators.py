"""The coordinators of a cluster, as a client calls them: any serves any request, one that doesn't answer is passed over.

Problem: a coordinator that was stopped keeps its connections open and says nothing; whoever waits for it waits for a deadline.

Idea: where a call may be under way twice, the next coordinator is asked as well after a moment of silence, and the first
answer counts; later ones are not looked at, so none that is older can take its place. Repeating a procedure changes
nothing (protocol.md 4), with one exception: who asks for a route without a token is given the next one each time, and the
first answer's would be overtaken by the second's. There, it is found out first who answers at all.

Where nothing changes a watch says now and then just that. Where it is silent another coordinator is asked what it would say, and
rarely where it isn't; at once where whoever watches has reason to doubt that it was told all.

An address that was given may lead to another cluster's coordinator one day: that one knows none of this one's queues, as if they had been
deleted, and its ZooKeeper is another one. Who coordinates which cluster it tells; whose isn't that of the first answer is passed over.

Coordinators are replaced one by one, while senders and readers run on for months, some of which ask nothing from one switch to the
next. So one is asked now and then who coordinates by now, and soon after one had to be passed over. Where none answers of those that are
known, ZooKeeper is, by whoever has a session there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from random import uniform
from typing import Any, Never, Self

from seriatim.protocol import log, rpc, streams
from seriatim.protocol.clock import boottime_s
from seriatim.protocol.errors import DeadlineOver, InvalidArgument, SeriatimError, UnknownQueue, Unreachable
from seriatim.protocol.names import is_host_and_port
from seriatim.protocol.registration import CoordinatorRegistration
from seriatim.protocol.seriatim_pb2 import DescribeClusterReply, DescribeClusterRequest, QueueRequest, QueueView
from seriatim.protocol.seriatim_pb2_grpc import CoordinatorStub
from seriatim.protocol.zookeeper import NoNode

_log = log.logger("coordinators")

VARIABLE = "SERIATIM_COORDINATOR"
"""Of the environment: coordinators, where none are named."""
CALL_TIMEOUT_S = 5.0
_EACH_S = 2.0
_PAUSE_S = 0.1
_PAUSE_MAX_S = 1.0
SILENCE_S = 0.2
"""After so long without an answer another coordinator is asked, too. A switch takes less where all who take part answer."""
QUIET_S = 10.0
"""After so long without a word on a watch, a beat even, its coordinator doesn't go on, or is of an earlier version, which has no beats."""
COMPARED_EVERY = 12
"""Beats, a minute of them, after which another coordinator is asked all the same."""
LOOK_S = 60.0
"""At most so long between two looks at who coordinates."""
MISSED_S = 2.0
"""At most so long after one was passed over: all clients of a coordinator that ends meet that at the same moment."""
_REPEATABLE = ("Describe", "List", "Acquire")
"""Calls that may be asked of another coordinator after a time-out: they read, or doing them twice changes nothing."""
_ACQUIRE = "Acquire"
_LIST = "List"
"""Calls that show all queues. With thousands the second one asked would be as busy as the first, and no sooner done."""


def addresses_of(coordinators: str | Iterable[str] | None) -> list[str]:
    """`host:port,host:port`, or a list of such; None: what the environment says. Raises InvalidArgument where it names none, or something else."""
    if coordinators is None:
        coordinators = os.environ.get(VARIABLE, "")
    parts = (coordinators if isinstance(coordinators, str) else ",".join(coordinators)).split(",")
    addresses = [part.strip() for part in parts if part.strip()]
    if not addresses:
        raise InvalidArgument(f"name a coordinator: HOST:PORT, or set {VARIABLE}")
    for address in addresses:
        if not is_host_and_port(address):
            raise InvalidArgument(f"coordinators are given as HOST:PORT[,HOST:PORT…], not as {address!r}")
    return addresses


def may_overlap(method: str, request: Any) -> bool:
    """Whether a call may be under way at two coordinators: it only reads, and little, or it names the token that it is made under."""
    if method.startswith(_ACQUIRE):
        return bool(request.token)
    return method.startswith(_REPEATABLE) and not method.startswith(_LIST)


class Coordinators:
    """One channel a coordinator; the one that answered last is asked first. For one asyncio loop.

    Those that the cluster itself names are asked behind those given, from its first word on until `close`.
    Made of what `addresses_of` takes; raises as that. `problem`: why none answers; empty as far as is known. `registered`: by which
    ZooKeeper is asked, if it can be.
    """

    def __init__(self, coordinators: str | Iterable[str] | None) -> None:
        self.problem = ""
        self.registered: Callable[[], Awaitable[Mapping[str, CoordinatorRegistration]]] | None = None
        self._cluster = ""  # which one these coordinate, once one has told
        self._is_outside: bool | None = None  # whether addresses are told that reach from there, where that is told
        self._addresses = addresses_of(coordinators)
        self._given = frozenset(self._addresses)
        self._named: frozenset[str] = frozenset()
        self._connections = rpc.Connections(rpc.checked(CoordinatorStub))
        self._missed = asyncio.Event()
        self._doubt = asyncio.Event()  # whether a watch was told all
        self._looking: asyncio.Task[Never] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._connections.close()

    def _keep_looking(self) -> None:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_about())

    async def _look_about(self) -> Never:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_spread(LOOK_S)):
                    await self._missed.wait()
                    await asyncio.sleep(_spread(MISSED_S))
            try:
                await self.call("DescribeCluster", DescribeClusterRequest())
            except SeriatimError:
                await self._look_at_zookeeper()
            self._missed.clear()
            # Also those that were given: who has such an address by then is greeted no more than each time it is asked.
            await self._connections.forget_dead(self._addresses[:1])

    async def _look_at_zookeeper(self) -> None:
        """All that were known may have been replaced since the last look."""
        if self.registered is None or self._is_outside is None:
            return
        try:
            found = (await self.registered()).values()
        except (SeriatimError, NoNode):
            return
        self._know((self._is_outside and one.outside) or one.address for one in found)

    def _know(self, found: Iterable[str]) -> None:
        """Who coordinates now. Whom neither this answer nor the one before names was replaced, and is forgotten, unless it was given.

        Two answers: who loses its session with ZooKeeper isn't named until it has the next one.
        """
        named = frozenset(address for address in found if address)
        known = self._given | self._named | named
        kept = [address for address in self._addresses if address in known]
        self._addresses = kept + sorted(known.difference(kept))
        self._named = named

    async def call(self, method: str, request: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Call a unary method at one coordinator after another, each once, `timeout_s` for each.

        Where one is silent, the next is asked beside it, if the call allows it. A call that changes something is not
        repeated elsewhere after a time-out: it may have been done. Raises what a coordinator answered, DeadlineOver, or
        Unreachable where none answers.
        """
        self._keep_looking()
        if "cause_id" in request.DESCRIPTOR.fields_by_name and not request.cause_id:
            request.cause_id = log.new_cause_id(method)
        if may_overlap(method, request):
            return await self._call_overlapping(method, request, timeout_s)
        if method.startswith((_ACQUIRE, _LIST)) and len(self._addresses) > 1:
            await self._call_overlapping("DescribeCluster", DescribeClusterRequest(), timeout_s)
        return await self._call_one_by_one(method, request, timeout_s)

    async def _call_overlapping(self, method: str, request: Any, timeout_s: float) -> Any:
        unasked = list(self._addresses)
        asked: dict[asyncio.Task[Any], str] = {}
        problems: list[SeriatimError] = []
        try:
            while unasked or asked:
                if unasked:
                    address = unasked.pop(0)
                    asked[asyncio.ensure_future(self._ask(address, method, request, timeout_s))] = address
                await asyncio.wait(asked, timeout=SILENCE_S if unasked else None, return_when=asyncio.FIRST_COMPLETED)
                for task in [one for one in asked if one.done()]:
                    address = asked.pop(task)
                    try:
                        answer = task.result()
                    except (DeadlineOver, Unreachable) as error:
                        problems.append(_alone(error))
                        self._pass_over(address)
                        continue
                    for silent in asked.values():
                        if self._place(silent) < self._place(address):
                            self._pass_over(silent)
                    self.problem = ""
                    if isinstance(answer, DescribeClusterReply):
                        self._is_outside = answer.is_outside if answer.HasField("is_outside") else None
                        self._know((address, *answer.coordinators))
                    return answer
            raise self._unreachable(problems)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _call_one_by_one(self, method: str, request: Any, timeout_s: float) -> Any:
        problems: list[SeriatimError] = []
        for address in list(self._addresses):
            try:
                return await self._ask(address, method, request, timeout_s)
            except DeadlineOver as error:
                if not method.startswith(_REPEATABLE):
                    raise DeadlineOver(
                        f"coordinator {address} was asked to {method}, and may have done it: {error.message}"
                    ) from error
                problems.append(_alone(error))
            except Unreachable as error:
                problems.append(_alone(error))
            self._pass_over(address)
        raise self._unreachable(problems)

    async def _ask(self, address: str, method: str, request: Any, timeout_s: float) -> Any:
        """Call one. Raises as `rpc.call`, and Unreachable where it coordinates another cluster."""
        try:
            answer = await rpc.call(getattr(self._stub(address), method), request, timeout_s, address)
        except UnknownQueue:
            await self._check_address(address)
            raise
        if isinstance(answer, DescribeClusterReply):
            self._check_cluster(address, answer.cluster)
            self._cluster = self._cluster or answer.cluster
        return answer

    async def _check_address(self, address: str) -> None:
        """Raises Unreachable where another cluster's coordinator has it by now, or nobody can tell."""
        if self._cluster:
            await self._ask(address, "DescribeCluster", DescribeClusterRequest(), _EACH_S)

    def _check_cluster(self, address: str, cluster: str) -> None:
        if cluster and self._cluster not in {"", cluster}:
            raise Unreachable(f"{address} is a coordinator of cluster {cluster!r}, and not of {self._cluster!r}")

    def _unreachable(self, problems: list[SeriatimError]) -> Unreachable:
        """What is told where none could do it: best what one of them says, as that ZooKeeper doesn't answer."""
        last = next((one for one in reversed(problems) if rpc.is_answer(one)), problems[-1])
        can = "can do that now" if rpc.is_answer(last) else "answers"
        error = Unreachable(f"no coordinator {can} at {', '.join(self._addresses)}: {_short(last.message)}")
        self.problem = error.message
        return error

    async def call_within(
        self, method: str, request: Any, within_s: float = CALL_TIMEOUT_S, each_s: float = _EACH_S
    ) -> Any:
        """As `call`, round after round, until one answers, each asked for up to `each_s`. Raises Unreachable where none did within `within_s`."""
        deadline_s = boottime_s() + within_s
        pause_s = _PAUSE_S
        while True:
            left_s = deadline_s - boottime_s()
            try:
                return await self.call(method, request, max(0.05, min(left_s, each_s)))
            except Unreachable:
                if boottime_s() + pause_s >= deadline_s:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(_PAUSE_MAX_S, pause_s * 2)

    async def watch(self, queue: str) -> AsyncIterator[QueueView]:
        """The queue now and whenever it changes, without end: a coordinator that fails is replaced by the next.

        Raises UnknownQueue and other errors of the caller's.
        """
        self._keep_looking()
        pause_s = _PAUSE_S
        told: QueueView | None = None
        while True:
            address = self._addresses[0]
            request = QueueRequest(queue=queue, cause_id=log.new_cause_id("watch"), wants_beats=True)
            stream: Any = self._stub(address).WatchQueue(request)
            try:
                while (view := await self._next_view(stream, address, request, told)) is not None:
                    self._check_cluster(address, view.cluster)
                    pause_s, told = _PAUSE_S, view
                    yield view
            except SeriatimError as error:
                if not error.can_retry:
                    raise
                _log.debug("watch broke", queue=queue, coordinator=address, error=error.message)
            finally:
                stream.cancel()
            self._pass_over(address)
            await asyncio.sleep(pause_s)
            pause_s = min(_PAUSE_MAX_S, pause_s * 2)

    def compare_watches(self) -> None:
        """Ask another coordinator now what it would tell who watches: there is a sign of something that wasn't told. On the loop."""
        self._doubt.set()

    async def _next_view(
        self, stream: Any, address: str, request: QueueRequest, told: QueueView | None
    ) -> QueueView | None:
        """What a watch tells next; None where it ended, or another coordinator tells what this one doesn't. Raises as `_read`.

        One whose process stands still keeps its streams open as long as its threads live.
        """
        beats = 0
        while True:
            reading = asyncio.ensure_future(_read(stream, address))
            try:
                while not await self._is_done_soon(reading):
                    if await self._is_overtaken(address, request, told):
                        return None
                view = reading.result()
            except UnknownQueue:
                await self._check_address(address)
                raise
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                del reading  # as in `_alone`
            if view is None or not view.is_beat:
                return view
            beats += 1
            if beats % COMPARED_EVERY == 0 and await self._is_overtaken(address, request, told):
                return None

    async def _is_done_soon(self, reading: asyncio.Future[QueueView | None]) -> bool:
        """Whether something was read; False after a long silence, and as soon as there is doubt."""
        doubting = asyncio.ensure_future(self._doubt.wait())
        try:
            done, _ = await asyncio.wait((reading, doubting), timeout=QUIET_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            doubting.cancel()
        self._doubt.clear()
        return reading in done

    async def _is_overtaken(self, address: str, request: QueueRequest, told: QueueView | None) -> bool:
        """Whether another coordinator than the one at `address` tells something else than was `told` last, and nothing older.

        By a watch, too: a description asks all members. One that doesn't answer is asked last from then on.
        """
        other = next((one for one in self._addresses if one != address), None)
        if other is None:
            return False
        stream: Any = self._stub(other).WatchQueue(request)
        try:
            async with asyncio.timeout(_EACH_S):
                view = await _read(stream, other)
            if view is not None:
                self._check_cluster(other, view.cluster)
        except (TimeoutError, SeriatimError):
            self._pass_over(other)
            return False
        finally:
            stream.cancel()
        if view is None:
            return False
        is_overtaken = told is None or (view.chain_version >= told.chain_version and view != told)
        if is_overtaken:
            _log.info("watch is behind", queue=request.queue, coordinator=address, cause_id=request.cause_id)
        return is_overtaken

    def _stub(self, address: str) -> CoordinatorStub:
        return self._connections.stub(address)

    def _place(self, address: str) -> int:
        """In the order in which they are asked; behind all others where it was forgotten meanwhile."""
        return self._addresses.index(address) if address in self._addresses else len(self._addresses)

    def _pass_over(self, address: str) -> None:
        if address in self._addresses:
            self._addresses.remove(address)
            self._addresses.append(address)
        self._missed.set()


def _alone(error: SeriatimError) -> SeriatimError:
    """Without where it was met: that has the error itself, in a circle, and the call with it, which keeps its channel going, though closed.

    Where nothing goes on nobody looks for circles, and whoever has that address by then was greeted twice a second.
    """
    return error.with_traceback(None)


def _spread(most_s: float) -> float:
    """Who met the same at the same moment asks at different ones."""
    return most_s * uniform(0.5, 1.0)  # noqa: S311 - no secret


async def _read(stream: Any, address: str) -> QueueView | None:
    """What a watch says next. As `streams.read`; Unreachable, too, where who was asked is forgotten meanwhile."""
    try:
        return await streams.read(stream, address)
    except asyncio.CancelledError:
        rpc.check_cancelled(address)
        raise


def _short(problem: str) -> str:
    """The reason, which gRPC's text for a connection that failed says last."""
    return problem.rsplit(": ", 1)[-1] if "failed to connect" in problem.lower() else problem
