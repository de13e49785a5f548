"""Queues and groups for people and for programs: objects with stable keys for `--json`, lines of text otherwise.

An object has every key always; None says that nobody told (a member that can't be reached, an earlier end that is lost).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from seriatim.cli.options import duration_text
from seriatim.protocol.names import MemberName

if TYPE_CHECKING:
    from seriatim.protocol import seriatim_pb2 as pb

_SEALED_SHOWN = 12
"""So many of the links that ended are shown to a person, the latest; JSON has all."""
_EPOCHS_SHOWN = 6
_NAMES_SHOWN = 6
"""So many of a consume list, and of the queues on a group."""
_CELL_CHARACTERS = 48
"""What troubles a member and is longer than this stands below the table."""
_COPIES_SHOWN = 6
"""So many of the links that all have read and of which one copy is left."""


def settings_object(settings: pb.QueueSettings) -> dict[str, object]:
    """What an operator chose for a queue."""
    return {
        "durability": settings.durability,
        "flush_ms": settings.flush_ms,
        "groups": list(settings.groups),
        "retention_ms": settings.retention_ms,
        "readmit": settings.readmit,
        "max_record_bytes": settings.max_record_bytes,
        "rotate_ms": settings.rotate_ms,
    }


def queue_object(view: pb.QueueView) -> dict[str, object]:
    """A queue, all of it."""
    return {
        "queue": view.queue,
        "queue_id": view.queue_id,
        "cluster": view.cluster,
        "chain_version": view.chain_version,
        "created_at_ms": view.created_at_ms,
        "settings": settings_object(view.settings),
        "sender": view.sender or None,
        "sender_token": view.sender_token,
        "send_list": list(view.send_list),
        "switches_left": view.switches_left,
        "links": [_link_object(link) for link in view.links],
        "subscriptions": [_subscription_object(one) for one in view.subscriptions],
        "waits": [{"what": wait.what, "reason": wait.reason} for wait in view.waits],
        "one_copy": _one_copy_object(view),
        "abandoned": [{"epoch": one.epoch, "what": one.what, "at_ms": one.at_ms} for one in view.abandoned],
        "groups": [group_object(group) for group in view.groups],
    }


def listed_objects(reply: pb.ListQueuesReply) -> Iterator[dict[str, object]]:
    """The queues of a listing, each with its groups, which were told once for all, but by a coordinator of an earlier version."""
    groups = {group.group: group_object(group) for group in reply.groups}
    for view in reply.queues:
        told = queue_object(view)
        if groups:
            named = dict.fromkeys([*view.send_list, *view.settings.groups, *(link.group for link in view.links)])
            told["groups"] = [groups[name] for name in named if name in groups]
        yield told


def _one_copy_object(view: pb.QueueView) -> list[dict[str, object]] | None:
    """None: members weren't asked, or didn't answer, so that nothing is known of copies."""
    found: list[dict[str, object]] = [{"epoch": epoch, "records": records} for epoch, records in one_copy_links(view)]
    is_told = all(link.has_committed or link.state == "opening" for link in _unread_links(view))
    return found if found or is_told else None


def group_object(view: pb.GroupView) -> dict[str, object]:
    """A group and its members."""
    return {
        "group": view.group,
        "is_draining": view.is_draining,
        "members": [
            {
                "member": member.member,
                "is_registered": member.is_registered,
                "address": member.address or None,
                "disk_id": member.incarnation.disk_id or None,
                "start": member.incarnation.start if member.is_registered else None,
                "is_in_sync": member.is_in_sync,
                "is_peer_connected": member.is_peer_connected,
                "problem": member.problem or None,
            }
            for member in view.members
        ],
        "sending_queues": list(view.sending_queues),
        "backlog_queues": list(view.backlog_queues),
        "deleted_queues": list(view.deleted_queues),
        "lost_queues": list(view.lost_queues),
    }


def cluster_object(view: pb.DescribeClusterReply) -> dict[str, object]:
    """What belongs to no queue."""
    return {
        "cluster": view.cluster,
        "zookeeper": view.zookeeper,
        "root": view.root,
        "version": view.version,
        "coordinators": list(view.coordinators),
        "elected_coordinator": view.elected_coordinator or None,
    }


def _link_object(link: pb.LinkView) -> dict[str, object]:
    return {
        "epoch": link.epoch,
        "group": link.group,
        "state": link.state,
        "durability": link.durability,
        "base": link.base if link.has_base else None,
        "end": link.end if link.has_end else None,
        "committed": _committed(link),
        "copies": link.copies if link.has_committed else None,
        "is_abandoned": link.is_abandoned,
        "sealed_at_ms": link.sealed_at_ms or None,
        "master": _side_object(link.master, link.master_now),
        "slave": _side_object(link.slave, link.slave_now),
        "link_hash": link.link_hash.hex() or None,
        "chain_hash": link.chain_hash.hex() or None,
    }


def member_name(side: pb.LinkMember) -> str:
    """As `seriatim up`, and its pids.json, have it."""
    return str(MemberName(side.group, side.member))


def _side_object(side: pb.LinkMember, now: pb.Incarnation) -> dict[str, object]:
    return {
        "member": member_name(side),
        "address": side.address or None,
        "disk_id": side.incarnation.disk_id,
        "start": side.incarnation.start,
        "is_registered": bool(now.disk_id),
    }


def _subscription_object(one: pb.SubscriptionView) -> dict[str, object]:
    return {
        "subscription": one.subscription,
        "subscription_id": one.subscription_id,
        "generation": one.generation,
        "reader": one.reader or None,
        "reader_token": one.reader_token,
        "consume_list": list(one.consume_list),
        "cursor_epoch": one.cursor_epoch if one.has_cursor else None,
        "cursor_index": one.cursor_index if one.has_cursor else None,
        "cursor_offset": one.cursor_offset if one.has_offset else None,
        "lag_records": one.lag_records if one.has_lag else None,
    }


def _committed(link: pb.LinkView) -> int | None:
    """How many records the link has, as far as known."""
    if link.has_end:
        return link.end
    return link.committed_index if link.has_committed else None


def open_link(view: pb.QueueView) -> pb.LinkView | None:
    """The link that takes records now."""
    return _last_link(view, {"open", "opening"})


def live_link(view: pb.QueueView) -> pb.LinkView | None:
    """The link that hasn't ended yet: it takes records, or is being closed."""
    return _last_link(view, {"open", "opening", "closing"})


