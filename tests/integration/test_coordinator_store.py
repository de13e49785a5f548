"""The coordinator against a real ZooKeeper, and with real brokers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NotEmptyError

from seriatim.broker_group.membership import STANDS_ASIDE
from seriatim.cli import exits
from seriatim.coordinator import background
from seriatim.coordinator import store as coordinator_store
from seriatim.coordinator.administration import Operations
from seriatim.coordinator.core import background as core_background
from seriatim.coordinator.core import chain, closing, subscriptions
from seriatim.coordinator.core.background import SeenChain
from seriatim.coordinator.core.registry import Registry
from seriatim.coordinator.process import CoordinatorProcess, CoordinatorSettings
from seriatim.coordinator.remembered import GroupNodes, Listing, Stale
from seriatim.coordinator.store import Store
from seriatim.protocol import chain_json, rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument, QueueSettings
from seriatim.protocol.clock import now_ms
from seriatim.protocol.election import Election, Standing
from seriatim.protocol.errors import (
    ChainSetBack,
    Fenced,
    IncompatibleVersion,
    InvalidArgument,
    NoChainDocument,
    NotElected,
    QueueExists,
    SeriatimError,
    UnknownGroup,
    UnknownQueue,
    UnknownSubscription,
    Unreachable,
    Waiting,
)
from seriatim.protocol.names import ChainVersion, Epoch, Incarnation, MemberName, QueueId, SubscriptionId
from seriatim.protocol.nodes import NotUnderstood, Paths, read_coordinators
from seriatim.protocol.registration import Registration
from seriatim.protocol.seriatim_pb2_grpc import CoordinatorStub
from seriatim.protocol.zookeeper import SessionState, ZooKeeperSession
from tests.chains import without_checksum
from tests.property.chain_world import World, send_call

CLUSTER = "c"
CALL_S = 60.0
SESSION_MS = 20_000
"""Longer than a machine stands still: no session of a test, a coordinator or a broker ends by itself."""

pytestmark = pytest.mark.timeout(300)


async def until(condition: Callable[[], Awaitable[bool] | bool], what: str, timeout_s: float = 60) -> None:
    """Wait for a condition with a deadline."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = condition()
        if found if isinstance(found, bool) else await found:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"not within {timeout_s} s: {what}")


@asynccontextmanager
async def session(zookeeper: str) -> AsyncIterator[ZooKeeperSession]:
    opened = ZooKeeperSession(zookeeper, SESSION_MS / 1000)
    await opened.start()
    try:
        yield opened
    finally:
        await opened.stop()


@asynccontextmanager
async def started_store(zookeeper: str) -> AsyncIterator[tuple[ZooKeeperSession, Store]]:
    """With the session that it goes by."""
    async with session(zookeeper) as own:
        store = Store(own, CLUSTER)
        await store.start()
        yield own, store


@asynccontextmanager
async def coordinator(zookeeper: str) -> AsyncIterator[CoordinatorStub]:
    settings = CoordinatorSettings(
        zookeeper=zookeeper,
        cluster=CLUSTER,
        session_timeout_ms=SESSION_MS,
        member_timeout_ms=10_000,
        call_timeout_ms=50_000,
    )
    process = CoordinatorProcess(settings)
    await process.start()
    run = asyncio.create_task(process.run())
    channel = rpc.channel(process.address)
    try:
        yield CoordinatorStub(channel)
    finally:
        await channel.close(None)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        await process.stop()


@asynccontextmanager
async def elected(zookeeper: str, path: str) -> AsyncIterator[str]:
    """The name of an election node that is first in line."""
    async with session(zookeeper) as own:
        election = Election(own, path, "test", lambda _: None)
        run = asyncio.create_task(election.run())
        await until(lambda: election.standing is Standing.ELECTED, "elected")
        try:
            yield election.node
        finally:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)


