"""Defects to plant: each is one wrong rule in a core, or in what the shells do, and the bounds in which it must be found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from seriatim.broker_group.core import replica, replica_events
from seriatim.coordinator.core import acquire_send, chain, seal
from seriatim.coordinator.core.events import OpenFailed, SendOpen
from seriatim.coordinator.core.seal import Undecided
from seriatim.producer.core import invariants as sender_invariants
from seriatim.producer.core import sender
from seriatim.protocol.chain import LinkState
from seriatim.protocol.errors import Fenced, OlderVersion
from tests.simulation.exhaustive import switches
from tests.simulation.exhaustive.bounds import Bounds
from tests.simulation.exhaustive.explorer import Result, explore

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Plant:
    """`finds`: how the violation's text starts. `within_states`: so many states suffice."""

    bounds: Bounds
    install: Callable[[Patch], None]
    finds: str
    within_states: int

    def explored(self) -> Result:
        """Up to the first state that breaks."""
        with pytest.MonkeyPatch.context() as patch:
            self.install(patch)
            return explore(self.bounds, max_states=self.within_states, checks_liveness=False)


def _wrapped(patch: Patch, module: Any, name: str, wrong: Callable[..., Any]) -> None:
    right = getattr(module, name)
    patch.setattr(module, name, lambda *arguments, **named: wrong(right, *arguments, **named))


def _h1(patch: Patch) -> None:
    def largest_that_came(right, link, before, answers, *, now_ms):
        found = right(link, before, answers, now_ms=now_ms)
        if not isinstance(found, Undecided) or not answers:
            return found
        largest = max(answers.values(), key=lambda answer: answer.next.index)
        return seal._certificate(link, before, largest.next, {}, (largest,), is_whole=False, now_ms=now_ms)

    patch.setattr(switches, "another_disk_answers", True)
    patch.setattr(seal, "judged", lambda _link, _side, answer: answer)
    _wrapped(patch, seal, "decide", largest_that_came)


def _h2(patch: Patch) -> None:
    patch.setattr(seal, "_on_two_of", lambda whole, _known: whole.next.marks)


def _h3(patch: Patch) -> None:
    def unequal(right, state):
        if len(state.positions) == 2:
            state = replace(state, positions=dict.fromkeys(state.positions, state.positions["a"]))
        return right(state)

    patch.setattr(switches, "waits_for_equal_copies", False)
    _wrapped(patch, acquire_send, "_opened", unequal)


def _h4(patch: Patch) -> None:
    def keeping(right, state, reason):
        after, effects = right(state, reason)
        return replace(after, pending=state.pending), effects

    _wrapped(patch, sender, "_deposed", keeping)
    patch.setattr(
        sender_invariants, "broken", lambda *_: []
    )  # it would see this at once; its harm is what is looked for


def _h11(patch: Patch) -> None:
    patch.setattr(switches, "seals_are_flushed", False)
    _wrapped(
        patch,
        replica,
        "_write_seal_when_quiet",
        lambda right, state: right(replace(state, durable=state.tail.index)),
    )


def _h12(patch: Patch) -> None:
    def counting(right, state, event, now_ms):
        is_older = isinstance(event, OpenFailed) and isinstance(event.error, OlderVersion | Fenced)
        if is_older and state.read is not None:
            state = replace(state, request=replace(state.request, failed_epoch=state.last_link.epoch))
        return right(state, event, now_ms)

    _wrapped(patch, acquire_send, "step", counting)


def _h13(patch: Patch) -> None:
    def at_once(right, state):
        return right(state) if len(state.positions) < 2 else acquire_send._granted(state)

    _wrapped(patch, acquire_send, "_opened", at_once)


