"""What readers, and who asks for a place, are answered by coordinators and members (protocol.md 6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from seriatim.broker_group import layout
from seriatim.broker_group.core import cursors, link_record
from seriatim.broker_group.core.link_record import LinkKey
from seriatim.consumer.core.view import ChainView
from seriatim.consumer.views import chain_view
from seriatim.protocol import batch
from seriatim.protocol.batch_streams import BatchMessage
from seriatim.protocol.chain import ChainDocument, ChainMember, Link, Subscription, Whose
from seriatim.protocol.errors import StaleCursor
from seriatim.protocol.names import Epoch, QueueId
from tests.simulation.disk import KEY, Disk
from tests.simulation.ledger import Ledger, Violation

JUDGED: Final = frozenset(
    ("AcquireRead", "CreateSubscription", "SeekSubscription", "DescribeQueue", "TellReader", "CommitCursor", "Fetch")
)
"""Calls of which an answer says something that has to be so."""


class Readings:
    """`disks`: every disk there ever was, by its id. `ledgers`: by queue. `documents`: the chains that ZooKeeper committed last; `lost`:
    newer ones, where it was set back.
    """

    def __init__(
        self,
        disks: Mapping[str, Disk],
        ledgers: Mapping[str, Ledger],
        documents: Mapping[str, ChainDocument],
        lost: Mapping[str, ChainDocument],
    ) -> None:
        self._disks = disks
        self._ledgers = ledgers
        self._documents = documents
        self._lost = lost
        self._named: dict[tuple[object, ...], tuple[int, int]] = {}
        self._cursors: dict[tuple[int, int, Whose], int] = {}
        """By queue, epoch and reader the furthest commit that was answered."""
        self._kept_at_first: dict[str, int] = {}
        self._granted: dict[tuple[int, int], tuple[tuple[int, int], tuple[int, int]]] = {}
        """By queue and subscription the newest grant: generation and token, and where it starts."""
        self._progress: dict[tuple[int, int], dict[tuple[int, int], tuple[int, int]]] = {}
        """By queue and subscription, and by a reader's generation and token, how far it was granted to begin, or asked to commit."""
        self._answered: dict[tuple[int, int], tuple[int, int]] = {}
        """By queue and subscription the newest reader to whom a commit was answered."""

    def recovered(self, queue_id: QueueId) -> None:
        """The chain goes on from a copy, which may lack the last notes of who lacks commits."""
        kept: tuple[dict[Any, Any], ...] = (self._cursors, self._granted, self._progress, self._answered)
        for known in kept:
            for key in [key for key in known if key[0] == queue_id]:
                del known[key]

    def _document(self, queue_id: int) -> ChainDocument | None:
        return next((one for one in self._documents.values() if one.queue_id == queue_id), None)

    def _newest(self, queue_id: int) -> ChainDocument | None:
        """Also where ZooKeeper has lost it: the one that members go by, for they do nothing by an older one."""
        lost = next((one for one in self._lost.values() if one.queue_id == queue_id), None)
        return lost or self._document(queue_id)

    def asked(self, path: str, request: Any) -> Any:
        """What `replied` is to know of how it was when this arrived.

        Of a subscription for which a reader asks where to read: its generation, and what was committed in it by then. Where
        somebody asks for a place: up to which offset records were told to be kept when the call first came, be it to another one.
        """
        match path.rpartition("/")[2]:
            case "AcquireRead":
                progress = self._ledgers[request.queue].progress[request.subscription]
                return (progress.subscription_id, progress.generation), progress.committed
            case "CommitCursor" if not request.is_relayed:
                whose, place = (request.generation, request.token), (request.link.epoch, request.index)
                self._note_progress(_reader(request), whose, place)
            case "CreateSubscription" | "SeekSubscription":
                return self._kept_at_first.setdefault(request.cause_id, self._last_kept(request.queue))
            case "DescribeQueue":
                return self._last_kept(request.queue)
        return None

    def _last_kept(self, queue: str) -> int:
        """The last offset of which somebody was told that it is kept."""
        return max(self._ledgers[queue].told, default=-1)

    def replied(self, method: str, request: Any, reply: Any, known: Any) -> None:
        """A coordinator or a member answered."""
        match method:
            case "AcquireRead":
                self._check_read_granted(request, reply, known)
                self._check_not_led_past(reply)
                self._note_granted(reply)
            case "CreateSubscription":
                self._check_position(request.queue, getattr(request, "from"), reply, known)
            case "SeekSubscription":
                self._check_position(request.queue, request.to, reply, known)
            case "DescribeQueue":
                self._check_latest(request.queue, chain_view(reply), known)
            case "TellReader":
                key, told = _told(request)
                self._named[key] = max(told, self._named.get(key, (0, 0)))
            case "CommitCursor" if not request.is_copied:  # else it is what the other member holds, by whomever
                self._check_reader(method, request)
                if not request.is_relayed:
                    self._check_kept_cursor(request)
                    self._check_newest(request)
                    key, whose = _reader(request), (request.generation, request.token)
                    self._answered[key] = max(whose, self._answered.get(key, (0, 0)))
            case "Fetch":
                self._check_fetched(request.open, reply)

    def refused(self, method: str, request: Any, details: str) -> None:
        """A coordinator or a member answered with an error: that it gives no cursor says that it remembers who reads."""
        if method == "TellReader" and StaleCursor.code in details:
            key, told = _told(request)
            life = *key, request.link.to.start
            self._named[life] = max(told, self._named.get(life, (0, 0)))

    # ---- what is served

    def _check_fetched(self, request: Any, reply: Any) -> None:
        is_batch = isinstance(reply, BatchMessage)
        if is_batch:
            self._check_committed(request.link, reply)
        if request.subscription_id and (is_batch or reply.WhichOneof("kind") == "start"):
            self._check_reader("Fetch", request)

    def _check_reader(self, method: str, request: Any) -> None:
        """Whoever was named to a member as the reader, nobody older is served."""
        key, asked = _told(request)
        named = max(self._named.get(one, (0, 0)) for one in (key, (*key, request.link.to.start)))
        if asked < named:
            link = request.link
            raise Violation(
                f"7: {link.to.disk_id} answers {method} of epoch {link.epoch} to generation and token {asked}, "
                f"and was told of {named}"
            )

    def _check_committed(self, name: Any, message: BatchMessage) -> None:
        """What a reader is sent is committed: it lies below the link's end, or both disks have it."""
        header = message.following[-1][0] if message.following else message.header
        end = batch.decode_header(header).end_index
        document = self._newest(name.queue_id)
        link = None if document is None else document.link(name.epoch)
        if link is None or link.end is not None:
            return  # its members see to the end, or, by a newer chain than there is now, have let it go
        position = KEY.pack(b"P", name.queue_id, name.epoch, end)
        for side in (link.master, link.slave):
            disk = self._disks.get(side.incarnation.disk_id)
            if disk is not None and not _is_forgiven(disk, link) and position not in disk.table.values:
                raise Violation(f"8: epoch {link.epoch} is read up to {end}, which {side.name} doesn't have")

    # ---- what is committed

    def written(self, before: ChainDocument | None, document: ChainDocument) -> None:
        """The chain was written; with it a note may have been taken back."""
        if before is not None and before.stale_cursors != document.stale_cursors:
            self.check_cursors(document)

    def _check_kept_cursor(self, request: Any) -> None:
        """A commit that is answered is on both disks, or it is noted that the other member may lack it (H7)."""
        name, whose = request.link, (request.subscription_id, request.generation)
        document = self._newest(name.queue_id)
        link = None if document is None else document.link(name.epoch)
        if document is None or link is None or whose not in [one.whose for one in document.readers_of(link.epoch)]:
            return  # it was drained, let go, deleted or sought meanwhile
        key = name.queue_id, name.epoch, whose
        self._cursors[key] = max(request.index, self._cursors.get(key, 0))
        for side in (link.master, link.slave):
            disks = self._disks_of(side)
            if disks[-1].disk_id == name.to.disk_id or not _is_noted(document, link, side, whose):
                self._check_cursor(disks, (name.queue_id, name.epoch), whose)  # it may just have been replaced

    def _check_cursor(self, disks: Sequence[Disk], key: LinkKey, whose: Whose) -> None:
        """All that was answered of these commits is on one of these disks of a member."""
        committed = self._cursors.get((*key, whose), 0)
        kept = [_cursor(disk, key, whose) for disk in disks]
        if max(kept) < committed:
            raise Violation(f"6: {key[1]}:{committed} is committed, {disks[-1].disk_id} has {kept[-1]}")

    def _check_sound(self, document: ChainDocument, link: Link, side: ChainMember, whose: Whose) -> None:
        """A member whose cursors count has all that was answered."""
        disk, key = self._disks_of(side)[-1], (document.queue_id, link.epoch)
        value = disk.durable.values.get(layout.key(b"L", key))
        is_used = value is not None and not link_record.decode(value).lacks_of(whose)
        if is_used and not _is_noted(document, link, side, whose):
            self._check_cursor((disk,), key, whose)

    def check_cursors(self, document: ChainDocument) -> None:
        """A note may have been taken back, or a disk have said that it lacks nothing more."""
        if any(one.queue_id == document.queue_id for one in self._lost.values()):
            return  # by a chain that was set back nobody reads
        for one in document.subscriptions:
            for epoch in one.consume_list:
                link = document.link(epoch)
                if link is not None and (document.queue_id, epoch, one.whose) in self._cursors:
                    for side in (link.master, link.slave):
                        self._check_sound(document, link, side, one.whose)

    def has_cursors(self, queue_id: QueueId, link: Link, subscription: Subscription, index: int) -> bool:
        """Whether both members have a cursor that is as far as this."""
        key, disks = (queue_id, link.epoch), [self._disks_of(side)[-1] for side in (link.master, link.slave)]
        return all(_cursor(disk, key, subscription.whose) >= index for disk in disks)

    def _disks_of(self, side: ChainMember) -> list[Disk]:
        """All that this member ever had; the last one is there now."""
        return [disk for disk_id, disk in self._disks.items() if disk_id.startswith(f"{side.name}.")]

    # ---- where a reader starts

    def _check_read_granted(self, request: Any, reply: Any, known: tuple[tuple[int, int], tuple[int, int]]) -> None:
        """No grant starts before what was committed when the reader asked (H7)."""
        progress, grant = self._ledgers[request.queue].progress[request.subscription], reply.grant
        is_of_it = (
            (grant.subscription_id, grant.generation) == (progress.subscription_id, progress.generation) == known[0]
        )
        if reply.WhichOneof("kind") != "grant" or not grant.epoch or not is_of_it:
            return  # 0: there is nothing to read
        committed = min(known[1], progress.committed)
        if (grant.epoch, grant.index) < committed:
            raise Violation(
                f"6: {request.subscription} is granted {grant.epoch}:{grant.index}, committed is {committed}"
            )

    def _note_granted(self, reply: Any) -> None:
        grant = reply.grant
        if reply.WhichOneof("kind") == "grant" and grant.epoch:
            key, whose = (reply.queue_id, grant.subscription_id), (grant.generation, reply.token)
            place = grant.epoch, grant.index
            if whose >= self._granted.get(key, ((0, 0), (0, 0)))[0]:
                self._granted[key] = whose, place
            self._note_progress(key, whose, place)

    def _note_progress(self, key: tuple[int, int], whose: tuple[int, int], place: tuple[int, int]) -> None:
        of = self._progress.setdefault(key, {})
        of[whose] = max(place, of.get(whose, (0, 0)))

    def _check_not_led_past(self, reply: Any) -> None:
        """Behind a reader to whom a commit was answered nobody starts, nor goes on, further than one from that on has come."""
        grant = reply.grant
        if reply.WhichOneof("kind") != "grant" or not grant.epoch:
            return
        key, whose = (reply.queue_id, grant.subscription_id), (grant.generation, reply.token)
        first = self._answered.get(key, (0, 0))
        if first[0] != whose[0] or first > whose:
            return
        came = [place for of, place in self._progress.get(key, {}).items() if first <= of <= whose]
        if not came:
            return  # that commit was under way when the chain was recovered
        furthest = max(came)
        document = self._document(reply.queue_id)
        link = None if document is None else document.link(Epoch(furthest[0]))
        certificate = None if link is None else link.certificate
        is_read = certificate is None or furthest[1] >= certificate.end or certificate.is_abandoned
        if grant.epoch > furthest[0] and is_read:
            return
        if (grant.epoch, grant.index) > furthest:
            raise Violation(
                f"7: {whose} is granted {grant.epoch}:{grant.index}, and nobody since {first} has come beyond {furthest}"
            )

    def _check_newest(self, request: Any) -> None:
        """No commit is answered that counts beyond what a newer reader was granted."""
        whose, start = self._granted.get((request.link.queue_id, request.subscription_id), ((0, 0), (0, 0)))
        asked, place = (request.generation, request.token), (request.link.epoch, request.index)
        if asked[0] == whose[0] and asked < whose and place > start:
            raise Violation(f"7: {asked} is answered that {place} is committed, {whose} was granted {start}")

    def commits_of_the_next(self) -> Callable[[], bool]:
        """Whether, from now on, a commit was answered to a newer reader than before."""
        before = dict(self._answered)
        return lambda: any(whose > before.get(key, (0, 0)) for key, whose in self._answered.items())

    def _check_position(self, queue: str, where: str, view: Any, kept: int) -> None:
        """A subscription stands before the first record at or behind where it was put, and behind all that lies before that."""
        document = next((one for one in self._documents.values() if one.name == queue and not one.is_deleted), None)
        link = None if document is None else document.link(view.position_epoch)
        if document is None or (link is not None and link.base is None):
            return
        before = [one for one in document.links if one.epoch < view.position_epoch]
        if any(one.base is None or one.end is None for one in before):
            return
        ends = [one.base + one.end for one in before if one.base is not None and one.end is not None]
        end = max(ends, default=document.dropped.offset)
        at = (end if link is None or link.base is None else link.base) + view.position_index
        if where == "latest":
            behind = end if link is None or link.base is None else link.base + self._stored(document, link)
            is_there = kept < at <= behind or bool(self._ledgers[queue].given_up)
        elif where in ("", "earliest"):
            is_there = view.position_index == 0 and end == document.dropped.offset
        else:
            is_there = at == int(where) or (view.position_index == 0 and end <= int(where) < at)
        if not is_there:
            place = f"{view.position_epoch}:{view.position_index}, offset {at}"
            raise Violation(f"9: {view.subscription} is put at {where or 'earliest'}, and stands at {place}")

    def _stored(self, document: ChainDocument, link: Link) -> int:
        """How far a link reaches: to its end, or as far as both disks have it."""
        if link.end is not None:
            return link.end
        first, end = (KEY.pack(b"P", document.queue_id, link.epoch, index) for index in (0, (1 << 64) - 1))
        disks = [self._disks[side.incarnation.disk_id] for side in (link.master, link.slave)]
        keys = [disk.table.between(first, end)[-1:] for disk in disks if not _is_forgiven(disk, link)]
        return min((layout.number_of(key[0]) if key else 0 for key in keys), default=(1 << 64) - 1)

    def _check_latest(self, queue: str, view: ChainView, kept: int) -> None:
        """Where the end of a queue is said to be known, all that was told to be kept when it was asked for lies before it; in any case
        it isn't beyond what both disks have.
        """
        given_up = self._ledgers[queue].given_up
        if view.is_latest_known and view.latest <= kept and not given_up and not view.is_deleted:
            raise Violation(f"9: the end is told to be {view.latest}, and {kept} was told to be kept")
        document, last = self._document(view.queue_id), view.links[-1] if view.links else None
        link = None if document is None or last is None else document.link(last.epoch)
        if document is None or link is None or link.base is None or given_up:
            return
        if any(one.queue_id == view.queue_id for one in self._lost.values()):
            return  # by the chain that is lost a disk may have let this link go
        behind = link.base + self._stored(document, link)
        if view.latest > behind:
            raise Violation(f"9: the end is told to be {view.latest}, and both disks have up to {behind}")


def _is_forgiven(disk: Disk, link: Link) -> bool:
    """Whether it may lack what it had, as the link's durability allows."""
    return disk.has_forgotten and not link.durability.survives_restart


def _cursor(disk: Disk, key: LinkKey, whose: Whose) -> int:
    """0: none is flushed here."""
    value = disk.durable.values.get(layout.key(b"C", key, whose[0]))
    kept = None if value is None else cursors.decode(value)
    return 0 if kept is None or kept.generation != whose[1] else kept.index or 0


def _is_noted(document: ChainDocument, link: Link, side: ChainMember, whose: Whose) -> bool:
    """Whether the chain says that this member may lack commits of theirs."""
    note = document.stale_note(link.epoch, side.name.member)
    return note is not None and whose in note.of


def _reader(request: Any) -> tuple[int, int]:
    """By queue and subscription."""
    return request.link.queue_id, request.subscription_id


def _told(request: Any) -> tuple[tuple[object, ...], tuple[int, int]]:
    """On which disk, of which link, and whose; generation and token."""
    link = request.link
    return (link.to.disk_id, link.queue_id, link.epoch, request.subscription_id), (request.generation, request.token)
