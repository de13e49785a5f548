"""What applications said and heard: what they sent, what they were told is kept, what readers were handed; and what of it is gone.

Each entry is checked against those before it (protocol.md 2).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from seriatim.consumer.core.view import Grant
from seriatim.protocol.chain import Certificate, Link, Subscription
from seriatim.protocol.record import Headers, Record
from tests.simulation.loop import SimulatedLoop


class Violation(Exception):
    """An invariant doesn't hold."""


@dataclass(slots=True)
class Sent:
    """A record that an application handed over: when, and when it was first told that it is kept."""

    value: bytes
    key: bytes | None
    headers: Headers
    at_s: float
    acknowledged_at_s: float | None = None
    offset: int | None = None
    place: tuple[int, int] | None = None
    """Epoch and index, where it was acknowledged there."""


@dataclass
class Progress:
    """Of one subscription: offsets handed out since it was sought last, the newest reader's token, the furthest commit
    that was answered. `given_up`: identities that were handed out, and whose place then was lost as section 8 allows.
    `before`: offsets handed out before it was sought; whose place is lost then is dropped as a re-send all the same.
    `start`: the offset that it was sought to; None until it is known. `start_epoch`: the link in which that is; 0: any.
    `subscription_id`: of the one that has the name; 0: none has it. `readers`: by token, whose it is. `granted`: where a term of one
    of them begins.
    """

    delivered: set[int] = field(default_factory=set)
    before: set[int] = field(default_factory=set)
    token: int = 0
    generation: int = 0
    last: dict[object, int] = field(default_factory=dict)
    committed: tuple[int, int] = (0, 0)
    given_up: set[tuple[str, int]] = field(default_factory=set)
    start: int | None = None
    start_epoch: int = 0
    subscription_id: int = 0
    readers: dict[int, object] = field(default_factory=dict)
    granted: dict[object, tuple[int, int]] = field(default_factory=dict)


