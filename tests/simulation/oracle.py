"""Looks at everything from outside, after every step that can matter, and says what must not be (protocol.md 2).

It knows the disks, what ZooKeeper committed, and what members and coordinators answered; it shares no state with the code that
it judges, and asks none of it. What senders were told and readers were handed is in the `ledger`, the checks at the end are the `verdict`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from seriatim.broker_group.core import replica_events
from seriatim.broker_group.core.link_record import LinkRecord
from seriatim.broker_group.core.replica import Replica
from seriatim.coordinator.core import invariants
from seriatim.protocol import chain_json
from seriatim.protocol.chain import ChainDocument, Durability, Link, LinkState
from seriatim.protocol.errors import RecordTooLarge, SeriatimError
from seriatim.protocol.marks import merged
from tests.simulation.disk import KEY, Disk
from tests.simulation.ensemble import Ensemble, Node
from tests.simulation.ledger import Ledger, Violation
from tests.simulation.loop import Process, SimulatedLoop
from tests.simulation.readings import Readings


class Oracle:
    """`disks`: every disk there ever was, by its id; a destroyed one as it was then. `ledgers`: by queue."""

    def __init__(self, loop: SimulatedLoop, disks: Mapping[str, Disk], ledgers: Mapping[str, Ledger]) -> None:
        self._loop = loop
        self._disks = disks
        self._ledgers = ledgers
        self.documents: dict[str, ChainDocument] = {}
        self.lost: dict[str, ChainDocument] = {}
        """The newest chains, where ZooKeeper was set back."""
        self.ends: dict[tuple[int, int], int] = {}
        self.acknowledged: dict[tuple[int, int], int] = {}
        self.granted: dict[tuple[int, int], int] = {}
        self.sessions: Ensemble | None = None
        self._taken: dict[tuple[Process, tuple[int, int]], int] = {}
        self.readings = Readings(disks, ledgers, self.documents, self.lost)
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
        if document.is_deleted and path not in self.documents:
            return  # another one may have its name by now
        lost = self.lost.get(path)
        if lost is not None and document.next_subscription_id > lost.next_subscription_id:
            self.documents[path] = self.lost.pop(path)  # recovered: it goes on from there
            self.readings.recovered(document.queue_id)
        before = self.documents.get(path)
        try:
            if before is None:
                invariants.check(document)
            else:
                invariants.check_change(before, document)
        except SeriatimError as error:
            raise Violation(str(error)) from error
        self._note_subscriptions(before, document)
        for link in document.links:
            was = None if before is None else before.link(link.epoch)
            if link.end is not None and (was is None or was.end != link.end):
                self.ends[document.queue_id, link.epoch] = link.end
                self._check_sealed(document, link)
        self.readings.written(before, document)
        self.on_chain(before, document)
        self.documents[path] = document

    def _note_subscriptions(self, before: ChainDocument | None, document: ChainDocument) -> None:
        """Who was made, sought or deleted."""
        ledger = self._ledgers[document.name]
        for gone in () if before is None else before.subscriptions:
            if document.subscription(gone.name) is None:
                ledger.progress[gone.name].subscription_id = 0
        for one in document.subscriptions:
            if ledger.progress[one.name].subscription_id != one.subscription_id:
                ledger.deleted_and_made(one)
            progress = ledger.progress[one.name]
            if one.generation > progress.generation:
                ledger.sought(one)
            link = document.link(one.position_epoch)
            if progress.start is None and link is not None and link.base is not None:
                progress.start, progress.start_epoch = link.base + one.position_index, link.epoch

    def _check_sealed(self, document: ChainDocument, link: Link) -> None:
        certificate = link.certificate
        assert certificate is not None
        acknowledged = self.acknowledged.get((document.queue_id, link.epoch), 0)
        if certificate.is_abandoned or not (certificate.is_whole or link.durability.survives_restart):
            self._ledgers[document.name].give_up(link, certificate)
            self._check_lost(document, link)
        elif certificate.end < acknowledged:
            raise Violation(f"4: epoch {link.epoch} ends at {certificate.end}, acknowledged is {acknowledged}")
        if certificate.is_abandoned:
            return
        self._check_answered(document, link)
        self._check_marks_on_two(document, link)

    def _check_lost(self, document: ChainDocument, link: Link) -> None:
        """No more is lost than no disk has that was asked (protocol.md 8)."""
        certificate = link.certificate
        assert certificate is not None
        first, end = (
            KEY.pack(b"P", document.queue_id, link.epoch, index) for index in (certificate.end + 1, (1 << 64) - 1)
        )
        for incarnation in () if certificate.is_abandoned else certificate.answered:
            disk = self._disks.get(incarnation.disk_id)
            if disk is not None and disk.durable.between(first, end):
                raise Violation(f"8: epoch {link.epoch} ends at {certificate.end}, and {incarnation} has more")

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

    def forget(self, queue: str) -> None:
        """It was deleted. Its id is never used again, nor is what is known by that."""
        for path in [path for path, document in self.documents.items() if document.name == queue]:
            del self.documents[path]

    def put_back(self, nodes: Mapping[str, Node]) -> None:
        """ZooKeeper has these data now. What was acknowledged, ended and named before still counts."""
        for path, document in self.documents.items():
            self.lost.setdefault(path, document)  # those from before the first time
        self.documents.clear()
        for path, node in nodes.items():
            if not path.endswith("/chain") or not node.data:
                continue
            document = chain_json.decode(node.data)
            if document.is_deleted:
                continue  # before the queue was made again: nobody begins with that one anew
            self.documents[path] = document
            if document == self.lost.get(path):
                del self.lost[path]  # the newest are back

    def send_granted(self, queue_id: int, epoch: int, token: int) -> None:
        """A coordinator answered a sender with a grant, perhaps by what ZooKeeper has lost since."""
        key = queue_id, epoch
        self.granted[key] = max(token, self.granted.get(key, 0))
        documents = [one for one in (*self.documents.values(), *self.lost.values()) if one.queue_id == queue_id]
        if documents and all(_lacks(document, epoch) for document in documents):
            raise Violation(f"2: epoch {epoch} was granted, and a consume list lacks it")


def _lacks(document: ChainDocument, epoch: int) -> bool:
    """Whether the link isn't there, or isn't on a consume list though it may hold records."""
    link = document.link(epoch)  # type: ignore[arg-type]
    return link is None or (
        link.state in (LinkState.OPENING, LinkState.OPEN)
        and link.end != 0
        and any(epoch not in one.consume_list for one in document.subscriptions)
    )
