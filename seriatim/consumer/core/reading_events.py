"""What the reading core is told, and what it orders (`core.reading`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from seriatim.consumer.core.rows import Delivery
from seriatim.consumer.core.view import NOBODYS, ChainView, Grant, Place, Side
from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.names import Epoch, Index, Offset

# ---- events: facts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadFrom:
    """Reading starts anew at `place`; everything delivered and not yet taken is void.

    `is_end`: the place is known to be the recorded end of its link. `since`: what is below this offset isn't handed out, also in
    a later link than that of `place`. `until`: offset at which to stop, exclusive. `grant`: in whose name.
    """

    view: ChainView
    place: Place
    is_end: bool = False
    since: Offset = Offset(0)
    until: Offset | None = None
    grant: Grant = NOBODYS


@dataclass(frozen=True, slots=True)
class Stopped:
    """Not to read any more: deposed, or closed. What was delivered and not yet taken is void."""


@dataclass(frozen=True, slots=True)
class ViewChanged:
    view: ChainView


@dataclass(frozen=True, slots=True)
class Drained:
    """A coordinator says that every link before `head` is committed to its end: the chain may let go of it, heard of or not."""

    head: Epoch


@dataclass(frozen=True, slots=True)
class StartArrived:
    """The member will start with the batch at `index`, before which the marks are these."""

    fetch_id: int
    index: Index
    marks: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class BatchesArrived:
    """At least one, in the order of the link."""

    fetch_id: int
    batches: Sequence[EncodedBatch]


@dataclass(frozen=True, slots=True)
class EndReached:
    """The member says: this is the link's recorded end, and all before it was sent."""

    fetch_id: int
    end: Index


@dataclass(frozen=True, slots=True)
class Heard:
    """The member has nothing to send just now, and says so, and how much is committed. `is_sealed`: and that it sealed the link, and knows no end."""

    fetch_id: int
    committed: Index = Index(0)
    is_sealed: bool = False


@dataclass(frozen=True, slots=True)
class FetchFailed:
    fetch_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class RowsTaken:
    """The application took deliveries of this size from the buffer."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class Tick:
    """The time that was asked for has come."""


Event = (
    ReadFrom
    | Stopped
    | ViewChanged
    | Drained
    | StartArrived
    | BatchesArrived
    | EndReached
    | Heard
    | FetchFailed
    | RowsTaken
    | Tick
)


# ---- effects: orders -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenFetch:
    fetch_id: int
    epoch: Epoch
    side: Side
    from_index: Index
    credit_bytes: int


@dataclass(frozen=True, slots=True)
class CloseFetch:
    fetch_id: int


@dataclass(frozen=True, slots=True)
class GiveCredit:
    fetch_id: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Deliver:
    delivery: Delivery


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send a Tick then; takes the place of an earlier order."""

    at_s: float


@dataclass(frozen=True, slots=True)
class LookAtChain:
    """Who tells of the chain may stand still: ask somebody else."""


Effect = OpenFetch | CloseFetch | GiveCredit | Deliver | WakeAt | LookAtChain
