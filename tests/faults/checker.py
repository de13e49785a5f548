"""Judges a history. Names of what it finds are those of Jepsen's workload for logs.

lost-write            acknowledged, and not delivered to a subscription that read to the end from where it was put
duplicate             one identity at two offsets of a subscription
offset-disagreement   one offset with two contents: between readers, or between reader and acknowledgement
aborted-read          delivered, though never sent or refused for good
wrong-value           delivered with another value than was sent
skipped-poll          records lie between two that a subscription got one after the other, or before its first one
backward-poll         within a session, an offset that doesn't rise
reordering            A is delivered before B, though B was acknowledged before A was sent
source-order          the seqs of one source don't rise with the offsets

A subscription that is sought begins anew, so each of its generations is judged by itself; only the last one has to reach
the end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tests.faults.history import Acknowledged, Delivered, Event, Positioned, Refused, Sent


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
Stretch = tuple[str, int]
"""A subscription, and one of its generations."""


def check(events: Iterable[Event], *, read_to_end: bool = True) -> Verdict:
    """Judge a history. `read_to_end`: everything was healed and every subscription read until nothing was left."""
    sent: dict[Identity, Sent] = {}
    acknowledged: dict[Identity, Acknowledged] = {}
    refused: set[Identity] = set()
    delivered: list[Delivered] = []
    starts: dict[Stretch, int] = {}
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
            case Positioned():
                starts[event.subscription, event.generation] = event.offset
    found: list[Anomaly] = []
    by_offset = _agreed_contents(delivered, found)
    found += _against_sent(by_offset, sent, refused)
    found += _against_acknowledged(by_offset, acknowledged)
    stretches, offsets = _stretches(delivered, starts), sorted(by_offset)
    for stretch, ones in stretches.items():
        found += _within(stretch, ones, starts.get(stretch, 0), offsets)
    found += _orders(by_offset, sent, acknowledged)
    if read_to_end:
        found += _lost(stretches, starts, by_offset, acknowledged)
    counts = {
        "sent": len(sent),
        "acknowledged": len(acknowledged),
        "delivered": len(by_offset),
        "handed_out_again": len(delivered) - len({(one.subscription, one.generation, one.offset) for one in delivered}),
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


def _stretches(delivered: list[Delivered], starts: dict[Stretch, int]) -> dict[Stretch, list[Delivered]]:
    """What each generation of each subscription was handed; also of those that were handed nothing."""
    found: dict[Stretch, list[Delivered]] = {stretch: [] for stretch in starts}
    for one in delivered:
        found.setdefault((one.subscription, one.generation), []).append(one)
    return found


def _within(stretch: Stretch, ones: list[Delivered], start: int, offsets: list[int]) -> list[Anomaly]:
    """One generation of a subscription, in the order of time. `offsets`: all that anybody was handed, rising."""
    found = []
    subscription = stretch[0]
    place: dict[Identity, int] = {}
    last_of: dict[str, int] = {}
    reached = bisect_left(offsets, start)  # so many of the offsets it got, or needn't get
    for one in ones:
        earlier = place.setdefault((one.source, one.seq), one.offset)
        if earlier != one.offset:
            found.append(Anomaly("duplicate", f"{subscription}: {one.source}:{one.seq} at {earlier} and {one.offset}"))
        last = last_of.get(one.session)
        if one.offset < start or (last is not None and one.offset <= last):
            found.append(
                Anomaly("backward-poll", f"{one.session}: {one.offset} after {start if last is None else last}")
            )
        last_of[one.session] = one.offset
        at = bisect_left(offsets, one.offset)
        if at > reached:
            found.append(
                Anomaly("skipped-poll", f"{one.session}: {one.offset} before {offsets[reached]} was handed out")
            )
        reached = max(reached, at + 1)
    return found


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


def _lost(
    stretches: dict[Stretch, list[Delivered]],
    starts: dict[Stretch, int],
    by_offset: dict[int, Delivered],
    acknowledged: dict[Identity, Acknowledged],
) -> list[Anomaly]:
    """Each subscription's last generation has to have everything from its start on."""
    found = []
    offset_of = {(one.source, one.seq): offset for offset, one in by_offset.items()}
    last: dict[str, int] = {"(nobody read)": 0} if not stretches else {}
    for subscription, generation in stretches:
        last[subscription] = max(generation, last.get(subscription, generation))
    for stretch in last.items():
        start = starts.get(stretch, 0)
        got = {(one.source, one.seq) for one in stretches.get(stretch, ())}
        found += [
            Anomaly("lost-write", f"{stretch[0]}: {identity[0]}:{identity[1]}")
            for identity, ack in acknowledged.items()
            if identity not in got and _place(identity, ack, offset_of) >= start
        ]
    return found


def _place(identity: Identity, ack: Acknowledged, offset_of: dict[Identity, int]) -> float:
    """Where it lies; at the end, as far as anybody can tell, where nobody was handed it or told."""
    return offset_of.get(identity, ack.offset if ack.offset is not None else float("inf"))
