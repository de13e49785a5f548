"""What happens to a replica, in the past tense, and what it orders, in the imperative."""

from __future__ import annotations

from dataclasses import dataclass

from seriatim.broker_group.core.link_record import LinkRecord
from seriatim.protocol.batch import BatchHeader
from seriatim.protocol.errors import SeriatimError
from seriatim.protocol.names import ChainVersion, Index, Token
from seriatim.protocol.position import Position

# ---- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """A coordinator asked to take records from this token. `max_record_bytes`: the queue's limit now, which only rises."""

    chain_version: ChainVersion
    token: Token
    max_record_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BatchArrived:
    """From the sender (with its token) or, on the slave, from the master (token None).

    `now_s`, `lease_until_s`: CLOCK_BOOTTIME. `has_room`: the disk has room beyond its reserve (H17).
    `hash_before`, `hash_after`: what the store knows at the batch's first and end index, where the batch lies before
    `committed`; None: nothing.
    """

    header: BatchHeader
    header_bytes: bytes
    token: Token | None
    now_s: float
    lease_until_s: float
    has_room: bool = True
    hash_before: bytes | None = None
    hash_after: bytes | None = None


@dataclass(frozen=True, slots=True)
class BatchCopied:
    """Master: a batch that the slave holds and this member doesn't, while the copies are made equal before a grant."""

    header: BatchHeader
    header_bytes: bytes


@dataclass(frozen=True, slots=True)
class Flushed:
    """Everything below `index` is kept here as durably as the link asks."""

    index: Index


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The disk refused a write; what was not flushed before is lost to this process."""

    reason: str


@dataclass(frozen=True, slots=True)
class PeerReady:
    """Master: the slave's stream is open, and both hold the same up to this position."""

    index: Index
    hash: bytes


@dataclass(frozen=True, slots=True)
class PeerConfirmed:
    """Master: the slave says that all below `index` is durable there, with this hash."""

    index: Index
    hash: bytes


@dataclass(frozen=True, slots=True)
class PeerGone:
    """Master: the slave's stream is broken."""

    reason: str


@dataclass(frozen=True, slots=True)
class SenderAway:
    """Master: nobody has had a stream to bring records for a while."""


@dataclass(frozen=True, slots=True)
class CommittedLearnt:
    """Slave: the master says that all below `index` is committed."""

    index: Index


@dataclass(frozen=True, slots=True)
class SealAsked:
    """A coordinator, or the member itself, closes the link."""

    chain_version: ChainVersion


@dataclass(frozen=True, slots=True)
class SealWritten:
    """The seal is on disk, behind all that was taken."""


Event = (
    Opened
    | BatchArrived
    | BatchCopied
    | Flushed
    | WriteFailed
    | PeerReady
    | PeerConfirmed
    | PeerGone
    | SenderAway
    | CommittedLearnt
    | SealAsked
    | SealWritten
)


# ---- effects -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Forward:
    """Pass the batch of this event to the slave, before storing it."""


@dataclass(frozen=True, slots=True)
class Store:
    """Write the batch of this event, with the position after it and what was committed by then, in one write."""

    first_index: Index
    position: Position
    committed_index: Index


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the sender that all below `index` is committed."""

    index: Index


@dataclass(frozen=True, slots=True)
class Confirm:
    """Slave: tell the master what is durable here."""

    index: Index
    hash: bytes


@dataclass(frozen=True, slots=True)
class TellCommitted:
    """Master: tell the slave, within milliseconds, also when nothing follows (H19)."""

    index: Index


@dataclass(frozen=True, slots=True)
class PushCommitted:
    """Readers may have what is below `index`."""

    index: Index


@dataclass(frozen=True, slots=True)
class Refuse:
    """End the stream that the event came from with this error; nothing behind it is taken."""

    error: SeriatimError


@dataclass(frozen=True, slots=True)
class EndStreams:
    """End every stream that brings or passes on records of this link."""

    error: SeriatimError


@dataclass(frozen=True, slots=True)
class DropPeer:
    """Master: the slave contradicts itself; end its stream."""

    error: SeriatimError


@dataclass(frozen=True, slots=True)
class LetPeerGo:
    """Master: close the slave's stream when it has been told all; it is opened again before the next record."""


@dataclass(frozen=True, slots=True)
class KeepRecord:
    """Write the link's record, flushed, before anything that is answered."""

    record: LinkRecord


@dataclass(frozen=True, slots=True)
class WriteSeal:
    """Write the link's record with the seal in it, flushed, behind all batches; then SealWritten."""

    record: LinkRecord


Effect = (
    Forward
    | Store
    | Acknowledge
    | Confirm
    | TellCommitted
    | PushCommitted
    | Refuse
    | EndStreams
    | DropPeer
    | LetPeerGo
    | KeepRecord
    | WriteSeal
)
