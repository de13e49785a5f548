"""Identities: which seq a record gets, and which seqs of the user's are let through.

One `Identities` serves one term, the time from one election to the next deposal. It is asked per record, so it is the
one part of this core that changes in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from seriatim.protocol.batch import MAX_SOURCE_BYTES
from seriatim.protocol.errors import InvalidArgument, SeqNotRising, TooManyElections
from seriatim.protocol.marks import SOURCES_ROOM_BYTES, room_bytes, too_many_sources
from seriatim.protocol.names import COUNTER_BITS, SEQ_MAX, TOKEN_MAX, Token, automatic_seq

SPARE_SEQS: Final = 1 << 30
"""A term has so many more automatic seqs when it is spent: for what is on its way until the next one."""


class Identities:
    """Gives and checks identities within one term.

    `name`: source of records for which the user names neither source nor seq. `resume_point`: up to which seq of each source everything
    is stored already; None where nobody knows. `held`: up to which the queue has any, at or above that.
    """

    __slots__ = ("_counter", "_held_seq", "_is_automatic", "_last", "_resume_point", "_room_bytes", "name", "token")

    def __init__(
        self, name: str, token: Token, resume_point: Mapping[str, int] | None, held: Mapping[str, int] | None = None
    ) -> None:
        self.name = name
        self.token = token
        self._held_seq = -1 if held is None else held.get(name, -1)
        self._is_automatic = False
        self._resume_point = {} if resume_point is None else dict(resume_point)
        self._room_bytes = SOURCES_ROOM_BYTES - room_bytes(self._resume_point)
        self._last: dict[str, int] = {}
        self._counter = 0

    def automatic(self, count: int) -> int:
        """The first of `count` consecutive automatic seqs of source `name`.

        Raises OverflowError after 2**40 records of a term.
        """
        first = automatic_seq(self.token, self._counter)
        automatic_seq(self.token, self._counter + count - 1)
        self._counter += count
        return first

    @property
    def is_spent(self) -> bool:
        """Whether it is time for another term: at a million records a second after twelve days."""
        return self._counter >= (1 << COUNTER_BITS) - SPARE_SEQS

    def check_automatic(self) -> None:
        """Raise InvalidArgument where source `name` can't have automatic seqs, because the user gave seqs for it, in this term or before.

        Raises TooManyElections where the queue has had more elected senders than a seq can tell apart, TooManySources where it has no
        room for the source.
        """
        if self.token > TOKEN_MAX:
            raise TooManyElections(
                f"the queue has had {TOKEN_MAX:,} elected senders: it takes no record any more that has no seq of the application's own",
                token=self.token,
            )
        if self.name in self._last:
            raise InvalidArgument(
                f"source {self.name!r} has seqs of the user's: a source has either those or automatic ones"
            )
        if not self._is_automatic:
            self._check_first_automatic()
            self._is_automatic = True

    def _check_first_automatic(self) -> None:
        """What lies at or below its source's mark is taken for sent again: acknowledged, and not stored."""
        first = automatic_seq(self.token, 0)
        stored = max(self._held_seq, self._resume_point.get(self.name, -1))
        if stored >= first:
            raise InvalidArgument(
                f"the queue has records of source {self.name!r} up to seq {stored}, and automatic seqs would begin at {first}: "
                "a source has either those or the user's",
                source=self.name,
                seq=stored,
            )
        if self.name not in self._resume_point:
            self._take_room(self.name)

    def _take_room(self, source: str) -> None:
        taken_bytes = room_bytes([source])
        if taken_bytes > self._room_bytes:
            raise too_many_sources(source)
        self._room_bytes -= taken_bytes

    @property
    def has_own(self) -> bool:
        """Whether the user gave a seq in this term."""
        return bool(self._last)

    def is_resumed(self, source: str, seq: int) -> bool:
        """Whether a record with the user's own seq is stored already, so that it needn't be sent.

        Otherwise the seq is noted as the source's last. Raises SeqNotRising where it doesn't rise, InvalidArgument
        where it is no seq or the source can't have one, TooManySources where the queue has no room for the source.
        """
        check_seq(seq)
        last = self._last.get(source)
        if last is None:
            _check_source(source)
            if source == self.name and self._counter:
                raise InvalidArgument(f"source {source!r} has automatic seqs: a source has either those or the user's")
            if source not in self._resume_point:
                self._take_room(source)
        if seq <= self._resume_point.get(source, -1):
            return True
        if last is not None and seq <= last:
            raise SeqNotRising(
                f"seq {seq} of source {source!r} comes after {last}", source=source, seq=seq, last_seq=last
            )
        self._last[source] = seq
        return False


def check_seq(seq: int) -> None:
    """Raise InvalidArgument for what can't be one."""
    if not 0 <= seq <= SEQ_MAX:
        raise InvalidArgument(f"a seq is an unsigned 64-bit number, not {seq}")


def _check_source(source: str) -> None:
    try:
        size_bytes = len(source.encode())
    except UnicodeEncodeError:
        size_bytes = 0
    if not 0 < size_bytes <= MAX_SOURCE_BYTES:
        raise InvalidArgument(f"the name of a source is text of 1 to {MAX_SOURCE_BYTES} bytes: {source!r}")
