"""Positions in PostgreSQL's log and the identities made from them.

A record's seq is ``(commit_lsn >> 5) << 22 | number``, an unsigned 64-bit number:

- PostgreSQL hands transactions out in the order of their commit records. A commit record takes at least 40 bytes and
  starts at a multiple of 8, so two of them never share ``lsn >> 5``: that part rises strictly from transaction to
  transaction. 42 bits of it reach to 128 TiB of log.
- `number` counts inside the transaction: begin is 1, the changes follow, the commit is the last. 22 bits count to
  4,194,303. A larger transaction can't be given rising seqs, and is refused while it is read: nothing of it is confirmed.
- A heartbeat at position ``lsn`` is number 0 of that position: above every transaction whose commit record lies before
  it, below every one that follows.

The snapshot's records are 1, 2, 3, …; its end is number 0 at the slot's consistent point, and every transaction of the
stream commits at or after that point. A cluster's log starts at 16 MiB, so that even there 2 * 10**12 rows fit below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from seriatim.producer.sources.postgres.errors import LogTooFar, TransactionTooLarge

NUMBER_BITS: Final = 22
LSN_SHIFT: Final = 5
NUMBER_LIMIT: Final = (1 << NUMBER_BITS) - 1
"""Largest number inside a transaction."""
LSN_LIMIT: Final = 1 << (64 - NUMBER_BITS + LSN_SHIFT)
"""First log position that no seq can hold: 128 TiB."""


def parse_lsn(text: str) -> int:
    """A log position from PostgreSQL's form ``16/B374D848``."""
    high, _, low = text.partition("/")
    return int(high, 16) << 32 | int(low, 16)


def format_lsn(lsn: int) -> str:
    """A log position in PostgreSQL's form."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def base_seq(lsn: int) -> int:
    """Seq of number 0 at a log position.

    Raises:
        LogTooFar: the position has no seq.
    """
    if lsn >= LSN_LIMIT:
        raise LogTooFar(f"log position {format_lsn(lsn)} is beyond {format_lsn(LSN_LIMIT)}", lsn=lsn)
    return lsn >> LSN_SHIFT << NUMBER_BITS


def seq_of(commit_lsn: int, number: int) -> int:
    """Seq of a record.

    Raises:
        LogTooFar: the position has no seq.
        TransactionTooLarge: the number doesn't fit.
    """
    if number > NUMBER_LIMIT:
        raise too_large(None)
    return base_seq(commit_lsn) | number


def too_large(tx_id: int | None) -> TransactionTooLarge:
    """The error for a transaction with more than `NUMBER_LIMIT` records."""
    which = "a transaction" if tx_id is None else f"transaction {tx_id}"
    return TransactionTooLarge(
        f"{which} has more than {NUMBER_LIMIT:,} records, begin and commit included: more than a seq can count",
        tx_id=tx_id,
        limit=NUMBER_LIMIT,
    )


def source_prefix(system_id: str, slot: str) -> str:
    """What the source names of all slots of this name in this cluster start with."""
    return f"pg/{system_id}/{slot}/"


def source_name(system_id: str, slot: str, consistent_point: int) -> str:
    """Source of the records of one slot: named by its consistent point, a slot made again is another source."""
    return f"{source_prefix(system_id, slot)}{consistent_point:x}"


def latest_source(marks: Mapping[str, int], system_id: str, slot: str) -> tuple[int, int] | None:
    """Consistent point and mark of the source with the highest consistent point among those of the slot's name."""
    prefix = source_prefix(system_id, slot)
    found = [(int(source[len(prefix) :], 16), mark) for source, mark in marks.items() if source.startswith(prefix)]
    return max(found, default=None)
