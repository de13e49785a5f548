"""What a member keeps durably of a link, beside the batches, their positions and the cursors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from seriatim.protocol.chain import Durability, Whose, whose_from
from seriatim.protocol.errors import IncompatibleVersion, Sealed
from seriatim.protocol.names import ChainVersion, Epoch, Incarnation, Index, QueueId, Token

LinkKey = tuple[QueueId, Epoch]


class Role(StrEnum):
    """copy: this disk holds the link's records without having been opened for it (a blank disk that resynced)."""

    MASTER = "master"
    SLAVE = "slave"
    COPY = "copy"


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """One link on one disk.

    `role`, `durability`, `flush_ms` and the incarnations never change once the link was opened; `max_record_bytes` only rises.
    `start_marks`: up to which two members hold every record from before the link (H2).
    `token`: newest sender that may append. `chain_version`: newest version that a coordinator named (H12).
    `opened_start`: the start of this process in which it was opened; 0: never.
    `is_sealed`: takes no more records, for good. `is_whole`: can't have lost what it acknowledged (protocol.md 5.2).
    `end`, `end_hash`: as recorded in the chain; None before. `is_abandoned`: kept aside, nothing is cut (H21).
    `lacks`: whose commits may be missing here: nobody's, where this disk had the link from its start or took the cursors
    by resync, else theirs who read it when this disk was first compared with the chain; None: not compared yet (H7).
    Invariant: `end` is not None implies `is_sealed`.
    """

    queue_id: QueueId
    epoch: Epoch
    queue: str = ""
    role: Role = Role.COPY
    durability: Durability = Durability.SYNC
    flush_ms: int = 0
    max_record_bytes: int = 0
    peer: Incarnation | None = None
    start_marks: Mapping[str, int] = field(default_factory=dict)
    token: Token = Token(0)
    chain_version: ChainVersion = ChainVersion(0)
    opened_start: int = 0
    is_sealed: bool = False
    is_whole: bool = True
    end: Index | None = None
    end_hash: bytes = b""
    is_abandoned: bool = False
    lacks: tuple[Whose, ...] | None = None

    @property
    def key(self) -> LinkKey:
        return self.queue_id, self.epoch

    @property
    def ending(self) -> tuple[Index | None, bytes, bool]:
        """How the chain says that it ends: where, by which hash, and whether what lies beyond was given up."""
        return self.end, self.end_hash, self.is_abandoned

    @property
    def named(self) -> dict[str, object]:
        """What an error, or a line of the log, says of which link it is."""
        return {"queue": self.queue, "epoch": self.epoch}

    @property
    def has_cursors(self) -> bool:
        """Every commit that counts is here."""
        return self.lacks == ()

    @property
    def lacks_cursors(self) -> bool:
        """Whether a commit may be missing here. An empty link has none to miss: often neither member ever opened it."""
        return not self.has_cursors and self.end != 0

    def lacks_of(self, whose: Whose) -> bool:
        """Whether a commit of theirs may be missing here. Who came to the link, or was sought, since then has all here."""
        return self.lacks is None or whose in self.lacks


def sealed_error(record: LinkRecord) -> Sealed:
    """For whoever brings records, or asks to bring some, behind the seal."""
    return Sealed("this link takes no more records", **record.named)


def encode(record: LinkRecord) -> bytes:
    """JSON of a record. `lacks` is written where it says more than `has_cursors`, which is all that earlier versions know."""
    content: dict[str, Any] = {one.name: getattr(record, one.name) for one in fields(record)}
    content["has_cursors"] = record.has_cursors
    if not record.lacks:
        del content["lacks"]
    content["peer"] = None if record.peer is None else [record.peer.disk_id, record.peer.start]
    content["start_marks"] = dict(record.start_marks)
    content["end_hash"] = record.end_hash.hex()
    return json.dumps(content, separators=(",", ":")).encode()


def decode(data: bytes) -> LinkRecord:
    """Read what `encode` wrote. Raises IncompatibleVersion for what a newer version did."""
    try:
        content = json.loads(data)
        peer = content["peer"]
        lacks = () if content.pop("has_cursors") else content.get("lacks")
        return LinkRecord(
            **content
            | {
                "lacks": None if lacks is None else whose_from(lacks),
                "role": Role(content["role"]),
                "durability": Durability(content["durability"]),
                "peer": None if peer is None else Incarnation(*peer),
                "end_hash": bytes.fromhex(content["end_hash"]),
            }
        )
    except (KeyError, TypeError, ValueError) as error:
        raise IncompatibleVersion(
            f"a link's record on this disk holds what this version doesn't know ({error}): "
            "start the version that wrote it, or a newer one"
        ) from error