class Brokers:
    """Real broker processes, by group and member."""

    def __init__(self, zookeeper: str, directory: Path) -> None:
        self._zookeeper = zookeeper
        self._directory = directory
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._addresses: dict[str, str] = {}

    def start(self, *names: str) -> None:
        for name in names:
            group, member = name.split("-")
            flags = {
                "--zookeeper": self._zookeeper,
                "--cluster": CLUSTER,
                "--group": group,
                "--member": member,
                "--dir": str(self._directory / name),
                "--listen": "127.0.0.1:0",
                "--session-timeout-ms": str(SESSION_MS),
            }
            with (self._directory / f"{name}.log").open("a") as log:
                self.processes[name] = subprocess.Popen(
                    [
                        sys.executable,
                        "-c",
                        "from seriatim.cli.broker import broker; broker()",
                        *(word for pair in flags.items() for word in pair),
                    ],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
        for name in names:
            line = self.processes[name].stdout.readline()
            assert line.startswith("ready "), (self._directory / f"{name}.log").read_text()
            self._addresses[name] = line.split()[-1]

    def address(self, name: str) -> str:
        return self._addresses[name]

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()

    def end(self, *names: str) -> None:
        """As an operator does it: they leave their sessions."""
        for name in names:
            process = self.processes.pop(name)
            process.terminate()
            assert process.wait(60) == 0
            process.stdout.close()

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture
def brokers(zookeeper: str, tmp_path: Path) -> Iterator[Brokers]:
    started = Brokers(zookeeper, tmp_path)
    try:
        yield started
    finally:
        started.stop()


async def groups_whole(stub: CoordinatorStub, *groups: str) -> None:
    """Until this coordinator sees both members of these groups in sync and connected, some time after they are ready."""

    async def are_whole() -> bool:
        found = (await rpc.call(stub.ListGroups, pb.ListGroupsRequest(), CALL_S)).groups
        members = [member for one in found if one.group in groups for member in one.members]
        return len(members) == 2 * len(groups) and all(
            member.is_registered and member.is_in_sync and member.is_peer_connected for member in members
        )

    await until(are_whole, "the groups are whole")


def stays(_: str) -> None: ...


def new_document(name: str, queue_id: QueueId) -> ChainDocument:
    return chain.created(
        cluster=CLUSTER, queue_id=queue_id, name=name, settings=QueueSettings(), groups=("g1",), now_ms=1
    )


def test_chains_change_by_compare_and_set_only(zookeeper: str) -> None:
    async def scenario() -> None:
        async with session(zookeeper) as one, session(zookeeper) as other:
            store, rival = Store(one, CLUSTER), Store(other, CLUSTER)
            await store.start()
            queue_id = await store.new_queue_id()
            await store.create_queue(new_document("orders", queue_id))
            document, version = await rival.read_chain(queue_id)
            assert document == new_document("orders", queue_id)
            assert await rival.write_chain(chain.with_sender(document, "theirs"), version) == version + 1
            assert await store.write_chain(chain.with_sender(document, "ours"), version) is None
            assert (await store.read_chain(queue_id))[0].sender_node == "theirs"

    asyncio.run(scenario())


def test_a_path_behind_zookeeper_s_address_has_to_be_there(zookeeper: str) -> None:
    async def scenario() -> None:
        async with session(f"{zookeeper}/not/there") as own:
            with pytest.raises(Unreachable, match=r"no such node as .*/not/there names"):
                await Store(own, CLUSTER).start()

    asyncio.run(scenario())


def test_a_queue_that_was_cleared_away_while_it_was_made_gets_no_name(
    zookeeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever makes it stands still between chain and name, for longer than the elected coordinator waits for the name."""

    async def scenario() -> None:
        async with session(zookeeper) as own, session(zookeeper) as other:
            store, elected = Store(own, CLUSTER), Store(other, CLUSTER)
            await store.start()
            queue_id = await store.new_queue_id()
            create = own.create

            async def late(path: str, *arguments: Any, **named: Any) -> str:
                if path == store.paths.name("orders"):
                    await elected.clear_queue(queue_id)
                return await create(path, *arguments, **named)

            monkeypatch.setattr(own, "create", late)
            with pytest.raises(Waiting):
                await store.create_queue(new_document("orders", queue_id))
            with pytest.raises(UnknownQueue):
                await store.queue_id("orders")

    asyncio.run(scenario())


def test_what_is_left_of_queues_without_a_chain_is_swept_away(zookeeper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The making of one was cut off, and to another a sender comes back that was away when it was cleared away."""
    monkeypatch.setattr(core_background, "ORPHAN_AFTER_MS", -1)

    async def nothing(**_: float) -> None:
        pass

    async def scenario() -> None:
        async with session(zookeeper) as own, session(zookeeper) as other:
            store = Store(own, CLUSTER)
            await store.start()
            paths, cut_off, gone = store.paths, QueueId(7), QueueId(8)
            await other.ensure(paths.seals(cut_off))
            await other.ensure(paths.readers(cut_off, SubscriptionId(1)))
            fakes = SimpleNamespace(forget_gone=nothing, reaches_nobody=nothing, give_way=nothing)
            work = background.BackgroundWork(
                store, *cast("tuple[Any, Any, Any]", (fakes, fakes, None)), lambda: True, stays
            )
            async with elected(zookeeper, paths.senders(gone)) as node:
                running = [asyncio.create_task(store.run()), asyncio.create_task(work.run())]

                async def is_swept() -> bool:
                    return not await other.exists(paths.queue(cut_off))

                await until(is_swept, "what is left of it is gone")
                assert not await store.sweep_queue(gone)
                assert await other.children(paths.senders(gone)) == [node]
            await until(lambda: not store.bare, "nothing is left")
            assert not await other.exists(paths.queue(gone))
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            used = await store.new_queue_id()
            await store.create_queue(new_document("orders", used))
            assert not await store.sweep_queue(used)
            assert await other.exists(paths.senders(used))

    asyncio.run(scenario())


def test_what_members_wrote_beside_the_chain_goes_with_its_links(zookeeper: str) -> None:
    """Where no coordinator was in time at a switch; a queue that lives for years has many of them."""

    async def nothing(**_: float) -> None:
        pass

    async def scenario() -> None:
        async with started_store(zookeeper) as (own, store):
            world = World()
            send_call(world).finish()
            for epoch in (Epoch(1), Epoch(2)):
                world.append(epoch, 2)
                send_call(world, token=1, failed_epoch=epoch).finish()
            document = replace(world.document, queue_id=await store.new_queue_id(), links=world.document.links[:2])
            await store.create_queue(document)
            seals, newest = store.paths.seals(document.queue_id), f"{document.next_epoch}-a"
            for name in ("1-a", "1-b", "2-b", newest):
                await own.create(f"{seals}/{name}")
            fakes = SimpleNamespace(forget_gone=nothing, reaches_nobody=nothing, give_way=nothing)
            work = background.BackgroundWork(
                store, *cast("tuple[Any, Any, Any]", (fakes, fakes, None)), lambda: True, stays
            )
            running = [asyncio.create_task(store.run()), asyncio.create_task(work.run())]

            async def are_swept() -> bool:
                return await own.children(seals) == [newest]

            await until(are_swept, "what was told of links that are gone is gone")
            assert (await store.read_chain(document.queue_id))[0].links == ()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    asyncio.run(scenario())


def test_whoever_makes_a_queue_is_told_where_its_nodes_were_swept_away_meanwhile(
    zookeeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with session(zookeeper) as own, session(zookeeper) as other:
            store, next_one = Store(own, CLUSTER), Store(other, CLUSTER)
            await store.start()
            queue_id = await store.new_queue_id()
            create = own.create

            async def late(path: str, *arguments: Any, **named: Any) -> str:
                if path == store.paths.chain(queue_id):
                    assert await next_one.sweep_queue(queue_id)
                return await create(path, *arguments, **named)

            monkeypatch.setattr(own, "create", late)
            await refused(store.create_queue(new_document("orders", queue_id)), Waiting)
            await refused(store.queue_id("orders"), UnknownQueue)
            assert not await store.recover_queue(new_document("orders", queue_id), None)

    asyncio.run(scenario())


def test_a_queue_that_is_deleted_while_it_is_recovered_is_unknown(zookeeper: str) -> None:
    """Raising the version takes seconds, and somebody thinks better of it."""

    async def scenario() -> None:
        async with started_store(zookeeper) as (_, store):
            document = new_document("orders", await store.new_queue_id())
            assert await store.recover_queue(document, None)
            raising = asyncio.ensure_future(store.raise_version(document.queue_id, ChainVersion(100_000_000)))
            await store.clear_queue(document.queue_id)
            with pytest.raises(UnknownQueue, match="was deleted"):
                await raising

    asyncio.run(scenario())


def test_a_version_is_raised_by_few_requests_and_nobody_sees_what_is_between(
    zookeeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One write each took half an hour at the version of two years, and a call that gave up after two minutes did so again and again."""

    async def scenario() -> None:
        async with started_store(zookeeper) as (own, store), session(zookeeper) as other:
            document = new_document("orders", await store.new_queue_id())
            assert await store.recover_queue(document, None)
            path, data = store.paths.chain(document.queue_id), chain_json.encode(document)
            ask, asked = own._ask, []

            async def counted(what: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
                asked.append(what)
                return await ask(what, *arguments, **named)

            monkeypatch.setattr(own, "_ask", counted)
            raising = asyncio.create_task(store.raise_version(document.queue_id, ChainVersion(20_050)))
            seen = {data}
            while not raising.done():
                seen.add((await other.get(path))[0])
            await raising
            assert seen == {data}
            assert await own.get(path) == (data, 20_050)
            assert len(asked) <= 2 + 20_050 / 100 + 2
            # Beside what a node of ZooKeeper just takes a request holds fewer.
            long = b"x" * chain_json.MAX_BYTES
            version = await own.set(path, long)
            await store.raise_version(document.queue_id, ChainVersion(version + 250))
            assert await own.get(path) == (long, version + 250)

    asyncio.run(scenario())


def test_whoever_raises_a_version_writes_over_nobody(zookeeper: str) -> None:
    """Two recover a queue at once, and somebody is elected meanwhile by the chain that they have made."""

    async def scenario() -> None:
        async with started_store(zookeeper) as (own, store), started_store(zookeeper) as (_, other):
            document = new_document("orders", await store.new_queue_id())
            assert await store.recover_queue(document, None)
            rewrite, elected, has_elected = own.rewrite, chain.with_sender(document, "n1"), asyncio.Event()

            async def late(path: str, data: bytes, version: int, to: int) -> int:
                """Whoever was elected since it was read."""
                own.rewrite = rewrite
                written = await other.write_chain(elected, ChainVersion(version))
                assert written == version + 1
                has_elected.set()
                return await rewrite(path, data, version, to)

            async def raise_beside() -> None:
                await has_elected.wait()
                await other.raise_version(document.queue_id, ChainVersion(2_000))

            own.rewrite = late
            await asyncio.gather(store.raise_version(document.queue_id, ChainVersion(2_000)), raise_beside())
            assert await store.read_chain(document.queue_id) == (elected, 2_000)

    asyncio.run(scenario())


def test_a_queue_is_recovered_with_its_name_or_not_at_all(zookeeper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another one had it the chain was written all the same; where the chain was another one's, the name was."""

    async def scenario() -> None:
        async with started_store(zookeeper) as (own, store):
            paths, lost = store.paths, new_document("orders", await store.new_queue_id())
            other = new_document("orders", await store.new_queue_id())
            create = own.create

            async def late(path: str, *arguments: Any, **named: Any) -> str:
                monkeypatch.undo()
                await store.create_queue(other)
                return await create(path, *arguments, **named)

            monkeypatch.setattr(own, "create", late)  # a start script runs at this very moment
            assert not await store.recover_queue(lost, None)
            assert not await store.recover_queue(lost, None)
            assert await store.queue_id("orders") == other.queue_id
            assert not await own.exists(paths.chain(lost.queue_id))
            letters = replace(other, name="letters")
            assert not await store.recover_queue(letters, None)
            assert not await own.exists(paths.name("letters"))

            await store.free_name("orders", other.queue_id)
            assert await store.recover_queue(lost, None)
            await store.free_name("orders", lost.queue_id)
            assert await store.recover_queue(lost, ChainVersion(0))
            assert await store.queue_id("orders") == lost.queue_id
            await own.delete(paths.chain(lost.queue_id))
            assert await store.recover_queue(
                lost, None
            )  # the name is there: it was cut off behind that, by an earlier version

    asyncio.run(scenario())


def test_where_readers_of_a_deleted_subscription_stood_for_election_goes_with_it(zookeeper: str) -> None:
    async def scenario() -> None:
        async with started_store(zookeeper) as (own, store):
            document, readers = new_document("orders", await store.new_queue_id()), store.paths.readers
            for name in ("s", "t", "u"):
                position = subscriptions.located(document, "earliest", None)
                document = subscriptions.created(document, name, position, 0)
            await store.create_queue(document)
            one, other, third = (
                readers(document.queue_id, subscription.subscription_id) for subscription in document.subscriptions
            )
            for path in (one, other, third):
                await own.ensure(path)
            operations = Operations(store, *[cast(Any, None)] * 2)
            request = pb.SubscriptionRequest(queue="orders", subscription="s")
            async with elected(zookeeper, one):
                await operations.delete_subscription(request)
                assert await own.exists(one)  # whoever still stands there is told that it is gone
            request.subscription = "t"
            await operations.delete_subscription(request)
            assert [await own.exists(path) for path in (one, other, third)] == [False, False, True]

    asyncio.run(scenario())


def test_a_queue_that_is_made_again_by_the_same_call_is_there(zookeeper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZooKeeper's answer to the last write is lost, or the coordinator dies behind it: its caller asks the next one."""

    async def scenario() -> None:
        async with session(zookeeper) as own, session(zookeeper) as other:
            store, next_one = Store(own, CLUSTER), Store(other, CLUSTER)
            await store.start()
            create = own.create

            async def unheard(path: str, *arguments: Any, **named: Any) -> str:
                made = await create(path, *arguments, **named)
                if path == store.paths.name("orders"):
                    raise Unreachable("ZooKeeper didn't answer: ConnectionLoss")
                return made

            monkeypatch.setattr(own, "create", unheard)
            operations, again = (Operations(one, *[cast(Any, None)] * 2) for one in (store, next_one))
            settings = pb.QueueSettings(flush_ms=7)
            request = pb.CreateQueueRequest(queue="orders", settings=settings, cause_id="create-1")
            await refused(operations.create_queue(request), Unreachable)
            made = await again.create_queue(request)
            assert (made.queue_id, made.settings.flush_ms) == (await next_one.queue_id("orders"), 7)
            for another in ("create-2", ""):
                request.cause_id = another
                await refused(again.create_queue(request), QueueExists)
            assert await own.children(store.paths.queues) == [str(made.queue_id)]

    asyncio.run(scenario())


def test_no_id_is_given_twice_whatever_clocks_and_zookeeper_do(zookeeper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ZooKeeper that lost everything counted from 1 again: disks had records of other queues under these ids."""

    async def scenario() -> None:
        async with started_store(zookeeper) as (own, store), session(zookeeper) as other:
            second = Store(other, CLUSTER)
            before = now_ms()
            given = await asyncio.gather(*(one.new_queue_id() for one in [store, second] * 10))
            assert len(set(given)) == len(given)
            assert min(given) >= before
            await own.delete(store.paths.ids)  # with all that was counted
            assert await second.new_queue_id() > max(given)
            monkeypatch.setattr(coordinator_store, "now_ms", lambda: 5)
            last = await store.new_queue_id()
            await own.delete(store.paths.ids)
            assert await store.new_queue_id() == 5
            store.chains[last] = cast("SeenChain", None)
            store.registry = Registry(outdated={QueueId(last + 7): "it was further"})
            assert await store.new_queue_id() == last + 8
            await store.new_queue_id(QueueId(last + 100))
            assert await second.new_queue_id() > last + 100

    asyncio.run(scenario())


def test_a_queue_is_made_under_no_id_at_which_somebody_still_stands_for_election(
    zookeeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """His queue was lost with ZooKeeper; its records are on disks under this id."""

    async def scenario() -> None:
        async with started_store(zookeeper) as (_, store):
            monkeypatch.setattr(coordinator_store, "now_ms", lambda: 1)
            async with elected(zookeeper, store.paths.senders(QueueId(1))):
                operations = Operations(store, *[cast("Any", None)] * 2)
                assert (await operations.create_queue(pb.CreateQueueRequest(queue="orders"))).queue_id == 2

    asyncio.run(scenario())


def test_ids_are_never_used_again_and_names_are(zookeeper: str) -> None:
    async def scenario() -> None:
        async with started_store(zookeeper) as (own, store):
            first = await store.new_queue_id()
            await store.create_queue(new_document("orders", first))
            taken = await store.new_queue_id()
            with pytest.raises(QueueExists):
                await store.create_queue(new_document("orders", taken))
            assert not await own.exists(store.paths.queue(taken))
            await store.free_name("orders", taken)  # not its own: changes nothing
            assert await store.queue_id("orders") == first
            await store.free_name("orders", first)
            await store.clear_queue(first)
            second = await store.new_queue_id()
            await store.create_queue(new_document("orders", second))
            assert await store.queue_id("orders") == second
            assert len({first, taken, second}) == 3
            with pytest.raises(UnknownQueue):
                await store.read_chain(first)

    asyncio.run(scenario())


def test_who_stands_still_while_it_frees_a_name_doesn_t_take_it_from_the_queue_that_has_it_then(
    zookeeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new queue's node has the version of the old one's: it was left without a name, and, not used yet, cleared away."""

    async def scenario() -> None:
        async with started_store(zookeeper) as (own, slow), session(zookeeper) as other:
            store, delete = Store(other, CLUSTER), own.delete
            first, second = await store.new_queue_id(), await store.new_queue_id()
            await store.create_queue(new_document("orders", first))
            await store.create_queue(new_document("carts", await store.new_queue_id()))

            async def late(*arguments: Any) -> None:
                monkeypatch.undo()
                await store.free_name("orders", first)  # the operator asks the next coordinator
                await store.create_queue(new_document("orders", second))
                await delete(*arguments)

            monkeypatch.setattr(own, "delete", late)
            await slow.free_name("orders", first)
            assert await store.queue_id("orders") == second
            # Who is only disturbed does it all the same.
            there = await store.queue_id("carts")
            await asyncio.gather(
                *(
                    one.free_name(name, queue)
                    for one in (slow, store)
                    for name, queue in [("orders", second), ("carts", there)]
                )
            )
            for name in ("orders", "carts"):
                with pytest.raises(UnknownQueue):
                    await store.queue_id(name)

    asyncio.run(scenario())


def test_what_is_remembered_follows_what_changes(zookeeper: str) -> None:
    async def scenario() -> None:
        async with session(zookeeper) as own, session(zookeeper) as member:
            store = Store(own, CLUSTER)
            await store.start()
            run = asyncio.create_task(store.run())
            changes: list[int] = []
            stop = store.on_change(lambda: changes.append(1))
            paths = Paths(CLUSTER)
            await member.create(paths.group("g1"), b'{"is_draining": false}', parents=True)
            await member.ensure(paths.members("g1"))
            registration = Registration(Incarnation("d", 1), "h:1", None, is_in_sync=True, is_accepting=True)
            await member.create(paths.member("g1", "a"), registration.encode(), ephemeral=True)
            await until(lambda: "a" in store.registry.group("g1").members, "the member is seen")
            assert store.registry.group("g1").members["a"].incarnation == Incarnation("d", 1)
            await store.set_draining("g1", is_draining=True)
            await until(lambda: store.registry.group("g1").is_draining, "draining is seen")
            await member.delete(paths.member("g1", "a"))
            await until(lambda: not store.registry.group("g1").members, "its end is seen")
            queue_id = await store.new_queue_id()
            await store.create_queue(new_document("orders", queue_id))
            await until(lambda: queue_id in store.chains and store.names.get("orders") == queue_id, "the queue is seen")
            await store.write_chain(
                chain.with_sender(store.chains[queue_id].document, "n"), store.chains[queue_id].version
            )
            await until(lambda: store.chains[queue_id].version == 1, "the change is seen")
            await store.clear_queue(queue_id)
            await until(lambda: queue_id not in store.chains, "the queue's end is seen")
            assert changes
            stop()
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)

    asyncio.run(scenario())


def test_a_chain_is_quiet_though_somebody_else_is_elected_all_the_time(
    zookeeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that come and go each second would else keep the queue from being rotated, and its links from being let go, for good."""

    async def scenario() -> None:
        async with started_store(zookeeper) as (_, store):
            queue_id = await store.new_queue_id()
            await store.create_queue(replace(new_document("quiet", queue_id), send_list=("g1",)))
            clock_ms = 1000
            monkeypatch.setattr("seriatim.coordinator.remembered.now_ms", lambda: clock_ms)

            async def change(to: Callable[[ChainDocument], ChainDocument]) -> int:
                nonlocal clock_ms
                clock_ms += 900
                document, version = await store.read_chain(queue_id)
                assert await store.write_chain(to(document), version) == version + 1
                assert store.chains[queue_id].version == version + 1
                return store.chains[queue_id].since_ms

            run = asyncio.create_task(store.run())
            await until(lambda: queue_id in store.chains, "the queue is seen")
            assert store.chains[queue_id].since_ms == 1000
            for number in range(3):
                assert await change(lambda before, number=number: chain.with_sender(before, f"n{number}")) == 1000
            assert await change(lambda before: chain.without_group(before, "g1")) == clock_ms
            assert await change(lambda before: chain.with_sender(before, "n")) == clock_ms - 900
            assert await change(chain.deleted) == clock_ms
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)

    asyncio.run(scenario())


def test_a_new_session_believes_zookeeper_where_that_was_set_back(zookeeper: str) -> None:
    """What this coordinator remembers would be written over what others have made of the older chain since."""

    async def scenario() -> None:
        async with started_store(zookeeper) as (_, store):
            run = asyncio.create_task(store.run())
            queue_id = await store.new_queue_id()
            old = new_document("orders", queue_id)
            await store.create_queue(old)
            await until(lambda: queue_id in store.chains, "the queue is seen")
            for version in range(3):
                assert await store.write_chain(chain.with_sender(old, f"n{version}"), ChainVersion(version))
            path = store.paths.chain(queue_id)
            client = KazooClient(zookeeper)
            await asyncio.to_thread(client.start)
            change = client.transaction()
            change.delete(path)
            change.create(path, chain_json.encode(old))
            await asyncio.to_thread(change.commit)
            await asyncio.to_thread(client.stop)
            client.close()
            await store.catch_up()  # no answer of before is on its way any more, as behind a connection that broke
            store._session_id = -1
            store._session_changed(SessionState.CONNECTED)
            await until(lambda: store.chains[queue_id].version == 0, "the chain as it is now is seen")
            assert store.chains[queue_id].document == old
            with pytest.raises(ChainSetBack, match="has seen version 3 of the chain, which is at 0"):
                await store.write_chain(chain.with_sender(old, "n"), ChainVersion(0))
            await store.raise_version(queue_id, ChainVersion(4))  # as where it is recovered
            await until(lambda: store.chains[queue_id].version == 4, "the chain that is recovered is seen")
            assert await store.write_chain(chain.with_sender(old, "n"), ChainVersion(4))
            assert store.chains[queue_id].version == 5
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)

    asyncio.run(scenario())


def test_a_coordinator_goes_on_where_all_of_the_cluster_was_deleted_under_it(zookeeper: str) -> None:
    """What lies on disks can be recovered then; who asked for that, or for a new queue, was answered with a traceback, for good."""

    async def scenario() -> None:
        async with started_store(zookeeper) as (own, store):
            run = asyncio.create_task(store.run())
            queue_id = await store.new_queue_id()
            await store.create_queue(new_document("orders", queue_id))
            await until(lambda: queue_id in store.chains, "the queue is seen")
            client = KazooClient(zookeeper)
            await asyncio.to_thread(client.start)
            with contextlib.suppress(NotEmptyError):  # what was deleted first is made again meanwhile
                await asyncio.to_thread(client.delete, "/seriatim", recursive=True)
            await asyncio.to_thread(client.stop)
            client.close()
            await until(lambda: not store.chains, "the queue isn't seen any more")
            await until(lambda: own.exists(store.paths.ids), "its nodes are made again")
            again = await store.new_queue_id()
            await store.create_queue(new_document("orders", again))
            await until(lambda: store.names == {"orders": again}, "the new one is seen")
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)

    asyncio.run(scenario())


def test_who_asks_while_all_of_the_cluster_is_gone_may_ask_again(zookeeper: str) -> None:
    """Readers ended by that as by a defect of ours."""

    async def scenario() -> None:
        async with started_store(zookeeper) as (own, store):
            for path in (
                store.paths.coordinators,
                store.paths.coordinator_election,
                store.paths.groups,
                store.paths.queues,
            ):
                await own.delete(path)
            for ask in (store.coordinators, store.elected_coordinator, store.look_up_registry, store.read_chains):
                with pytest.raises(Unreachable, match="it was emptied"):
                    await ask()

    asyncio.run(scenario())


def test_queues_are_made_also_where_what_counts_their_ids_was_deleted(zookeeper: str) -> None:
    """Each ended with a traceback until a coordinator was started again, and then once for each id that a queue has."""

    async def scenario() -> None:
        async with session(zookeeper) as own, coordinator(zookeeper) as stub:
            made = [await stub.CreateQueue(pb.CreateQueueRequest(queue=name)) for name in ("orders", "bills")]

            async def are_known() -> bool:
                return len((await stub.ListQueues(pb.ListQueuesRequest())).queues) == len(made)

            await until(are_known, "they are seen")
            await own.delete(Paths(CLUSTER).ids)
            made.append(await stub.CreateQueue(pb.CreateQueueRequest(queue="letters")))
            first = made[0].queue_id
            assert first < made[1].queue_id < made[2].queue_id

    asyncio.run(scenario())


def test_a_member_can_register_whatever_it_has_to_say(zookeeper: str) -> None:
    """Where ZooKeeper lost thousands of queues their names are longer than a node: nobody who keeps their chains could come to it, or be asked."""

    async def scenario() -> None:
        async with session(zookeeper) as own:
            names = ", ".join(f"{number:0128}" for number in range(10_000))
            problem = f"it keeps a chain of which ZooKeeper knows nothing: queue {names}"
            said = Registration(Incarnation("d", 1), "h:1", None, False, True, problem, set_back=(QueueId(1),))
            await own.create("/member", said.encode(), ephemeral=True)
            data, _ = await own.get("/member")
            read = Registration.decode(data)
            assert problem.startswith(read.problem.removesuffix("…"))
            assert names[:50_000] in read.problem
            assert replace(read, problem=problem) == said

    asyncio.run(scenario())


def test_who_asks_for_a_queue_that_zookeeper_may_have_lost_is_told_so(zookeeper: str) -> None:
    """There was no such queue, it said, and how to make one: which would be in the way of the one that was to be recovered."""

    async def scenario() -> None:
        async with session(zookeeper) as member, started_store(zookeeper) as (_, store):
            with pytest.raises(UnknownQueue, match=r"there is no queue orders \("):
                await store.queue_id("orders")
            said = Registration(Incarnation("d", 1), "h:1", set_back=(QueueId(1),))
            await member.create(store.paths.group("g1"), b'{"is_draining": false}', parents=True)
            await member.ensure(store.paths.members("g1"))
            await member.create(store.paths.member("g1", "a"), said.encode(), ephemeral=True)
            await store.look_up_registry()
            with pytest.raises(UnknownQueue, match="ZooKeeper has lost some that members know"):
                await store.queue_id("orders")

    asyncio.run(scenario())


def test_nothing_is_done_by_a_chain_that_was_set_back_within_a_session(zookeeper: str) -> None:
    """An ensemble lets its clients into the sessions that the older copy of its data has, too. Only deleting the queue harms nothing."""

    async def scenario() -> None:
        async with started_store(zookeeper) as (own, store):
            queue_id = await store.new_queue_id()
            old = new_document("orders", queue_id)
            await store.create_queue(old)
            for version in range(3):
                assert await store.write_chain(chain.with_sender(old, f"n{version}"), ChainVersion(version))
            path = store.paths.chain(queue_id)
            await own.delete(path)
            await own.create(path, chain_json.encode(old))
            document, version = await store.read_chain(queue_id)
            assert version == 0
            what = "this coordinator has seen version 3 of the chain, which is at 0"
            assert store.registry.standstill(queue_id) == {"coordinator": what}
            with pytest.raises(ChainSetBack, match=what):
                await store.write_chain(chain.with_sender(document, "n"), version)
            await store.raise_version(queue_id, ChainVersion(2))
            await store.read_chain(queue_id)
            assert "which is at 2" in store.registry.standstill(queue_id)["coordinator"]
            await store.raise_version(queue_id, ChainVersion(3))
            document, version = await store.read_chain(queue_id)
            assert store.registry.standstill(queue_id) == {}
            assert await store.write_chain(chain.with_sender(document, "n"), version)

            await own.delete(path)
            await own.create(path, chain_json.encode(old))
            document, version = await store.read_chain(queue_id)
            assert await store.write_chain(chain.deleted(document), version)

    asyncio.run(scenario())


def test_who_is_cancelled_while_it_connects_leaves_no_session_behind(
    zookeeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        given_up = ZooKeeperSession(zookeeper, SESSION_MS / 1000)
        client, may_start = given_up._client, threading.Event()
        start = client.start_async

        def started_late() -> threading.Event:
            may_start.wait()
            return start()

        monkeypatch.setattr(client, "start_async", started_late)
        starting = asyncio.create_task(given_up.start())
        await asyncio.sleep(0.1)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        ended = asyncio.create_task(asyncio.get_running_loop().shutdown_default_executor())
        may_start.set()
        await ended
        assert not client.connected

    asyncio.run(scenario())


def test_who_is_cancelled_in_the_midst_of_its_start_ends_it_without_a_trace(
    zookeeper: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        given_up = ZooKeeperSession(zookeeper, SESSION_MS / 1000)
        client, is_amid, is_stopping = given_up._client, threading.Event(), threading.Event()
        start, stop = client.handler.start, client.stop

        def started_slowly() -> None:
            is_amid.set()
            is_stopping.wait(0.5)
            start()

        def stopped() -> None:
            is_stopping.set()
            stop()

        monkeypatch.setattr(client.handler, "start", started_slowly)
        monkeypatch.setattr(client, "stop", stopped)
        starting = asyncio.create_task(given_up.start())
        await asyncio.to_thread(is_amid.wait)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await asyncio.get_running_loop().shutdown_default_executor()
        assert not client.connected

    asyncio.run(scenario())
    gc.collect()  # a future whose error nobody has looked at says so then
    assert "never retrieved" not in caplog.text


def test_who_stands_by_stands_again_where_the_election_was_cleared_away(zookeeper: str) -> None:
    """Its queue was deleted, while it couldn't look, say. Elected, it is told so; it stood by for ever, for a queue that is gone."""

    async def scenario() -> None:
        async with session(zookeeper) as own, session(zookeeper) as other:
            path = Paths(CLUSTER).senders(QueueId(7))
            await other.ensure(path)
            first = await other.create(f"{path}/first-", ephemeral=True, sequential=True)
            election = Election(own, path, "second", lambda _: None)
            run = asyncio.create_task(election.run())
            await until(lambda: election.standing is Standing.WAITING, "standing by")
            client = KazooClient(zookeeper)
            await asyncio.to_thread(client.start)
            change = client.transaction()
            for node in (first, f"{path}/{election.node}", path):
                change.delete(node)
            assert await asyncio.to_thread(change.commit) == [True] * 3
            await asyncio.to_thread(client.stop)
            client.close()
            await until(lambda: election.standing is Standing.ELECTED, "elected")
            assert await other.children(path) == [election.node]
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)

    asyncio.run(scenario())


def noting_reads(session: ZooKeeperSession) -> list[str]:
    """The paths of nodes that are read from now on."""
    read: list[str] = []
    get = session.get

    async def noted(path: str, watch: Callable[[], None] | None = None) -> tuple[bytes, int]:
        read.append(path)
        return await get(path, watch)

    session.get = noted  # type: ignore[method-assign]
    return read


def test_a_change_of_one_registration_reads_that_one_and_watches_each_node_once(zookeeper: str) -> None:
    async def scenario() -> None:
        async with session(zookeeper) as own, session(zookeeper) as members:
            store = Store(own, CLUSTER)
            await store.start()
            paths = store.paths
            for group in ("g1", "g2"):
                await members.ensure(paths.members(group))
            registration = Registration(Incarnation("disk", 1), "here:1", None, is_in_sync=False, is_accepting=True)
            await members.create(paths.member("g1", "a"), registration.encode(), ephemeral=True)
            run = asyncio.create_task(store.run())
            store.changed(Listing.GROUPS)
            await until(lambda: "a" in store.registry.group("g1").members, "the member is seen")
            # Once more: after this, whatever was still to be read again because of the start has been.
            registration = replace(registration, address="here:0")
            await members.set(paths.member("g1", "a"), registration.encode())
            await until(lambda: store.registry.group("g1").members["a"].address == "here:0", "the change is seen")
            read = noting_reads(own)
            told: list[Stale] = []
            changed = store.changed
            store.changed = lambda what: (told.append(what), changed(what))[1]  # type: ignore[method-assign]
            for number in range(5):
                one = replace(registration, address=f"here:{number + 2}")
                await members.set(paths.member("g1", "a"), one.encode())
                await until(
                    lambda one=one: store.registry.group("g1").members["a"].address == one.address, "it is seen"
                )
            assert read == [paths.member("g1", "a")] * 5
            await members.delete(paths.member("g1", "a"))
            await until(lambda: not store.registry.group("g1").members, "that it is gone is seen")
            await members.create(paths.member("g1", "a"), registration.encode(), ephemeral=True)
            await until(lambda: "a" in store.registry.group("g1").members, "that it is back is seen")
            await members.set(paths.member("g1", "a"), replace(registration, is_in_sync=True).encode())
            await until(lambda: store.registry.group("g1").members["a"].is_in_sync, "what it says then is seen")
            told.clear()
            await members.set(paths.group("g1"), b'{"is_draining": true}')
            await until(lambda: store.registry.group("g1").is_draining, "it is seen")
            assert told == [GroupNodes("g1")]
            assert (await store.look_up_registry(["g2"])).group("g1").is_draining
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)

    asyncio.run(scenario())


def test_what_a_member_that_stands_aside_says_is_in_the_node_of_its_lease(zookeeper: str) -> None:
    async def scenario() -> None:
        async with session(zookeeper) as own, session(zookeeper) as members:
            store, name = Store(own, CLUSTER), MemberName("g1", "a")
            assert await store.standing_aside(name) == ""
            await members.ensure(store.paths.leases("g1"))
            await members.create(store.paths.lease("g1", "a"), b"", ephemeral=True)
            assert await store.standing_aside(name) == ""
            await members.set(store.paths.lease("g1", "a"), STANDS_ASIDE.encode())
            assert await store.standing_aside(name) == STANDS_ASIDE

    asyncio.run(scenario())


def test_a_planned_switch_looks_up_the_group_that_it_leads_to_and_no_other(zookeeper: str) -> None:
    async def scenario() -> None:
        async with session(zookeeper) as own, session(zookeeper) as members:
            store = Store(own, CLUSTER)
            await store.start()
            paths, groups = store.paths, ("g1", "g2", "g3")
            one = Incarnation("disk", 1)  # of all of them: so each is connected to the other of its group
            registration = Registration(one, "here:1", one, is_in_sync=True, is_accepting=True)
            for group in groups:
                await members.ensure(paths.members(group))
                for place in "ab":
                    await members.create(paths.member(group, place), registration.encode(), ephemeral=True)
            await store.look_up_registry()
            document = chain.created(
                cluster=CLUSTER, queue_id=QueueId(1), name="q", settings=QueueSettings(), groups=groups, now_ms=0
            )
            document = chain.next_link(document, store.registry, avoid={}, now_ms=0)
            read = noting_reads(own)
            operations = Operations(store, *[cast(Any, None)] * 2)
            assert await operations._next_group(document) == "g2"
            assert {path.split("/")[4] for path in read} == {"g2"}
            # What is remembered is old: nobody follows the watches here.
            await members.delete(paths.member("g2", "b"))
            assert await operations._next_group(document) == "g3"
            await members.delete(paths.member("g3", "a"))
            assert await operations._next_group(document) == ""

    asyncio.run(scenario())


def test_a_name_is_read_once_and_again_when_it_is_another_queues(zookeeper: str) -> None:
    """With a thousand queues, each new one made every coordinator read a thousand names."""

    async def scenario() -> None:
        async with session(zookeeper) as own, session(zookeeper) as people:
            store = Store(own, CLUSTER)
            await store.start()
            read = noting_reads(own)
            paths, wanted = store.paths, {f"named-{number}": QueueId(900 + number) for number in range(20)}
            run = asyncio.create_task(store.run())
            for name, queue_id in wanted.items():
                await people.create(paths.name(name), str(queue_id).encode())
                await until(lambda name=name, queue_id=queue_id: store.names.get(name) == queue_id, "the name is seen")
            assert [read.count(paths.name(name)) for name in wanted] == [1] * 20
            await people.delete(paths.name("named-3"))
            await people.create(paths.name("named-3"), b"999")
            await until(lambda: store.names.get("named-3") == 999, "that it is another one's is seen")
            await people.delete(paths.name("named-4"))
            await until(lambda: "named-4" not in store.names, "that it is free is seen")
            assert [read.count(paths.name(name)) for name in wanted if name not in ("named-3", "named-4")] == [1] * 18
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)

    asyncio.run(scenario())


async def refused(call: Awaitable[object], error: type[SeriatimError]) -> None:
    with pytest.raises(error):
        await call


def test_bad_requests_get_typed_errors(zookeeper: str) -> None:
    async def scenario() -> None:
        async with coordinator(zookeeper) as stub:
            ask = rpc.call
            await refused(ask(stub.AcquireSend, pb.AcquireSendRequest(queue="none"), CALL_S), UnknownQueue)
            await refused(ask(stub.DescribeQueue, pb.QueueRequest(queue="none"), CALL_S), UnknownQueue)
            await refused(ask(stub.CreateQueue, pb.CreateQueueRequest(queue="a/b"), CALL_S), InvalidArgument)
            wrong = pb.QueueSettings(durability="often")
            await refused(
                ask(stub.CreateQueue, pb.CreateQueueRequest(queue="q", settings=wrong), CALL_S), InvalidArgument
            )
            wrong = pb.QueueSettings(groups=["g9"])
            await refused(
                ask(stub.CreateQueue, pb.CreateQueueRequest(queue="q", settings=wrong), CALL_S), InvalidArgument
            )
            await refused(ask(stub.DrainGroup, pb.GroupRequest(group="g9"), CALL_S), UnknownGroup)
            await ask(stub.CreateQueue, pb.CreateQueueRequest(queue="q"), CALL_S)
            await refused(ask(stub.CreateQueue, pb.CreateQueueRequest(queue="q"), CALL_S), QueueExists)
            reading = pb.AcquireReadRequest(queue="q", subscription="none")
            await refused(ask(stub.AcquireRead, reading, CALL_S), UnknownSubscription)
            await refused(
                ask(stub.AcquireSend, pb.AcquireSendRequest(queue="q", election_node="n-1"), CALL_S), NotElected
            )
            other = pb.AcquireSendRequest(queue="q", queue_id=99, election_node="n-1")
            await refused(ask(stub.AcquireSend, other, CALL_S), UnknownQueue)

    asyncio.run(scenario())


def test_without_groups_sending_waits_and_says_why(zookeeper: str) -> None:
    async def scenario() -> None:
        async with coordinator(zookeeper) as stub:
            view = await rpc.call(stub.CreateQueue, pb.CreateQueueRequest(queue="q"), CALL_S)
            async with elected(zookeeper, Paths(CLUSTER).senders(QueueId(view.queue_id))) as node:
                request = pb.AcquireSendRequest(queue="q", election_node=node)
                reply = await rpc.call(stub.AcquireSend, request, CALL_S)
                assert reply.WhichOneof("kind") == "wait"
                assert reply.token == 1
                assert reply.wait.reasons
                request.token = reply.token
                again = await rpc.call(stub.AcquireSend, request, CALL_S)
                assert again.token == 1  # the same instance keeps its token
                request.token = 0
                anew = await rpc.call(stub.AcquireSend, request, CALL_S)
                assert anew.token == 2  # it was deposed meanwhile (H4)

    asyncio.run(scenario())


def test_a_chain_of_a_newer_version_ends_an_older_coordinator_in_a_line(zookeeper: str) -> None:
    """It ended with a traceback, as by a defect of its own."""

    async def scenario() -> None:
        process = CoordinatorProcess(CoordinatorSettings(zookeeper, CLUSTER, session_timeout_ms=SESSION_MS))
        await process.start()
        try:
            async with session(zookeeper) as own:
                data = chain_json.encode(new_document("newer", QueueId(999)))
                path = Paths(CLUSTER).chain(QueueId(999))
                await own.create(path, without_checksum(data).replace(b'"format":1', b'"format":2'), parents=True)
                with pytest.raises(IncompatibleVersion, match="start the version that wrote it") as ended:
                    await process.run()
                assert exits.exit_code(ended.value) == exits.WRONG_USE
                await own.delete(path)
        finally:
            await process.stop()

    asyncio.run(scenario())


def test_who_asks_an_older_coordinator_of_a_newer_chain_is_sent_to_the_next(zookeeper: str) -> None:
    """Between a newer coordinator's write and the older one's end: senders and readers ended by `incompatible-version`."""

    async def scenario() -> None:
        process = CoordinatorProcess(CoordinatorSettings(zookeeper, CLUSTER, session_timeout_ms=SESSION_MS))
        await process.start()  # and not run: it hasn't heard of it yet
        channel = rpc.channel(process.address)
        stub: Any = CoordinatorStub(channel)
        try:
            queue_id = (await rpc.call(stub.CreateQueue, pb.CreateQueueRequest(queue="orders"), CALL_S)).queue_id
            async with session(zookeeper) as own:
                path = Paths(CLUSTER).chain(QueueId(queue_id))
                data, _ = await own.get(path)
                await own.set(path, without_checksum(data).replace(b'"settings":{', b'"settings":{"later":1,'))
            sending = pb.AcquireSendRequest(queue="orders", election_node="n-1")
            reading = pb.AcquireReadRequest(queue="orders", subscription="s", election_node="n-1")
            drained = pb.DrainedReport(cluster=CLUSTER, queue_id=queue_id, subscription_id=1, generation=1, epoch=1)
            for method, request in (
                (stub.AcquireSend, sending),
                (stub.AcquireRead, reading),
                (stub.DescribeQueue, pb.QueueRequest(queue="orders")),
                (lambda one, timeout: stub.WatchQueue(one, timeout=timeout).read(), pb.QueueRequest(queue="orders")),
                (stub.ReportDrained, drained),
            ):
                with pytest.raises(Unreachable, match="too old"):
                    await rpc.call(method, request, CALL_S)
        finally:
            await channel.close(None)
            await process.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("junk", [b"", b"[]", b"{}", b"\xff", b"\x28\xb5\x2f\xfd"])
def test_a_node_that_is_no_chain_costs_its_queue_and_no_other(
    zookeeper: str, caplog: pytest.LogCaptureFixture, junk: bytes
) -> None:
    """Made or written by hand. All coordinators ended, and so did all brokers for a node that is no queue's."""

    async def scenario() -> None:
        async with session(zookeeper) as own, coordinator(zookeeper) as stub:
            paths = Paths(CLUSTER)
            await own.create(f"{paths.queues}/made-by-hand")
            queue_id = (await stub.CreateQueue(pb.CreateQueueRequest(queue="orders"), timeout=CALL_S)).queue_id
            whole, _ = await own.get(paths.chain(QueueId(queue_id)))
            await own.set(paths.chain(QueueId(queue_id)), junk)
            await until(lambda: "queue left out" in caplog.text, "it is said")
            await stub.CreateQueue(pb.CreateQueueRequest(queue="payments"), timeout=CALL_S)

            async def are_damaged(expected: dict[str, bool]) -> bool:
                there = (await stub.ListQueues(pb.ListQueuesRequest(), timeout=CALL_S)).queues
                return expected == {one.queue: "damage" in [wait.what for wait in one.waits] for one in there}

            one_of_two, neither = {"orders": True, "payments": False}, {"orders": False, "payments": False}
            await until(lambda: are_damaged(one_of_two), "the other queue is followed, and of this one it is told")
            chain_path = paths.chain(QueueId(queue_id))
            with pytest.raises(NoChainDocument, match=f"^{chain_path}: .*seriatim queue recover"):
                await rpc.call(stub.DescribeQueue, pb.QueueRequest(queue="orders"), CALL_S)
            await own.set(chain_path, whole)
            await until(lambda: are_damaged(neither), "it is read again")
            await own.set(chain_path, junk)
            await until(lambda: are_damaged(one_of_two), "it is damaged again")
            await own.delete(chain_path)
            await until(lambda: are_damaged({"payments": False}), "nothing is known of it")

    asyncio.run(scenario())


@pytest.mark.parametrize("junk", [b"", b"[]", b"{}", b"\xff", b'"1"x'])
def test_a_node_that_nobody_understands_costs_what_it_is_about_and_nothing_else(
    zookeeper: str, caplog: pytest.LogCaptureFixture, junk: bytes
) -> None:
    """Written by hand, or by a newer version. Each of these ended all coordinators, and kept them from starting again."""
    registration = Registration(Incarnation("d", 1), "127.0.0.1:1", None, is_in_sync=True, is_accepting=True)

    async def scenario() -> None:
        paths = Paths(CLUSTER)
        async with session(zookeeper) as own:
            for group in ("g1", "g2", "g3"):
                await own.create(paths.member(group, "a"), registration.encode(), parents=True)
            await own.set(paths.group("g1"), junk or b"junk")
            await own.create(paths.member("g3", "spare"), junk)
            await own.create(f"{paths.coordinator_election}/made-by-hand", junk, parents=True)
            await own.create(f"{paths.coordinators}/made-by-hand", junk, parents=True)
            await own.create(paths.name("orders"), junk, parents=True)
            async with coordinator(zookeeper) as stub:
                await own.set(paths.member("g2", "a"), junk)
                await until(lambda: "member left as it was" in caplog.text, "it is said")
                await stub.CreateQueue(pb.CreateQueueRequest(queue="payments"), timeout=CALL_S)

                async def is_done(what: str) -> bool:
                    described = await stub.DescribeCluster(pb.DescribeClusterRequest(), timeout=CALL_S)
                    there = (await stub.ListQueues(pb.ListQueuesRequest(), timeout=CALL_S)).queues
                    return [one.queue for one in there] == [what] and described.elected_coordinator != ""

                await until(lambda: is_done("payments"), "the other queue is followed, and somebody elected")
                groups = (await stub.ListGroups(pb.ListGroupsRequest(), timeout=CALL_S)).groups
                seen = {one.group: (one.is_draining, one.members[0].is_registered) for one in groups}
                assert seen == {"g1": (True, True), "g2": (False, True), "g3": (False, True)}
                with pytest.raises(SeriatimError, match="names/orders in ZooKeeper holds what can't be read"):
                    await rpc.call(stub.DescribeQueue, pb.QueueRequest(queue="orders"), CALL_S)
                await stub.ResumeGroup(pb.GroupRequest(group="g1"), timeout=CALL_S)
                groups = (await stub.ListGroups(pb.ListGroupsRequest(), timeout=CALL_S)).groups
                assert not groups[0].is_draining

    asyncio.run(scenario())


def test_nobody_is_absent_whose_registration_is_not_understood(zookeeper: str) -> None:
    """A link of a member that lives, and takes records, would be lost while it still is sent to (protocol.md 5.4)."""
    registration = Registration(Incarnation("d", 1), "127.0.0.1:1", None, is_in_sync=True, is_accepting=True)

    async def scenario() -> None:
        async with session(zookeeper) as own:
            store, paths = Store(own, CLUSTER), Paths(CLUSTER)
            await own.create(paths.member("g1", "a"), registration.encode(), parents=True)
            await own.ensure(paths.members("g2"))
            await store.start()
            await own.set(paths.member("g1", "a"), b"{}")
            with pytest.raises(NotUnderstood, match="g1/members/a in ZooKeeper holds"):
                await store.look_up_registry(["g1"])
            registry = await store.look_up_registry()
            assert registry.groups.keys() == {"g1", "g2"}
            assert registry.group("g1").members["a"].incarnation == Incarnation("d", 1)

    asyncio.run(scenario())


def test_what_somebody_else_put_among_a_queue_s_nodes_is_passed_over(zookeeper: str) -> None:
    """Of a queue with a node by hand where its senders stand no sender could be elected, and nothing of one was swept."""

    async def scenario() -> None:
        async with session(zookeeper) as own:
            store, paths, queue_id = Store(own, CLUSTER), Paths(CLUSTER), QueueId(5)
            await store.start()
            document = replace(new_document("orders", queue_id), next_subscription_id=SubscriptionId(9))
            await store.create_queue(document)
            await own.create(f"{paths.senders(queue_id)}/by-hand")
            async with elected(zookeeper, paths.senders(queue_id)) as node:
                assert await store.first_in_line(queue_id, None) == node
            await own.create(f"{paths.all_readers(queue_id)}/by-hand", parents=True)
            await own.create(paths.readers(queue_id, SubscriptionId(7)))
            await own.create(paths.seal(queue_id, Epoch(1), "a"), b"\xff")
            await own.create(f"{paths.seals(queue_id)}/by-hand")
            assert await store.kept_seals(queue_id, Epoch(1)) == {}
            await store.sweep_readers(document)
            await store.sweep_seals(replace(document, dropped=replace(document.dropped, epoch=Epoch(2))))
            assert await own.children(paths.all_readers(queue_id)) == ["by-hand"]
            assert await own.children(paths.seals(queue_id)) == ["by-hand"]

    asyncio.run(scenario())


def test_a_coordinator_whose_name_is_taken_says_so_once(zookeeper: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        settings = CoordinatorSettings(zookeeper, CLUSTER, name="one", session_timeout_ms=SESSION_MS)
        first, second = CoordinatorProcess(settings), CoordinatorProcess(settings)
        try:
            await first.start()
            await second.start()
            for _ in range(3):
                await second._registered()
        finally:
            await second.stop()
            await first.stop()

    asyncio.run(main())
    assert caplog.text.count("another session has this name") == 1


def test_a_coordinator_whose_node_was_deleted_registers_again(zookeeper: str) -> None:
    """Until its session ended, which may be never, brokers and clients that came had nobody to ask."""

    def deleted(*paths: str) -> None:
        """All in one: nothing is made in between."""
        client = KazooClient(zookeeper)
        client.start()
        transaction = client.transaction()
        for path in paths:
            transaction.delete(path)
        assert transaction.commit() == [True] * len(paths)
        client.stop()
        client.close()

    async def scenario() -> None:
        process = CoordinatorProcess(CoordinatorSettings(zookeeper, CLUSTER, name="one", session_timeout_ms=SESSION_MS))
        await process.start()
        serving = asyncio.create_task(process.run())
        folder = Paths(CLUSTER).coordinators
        node = f"{folder}/one"
        try:
            async with session(zookeeper) as own:
                for paths in ((node,), (node,), (node, folder)):
                    await asyncio.to_thread(deleted, *paths)
                    await until(lambda: own.exists(node), f"it is registered again, after {paths} were deleted")
        finally:
            serving.cancel()
            await asyncio.wait([serving])
            await process.stop()

    asyncio.run(scenario())


def test_a_coordinator_whose_registration_was_damaged_on_its_way_writes_it_again(
    zookeeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wasn't found by brokers and clients for as long as it lived."""

    async def scenario() -> None:
        process = CoordinatorProcess(CoordinatorSettings(zookeeper, CLUSTER, name="one", session_timeout_ms=SESSION_MS))
        create = process._session.create

        async def damaged(path: str, data: bytes = b"", **keys: Any) -> str:
            return await create(path, data.replace(b"127.0.0.1", b"127.0.0.3"), **keys)

        monkeypatch.setattr(process._session, "create", damaged)
        await process.start()
        serving = asyncio.create_task(process.run())
        try:
            async with session(zookeeper) as own:

                async def is_found() -> bool:
                    return bool(await read_coordinators(own, Paths(CLUSTER), ["one"]))

                await until(is_found, "what is registered can be read")
        finally:
            serving.cancel()
            await asyncio.wait([serving])
            await process.stop()

    asyncio.run(scenario())


def test_a_deleted_queue_goes_and_its_name_is_free_at_once(zookeeper: str) -> None:
    async def scenario() -> None:
        async with coordinator(zookeeper) as stub, session(zookeeper) as own:
            first = await rpc.call(stub.CreateQueue, pb.CreateQueueRequest(queue="q"), CALL_S)
            await rpc.call(stub.DeleteQueue, pb.QueueRequest(queue="q"), CALL_S)
            second = await rpc.call(stub.CreateQueue, pb.CreateQueueRequest(queue="q"), CALL_S)
            assert second.queue_id != first.queue_id
            gone = Paths(CLUSTER).queue(QueueId(first.queue_id))

            async def is_gone() -> bool:
                return not await own.exists(gone)

            await until(is_gone, "the nodes are gone")

            async def is_listed() -> bool:
                queues = (await rpc.call(stub.ListQueues, pb.ListQueuesRequest(), CALL_S)).queues
                return [one.queue_id for one in queues] == [second.queue_id]

            await until(is_listed, "only the new queue is listed")

    asyncio.run(scenario())


def test_more_queues_than_are_worked_on_at_once_are_all_cleared_away(zookeeper: str) -> None:
    count = 10 * background.CHANGES_AT_ONCE

    async def scenario() -> None:
        async with coordinator(zookeeper) as stub, session(zookeeper) as own:
            for number in range(count):
                await rpc.call(stub.CreateQueue, pb.CreateQueueRequest(queue=f"q{number}"), CALL_S)
            for number in range(count):
                await rpc.call(stub.DeleteQueue, pb.QueueRequest(queue=f"q{number}"), CALL_S)

            async def are_gone() -> bool:
                return not await own.children(Paths(CLUSTER).queues)

            await until(are_gone, "the nodes are gone")

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_queue_is_cleared_away_again_where_that_was_cut_off(zookeeper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever is elected next: its chain is there, and says that it is deleted, until all else is gone."""

    async def scenario() -> None:
        async with session(zookeeper) as own, session(zookeeper) as other:
            store, next_one = Store(own, CLUSTER), Store(other, CLUSTER)
            await store.start()
            delete, left = own.delete, 0

            async def cut_off(path: str, version: int = -1) -> None:
                nonlocal left
                left -= 1
                if left < 0:
                    raise Unreachable("the coordinator is killed here")
                await delete(path, version)

            monkeypatch.setattr(own, "delete", cut_off)
            for deletions in range(4):
                queue_id = await next_one.new_queue_id()
                await next_one.create_queue(new_document(f"q{deletions}", queue_id))
                left = deletions
                with pytest.raises(Unreachable):
                    await store.clear_queue(queue_id)
                is_there = await other.exists(store.paths.queue(queue_id))
                is_chain_there = await other.exists(store.paths.chain(queue_id))
                assert is_chain_there or not await other.children(store.paths.queue(queue_id))
                assert is_there
                await next_one.clear_queue(queue_id)
                assert not await other.exists(store.paths.queue(queue_id))

    asyncio.run(scenario())


def test_a_group_that_changes_while_it_is_removed_stays(zookeeper: str) -> None:
    async def scenario() -> None:
        async with session(zookeeper) as own, session(zookeeper) as member:
            store = Store(own, CLUSTER)
            await store.start()
            paths = store.paths
            for path in (paths.members("g1"), paths.leases("g1")):
                await member.ensure(path)
            await store.set_draining("g1", is_draining=True)
            marked = await store.mark_version("g1")
            await store.set_draining("g1", is_draining=False)
            await store.set_draining("g1", is_draining=True)
            await refused(store.remove_group("g1", marked), Waiting)
            marked = await store.mark_version("g1")
            await member.ensure(paths.members("g1"))
            await member.create(paths.member("g1", "a"), b"", ephemeral=True)
            await refused(store.remove_group("g1", marked), Waiting)
            assert await member.exists(paths.group("g1"))
            await member.delete(paths.member("g1", "a"))
            await store.remove_group("g1", marked)
            assert not await member.exists(paths.group("g1"))
            await store.remove_group("g1", marked)  # a second time, by another coordinator
            await refused(store.mark_version("g1"), UnknownGroup)

    asyncio.run(scenario())


def test_no_queue_is_cleared_away_behind_the_back_of_a_group_that_this_coordinator_has_not_heard_of(
    zookeeper: str,
) -> None:
    """It doesn't count as removed: it may hold something of the queue, and is told to let it go."""

    async def scenario() -> None:
        async with session(zookeeper) as own, session(zookeeper) as member:
            store = Store(own, CLUSTER)
            await store.start()
            work = background.BackgroundWork(
                store, *cast("tuple[Any, Any, Any, Any, Any]", (None, None, None, lambda: True, stays))
            )
            queue_id = await store.new_queue_id()
            await store.create_queue(new_document("orders", queue_id))
            assert await work._done(core_background.FreeName(queue_id, "orders"), "test")
            await refused(store.queue_id("orders"), UnknownQueue)
            clear = core_background.ClearQueue(queue_id, "orders")
            await member.create(store.paths.group("g1"), b'{"is_draining": false}')
            assert not await work._done(clear, "test")  # its watches aren't followed
            assert await member.exists(store.paths.chain(queue_id))
            await store.look_up_registry()
            assert await work._done(clear, "test")
            assert not await member.exists(store.paths.queue(queue_id))

    asyncio.run(scenario())


def test_a_group_is_removed_for_good_and_deleted_queues_wait_for_it_no_longer(zookeeper: str, brokers: Brokers) -> None:
    group = pb.GroupRequest(group="g1")

    async def scenario() -> None:
        brokers.start("g1-a", "g1-b", "g2-a", "g2-b")
        async with coordinator(zookeeper) as stub, session(zookeeper) as own:

            async def refused_for(*reasons: str) -> None:
                with pytest.raises(Waiting, match=r"^group g1 can't be removed now: ") as told:
                    await rpc.call(stub.RemoveGroup, group, CALL_S)
                assert tuple(told.value.details["reasons"]) == reasons
                assert all(reason in str(told.value) for reason in reasons)

            await groups_whole(stub, "g1", "g2")
            view = await rpc.call(stub.CreateQueue, pb.CreateQueueRequest(queue="q"), CALL_S)
            paths, queue_id = Paths(CLUSTER), QueueId(view.queue_id)
            async with elected(zookeeper, paths.senders(queue_id)) as node:
                request = pb.AcquireSendRequest(queue="q", election_node=node)
                reply = await rpc.call(stub.AcquireSend, request, CALL_S)
                assert reply.grant.master.group == "g1"
            await refused_for("g1", "g1-a", "g1-b", "queue q")
            await rpc.call(stub.DrainGroup, group, CALL_S)
            await refused_for("g1-a", "g1-b", "queue q")
            brokers.end("g1-a", "g1-b")
            await refused_for("queue q")
            await rpc.call(stub.DeleteQueue, pb.QueueRequest(queue="q"), CALL_S)
            await asyncio.sleep(3 * background.LOOK_EVERY_S)
            assert await own.exists(paths.chain(queue_id)), "nobody has told the members of g1"
            found = (await rpc.call(stub.ListGroups, pb.ListGroupsRequest(), CALL_S)).groups
            assert [(one.group, list(one.deleted_queues)) for one in found] == [("g1", ["q"]), ("g2", [])]
            other = await rpc.call(stub.CreateQueue, pb.CreateQueueRequest(queue="other"), CALL_S)
            await rpc.call(stub.RemoveGroup, group, CALL_S)

            async def is_cleared_away() -> bool:
                return not await own.exists(paths.queue(queue_id))

            await until(is_cleared_away, "the deleted queue is cleared away")
            found = (await rpc.call(stub.ListGroups, pb.ListGroupsRequest(), CALL_S)).groups
            assert [one.group for one in found] == ["g2"]
            document, _ = await Store(own, CLUSTER).read_chain(QueueId(other.queue_id))
            assert document.send_list == ("g2",)
            await refused(rpc.call(stub.RemoveGroup, group, CALL_S), UnknownGroup)

            brokers.start("g1-a", "g1-b")
            await groups_whole(stub, "g1", "g2")
            found = (await rpc.call(stub.ListGroups, pb.ListGroupsRequest(), CALL_S)).groups
            assert [(one.group, one.is_draining) for one in found] == [("g1", False), ("g2", False)]

    asyncio.run(scenario())


def test_a_killed_master_costs_one_call_and_its_group_comes_back(zookeeper: str, brokers: Brokers) -> None:
    brokers.start("g1-a", "g1-b", "g2-a", "g2-b")

    async def scenario() -> None:
        async with coordinator(zookeeper) as stub, coordinator(zookeeper) as other:
            await groups_whole(stub, "g1", "g2")
            await groups_whole(other, "g1", "g2")
            view = await rpc.call(stub.CreateQueue, pb.CreateQueueRequest(queue="q"), CALL_S)
            assert list(view.send_list) == ["g1", "g2"]
            subscription = pb.CreateSubscriptionRequest(queue="q", subscription="s")
            await rpc.call(stub.CreateSubscription, subscription, CALL_S)
            views: list[pb.QueueView] = []

            async def watch() -> None:
                async for seen in other.WatchQueue(pb.QueueRequest(queue="q")):
                    views.append(seen)  # noqa: PERF401 - while others look at it

            watching = asyncio.create_task(watch())
            async with elected(zookeeper, Paths(CLUSTER).senders(QueueId(view.queue_id))) as node:
                await _fail_over(stub, other, brokers, node)
            await until(lambda: bool(views) and list(views[-1].send_list) == ["g2", "g1"], "g1 came back at the tail")
            versions = [seen.chain_version for seen in views]
            assert versions == sorted(versions)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(scenario())


async def _fail_over(stub: CoordinatorStub, other: CoordinatorStub, brokers: Brokers, node: str) -> None:
    reply = await rpc.call(stub.AcquireSend, pb.AcquireSendRequest(queue="q", election_node=node), CALL_S)
    assert (reply.grant.epoch, reply.grant.master.group, reply.token) == (1, "g1", 1)
    brokers.kill("g1-a")
    failed = pb.AcquireSendRequest(queue="q", election_node=node, token=1, failed_epoch=1)
    both = await asyncio.gather(rpc.call(stub.AcquireSend, failed, CALL_S), rpc.call(other.AcquireSend, failed, CALL_S))
    assert [(one.grant.epoch, one.grant.master.group) for one in both] == [(2, "g2"), (2, "g2")]
    older = pb.AcquireSendRequest(queue="q", election_node=node, token=1, failed_epoch=1)
    assert (await rpc.call(stub.AcquireSend, older, CALL_S)).grant.epoch == 2
    brokers.start("g1-a")


@pytest.mark.slow
def test_a_planned_switch_opens_the_next_link_and_shares_its_answer(
    zookeeper: str, brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    brokers.start("g1-a", "g1-b", "g2-a", "g2-b")
    # Both members' answers are waited for, however late one comes, and nothing else is written meanwhile.
    monkeypatch.setattr(closing, "OTHER_ANSWER_MS", 30_000)
    monkeypatch.setattr(core_background, "QUIET_MS", 300_000)

    async def scenario() -> None:
        async with coordinator(zookeeper) as stub:
            await groups_whole(stub, "g1", "g2")
            view = await rpc.call(stub.CreateQueue, pb.CreateQueueRequest(queue="q"), CALL_S)
            # Nobody ever sent: there is nothing to switch for.
            assert len((await rpc.call(stub.RotateQueue, pb.QueueRequest(queue="q"), CALL_S)).links) == 0
            async with elected(zookeeper, Paths(CLUSTER).senders(QueueId(view.queue_id))) as node:
                asked = pb.AcquireSendRequest(queue="q", queue_id=view.queue_id, election_node=node)
                reply = await rpc.call(stub.AcquireSend, asked, CALL_S)
                assert (reply.grant.epoch, reply.grant.next_master) == (1, brokers.address("g2-a"))
                before = (await rpc.call(stub.DescribeQueue, pb.QueueRequest(queue="q"), CALL_S)).chain_version
                asked.token, asked.failed_epoch = 1, 1
                _, reply, again = await asyncio.gather(
                    # Whoever says no epoch, and comes behind the others, has the next link closed, too.
                    rpc.call(stub.RotateQueue, pb.QueueRequest(queue="q", epoch=1), CALL_S),
                    rpc.call(stub.AcquireSend, asked, CALL_S),
                    rpc.call(stub.AcquireSend, asked, CALL_S),
                )
                assert (reply.grant.epoch, reply.grant.master.group, reply.token) == (2, "g2", 1)
                assert again.grant == reply.grant
                # Closing; sealed and the next one listed; open: no write more, whoever asked.
                rotated = await rpc.call(stub.DescribeQueue, pb.QueueRequest(queue="q"), CALL_S)
                assert rotated.chain_version == before + 3
                assert [(link.epoch, link.state, link.group) for link in rotated.links] == [
                    (1, "sealed", "g1"),
                    (2, "open", "g2"),
                ]
                assert list(rotated.links[0].answered) == ["a", "b"]
            await rpc.call(stub.DeleteQueue, pb.QueueRequest(queue="q"), CALL_S)
            asked.failed_epoch = 2
            await refused(rpc.call(stub.AcquireSend, asked, CALL_S), UnknownQueue)

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_reader_gets_its_place_and_an_older_one_is_fenced(zookeeper: str, brokers: Brokers) -> None:
    brokers.start("g1-a", "g1-b")

    async def scenario() -> None:
        async with coordinator(zookeeper) as stub:
            await groups_whole(stub, "g1")
            view = await rpc.call(stub.CreateQueue, pb.CreateQueueRequest(queue="q"), CALL_S)
            assert any("one group only" in wait.reason for wait in view.waits)
            await rpc.call(stub.CreateSubscription, pb.CreateSubscriptionRequest(queue="q", subscription="s"), CALL_S)
            paths, queue_id = Paths(CLUSTER), QueueId(view.queue_id)
            async with elected(zookeeper, paths.senders(queue_id)) as sender:
                await rpc.call(stub.AcquireSend, pb.AcquireSendRequest(queue="q", election_node=sender), CALL_S)
            for token in (1, 2):
                async with elected(zookeeper, paths.readers(queue_id, 1)) as node:
                    request = pb.AcquireReadRequest(queue="q", subscription="s", election_node=node)
                    reply = await rpc.call(stub.AcquireRead, request, CALL_S)
                    assert (reply.token, reply.grant.epoch, reply.grant.index) == (token, 1, 0)
            late = pb.AcquireReadRequest(queue="q", subscription="s", election_node=node, token=1)
            await refused(rpc.call(stub.AcquireRead, late, CALL_S), Fenced)

            async def is_described() -> bool:  # a member that doesn't answer soon is left out of a description
                described = await rpc.call(stub.DescribeQueue, pb.QueueRequest(queue="q"), CALL_S)
                return (described.links[0].copies, described.subscriptions[0].has_cursor) == (2, True)

            await until(is_described, "two copies and the cursor are described")
            seek = pb.SeekSubscriptionRequest(queue="q", subscription="s", to="latest")
            await rpc.call(stub.SeekSubscription, seek, CALL_S)
            groups = (await rpc.call(stub.ListGroups, pb.ListGroupsRequest(), CALL_S)).groups
            assert [(one.group, list(one.sending_queues)) for one in groups] == [("g1", ["q"])]

    asyncio.run(scenario())
