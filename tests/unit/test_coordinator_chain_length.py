"""A chain that gets long is given no further link while there is room for all that makes it shorter again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from seriatim.coordinator.administration import Operations
from seriatim.coordinator.core import background, chain, chain_length, retention, seal, subscriptions
from seriatim.coordinator.core.chain_point import point_before
from seriatim.coordinator.core.events import Refused, SendGrant
from seriatim.coordinator.core.registry import GroupState, Registry
from seriatim.coordinator.core.seal import SealAnswer, Wholeness
from seriatim.coordinator.description import Description
from seriatim.coordinator.members import Members
from seriatim.coordinator.store import Store
from seriatim.protocol import chain_json
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument, Link, LinkState, QueueSettings, Readmit
from seriatim.protocol.errors import ChainTooLong, Unreachable
from seriatim.protocol.names import ChainVersion, Epoch, Incarnation, Index, QueueId
from seriatim.protocol.position import Position
from seriatim.protocol.registration import Registration
from tests.property.chain_world import World, close_call, send_call, with_subscription

NOW_MS = 1_764_300_000_000


class Growing:
    """Links one after the other, as of a queue with so many sources; the first one but one is lost, if so wanted."""

    def __init__(self, sources: int, *, is_one_lost: bool) -> None:
        self._chance = chance = random.Random(sources)
        disks = {(group, place): f"{chance.getrandbits(128):032x}" for group in ("g1", "g2", "g3") for place in "ab"}
        self._at = {name: Incarnation(disk, 3) for name, disk in disks.items()}
        self.registry = Registry({group: self._group(group) for group in ("g1", "g2", "g3")})
        self._marks = {f"device-{number:05d}-{chance.getrandbits(32):08x}": 1 << 40 for number in range(sources)}
        self._now_ms = NOW_MS
        settings = QueueSettings(readmit=Readmit.IN_SYNC)
        groups = tuple(self.registry.groups)
        new = chain.created(
            cluster="c", queue_id=QueueId(NOW_MS), name="orders", settings=settings, groups=groups, now_ms=NOW_MS
        )
        self.document = self._ended(subscriptions.created(new, "s", subscriptions.located(new, "earliest", None), 1))
        closing = self.closing(self.listed(self.document))
        last = cast("Link", closing.last_link)
        end = chain.lost(closing, last.epoch) if is_one_lost else self.sealed(closing)
        self.document = chain.readmitted(end, last.group)

    def _group(self, name: str) -> GroupState:
        return GroupState(
            name,
            members={
                place: Registration(self._at[name, place], "h:1", self._at[name, other], is_in_sync=True)
                for place, other in (("a", "b"), ("b", "a"))
            },
        )

    def listed(self, document: ChainDocument) -> ChainDocument:
        self._now_ms += 600_000 + self._chance.randrange(1000)
        return chain.next_link(document, self.registry, avoid={}, now_ms=self._now_ms)

    def closing(self, listed: ChainDocument) -> ChainDocument:
        epoch = cast("Link", listed.last_link).epoch
        return chain.closing(chain.opened(listed, epoch), epoch)

    def sealed(self, document: ChainDocument, epoch: Epoch | None = None) -> ChainDocument:
        """The end of the last link, or of this one, with both members' answers."""
        link = cast("Link", document.last_link if epoch is None else document.link(epoch))
        for source in self._marks:
            self._marks[source] += self._chance.randrange(1, 1 << 17)
        position = Position(Index(self._chance.randrange(1, 100_000)), self._chance.randbytes(32), dict(self._marks))
        answers = {place: SealAnswer(Wholeness.WHOLE, self._at[link.group, place], (position,)) for place in "ab"}
        end = seal.decide(link, point_before(document, link.epoch), answers, now_ms=self._now_ms)
        assert isinstance(end, seal.Certificate)
        return chain.sealed(document, link.epoch, end)

    def _ended(self, document: ChainDocument) -> ChainDocument:
        ended = self.sealed(self.closing(self.listed(document)))
        return chain.readmitted(ended, cast("Link", ended.last_link).group)

    def grown(self, links: int) -> ChainDocument:
        """Each step goes through all links that aren't settled: those in the midst are left out while others are made."""
        document = self.document
        bare = tuple(replace(one, consume_list=()) for one in document.subscriptions)
        few = replace(document, links=document.links[:2], subscriptions=bare)
        for _ in range(links):
            few = self._ended(few)
        made = few.links[2:]
        listed = tuple(link.epoch for link in made)
        unread = tuple(replace(one, consume_list=one.consume_list + listed) for one in document.subscriptions)
        return replace(few, links=document.links + made, subscriptions=unread)

    def to_the_limit(self, links: int) -> ChainDocument:
        """As many more links as a sender may list, in steps of so many at first; the last one is opening."""
        while links:
            longer = self.grown(links)
            if chain_length.listing_error(self.listed(longer)):
                links //= 4
            else:
                self.document = longer
        return self.listed(self.document)


