"""Rules that look right and are not: each a small change of a core or of the world, which some schedule has to find.

`PLANTS` maps a name to the plant. H1 to H25 are the traps of docs/traps.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.simulation.plants import beside, chain, handing, members, reading, sealing, sending, stopping, unasked
from tests.simulation.plants.plant import Plant

PLANTS: dict[str, Plant] = {
    plant.name: plant
    for plant in (
        *sending.PLANTS,
        *sealing.PLANTS,
        *reading.PLANTS,
        *handing.PLANTS,
        *members.PLANTS,
        *chain.PLANTS,
        *unasked.PLANTS,
        *stopping.PLANTS,
        *beside.PLANTS,
    )
}

HARMLESS: dict[str, Plant] = {plant.name: plant for plant in (members.LYING_SLAVES,)}
"""Worlds that are worse than ours, and that the right rules bear."""
ALL = PLANTS | HARMLESS


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Run the block with this rule made wrong; "" with all rules right."""
    if not name:
        yield
        return
    with ALL[name].make():
        yield
