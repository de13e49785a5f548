"""Whether a column of the target holds all digits of a value, or, of a key, all blanks at its end.

Where `ALTER TABLE` gave a column of the source more of them, PostgreSQL rounds what comes to the target's own type without a word, and cuts off
blanks, though nothing else, that are beyond its length: in a key two rows become one. A record doesn't tell its columns' types, so each value of a
type that rounds is looked at; digits that are zero count for none. Of texts only those of keys are: there are many others, and to look at all
takes as long as a third of the plan.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from functools import lru_cache, partial
from math import isfinite
from struct import pack, unpack
from typing import Final, NamedTuple, TypeAlias

from seriatim.consumer.spark.apply.shape import TableShape

Holds: TypeAlias = Callable[[str], object]
"""Whether a column holds all of a value, as the log writes it: truthy if it does, or if PostgreSQL refuses the value by itself."""

_match_numeric = re.compile(r"numeric\(\d+,(-?\d+)\)").fullmatch
_MONEY_SCALE: Final = 2
"""With `lc_monetary` C."""
_match_time = re.compile(r"(?:time|timestamp|interval)\b.*\(([0-5])\).*").fullmatch
_TEXT: Final = "character varying"
_match_length = re.compile(rf"{_TEXT}\((\d+)\)").fullmatch
_search_blank = re.compile(r' (?:["\n]|\Z)').search
_elements = re.compile(r'[^{},"]+').findall
_replace_escapes = re.compile(r"\\.", re.DOTALL).sub


class Rounding(NamedTuple):
    """A column that may round what is written to it.

    search: finds something in values, one a line, where the column may not hold one of them. To look at each takes twice as long, or more.
    """

    column: str
    search: Callable[[str], object]
    holds: Holds


def rounding_columns(shape: TableShape) -> list[Rounding]:
    """Columns that may round what is written to them."""
    kinds = {name: shape.beneath.get(name, kind) for name, kind in shape.columns.items() if name not in shape.generated}
    of_keys = frozenset[str]().union(*filter(None, shape.unique))
    found = [(name, _rounding(kind)) for name, kind in kinds.items() if name in of_keys or not kind.startswith(_TEXT)]
    return [Rounding(name, *rounding) for name, rounding in found if rounding is not None]


@lru_cache(1024)
def _rounding(type_name: str) -> tuple[Callable[[str], object], Holds] | None:
    """Of a type: `search` and `holds`."""
    if type_name.endswith("[]"):
        of_elements = _rounding(type_name.removesuffix("[]"))
        if of_elements is None:
            return None
        search, holds = of_elements
        return search, lambda text: all(map(holds, _elements(_replace_escapes("?", text))))
    if found := _match_numeric(type_name):
        return _numeric(int(found[1]))
    if type_name == "money":
        return _numeric(_MONEY_SCALE)
    if found := _match_length(type_name):
        return _search_blank, partial(_is_within, int(found[1]))
    if found := _match_time(type_name):
        return _without(rf"\.\d{{{found[1]}}}\d*[1-9]")
    if type_name == "date":
        return _without(r" [\d:.]*[1-9]")  # a time of day
    if type_name == "real":
        # With fewer digits, or as an integer of seven, it holds each number; and it is written with nine at most.
        return re.compile(r"[\d.]{8}").search, lambda text: _is_float("f", 9, text)
    if type_name == "double precision":
        return re.compile(r"[\d.]{16}").search, lambda text: _is_float("d", 17, text)
    return None


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
