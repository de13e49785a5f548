"""Whether a column of the target holds all of a value: its digits, fields and time zone, or, of a key, all blanks at its end.

Where `ALTER TABLE` gave a column of the source more of them, PostgreSQL rounds what comes to the target's own type without a word, or leaves out
what that has no place for (an `interval hour` minutes, a `time` the day, a `timestamp` the zone), and cuts off blanks, though of a text nothing else,
that are beyond its length: in a key two rows become one. What comes without a zone it takes to be in UTC, whatever it was at the source. A record
doesn't tell its columns' types, so each value of a type that does such is looked at; digits that are zero count for none. Of texts only those of
keys are: there are many others, and to look at all takes as long as a third of the plan. A composite value is taken apart, as arrays of such are, if
the target's type has a field of such a type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from functools import lru_cache, partial
from math import isfinite
from struct import pack, unpack
from typing import Final, NamedTuple, TypeAlias

from seriatim.consumer.spark.apply.shape import Kind, RowType, TableShape

Holds: TypeAlias = Callable[[str], object]
"""Whether a column holds all of a value, as the log writes it: truthy if it does, or if PostgreSQL refuses the value by itself."""

_match_numeric = re.compile(r"numeric\(\d+,(-?\d+)\)").fullmatch
_MONEY_SCALE: Final = 2
"""With `lc_monetary` C."""
_match_time = re.compile(r"(date|time|timestamp|interval)(?: \w+ to)?\b([^(]*)(?:\((\d)\))?(.*)").fullmatch
_ZONELESS: Final = r":\d\d:[\d.]+(?: BC)?(?=[\n\",}]|\Z)"
"""A time of day behind which no zone is."""
_TIMES: Final = {
    "date": r" [\d:.]*[1-9]",  # a time of day
    "time without time zone": r"[+-]",  # a zone, or a date before it
    "time with time zone": rf"-\d\d-|(?<![+-]\d\d){_ZONELESS}",  # a date; and a zone, too, may have seconds
    "timestamp without time zone": r"\+",  # as a zone is written, which is UTC
    "timestamp with time zone": _ZONELESS,
    "interval year": r"mon|day|[1-9]\d*:|:[\d:.]*[1-9]",
    "interval month": r"day|[1-9]\d*:|:[\d:.]*[1-9]",
    "interval day": r"[1-9]\d*:|:[\d:.]*[1-9]",
    "interval hour": r":[\d:.]*[1-9]",
    "interval minute": r":\d\d:[\d.]*[1-9]",
}
"""What in a value a type of time leaves out, or adds, however many digits it holds."""
_RANGES: Final = {
    "date": "date",
    "ts": "timestamp without time zone",
    "tstz": "timestamp with time zone",
}
_match_range = re.compile(r"(date|ts|tstz)(?:multi)?range").fullmatch
_is_character = re.compile(r"[\0-\x7f]?|[\\?][0-7]{3}|NULL").fullmatch
"""One byte. One beyond ASCII is written in octal, of whose escape in an array, which may have nulls, too, `_replace_escapes` has left a question mark."""
_NAME_BYTES: Final = 63
_TEXT: Final = "character varying"
_match_length = re.compile(rf"{_TEXT}\((\d+)\)").fullmatch
_search_blank = re.compile(r' (?:["\n]|\Z)').search
_elements = re.compile(r'[^{},"]+').findall
_replace_escapes = re.compile(r"\\.", re.DOTALL).sub
_match_fields = re.compile(r'[(,](?:"((?:[^"\\]|""|\\\\)*)"|([^,)]*))').finditer
_replace_doubled = re.compile(r'(["\\])\1').sub
_rows = re.compile(r'"((?:[^"\\]|\\.)*)"|(\([^{}"]*\))', re.DOTALL).findall
"""Of an array: a composite value in quotes, with escapes, or one that needs none."""


class Rounding(NamedTuple):
    """A column that may round what is written to it.

    search: finds something in values, one a line, where the column may not hold one of them. To look at each takes twice as long, or more.
    """

    column: str
    search: Callable[[str], object]
    holds: Holds


def rounding_columns(shape: TableShape) -> list[Rounding]:
    """Columns that may round what is written to them."""
    of_keys = frozenset[str]().union(*filter(None, shape.unique))
    kinds = {name: shape.beneath.get(name, kind) for name, kind in shape.columns.items() if name not in shape.generated}
    found = [(name, _rounding(kind, is_of_key=name in of_keys)) for name, kind in kinds.items()]
    return [Rounding(name, *rounding) for name, rounding in found if rounding is not None]


@lru_cache(1024)
def _rounding(kind: Kind, *, is_of_key: bool) -> tuple[Callable[[str], object], Holds] | None:
    """Of a type: `search` and `holds`."""
    if isinstance(kind, RowType):
        fields = [_rounding(field, is_of_key=is_of_key) for field in kind.fields]
        return (bool, partial(_holds_fields, [field and field[1] for field in fields])) if any(fields) else None
    if isinstance(kind, str) and not kind.endswith("[]"):
        return _scalar(kind) if is_of_key or not kind.startswith(_TEXT) else None
    element, elements = (kind[:-2], _elements_of) if isinstance(kind, str) else (kind.element, _rows_of)
    of_elements = _rounding(element, is_of_key=is_of_key)
    if of_elements is None:
        return None
    search, holds = of_elements
    return search, lambda text: all(map(holds, elements(text)))


def _elements_of(text: str) -> list[str]:
    return _elements(_replace_escapes("?", text))


def _rows_of(text: str) -> list[str]:
    return [plain or _replace_escapes(lambda found: found[0][1], quoted) for quoted, plain in _rows(text)]


def _holds_fields(fields: Sequence[Holds | None], text: str) -> bool:
    values = (_replace_doubled(r"\1", found[1]) if found[1] is not None else found[2] for found in _match_fields(text))
    return all(holds is None or not value or holds(value) for holds, value in zip(fields, values, strict=False))


def _scalar(type_name: str) -> tuple[Callable[[str], object], Holds] | None:
    if found := _match_numeric(type_name):
        return _numeric(int(found[1]))
    if type_name == "money":
        return _numeric(_MONEY_SCALE)
    if found := _match_length(type_name):
        return _search_blank, partial(_is_within, int(found[1]))
    if type_name == "name":
        return re.compile(r"[^\n]{16}").search, lambda text: len(text.encode()) <= _NAME_BYTES
    if type_name == '"char"':
        return re.compile(r"[^\n]{2}|[^\0-\x7f]").search, _is_character
    if type_name == "real":
        # With fewer digits, or as an integer of seven, it holds each number; and it is written with nine at most.
        return re.compile(r"[\d.]{8}").search, lambda text: _is_float("f", 9, text)
    if type_name == "double precision":
        return re.compile(r"[\d.]{16}").search, lambda text: _is_float("d", 17, text)
    return _time(type_name)


def _time(type_name: str) -> tuple[Callable[[str], object], Holds] | None:
    of_range = _match_range(type_name)
    found = _match_time(_RANGES[of_range[1]] if of_range else type_name)
    if found is None:
        return None
    kind, fields, digits, zone = found.groups()
    lost = [_TIMES.get(f"{kind}{fields}{zone}"), digits and rf"\.\d{{{digits}}}\d*[1-9]"]
    patterns = [pattern for pattern in lost if pattern]
    return _without("|".join(patterns)) if patterns else None


def _numeric(scale: int) -> tuple[Callable[[str], object], Holds]:
    more = rf"\.\d{{{scale}}}\d*[1-9]|e" if scale >= 0 else "[1-9]"
    return re.compile(more).search, lambda text: _has_scale(text, scale)


def _is_within(length: int, text: str) -> bool:
    return not len(text.rstrip(" ")) <= length < len(text)


def _without(pattern: str) -> tuple[Callable[[str], object], Holds]:
    search = re.compile(pattern).search
    return search, lambda text: search(text) is None


def _has_scale(text: str, scale: int) -> bool:
    try:
        _, digits, exponent = Decimal(text).as_tuple()
    except InvalidOperation:
        return True
    significant = "".join(map(str, digits)).rstrip("0")
    return not significant or not isinstance(exponent, int) or exponent + len(digits) - len(significant) >= -scale


def _is_float(code: str, most_digits: int, text: str) -> bool:
    """A float is written with as many digits as tell it from its neighbours, rounded to them; more, or others, are of a wider type.

    `code`: of its size, as `struct` has it. Beside a power of two, where neighbours are at two distances, another last digit may be the one that tells.
    """
    try:
        if code == "d" and repr(float(text)) == text:
            return True
        value = _float(code, text)
        digits = len(text.partition("e")[0].replace(".", "").lstrip("-0").rstrip("0"))
        if digits > most_digits or not isfinite(value):
            return not isfinite(value)
        written = f"{value:.{max(digits, 1)}g}"
        return Decimal(written) == Decimal(text) or _float(code, written) != value
    except (ValueError, OverflowError):
        return True


def _float(code: str, text: str) -> float:
    """The nearest one of this size. Raises ValueError, OverflowError."""
    (value,) = unpack(code, pack(code, float(text)))
    return float(value)
