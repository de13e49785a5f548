"""Wrong rules of sending and sealing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from seriatim.broker_group.core import replica
from tests.simulation.plants.plant import Plant, changed


def _one_copy(right: Any, state: Any) -> Any:
    return right(replace(state, confirmed=state.tail.index))


PLANTS = (
    Plant(
        "one copy",
        "a batch is acknowledged when the master has it",
        changed(replica, "_commit", _one_copy),
        within=20,
        finds="3:",
    ),
)
