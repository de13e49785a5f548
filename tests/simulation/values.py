"""Production's values, made faster: what a schedule does most is to make a frozen dataclass, whole or of another one.

Python 3.11 writes each field of a frozen dataclass by `object.__setattr__`, which looks the field up by its name, and `replace` reads
and writes all of them that way. Here the fields' own descriptors do it, which are known beforehand. Nothing else is different:
signatures, defaults, and that a value can't be changed.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from seriatim.consumer.core.view import ChainView
from seriatim.coordinator.core.registry import Registry
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument
from seriatim.protocol.names import ChainVersion

_replacements: dict[type, Callable[..., Any]] = {}
_SAME = object()
_KEPT = 8


def _replace(value: Any, /, **changes: Any) -> Any:
    """As `dataclasses.replace`."""
    make = _replacements.get(value.__class__)
    return dataclasses.replace(value, **changes) if make is None else make(value, **changes)


def _is_plain(owner: type) -> bool:
    """Whether making one is nothing but to set each field, and each has a slot."""
    fields = dataclasses.fields(owner)
    parameters = vars(owner)["__dataclass_params__"]
    return (
        bool(fields)
        and parameters.frozen
        and parameters.init
        and not hasattr(owner, "__post_init__")
        and owner.__bases__ == (object,)
        and all(one.init and not one.kw_only for one in fields)
        and "__slots__" in vars(owner)
        and owner.__init__.__code__.co_filename == "<string>"  # type: ignore[misc] # theirs
    )


def _make_faster(owner: Any) -> None:
    fields, slow = dataclasses.fields(owner), owner.__init__
    defaults: tuple[Any, ...] = slow.__defaults__ or ()
    with_default = len(fields) - len(defaults)
    known: dict[str, Any] = {"_owner": owner, "_new": object.__new__, "_SAME": _SAME}
    names, made, copied = [one.name for one in fields], [], []
    for number, one in enumerate(fields):
        known[f"_set_{number}"], value = vars(owner)[one.name].__set__, one.name
        if one.default_factory is not dataclasses.MISSING:
            known[f"_factory_{number}"], known["_MADE"] = one.default_factory, defaults[number - with_default]
            value = f"_factory_{number}() if {one.name} is _MADE else {one.name}"
        made.append(f" _set_{number}(self, {value})")
        copied.append(f" _set_{number}(_made, _of.{one.name} if {one.name} is _SAME else {one.name})")
    lines = [
        f"def __init__(self, {', '.join(names)}):",
        *made,
        f"def _replaced(_of, /, *, {', '.join(f'{name}=_SAME' for name in names)}):",
        " _made = _new(_owner)",
        *copied,
        " return _made",
    ]
    exec("\n".join(lines), known)  # as dataclasses do
    fast = known["__init__"]
    fast.__defaults__, fast.__annotations__, fast.__qualname__ = defaults, slow.__annotations__, slow.__qualname__
    owner.__init__ = fast
    _replacements[owner] = known["_replaced"]


def once_viewed(view: Callable[[pb.QueueView], ChainView]) -> Callable[[pb.QueueView], ChainView]:
    """Every reader is sent the same message, which nobody changes: the last ones are read once."""
    last: deque[tuple[pb.QueueView, ChainView]] = deque(maxlen=_KEPT)

    def viewed(message: pb.QueueView) -> ChainView:
        for known, made in last:
            if known is message:
                return made
        made = view(message)
        last.append((message, made))
        return made

    return viewed


def once_described(
    describe: Callable[[ChainDocument, ChainVersion, Registry], pb.QueueView],
) -> Callable[[ChainDocument, ChainVersion, Registry], pb.QueueView]:
    """Coordinators know the same mostly: they tell a copy of what one of them has made of it."""
    last: deque[tuple[ChainVersion, Registry, ChainDocument, pb.QueueView]] = deque(maxlen=_KEPT)

    def described(document: ChainDocument, version: ChainVersion, registry: Registry) -> pb.QueueView:
        view = pb.QueueView()
        for known_version, known_registry, known, made in last:
            if known_version == version and known_registry == registry and known == document:
                view.CopyFrom(made)
                return view
        view.CopyFrom(made := describe(document, version, registry))
        last.append((version, registry, document, made))
        return view

    return described


@functools.cache
def make_faster() -> None:
    """All that production has imported by now. Once: it stays so."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("seriatim."):
            continue
        for found in list(vars(module).values()):
            is_own = isinstance(found, type) and found.__module__ == name and dataclasses.is_dataclass(found)
            if is_own and found not in _replacements and _is_plain(found):
                _make_faster(found)
        if vars(module).get("replace") is dataclasses.replace:
            vars(module)["replace"] = _replace
