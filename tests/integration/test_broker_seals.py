"""What a member seals by itself when a session begins, on a real store."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from seriatim.broker_group import broker as broker_module
from seriatim.broker_group import sealing
from seriatim.broker_group.broker import EVERY_EPOCH, Broker
from seriatim.broker_group.core.link_record import LinkRecord
from seriatim.broker_group.core.replica import SealPhase
from seriatim.broker_group.membership import Membership
from seriatim.broker_group.peer import Peer
from seriatim.broker_group.store import Store, open_store
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.errors import DiskFailed, UnknownLink, Unreachable
from seriatim.protocol.lease import Lease
from seriatim.protocol.names import ChainVersion, Epoch, Index, MemberName, QueueId
from seriatim.protocol.zookeeper import SessionState

OPENED = LinkRecord(QueueId(1), Epoch(2), chain_version=ChainVersion(3), opened_start=1)


@contextlib.asynccontextmanager
async def member(directory: Path) -> AsyncIterator[tuple[Store, Broker]]:
    """One that has a link, as it is when its process starts."""
    store = open_store(directory, "c/g1-a", segment_bytes=1)
    try:
        await store.keep_link(OPENED)
        yield store, Broker("c", MemberName("g1", "a"), store, Peer("c", store.incarnation), 0)
    finally:
        await store.close()


def test_a_seal_that_somebody_asked_for_is_waited_for_until_it_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registration in a new session says that everything is sealed (protocol.md 5.5); it comes behind this."""

    async def scenario() -> None:
        async with member(tmp_path) as (store, broker):
            runner = broker.link(OPENED.key)
            on_their_way = []
            put_link = store.put_link
            monkeypatch.setattr(store, "put_link", lambda *write: on_their_way.append(write))
            asked = asyncio.create_task(runner.sealed(ChainVersion(9)))
            await asyncio.sleep(0)
            assert runner.record.is_sealed
            assert len(on_their_way) == 1
            under_way = asyncio.create_task(sealing.seal_open_links(broker))
            await asyncio.wait((under_way,), timeout=0.2)
            assert not under_way.done()
            put_link(*on_their_way[0])
            await asyncio.wait_for(under_way, 60)
            assert runner.state.phase is SealPhase.SEALED
            assert await asked is None
            assert len(on_their_way) == 1

    asyncio.run(scenario())


def test_a_seal_that_the_disk_refused_is_not_said_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with member(tmp_path) as (store, broker):
            monkeypatch.setattr(store, "put_link", lambda _, done: done(0, DiskFailed("the disk failed")))
            await sealing.seal_open_links(broker)

    caplog.set_level(logging.INFO)
    asyncio.run(scenario())
    assert "seal can't be written" in caplog.text
    assert "sealed" not in caplog.text


def test_a_link_that_was_let_go_meanwhile_is_not_cut(tmp_path: Path) -> None:
    """Who records an end on a slow disk may come to the cut behind the deletion; its record would be left, and nobody would remove it."""

    async def scenario() -> None:
        async with member(tmp_path) as (store, broker):
            runner = broker.link(OPENED.key)
            await broker.drop(OPENED.key)
            with pytest.raises(UnknownLink):
                await broker.cut(runner, runner.record, Index(0))
            assert store.links() == []

    asyncio.run(scenario())


def test_a_link_that_was_let_go_while_it_was_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late Seal of a queue that is deleted: who let its links go saw none there to remove, and nobody would look for it again."""
    late = replace(OPENED, epoch=Epoch(3), opened_start=0, is_sealed=True)

    async def scenario() -> None:
        async with member(tmp_path) as (store, broker):
            keep_link = store.keep_link

            async def kept(record: LinkRecord) -> None:
                await keep_link(record)
                broker.lets_go(record.queue_id, Epoch(4))

            monkeypatch.setattr(store, "keep_link", kept)
            with pytest.raises(UnknownLink):
                await broker.known(late)
            assert [record.key for record in store.links()] == [OPENED.key]

    asyncio.run(scenario())


def test_of_queues_that_were_deleted_the_last_ones_are_remembered_for_calls_that_come_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them took some memory as long as the broker ran."""
    monkeypatch.setattr(broker_module, "DELETED", 3)

    async def scenario() -> None:
        async with member(tmp_path) as (_, broker):
            broker.lets_go(QueueId(100), Epoch(5))  # this one is there
            for number in range(1, 9):
                for _ in range(2):  # a coordinator tells of it until all members have it
                    broker.lets_go(QueueId(number), EVERY_EPOCH)
            assert len(broker._first_kept) == 4
            for number in (6, 7, 8):
                with pytest.raises(UnknownLink):
                    broker.check_kept((QueueId(number), Epoch(2)))
            with pytest.raises(UnknownLink):
                broker.check_kept((QueueId(100), Epoch(4)))

    asyncio.run(scenario())


