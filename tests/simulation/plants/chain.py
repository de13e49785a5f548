"""Wrong rules of the chain: links, lists, groups that come back."""

from __future__ import annotations

from tests.simulation.plants.plant import Plant

PLANTS: tuple[Plant, ...] = ()
