"""The key that belongs to a captured change, found from what it says, and not from what the capture knew."""

from __future__ import annotations

from typing import cast

from seriatim.protocol.change import ROW_OPERATIONS, Change, MalformedChange, record_key


def key_of(change: Change) -> bytes | None:
    """The record key that belongs to a change; None where no row is meant (begin, commit, truncate, …).

    Raises:
        MalformedChange: the image lacks a key column.
    """
    if change.op not in ROW_OPERATIONS:
        return None
    image = change.before if change.op == "d" else change.after
    origin = change.source
    if image is None:
        raise MalformedChange(f"operation {change.op} without the image that holds its key")
    try:
        values = [image[name] for name in origin.key]
    except KeyError as error:
        raise MalformedChange(f"{origin.schema}.{origin.table}: key column {error} is not in the image") from error
    return record_key(cast(str, origin.schema), cast(str, origin.table), values)
