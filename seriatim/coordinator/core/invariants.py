"""What must hold of every chain document, and of every change of one (protocol.md 2), as far as the document shows it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from seriatim.coordinator.core import chain
from seriatim.protocol.chain import ChainDocument, Link, LinkState
from seriatim.protocol.errors import InvariantBroken
from seriatim.protocol.hashing import hash_after_link


def check(document: ChainDocument) -> None:
    """Raises InvariantBroken, naming all that doesn't hold of this document."""
    _raise(document, list(_broken(document)))


def check_change(before: ChainDocument, after: ChainDocument) -> None:
    """Raises InvariantBroken, naming all that this change must not do."""
    _raise(after, [*_broken(after), *_broken_by(before, after)])


def _raise(document: ChainDocument, broken: list[str]) -> None:
    if broken:
        raise InvariantBroken("; ".join(broken), queue=document.name)


def _broken(document: ChainDocument) -> Iterator[str]:
    yield from _broken_links(document)
    epochs = [link.epoch for link in document.links]
    if len(set(document.send_list)) != len(document.send_list):
        yield "6: a group is on the send list twice"
    for one in document.subscriptions:
        if any(epoch not in epochs for epoch in one.consume_list):
            yield f"5: {one.name}'s consume list names a link that is not in the chain"
        if list(one.consume_list) != sorted(set(one.consume_list)):
            yield f"5: {one.name}'s consume list is out of order"
    point_hash = document.dropped.chain_hash
    for link in document.links:
        certificate = link.certificate
        if certificate is None:
            break
        point_hash = hash_after_link(point_hash, link.epoch, certificate.end, certificate.link_hash)
        if certificate.chain_hash != point_hash:
            yield f"11: the chain's hash after link {link.epoch} doesn't follow from its certificate"


def _broken_links(document: ChainDocument) -> Iterator[str]:
    for link in document.links[:-1]:
        if link.state in chain.LIVE:
            yield f"1: link {link.epoch} is {link.state}, but not the last of the chain"
    last = document.last_link
    if last is not None and last.state in chain.LIVE and document.send_list[:1] != (last.group,):
        yield f"1: {last.group} has the live link {last.epoch}, but is not the head of the send list"
    for link in document.links:
        if (link.certificate is not None) != (link.state is LinkState.SEALED):
            yield f"4: link {link.epoch} is {link.state}, with{'out' if link.certificate is None else ''} a certificate"
    for one, other in pairwise(document.links):
        if one.epoch >= other.epoch:
            yield f"1: link {other.epoch} follows link {one.epoch}"
        if one.base is not None and one.end is not None and other.base is not None:
            is_gap_allowed = one.certificate is not None and one.certificate.is_abandoned
            end = one.base + one.end
            if other.base < end or (other.base > end and not is_gap_allowed):
                yield f"11: link {other.epoch} starts at offset {other.base}, link {one.epoch} ends at {end}"
    if document.links and document.links[-1].epoch >= document.next_epoch:
        yield "1: the next epoch was used already"


def _broken_by(before: ChainDocument, after: ChainDocument) -> Iterator[str]:
    if after.sender_token < before.sender_token:
        yield "7: the sender's token went back"
    if before.last_link is not None and before.last_link.state in chain.LIVE:
        yield from _broken_head(before.last_link, after)
    for link in before.links:
        now = after.link(link.epoch)
        if now is not None:
            yield from _broken_link(link, now, is_abandoning=len(after.abandoned) > len(before.abandoned))
    added = [link for link in after.links if link.epoch >= before.next_epoch]
    for link in added:
        if link.state is not LinkState.OPENING:
            yield f"2: link {link.epoch} was {link.state} as soon as it was listed (H13)"
    stayed = [group for group in before.send_list if group not in _left_by_ending(before, after)]
    kept = [group for group in after.send_list if group in stayed]
    if list(after.send_list[: len(kept)]) != kept or kept != [group for group in stayed if group in kept]:
        yield "6: a group came to the send list elsewhere than at its tail"
    yield from _broken_subscriptions(before, after, [link.epoch for link in added])


def _left_by_ending(before: ChainDocument, after: ChainDocument) -> set[str]:
    """Groups whose link ended by this change: they left the send list, and may have come back to its tail at once."""
    live = {link.epoch: link.group for link in before.links if link.state in chain.LIVE}
    return {live[link.epoch] for link in after.links if link.epoch in live and link.state not in chain.LIVE}


def _broken_head(live: Link, after: ChainDocument) -> Iterator[str]:
    """The end of a link and the send list change together (H24); its group may come back with the next link only."""
    now = after.link(live.epoch)
    has_ended = now is not None and now.state not in chain.LIVE
    if has_ended and after.last_link is now and live.group in after.send_list:
        yield f"1: link {live.epoch} ended, but {live.group} stayed on the send list (H24)"


def _broken_link(before: Link, after: Link, *, is_abandoning: bool) -> Iterator[str]:
    epoch = before.epoch
    if (before.group, before.master, before.slave) != (after.group, after.master, after.slave):
        yield f"1: link {epoch} changed its members"
    if before.base is not None and before.base != after.base:
        yield f"11: link {epoch} moved from offset {before.base} to {after.base}"
    if before.state in (LinkState.SEALED, LinkState.LOST) and after.state in chain.LIVE:
        yield f"4: link {epoch} was {before.state} and is {after.state}"
    one, other = before.certificate, after.certificate
    if one is None or other is None or other.is_abandoned:
        if one is not None and other is None:
            yield f"4: the certificate of link {epoch} is gone"
        return
    if (one.end, one.link_hash, one.answered) != (other.end, other.link_hash, other.answered):
        yield f"4: the recorded end of link {epoch} changed"
    if one.chain_hash is not None and one.chain_hash != other.chain_hash and not is_abandoning:
        yield f"4: the chain's hash after link {epoch} changed"


def _broken_subscriptions(before: ChainDocument, after: ChainDocument, added: list[int]) -> Iterator[str]:
    for one in before.subscriptions:
        now = next((other for other in after.subscriptions if other.subscription_id == one.subscription_id), None)
        if now is None:
            continue
        if now.generation < one.generation or now.reader_token < one.reader_token:
            yield f"7: the generation or the token of {one.name} went back"
        if now.generation > one.generation:
            continue
        listed = list(now.consume_list)
        missing = [epoch for epoch in added if epoch not in listed and not _is_empty(after, epoch)]
        if missing:
            yield f"2: links {missing} are not on {one.name}'s consume list"
        left = [epoch for epoch in one.consume_list if epoch not in listed]
        if any(not _has_ended(after, epoch) for epoch in left):
            yield f"5: {one.name} left links {left}, one of which isn't sealed"
        if any(epoch in listed and epoch < gone and not _is_empty(after, gone) for gone in left for epoch in listed):
            yield f"5: {one.name} left link {left} out of turn"


def _is_empty(document: ChainDocument, epoch: int) -> bool:
    return any(link.epoch == epoch and link.end == 0 for link in document.links)


def _has_ended(document: ChainDocument, epoch: int) -> bool:
    return all(link.state is LinkState.SEALED for link in document.links if link.epoch == epoch)
