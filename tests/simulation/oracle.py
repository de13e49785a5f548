"""Looks at everything from outside, after every step that can matter, and says what must not be (protocol.md 2).

It knows the disks, what ZooKeeper committed, what senders were told and what readers were handed; it shares no state with the
code that it judges, and asks none of it.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from seriatim.broker_group.core import replica_events
from seriatim.broker_group.core.link_record import LinkRecord
from seriatim.broker_group.core.replica import Replica
from seriatim.consumer.session import Grant
from seriatim.coordinator.core import invariants
from seriatim.protocol import batch, chain
from seriatim.protocol.batch_streams import BatchMessage
from seriatim.protocol.chain import Certificate, ChainDocument, Durability, Link, LinkState, Subscription
from seriatim.protocol.errors import SeriatimError
from seriatim.protocol.marks import merged
from seriatim.protocol.record import Record
from tests.simulation.disk import Disk, Table
from tests.simulation.ensemble import Ensemble
from tests.simulation.loop import Process, SimulatedLoop

_KEY = struct.Struct(">cQQQ")


class Violation(Exception):
    """An invariant doesn't hold."""


@dataclass
class Sent:
    """A record that an application handed over: when, and when it was first told that it is kept."""

    value: bytes
    at_s: float
    acknowledged_at_s: float | None = None
    offset: int | None = None
    place: tuple[int, int] | None = None
    """Epoch and index, where it was acknowledged there."""


@dataclass
class Progress:
    """Of one subscription: offsets handed out since it was sought last, the newest reader's token, the furthest commit
    that was answered. `given_up`: identities that were handed out, and whose place then was lost as section 8 allows.
    """

    delivered: set[int] = field(default_factory=set)
    token: int = 0
    generation: int = 0
    last: dict[object, int] = field(default_factory=dict)
    committed: tuple[int, int] = (0, 0)
    given_up: set[tuple[str, int]] = field(default_factory=set)


