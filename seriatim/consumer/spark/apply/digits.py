"""Whether a column of the target holds all digits of a value.

Where `ALTER TABLE` gave a column of the source more of them, PostgreSQL rounds what comes to the target's own type without a word: in a key two
rows become one. A record doesn't tell its columns' types, so each value of a type that rounds is looked at; digits that are zero count for none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from math import frexp, isfinite
from struct import pack, unpack
from typing import Final, TypeAlias

from seriatim.consumer.spark.apply.shape import TableShape

Holds: TypeAlias = Callable[[str], object]
"""Whether a column holds all of a value, as the log writes it: truthy if it does, or if PostgreSQL refuses the value by itself."""

_match_numeric = re.compile(r"numeric\(\d+,(-?\d+)\)").fullmatch
_match_time = re.compile(r"(?:time|timestamp|interval)\b.*\(([0-5])\).*").fullmatch
_SAFE_CHARACTERS: Final = 7
"""A number that is no longer than this has six digits, or is an integer of seven: a real holds it."""
_REAL_DIGITS: Final = 9
"""The most with which PostgreSQL writes a real."""
_POWER_OF_TWO: Final = 0.5
"""Its mantissa."""


def rounding_columns(shape: TableShape) -> list[tuple[str, Holds]]:
    """Columns that may round what is written to them, and what says whether they would."""
    found = [(name, _holds(kind)) for name, kind in shape.columns.items() if name not in shape.generated]
    return [(name, holds) for name, holds in found if holds is not None]


@lru_cache(1024)
def _holds(type_name: str) -> Holds | None:
    if found := _match_numeric(type_name):
        return _numeric(int(found[1]))
    if found := _match_time(type_name):
        has_more = re.compile(rf"\.\d{{{found[1]}}}\d*[1-9]").search
        return lambda text: has_more(text) is None
    return _is_real if type_name == "real" else None


def _numeric(scale: int) -> Holds:
    is_short = re.compile(rf"-?\d+(\.\d{{1,{scale}}})?").fullmatch if scale > 0 else re.compile("0").fullmatch
    return lambda text: is_short(text) or _has_scale(text, scale)


def _has_scale(text: str, scale: int) -> bool:
    try:
        _, digits, exponent = Decimal(text).as_tuple()
    except InvalidOperation:
        return True
    significant = "".join(map(str, digits)).rstrip("0")
    return not significant or not isinstance(exponent, int) or exponent + len(digits) - len(significant) >= -scale


def _is_real(text: str) -> bool:
    """A real is written with as many digits as tell it from its neighbours, rounded to them; more, or others, are of a `double precision`.

    Beside a power of two, where neighbours are at two distances, another last digit may be the one that tells.
    """
    if len(text) <= _SAFE_CHARACTERS:
        return True
    try:
        value = float(text)
        (nearest,) = unpack("f", pack("f", value))
    except (ValueError, OverflowError):
        return True
    digits = len(text.partition("e")[0].replace(".", "").lstrip("-0").rstrip("0"))
    if not isfinite(value):
        return True
    if digits > _REAL_DIGITS:
        return False
    return abs(frexp(nearest)[0]) == _POWER_OF_TWO or float(f"{nearest:.{max(digits, 1)}g}") == value
