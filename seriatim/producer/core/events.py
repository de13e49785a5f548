"""What happens to a sender (events, facts in the past tense) and what it orders (effects, run in the order given)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.errors import SeriatimError
from seriatim.protocol.names import Epoch, Index, Token

Marks = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Grant:
    """Where to send, as a coordinator answered (SendGrant in seriatim.proto).

    `resume_point`: None where it is unknown. `base`: None where it is unknown. `route` is the shell's own. `held` and
    `given_up_from` are for the application; nothing is complete because of them (H2).
    """

    epoch: Epoch
    next_index: Index
    resume_point: Marks | None
    base: int | None
    route: object
    held: Marks = field(default_factory=dict)
    given_up_from: Marks = field(default_factory=dict)


# ---- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Elected:
    """The election says that this instance is first in line."""


@dataclass(frozen=True, slots=True)
class Deposed:
    """The election says that it isn't, or nobody can tell any more (session suspended or lost)."""

    reason: str


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The application gives its election up, and stands for the next one."""


@dataclass(frozen=True, slots=True)
class Granted:
    request: int
    token: Token
    grant: Grant


@dataclass(frozen=True, slots=True)
class WaitAnswered:
    """No group can take records now."""

    request: int
    token: Token
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class AcquireFailed:
    """A request for a route got an error; which one says whether to ask again."""

    request: int
    error: SeriatimError


@dataclass(frozen=True, slots=True)
class BatchClosed:
    number: int
    batch: EncodedBatch


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Every record below `next_index` of the stream's link is committed."""

    stream: int
    next_index: Index


@dataclass(frozen=True, slots=True)
class Refused:
    """The stream ended with an error of the master's."""

    stream: int
    error: SeriatimError


@dataclass(frozen=True, slots=True)
class StreamBroken:
    """The stream ended without one: nobody answers."""

    stream: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; sent when `wake_at_s` says so."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The application is done."""


Event = (
    Elected
    | Deposed
    | Withdrawn
    | Granted
    | WaitAnswered
    | AcquireFailed
    | BatchClosed
    | Acknowledged
    | Refused
    | StreamBroken
    | Tick
    | Closed
)


# ---- effects -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Acquire:
    """Ask any coordinator for a route."""

    request: int
    token: Token
    failed_epoch: Epoch
    failure: str


@dataclass(frozen=True, slots=True)
class OpenStream:
    stream: int
    token: Token
    grant: Grant


@dataclass(frozen=True, slots=True)
class CloseStream:
    stream: int


@dataclass(frozen=True, slots=True)
class Send:
    """Put a batch, which carries its index, on the stream."""

    stream: int
    number: int
    batch: EncodedBatch


@dataclass(frozen=True, slots=True)
class Complete:
    """All records left in this batch are acknowledged; the first of them has this index."""

    number: int
    epoch: Epoch
    first_index: Index
    base: int | None


@dataclass(frozen=True, slots=True)
class Resume:
    """The records of this batch at or below these marks are held by two members: they are complete.

    `is_whole`: all of them are.
    """

    number: int
    marks: Marks
    is_whole: bool


@dataclass(frozen=True, slots=True)
class FailAll:
    """Every record that isn't complete, closed into a batch or not, ends as outcome unknown (H4)."""

    reason: str


@dataclass(frozen=True, slots=True)
class TellElected:
    token: Token
    grant: Grant


@dataclass(frozen=True, slots=True)
class TellDeposed:
    reason: str


@dataclass(frozen=True, slots=True)
class StandAgain:
    """Leave the election and stand for it with a new node: the present one was overtaken."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The producer can't go on: an error of the caller's, or a bug."""

    error: SeriatimError


Effect = (
    Acquire
    | OpenStream
    | CloseStream
    | Send
    | Complete
    | Resume
    | FailAll
    | TellElected
    | TellDeposed
    | StandAgain
    | Stop
)
