"""Whether a producer is elected, as its thread tells the application's: the thread keeps this, and not the producer, which may be dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from seriatim.protocol import log
from seriatim.protocol.callbacks import call_back
from seriatim.protocol.names import Token

_log = log.logger("producer")


@dataclass(frozen=True, slots=True)
class Elected:
    """What an instance is told when it may send: its token, and up to which seq of each source all is stored.

    `resume_point` is None where nobody can tell, because an earlier link is lost. `held`: up to where the queue has records,
    at or above the resume point; what lies between may be on one disk only, and is sent again by whoever still has it. Who
    hasn't, because it was acknowledged, knows by `held` that none is missing. `given_up_from`: the first seq of a source that
    an operator may have given up.
    """

    token: Token
    resume_point: Mapping[str, int] | None
    held: Mapping[str, int] = field(default_factory=dict)
    given_up_from: Mapping[str, int] = field(default_factory=dict)


class Terms:
    """`elected`: the present term. `waiters` are called when that changes; and no lock, as in the consumer's HandOver.

    `on_elected` and `on_deposed` are the application's.
    """

    def __init__(self, on_elected: Callable[[Elected], None] | None, on_deposed: Callable[[str], None] | None) -> None:
        self.elected: Elected | None = None
        self.waiters: dict[Callable[[], None], None] = {}
        self._on_elected = on_elected
        self._on_deposed = on_deposed

    def begin(self, elected: Elected) -> None:
        """A term begins, and the application is told."""
        self._set(elected)
        call_back(_log, self._on_elected, elected)

    def depose(self, reason: str) -> None:
        """It is over, and the application is told."""
        self._set(None)
        call_back(_log, self._on_deposed, reason)

    def end(self) -> None:
        """None goes on, as far as the application is to know."""
        self._set(None)

    def _set(self, elected: Elected | None) -> None:
        self.elected = elected
        for waiter in list(self.waiters):
            waiter()
