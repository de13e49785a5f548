"""Commits the subscription's cursor behind the target, on a thread of its own, so that no micro-batch waits for it."""

from __future__ import annotations

import threading

from seriatim.consumer.subscriber import Subscriber, Term
from seriatim.protocol import log
from seriatim.protocol.errors import SeriatimError

_log = log.logger("replay")

_TIMEOUT_S = 5.0
_EVERY_S = 0.2
_FINISH_S = 2.0


class CursorKeeper:
    """`want(offset)` after the target has everything below it, in `term`. Only the newest wish counts.

    A cursor that stays behind costs nothing but disk at the members: the target knows the position.
    """

    def __init__(self, subscriber: Subscriber, term: Term) -> None:
        self._subscriber = subscriber
        self._term = term
        self._changed = threading.Condition()
        self._wanted = 0
        self._committed = 0
        self._is_committing = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="seriatim-cursor", daemon=True)
        self._thread.start()

    def want(self, offset: int) -> None:
        """Commit everything below `offset`, some time soon."""
        with self._changed:
            if offset > self._wanted:
                self._wanted = offset
                self._changed.notify_all()

    @property
    def wanted(self) -> int:
        """The cursor may be as far."""
        return self._wanted

    def seek(self, offset: int) -> None:
        """Move the cursor back; a new term begins. Raises as `Subscriber.seek`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_committing, 2 * _TIMEOUT_S)  # it would undo that
            self._subscriber.seek(offset, timeout_s=_TIMEOUT_S)
            self._wanted = self._committed = offset

    def finish(self) -> None:
        """Wait a little for what was wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._committed >= self._wanted, _FINISH_S)

    def close(self) -> None:
        """Stop, without waiting for what is still wanted."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._wanted > self._committed)
                if self._is_closed:
                    return
                offset = self._wanted
                self._is_committing = True
            try:
                self._subscriber.commit(offset, term=self._term, timeout_s=_TIMEOUT_S)
            except SeriatimError as error:
                _log.debug("cursor not committed", offset=offset, reason=error.message)
            else:
                with self._changed:
                    self._committed = max(self._committed, offset)
            with self._changed:
                self._is_committing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_closed, _EVERY_S)
