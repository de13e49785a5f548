"""Facts that a procedure is told, and orders that it gives.

A procedure is a pair of functions, `start(request) -> (state, effects)` and `step(state, event, now_ms) -> (state, effects)`.
Effects are given in the order in which they must be carried out; each that asks for something is answered by one event.
ReadChain and WriteChain begin a new round: whatever effects given before them still bring is dropped, not told. A
procedure is over when it gave an `Answer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seriatim.coordinator.core.registry import Registry
from seriatim.coordinator.core.seal import SealAnswer
from seriatim.protocol.chain import ChainDocument, ChainMember, Link
from seriatim.protocol.errors import SeriatimError
from seriatim.protocol.names import ChainVersion, Generation, Index, MemberName, Offset, SubscriptionId, Token
from seriatim.protocol.position import Position

# ---- events


@dataclass(frozen=True, slots=True)
class ChainRead:
    """The chain as it was read just now, and the registry as it was last seen (perhaps before).

    `is_remembered`: the chain, too, is as it was last seen. Only what a compare-and-set on its version would refuse may
    rest on it.
    """

    document: ChainDocument
    version: ChainVersion
    registry: Registry
    is_remembered: bool = False


@dataclass(frozen=True, slots=True)
class ChainWritten:
    version: ChainVersion


@dataclass(frozen=True, slots=True)
class ChainConflict:
    """Somebody changed the chain first; nothing was written."""


@dataclass(frozen=True, slots=True)
class SessionsSeen:
    """The registry, looked up after the event before this one (H10, H15)."""

    registry: Registry


@dataclass(frozen=True, slots=True)
class ElectionSeen:
    """`first`: the election node that is first in line; empty where nobody stands."""

    first: str


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """The member at `place` takes records for the link; it holds what is before `position`."""

    place: str
    position: Position


@dataclass(frozen=True, slots=True)
class OpenFailed:
    place: str
    error: SeriatimError


@dataclass(frozen=True, slots=True)
class SealAnswered:
    place: str
    answer: SealAnswer


@dataclass(frozen=True, slots=True)
class SealFailed:
    place: str
    error: SeriatimError


@dataclass(frozen=True, slots=True)
class KeptSealsRead:
    """Answers that members wrote beside the chain because no coordinator reached them (protocol.md 5.4)."""

    answers: Mapping[str, SealAnswer]


@dataclass(frozen=True, slots=True)
class ReaderTold:
    """The member knows the reader's token now. `cursor` is None where it has none.

    `by`: the token of the reader that committed it, or was to start there; 0: a member of an earlier version doesn't say.
    """

    place: str
    cursor: Index | None
    is_stale: bool
    by: Token = Token(0)


@dataclass(frozen=True, slots=True)
class ReaderNotTold:
    place: str
    error: SeriatimError


@dataclass(frozen=True, slots=True)
class Woken:
    """The time asked for by WakeAfter is over."""


Event = (
    ChainRead
    | ChainWritten
    | ChainConflict
    | SessionsSeen
    | ElectionSeen
    | LinkOpened
    | OpenFailed
    | SealAnswered
    | SealFailed
    | KeptSealsRead
    | ReaderTold
    | ReaderNotTold
    | Woken
)

# ---- effects


@dataclass(frozen=True, slots=True)
class ReadChain:
    """Answered by ChainRead. `may_be_remembered`: where the chain is known from before, that does for a start.

    `is_newest`: as it is now, also where this coordinator's ZooKeeper server is behind. `leads_to_write`: of what is read now, so that
    whoever else is about to write had better wait until that is done.
    """

    may_be_remembered: bool = False
    is_newest: bool = False
    leads_to_write: bool = False


@dataclass(frozen=True, slots=True)
class WriteChain:
    """Compare-and-set; answered by ChainWritten or ChainConflict. `what`: the decision, for the log."""

    document: ChainDocument
    expected: ChainVersion
    what: str


@dataclass(frozen=True, slots=True)
class LookUpSessions:
    """Answered by SessionsSeen: of this group read now, of the others as remembered."""

    group: str


@dataclass(frozen=True, slots=True)
class LookUpElection:
    """Of senders, or of a subscription's readers. Answered by ElectionSeen."""

    subscription_id: SubscriptionId | None = None


@dataclass(frozen=True, slots=True)
class SendOpen:
    """Answered by LinkOpened or OpenFailed."""

    side: ChainMember
    link: Link
    token: Token
    version: ChainVersion
    max_record_bytes: int


@dataclass(frozen=True, slots=True)
class SendSeal:
    """To whoever is at this side's place now. Answered by SealAnswered or SealFailed."""

    side: ChainMember
    link: Link
    version: ChainVersion


@dataclass(frozen=True, slots=True)
class ReadKeptSeals:
    """Answered by KeptSealsRead."""

    link: Link


@dataclass(frozen=True, slots=True)
class TellReader:
    """To whoever is at this place now. Answered by ReaderTold or ReaderNotTold.

    `cursor`: where this reader starts, of what both members have; 0: nothing to pass on.
    """

    member: MemberName
    link: Link
    subscription_id: SubscriptionId
    generation: Generation
    token: Token
    cursor: Index


@dataclass(frozen=True, slots=True)
class WakeAfter:
    """Answered by Woken, unless the procedure is over first."""

    delay_ms: int


@dataclass(frozen=True, slots=True)
class SendGrant:
    """Where the sender sends (protocol.md 4, step 2).

    `held`: up to which seq of each source the chain holds records, also those that may be on one disk only; a lower bound
    where the resume point is unknown. `given_up_from`: the first seq of a source that an operator may have given up.
    `next_group`: where a switch would lead now; empty: to none.
    """

    link: Link
    token: Token
    next_index: Index
    is_resume_known: bool
    resume_point: Mapping[str, int]
    held: Mapping[str, int]
    given_up_from: Mapping[str, int]
    max_record_bytes: int
    base: Offset | None
    next_group: str = ""


@dataclass(frozen=True, slots=True)
class ReadGrant:
    """Where the reader reads. `link` is None where the consume list is empty."""

    document: ChainDocument
    version: ChainVersion
    subscription_id: SubscriptionId
    generation: Generation
    token: Token
    link: Link | None
    index: Index


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to be had now. `reasons`: what is waited for, and why."""

    reasons: Mapping[str, str]
    token: Token = Token(0)


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """The link has ended, or is lost, in this document."""

    document: ChainDocument
    version: ChainVersion


@dataclass(frozen=True, slots=True)
class Refused:
    error: SeriatimError


@dataclass(frozen=True, slots=True)
class Answer:
    """The procedure is over."""

    result: SendGrant | ReadGrant | LinkClosed | Wait | Refused


Effect = (
    ReadChain
    | WriteChain
    | LookUpSessions
    | LookUpElection
    | SendOpen
    | SendSeal
    | ReadKeptSeals
    | TellReader
    | WakeAfter
    | Answer
)
Effects = tuple[Effect, ...]
