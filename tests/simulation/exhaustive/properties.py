"""The invariants of protocol.md 2, as far as a state shows them. Each function raises AssertionError with the invariant's number.

Those of the chain document and its changes (1, 2, 4, 5, 6, 11) are `coordinator.core.invariants`, run at every write.
"""

from __future__ import annotations

from seriatim.broker_group.core.replica import SealPhase
from seriatim.coordinator.core.events import SendGrant
from seriatim.protocol.chain import ChainDocument, ChainMember, Link, LinkState
from seriatim.protocol.names import Epoch
from tests.simulation.exhaustive.parts import PLACES, Entry, Group, Member
from tests.simulation.exhaustive.senders import seq_of

Groups = tuple[Group, Group]


def check_grant(document: ChainDocument, groups: Groups, grant: SendGrant) -> None:
    """A sender is about to learn of a link (invariants 1, 2; H3, H13)."""
    link = document.link(grant.link.epoch)
    if link is None or link.state is LinkState.OPENING:
        raise AssertionError(f"H13: link {grant.link.epoch} is granted, and may still be counted as never granted")
    for one in document.subscriptions:
        if link.epoch not in one.consume_list and link.state is not LinkState.SEALED:
            raise AssertionError(f"2: link {link.epoch} is granted, and isn't on the consume list of {one.name}")
    if link.state is not LinkState.OPEN or grant.token != document.sender_token:
        return  # whoever gets it will be refused
    for member, side in _sides(link, groups):
        kept = _kept(member, side, int(link.epoch))
        if kept is not None and grant.next_index not in (0, *(one.position.content.index for one in kept)):
            raise AssertionError(f"H3: granted at {grant.next_index}, which {member.name} doesn't have on disk")
    _check_equal(link, groups, grant.next_index)


def check(
    document: ChainDocument,
    groups: Groups,
    acknowledged: tuple[tuple[int, int], ...],
    complete: tuple[int, ...],
    *,
    is_log: bool,
) -> None:
    """What must hold in every state."""
    _check_opened(document, groups)
    promised = dict(acknowledged)
    delivered: list[int] = []
    for link in document.links:
        index = promised.get(int(link.epoch), 0)
        if link.end is None:
            _check_copies(link, groups, index)
            continue
        if link.end < index:
            raise AssertionError(f"4: link {link.epoch} was sealed at {link.end}, and {index} was acknowledged")
        delivered = _with_rows(delivered, _copy_at_end(link, groups))
    readable, doubled = delivered, set()
    for link in document.links:
        on_both = _on_both(link, groups)
        doubled |= {seq_of(entry.batch.content) for entry in on_both}
        if link.end is None:
            readable = _with_rows(readable, on_both)
    if not doubled.issuperset(complete):
        raise AssertionError(
            f"3: {complete} are complete for their sender, but only {sorted(doubled)} are on two members"
        )
    if not set(complete).issubset(readable):
        raise AssertionError(f"8: {complete} are complete for their sender, but only {readable} are delivered")
    if is_log and delivered != list(range(1, len(delivered) + 1)):
        raise AssertionError(f"9: {delivered} are delivered, in this order")


def check_closed(document: ChainDocument, reported: tuple[int, ...]) -> None:
    """Where no member can fail, only what a sender reported is closed (H12)."""
    for link in document.links:
        if link.state not in (LinkState.OPENING, LinkState.OPEN) and link.epoch not in reported:
            raise AssertionError(f"H12: link {link.epoch} is {link.state}, and its sender never said that it failed")


def _check_opened(document: ChainDocument, groups: Groups) -> None:
    for group in groups:
        for member in group.members:
            for runner in member.runners:
                if runner.replica.content.phase is SealPhase.OPEN:
                    _check_known(document.link(Epoch(runner.epoch)), member, runner.epoch)


def _check_known(link: Link | None, member: Member, epoch: int) -> None:
    if link is None:
        raise AssertionError(f"1: {member.name} has an open link {epoch}, which isn't in the chain (H23)")
    side = link.side(PLACES[member.place])
    if side is None or side.name.group != member.name[:2] or side.incarnation != member.incarnation:
        raise AssertionError(f"1: {member.name} has an open link {epoch}, which was made for another (H25)")


def _sides(link: Link, groups: Groups) -> list[tuple[Member, ChainMember]]:
    members = groups[int(link.group[1:]) - 1].members
    found = [(member, link.side(PLACES[member.place])) for member in members]
    return [(member, side) for member, side in found if side is not None]


def _kept(member: Member, side: ChainMember, epoch: int) -> tuple[Entry, ...] | None:
    """What this side's disk has flushed; None where that disk is lost."""
    is_there = member.incarnation.disk_id == side.incarnation.disk_id and not member.comes_blank
    return member.link(epoch).entries if is_there else None


def _check_copies(link: Link, groups: Groups, index: int) -> None:
    """What was acknowledged is flushed on both members, as long as their disks live (invariant 3)."""
    if not index:
        return
    for member, side in _sides(link, groups):
        kept = _kept(member, side, int(link.epoch))
        if kept is not None and (kept[-1].position.content.index if kept else 0) < index:
            raise AssertionError(
                f"3: {index} was acknowledged in link {link.epoch}, and {member.name} hasn't flushed it"
            )
    _check_equal(link, groups, index)


def _check_equal(link: Link, groups: Groups, index: int) -> None:
    hashes = set()
    for member, side in _sides(link, groups):
        for entry in _kept(member, side, int(link.epoch)) or ():
            if entry.position.content.index == index:
                hashes.add(entry.position.content.hash)
    if len(hashes) > 1:
        raise AssertionError(f"9: two contents before index {index} of link {link.epoch}")


def _copy_at_end(link: Link, groups: Groups) -> tuple[Entry, ...]:
    """A strict reader takes a copy that holds exactly what the certificate names (invariants 4, 8, 11)."""
    certificate = link.certificate
    if certificate is None or certificate.end == 0:
        return ()
    for member, side in _sides(link, groups):
        kept = _kept(member, side, int(link.epoch)) or ()
        below = tuple(one for one in kept if one.position.content.index <= certificate.end)
        if below and below[-1].position.content.hash == certificate.link_hash:
            return below
    raise AssertionError(f"8: no member holds what link {link.epoch} was sealed with, up to {certificate.end}")


def _on_both(link: Link, groups: Groups) -> tuple[Entry, ...]:
    """What is flushed on both members, below the end; a disk that is lost counts as if it had everything."""
    copies = [_kept(member, side, int(link.epoch)) for member, side in _sides(link, groups)]
    alive = [copy for copy in copies if copy is not None]
    if not alive:
        return ()
    common = alive[0][: min(len(copy) for copy in alive)]
    return tuple(one for one in common if link.end is None or one.position.content.index <= link.end)


def _with_rows(delivered: list[int], entries: tuple[Entry, ...]) -> list[int]:
    """What a reader hands out: a record at or below its source's mark is a re-send (protocol.md 6)."""
    rows = list(delivered)
    for entry in entries:
        seq = seq_of(entry.batch.content)
        if not rows or seq > rows[-1]:
            rows.append(seq)
    return rows
