"""Frozen dataclasses, made at half the cost: what the cores do most is to make one, whole or of another one.

Python 3.11 writes each field of a frozen dataclass by `object.__setattr__`, which looks the field up by its name, and `replace` reads
and writes all of them that way: 13 us for a link's state, 5 as it is done here, and a record in flight waits for some thirty such values, one
after the other. Here the fields' own descriptors do it, which are known beforehand. Nothing else is different: signatures, defaults, and
that a value can't be changed.

A process calls `make_faster` once it has imported what it runs; what is imported after that is right, too, and slower.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

_replacements: dict[type, Callable[..., Any]] = {}
_looked_through: set[str] = set()
_seen = 0
"""So many modules were imported when they were looked through last: each consumer and producer asks."""
_SAME = object()


def make_faster() -> None:
    """All frozen dataclasses of ours that are imported by now, and `replace` where a module has imported that."""
    global _seen
    if _seen == len(sys.modules):
        return
    _seen = len(sys.modules)
    # A list first: other threads import meanwhile.
    names = [name for name in list(sys.modules) if name.startswith("seriatim.") and name not in _looked_through]
    _looked_through.update(names)
    for name in names:
        module = vars(sys.modules[name])
        for found in list(module.values()):
            is_own = isinstance(found, type) and found.__module__ == name and dataclasses.is_dataclass(found)
            if is_own and found not in _replacements and _is_plain(found):
                _make_faster(found)
        if module.get("replace") is dataclasses.replace:
            module["replace"] = _replace


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
    exec("\n".join(lines), known)  # noqa: S102 - as dataclasses do
    fast = known["__init__"]
    fast.__defaults__, fast.__annotations__, fast.__qualname__ = defaults, slow.__annotations__, slow.__qualname__
    _replacements[owner] = known["_replaced"]
    owner.__init__ = fast
