"""Whether a key's value is spelled as its type spells it.

A type takes more than it gives: `5`, `5.0` and `5.00` are one numeric(9,2), which writes `5.00`. Where `ALTER TABLE` gave a key's column another
type, the log writes one row's key in two ways, and the target, whose column has one type at a time, takes both for the same.
Of values that are spelled as the target's type spells them, different ones are different keys. All others may be the same.
A record says which of its key's columns are texts at the source: there `5.00` may be another row than the `5.0` that the target writes as `5.00`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final

from seriatim.consumer.spark.apply.plan import Values
from seriatim.consumer.spark.apply.shape import TableShape
from seriatim.protocol.change import Value

_JSON: Final = {"smallint": int, "integer": int, "bigint": int, "boolean": bool}
"""Types whose values come as JSON's own."""
_WHOLE: Final = r"0|-?[1-9]\d*"
_DAY: Final = r"(\d{4}|[1-9]\d{4,})-\d\d-\d\d"
_TIME: Final = r"\d\d:\d\d:\d\d(\.\d{0,5}[1-9])?"
_ANY: Final = r"(?s:.*)"
_SPELLINGS: Final = {
    "text": _ANY,
    "character varying": _ANY,
    "uuid": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "numeric": _WHOLE,  # others of its values have many: 1.5 and 1.50
    "date": rf"{_DAY}( BC)?",
    "timestamp without time zone": rf"{_DAY} {_TIME}( BC)?",
    "timestamp with time zone": rf"{_DAY} {_TIME}\+00( BC)?",
    "bytea": r"\\x([0-9a-f]{2})*",
}
"""For types whose equality is of the whole value, each text that they write; types that aren't here may write anything."""
_keeps_texts = re.compile(r'text|character varying(\(\d+\))?|name|"char"|bpchar|(.*\.)?citext').fullmatch
"""Types that write each text as it came, or refuse it. An enum is one, too, but not by its name."""
_match_length = re.compile(r"(character|character varying)\((\d+)\)").fullmatch
_match_scale = re.compile(r"numeric\(\d+,(\d+)\)").fullmatch


@lru_cache(1024)
def is_loose(type_name: str) -> bool:
    """Whether different texts that it writes may be one key: it is none of those that are known."""
    return type_name not in _JSON and _pattern(type_name) is None


def spelled(type_names: Iterable[str]) -> Callable[[Values], bool]:
    """A function that says of values of these types, one each, whether all are spelled as their types spell them."""
    checks = [_check(type_name) for type_name in type_names]
    if len(checks) == 1:
        (check,) = checks
        return lambda values: check(values[0])
    return lambda values: all(check(value) for check, value in zip(checks, values, strict=True))


@lru_cache(1024)
def comes_otherwise(type_names: tuple[str, ...]) -> Callable[[Values], bool]:
    """A function that says of a key's values, in columns of these types, whether one is spelled as its type never does.

    It is of a column of another type at the source, which may tell keys apart that the target doesn't: `1` and `01`. Types that may write anything
    say nothing of that.
    """
    strict = [place for place, type_name in enumerate(type_names) if not is_loose(type_name)]
    are_spelled = spelled([type_names[place] for place in strict])
    return lambda values: not are_spelled(tuple([values[place] for place in strict]))


def rewrites(shape: TableShape, text_key: Iterable[str]) -> bool:
    """Whether two texts of the source's key may be one key of the target, however they are spelled: its column is none of texts."""
    kinds = [shape.beneath.get(name, shape.columns[name]) for name in text_key]
    return not all(isinstance(kind, str) and _keeps_texts(kind) for kind in kinds)


def _check(type_name: str) -> Callable[[Value], bool]:
    if type_name in _JSON:
        kind = _JSON[type_name]
        return lambda value: type(value) is kind
    pattern = _pattern(type_name)
    if pattern is None:
        return lambda _value: False
    fits = re.compile(pattern, re.ASCII).fullmatch
    return lambda value: type(value) is str and fits(value) is not None


def _pattern(type_name: str) -> str | None:
    if found := _match_length(type_name):
        kind, length = found.groups()
        return f"(?s:.{{{length}}})" if kind == "character" else f"(?s:.{{0,{length}}})"
    if found := _match_scale(type_name):
        scale = int(found[1])
        return rf"(?!-0\.0*$)-?(0|[1-9]\d*)\.\d{{{scale}}}" if scale else _WHOLE
    return _SPELLINGS.get(type_name)