class Oracle:
    """`disks`: every disk there ever was, by its id; a destroyed one as it was then.

    `given_up`: by epoch, from which index on a link's records are gone, by an operator's word or as its durability allows.
    """

    def __init__(self, loop: SimulatedLoop, disks: Mapping[str, Disk]) -> None:
        self._loop = loop
        self._disks = disks
        self.documents: dict[str, ChainDocument] = {}
        self.sent: dict[tuple[str, int], Sent] = {}
        self.records: dict[int, Record] = {}
        self.places: dict[tuple[str, int], int] = {}
        self.told: dict[int, tuple[str, int]] = {}
        self.progress: dict[str, Progress] = defaultdict(Progress)
        self.acknowledged: dict[tuple[int, int], int] = {}
        self.granted: dict[tuple[int, int], int] = {}
        self.named: dict[tuple[object, ...], tuple[int, int]] = {}
        self.sessions: Ensemble | None = None
        self._taken: dict[tuple[Process, tuple[int, int]], int] = {}
        self.given_up: dict[int, int] = {}
        self.idle: set[str] = set()
        """Subscriptions that nobody reads."""
        self.checks = 0
        self.on_chain: Callable[[ChainDocument | None, ChainDocument], None] = lambda *_: None

    # ---- members

    def stepped(self, state: Replica, event: replica_events.Event, effects: tuple[replica_events.Effect, ...]) -> None:
        """A replica took a step."""
        for effect in effects:
            if isinstance(effect, replica_events.Store) and isinstance(event, replica_events.BatchArrived):
                self._check_taken(state.record)
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

    def replied(self, method: str, request: Any, reply: Any) -> None:
        """A member answered a coordinator or a reader: whoever was named to it as the reader, nobody older is served."""
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

    def _check_acknowledged(self, record: LinkRecord, index: int) -> None:
        key = record.key
        if index <= self.acknowledged.get(key, 0):
            return
        if not any(one.queue_id == record.queue_id and not one.is_deleted for one in self.documents.values()):
            return  # the queue was deleted: its members let go what they hold of it
        self.checks += 1
        mine = self._loop.process
        assert mine is not None
        assert record.peer is not None
        position = _KEY.pack(b"P", record.queue_id, record.epoch, index)
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
        for document in self.documents.values():
            link = document.link(record.epoch) if document.queue_id == record.queue_id else None
            if link is not None and link.end is not None and index > link.end:
                raise Violation(f"4: epoch {record.epoch}: {index} is acknowledged behind the end {link.end}")
        self.acknowledged[key] = index

    # ---- ZooKeeper

    def written(self, path: str, data: bytes, version: int) -> None:
        """ZooKeeper committed a write."""
        del version
        if not path.endswith("/chain") or not data:
            return
        self.checks += 1
        document = chain.decode(data)
        before = self.documents.get(path)
        try:
            if before is None:
                invariants.check(document)
            else:
                invariants.check_change(before, document)
        except SeriatimError as error:
            raise Violation(str(error)) from error
        for one in document.subscriptions:
            if one.generation > self.progress[one.name].generation:
                self._sought(document, one)
        for link in document.links:
            was = None if before is None else before.link(link.epoch)
            if link.state is LinkState.SEALED and (was is None or was.end != link.end or was.state is not link.state):
                self._check_sealed(document, link)
        self.on_chain(before, document)
        self.documents[path] = document

    def _sought(self, document: ChainDocument, subscription: Subscription) -> None:
        """From here on, everything behind the new position has to be handed out (again); see `lacking`."""
        progress = self.progress[subscription.name]
        progress.generation = subscription.generation
        is_anywhere = bool(subscription.consume_list)
        progress.committed = (subscription.position_epoch, subscription.position_index) if is_anywhere else (0, 0)
        progress.delivered.clear()

    def _check_sealed(self, document: ChainDocument, link: Link) -> None:
        certificate = link.certificate
        assert certificate is not None
        acknowledged = self.acknowledged.get((document.queue_id, link.epoch), 0)
        if certificate.is_abandoned or not (certificate.is_whole or link.durability.survives_restart):
            self._give_up(link, certificate)
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
        position = _KEY.pack(b"P", document.queue_id, link.epoch, certificate.end)
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
        first, end = (_KEY.pack(b"P", document.queue_id, link.epoch, index) for index in (0, (1 << 64) - 1))
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

    def _give_up(self, link: Link, certificate: Certificate) -> None:
        """What lies beyond this end is gone, and nothing that was said of it holds any more (protocol.md 5.7, 8).

        Its offsets are given again, but for those of an abandoned link (H21): there, the contents stay known.
        """
        end = self.given_up[link.epoch] = certificate.end
        for identity, sent in self.sent.items():
            is_there = sent.place is not None and sent.place[0] == link.epoch and sent.place[1] >= end
            if is_there or (sent.place is None and identity not in self.places):
                sent.acknowledged_at_s = sent.offset = sent.place = None
        gone = {offset for offset, one in self.records.items() if one.epoch == link.epoch and one.index >= end}
        gone |= {offset for offset, (source, seq) in self.told.items() if self.sent[source, seq].offset is None}
        for offset in gone:
            self.told.pop(offset, None)
            record = self.records.get(offset) if certificate.is_abandoned else self.records.pop(offset, None)
            if record is None:
                continue
            identity = record.source, record.seq
            self.places.pop(identity, None)
            for progress in self.progress.values():
                if offset in progress.delivered:
                    progress.delivered.discard(offset)
                    progress.given_up.add(identity)
        for progress in self.progress.values():
            progress.last.clear()
            if progress.committed > (link.epoch, end):
                progress.committed = min(progress.committed, (link.epoch, end))

    def _is_given_up(self, epoch: int, index: int) -> bool:
        return index >= self.given_up.get(epoch, index + 1)

    def begin_again(self) -> None:
        """The queue was deleted: what is made under its name from now on has nothing to do with it."""
        for kept in (self.documents, self.sent, self.records, self.places, self.told, self.progress, self.acknowledged,
                     self.granted, self.given_up, self.named):  # fmt: skip
            kept.clear()

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

    # ---- senders

    def sending(self, source: str, seq: int, value: bytes) -> None:
        """An application is about to send; the same identity always with the same value."""
        self.sent.setdefault((source, seq), Sent(value, self._loop.now_s))

    def told_kept(self, source: str, seq: int, offset: int | None, place: tuple[int, int] | None) -> None:
        """An application was told that two members hold a record, and at which epoch and index, if that is known."""
        sent = self.sent.get((source, seq))
        if sent is None:
            raise Violation(f"8: {source}:{seq} is told to be kept, and was never sent")
        if place is None and self.given_up:
            return  # it may have been there when it was said
        if place is not None and self._is_given_up(*place):
            return
        sent.place = place or sent.place
        if sent.acknowledged_at_s is None:
            sent.acknowledged_at_s = self._loop.now_s
        if offset is not None:
            sent.offset = offset if sent.offset is None else min(sent.offset, offset)
            self.told[offset] = source, seq
            self._check_place(source, seq)

    def _check_place(self, source: str, seq: int) -> None:
        """What a sender is told is where the record is, or where a re-send of it is: behind it, and handed to nobody."""
        told, place = self.sent[source, seq].offset, self.places.get((source, seq))
        if told is not None and place is not None and (told < place or (told > place and told in self.records)):
            raise Violation(f"11: {source}:{seq} is told to be at {told}, and delivered at {place}")

    # ---- readers

    def read_granted(self, subscription: str, grant: Grant, epoch: int, index: int) -> None:
        """A reader begins a term."""
        progress, token = self.progress[subscription], grant.token
        if grant.generation == progress.generation and (epoch, index) < progress.committed:
            raise Violation(f"6: {subscription} starts at {epoch}:{index}, committed is {progress.committed}")
        progress.last.pop((subscription, token), None)

    def delivered(self, subscription: str, session: object, grant: Grant, record: Record) -> None:
        """A reader was handed a record."""
        token = grant.token
        self.checks += 1
        progress = self.progress[subscription]
        if token < progress.token:
            raise Violation(
                f"7: a reader of {subscription} with token {token} was handed {record.offset} after {progress.token}"
            )
        progress.token = token
        identity = record.source, record.seq
        if self._is_given_up(record.epoch, record.index):
            progress.given_up.add(identity)
            return
        last = progress.last.get(session)
        if last is not None and record.offset <= last:
            raise Violation(f"9: {subscription} was handed {record.offset} after {last} in one term")
        progress.last[session] = record.offset
        if grant.generation == progress.generation:
            progress.delivered.add(record.offset)
        there = self.records.setdefault(record.offset, record)
        if (there.source, there.seq, there.value) != (record.source, record.seq, record.value):
            raise Violation(f"11: two contents at offset {record.offset}: {there.source}:{there.seq}, {identity}")
        place = self.places.setdefault(identity, record.offset)
        if place != record.offset:
            raise Violation(f"10: {identity} is delivered at {place} and at {record.offset}")
        sent = self.sent.get(identity)
        if sent is None or sent.value != record.value:
            raise Violation(f"9: {identity} was delivered, and not sent so")
        if self.told.get(record.offset, identity) != identity:
            raise Violation(f"11: {self.told[record.offset]} is told to be at {record.offset}, where {identity} is")
        self._check_place(*identity)

    def committed(self, subscription: str, grant: Grant, epoch: int, index: int) -> None:
        """A commit was answered."""
        progress = self.progress[subscription]
        if grant.generation == progress.generation:
            progress.committed = max(progress.committed, (epoch, min(index, self.given_up.get(epoch, index))))

    # ---- at the end

    def _standing(self) -> list[Record]:
        return [one for one in self.records.values() if not self._is_given_up(one.epoch, one.index)]

    def undelivered(self) -> list[tuple[str, int]]:
        """Identities that were acknowledged and that nobody was handed, in the place where they are or in one given up."""
        found = [identity for identity, sent in self.sent.items() if sent.acknowledged_at_s is not None]
        given_up = {identity for progress in self.progress.values() for identity in progress.given_up}
        return [identity for identity in found if identity not in self.places and identity not in given_up]

    def lacking(self, subscription: str) -> set[int]:
        """Offsets that it should have been handed since it was sought last, and wasn't."""
        progress, start = self.progress[subscription], 0
        for document in self.documents.values():
            found = document.subscription(subscription)
            link = None if found is None else document.link(found.position_epoch)
            if subscription in self.idle:
                return set()
            if found is not None and (link is None or link.base is None):
                return set()
            if found is not None and link is not None and link.base is not None:
                start = link.base + found.position_index
        return {
            one.offset
            for one in self._standing()
            if one.offset >= start
            and one.offset not in progress.delivered
            and (one.source, one.seq) not in progress.given_up
        }

    def check_end(self) -> None:
        """Everything is healed and read: nothing is lost, all is in order."""
        for name in self.progress:
            lacking = self.lacking(name)
            if lacking:
                raise Violation(f"9: {name} was never handed {sorted(lacking)[:5]}")
        for identity in self.undelivered():
            raise Violation(f"8: {identity} was told to be kept at {self.sent[identity].offset}, and isn't delivered")
        earliest_kept_s = float("inf")
        last_seq: dict[str, int] = {}
        for record in sorted(self._standing(), key=lambda one: one.offset, reverse=True):
            sent = self.sent[record.source, record.seq]
            if earliest_kept_s < sent.at_s:
                raise Violation(
                    f"9: {record.source}:{record.seq} at {record.offset} was sent after a later one was kept"
                )
            if sent.acknowledged_at_s is not None:
                earliest_kept_s = min(earliest_kept_s, sent.acknowledged_at_s)
            if record.seq >= last_seq.get(record.source, 1 << 64):
                raise Violation(f"9: {record.source}:{record.seq} is delivered behind a later one")
            last_seq[record.source] = record.seq

    def check_copies(self, document: ChainDocument, disks: Mapping[str, Disk], damaged: Collection[bytes]) -> None:
        """Both members of each link hold what its certificate says, but for damage that nobody had to read.

        `disks`: by the member's name.
        """
        for link in document.links:
            certificate = link.certificate
            if certificate is None or certificate.is_abandoned or certificate.end == 0:
                continue
            key = _KEY.pack(b"P", document.queue_id, link.epoch, certificate.end)
            for side in (link.master, link.slave):
                table = disks[str(side.name)].table
                value = table.values.get(key)
                if value is None or value[16:48] != certificate.link_hash:
                    raise Violation(f"3: {side.name} doesn't hold link {link.epoch} as its certificate says")
                self._check_stored(document.queue_id, link, certificate.end, table, str(side.name), damaged)

    def _check_stored(
        self, queue_id: int, link: Link, end: int, table: Table, name: str, damaged: Collection[bytes]
    ) -> None:
        """Every record of a link is there, and was handed out from there, or is a re-send of one handed out before."""
        at = 0
        while at < end:
            place = _KEY.pack(b"B", queue_id, link.epoch, at)
            stored = table.values.get(place)
            if stored is None:
                raise Violation(f"3: {name} lacks index {at} of link {link.epoch}")
            if place in damaged:
                return
            encoded = batch.parse(*batch.split(stored))
            columns = batch.decode(encoded)
            for row, seq in enumerate(columns.seqs):
                self._check_row(link, at + row, columns.source_of(row), seq, columns.values[row])
            at = encoded.header.end_index

    def _check_row(self, link: Link, index: int, source: str, seq: int, value: bytes) -> None:
        if link.base is None:
            return
        offset = link.base + index
        handed_out = self.records.get(offset)
        if handed_out is not None:
            if (handed_out.source, handed_out.seq, handed_out.value) != (source, seq, value):
                raise Violation(
                    f"11: {source}:{seq} is stored at {offset}, and {handed_out.source}:{handed_out.seq} was read"
                )
        elif any((source, seq) in progress.given_up for progress in self.progress.values()):
            return  # it was handed out where it was before that was given up
        elif self.places.get((source, seq), offset) >= offset:
            raise Violation(f"11: {source}:{seq} at {offset} was handed to nobody, and is no re-send")
