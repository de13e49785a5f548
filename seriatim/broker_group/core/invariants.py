"""What must hold of a replica after every step; tests and the simulator run it."""

from __future__ import annotations

from itertools import pairwise

from seriatim.broker_group.core.link_record import Role
from seriatim.broker_group.core.replica import Replica, SealPhase
from seriatim.protocol.errors import InvariantBroken


def check(state: Replica) -> None:
    """Raise InvariantBroken where the state contradicts itself."""
    claims = {
        "committed <= durable": state.committed.index <= state.durable,
        "durable <= tail": state.durable <= state.tail.index,
        "flight rises": all(a.index < b.index for a, b in pairwise((state.committed, *state.flight))),
        "flight ends at tail": (state.flight[-1] if state.flight else state.committed) == state.tail,
        "master commits what the slave confirmed": (
            state.record.role is not Role.MASTER
            or state.phase is not SealPhase.OPEN
            or not state.is_peer_ready
            or state.committed.index <= state.confirmed
        ),
        "sealed on disk": state.phase is not SealPhase.SEALED or state.record.is_sealed,
        "no peer behind a seal": state.phase is SealPhase.OPEN or not state.is_peer_ready,
        "an end has a seal": state.record.end is None or state.record.is_sealed,
    }
    broken = [claim for claim, holds in claims.items() if not holds]
    if broken:
        raise InvariantBroken(f"replica of epoch {state.record.epoch}: {', '.join(broken)}")
