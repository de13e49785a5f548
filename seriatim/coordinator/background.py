"""The loop of the elected coordinator: look, plan (`core.background`), act. Everything it does may be done twice."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from seriatim.coordinator.core import background, close_link
from seriatim.coordinator.core.background import (
    Action,
    Change,
    ClearQueue,
    CloseIt,
    FreeName,
    Rotate,
    SweepQueue,
    TellDrop,
    TellEnd,
    Told,
    View,
    end_key,
)
from seriatim.coordinator.core.events import Wait
from seriatim.coordinator.execution import Execution
from seriatim.coordinator.members import Members
from seriatim.coordinator.store import Store
from seriatim.protocol import log
from seriatim.protocol.chain import LinkState
from seriatim.protocol.clock import boottime_s, now_ms
from seriatim.protocol.errors import SeriatimError
from seriatim.protocol.flag import is_set_within
from seriatim.protocol.names import Epoch, MemberName, QueueId

_log = log.logger("coordinator.background")
LOOK_EVERY_S = 0.5
SETTLE_S = 0.05
"""A change is looked at so much later: a switch changes the chain three times, and needs the machine for itself."""
ASK_MEMBERS_EVERY_S = 2.0
RETRY_S = 1.0
"""An action that failed is not tried again sooner."""
LOST_AGAIN_S = 5.0
"""Nor a lost link so soon, unless somebody else is there to be asked: it may stay lost for days, and there may be one in each queue."""
ROTATE_AGAIN_S = 10.0
"""A rotation that would have left a queue worse off is looked at again after so long."""
MAX_AT_ONCE = 32
CLOSINGS_AT_ONCE = 8
CHANGES_AT_ONCE = 2
CALLS_AT_ONCE = 4
"""So many links are closed, so many chains changed otherwise, so many calls go to one member at once: whoever wants to send comes
before a thousand queues at rest, and a member that answers nobody holds up only what it is to be told.
"""
AGAIN_S = 0.01
"""Where more was due than may be under way, a look follows so much after something was done."""
SLICE = 16
"""So many queues are looked at before calls have their turn."""
FORGET_EVERY_S = 60.0


Rotation = Callable[[QueueId, Epoch, str], Awaitable[bool]]
"""Rotates a queue off the link of this epoch; False where it had better not, now."""


class BackgroundWork:
    """Works while `is_elected` says so, and calls `leave` with the reason where another one had better. `run` ends only when cancelled."""

    def __init__(
        self,
        store: Store,
        members: Members,
        execution: Execution,
        rotate: Rotation,
        is_elected: Callable[[], bool],
        leave: Callable[[str], None],
    ) -> None:
        self._store = store
        self._members = members
        self._execution = execution
        self._rotate = rotate
        self._is_elected = is_elected
        self._leave = leave
        self._wake = asyncio.Event()
        self._told = Told()
        self._sealed: frozenset[tuple[QueueId, Epoch]] = frozenset()
        self._asked_at_s = 0.0
        self._forgot_at_s = 0.0
        self._forgot_gone_at_s = 0.0
        self._under_way: dict[object, asyncio.Task[None]] = {}
        self._lanes: Counter[object] = Counter()
        self._first = 0
        self._is_more_due = False
        self._not_before_s: dict[object, float] = {}
        store.on_change(self._wake.set)

    def wake(self) -> None:
        """Look at once, for example because this coordinator was elected."""
        self._wake.set()

    async def run(self) -> None:
        """Look whenever something changed, and from time to time."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await self._forget_gone()
                    if self._is_elected():
                        await self._look(tasks)
                    if not await is_set_within(self._wake, LOOK_EVERY_S):
                        continue
                    await asyncio.sleep(AGAIN_S if self._is_more_due else SETTLE_S)
                    self._wake.clear()
        finally:
            self._under_way.clear()

    async def _forget_gone(self) -> None:
        """Also where another one is elected: each is connected to all members."""
        now_s = boottime_s()
        if now_s - self._forgot_gone_at_s >= ASK_MEMBERS_EVERY_S:
            self._forgot_gone_at_s = now_s
            await self._members.forget_gone()

    async def _look(self, tasks: asyncio.TaskGroup) -> None:
        now_s = boottime_s()
        if now_s - self._asked_at_s >= ASK_MEMBERS_EVERY_S:
            self._asked_at_s = now_s
            await self._ask_for_seals()
            if await self._members.reaches_nobody(for_s=self._store.session.session_timeout_s):
                self._leave("it reaches no broker")
        if now_s - self._forgot_at_s >= FORGET_EVERY_S:
            self._forgot_at_s = now_s
            self._forget_told()
        self._not_before_s = {key: at_s for key, at_s in self._not_before_s.items() if at_s > now_s}
        await self._execution.give_way()
        self._is_more_due = False
        # On from where the last look stopped: all have their turn.
        ordered = sorted(self._store.chains.keys() | self._store.bare.keys())
        start = bisect_left(ordered, self._first)
        self._first = 0
        queue_ids = ordered[start:] + ordered[:start]
        for at in range(0, len(queue_ids), SLICE):
            if not self._begin(queue_ids[at : at + SLICE], tasks):
                self._first = queue_ids[at + SLICE] if at + SLICE < len(queue_ids) else queue_ids[0]
                break
            await asyncio.sleep(0)

    def _begin(self, queue_ids: list[QueueId], tasks: asyncio.TaskGroup) -> bool:
        """Begin with what is due for these queues. False: what is due has to wait for what is under way, here and likely elsewhere."""
        has_begun = is_held_up = False
        seen = tuple(self._store.chains[one] for one in queue_ids if one in self._store.chains)
        bare = {one: self._store.bare[one] for one in queue_ids if one in self._store.bare}
        view = View(seen, self._store.registry, self._store.names, self._told, self._sealed, bare)
        for action in background.plan(view, now_ms()):
            way = _way(action)
            if way.key in self._under_way or way.key in self._not_before_s:
                continue
            is_lane_full = self._lanes[way.lane] >= way.most
            if way.lane is Rotate and is_lane_full:
                continue  # no hurry: when that one is done, its chain has changed, and is looked at
            is_full = len(self._under_way) >= MAX_AT_ONCE
            if is_full or is_lane_full:
                self._is_more_due = True
                # One member that answers nobody is no reason to stop.
                is_held_up |= is_full or not isinstance(way.lane, MemberName)
                continue
            has_begun = True
            self._lanes[way.lane] += 1
            self._under_way[way.key] = tasks.create_task(self._act(way, action))
        return has_begun or not is_held_up

    def _forget_told(self) -> None:
        """What was told about links that are gone, or to processes that are."""
        chains = self._store.chains
        present = {one.incarnation for one in self._store.registry.registered.values()}
        links = {(queue_id, link.epoch) for queue_id, seen in chains.items() for link in seen.document.links}
        told = self._told
        told.ends = {one for one in told.ends if one[3] in present and one[:2] in links}
        told.drops = {
            (queue_id, below, incarnation)
            for queue_id, below, incarnation in told.drops
            if incarnation in present and queue_id in chains and below in (0, chains[queue_id].document.dropped.epoch)
        }

    async def _act(self, way: _Way, action: Action) -> None:
        cause_id = log.new_cause_id("background")
        try:
            is_done = await self._done(action, cause_id)
        except SeriatimError as error:
            is_done = False
            _log.lasting(
                "not done", action=type(action).__name__, code=error.code, reason=error.message, cause_id=cause_id
            )
        except Exception:
            is_done = False
            _log.exception("not done", action=type(action).__name__, cause_id=cause_id)
        finally:
            self._under_way.pop(way.key, None)
            self._lanes[way.lane] -= 1
            if self._is_more_due:
                self._wake.set()
        if not is_done:
            self._not_before_s[way.key] = boottime_s() + way.retry_s

    async def _done(self, action: Action, cause_id: str) -> bool:
        """Carry out one action. False: it has to be tried again."""
        match action:
            case CloseIt(queue_id, epoch, why):
                _log.lasting("closing link", queue_id=queue_id, epoch=epoch, why=why, cause_id=cause_id)
                begun = close_link.start(epoch)
                result = await self._execution.run(queue_id, begun, close_link.step, cause_id)
                return not isinstance(result, Wait)
            case Rotate(queue_id, epoch):
                return await self._rotate(queue_id, epoch, cause_id)
            case Change(document, expected, what):
                version = await self._store.write_chain(document, expected)
                if version is not None:
                    keys = {"queue": document.name, "what": what, "version": version}
                    _log.info("chain written", **keys, cause_id=cause_id)
                    # Where this is cut off, the next links that go take what is left along.
                    await self._store.sweep_seals(document)
                return True
            case TellEnd():
                return await self._end_told(action, cause_id)
            case TellDrop(document, below, member, incarnation):
                await self._members.drop_links(document, below, member, cause_id)
                self._told.drops.add((document.queue_id, below, incarnation))
                self._wake.set()
                return True
            case FreeName(queue_id, name):
                await self._store.free_name(name, queue_id)
                return True
            case ClearQueue(queue_id, name):
                # What looks like a removed group may be one that this coordinator hasn't heard of yet.
                if not await self._store.knows_all_groups():
                    return False
                await self._store.free_name(name, queue_id)
                await self._store.clear_queue(queue_id)
                _log.info("queue cleared away", queue=name, queue_id=queue_id, cause_id=cause_id)
                return True
            case SweepQueue(queue_id):
                return await self._store.sweep_queue(queue_id)

    async def _end_told(self, action: TellEnd, cause_id: str) -> bool:
        document, link = action.document, action.link
        reply = await self._members.record_end(action, cause_id)
        if reply.has_it:
            self._told.ends.add(end_key(document, link, action.incarnation))
            return True
        _log.lasting(
            "member hasn't the whole link yet",
            queue=document.name,
            epoch=link.epoch,
            member=action.member,
            next_index=reply.next_index,
            end=link.end,
            reason=reply.reason,
            cause_id=cause_id,
        )
        return False

    async def _ask_for_seals(self) -> None:
        """Which open links a member has sealed by itself, without having been registered anew (H18); one call for each member."""
        asked: dict[MemberName, list[tuple[QueueId, Epoch]]] = {}
        for seen in self._store.chains.values():
            for link in () if seen.document.is_deleted else seen.document.links:
                if link.state is LinkState.OPEN:
                    for side in link.sides:
                        if self._store.registry.is_present(side):
                            asked.setdefault(side.name, []).append((seen.document.queue_id, link.epoch))
        answers = await asyncio.gather(*(self._sealed_at(member, links) for member, links in asked.items()))
        self._sealed = frozenset().union(*answers)

    async def _sealed_at(self, member: MemberName, links: list[tuple[QueueId, Epoch]]) -> set[tuple[QueueId, Epoch]]:
        try:
            return await self._members.find_sealed(links, member)
        except SeriatimError:
            return set()  # no answer says nothing; its session will tell


