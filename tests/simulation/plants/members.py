"""Wrong rules of a group's members: what they store, believe and resync."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from seriatim.broker_group.core import replica, replica_events
from tests.simulation.plants.plant import Plant, changed


def _believes_the_slave(right: Any, state: Any, event: replica_events.PeerConfirmed) -> Any:
    position = next((one for one in (state.committed, *state.flight) if one.index == event.index), None)
    return right(state, event if position is None else replace(event, hash=position.hash))


PLANTS: tuple[Plant, ...] = (
    Plant(
        "slave believed",
        "a slave's confirmation is believed without comparing the hash",
        changed(replica, "_confirmed", _believes_the_slave),
        within=100,
    ),
)
