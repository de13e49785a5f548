"""The running hash of a link, and of the chain.

The hash of a link runs over the headers of its batches in order; each header holds the crc32c of its payload. The
chain's hash is H(chain's hash before, epoch, end, link's hash), so a link's hash doesn't need what comes before
it (H20). SHA-256, 32 bytes.
"""

from __future__ import annotations

import hashlib
import struct

from seriatim.protocol.names import Epoch, Index

EMPTY_HASH = bytes(32)
"""Hash of a link without batches, and of a chain without links."""

_LINK = struct.Struct("<QQ")


def hash_after_batch(before: bytes, header_bytes: bytes) -> bytes:
    """Running hash of a link after one more batch."""
    return hashlib.sha256(before + header_bytes).digest()


def hash_after_link(before: bytes, epoch: Epoch, end: Index, link_hash: bytes) -> bytes:
    """Hash of the chain after one more link."""
    return hashlib.sha256(before + _LINK.pack(epoch, end) + link_hash).digest()
