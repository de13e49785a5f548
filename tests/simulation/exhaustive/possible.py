"""What can happen next in one part of a state, and what of it need not wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from seriatim.broker_group.core.replica import SealPhase
from seriatim.coordinator.core.acquire_send import AcquireSend
from seriatim.coordinator.core.events import (
    SendSeal,
)
from seriatim.coordinator.core.registry import Registry
from seriatim.protocol.chain import ChainDocument, LinkState
from tests.simulation.exhaustive import switches
from tests.simulation.exhaustive.calls import Call
from tests.simulation.exhaustive.parts import Group, Member
from tests.simulation.exhaustive.state import (
    SENDERS,
    Request,
)
from tests.simulation.exhaustive.values import shared


def group_moves(group: Group, number: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for member in group.members:
        place, name = member.place, member.name
        if not member.is_up:
            yield f"{name} starts again{' with a blank disk' if member.comes_blank else ''}", ("restarted", place)
            continue
        if member.unflushed:
            what = ", ".join(one.kind for one in member.unflushed)
            yield f"{name}'s disk has flushed {what}", ("flushed", place)
        if member.session == "expired":
            yield f"{name} learns that its session is gone", ("session_loss_noticed", place)
        if member.session == "starting":
            yield f"{name} registers", ("registered", place)
    yield from _append_moves(group, number)
    yield from _replication_moves(group, number)


def _append_moves(group: Group, number: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for at, stream in enumerate(group.appends):
        who = f"{SENDERS[stream.sender]}'s stream to g{number + 1}" + ("" if stream.is_used else " (left)")
        if stream.state == "new":
            yield f"{who}: the master reads its opening", ("append_opened", at)
        elif stream.state == "source" and stream.batches:
            yield f"{who}: the master reads a batch", ("append_read", at)
        if stream.is_used and stream.ack >= 0:
            yield f"{who}: the sender reads acknowledgement {stream.ack}", ("acknowledgement_read", at)
        if stream.is_used and stream.state == "ended" and (stream.ack < 0 or stream.error is None):
            why = "a break" if stream.error is None else f"the error {stream.error.content.code}"
            yield f"{who}: the sender reads {why}", ("append_end_read", at)


def _replication_moves(group: Group, number: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    master, slave = group.members
    who = f"g{number + 1}'s replication stream"
    for at, one in enumerate(group.replications):
        runner = master.runner(one.epoch)
        if one.is_master_open and one.phase == "opening":
            if slave.is_up and shared(slave.incarnation) is one.slave and slave.runner(one.epoch) is None:
                yield f"{who}: the master's patience is over", ("patience_over", at)
            else:
                yield f"{who}: the slave reads its opening", ("replication_opened", at)
        if one.is_slave_open and one.messages:
            yield f"{who}: the slave reads a message", ("replicated", at)
        if one.is_master_open and one.confirm is not None and runner is not None:
            if one.phase in ("filling", "ready"):
                yield f"{who}: the master reads confirmation {one.confirm[0]}", ("confirmed", at)
            elif one.phase == "greeting":
                state = runner.replica.content
                if state.durable == state.tail.index:
                    yield f"{who}: the master reads what the slave has: {one.confirm[0]}", ("greeted", at)
        if one.is_master_open and not one.is_slave_open and one.phase != "opening":
            yield f"{who}: the master sees its end", ("slave_end_noticed", at)


def group_faults(group: Group, number: int, kinds: frozenset[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for member in group.members:
        if member.is_up:
            yield from _member_faults(member, kinds)
    for at, stream in enumerate(group.appends):
        if "append stream" in kinds and stream.is_used and stream.state != "ended":
            yield f"{SENDERS[stream.sender]}'s stream to g{number + 1} breaks", ("append_broken", at)
    for at, one in enumerate(group.replications):
        if "replication stream" in kinds and one.is_master_open:
            yield f"g{number + 1}'s replication stream breaks", ("replication_broken", at)


def _member_faults(member: Member, kinds: frozenset[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    lost = len(member.unflushed)
    if "crash" in kinds:
        for survivors in range(lost + 1):
            what = f" and forgets {lost - survivors} of {lost} writes" if lost else ""
            yield f"{member.name} crashes{what}", ("crashed", member.place, survivors, False)
    if "blank" in kinds:
        yield f"{member.name} crashes, and its disk is lost", ("crashed", member.place, 0, True)
    if "expiry" in kinds and member.session == "on":
        yield f"{member.name}'s lease is over", ("session_changed", member.place, "lease over")


def readings(group: Group, *, is_safe: bool) -> Iterator[tuple[Any, ...]]:
    for at, stream in enumerate(group.appends):
        if not stream.is_used:
            continue
        is_ended = stream.state == "ended"
        if stream.ack >= 0 and ((is_ended and stream.error is not None) or (is_safe and not is_ended)):
            yield "acknowledgement_read", at
        elif stream.ack < 0 and is_ended:
            yield "append_end_read", at


def says_nothing(group: Group, request: Request) -> bool:
    """Nothing would ever follow from this request, for whose answer nobody waits."""
    member, order = group.members[request.place], request.order.content
    if not member.is_up:
        return True  # it is on its way to a process that is gone
    runner = member.runner(int(order.link.epoch))
    is_sealed = runner is not None and runner.replica.content.phase is SealPhase.SEALED
    if isinstance(order, SendSeal):
        return is_sealed
    if is_sealed or (switches.checks_incarnation and order.side.incarnation != member.incarnation):
        return True
    if runner is None:
        return False
    record = runner.replica.content.record
    return bool(order.token < record.token or order.version < record.chain_version)


def is_busy(group: Group, place: int, epoch: int) -> bool:
    """Another request holds the link's lock (Broker.lock)."""
    member = group.members[place]
    if any(one.epoch == epoch and one.kind in ("unheard", "seal") for one in member.unflushed):
        return True
    runner = member.runner(epoch)
    return runner is not None and runner.replica.content.phase in (SealPhase.WAITING, SealPhase.WRITING)


def to_close(
    document: ChainDocument, registry: Registry, groups: tuple[Group, Group], *, is_quiet: bool
) -> Iterator[int]:
    """As background._closings; its grace for a closing link is that no call is under way."""
    for link in document.links:
        if link.state in (LinkState.OPEN, LinkState.OPENING):
            members = groups[int(link.group[1:]) - 1].members
            runners = [one.runner(int(link.epoch)) for one in members if one.is_up]
            is_sealed = any(one is not None and one.replica.content.record.is_sealed for one in runners)
            if registry.absence(link) or (is_sealed and link.state is LinkState.OPEN):
                yield int(link.epoch)
        elif (link.state is LinkState.CLOSING and is_quiet) or (
            link.state is LinkState.LOST and registry.group(link.group).members
        ):
            yield int(link.epoch)


def documents_of(state: Any) -> list[ChainDocument]:
    """The chains that a procedure goes by."""
    if isinstance(state, AcquireSend):
        found = [] if state.read is None else [state.read.document]
        return found if state.closing is None else [*found, state.closing.document]
    return [] if state.closing is None else [state.closing.document]


def is_fenced(document: ChainDocument, state: Any) -> bool:
    """Whenever it reads the chain, this call finds a newer token, and is over."""
    return isinstance(state, AcquireSend) and 0 < state.request.token < document.sender_token


def is_closed(document: ChainDocument, call: Call) -> bool:
    """The elected coordinator's procedure will find its link ended, whatever it is doing now."""
    link = document.link(call.state.content.epoch)
    return link is None or link.state is LinkState.SEALED
