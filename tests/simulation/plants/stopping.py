"""Wrong rules of stops on purpose: what is waited for, committed and left behind."""

from __future__ import annotations

from typing import Any

from seriatim.consumer.client import Consumer
from seriatim.consumer.core.handed_out import HandedOut
from seriatim.producer.buffer import Buffer
from seriatim.protocol.election import Election
from tests.simulation.plants.plant import Plant, changed, instead, together
from tests.simulation.schedule import Shape
from tests.simulation.zookeeper_session import SimulatedSession


def _waits_for_none(right: Any, self: Buffer) -> Any:
    _, told = right(self)
    return [], told


def _ends_what_is_in_flight(right: Any, self: Buffer, reason: str, in_flight: Any) -> None:
    with self._lock:
        self._full.clear()
        self._open = None
    right(self, reason, in_flight)


async def _hands_over_all(right: Any, self: Consumer) -> None:
    self._handed_out.move_past()
    await right(self)


def _forgets_a_part(right: Any, self: HandedOut, term: int, *, is_done: bool) -> Any:
    passed, chunk = self._passed, right(self, term, is_done=is_done)
    if not is_done:
        self._passed = passed
    return chunk


async def _leaves_it_to_the_session(_: Any) -> None:
    """Whoever is gone is found out."""


async def _hangs_up(self: SimulatedSession) -> None:
    self.end()


PLANTS = (
    Plant(
        "closed before it is answered",
        "a sender that closes leaves, and what it has sent is answered or not",
        changed(Buffer, "flush", _waits_for_none),
        within=20,
        shape=Shape(kinds=("close the sender",), faults=(1, 2), pause_s=0.02),
        finds="8: .* was closed",
    ),
    Plant(
        "closed without an end",
        "what was sent and isn't on its way yet when a sender closes has no end",
        changed(Buffer, "depose", _ends_what_is_in_flight),
        within=60,
        shape=Shape(kinds=("stop all",), faults=(3, 4), pause_s=0.02),
        finds="12: .* have no end",
    ),
    Plant(
        "closed in hand",
        "a reader that closes commits all that it handed out",
        changed(Consumer, "_stop", _hands_over_all),
        within=20,
        shape=Shape(kinds=("close the reader",), faults=(2, 3), paces=(4,)),
        finds="6: .* is in hand",
    ),
    Plant(
        "passed in part",
        "a poll that goes on from the rest of a batch into the next one takes back what was passed of it",
        changed(HandedOut, "rest", _forgets_a_part),
        within=60,
        shape=Shape(kinds=("close the reader", "pause an application"), faults=(3, 4), paces=(4,), polls=1.0),
        finds="6: .* was closed, done up to",
    ),
    Plant(
        "gone without a word",
        "who stops leaves its election's node, and all else, to the end of its session",
        together(
            instead(Election, "_resign", _leaves_it_to_the_session),
            instead(SimulatedSession, "stop", _hangs_up),
        ),
        within=20,
        shape=Shape(kinds=("close the sender", "close the reader", "resign"), faults=(1, 2), coordinators=(2,)),
        finds="12: ",
    ),
)
