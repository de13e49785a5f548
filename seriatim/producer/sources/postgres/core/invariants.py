"""What holds of an assembler and its output after every step; tests check it."""

from __future__ import annotations

from collections.abc import Sequence

from seriatim.producer.sources.postgres.core.assembler import Outgoing
from seriatim.producer.sources.postgres.core.identity import LSN_SHIFT, NUMBER_BITS


def broken_order(records: Sequence[Outgoing], mark: int) -> str | None:
    """The first record whose seq doesn't rise, starting above the mark; None if all do."""
    last = mark
    for record in records:
        if record.seq <= last:
            return f"seq {record.seq} after {last}"
        last = record.seq
    return None


def broken_confirmation(confirmed_lsn: int, acknowledged_seq: int) -> str | None:
    """Whether a slot was confirmed beyond what the queue has acknowledged; None if not."""
    if confirmed_lsn >> LSN_SHIFT > acknowledged_seq >> NUMBER_BITS:
        return f"confirmed {confirmed_lsn:x} with {acknowledged_seq} acknowledged"
    return None
