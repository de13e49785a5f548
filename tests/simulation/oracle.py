"""Looks at everything from outside, after every step that can matter, and says what must not be (protocol.md 2).

It knows the disks, what ZooKeeper committed, and what members and coordinators answered; it shares no state with the code that
it judges, and asks none of it. What senders were told and readers were handed is in the `ledger`, the checks at the end are the `verdict`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from seriatim.broker_group.core import replica_events
from seriatim.broker_group.core.link_record import LinkRecord
from seriatim.broker_group.core.replica import Replica
from seriatim.consumer.core.view import ChainView
from seriatim.consumer.views import chain_view
from seriatim.coordinator.core import invariants
from seriatim.protocol import chain_json
from seriatim.protocol.batch_streams import BatchMessage
from seriatim.protocol.chain import ChainDocument, Durability, Link, LinkState
from seriatim.protocol.errors import RecordTooLarge, SeriatimError
from seriatim.protocol.marks import merged
from tests.simulation.disk import KEY, Disk
from tests.simulation.ensemble import Ensemble
from tests.simulation.ledger import Ledger, Violation
from tests.simulation.loop import Process, SimulatedLoop


class Oracle:
    """`disks`: every disk there ever was, by its id; a destroyed one as it was then."""

    def __init__(self, loop: SimulatedLoop, disks: Mapping[str, Disk], ledger: Ledger) -> None:
        self._loop = loop
        self._disks = disks
        self._ledger = ledger
        self.documents: dict[str, ChainDocument] = {}
        self.lost: dict[str, ChainDocument] = {}
        """The newest chains, where ZooKeeper was set back."""
        self.ends: dict[tuple[int, int], int] = {}
        self.acknowledged: dict[tuple[int, int], int] = {}
        self.granted: dict[tuple[int, int], int] = {}
        self.named: dict[tuple[object, ...], tuple[int, int]] = {}
        self.sessions: Ensemble | None = None
        self._taken: dict[tuple[Process, tuple[int, int]], int] = {}
        self._kept_at_first: dict[str, int] = {}
        self.on_chain: Callable[[ChainDocument | None, ChainDocument], None] = lambda *_: None

    # ---- members

    def stepped(self, state: Replica, event: replica_events.Event, effects: tuple[replica_events.Effect, ...]) -> None:
        """A replica took a step."""
        for effect in effects:
            if isinstance(effect, replica_events.Store) and isinstance(event, replica_events.BatchArrived):
                self._check_taken(state.record)
            if isinstance(effect, replica_events.Refuse) and isinstance(effect.error, RecordTooLarge):
                raise Violation("12: a sender was let send what its link doesn't take")
            if isinstance(effect, replica_events.Acknowledge):
                self._check_acknowledged(state.record, int(effect.index))
            elif isinstance(effect, replica_events.Forward) and isinstance(event, replica_events.BatchArrived):
                newest = self.granted.get(state.record.key, 0)
                if event.token is not None and event.token < newest:
                    raise Violation(f"7: a batch with token {event.token} was taken, {newest} has been granted")

    def _check_taken(self, record: LinkRecord) -> None:
        """A member takes records only in the session in which the link was opened, and not when that has run out."""
        process, sessions = self._loop.process, self.sessions
        if process is None or sessions is None:
            return
        session = sessions.session_of(process)
        if session is None:
            if sessions.has_timed_out(process):
                raise Violation(f"4: {process} takes records of epoch {record.epoch}, and its session is gone")
        elif session != self._taken.setdefault((process, record.key), session):
            raise Violation(f"4: {process} takes records of epoch {record.epoch} in another session than before")

    def asked(self, path: str, request: Any) -> Any:
        """What `replied` is to know of how it was when this arrived.

        Of a subscription for which a reader asks where to read: its generation, and what was committed in it by then. Where
        somebody asks for a place: up to which offset records were told to be kept when the call first came, be it to another one.
        """
        if path.endswith("/AcquireRead"):
            progress = self._ledger.progress[request.subscription]
            return progress.generation, progress.committed
        kept = max(self._ledger.told, default=-1)
        if path.endswith(("/CreateSubscription", "/SeekSubscription")):
            return self._kept_at_first.setdefault(request.cause_id, kept)
        return kept if path.endswith("/DescribeQueue") else None

    def replied(self, method: str, request: Any, reply: Any, known: Any) -> None:
        """A coordinator or a member answered: whoever was named to a member as the reader, nobody older is served."""
        if method == "AcquireRead":
            self._check_read_granted(request, reply, known)
        if method == "CreateSubscription":
            self._check_position(request.queue, getattr(request, "from"), reply, known)
        if method == "SeekSubscription":
            self._check_position(request.queue, request.to, reply, known)
        if method == "DescribeQueue":
            self._check_latest(chain_view(reply), known)
        if method not in ("TellReader", "CommitCursor", "Fetch"):
            return
        if method == "Fetch":
            request = request.open
            is_served = isinstance(reply, BatchMessage) or reply.WhichOneof("kind") == "start"
            if not is_served or not request.subscription_id:
                return
        if method == "CommitCursor" and request.is_copied:
            return  # what the other member holds, by whomever
        link = request.link
        key = link.to.disk_id, link.queue_id, link.epoch, request.subscription_id
        named, asked = self.named.get(key, (0, 0)), (request.generation, request.token)
        if method == "TellReader":
            self.named[key] = max(named, asked)
        elif asked < named:
            raise Violation(
                f"7: {link.to.disk_id} answers {method} of epoch {link.epoch} to generation and token {asked}, "
                f"and was told of {named}"
            )

    def _check_read_granted(self, request: Any, reply: Any, known: tuple[int, tuple[int, int]]) -> None:
        """No grant starts before what was committed when the reader asked (H7)."""
        progress, grant = self._ledger.progress[request.subscription], reply.grant
        is_of_it = grant.generation == progress.generation == known[0]
        if reply.WhichOneof("kind") != "grant" or not grant.epoch or not is_of_it:
            return  # 0: there is nothing to read
        committed = min(known[1], progress.committed)
        if (grant.epoch, grant.index) < committed:
            raise Violation(
                f"6: {request.subscription} is granted {grant.epoch}:{grant.index}, committed is {committed}"
            )

    def _check_position(self, queue: str, where: str, view: Any, kept: int) -> None:
        """A subscription stands before the first record at or behind where it was put, and behind all that lies before that."""
        document = next((one for one in self.documents.values() if one.name == queue), None)
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
            is_there = at > kept or bool(self._ledger.given_up)
        elif where in ("", "earliest"):
            is_there = view.position_index == 0 and end == document.dropped.offset
        else:
            is_there = at == int(where) or (view.position_index == 0 and end <= int(where) < at)
        if not is_there:
            place = f"{view.position_epoch}:{view.position_index}, offset {at}"
            raise Violation(f"9: {view.subscription} is put at {where or 'earliest'}, and stands at {place}")

    def _check_latest(self, view: ChainView, kept: int) -> None:
        """Where the end of a queue is said to be known, all that was told to be kept when it was asked for lies before it."""
        if view.is_latest_known and view.latest <= kept and not self._ledger.given_up and not view.is_deleted:
            raise Violation(f"9: the end is told to be {view.latest}, and {kept} was told to be kept")

    def _check_acknowledged(self, record: LinkRecord, index: int) -> None:
        key = record.key
        if index <= self.acknowledged.get(key, 0):
            return
        if not any(one.queue_id == record.queue_id and not one.is_deleted for one in self.documents.values()):
            return  # the queue was deleted: its members let go what they hold of it
        end = self.ends.get(key)
        if end is not None and index > end:
            raise Violation(f"4: epoch {record.epoch}: {index} is acknowledged behind the end {end}")
        if any(one.queue_id == record.queue_id and record.epoch < one.dropped.epoch for one in self.documents.values()):
            return  # said late, and kept no longer
        mine = self._loop.process
        assert mine is not None
        assert record.peer is not None
        position = KEY.pack(b"P", record.queue_id, record.epoch, index)
        is_flushed = record.durability in (Durability.SYNC, Durability.INTERVAL)
        found = []
        disks = getattr(mine.host, "disk", None), self._disks.get(record.peer.disk_id)
        if not is_flushed and any(disk is not None and disk.has_forgotten for disk in disks):
            return  # the slave may have died since it confirmed, which this durability doesn't bear
        for disk in disks:
            table = None if disk is None else disk.durable if is_flushed else disk.table
            found.append(None if table is None else table.values.get(position))
        if None in found:
            where = "the master" if found[0] is None else "the slave"
            raise Violation(f"3: epoch {record.epoch}: {index} is acknowledged, and not kept by {where}")
        if found[0][16:48] != found[1][16:48]:  # type: ignore[index]
            raise Violation(f"3: epoch {record.epoch}: {index} is acknowledged, and the two copies differ")
        self.acknowledged[key] = index

    # ---- ZooKeeper

    def written(self, path: str, data: bytes, version: int) -> None:
        """ZooKeeper committed a write."""
        del version
        if not path.endswith("/chain") or not data:
            return
        document = chain_json.decode(data)
        lost = self.lost.get(path)
        if lost is not None and document.next_subscription_id > lost.next_subscription_id:
            self.documents[path] = self.lost.pop(path)  # recovered: it goes on from there
        before = self.documents.get(path)
        try:
            if before is None:
                invariants.check(document)
            else:
                invariants.check_change(before, document)
        except SeriatimError as error:
            raise Violation(str(error)) from error
        for one in document.subscriptions:
            progress = self._ledger.progress[one.name]
            if one.generation > progress.generation:
                self._ledger.sought(one)
            link = document.link(one.position_epoch)
            if progress.start is None and link is not None and link.base is not None:
                progress.start, progress.start_epoch = link.base + one.position_index, link.epoch
        for link in document.links:
            was = None if before is None else before.link(link.epoch)
            if link.end is not None and (was is None or was.end != link.end):
                self.ends[document.queue_id, link.epoch] = link.end
                self._check_sealed(document, link)
        self.on_chain(before, document)
        self.documents[path] = document

    def _check_sealed(self, document: ChainDocument, link: Link) -> None:
        certificate = link.certificate
        assert certificate is not None
        acknowledged = self.acknowledged.get((document.queue_id, link.epoch), 0)
        if certificate.is_abandoned or not (certificate.is_whole or link.durability.survives_restart):
            self._ledger.give_up(link, certificate)
        elif certificate.end < acknowledged:
            raise Violation(f"4: epoch {link.epoch} ends at {certificate.end}, acknowledged is {acknowledged}")
        if certificate.is_abandoned:
            return
        self._check_answered(document, link)
        self._check_marks_on_two(document, link)

    def _check_answered(self, document: ChainDocument, link: Link) -> None:
        """Whoever answered the seal with this end has all of it where no failure takes it away."""
        certificate = link.certificate
        assert certificate is not None
        position = KEY.pack(b"P", document.queue_id, link.epoch, certificate.end)
        for incarnation in certificate.answered if certificate.is_whole and certificate.end else ():
            disk = self._disks.get(incarnation.disk_id)
            value = None if disk is None else disk.durable.values.get(position)
            if value is None or value[16:48] != certificate.link_hash:
                raise Violation(f"3: epoch {link.epoch} ends at {certificate.end}, which {incarnation} doesn't keep")

    def _check_marks_on_two(self, document: ChainDocument, link: Link) -> None:
        """What a sender takes for kept is on two disks (H2)."""
        certificate = link.certificate
        assert certificate is not None
        known = merged(document.dropped.marks_on_two, link.marks_on_two)
        for one in document.links:
            if one.epoch < link.epoch and one.certificate is not None:
                known = merged(known, one.certificate.marks_on_two)
        first, end = (KEY.pack(b"P", document.queue_id, link.epoch, index) for index in (0, (1 << 64) - 1))
        tables = []
        for side in (link.master, link.slave):
            disk = self._disks.get(side.incarnation.disk_id)
            if disk is not None and disk.has_forgotten and not link.durability.survives_restart:
                return
            if disk is not None:
                tables.append(disk.durable if link.durability.survives_restart else disk.table)
        for key in tables[0].between(first, end) if len(tables) == 2 else ():
            value, other = tables[0].values[key], tables[1].values.get(key)
            if other is not None and other[16:48] == value[16:48]:
                known = merged(known, json.loads(value[48:]))
        for source, seq in certificate.marks_on_two.items():
            if seq > known.get(source, -1):
                raise Violation(f"3: {source}:{seq} counts as kept after epoch {link.epoch}, two have {known}")

    def begin_again(self) -> None:
        """The queue was deleted: what is made under its name from now on has nothing to do with it."""
        for kept in (self.documents, self.ends, self.acknowledged, self.granted, self.named):
            kept.clear()
        self._ledger.begin_again()

    def put_back(self, nodes: Mapping[str, tuple[bytes, int]]) -> None:
        """ZooKeeper has these data now. What was acknowledged, ended and named before still counts."""
        self.lost = self.documents | self.lost  # those from before the first time
        self.documents.clear()
        for path, (data, _) in nodes.items():
            if not path.endswith("/chain") or not data:
                continue
            document = chain_json.decode(data)
            if document.is_deleted:
                continue  # before the queue was made again: nobody begins with that one anew
            self.documents[path] = document
            if document == self.lost.get(path):
                del self.lost[path]  # the newest are back

    def send_granted(self, queue_id: int, epoch: int, token: int) -> None:
        """A coordinator answered a sender with a grant."""
        key = queue_id, epoch
        self.granted[key] = max(token, self.granted.get(key, 0))
        for document in self.documents.values():
            if document.queue_id == queue_id:
                link = document.link(epoch)  # type: ignore[arg-type]
                if link is None or (
                    any(epoch not in one.consume_list and link.end != 0 for one in document.subscriptions)
                    and link.state in (LinkState.OPENING, LinkState.OPEN)
                ):
                    raise Violation(f"2: epoch {epoch} was granted, and a consume list lacks it")
