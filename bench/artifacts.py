"""What peers are made of, fetched once into `bench/.cache`: jars from Maven Central, packages from PyPI.

Versions are pinned in `bench/pins`: a Maven project with exact versions, and lock files with hashes. A folder of the
cache carries the checksum of its pin, so that another version gets another folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from seriatim.cli.embedded.errors import Missing

HERE = Path(__file__).parent
CACHE = HERE / ".cache"
PINS = HERE / "pins"
_TIMEOUT_S = 900


def jars(name: str) -> Path:
    """The folder with the jars of `pins/NAME.pom.xml` and all that they need. Raises Missing."""
    pin = PINS / f"{name}.pom.xml"
    return _fetched(pin, lambda to: (_maven(), "-B", "-q", "-f", str(pin), "dependency:copy-dependencies",
                                     f"-DoutputDirectory={to}", "-DincludeScope=runtime"))  # fmt: skip


def packages(name: str) -> Path:
    """The folder with the packages of `pins/NAME.txt`, to be put on PYTHONPATH. Raises Missing."""
    pin = PINS / f"{name}.txt"
    return _fetched(pin, lambda to: (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install",
                                     "--require-hashes", "--no-deps", "--target", str(to), "-r", str(pin)))  # fmt: skip


def _fetched(pin: Path, command: Callable[[Path], Sequence[str]]) -> Path:
    digest = hashlib.sha256(pin.read_bytes()).hexdigest()[:12]
    folder = CACHE / f"{pin.name.partition('.')[0]}-{pin.suffix[1:]}-{digest}"
    if folder.exists():
        return folder
    print(f"fetching {pin.name}", file=sys.stderr)
    partial = folder.with_suffix(f".{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    done = subprocess.run(
        command(partial),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        shutil.rmtree(partial, ignore_errors=True)
        raise Missing(f"can't fetch what {pin.name} names:\n{done.stdout[-2000:]}")
    partial.rename(folder)
    return folder


def _maven() -> str:
    """Where Maven is; installed first where that is possible without asking."""
    if shutil.which("mvn") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        print("Maven is missing: installing it", file=sys.stderr)
        for step in (("update", "-qq"), ("install", "-y", "-qq", "--no-install-recommends", "maven")):
            subprocess.run(("apt-get", *step), check=False, timeout=_TIMEOUT_S, stdout=subprocess.DEVNULL)
    found = shutil.which("mvn")
    if found is None:
        raise Missing("Maven, which fetches the peers' jars, is missing: sudo apt-get install maven")
    return found
