"""Judges a chain offline, from the seal certificates and copies of what members hold (protocol.md 5, H20).

Nothing here asks anybody: the hash of each link is computed again over its batches, the chain's hash over the links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from seriatim.protocol.batch import parse
from seriatim.protocol.errors import SeriatimError
from seriatim.protocol.hashing import EMPTY_HASH, hash_after_batch, hash_after_link
from seriatim.protocol.names import Epoch, Index

StoredBatch = tuple[bytes, bytes]
"""Header and payload."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a certificate says of one link. Claims are given from the chain's first link on, without a gap."""

    epoch: Epoch
    base: int
    end: Index
    link_hash: bytes
    chain_hash: bytes


def problems(claims: Sequence[Claim], copies: Mapping[tuple[Epoch, str], Sequence[StoredBatch]]) -> list[str]:
    """What doesn't hold; empty where every copy is what the certificates say. `copies`: by epoch and who holds it."""
    found: list[str] = []
    chain_hash, base = EMPTY_HASH, 0
    for number, claim in enumerate(claims, 1):
        if claim.epoch != number:
            found.append(f"link {claim.epoch} stands where link {number} belongs")
        if claim.base != base:
            found.append(f"link {claim.epoch} starts at offset {claim.base}, the links before it end at {base}")
        chain_hash = hash_after_link(chain_hash, claim.epoch, claim.end, claim.link_hash)
        base += claim.end
        if claim.chain_hash != chain_hash:
            found.append(f"link {claim.epoch}: the chain's hash isn't that of the links")
    known = {claim.epoch: claim for claim in claims}
    for (epoch, holder), batches in copies.items():
        if epoch not in known:
            found.append(f"link {epoch} on {holder} has no certificate")
        else:
            found += [f"link {epoch} on {holder}: {what}" for what in _against(known[epoch], batches)]
    return found


def _against(claim: Claim, batches: Sequence[StoredBatch]) -> list[str]:
    link_hash, index = EMPTY_HASH, Index(0)
    for header_bytes, payload in batches:
        try:
            header = parse(header_bytes, payload).header
        except SeriatimError as error:
            return [f"the batch at {index} can't be read: {error.message}"]
        if header.first_index != index:
            return [f"a batch starts at {header.first_index}, the one before it ends at {index}"]
        index = header.end_index
        link_hash = hash_after_batch(link_hash, header_bytes)
    if index != claim.end:
        return [f"its batches end at {index}, its certificate says {claim.end}"]
    return [] if link_hash == claim.link_hash else ["its hash isn't the certificate's"]