@dataclass(frozen=True, slots=True)
class _Way:
    """How an action has its turn.

    `key`: by what it is known while it is under way. `lane`: with what it shares its turns, of which `most` may be under way.
    `retry_s`: how long it rests where it failed.
    """

    key: object
    lane: object
    most: int
    retry_s: float = RETRY_S


def _way(action: Action) -> _Way:
    match action:
        case CloseIt(queue_id, epoch, _, there):
            retry_s = LOST_AGAIN_S if there else RETRY_S
            return _Way(("close", queue_id, epoch, there), CloseIt, CLOSINGS_AT_ONCE, retry_s)
        case Rotate(queue_id, epoch):  # a moment's standstill each, and not of all queues in the same moment
            return _Way(("rotate", queue_id, epoch), Rotate, 1, ROTATE_AGAIN_S)
        case Change(document, expected, _):
            return _Way(("change", document.queue_id, expected), Change, CHANGES_AT_ONCE)
        case FreeName(queue_id) | ClearQueue(queue_id) | SweepQueue(queue_id):
            return _Way((type(action), queue_id), Change, CHANGES_AT_ONCE)
        case TellEnd(document, _, link, member, incarnation):
            return _Way(("end", document.queue_id, link.epoch, member, incarnation), member, CALLS_AT_ONCE)
        case TellDrop(document, below, member, incarnation):
            return _Way(("drop", document.queue_id, below, member, incarnation), member, CALLS_AT_ONCE)
