"""What must be so once everything is healed and read: nothing is lost, all is in order, both copies are whole (protocol.md 2)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from seriatim.protocol import batch
from seriatim.protocol.chain import Link
from tests.simulation.disk import KEY, Disk, Table
from tests.simulation.ledger import Violation
from tests.simulation.queue import Queue


class Verdict:
    """On what the ledger of a queue holds."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._ledger = queue.ledger

    def undelivered(self) -> Iterator[tuple[str, int]]:
        """Identities that were acknowledged and that nobody was handed, in the place where they are or in one given up.

        What was sent last comes first: mostly it is that which is still to come, where somebody asks again and again.
        """
        ledger = self._ledger
        given_up = {identity for progress in ledger.progress.values() for identity in progress.given_up}
        for identity, sent in reversed(ledger.sent.items()):
            is_missing = sent.acknowledged_at_s is not None and identity not in ledger.places
            if is_missing and identity not in given_up and not ledger.is_passed_over(identity):
                yield identity

    def lacking(self, subscription: str) -> Iterator[int]:
        """Offsets that it should have been handed since it was sought last, and wasn't; in the order of `undelivered`."""
        progress = self._ledger.progress[subscription]
        document = self._queue.document
        is_there = document is not None and document.subscription(subscription) is not None
        if subscription in self._ledger.idle or (is_there and progress.start is None):
            return
        start, delivered = progress.start or 0, progress.delivered
        for one in self._ledger.standing():
            offset = one.offset
            if offset >= start and offset not in delivered and (one.source, one.seq) not in progress.given_up:
                yield offset

    def check_end(self) -> None:
        """Everything is healed and read: nothing is lost, all is in order."""
        ledger = self._ledger
        for name in ledger.progress:
            if lacking := sorted(self.lacking(name)):
                raise Violation(f"9: {name} was never handed {lacking[:5]}")
        for identity in self.undelivered():
            raise Violation(f"8: {identity} was told to be kept at {ledger.sent[identity].offset}, and isn't delivered")
        earliest_kept_s = float("inf")
        last_seq: dict[str, int] = {}
        for record in sorted(ledger.standing(), key=lambda one: one.offset, reverse=True):
            sent = ledger.sent[record.source, record.seq]
            if earliest_kept_s < sent.at_s:
                raise Violation(
                    f"9: {record.source}:{record.seq} at {record.offset} was sent after a later one was kept"
                )
            if sent.acknowledged_at_s is not None:
                earliest_kept_s = min(earliest_kept_s, sent.acknowledged_at_s)
            if record.seq >= last_seq.get(record.source, 1 << 64):
                raise Violation(f"9: {record.source}:{record.seq} is delivered behind a later one")
            last_seq[record.source] = record.seq

    def check_copies(self, disks: Mapping[str, Disk], damaged: Collection[bytes]) -> None:
        """Both members of each link hold what its certificate says, but for damage that nobody had to read.

        `disks`: by the member's name.
        """
        document = self._queue.document
        assert document is not None
        for link in document.links:
            certificate = link.certificate
            if certificate is None or certificate.is_abandoned or certificate.end == 0:
                continue
            key = KEY.pack(b"P", document.queue_id, link.epoch, certificate.end)
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
            place = KEY.pack(b"B", queue_id, link.epoch, at)
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
        handed_out = self._ledger.records.get(offset)
        if handed_out is not None:
            if (handed_out.source, handed_out.seq, handed_out.value) != (source, seq, value):
                raise Violation(
                    f"11: {source}:{seq} is stored at {offset}, and {handed_out.source}:{handed_out.seq} was read"
                )
        elif any((source, seq) in progress.given_up for progress in self._ledger.progress.values()):
            return  # it was handed out where it was before that was given up
        elif self._ledger.is_passed_over((source, seq)):
            return
        elif self._ledger.places.get((source, seq), offset) >= offset:
            raise Violation(f"11: {source}:{seq} at {offset} was handed to nobody, and is no re-send")
