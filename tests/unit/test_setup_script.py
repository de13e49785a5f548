"""`tools/setup` on machines that aren't this one: commands in front of the real ones say what those have."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / "tools/setup"


def said(directory: Path, **commands: str) -> str:
    """What a set-up tells that ends where Java is missing; `commands`: their bodies, by name with `_` for a dash."""
    for part in ("tools", "requirements", "commands", ".venv/bin"):
        (directory / part).mkdir(parents=True)
    shutil.copy(SETUP, directory / "tools")
    for file in ("requirements/development.lock", "pyproject.toml", "setup.py"):
        (directory / file).touch()
    bodies = {
        "java": "echo 'openjdk version \"11.0.2\" 2019-01-15' >&2",
        "apt_get": "exit 0",
        "mkdir": "exit 0",
        **commands,
    }
    paths = {directory / "commands" / name.replace("_", "-"): body for name, body in bodies.items()}
    for path, body in {**paths, directory / ".venv/bin/python": "exit 0"}.items():
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    environment = {"PATH": f"{directory / 'commands'}:/usr/bin:/bin", "HOME": str(directory)}
    ended = subprocess.run([directory / "tools/setup"], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 3, ended.stderr
    return ended.stderr


@pytest.mark.parametrize(
    ("known", "named"),
    [
        ("openjdk-21-jre-headless", "openjdk-21-jre-headless"),
        ("openjdk-17-jre-headless", "openjdk-17-jre-headless"),
        ("none", "openjdk-17-jre-headless"),
    ],
)
def test_who_may_not_install_is_told_a_package_that_his_release_has(tmp_path: Path, known: str, named: str) -> None:
    """Debian 13 has no Java 17: what was to be typed failed."""
    told = said(tmp_path, id="echo 1000", sudo="exit 1", apt_cache=f'test "$2" = {known}')
    assert told == f"setup: Java 17 or newer is missing. Type this, then try again:  sudo apt-get install -y {named}\n"


def test_a_java_that_does_not_run_is_missing(tmp_path: Path) -> None:
    """The set-up ended without a word."""
    assert "Java 17 or newer is missing" in said(tmp_path, id="echo 0", apt_cache="exit 1", java="exit 127")


def test_an_older_java_before_the_one_that_was_installed_is_told(tmp_path: Path) -> None:
    """It said `done`, and the first `seriatim up` ended with what the older one says of options that it doesn't know."""
    told = said(tmp_path, id="echo 0", apt_cache="exit 0")
    assert f"{tmp_path}/commands/java is Java 11, and comes before the one that was installed" in told