def _h23(patch: Patch) -> None:
    def opening_first(right, state, document, expected, what):
        after, effects = right(state, document, expected, what)
        link = document.last_link
        if link is None or link.state is not LinkState.OPENING:
            return after, effects
        opens = tuple(
            SendOpen(side, link, document.sender_token, expected, document.settings.max_record_bytes)
            for side in (link.master, link.slave)
        )
        return after, (*opens, *effects)

    _wrapped(patch, acquire_send, "_writing", opening_first)


def _h24(patch: Patch) -> None:
    patch.setattr(chain, "without_group", lambda document, _group: document)


def _h25(patch: Patch) -> None:
    patch.setattr(switches, "checks_incarnation", False)


def _one_copy(patch: Patch) -> None:
    _wrapped(patch, replica, "_commit", lambda right, state: right(replace(state, confirmed=state.tail.index)))


def _unlisted(patch: Patch) -> None:
    def without_consume_lists(right, document, registry, **named):
        listed = right(document, registry, **named)
        return replace(listed, subscriptions=document.subscriptions)

    _wrapped(patch, chain, "next_link", without_consume_lists)
    patch.setattr(
        "seriatim.coordinator.core.invariants.check_change", lambda *_: None
    )  # so that the grant is looked at


def _two_writes(patch: Patch) -> None:
    def links_first(right, document, registry, **named):
        return replace(right(document, registry, **named), send_list=document.send_list)

    _wrapped(patch, chain, "next_link", links_first)


def _any_token(patch: Patch) -> None:
    def taking(right, state, event):
        token = None if event.token is None else state.record.token
        return right(state, replace(event, token=token))

    _wrapped(patch, replica, "_take", taking)


def lying_slave(patch: Patch) -> None:
    """No defect of ours: a slave that confirms one record more than it has, with a wrong hash."""
    patch.setattr(switches, "slave_confirms_what_it_has", False)


def _believed(patch: Patch) -> None:
    def unchecked(_right, state, event: replica_events.PeerConfirmed):
        if not state.is_peer_ready or event.index <= state.confirmed:
            return state, ()
        return replica._commit(replace(state, confirmed=event.index))

    lying_slave(patch)
    _wrapped(patch, replica, "_confirmed", unchecked)


_NONE = Bounds(records=1, failures=0, takeovers=0)

PLANTS = {
    "H1": Plant(Bounds(records=1, takeovers=0, kinds=("blank",)), _h1, "4:", 4_000),
    "H2": Plant(Bounds(records=1, takeovers=0, kinds=("crash",)), _h2, "3:", 5_000),
    "H3": Plant(replace(_NONE, takeovers=1), _h3, "H3:", 400),
    "H4": Plant(Bounds(own=1, failures=0, takeovers=2), _h4, "3:", 10_000),
    "H11, a seal that isn't flushed": Plant(
        Bounds(records=1, failures=2, takeovers=0, kinds=("crash", "deadline")), _h11, "8:", 40_000
    ),
    "H12": Plant(
        Bounds(records=1, failures=2, takeovers=0, kinds=("slow call",), starts_reported=True), _h12, "H12:", 300_000
    ),
    "H13": Plant(_NONE, _h13, "H13:", 10),
    "H23": Plant(_NONE, _h23, "1:", 10),
    "H24, end and send list in two writes": Plant(Bounds(records=1, takeovers=0, kinds=("deadline",)), _h24, "6:", 60),
    "H25": Plant(Bounds(records=1, takeovers=1, kinds=("blank",)), _h25, "1:", 1_500),
    "an acknowledgement with one copy": Plant(_NONE, _one_copy, "3:", 20),
    "a sender told before the consume list is written": Plant(_NONE, _unlisted, "2:", 10),
    "two lists in two writes": Plant(Bounds(records=1, takeovers=0, kinds=("crash",)), _two_writes, "1:", 60),
    "a token not checked on append": Plant(replace(_NONE, takeovers=1), _any_token, "7:", 300),
    "a slave's answer believed unchecked": Plant(replace(_NONE, records=2), _believed, "3:", 60),
}
"""By the name of the trap in traps.md, or of the defect in the issue."""
