"""Room on the disk: stop taking records while there is still room for seals, cursors and resync (H17)."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Room:
    """`reserve_bytes`: kept free of records. `free_bytes`: as last seen, less what was taken since. `has_room`: see `seen`."""

    reserve_bytes: int
    free_bytes: int = 0
    has_room: bool = False


def seen(room: Room, free_bytes: int) -> Room:
    """The disk was looked at. Once it was full, a quarter of the reserve more must be free before it takes records again."""
    needed = room.reserve_bytes if room.has_room else room.reserve_bytes + room.reserve_bytes // 4
    return replace(room, free_bytes=free_bytes, has_room=free_bytes > needed)


def taken(room: Room, size_bytes: int) -> Room:
    """A batch was taken: twice its size, because a small one goes to the log first and to its table or blob file later."""
    free_bytes = room.free_bytes - 2 * size_bytes
    return replace(room, free_bytes=free_bytes, has_room=room.has_room and free_bytes > room.reserve_bytes)


def has_room_to_copy(room: Room) -> bool:
    """Whether resync may write, and tables be rewritten: into the reserve, but half of it is left for seals and cursors, and for the next start."""
    return room.free_bytes > room.reserve_bytes // 2
