"""What a planted defect is, and how one is put in the place of the right rule while a schedule runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from tests.simulation.schedule import Shape

Maker = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Plant:
    """One rule made wrong.

    `rule`: the wrong rule in a sentence. `make`: makes it wrong while the block runs. `within`: the number of schedules in
    which it has to be found. `shape`: what they are drawn from, to find quickly what is rare. `finds`: a pattern of what the
    violation says, where it can be told beforehand.
    """

    name: str
    rule: str
    make: Maker
    within: int
    shape: Shape = field(default_factory=Shape)
    finds: str = ""


def changed(owner: Any, name: str, wrong: Callable[..., Any]) -> Maker:
    """Puts `wrong(right, *arguments)` in the place of `owner.name`."""

    def make() -> AbstractContextManager[Any]:
        right = getattr(owner, name)
        return mock.patch.object(owner, name, lambda *arguments, **named: wrong(right, *arguments, **named))

    return make


def instead(owner: Any, name: str, wrong: Any) -> Maker:
    """Puts `wrong` in the place of `owner.name`."""
    return lambda: mock.patch.object(owner, name, wrong)


def together(*makers: Maker) -> Maker:
    """All of them."""

    @contextlib.contextmanager
    def make() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for maker in makers:
                stack.enter_context(maker())
            yield

    return make
