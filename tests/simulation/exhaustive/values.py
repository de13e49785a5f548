"""One object for each content, so that whole states compare and hash by the identity of their parts.

A `Value` holds a content; equal contents share one Value. So a state of the world is a tuple of a dozen Values, hashed and
compared in a fraction of a microsecond, and what follows from (part, event) is worked out once and looked up ever after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from seriatim.coordinator.core.acquire_send import AcquireSend
from seriatim.coordinator.core.events import Wait, WriteChain
from seriatim.coordinator.core.seal import SealAnswer
from seriatim.protocol.errors import SeriatimError


class Value:
    """One content. `number` rises in the order in which contents were first met."""

    __slots__ = ("content", "number")

    def __init__(self, content: Any, number: int) -> None:
        self.content = content
        self.number = number

    def __repr__(self) -> str:
        return repr(self.content)


_TEXTS = {(SealAnswer, "reason"), (WriteChain, "what"), (Wait, "reasons")}
"""Fields that are for a person: no core looks at them, so states that differ only there are one state."""

_pool: dict[Any, Value] = {}
_by_identity: dict[int, Value] = {}
_fields: dict[type, tuple[str, ...]] = {}


def shared(content: Any) -> Value:
    """The one Value of this content."""
    found = _by_identity.get(id(content))
    if found is not None:
        return found
    key = (content.__class__, content if isinstance(content, tuple) else _parts(content))
    found = _pool.get(key)
    if found is None:
        found = _pool[key] = Value(content, len(_pool))
        _by_identity[id(content)] = found  # the Value keeps the content, so its id is never another's
    return found


def _parts(content: Any) -> Any:
    """A hashable equivalent of a content."""
    if is_dataclass(content):
        kind = type(content)
        names = _fields.get(kind)
        if names is None:
            names = _fields[kind] = tuple(one.name for one in fields(content) if (kind, one.name) not in _TEXTS)
        parts = [_key(getattr(content, name)) for name in names]
        if kind is AcquireSend:
            parts[names.index("avoid")] = tuple(sorted(content.avoid))  # the reasons are texts, too
        return tuple(parts)
    if isinstance(content, SeriatimError):
        return tuple((name, _key(detail)) for name, detail in sorted(content.details.items()))
    return _key(content)


_PLAIN = (int, str, bytes, bool, float, type(None), Value)


def _key(part: Any) -> Any:
    kind = part.__class__
    if kind in _PLAIN:
        return part
    if kind is tuple or kind is list:
        return tuple([_key(one) for one in part])
    if isinstance(part, Mapping):
        return tuple(sorted((name, _key(one)) for name, one in part.items()))
    if is_dataclass(part) or isinstance(part, SeriatimError):
        return shared(part)
    return part
