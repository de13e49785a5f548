"""What an elected sender knows, and its settings (`sender`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from seriatim.producer.core.timing import AcknowledgementTiming
from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.names import Epoch, Index, Token
from seriatim.protocol.patience import Patience


class Phase(StrEnum):
    STANDING_BY = "standing by"
    ACQUIRING = "acquiring"
    WAITING = "waiting"
    SENDING = "sending"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class SenderSettings:
    """How much may be in flight, and how long to wait.

    `window_bytes`, `window_batches`: what may be in flight on a stream (one batch always may).
    `deadline_s`, `deadline_max_s`: bounds of the adaptive time without any acknowledgement after which a link counts
    as failed. `first_deadline_s`: the same for the first acknowledgement of a stream, which has to connect first.
    `late_s`: a wake-up later than this says that this process stood still, not that the master did.
    `retry_s`, `retry_max_s`: back-off between requests that failed.
    `tries_on_link`: after so many refusals in a row that are no failure of a member, the link counts as failed.
    """

    window_bytes: int = 8 * 1024 * 1024
    window_batches: int = 64
    deadline_s: float = 0.3
    deadline_max_s: float = 5.0
    first_deadline_s: float = 1.0
    late_s: float = 0.1
    retry_s: float = 0.02
    retry_max_s: float = 1.0
    tries_on_link: int = 5


@dataclass(frozen=True, slots=True)
class Pending:
    """A batch that isn't complete. `number` names it for ever; `batch` carries its last index, `sent_at_s` when."""

    number: int
    batch: EncodedBatch
    sent_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SenderState:
    """All that the sender knows.

    Invariants: `in_flight` <= len(`pending`), 0 unless SENDING; the batches in flight have consecutive indexes that
    end at `next_index`; `pending` is empty and `token` 0 while STANDING_BY and ENDED (H4).
    """

    phase: Phase = Phase.STANDING_BY
    token: Token = Token(0)
    is_told: bool = False
    """Whether the application was told that it is elected, in this term."""
    request: int = 0
    """Number of the last request for a route; answers to earlier ones are ignored."""
    stream: int = 0
    """Number of the last stream; what earlier ones say is ignored."""
    epoch: Epoch = Epoch(0)
    """Epoch of the last grant of this term; 0: none."""
    failed_epoch: Epoch = Epoch(0)
    """Epoch to report as failed; 0: none."""
    failure: str = ""
    base: int | None = None
    next_index: Index = Index(0)
    pending: tuple[Pending, ...] = ()
    in_flight: int = 0
    in_flight_bytes: int = 0
    progress_at_s: float = 0.0
    """When the present stream was opened, or last acknowledged something, or was excused."""
    answered_at_s: float = 0.0
    """When the master first said something on the present stream, if only that it is there; 0: it hasn't."""
    has_progress: bool = False
    """Whether the present stream has acknowledged anything."""
    is_excused: bool = False
    """Whether a late wake-up was already held to this process's account since the last progress."""
    timing: AcknowledgementTiming = field(default_factory=AcknowledgementTiming)
    patience: Patience = field(default_factory=Patience)
    """Of the path to the group: what takes longer on it than the deadline isn't a failure for ever."""
    tries: int = 0
    """Requests for a route since the last grant that failed."""
    refusals: int = 0
    """Refusals on this link since the last acknowledgement that were no failure of a member."""
    retry_at_s: float = 0.0

    @property
    def is_answered(self) -> bool:
        """Whether the master said anything on the present stream."""
        return self.has_progress or self.answered_at_s > 0