def test_calls_that_come_when_a_link_was_let_go_or_are_ended_leave_nothing(tmp_path: Path) -> None:
    """A process that stays for years meets many: nobody removes what they waited by, for the link isn't made again."""

    async def scenario() -> None:
        async with member(tmp_path) as (_, broker):
            broker.lets_go(QueueId(1), Epoch(9))
            with pytest.raises(UnknownLink):
                await broker.known(replace(OPENED, epoch=Epoch(3)))
            assert not broker._locks
            master = asyncio.create_task(broker.until_opened((QueueId(1), Epoch(10)), 60))
            await asyncio.sleep(0)
            assert broker._opening
            master.cancel()
            await asyncio.wait((master,))
            del master
            assert not broker._opening

    asyncio.run(scenario())


def test_a_seal_for_whoever_had_this_address_before_leaves_nothing_here(tmp_path: Path) -> None:
    """A link of another group's lay on this disk from then on, which the chain contradicted: the queue stood still for good."""

    async def scenario() -> None:
        async with member(tmp_path) as (store, broker):
            sides = [
                pb.LinkMember(group="g2", member=place, incarnation=pb.Incarnation(disk_id=f"g2-{place}", start=1))
                for place in "ab"
            ]
            name = pb.LinkName(cluster="c", queue_id=1, epoch=7)
            request = pb.SealRequest(link=name, chain_version=5, master=sides[0], slave=sides[1], durability="sync")
            reply = await sealing.seal(broker, request)
            assert reply.answer == pb.SealReply.UNKNOWN
            assert [record.key for record in store.links()] == [OPENED.key]

    asyncio.run(scenario())


def test_a_seal_is_answered_with_that_the_disk_failed_and_one_that_can_t_be_read_with_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both members' disks fail, that they take no more is all that they can say; who can't read a link may still take records."""

    def failing(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def unreadable(_: object) -> None:
        raise DiskFailed("the disk can't be read: Corruption")

    async def scenario() -> None:
        async with member(tmp_path) as (store, broker):
            mine, other = (
                pb.LinkMember(group="g1", member=place, incarnation=pb.Incarnation(disk_id=disk_id, start=1))
                for place, disk_id in (("a", store.incarnation.disk_id), ("b", "disk-b"))
            )

            async def sealed(epoch: int) -> pb.SealReply:
                name = pb.LinkName(cluster="c", queue_id=1, epoch=epoch)
                return await sealing.seal(
                    broker, pb.SealRequest(link=name, chain_version=5, master=mine, slave=other, durability="sync")
                )

            with monkeypatch.context() as patched:
                patched.setattr(broker, "find", unreadable)
                reply = await sealed(OPENED.epoch)
            assert (reply.answer, reply.has_failed) == (pb.SealReply.UNKNOWN, False)
            monkeypatch.setattr(os, "fdatasync", failing)
            for epoch in (OPENED.epoch, OPENED.epoch, 3):  # asked again; and of a link that it never heard of
                reply = await sealed(epoch)
                assert (reply.answer, reply.has_failed) == (pb.SealReply.UNKNOWN, True)
                assert reply.reason == "the disk failed: [Errno 5] Input/output error"
                assert reply.incarnation.disk_id == store.incarnation.disk_id
                assert not reply.positions
            monkeypatch.undo()
            assert (await sealed(OPENED.epoch)).has_failed  # for good: it isn't trusted again

    asyncio.run(scenario())


class LateToTell:
    """A session that began while the loss of the one before is still on its way to the loop."""

    session_id, state = 2, SessionState.CONNECTED

    def on_state(self, _: object) -> None:
        pass


def test_a_loss_that_is_told_while_the_next_session_begins_begins_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member was registered, and refused everything for want of a lease, for as long as the session lived."""

    async def scenario() -> None:
        async with member(tmp_path) as (_, broker):
            membership = Membership(broker, cast("Any", LateToTell()), "h:1")

            async def told_meanwhile(broker: Broker) -> None:
                broker.lease = Lease(0)

            monkeypatch.setattr(sealing, "seal_open_links", told_meanwhile)
            with pytest.raises(Unreachable, match="lost meanwhile"):
                await membership._serve_session()

    asyncio.run(scenario())
