"""Limits made small: what production reaches after weeks, or under loads that no schedule has, many schedules reach at once."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from seriatim.broker_group import (
    batch_cache,
    broker,
    fetch,
    link_runner,
    replication,
    resyncer,
    scrubber,
    service,
    store,
)
from seriatim.consumer import client, range_reader
from seriatim.coordinator import background
from seriatim.coordinator.core import retention
from seriatim.producer.core import sequencing
from seriatim.producer.core.sender import SenderSettings
from seriatim.protocol import batch_streams, chain_json
from seriatim.protocol.names import COUNTER_BITS

_WINDOW = SenderSettings()
_A_BATCH_BYTES = 150
"""One or two batches of one record have as much."""

Limit = tuple[Any, str, Any]
"""Whose it is, its name, and its value."""

_SMALL: tuple[Limit, ...] = (
    (link_runner, "FLIGHT_BYTES", _A_BATCH_BYTES),
    (link_runner, "FLIGHT_BATCHES", 2),
    (link_runner, "REST_S", 0.05),
    (broker, "CACHE_BYTES", 2 * (_A_BATCH_BYTES + batch_cache.BESIDE_BYTES)),
    (replication, "COPY_BYTES", _A_BATCH_BYTES),
    (service, "COPY_BYTES", _A_BATCH_BYTES),
    (fetch, "READ_BYTES", _A_BATCH_BYTES),
    (scrubber, "READ_BYTES", _A_BATCH_BYTES),
    (resyncer, "UNFLUSHED_BYTES", _A_BATCH_BYTES),
    (resyncer, "AT_ONCE", 1),
    (store, "MOST_BATCHES", 2),
    (service, "LINKS_AT_ONCE", 1),
    (batch_streams, "TOGETHER_BYTES", _A_BATCH_BYTES),
    (chain_json, "PLAIN_BYTES", 0),
    (background, "MAX_AT_ONCE", 1),
    (background, "CLOSINGS_AT_ONCE", 1),
    (background, "CHANGES_AT_ONCE", 1),
    (background, "CALLS_AT_ONCE", 1),
    (background, "SLICE", 1),
    (retention, "MAX_CHAIN_BYTES", 1500),  # one link, before what was read has to go
    (sequencing, "SPARE_SEQS", (1 << COUNTER_BITS) - 30),  # a term is spent after so many records
)

_SHARED: tuple[Limit, ...] = ((link_runner, "MEMBER_FLIGHT_BYTES", 2 * _A_BATCH_BYTES),)
"""What the links of several queues have together."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What applications set. In bytes: a batch, a sender's buffer and window, what readers of both kinds fetch ahead."""

    batch_bytes: int = 4096
    buffer_bytes: int = 1 << 20
    window_bytes: int = _WINDOW.window_bytes
    window_batches: int = _WINDOW.window_batches
    prefetch_bytes: int = client.PREFETCH_BYTES
    range_bytes: int = range_reader.PREFETCH_BYTES


_SMALL_SIZES = {
    "batch_bytes": 1,  # a record each
    "buffer_bytes": 4 * _A_BATCH_BYTES,
    "window_bytes": _A_BATCH_BYTES,
    "window_batches": 2,
    "prefetch_bytes": 8 * _A_BATCH_BYTES,
    "range_bytes": 8 * _A_BATCH_BYTES,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """`changed`: those of production that are small. `sizes`: of all applications."""

    changed: tuple[Limit, ...] = ()
    sizes: Sizes = field(default_factory=Sizes)


def some(chance: random.Random, *, are_several: bool) -> Limits:
    """In half of all schedules as it ships; in the others each is small by chance. `are_several`: queues."""
    if chance.random() < 0.5:
        return Limits()
    changed = tuple(limit for limit in _SMALL if chance.random() < 0.5)
    small_sizes = {name: value for name, value in _SMALL_SIZES.items() if chance.random() < 0.5}
    shared = tuple(limit for limit in _SHARED if are_several and chance.random() < 0.5)
    return Limits((*changed, *shared), Sizes(**small_sizes))
