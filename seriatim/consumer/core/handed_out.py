"""What the application was handed, in which term, and what of that it is done with.

A term starts with each ReadFrom, and ends when the reader is deposed; its number only rises. What an earlier term handed out
will be handed out again, and counts for nothing in a later one: neither as passed nor as committed. It is asked per record, so it
changes in place, on the application's thread. A signal's handler may interrupt any step, so each one leaves what the next
one can go on from: no record is lost, and none is handed out twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from seriatim.consumer.core.rows import Rows
from seriatim.consumer.core.view import START, ChainView, Place
from seriatim.protocol.errors import Fenced, InvalidArgument
from seriatim.protocol.names import Index, Offset
from seriatim.protocol.record import Record


class Chunk:
    """The records of one batch, as far as they are handed out.

    0 <= passed <= row <= count: so many records the application is done with, and so many were handed out.
    `before`: the place before the first; `behind`: behind the last, re-sends included.
    `size_bytes`: what they take, decoded.
    """

    __slots__ = ("_queue", "_rows", "before", "behind", "count", "passed", "row", "size_bytes", "term")

    def __init__(self, term: int, rows: Rows, queue: str, before: Place, size_bytes: int) -> None:
        self._rows = rows
        self._queue = queue
        self.term = term
        self.count = len(rows.indexes)
        self.row = 0
        self.passed = 0
        self.before = before
        self.size_bytes = size_bytes
        self.behind = Place(rows.epoch, rows.next_index)

    def records(self, start: int, stop: int) -> list[Record]:
        """Made when they are asked for: Python's collector looks again and again through thousands that nobody is done with."""
        return self._rows.records(self._queue, start, stop)

    def place_after(self, count: int) -> Place:
        """The place behind the first `count` records."""
        if count == self.count:
            return self.behind
        return self.before if count == 0 else Place(self.behind.epoch, Index(self._rows.indexes[count - 1] + 1))

    def offset_after(self, count: int) -> int:
        """The offset of that place, whether or not the chain still has the link."""
        return self._rows.base + self.place_after(count).index


def of_earlier_term(queue: str) -> Fenced:
    """What an application is told that commits what counts no more."""
    return Fenced("what was handed out is of an earlier term, and will be handed out again", queue=queue)


class HandedOut:
    """See the module. `in_hand`: the batch that records are handed out of, or were last; None before the first one."""

    def __init__(self, queue: str) -> None:
        self.in_hand: Chunk | None = None
        self._queue = queue
        self._passed: tuple[int, Place] | None = None  # of the batches before it, in their term
        self._reached_before = START  # by any earlier term
        self._again: deque[Chunk] = deque()  # which a poll that was interrupted had taken
        self._committed: tuple[int, Place] | None = None

    # ---- handing out

    def begin(self, chunk: Chunk) -> None:
        """Records are handed out of this batch from now on."""
        before = self.in_hand
        if before is not None and before.term != chunk.term:
            self._reached_before = max(self._reached_before, before.place_after(before.row))
        self.in_hand = chunk

    def rest(self, term: int, *, is_done: bool) -> Chunk | None:
        """The batch in hand, or the next one that was given back, where any of its records are left; None: another is to begin.

        `is_done`: the application is, with all it was handed.
        """
        while True:
            chunk = self.in_hand
            if chunk is not None and chunk.term == term:
                if chunk.row < chunk.count:
                    return chunk
                if is_done and chunk.passed == chunk.row:
                    # Passed are also the re-sends at its end, and a batch of nothing else.
                    self._passed = chunk.term, chunk.behind
                elif chunk.passed:  # in part: a poll goes on from its rest into what follows
                    self._passed = chunk.term, chunk.place_after(chunk.passed)
            if not self._again:
                return None
            self.begin(self._again[0])
            self._again.popleft()

    def move_past(self) -> None:
        """The application asks for more: it is done with all it was handed."""
        if self.in_hand is not None:
            self.in_hand.passed = self.in_hand.row

    def take_back(self) -> None:
        """It isn't done with what it was handed last, and is handed that once more."""
        if self.in_hand is not None:
            self.in_hand.row = self.in_hand.passed

    def give_back(self, taken: Sequence[tuple[Chunk, int]]) -> None:
        """What a poll had found when it was interrupted wasn't handed out: each batch, in order, and how far it was before."""
        chunks = [chunk for chunk, _ in taken]
        if self.in_hand is not None and self.in_hand not in chunks:
            chunks.append(self.in_hand)
        for chunk, row in taken:
            chunk.row = row
        self._again.extendleft(reversed(chunks[1:]))
        self.in_hand = chunks[0]

    def has_rest(self, term: int) -> bool:
        """Whether records were taken for this term that aren't handed out."""
        chunk = self.in_hand
        return bool(self._again) or (chunk is not None and chunk.term == term and chunk.row < chunk.count)

    # ---- how far it is

    @property
    def term(self) -> int:
        """Of what was handed out last; 0 where nothing was."""
        return 0 if self.in_hand is None else self.in_hand.term

    def passed(self, term: int) -> Place | None:
        """Up to where the application has moved past, in this term; None where it hasn't moved past anything."""
        passed, chunk = self._passed, self.in_hand
        if chunk is not None and chunk.passed > 0:
            passed = chunk.term, chunk.place_after(chunk.passed)
        return passed[1] if passed is not None and passed[0] == term else None

    def place_to_commit(self, what: Record | int | None, term: int, view: ChainView) -> tuple[int, Place]:
        """The term that handed it out, which is this one, and the place behind it: a record, all below an offset, or all there was.

        Raises Fenced for what an earlier term handed out, and this one hasn't yet, InvalidArgument for what none has.
        """
        chunk = self.in_hand
        if chunk is None or chunk.term != term:
            raise of_earlier_term(self._queue)
        row = chunk.row  # another thread may be iterating
        handed = chunk.place_after(row)
        # The end of a link is the start of the next one, too.
        if what is None or (isinstance(what, int) and what == chunk.offset_after(row)):
            return term, handed
        if isinstance(what, int) and 0 <= what <= view.earliest:
            return term, START  # what is below went once everybody was done with it
        place = view.place_of(Offset(what)) if isinstance(what, int) else Place(what.epoch, Index(what.index + 1))
        if place > max(handed, self._reached_before):
            raise InvalidArgument("this was not handed out", queue=self._queue)
        if place > handed:
            raise of_earlier_term(self._queue)
        return term, place

    def note_committed(self, handed: tuple[int, Place]) -> None:
        """The members have it: what `place_to_commit` answered."""
        self._committed = handed

    @property
    def is_all_committed(self) -> bool:
        """Whether nothing was handed out that isn't committed: a loop of polls and commits has this on a quiet queue, and while it stands by."""
        chunk = self.in_hand
        return chunk is None or self._committed == (chunk.term, chunk.place_after(chunk.row))
