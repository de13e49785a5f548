"""The keys and values of a member's RocksDB; see `store` for what they are."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Final

from seriatim.broker_group.core.link_record import LinkKey
from seriatim.protocol.names import Epoch, Index, QueueId
from seriatim.protocol.position import Position

_POSITION: Final = struct.Struct(">QQ32s")
_COMPACT: Final = json.JSONEncoder(separators=(",", ":")).encode


def key(kind: bytes, link: LinkKey, number: int | None = None) -> bytes:
    """Of a link, or of what has this number in it; sorts by kind, queue, epoch, number."""
    name = kind + link[0].to_bytes(8, "big") + link[1].to_bytes(8, "big")
    return name if number is None else name + number.to_bytes(8, "big")


def all_of(kind: bytes, link: LinkKey, number: int | None = None) -> tuple[bytes, bytes]:
    """A link's, from this number on: the first key, and the first behind all; there is one also behind the last epoch that a message can name."""
    name = key(kind, link)
    return key(kind, link, number), (int.from_bytes(name, "big") + 1).to_bytes(len(name), "big")


def link_of(found: bytes) -> LinkKey:
    """Whose key it is."""
    return QueueId(int.from_bytes(found[1:9], "big")), Epoch(int.from_bytes(found[9:17], "big"))


def number_of(found: bytes) -> Index:
    """The number at the end of a key: of `B` and `P` an index."""
    return Index(int.from_bytes(found[-8:], "big"))


@dataclass(frozen=True, slots=True)
class StoredPosition:
    """A position, what was known to be committed when its batch was written, and the size of all batches before it."""

    position: Position
    committed_index: Index
    size_bytes: int


def encode_position(stored: StoredPosition) -> bytes:
    """The value of `P`, whose key says the index."""
    marks = _COMPACT(dict(stored.position.marks)).encode()
    return _POSITION.pack(stored.committed_index, stored.size_bytes, stored.position.hash) + marks


def decode_position(found: bytes, value: bytes) -> StoredPosition:
    """From a key and a value of `P`."""
    committed_index, size_bytes, digest = _POSITION.unpack_from(value)
    return StoredPosition(
        Position(number_of(found), digest, json.loads(value[_POSITION.size :])), Index(committed_index), size_bytes
    )
