"""The modules that setup.py compiles run compiled, from their sources as they stand; they must behave as what they were written as."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from seriatim.producer import Acknowledged
from seriatim.protocol.names import Epoch, Index, Offset

ROOT = Path(__file__).parents[2]
MODULES = re.findall(r'"(seriatim/[a-z_/]+)\.py"', (ROOT / "setup.py").read_text())


def _can_compile() -> bool:
    return bool(shutil.which("cc")) and (Path(sysconfig.get_path("include")) / "Python.h").exists()


@pytest.mark.skipif(not _can_compile(), reason="no C compiler, or no header files of Python")
@pytest.mark.parametrize("path", MODULES)
def test_a_module_that_sees_every_record_is_compiled(path: str) -> None:
    file = importlib.import_module(path.replace("/", ".")).__file__
    assert str(file).endswith(".so"), "type make setup"


def test_what_is_compiled_is_what_the_sources_say() -> None:
    assert MODULES
    is_current = subprocess.run([ROOT / "tools" / "setup", "--current"], check=False).returncode == 0
    assert is_current, "a source changed since it was compiled: type make setup"


def test_what_an_application_is_handed_can_be_copied_and_pickled() -> None:
    stored = Acknowledged(Epoch(1), Index(2), Offset(3), "s", 4)
    assert pickle.loads(pickle.dumps(stored)) == copy.deepcopy(stored) == stored
