"""What an application gets for a record that is stored. Not compiled: it is copied and pickled, which compiled ones can't be."""

from __future__ import annotations

from dataclasses import dataclass

from seriatim.protocol.names import Epoch, Index, Offset


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A record that two members hold.

    `epoch`, `index` and `offset` are None where it was found to be stored already, by a resume point or as a re-send;
    `offset` also where the link's base isn't known, while an earlier link is lost. A record that was sent again in a switch may lie at an
    earlier offset, too, and is handed to readers there: at this one they find a gap.
    """

    epoch: Epoch | None
    index: Index | None
    offset: Offset | None
    source: str
    seq: int
