"""Where a link ends, from what its members answered (protocol.md 5.2, 5.3; H1, H11).

One whole answer is enough: it holds all that was acknowledged. Where both answered, the end is the last position on
which both copies agree. Without a whole answer nothing is decided in `sync` and `interval`; in the other modes, only when
both disks have answered, and then by the larger one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from seriatim.coordinator.core.chain_point import ChainPoint
from seriatim.protocol.chain import Certificate, ChainMember, Link
from seriatim.protocol.marks import merged
from seriatim.protocol.names import Incarnation
from seriatim.protocol.position import START, Position


class Wholeness(StrEnum):
    """unknown is no answer: another disk, or something that can't be read. partial: may have lost what it acknowledged."""

    UNKNOWN = "unknown"
    WHOLE = "whole"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True)
class SealAnswer:
    """What a sealed member holds durably: `positions` from its committed index to its next index, in rising order.

    `has_failed`: its disk has, so it tells nothing, and as this incarnation nothing more becomes durable there.
    """

    wholeness: Wholeness
    incarnation: Incarnation
    positions: tuple[Position, ...]
    reason: str = ""
    has_failed: bool = False

    @property
    def committed(self) -> Position:
        return self.positions[0] if self.positions else START

    @property
    def next(self) -> Position:
        return self.positions[-1] if self.positions else START


@dataclass(frozen=True, slots=True)
class Undecided:
    """No end can be told from these answers; `reasons` by member."""

    reasons: Mapping[str, str]


def judged(link: Link, side: ChainMember, answer: SealAnswer) -> SealAnswer:
    """The answer, held against what the chain says about this side of the link.

    Another disk's answer is no answer, whatever it says (H1), until the end is recorded: what it has been filled with since
    is a copy by the certificate. In a mode that doesn't survive a restart, the answer of another start of the process isn't
    whole (protocol.md 5.2).
    """
    if link.end is None and answer.incarnation.disk_id != side.incarnation.disk_id:
        reason = f"another disk ({answer.incarnation.disk_id}) is at its place"
        return SealAnswer(Wholeness.UNKNOWN, answer.incarnation, (), reason)
    restarted = answer.incarnation.start != side.incarnation.start
    if restarted and not link.durability.survives_restart and answer.wholeness is Wholeness.WHOLE:
        return SealAnswer(Wholeness.PARTIAL, answer.incarnation, answer.positions, "it restarted")
    return answer


def largest_common(one: SealAnswer, other: SealAnswer) -> Position | None:
    """The last position that both copies have with the same hash; their start where a copy begins there."""
    there = {(position.index, position.hash) for position in (*other.positions, START)}
    positions = sorted((*one.positions, START), key=lambda position: position.index)
    common = [position for position in positions if (position.index, position.hash) in there]
    found = common[-1]
    if found.index < max(one.committed.index, other.committed.index):
        # A committed record is on both: copies that agree on less aren't copies of one link.
        return None
    return found


def decide(
    link: Link, before: ChainPoint, answers: Mapping[str, SealAnswer], *, now_ms: int
) -> Certificate | Undecided:
    """The certificate that these answers (by place, `a` and `b`, already `judged`) allow, or why there is none.

    `before`: the state of the chain where the link starts.
    """
    known = {place: answer for place, answer in answers.items() if answer.wholeness is not Wholeness.UNKNOWN}
    whole = [answer for answer in known.values() if answer.wholeness is Wholeness.WHOLE]
    if len(whole) == 2:
        common = largest_common(*whole)
        if common is None:
            return Undecided(dict.fromkeys(known, "its copy differs from the other one"))
        return _certificate(link, before, common, common.marks, whole, is_whole=True, now_ms=now_ms)
    if len(whole) == 1:
        return _certificate(
            link, before, whole[0].next, _on_two_of(whole[0], known), whole, is_whole=True, now_ms=now_ms
        )
    if link.durability.survives_restart or len(known) < 2:
        return Undecided(_reasons(link, answers))
    larger, smaller = sorted(known.values(), key=lambda answer: answer.next.index, reverse=True)
    on_two = largest_common(larger, smaller)
    return _certificate(
        link,
        before,
        larger.next,
        {} if on_two is None else on_two.marks,
        (larger, smaller),
        is_whole=False,
        now_ms=now_ms,
    )


def given_up(link: Link, before: ChainPoint, answers: Sequence[SealAnswer], *, now_ms: int) -> Certificate:
    """The certificate of a link that an operator abandons: it ends with the largest copy that can be read (5.7)."""
    readable = [answer for answer in answers if answer.wholeness is not Wholeness.UNKNOWN]
    largest = max((answer.next for answer in readable), key=lambda position: position.index, default=START)
    return _certificate(link, before, largest, {}, readable, is_whole=False, now_ms=now_ms)


def _on_two_of(whole: SealAnswer, known: Mapping[str, SealAnswer]) -> Mapping[str, int]:
    """Marks up to which two members hold every record, where only one answer is whole (H2).

    Alone, it knows what was committed. Beside a copy that lost something, only what both still have counts.
    """
    other = next((answer for answer in known.values() if answer is not whole), None)
    if other is None:
        return whole.committed.marks
    there = {(position.index, position.hash) for position in other.positions}
    common = [position for position in whole.positions if (position.index, position.hash) in there]
    return common[-1].marks if common else {}


def _certificate(
    link: Link,
    before: ChainPoint,
    end: Position,
    on_two: Mapping[str, int],
    answers: Iterable[SealAnswer],
    *,
    is_whole: bool,
    now_ms: int,
) -> Certificate:
    """An empty link's marks are those before it."""
    return Certificate(
        end=end.index,
        answered=tuple(sorted(answer.incarnation for answer in answers)),
        durability=link.durability,
        is_whole=is_whole,
        marks=merged(before.marks, end.marks),
        marks_on_two=merged(merged(before.marks_on_two, link.marks_on_two), on_two),
        link_hash=end.hash,
        chain_hash=None,
        sealed_at_ms=now_ms,
    )


def _reasons(link: Link, answers: Mapping[str, SealAnswer]) -> dict[str, str]:
    reasons = {}
    for side in link.sides:
        answer = answers.get(side.name.member)
        if answer is None:
            continue
        what = "it can't read the link" if answer.wholeness is Wholeness.UNKNOWN else "it may have lost records"
        reasons[str(side.name)] = answer.reason or what
    return reasons
