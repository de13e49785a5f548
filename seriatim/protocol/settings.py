"""One loader for the settings of every process: a file, then the environment, then flags.

Settings are a frozen dataclass whose fields are str, int, float, bool or one of these or None. They are checked once,
at start; an unknown key is an error.
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from seriatim.protocol.errors import InvalidArgument

T = TypeVar("T")

ENVIRONMENT_PREFIX = "SERIATIM_"


def load(
    cls: type[T], *, section: str, file: Path | None, environment: Mapping[str, str], flags: Mapping[str, object]
) -> T:
    """Settings of type `cls`: from the TOML file's table `section`, over it SERIATIM_<FIELD>, over it the flags given.

    Flags that are None were not given. Raises InvalidArgument for an unknown key in the file or among the flags, for a
    value of the wrong type, and for a setting that is missing.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    if file is not None:
        for key, value in _table(file, section).items():
            if key not in fields:
                raise InvalidArgument(
                    f"{file}: [{section}] has no setting {key!r}; it knows {', '.join(sorted(fields))}"
                )
            values[key] = _converted(value, hints[key], f"{file}: {key}")
    for name in fields:
        variable = ENVIRONMENT_PREFIX + name.upper()
        if variable in environment:
            values[name] = _converted(environment[variable], hints[name], variable)
    for key, flag in flags.items():
        if flag is None:
            continue
        if key not in fields:
            raise InvalidArgument(f"no setting {key!r}; there are {', '.join(sorted(fields))}")
        values[key] = _converted(flag, hints[key], f"--{key.replace('_', '-')}")
    missing = [
        name
        for name, field in fields.items()
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise InvalidArgument(f"missing: {', '.join('--' + name.replace('_', '-') for name in missing)}")
    return cls(**values)


def _table(file: Path, section: str) -> dict[str, Any]:
    try:
        content = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise InvalidArgument(f"can't read the settings file {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{file} is not TOML: {error}") from error
    table = content.get(section, {})
    if not isinstance(table, dict):
        raise InvalidArgument(f"{file}: {section} has to be a table")
    return table


_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def _converted(value: object, hint: Any, where: str) -> Any:
    """`value` as the type that the field's annotation asks for."""
    choices = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in choices:
        return None
    wanted = next(choice for choice in choices if choice is not type(None))
    if wanted is Path and isinstance(value, str | Path) and value != "":  # which would be the present folder
        return Path(value)
    if isinstance(value, wanted) and not (wanted is int and isinstance(value, bool)):
        return value
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        if wanted is bool and value.lower() in _TRUE | _FALSE:
            return value.lower() in _TRUE
        if wanted in (int, float):
            try:
                return wanted(value)
            except ValueError:
                pass
    raise InvalidArgument(f"{where}: {value!r} is not of type {wanted.__name__}")
