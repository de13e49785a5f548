"""The subscription's cursor, which follows the target; no micro-batch waits for it."""

from __future__ import annotations

import contextlib

from seriatim.consumer.subscriber import Subscriber, Term
from seriatim.protocol.errors import SeriatimError

_SEEK_S = 5.0
_FINISH_S = 2.0


class CursorKeeper:
    """`want(offset)` after the target has everything below it, in `term`. `wanted`: the cursor may be as far.

    A cursor that stays behind costs nothing but disk at the members: the target knows the position.
    """

    def __init__(self, subscriber: Subscriber, term: Term) -> None:
        self._subscriber = subscriber
        self._term = term
        self.wanted = 0

    def want(self, offset: int) -> None:
        """Commit everything below `offset`, some time soon."""
        if offset > self.wanted:
            self.wanted = offset
            self._subscriber.ask_commit(offset, term=self._term)

    def seek(self, offset: int) -> None:
        """Move the cursor back; a new term begins. Raises as `Subscriber.seek`."""
        self._subscriber.seek(offset, timeout_s=_SEEK_S)
        self.wanted = offset

    def finish(self) -> None:
        """Wait a little for what was wanted."""
        if self.wanted:
            with contextlib.suppress(SeriatimError):
                self._subscriber.commit(self.wanted, term=self._term, timeout_s=_FINISH_S)