def _last_link(view: pb.QueueView, states: set[str]) -> pb.LinkView | None:
    return next((link for link in reversed(view.links) if link.state in states), None)


def one_copy_links(view: pb.QueueView) -> list[tuple[int, int]]:
    """Unread links of which one living copy is left: epoch, and how many records (protocol.md 7).

    Only a view with what members know (DescribeQueue) tells.
    """
    found = []
    for link in _unread_links(view):
        records = _committed(link) or 0
        if link.has_committed and link.copies == 1 and records:
            found.append((link.epoch, records))
    return found


def _unread_links(view: pb.QueueView) -> list[pb.LinkView]:
    unread = {epoch for one in view.subscriptions for epoch in one.consume_list}
    return [link for link in view.links if link.epoch in unread]


# ------------------------------------------------------------------------------------------------------------- text


def columns(rows: Sequence[Sequence[str]], *, indent: str = "") -> Iterator[str]:
    """Rows as aligned text; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def some(names: Sequence[str]) -> str:
    """The first of them: there may be a thousand."""
    told = list(names[:_NAMES_SHOWN])
    return ", ".join([*told, f"{len(names) - _NAMES_SHOWN} more"] if len(names) > _NAMES_SHOWN else told)


def number(value: int | None) -> str:
    """A number for a person; `?` where nobody told."""
    return "?" if value is None else f"{value:,}"


def settings_text(settings: pb.QueueSettings) -> str:
    """Settings in one line."""
    flush = f", flushed every {settings.flush_ms} ms" if settings.durability in {"interval", "async"} else ""
    rotated = f"every {duration_text(settings.rotate_ms)}" if settings.rotate_ms else "by hand"
    return (
        f"{settings.durability}{flush}, groups {','.join(settings.groups) or 'all'}, "
        f"retention {duration_text(settings.retention_ms)}, readmit {settings.readmit}, rotated {rotated}, "
        f"records up to {settings.max_record_bytes:,} bytes"
    )


def queue_summary(views: Iterable[pb.QueueView]) -> list[list[str]]:
    """A row for each queue, under a heading."""
    rows = [["queue", "durability", "sends to", "last sender", "send list", "links", "subscriptions", "waits"]]
    for view in views:
        link = open_link(view)
        rows.append([
            view.queue,
            view.settings.durability or "-",
            "-" if link is None else f"{link.group} (epoch {link.epoch})",
            view.sender or "-",
            " > ".join(view.send_list) or "-",
            str(len(view.links)),
            str(len(view.subscriptions)),
            str(len(view.waits)) if view.waits else "-",
        ])  # fmt: skip
    return rows


def cluster_warnings(queues: Sequence[pb.QueueView], *, indent: str = "") -> Iterator[str]:
    """What is wrong with some of all queues, or would be at the next failure: a line for each kind."""
    lost = [view.queue for view in queues if any(link.state == "lost" for link in view.links)]
    damaged = [view.queue for view in queues if any(wait.what == "damage" for wait in view.waits)]
    stuck = [view.queue for view in queues if not view.switches_left and view.queue not in damaged]
    long = [view.queue for view in queues if any(wait.what == "chain" for wait in view.waits)]
    abandoned = [view.queue for view in queues if view.abandoned]
    if damaged:
        yield f"{indent}WARNING the chain of {some(damaged)} can't be read: nobody sends or reads there"
    if stuck:
        yield f"{indent}WARNING no switch is left for {some(stuck)}: sending waits, now or after the next failure"
    if long:
        yield f"{indent}WARNING the chain of {some(long)} is too long for a planned switch, and soon, or already, for any, until links are read"
    if lost:
        yield f"{indent}WARNING a link of {some(lost)} is lost: readers stop there"
    if abandoned:
        yield f"{indent}ABANDONED records of {some(abandoned)}"


def group_lines(groups: Iterable[pb.GroupView], *, indent: str = "", has_queues: bool = True) -> Iterator[str]:
    """A table of groups. `has_queues`: with the queues on them, which only the group calls tell."""
    groups = list(groups)
    is_awaited = any(group.deleted_queues for group in groups)
    header = ["group", "state", "a", "b"]
    header += ["sends for", "unread of"] if has_queues else []
    header += ["awaited by"] if is_awaited else []
    rows = [header]
    troubled: dict[str, list[str]] = {}
    for group in groups:
        row = [group.group, "draining" if group.is_draining else "in service"]
        members = {place: _member_text(group, place) for place in ("a", "b")}
        for place, text in members.items():
            if len(text) > _CELL_CHARACTERS:
                troubled.setdefault(text, []).append(str(MemberName(group.group, place)))
        row += [text if len(text) <= _CELL_CHARACTERS else "see below" for text in members.values()]
        if has_queues:
            row += [some(group.sending_queues) or "-", some(group.backlog_queues) or "-"]
        if is_awaited:
            row.append(f"{len(group.deleted_queues)} deleted queues" if group.deleted_queues else "-")
        rows.append(row)
    yield from columns(rows, indent=indent)
    for text, names in troubled.items():
        yield f"{indent}{some(names)}: {text}"


def _member_text(group: pb.GroupView, place: str) -> str:
    member = next((one for one in group.members if one.member == place), None)
    if member is not None and member.problem:
        return member.problem
    if member is None or not member.is_registered:
        return "not there"
    if not member.is_in_sync:
        return "resyncing"
    if member.is_peer_connected:
        return "in sync"
    other = MemberName(group.group, place).peer
    address = next((one.address for one in group.members if one.member == other.member), "")
    return f"in sync, not connected to {other}{f' at {address}' if address else ''}"


def queue_lines(view: pb.QueueView) -> Iterator[str]:
    """A queue for a person: chain, lists, cursors, lag, elected, waits, warnings."""
    yield f"queue {view.queue} (id {view.queue_id}, chain version {view.chain_version})"
    yield f"  settings       {settings_text(view.settings)}"
    yield f"  sender         {view.sender or 'nobody elected'} (token {view.sender_token})"
    yield f"  send list      {' > '.join(view.send_list) or 'empty'}   (switches left: {view.switches_left})"
    yield from _chain_lines(view)
    yield from _subscription_lines(view)
    if view.groups:
        yield "  groups"
        yield from group_lines(view.groups, indent="    ", has_queues=False)
    one_copy = dict(one_copy_links(view))
    told_below = {f"link {epoch}" for epoch in one_copy}
    waits = [wait for wait in view.waits if wait.what not in told_below]
    hidden = {*[wait.what for wait in waits if wait.reason.startswith("one copy of")][_COPIES_SHOWN:]}
    if waits:
        yield "  waits"
        yield from (f"    {wait.what}: {wait.reason}" for wait in waits if wait.what not in hidden)
        if hidden:
            yield f"    ({len(hidden)} more links of which one copy is left)"
    if one_copy:
        epochs = f"epoch{'s' if len(one_copy) > 1 else ''} {some(list(map(str, one_copy)))}"
        yield f"  WARNING one copy: {sum(one_copy.values()):,} unread records of {epochs} have one living copy"
    for one in view.abandoned:
        yield f"  ABANDONED epoch {one.epoch}: {one.what}"


def _chain_lines(view: pb.QueueView) -> Iterator[str]:
    if not view.links:
        yield f"  chain          empty: {'all that was sent was let go' if view.first_offset else 'nobody has sent yet'}"
        return
    yield "  chain"
    hidden = max(0, len(view.links) - _SEALED_SHOWN)
    if hidden:
        yield f"    ({hidden} earlier links not shown)"
    rows = [["epoch", "group", "state", "durability", "base", "records", "copies", "master", "slave"]]
    rows += [
        [
            str(link.epoch),
            link.group,
            link.state + (" (abandoned)" if link.is_abandoned else ""),
            link.durability,
            number(link.base if link.has_base else None),
            number(_committed(link)),
            str(link.copies) if link.has_committed else "?",
            _side_text(link.master, link.master_now),
            _side_text(link.slave, link.slave_now),
        ]
        for link in list(view.links)[hidden:]
    ]
    yield from columns(rows, indent="    ")


def _side_text(side: pb.LinkMember, now: pb.Incarnation) -> str:
    name = member_name(side)
    return f"{name} {side.address}" if now.disk_id else f"{name} (not there)"


def _subscription_lines(view: pb.QueueView) -> Iterator[str]:
    if not view.subscriptions:
        yield "  subscriptions  none"
        return
    yield "  subscriptions"
    rows = [["name", "reader", "consume list", "cursor", "offset", "lag"]]
    rows += [
        [
            one.subscription,
            f"{one.reader or 'nobody elected'} (token {one.reader_token})",
            _epochs_text(one.consume_list),
            _cursor_text(one),
            number(one.cursor_offset if one.has_offset else None),
            number(one.lag_records if one.has_lag else None),
        ]
        for one in view.subscriptions
    ]
    yield from columns(rows, indent="    ")


def _epochs_text(consume_list: Sequence[int]) -> str:
    """Its ends, where it is long: what nobody reads has a link for each day."""
    epochs = list(map(str, consume_list))
    if len(epochs) > _EPOCHS_SHOWN:
        epochs[_EPOCHS_SHOWN - 2 : -1] = ["…"]
    return " > ".join(epochs) or "empty"


def _cursor_text(one: pb.SubscriptionView) -> str:
    if not one.consume_list:
        return "at the end"
    return f"{one.cursor_epoch}:{one.cursor_index}" if one.has_cursor else "?"
