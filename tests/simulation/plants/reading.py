"""Wrong rules of reading and of coming back."""

from __future__ import annotations

from tests.simulation.plants.plant import Plant

PLANTS: tuple[Plant, ...] = ()
