"""Wrong rules of the end of a link and of the end of a session."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from seriatim.broker_group import broker, sealing
from seriatim.broker_group.broker import Broker
from seriatim.broker_group.core import replica, replica_events
from seriatim.broker_group.core.replica import SealPhase
from seriatim.broker_group.membership import Membership
from seriatim.broker_group.store import Store
from seriatim.broker_group.writer import Write
from seriatim.coordinator import messages
from seriatim.coordinator.core import seal
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import Certificate
from seriatim.protocol.election import Election
from seriatim.protocol.lease import Lease
from tests.simulation.plants.plant import Plant, changed, instead, together
from tests.simulation.schedule import Shape
from tests.simulation.world import World
from tests.simulation.zookeeper_session import SimulatedSession

# ---- the seal


def _answered_at_once(right: Any, state: Any) -> Any:
    del right
    record = replace(state.record, is_sealed=True)
    sealed = replace(state, record=record, phase=SealPhase.SEALED)
    return sealed, (replica_events.WriteSeal(record),)


def _answered_from_memory(right: Any, state: Any) -> Any:
    return _answered_at_once(right, replace(state, durable=state.tail.index))


def _streams_go_on(right: Any, state: Any, event: Any) -> Any:
    after, effects = right(state, event)
    return after, tuple(effect for effect in effects if not isinstance(effect, replica_events.EndStreams))


def _as_if_open(right: Any, state: Any, what: Any) -> Any:
    if state.phase is SealPhase.OPEN:
        return right(state, what)
    after, effects = right(replace(state, phase=SealPhase.OPEN, is_peer_ready=True), what)
    return replace(after, phase=state.phase, is_peer_ready=False), effects


def _not_flushed(right: Any, self: Store, record: Any, done: Any) -> None:
    if not record.is_sealed:
        right(self, record, done)
        return
    submit = self._writer.submit

    def unflushed(write: Write) -> None:
        submit(replace(write, flush_within_s=None, waits_for_flush=False))

    self._writer.submit = unflushed
    try:
        right(self, record, done)
    finally:
        self._writer.submit = submit


def _least_of_all(right: Any, link: Any, before: Any, answers: Any, *, now_ms: int) -> Any:
    """Where none of them is whole."""
    decision = right(link, before, answers, now_ms=now_ms)
    if not isinstance(decision, Certificate) or decision.is_whole:
        return decision
    least = min((answer for answer in answers.values()), key=lambda answer: answer.next.index)
    return seal._certificate(
        link, before, least.next, least.next.marks, answers.values(), is_whole=False, now_ms=now_ms
    )


def _failure_unsaid(right: Any, reply: pb.SealReply) -> seal.SealAnswer:
    return replace(right(reply), has_failed=False)


# ---- the session


async def _stays_registered(self: Membership, _: int) -> None:
    while self._broker.store.stands_still:  # noqa: ASYNC110 - nobody tells of that
        await asyncio.sleep(0.1)


async def _renewed_by_a_ping(right: Any, self: Membership, session_id: int, *, is_first: bool) -> None:
    asked = self._session.set

    async def ping(path: str, data: bytes) -> None:
        del data
        await self._session.exists(path)

    self._session.set = ping
    try:
        await right(self, session_id, is_first=is_first)
    finally:
        self._session.set = asked


async def _sealed_after_a_restart_only(right: Any, member: Broker) -> None:
    if any(record.opened_start != member.incarnation.start for record in member.links() if not record.is_sealed):
        await right(member)


async def _made_anew(self: Election) -> None:
    del self


async def _servers_only(right: Any, session: SimulatedSession, path: str) -> None:
    if not session.process.host.name.startswith(("sender", "reader", "audit")):
        await right(session, path)


def _never_over(self: Lease[Any]) -> float:
    is_a_members = isinstance(self.holder, int)
    return (float("inf") if is_a_members else self.until_s) if self.is_admitted else 0.0


SILENCE = ("cut", "isolate", "cut off a ZooKeeper server")
ENDINGS = ("rotate", "drain group", "pause", "slow disk")

PLANTS = (
    Plant(
        "H10",
        "pings renew the lease",
        changed(Membership, "_renew", _renewed_by_a_ping),
        within=150,
        shape=Shape(kinds=("cut off a ZooKeeper server",), coordinators=(1,), faults=(2, 4), lasts_s=(9.0,)),
        finds="its session is gone",
    ),
    Plant(
        "H11, from memory",
        "a seal answers with all that was taken, on disk or not",
        together(
            changed(replica, "_write_seal_when_quiet", _answered_from_memory),
            changed(replica, "_seal_written", lambda _, state: (state, ())),
        ),
        within=100,
        shape=Shape(kinds=ENDINGS, faults=(2, 4)),
        finds="doesn't keep",
    ),
    Plant(
        "H11, writes begun",
        "a seal is answered while writes begun are still confirmed and acknowledged",
        together(
            changed(replica, "_write_seal_when_quiet", _answered_at_once),
            changed(replica, "_seal_written", lambda _, state: (state, ())),
            changed(replica, "_seal_asked", _streams_go_on),
            changed(replica, "_flushed", _as_if_open),
            changed(replica, "_confirmed", _as_if_open),
        ),
        within=100,
        shape=Shape(kinds=ENDINGS, faults=(2, 4)),
        finds="acknowledged|doesn't keep",
    ),
    Plant(
        "seal not flushed",
        "a seal is answered before it, and all behind it, is flushed",
        changed(Store, "put_link", _not_flushed),
        within=100,
        shape=Shape(kinds=("rotate", "drain group"), settings=pb.QueueSettings(durability="async", flush_ms=500)),
        finds="doesn't keep",
    ),
    Plant(
        "lease ignored",
        "a member takes records whether its lease runs or not",
        instead(Lease, "usable_until_s", property(_never_over)),
        within=150,
        shape=Shape(kinds=SILENCE, faults=(2, 4), lasts_s=(9.0,)),
        finds="its session is gone",
    ),
    Plant(
        "a seal on its way counts",
        "a member registers in a new session while a seal that somebody asked for is still being written",
        instead(broker, "_has_seal_on_disk", lambda link: getattr(link, "record", link).is_sealed),
        within=150,
        shape=Shape(
            kinds=("expire session", "slow disk", "slow disk"), groups=(2,), coordinators=(2,), faults=(12, 16)
        ),
        finds="5.5",
    ),
    Plant(
        "least of what is left",
        "of answers that aren't whole the least tells the end",
        changed(seal, "decide", _least_of_all),
        within=20,
        shape=Shape(
            kinds=("kill both members", "kill all", "memory emptied", "pause the slave"),
            settings=pb.QueueSettings(durability="async", flush_ms=200),
            faults=(3, 6),
        ),
        finds="8: .* has more",
    ),
    Plant(
        "failed disk waited for",
        "a member whose disk failed may still take records, as one may that can't read the link",
        changed(messages, "seal_answer_from", _failure_unsaid),
        within=20,
        shape=Shape(kinds=("disks of the head fail",), faults=(1, 1)),
        finds="12: .*sending goes on",
    ),
    Plant(
        "hanging disk waited for",
        "a member whose disk stands still stays registered, as one that may yet take records",
        instead(Membership, "_stand_aside", _stays_registered),
        within=20,
        shape=Shape(kinds=("disks of the head hang",), faults=(1, 1)),
        finds="12: .*sending goes on",
    ),
    Plant(
        "session's end ignored",
        "a member goes on with its links in a new session",
        together(
            changed(sealing, "seal_open_links", _sealed_after_a_restart_only),
            instead(
                World, "_check_registration", lambda *_: None
            ),  # that sees it at once; what follows has to be seen, too
        ),
        within=100,
        shape=Shape(kinds=("expire session", "pause a coordinator"), coordinators=(1,), faults=(4, 7), pause_s=0.8),
        finds="another session",
    ),
    Plant(
        "stands twice",
        "who heard nothing of its election node makes another one, and waits behind itself",
        instead(Election, "_find_own", _made_anew),
        within=60,
        shape=Shape(kinds=("slow ZooKeeper",), coordinators=(1,), faults=(2, 4)),
        finds="12: ",
    ),
    Plant(
        "stands twice, by what its server knows",
        "who heard nothing of its election node looks for it where it is connected, and doesn't let that server catch up first",
        changed(SimulatedSession, "sync", _servers_only),
        within=200,
        shape=Shape(kinds=("slow ZooKeeper",), groups=(2,), coordinators=(1,), faults=(3, 4)),
        finds="12: ",
    ),
)