def shorter(growing: Growing, document: ChainDocument) -> Iterator[tuple[str, ChainDocument]]:
    """What leads to a shorter chain, and others than a sender write."""
    yield "elected", subscriptions.with_reader(document, "s", "9f" * 16 + "-0000000007")
    yield "subscription deleted", subscriptions.deleted(document, "s")
    yield "queue deleted", chain.deleted(document)
    link = document.links[1]
    if link.state is LinkState.LOST:
        yield "found", growing.sealed(document, link.epoch)
        given_up = seal.given_up(link, point_before(document, link.epoch), [], now_ms=NOW_MS)
        yield "abandoned", chain.abandoned(document, link.epoch, given_up, "an unknown number of records", NOW_MS)
    else:
        end = replace(link.certificate, end=Index(0), marks={}, marks_on_two={})
        yield "tail abandoned", chain.abandoned(document, link.epoch, end, "all of it", NOW_MS)
    serving = chain.serving(document)
    others = replace(document, send_list=(serving,) if serving else ())
    for group in {"g1", "g2", "g3"} - {serving}:
        others = chain.readmitted(others, group)
    yield "groups back", others


@pytest.mark.parametrize("is_one_lost", [False, True])
@pytest.mark.parametrize(("sources", "part", "step"), [(3, 20, 128), (30, 10, 64), (300, 5, 16), (2500, 4, 4)])
def test_what_ends_gives_up_or_lets_go_links_finds_room_in_a_chain_that_was_given_one_just_before(
    sources: int, part: int, step: int, is_one_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a limit for all writes alike a chain that had reached it couldn't get shorter, also when all was read.

    `part`: of the limits, where many links would take long to be made.
    """
    monkeypatch.setattr(chain_json, "PLAIN_BYTES", 0)
    monkeypatch.setattr(chain_json, "MAX_BYTES", chain_json.MAX_BYTES // part)
    monkeypatch.setattr(chain_length, "LISTED_BYTES", chain_length.LISTED_BYTES // part)
    growing = Growing(sources, is_one_lost=is_one_lost)
    listed = growing.to_the_limit(step)
    assert chain_json.size_bytes(listed) > chain_length.LISTED_BYTES * 0.9
    epoch = cast("Link", listed.last_link).epoch
    closing = growing.closing(listed)
    states = {
        "listed": listed,
        "emptied": chain.emptied(listed, epoch, NOW_MS),
        "closing": closing,
        "sealed": growing.sealed(closing),
        "lost": chain.lost(closing, epoch),
    }
    for state, document in states.items():
        assert len(chain_json.encode(document)) < chain_json.MAX_BYTES * 0.95, state
        for what, change in shorter(growing, document):
            assert len(chain_json.encode(change)) < chain_json.MAX_BYTES * 0.97, f"{state}, {what}"


def with_limit(monkeypatch: pytest.MonkeyPatch, name: str, document: ChainDocument, more_bytes: int = 0) -> None:
    monkeypatch.setattr(chain_length, name, chain_json.size_bytes(document) + more_bytes)


def test_a_link_that_finds_no_room_is_not_listed_but_the_end_of_the_last_one_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    send_call(world).finish()
    world.append(Epoch(1), 2)
    with_limit(monkeypatch, "LISTED_BYTES", world.document, 50)
    for failed_epoch in (1, 0):  # the end first; then there is nothing more to be recorded
        answer = send_call(world, token=1, failed_epoch=failed_epoch).finish()
        assert isinstance(answer, Refused)
        assert isinstance(answer.error, ChainTooLong)
        assert "it gets no further link" in answer.error.message
        assert [link.state for link in world.document.links] == [LinkState.SEALED]
        assert world.document.send_list == ("g2", "g3")
    assert [what.split(" ")[0] for what in world.written[-2:]] == ["closing", "link"]
    world.document = retention.without(world.document, (Epoch(1),))
    assert isinstance(send_call(world, token=1).finish(), SendGrant)
    assert world.document.links[-1].epoch == 2


def test_a_long_chain_is_ended_by_who_adds_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    send_call(world).finish()
    monkeypatch.setattr(chain_length, "LISTED_BYTES", 0)
    world.restart(("g1", "b"))
    close_call(world, 1).finish()
    assert world.document.links[-1].state is LinkState.SEALED


def test_no_planned_switch_is_made_with_a_chain_in_which_failures_need_the_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sending would stand still for nothing: not by hand, nor by age, nor for a group that is drained; and status says so."""
    world = World()
    with_subscription(world)
    settings = replace(world.document.settings, rotate_ms=5000, readmit=Readmit.IN_SYNC)
    world.document = replace(world.document, settings=settings)
    send_call(world).finish()
    groups = world.registry().groups
    draining = Registry({**groups, "g1": replace(groups["g1"], is_draining=True)})
    seen = background.SeenChain(
        world.document, world.version, since_ms=0, size_bytes=chain_json.size_bytes(world.document)
    )
    view = background.View((seen,), draining, {"orders": QueueId(1)}, background.Told())

    class OneStore:
        registry = world.registry()

        def size_bytes(self, _: QueueId) -> int:
            return chain_json.size_bytes(world.document)

        async def first_in_lines(self, _: object, lines: Sequence[object]) -> list[str]:
            return [""] * len(lines)

        async def queue_id(self, _: str) -> QueueId:
            return QueueId(1)

        async def read_chain(self, _: QueueId) -> tuple[ChainDocument, ChainVersion]:
            return world.document, world.version

        async def look_up_registry(self, _: object = None) -> None: ...

    class Silent:
        async def describe_links(self, *_: object) -> dict[Epoch, pb.HeldLink]:
            raise Unreachable("no answer")

    store, members = cast("tuple[Store, Members]", (OneStore(), Silent()))
    description = Description(store, members)

    class Switches(Operations):
        switched = 0

        async def _switched(self, *_: Any) -> tuple[ChainDocument, ChainVersion]:
            self.switched += 1
            return world.document, world.version

    operations = Switches(store, cast("Any", None), description)

    async def all_ways() -> tuple[bool, set[str]]:
        is_rotated = await operations.rotate_aged(QueueId(1), Epoch(1), "test")
        return is_rotated, {one.what for one in (await description.queue(world.document, world.version)).waits}

    with_limit(monkeypatch, "SWITCHED_BYTES", world.document, -1)
    is_rotated, waits = asyncio.run(all_ways())
    assert (is_rotated, "chain" in waits) == (False, True)
    with pytest.raises(ChainTooLong, match="no planned switch is made"):
        asyncio.run(operations.rotate_queue(pb.QueueRequest(queue="orders")))
    assert background.CloseIt not in map(type, background.plan(view, 10_000))
    assert operations.switched == 0
    with_limit(monkeypatch, "SWITCHED_BYTES", world.document)
    is_rotated, waits = asyncio.run(all_ways())
    assert (is_rotated, "chain" in waits) == (True, False)
    asyncio.run(operations.rotate_queue(pb.QueueRequest(queue="orders")))
    assert background.CloseIt in map(type, background.plan(view, 10_000))
    assert operations.switched == 2
