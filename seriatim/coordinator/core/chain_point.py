"""What is known of a chain between two links: offset, hash and marks, each built on what comes before (protocol.md 5, certificates).

Once all before a link's end is known, its certificate says the same (`filled`), and nothing before it is looked at any more: a chain may
be long, and a switch asks this several times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from seriatim.protocol.chain import Certificate, ChainDocument, Link
from seriatim.protocol.hashing import hash_after_link
from seriatim.protocol.marks import merged
from seriatim.protocol.names import Epoch, Offset, beyond_abandoned


@dataclass(frozen=True, slots=True)
class ChainPoint:
    """The state of the chain between two links. `offset` and `chain_hash` are None while an earlier end is lost.

    `marks` are for readers, `marks_on_two` for senders; while an earlier end is lost they are lower bounds.
    """

    offset: Offset | None
    chain_hash: bytes | None
    marks: Mapping[str, int]
    marks_on_two: Mapping[str, int]

    @property
    def is_known(self) -> bool:
        return self.chain_hash is not None


def point_before(document: ChainDocument, epoch: Epoch) -> ChainPoint:
    """The state of the chain where link `epoch` starts; for the next epoch, where the chain ends now."""
    links: list[Link] = []
    for link in reversed(document.links):
        if link.epoch < epoch:
            links.append(link)
            if is_settled(link):
                break
    point = _first_point(document)
    for link in reversed(links):
        point = _point_after(point, link)
    return point


def points(document: ChainDocument) -> Iterator[tuple[Link, ChainPoint]]:
    """Each link, with the state of the chain where it starts."""
    point = _first_point(document)
    for link in document.links:
        yield link, point
        point = _point_after(point, link)


def _first_point(document: ChainDocument) -> ChainPoint:
    dropped = document.dropped
    return ChainPoint(dropped.offset, dropped.chain_hash, dropped.marks, dropped.marks_on_two)


def is_settled(link: Link) -> bool:
    """Whether all before its end is known (`filled`): then its certificate is the state of the chain there."""
    return link.certificate is not None and link.certificate.chain_hash is not None


def _point_after(point: ChainPoint, link: Link) -> ChainPoint:
    certificate = link.certificate
    if certificate is None:
        return ChainPoint(None, None, point.marks, merged(point.marks_on_two, link.marks_on_two))
    offset = None if link.base is None else _offset_after(link.base, certificate)
    if is_settled(link):
        return ChainPoint(offset, certificate.chain_hash, certificate.marks, certificate.marks_on_two)
    chain_hash = None
    if point.chain_hash is not None:
        chain_hash = hash_after_link(point.chain_hash, link.epoch, certificate.end, certificate.link_hash)
    return ChainPoint(
        offset,
        chain_hash,
        merged(point.marks, certificate.marks),
        merged(point.marks_on_two, certificate.marks_on_two),
    )


def _offset_after(base: Offset, certificate: Certificate) -> Offset:
    """Where the next link starts; behind an abandoned one, beyond any index that it can have had (H21)."""
    end = base + certificate.end
    if certificate.is_abandoned:
        return beyond_abandoned(end)
    return Offset(end)


def filled(document: ChainDocument) -> ChainDocument:
    """Bases, marks and chain hashes, as far as the ends before them are known (H20).

    A base once given stays: offsets never change (invariant 11). What is settled stays the same object.
    """
    point = _first_point(document)
    links = []
    for link in document.links:
        if is_settled(link):
            links.append(link)
            point = _point_after(point, link)
            continue
        base = point.offset if link.base is None else link.base
        known = replace(link, base=base, marks_on_two=merged(point.marks_on_two, link.marks_on_two))
        after = _point_after(point, known)
        if known.certificate is not None:
            certificate = replace(
                known.certificate, chain_hash=after.chain_hash, marks=after.marks, marks_on_two=after.marks_on_two
            )
            known = replace(known, certificate=certificate)
        links.append(known)
        point = after
    return replace(document, links=tuple(links))


def unsettled(link: Link) -> Link:
    """Something of the chain up to its end has changed: hash and marks there follow anew (`filled`)."""
    certificate = link.certificate
    return link if certificate is None else replace(link, certificate=replace(certificate, chain_hash=None))
