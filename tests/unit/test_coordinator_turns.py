"""Hundreds of queues ask one member in one moment: calls of a kind take turns, and no deadline costs a group that is well."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from seriatim.coordinator.core import chain
from seriatim.coordinator.core.events import SendOpen, SendSeal
from seriatim.coordinator.members import Members
from seriatim.coordinator.store import Store
from seriatim.coordinator.turns import AT_ONCE, Turns
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.errors import DeadlineOver, Fenced, SeriatimError
from seriatim.protocol.names import Token
from tests.property.chain_world import World

LINE = 3 * AT_ONCE


class Member:
    """Calls that are under way there, in the order in which they came, and how each ends."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.under_way: dict[int, asyncio.Future[int]] = {}

    def asked(self, *numbers: int) -> list[asyncio.Task[int]]:
        return [asyncio.ensure_future(self.turns.take(self._call(number))) for number in numbers]

    def _call(self, number: int) -> Callable[[], Awaitable[int]]:
        def begun() -> Awaitable[int]:
            self.under_way[number] = asyncio.get_running_loop().create_future()
            return self.under_way[number]

        return begun

    def answer(self, number: int) -> None:
        self.under_way.pop(number).set_result(number)

    def fail(self, number: int, error: SeriatimError) -> None:
        self.under_way.pop(number).set_exception(error)


async def settle() -> None:
    """All that can go on without an answer has."""
    for _ in range(4 * LINE):
        await asyncio.sleep(0)


def test_a_few_calls_are_under_way_at_once_and_the_next_begins_when_one_ends():
    async def scenario() -> None:
        member = Member()
        calls = member.asked(*range(LINE))
        await settle()
        for number in range(LINE):
            assert list(member.under_way) == list(range(number, min(number + AT_ONCE, LINE)))
            member.answer(number)
            await settle()
        assert [await call for call in calls] == list(range(LINE))

    asyncio.run(scenario())


def test_where_a_member_stands_still_those_in_line_wait_for_one_deadline_and_who_asks_later_tries_anew():
    async def scenario() -> None:
        member = Member()
        calls = member.asked(*range(LINE))
        await settle()
        for number in range(AT_ONCE):
            member.fail(number, DeadlineOver("no answer in time at g1-a"))
        later = member.asked(LINE)
        await settle()
        assert list(member.under_way) == [LINE]
        assert {repr(call.exception()) for call in calls} == {repr(DeadlineOver("no answer in time at g1-a"))}
        member.answer(LINE)
        assert await later[0] == LINE

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [None, Fenced("an error is an answer, too")])
def test_one_deadline_costs_nobody_else_a_turn_where_the_member_has_answered_meanwhile(error: SeriatimError | None):
    async def scenario() -> None:
        member = Member()
        calls = member.asked(*range(LINE))
        await settle()
        if error is None:
            member.answer(1)
        else:
            member.fail(1, error)
        await settle()
        member.fail(0, DeadlineOver("no answer in time"))
        await settle()
        for number in range(2, LINE):
            member.answer(number)
            await settle()
        failed = {number for number, call in enumerate(calls) if call.exception() is not None}
        assert failed == ({0} if error is None else {0, 1})

    asyncio.run(scenario())


def test_who_is_cancelled_gives_the_turn_back_and_who_is_cancelled_in_line_never_has_one():
    async def scenario() -> None:
        member = Member()
        calls = member.asked(*range(LINE))
        await settle()
        for number in (*range(AT_ONCE), AT_ONCE + 1):
            calls[number].cancel()
        await settle()
        assert [one for one in member.under_way if one >= AT_ONCE] == [
            AT_ONCE,
            *range(AT_ONCE + 2, 2 * AT_ONCE + 1),
        ]
        calls[AT_ONCE].cancel()
        member.answer(AT_ONCE + 2)  # in the same moment: whoever is woken and cancelled at once passes the turn on
        calls[2 * AT_ONCE + 1].cancel()
        await settle()
        assert 2 * AT_ONCE + 3 in member.under_way
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(scenario())


class Busy:
    """Stands for calls to members that answer one call after the other, each in 5 ms by their own clocks."""

    def __init__(self) -> None:
        self._under_way: dict[str, int] = {}
        self.asked = 0

    async def call(self, _: str, __: object, request: object, timeout_s: float, to: str) -> Any:
        before = self._under_way.get(to, 0)
        self._under_way[to] = before + 1
        self.asked += 1
        try:
            for _turn in range(before + 1):
                await asyncio.sleep(0)
            if 0.005 * (before + 1) > timeout_s:
                raise DeadlineOver(f"no answer in time at {to}")
        finally:
            self._under_way[to] -= 1
        return pb.OpenLinkReply() if isinstance(request, pb.OpenLinkRequest) else pb.SealReply()


def test_of_hundreds_of_queues_that_open_or_close_a_link_at_once_none_has_a_deadline_of_members_that_are_well():
    """600 that were elected in one moment left their group, and the next, and so on: whoever was asked last was answered late."""

    async def scenario() -> None:
        world = World()
        registry = world.registry()
        document = chain.next_link(world.document, registry, avoid={}, now_ms=1)
        link = document.links[0]
        members = Members(cast("Store", SimpleNamespace(registry=registry, cluster="c")), 1.0)
        members._calls = busy = cast("Any", Busy())
        calls: list[Awaitable[object]] = []
        for _ in range(400):
            for side in (link.master, link.slave):
                calls.append(members.open_link(SendOpen(side, link, Token(1), world.version, 1), document, "cause"))
                calls.append(members.seal(SendSeal(side, link, world.version), document.queue_id, "cause"))
        await asyncio.gather(*calls)
        assert busy.asked == len(calls)
        calls.clear()
        assert not members._turns  # who is gone is forgotten with the last call

    asyncio.run(scenario())
