"""Looks at the members' disks: what they keep of links only ever moves forward, no crash tears it apart, and a group is
listed again only with all of it (protocol.md 2, invariants 1, 3 and 6).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from seriatim.broker_group.core import link_record
from seriatim.broker_group.core.link_record import LinkRecord
from seriatim.broker_group.writer import Write
from seriatim.coordinator.core.registry import Registry
from seriatim.protocol.chain import ChainDocument, ChainMember, Link, LinkState, Readmit
from seriatim.protocol.names import Incarnation, QueueId
from seriatim.protocol.registration import Registration
from tests.simulation.disk import Disk, Table
from tests.simulation.loop import SimulatedLoop

_RECORD = ord("L")
"""How the key of a link's record begins."""
REMEMBERED_S = 30.0
"""So old may what a coordinator decided on be when its write arrives: it was paused, or cut off."""


@dataclass(frozen=True)
class Vouched:
    """A coordinator found a group fit to be listed again: when, and what the registry said of its members."""

    at_s: float
    incarnations: tuple[Incarnation, ...]
    obstacle: str


class Holdings:
    """`tell`: is given what doesn't hold. `disks`: every disk there ever was, by its id."""

    def __init__(
        self,
        loop: SimulatedLoop,
        disks: Mapping[str, Disk],
        documents: Mapping[str, ChainDocument],
        tell: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._disks = disks
        self._documents = documents
        self._tell = tell
        self.registered: Callable[[str], list[Registration]] = lambda _: []
        """The members of a group that are registered now."""
        self._vouched: dict[tuple[QueueId, str], list[Vouched]] = defaultdict(list)

    def _document(self, queue_id: QueueId) -> ChainDocument | None:
        return next((one for one in self._documents.values() if one.queue_id == queue_id), None)

    # ---- what is written of a link

    def written(self, disk: Disk, write: Write) -> bool:
        """A member is about to write this; what was there before is still there. Whether a link's record is among it."""
        has_record = False
        for key, value in write.puts:
            if key[0] == _RECORD:
                has_record = True
                before = disk.table.values.get(key)
                after = link_record.decode(value)
                self._check_record(disk, None if before is None else link_record.decode(before), after)
        return has_record

    def _check_record(self, disk: Disk, before: LinkRecord | None, after: LinkRecord) -> None:
        where = f"{disk.disk_id} and link {after.epoch}"
        if before is not None:
            went_back = [
                name
                for name, was, now in (
                    ("its opening", before.opened_start, after.opened_start),
                    ("its seal", before.is_sealed, after.is_sealed),
                    ("its end", before.end is not None, after.end is not None),
                    ("the sender's token", before.token, after.token),
                    ("the chain's version", before.chain_version, after.chain_version),
                )
                if now < was
            ]
            if went_back:
                self._tell(f"4: {where}: {' and '.join(went_back)} is written over")
        if after.opened_start and not (before is not None and before.opened_start):
            self._check_opened(disk, after)

    def _check_opened(self, disk: Disk, record: LinkRecord) -> None:
        document = self._document(record.queue_id)
        if document is None or record.epoch < document.dropped.epoch:
            return
        link = document.link(record.epoch)
        me = Incarnation(disk.disk_id, record.opened_start)
        sides: tuple[ChainMember, ...] = () if link is None else (link.master, link.slave)
        if me not in [side.incarnation for side in sides]:
            self._tell(f"1: {me} opened link {record.epoch}, which the chain doesn't have for it")

    # ---- what a crash leaves

    def crashed(self, disk: Disk) -> None:
        """A process died: each batch must have its position behind it, and each position its batch before it."""
        starts: dict[bytes, list[int]] = defaultdict(list)
        ends: dict[bytes, list[int]] = defaultdict(list)
        for kind, found in ((b"B", starts), (b"P", ends)):
            for key in disk.keys(kind):
                found[key[1:17]].append(int.from_bytes(key[17:], "big"))
        for link in starts.keys() | ends.keys():
            behind = [0, *ends[link]]
            if starts[link] != behind[:-1]:
                epoch = int.from_bytes(link[8:], "big")
                self._tell(
                    f"3: {disk.disk_id} has batches of link {epoch} at {starts[link]}, positions at {ends[link]}"
                )

    # ---- who is listed again

    def vouched(self, document: ChainDocument, registry: Registry, groups: tuple[str, ...]) -> None:
        """A coordinator is about to list these groups again, by this document and this registry."""
        for group in groups:
            state = registry.group(group)
            obstacle = ""
            for place in "ab":
                member, other = state.members.get(place), state.members.get("b" if place == "a" else "a")
                if member is None or other is None:
                    obstacle = f"{group}-{place} isn't registered"
                elif not member.is_in_sync_with(document.queue_id):
                    obstacle = f"{group}-{place} doesn't say that it is in sync"
                elif member.peer != other.incarnation:
                    obstacle = f"{group}-{place} isn't connected to its peer"
            incarnations = tuple(member.incarnation for member in state.members.values())
            self._vouched[document.queue_id, group].append(Vouched(self._loop.now_s, incarnations, obstacle))

    def changed(self, before: ChainDocument | None, after: ChainDocument) -> None:
        """The chain was written: whoever is listed again must hold all of the group's links, and no backlog."""
        if before is None:
            return
        self._check_claims(before, after)
        for group in _entering(before, after):
            vouched = self._vouched.pop((after.queue_id, group), [])
            recent = [one for one in vouched if one.at_s > self._loop.now_s - REMEMBERED_S]
            obstacles = [one.obstacle or self._lacking(after, group, one.incarnations) for one in recent]
            if "" not in obstacles:
                self._tell(f"6: {group} is listed again: {obstacles[-1] if obstacles else 'nobody looked at it'}")
            unread = [link.epoch for link in after.links if link.group == group and link.epoch < before.next_epoch]
            listed = {epoch for one in after.subscriptions for epoch in one.consume_list}
            if after.settings.readmit is Readmit.DRAINED and listed.intersection(unread):
                self._tell(f"6: {group} is listed again with unread links {sorted(listed.intersection(unread))}")

    def _check_claims(self, before: ChainDocument, after: ChainDocument) -> None:
        """Who says that it is in sync holds what ends now; a process that served the link is told its end at once.

        Nobody waits with that for a lost link.
        """
        lost = {link.epoch for link in before.links if link.state is LinkState.LOST}
        ended = [link for link in after.links if link.certificate is not None and link.epoch not in lost]
        known = {link.epoch for link in before.links if link.certificate is not None}
        for link in ended:
            for one in self.registered(link.group) if link.epoch not in known else ():
                is_side = one.incarnation in (link.master.incarnation, link.slave.incarnation)
                is_claimed = one.is_in_sync_with(after.queue_id) and not is_side
                if is_claimed and link in _missing(after, link.group, self._table(one.incarnation)):
                    self._tell(f"6: {one.incarnation} says that it is in sync, and lacks link {link.epoch}")

    def _table(self, incarnation: Incarnation) -> Table:
        return self._disks[incarnation.disk_id].table

    def _lacking(self, document: ChainDocument, group: str, incarnations: tuple[Incarnation, ...]) -> str:
        for incarnation in incarnations:
            for link in _missing(document, group, self._table(incarnation)):
                return f"{incarnation} lacks link {link.epoch}, or a part of it"
        return ""


def _entering(before: ChainDocument, after: ChainDocument) -> list[str]:
    """Groups that the change puts at the tail: new on the list, or whose link it ended."""
    still = {
        link.epoch: link.state.value for link in before.links if link.state.value in ("opening", "open", "closing")
    }
    ended = {link.group for link in after.links if link.epoch in still and link.state.value in ("sealed", "lost")}
    return [group for group in after.send_list if group not in before.send_list or group in ended]


def _missing(document: ChainDocument, group: str, table: Table) -> Iterator[Link]:
    for link in document.links:
        certificate = link.certificate
        if link.group != group or certificate is None or certificate.is_abandoned or certificate.end == 0:
            continue
        key = b"P" + b"".join(one.to_bytes(8, "big") for one in (document.queue_id, link.epoch, certificate.end))
        value = table.values.get(key)
        if value is None or value[16:48] != certificate.link_hash:
            yield link
