"""Values that are made faster are the same values."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from dataclasses import dataclass, field

import pytest

from seriatim.broker_group.core import replica
from seriatim.producer.core.sender_state import SenderState
from seriatim.protocol import values
from seriatim.protocol.position import START


@dataclass(frozen=True, slots=True)
class Plain:
    number: int
    word: str = "w"
    words: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Checked:
    number: int

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("below 0")


@dataclass(slots=True)
class Changing:
    number: int


@pytest.fixture(scope="module", autouse=True)
def _faster() -> None:
    own = {Plain: Plain.__init__, Checked: Checked.__init__, Changing: Changing.__init__}
    sys.modules["seriatim.of_a_test"] = type(sys)("seriatim.of_a_test")
    for one in own:
        vars(sys.modules["seriatim.of_a_test"])[one.__name__] = one
        one.__module__ = "seriatim.of_a_test"
    vars(sys.modules["seriatim.of_a_test"])["replace"] = dataclasses.replace
    values.make_faster()
    assert [one.__init__ is not before for one, before in own.items()] == [True, False, False]


def replace(value: object, **changes: object) -> object:
    found: object = vars(sys.modules["seriatim.of_a_test"])["replace"](value, **changes)
    return found


def test_the_same_arguments_make_the_same_value() -> None:
    assert repr(Plain(1)) == "Plain(number=1, word='w', words=[])"
    assert Plain(1, "a", ["b"]) == Plain(words=["b"], word="a", number=1)
    assert hash(Checked(1)) == hash(Checked(1))
    assert Plain(1).words is not Plain(1).words
    assert list(inspect.signature(Plain).parameters) == ["number", "word", "words"]


@pytest.mark.parametrize("arguments", [{}, {"number": 1, "other": 2}])
def test_wrong_arguments_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(TypeError):
        Plain(**arguments)  # type: ignore[arg-type]


def test_a_changed_copy_has_the_rest_as_it_was() -> None:
    value = Plain(1, "a", ["b"])
    assert replace(value, number=2) == Plain(2, "a", ["b"])
    assert replace(value) == value
    assert value.number == 1
    with pytest.raises(TypeError):
        replace(value, other=1)


def test_none_can_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plain(1).number = 2  # type: ignore[misc]


def test_what_is_checked_when_it_is_made_still_is() -> None:
    assert replace(Changing(1), number=2) == Changing(2)
    with pytest.raises(ValueError, match="below 0"):
        replace(Checked(1), number=-1)


def test_the_cores_are_faster_ones() -> None:
    assert vars(replica)["replace"] is not dataclasses.replace
    assert SenderState() == SenderState()
    assert vars(replica)["replace"](START, index=3).index == 3


def test_what_others_import_meanwhile_is_no_failure() -> None:
    class Name(str):
        __slots__ = ()

        def startswith(self, *_: object) -> bool:  # type: ignore[override]
            sys.modules["somebody.elses"] = sys
            return False

    name = Name("of.somebody.else")
    sys.modules[name] = sys
    try:
        values.make_faster()
        assert "somebody.elses" in sys.modules
    finally:
        del sys.modules[name]
        sys.modules.pop("somebody.elses", None)
