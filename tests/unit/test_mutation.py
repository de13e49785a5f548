"""Mutants change what they say they change, and nothing else."""

import importlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.mutation import judge, quick
from tests.mutation.judge import MODULES, own_tests
from tests.mutation.operators import Mutant, apply, changed_lines, mutants

SOURCE = '''
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class Counter:
    count: int = 0
    name: str = ""

    @property
    def is_large(self) -> bool:
        return self.count > 2 and not self.name

    @cached_property
    def least(self) -> int:
        return min(self.count, 5)

    @staticmethod
    def among(numbers):
        return [number for number in numbers if number in (1, 2)]


def counted(counter, order):
    """Says more."""
    assert order is not None
    if order == "raise":
        raise ValueError(f"{counter.count + 1}")
    match order:
        case int() if order >= 0:
            counter = replace(counter, count=counter.count + order, name="counted")
        case _:
            pass
    return counter


def cleared(kept, keys):
    for key in keys:
        del kept[key]
        return
    kept["cleared"] = True
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    name = f"mutated_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(name)
    del sys.modules[name]


def _mutant(module, what) -> Mutant:
    (found,) = (one for one in mutants(module.__name__) if one.what.partition(": ")[2] == what)
    return found


def _left(module, keys) -> set[str]:
    kept: dict[str, object] = {"a": 1, "b": 2}
    module.cleared(kept, keys)
    return set(kept)


@pytest.mark.parametrize(
    ("what", "seen", "right", "wrong"),
    [
        ("GtE for Gt", lambda m: m.Counter(2).is_large, False, True),
        ("LtE for Gt", lambda m: m.Counter(3).is_large, True, False),
        ("without self.count > 2", lambda m: m.Counter(0).is_large, False, True),
        ("without not", lambda m: m.Counter(3, "named").is_large, False, True),
        ("max for min", lambda m: m.Counter(7).least, 5, 7),
        ("without if number in (1, 2)", lambda m: m.Counter.among([2, 3]), [2], [2, 3]),
        ("NotIn for In", lambda m: m.Counter.among([2, 3]), [2], [3]),
        ("NotEq for Eq", lambda m: m.counted(m.Counter(), "raise") is None, ValueError, False),
        ("never", lambda m: m.counted(m.Counter(), "raise").count, ValueError, 0),
        (
            "dropped: raise ValueError(f'{counter.count + 1}')",
            lambda m: m.counted(m.Counter(), "raise").count,
            ValueError,
            0,
        ),
        ("without if order >= 0", lambda m: m.counted(m.Counter(), -1).count, 0, -1),
        ("without count=counter.count + order", lambda m: m.counted(m.Counter(), 3), (3, "counted"), (0, "counted")),
        ("Sub for Add", lambda m: m.counted(m.Counter(), 3).count, 3, -3),
        ("dropped: return", lambda m: _left(m, "ab"), {"b"}, {"cleared"}),
        ("dropped: del kept[key]", lambda m: _left(m, "ab"), {"b"}, {"a", "b"}),
        ("dropped: kept['cleared'] = True", lambda m: _left(m, ""), {"a", "b", "cleared"}, {"a", "b"}),
    ],
)
def test_a_mutant_does_what_it_says(module, what, seen, right, wrong) -> None:
    def result():
        try:
            found = seen(module)
        except ValueError:
            return ValueError
        return (found.count, found.name) if isinstance(found, module.Counter) else found

    assert result() == right
    apply(_mutant(module, what))
    assert result() == wrong


def test_what_is_only_said_or_checked_of_itself_is_left_alone(module) -> None:
    said = [one.what for one in mutants(module.__name__)]
    assert not any("order is not None" in one or "Says more" in one or "Is for IsNot" in one for one in said)
    assert sum("Sub for Add" in one for one in said) == 1


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_what_has_changed_since_a_revision_is_known_by_its_lines(module, tmp_path, monkeypatch) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(("git", *who, *arguments), cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.chdir(tmp_path)
    git("init")
    git("commit", "--allow-empty", "--message", "without it")
    git("add", f"{module.__name__}.py")
    git("commit", "--message", "with it")
    assert changed_lines(module.__name__, "HEAD") == set()
    assert len(changed_lines(module.__name__, "HEAD~1")) == len(SOURCE.splitlines())
    changed = SOURCE.replace("> 2", "> 3")
    Path(module.__file__).write_text(changed)
    (line,) = changed_lines(module.__name__, "HEAD")
    assert "> 3" in changed.splitlines()[line - 1]
    assert {one.what.partition(": ")[2] for one in mutants(module.__name__) if one.line == line} >= {"GtE for Gt"}


@pytest.mark.parametrize(
    ("stage", "found"), [(lambda *_: time.sleep(0.2) or "", ""), (lambda *_: _for_ever(), "not over after 0.1 s")]
)
def test_a_step_that_never_ends_is_found_and_a_process_that_has_to_wait_is_not(monkeypatch, stage, found) -> None:
    """On a busy machine nothing could be run: what had not been changed was found, too."""
    monkeypatch.setattr(judge, "LIMIT_S", 0.1)
    monkeypatch.setitem(judge._STAGES, "a stage", stage)
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=judge._judge, args=(MODULES[0], None, "a stage", 0, its))
    process.start()
    try:
        assert mine.poll(60)
        assert mine.recv() == found
    finally:
        process.kill()
        process.join()


def test_mutants_are_put_to_the_schedules_of_the_kinds_that_are_named(monkeypatch) -> None:
    asked = []

    def run(seed, shape):
        asked.append((seed, shape.kinds))
        return SimpleNamespace(failure="" if seed == 0 else "broken")

    monkeypatch.setattr(judge.schedule, "run", run)
    assert judge._simulated(MODULES[0], judge.Schedules(3, ("seek",))) == "seed 1: broken"
    assert asked == [(0, ("seek",)), (1, ("seek",))]


def _for_ever() -> None:
    while True:
        pass


@pytest.mark.parametrize("module", MODULES)
def test_each_core_has_rules_to_change_and_tests_of_its_own(module) -> None:
    assert mutants(module)
    assert own_tests(module)


def test_by_the_tests_that_reach_its_line_a_mutant_is_found_as_quickly_as_they_run(tmp_path) -> None:
    (tmp_path / "test_lease.py").write_text("""
from seriatim.protocol.lease import Lease


def test_a_lease():
    assert Lease(7).renewed(7, 100.0, 6.0).until_s == 104.0
""")
    asked = f"""
from tests.mutation import judge, quick
from tests.mutation.operators import mutants

MODULE = "seriatim.protocol.lease"
judge.CORES["seriatim.protocol"] = "lease", "{tmp_path.name}/test_*.py"
for one in quick.judge(mutants(MODULE)):
    print(one.mutant.function, one.mutant.what, one.how or "lives", sep="|")
"""
    done = subprocess.run(
        [sys.executable, "-c", asked],
        cwd=tmp_path.parent,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    said = dict(line.rsplit("|", 1) for line in done.stdout.splitlines() if "|" in line)
    assert said["Lease.renewed|44: always"].endswith("test_a_lease")
    assert said["Lease.usable_until_s|33: never"] == "lives"


def test_a_mutant_that_leaves_its_tests_waiting_is_found_by_that(monkeypatch) -> None:
    """As one of a shell: it takes no processor time."""
    monkeypatch.setattr(quick, "WAIT_S", 0.1)
    monkeypatch.setattr(quick, "apply", lambda _: None)
    monkeypatch.setattr(quick, "_failed", lambda _: time.sleep(60) or "")
    assert quick._found(mutants(MODULES[0])[0], ["a test"]) == "it never ends"
