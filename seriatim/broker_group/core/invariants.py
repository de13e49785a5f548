"""What must hold of a replica after every step; tests and the simulator run it."""

from __future__ import annotations

from itertools import pairwise

from seriatim.broker_group.core.link_record import Role
from seriatim.broker_group.core.replica import Replica, SealPhase
from seriatim.protocol.errors import InvariantBroken


def check(state: Replica) -> None:
    """Raise InvariantBroken where the state contradicts itself."""
    record, phase, committed, flight, tail = state.record, state.phase, state.committed, state.flight, state.tail
    claims = {
        "committed <= durable": committed.index <= state.durable,
        "durable <= tail": state.durable <= tail.index,
        "flight rises": not flight or all(a.index < b.index for a, b in pairwise((committed, *flight))),
        "flight ends at tail": (last := flight[-1] if flight else committed) is tail or last == tail,
        "master commits what the slave confirmed": (
            record.role is not Role.MASTER
            or phase is not SealPhase.OPEN
            or not state.is_peer_ready
            or committed.index <= state.confirmed
        ),
        "sealed on disk": phase is not SealPhase.SEALED or record.is_sealed,
        "no peer behind a seal": phase is SealPhase.OPEN or not state.is_peer_ready,
        "an end has a seal": record.end is None or record.is_sealed,
    }
    if not all(claims.values()):
        broken = [claim for claim, holds in claims.items() if not holds]
        raise InvariantBroken(f"replica of epoch {state.record.epoch}: {', '.join(broken)}")
