"""How long the other side of a stream may say nothing before it is left for another one.

A fixed time fails on a slow path: a batch that takes longer than that never arrives, however often it is asked for.
So what the path shows is remembered; and where somebody was left in vain, the next one gets longer each round (as TCP's
retransmission does, RFC 6298 5.5) and one batch at a time, because what was sent can't be taken back and stands in the
way of what follows. A path that is cut isn't waited for: TCP gives its connections up (`rpc`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_S = 60.0
"""The most that is waited: 512 KiB pass at 70 kbit/s."""
HALF_LIFE_S = 10.0
"""How long the length of a gap is remembered by half."""
_MARGIN = 2.0
_ANSWER_MAX_S = 1.0


def backoff_s(first_s: float, most_s: float, times: int) -> float:
    """How long to leave what failed, or was done in vain, so many times: twice as long each time."""
    return min(most_s, first_s * float(2 ** min(times, 16)))


@dataclass(frozen=True, slots=True)
class Patience:
    """What was seen of a path.

    gap_s: the longest time of silence that ended with a word, halved every `HALF_LIFE_S`.
    answer_s: how long the first word on a stream took, at most `_ANSWER_MAX_S`, halved with each: the way there and back.
    silences: how often in a row somebody was left for saying nothing, since something arrived that was waited for.
    """

    gap_s: float = 0.0
    answer_s: float = 0.0
    silences: int = 0

    @property
    def is_tried(self) -> bool:
        """Whether the last one was left in vain: not more than one batch is to be on its way then."""
        return self.silences > 0

    def limit_s(self, usual_s: float, *, is_answered: bool = True) -> float:
        """How long to wait now. `usual_s`: on a path of which nothing is known. `is_answered`: something was said on this stream."""
        grown_s = usual_s * float(2 ** min(self.silences // 2, 10))
        seen_s = self.gap_s if is_answered else max(self.gap_s, self.answer_s)
        return max(usual_s, min(MAX_S, max(grown_s, _MARGIN * seen_s)))

    def answered(self, after_s: float) -> Patience:
        """The first word on a stream came. It may have waited for a connection, or for a cut to heal."""
        return replace(self, answer_s=max(self.answer_s / 2, min(after_s, _ANSWER_MAX_S)))

    def heard(self, gap_s: float, usual_s: float) -> Patience:
        """Something was said after so long, on a stream on which something was said before.

        What is far below what is usual tells nothing, and what is longer than the limit was this process's own sleep.
        """
        seen_s = min(gap_s, self.limit_s(usual_s)) if gap_s * _MARGIN > usual_s else 0.0
        return replace(self, gap_s=max(seen_s, self.gap_s * float(0.5 ** (gap_s / HALF_LIFE_S))))

    def arrived(self) -> Patience:
        """What was waited for is here, or nothing is to be waited for."""
        return replace(self, silences=0) if self.silences else self

    def left(self) -> Patience:
        """Somebody was left for saying nothing."""
        return replace(self, silences=self.silences + 1)