class Ledger:
    """Records by identity and by offset, subscriptions by name.

    `given_up`: by epoch, from which index on a link's records are gone, by an operator's word or as its durability allows.
    """

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self.sent: dict[tuple[str, int], Sent] = {}
        self.records: dict[int, Record] = {}
        self.places: dict[tuple[str, int], int] = {}
        self.told: dict[int, tuple[str, int]] = {}
        self.progress: dict[str, Progress] = defaultdict(Progress)
        self.given_up: dict[int, int] = {}
        self.lost: set[tuple[str, int]] = set()
        """Identities that were told to be kept, in a link's part that is gone."""
        self.idle: set[str] = set()
        """Subscriptions that nobody reads."""
        self.deleted: set[str] = set()
        """Subscriptions that were deleted while somebody read them."""
        self.unknown = 0
        """So many records ended as unknown."""
        self.done: dict[str, tuple[int, tuple[int, int]]] = {}
        """By reader that was closed: its generation, and up to where its application was done with what it was handed."""

    def begin_again(self) -> None:
        """The queue was deleted: what is made under its name from now on has nothing to do with it."""
        for kept in (self.sent, self.records, self.places, self.told, self.progress, self.given_up, self.lost):
            kept.clear()

    # ---- senders

    def sending(self, source: str, seq: int, value: bytes, key: bytes | None, headers: Headers) -> None:
        """An application is about to send; the same identity always with the same value."""
        self.sent.setdefault((source, seq), Sent(value, key, headers, self._loop.now_s))

    def told_kept(self, source: str, seq: int, offset: int | None, place: tuple[int, int] | None) -> None:
        """An application was told that two members hold a record, and at which epoch and index, if that is known."""
        sent = self.sent.get((source, seq))
        if sent is None:
            raise Violation(f"8: {source}:{seq} is told to be kept, and was never sent")
        if place is None and self.given_up:
            return  # it may have been there when it was said
        if place is not None and self.is_given_up(*place):
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

    def read_granted(self, subscription: str, reader: object, grant: Grant, epoch: int, index: int) -> None:
        """A reader begins a term."""
        progress = self.progress[subscription]
        if grant.subscription_id != progress.subscription_id:
            return  # it was deleted, of which this reader is yet to hear
        if (
            epoch and grant.generation == progress.generation and (epoch, index) < progress.committed
        ):  # 0: nothing to read
            raise Violation(f"6: {subscription} starts at {epoch}:{index}, committed is {progress.committed}")
        if progress.readers.setdefault(grant.token, reader) is not reader:
            raise Violation(f"7: two readers of {subscription} have token {grant.token}")
        progress.granted[reader, grant] = epoch, index

    def delivered(self, subscription: str, session: object, grant: Grant, record: Record) -> None:
        """A reader was handed a record."""
        token = grant.token
        progress = self.progress[subscription]
        if grant.subscription_id != progress.subscription_id:
            self._check_content(record)
            return
        if token < progress.token:
            raise Violation(
                f"7: a reader of {subscription} with token {token} was handed {record.offset} after {progress.token}"
            )
        progress.token = token
        identity = record.source, record.seq
        if self.is_given_up(record.epoch, record.index):
            progress.given_up.add(identity)
            return
        if (record.epoch, record.index) < (granted := progress.granted.get(session, (0, 0))):
            raise Violation(f"6: {subscription} was handed {record.epoch}:{record.index}, granted from {granted} on")
        last = progress.last.get(session)
        if last is not None and record.offset <= last:
            raise Violation(f"9: {subscription} was handed {record.offset} after {last} in one term")
        progress.last[session] = record.offset
        if grant.generation == progress.generation:
            if progress.start is not None and record.offset < progress.start:
                raise Violation(f"9: {subscription} was handed {record.offset}, and stands from {progress.start} on")
            progress.delivered.add(record.offset)
        self._check_content(record)

    def _check_content(self, record: Record) -> None:
        """The same at the same offset for all, each record once, as it was sent."""
        identity = record.source, record.seq
        there = self.records.setdefault(record.offset, record)
        if there != record:
            raise Violation(f"11: two contents at offset {record.offset}: {there.source}:{there.seq}, {identity}")
        place = self.places.setdefault(identity, record.offset)
        if place != record.offset:
            raise Violation(f"10: {identity} is delivered at {place} and at {record.offset}")
        sent = self.sent.get(identity)
        if sent is None or (sent.value, sent.key, sent.headers) != (record.value, record.key, record.headers):
            raise Violation(f"9: {identity} was delivered, and not sent so")
        if self.told.get(record.offset, identity) != identity:
            raise Violation(f"11: {self.told[record.offset]} is told to be at {record.offset}, where {identity} is")
        self._check_place(*identity)

    def committed(self, subscription: str, grant: Grant, epoch: int, index: int) -> None:
        """A commit was answered."""
        progress = self.progress[subscription]
        if (grant.subscription_id, grant.generation) == (progress.subscription_id, progress.generation):
            progress.committed = max(progress.committed, (epoch, min(index, self.given_up.get(epoch, index))))

    # ---- what is made, what is sought, and what is gone

    def deleted_and_made(self, subscription: Subscription) -> None:
        """One has this name that another one had before: nothing that was committed of that one counts."""
        before = self.progress[subscription.name]
        self.progress[subscription.name] = Progress(
            before=before.before | before.delivered,
            given_up=before.given_up,
            subscription_id=subscription.subscription_id,
        )

    def sought(self, subscription: Subscription) -> None:
        """From here on, everything behind the new position has to be handed out (again); see `Verdict.lacking`."""
        progress = self.progress[subscription.name]
        progress.generation = subscription.generation
        is_anywhere = bool(subscription.consume_list)
        progress.committed = (subscription.position_epoch, subscription.position_index) if is_anywhere else (0, 0)
        progress.before |= progress.delivered
        progress.delivered.clear()
        progress.start = None

    def give_up(self, link: Link, certificate: Certificate) -> None:
        """What lies beyond this end is gone, and nothing that was said of it holds any more (protocol.md 5.7, 8).

        Its offsets are given again, but for those of an abandoned link (H21): there, the contents stay known.
        """
        end = self.given_up[link.epoch] = certificate.end
        for identity, sent in self.sent.items():
            is_there = sent.place is not None and sent.place[0] == link.epoch and sent.place[1] >= end
            if is_there or (sent.place is None and identity not in self.places):
                if sent.acknowledged_at_s is not None:
                    self.lost.add(identity)
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
                if offset in progress.delivered or offset in progress.before:
                    progress.delivered.discard(offset)
                    progress.before.discard(offset)
                    progress.given_up.add(identity)
        for progress in self.progress.values():
            if link.base is not None:
                before = link.base + end - 1
                progress.last = {session: min(offset, before) for session, offset in progress.last.items()}
            progress.granted = {
                session: min(place, (link.epoch, end)) if place[0] == link.epoch else place
                for session, place in progress.granted.items()
            }
            if progress.committed > (link.epoch, end):
                progress.committed = min(progress.committed, (link.epoch, end))
            if progress.start is not None and link.base is not None and progress.start_epoch in (0, link.epoch):
                progress.start = min(progress.start, link.base + end)

    def is_passed_over(self, identity: tuple[str, int]) -> bool:
        """Whether it was lost, and sent again only behind later ones of its source that had been kept: readers take it for a re-send."""
        if identity not in self.lost or (offset := self.sent[identity].offset) is None:
            return False
        source, seq = identity
        return any(one.source == source and one.seq > seq and one.offset < offset for one in self.records.values())

    def is_given_up(self, epoch: int, index: int) -> bool:
        return index >= self.given_up.get(epoch, index + 1)

    def standing(self) -> Iterator[Record]:
        """What was handed out, and isn't given up; what came last comes first."""
        if not self.given_up:
            return reversed(self.records.values())
        return (one for one in reversed(self.records.values()) if not self.is_given_up(one.epoch, one.index))
