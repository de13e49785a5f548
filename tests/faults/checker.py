"""Judges a history. Names of what it finds are those of Jepsen's workload for logs.

lost-write            acknowledged, and not delivered to a subscription that read to the end
duplicate             one identity at two offsets of a subscription
offset-disagreement   one offset with two contents: between readers, or between reader and acknowledgement
aborted-read          delivered, though never sent or refused for good
wrong-value           delivered with another value than was sent
skipped-poll          a session starts behind records that its subscription never got
backward-poll         within a session, an offset that doesn't rise
reordering            A is delivered before B, though B was acknowledged before A was sent
source-order          the seqs of one source don't rise with the offsets
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tests.faults.history import Acknowledged, Delivered, Event, Refused, Sent


@dataclass(frozen=True, slots=True)
class Anomaly:
    kind: str
    what: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """`counts` has sent, acknowledged, delivered (distinct offsets) and handed_out_again."""

    anomalies: tuple[Anomaly, ...]
    counts: dict[str, int]

    @property
    def is_clean(self) -> bool:
        return not self.anomalies

    def kinds(self) -> Counter[str]:
        return Counter(anomaly.kind for anomaly in self.anomalies)


Identity = tuple[str, int]


def check(events: Iterable[Event], *, read_to_end: bool = True) -> Verdict:
    """Judge a history. `read_to_end`: everything was healed and every subscription read until nothing was left."""
    sent: dict[Identity, Sent] = {}
    acknowledged: dict[Identity, Acknowledged] = {}
    refused: set[Identity] = set()
    delivered: list[Delivered] = []
    for event in events:
        match event:
            case Sent():
                sent.setdefault((event.source, event.seq), event)
            case Acknowledged():
                acknowledged.setdefault((event.source, event.seq), event)
            case Refused():
                refused.add((event.source, event.seq))
            case Delivered():
                delivered.append(event)
    found: list[Anomaly] = []
    by_offset = _agreed_contents(delivered, found)
    found += _against_sent(by_offset, sent, refused)
    found += _against_acknowledged(by_offset, acknowledged)
    found += _within_subscriptions(delivered)
    found += _orders(by_offset, sent, acknowledged)
    if read_to_end:
        found += _lost(delivered, acknowledged)
    counts = {
        "sent": len(sent),
        "acknowledged": len(acknowledged),
        "delivered": len(by_offset),
        "handed_out_again": len(delivered) - len({(one.subscription, one.offset) for one in delivered}),
    }
    return Verdict(tuple(found), counts)


def _agreed_contents(delivered: list[Delivered], found: list[Anomaly]) -> dict[int, Delivered]:
    by_offset: dict[int, Delivered] = {}
    for one in delivered:
        first = by_offset.setdefault(one.offset, one)
        if (first.source, first.seq, first.value) != (one.source, one.seq, one.value):
            found.append(
                Anomaly(
                    "offset-disagreement",
                    f"offset {one.offset} is {first.source}:{first.seq} for {first.session}, "
                    f"{one.source}:{one.seq} for {one.session}",
                )
            )
    return by_offset


def _against_sent(by_offset: dict[int, Delivered], sent: dict[Identity, Sent], refused: set[Identity]) -> list[Anomaly]:
    found = []
    for one in by_offset.values():
        identity = (one.source, one.seq)
        origin = sent.get(identity)
        if origin is None or identity in refused:
            why = "was never sent" if origin is None else "was refused"
            found.append(Anomaly("aborted-read", f"{one.source}:{one.seq} at {one.offset} {why}"))
        elif origin.value != one.value:
            found.append(Anomaly("wrong-value", f"{one.source}:{one.seq} at {one.offset}"))
    return found


def _against_acknowledged(by_offset: dict[int, Delivered], acknowledged: dict[Identity, Acknowledged]) -> list[Anomaly]:
    found = []
    for (source, seq), ack in acknowledged.items():
        one = None if ack.offset is None else by_offset.get(ack.offset)
        if one is not None and (one.source, one.seq) != (source, seq):
            found.append(
                Anomaly(
                    "offset-disagreement",
                    f"{source}:{seq} was acknowledged at {ack.offset}, where {one.source}:{one.seq} was read",
                )
            )
    return found


def _within_subscriptions(delivered: list[Delivered]) -> list[Anomaly]:
    found = []
    by_subscription: dict[str, list[Delivered]] = defaultdict(list)
    for one in delivered:
        by_subscription[one.subscription].append(one)
    for subscription, ones in by_subscription.items():
        place: dict[Identity, int] = {}
        last_of: dict[str, int] = {}
        reached = -1
        offsets = sorted({one.offset for one in ones})
        for one in ones:
            earlier = place.setdefault((one.source, one.seq), one.offset)
            if earlier != one.offset:
                found.append(
                    Anomaly("duplicate", f"{subscription}: {one.source}:{one.seq} at {earlier} and {one.offset}")
                )
            last = last_of.get(one.session)
            if last is not None and one.offset <= last:
                found.append(Anomaly("backward-poll", f"{one.session}: {one.offset} after {last}"))
            last_of[one.session] = one.offset
            if one.offset > reached:
                # Offsets that nobody was handed before the first one count only if somebody was handed them later.
                skipped = _between(offsets, reached, one.offset) if reached >= 0 else []
                if skipped:
                    found.append(
                        Anomaly("skipped-poll", f"{one.session}: {one.offset} before {skipped[0]} was handed out")
                    )
                reached = one.offset
    return found


def _between(offsets: list[int], low: int, high: int) -> list[int]:
    return offsets[bisect_right(offsets, low) : bisect_left(offsets, high)]


def _orders(
    by_offset: dict[int, Delivered], sent: dict[Identity, Sent], acknowledged: dict[Identity, Acknowledged]
) -> list[Anomaly]:
    found = []
    earliest_later_ack: tuple[float, Delivered] | None = None
    next_seq: dict[str, int] = {}
    for offset in sorted(by_offset, reverse=True):
        one = by_offset[offset]
        identity = (one.source, one.seq)
        origin = sent.get(identity)
        if origin is not None and earliest_later_ack is not None and earliest_later_ack[0] < origin.at_s:
            later = earliest_later_ack[1]
            found.append(
                Anomaly(
                    "reordering",
                    f"{one.source}:{one.seq} at {offset} was sent after {later.source}:{later.seq} "
                    f"at {later.offset} had been acknowledged",
                )
            )
        ack = acknowledged.get(identity)
        if ack is not None and (earliest_later_ack is None or ack.at_s < earliest_later_ack[0]):
            earliest_later_ack = (ack.at_s, one)
        if one.source in next_seq and one.seq >= next_seq[one.source]:
            found.append(Anomaly("source-order", f"{one.source}:{one.seq} at {offset} before {next_seq[one.source]}"))
        next_seq[one.source] = one.seq
    return found


def _lost(delivered: list[Delivered], acknowledged: dict[Identity, Acknowledged]) -> list[Anomaly]:
    found = []
    got: dict[str, set[Identity]] = defaultdict(set)
    for one in delivered:
        got[one.subscription].add((one.source, one.seq))
    if not got:
        got["(nobody read)"] = set()
    for subscription, identities in got.items():
        lost = [identity for identity in acknowledged if identity not in identities]
        found += [Anomaly("lost-write", f"{subscription}: {source}:{seq}") for source, seq in lost]
    return found
