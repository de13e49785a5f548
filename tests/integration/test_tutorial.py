"""The tutorial, as it stands in docs: every command in order, in one shell."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.commands import ended

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/tutorial.md").read_text()


def blocks(directory: Path) -> list[str]:
    """Its commands, with their files in another folder."""
    found = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return [block.replace("/tmp/tutorial", str(directory)) for block in found]


def test_who_follows_the_tutorial_waits_for_no_cluster_that_ended(tmp_path: Path) -> None:
    """It said why, and the loop that looks for its word went on."""
    (tmp_path / "seriatim").write_text("#!/bin/sh\necho no Java >&2\nexit 3\n")
    (tmp_path / "seriatim").chmod(0o755)
    start = blocks(tmp_path)[0].replace("$PWD/.venv/bin", str(tmp_path))
    assert "no Java" in ended(("bash", "-c", start), 30).stderr


@pytest.mark.timeout(400)
def test_every_command_of_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    found = blocks(tmp_path)
    assert len(found) == 9
    # This test's own Python, in the place of the one that `make setup` makes; jobs have numbers as in a person's shell.
    commands = "".join(found).replace("$PWD/.venv/bin", str(Path(sys.executable).parent))
    script = tmp_path / "tutorial"
    script.write_text(
        f"set -eum -o pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{commands}echo all done\n"
    )
    # Longer than a machine stands still: who is elected stays it, but where the tutorial wants it.
    environment = os.environ | {"SERIATIM_SESSION_TIMEOUT_MS": "20000"}
    done = ended(("bash", str(script)), 350, environment, ROOT)
    said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, said
    assert done.stdout.endswith("all done\n"), said
    assert re.search(r"^1000$", done.stdout, re.MULTILINE), said
    # A machine that stands still for longer than a sender waits has it go on once more.
    chain = r"^ +1 +g1 +sealed .*\n +2 +g2 +(open|sealed .*\n +3 +g3 +open) "
    assert re.search(chain, done.stdout, re.MULTILINE), said
    assert "\n4\n5\n" in done.stdout, said
    assert "for no link of it is open" not in done.stdout, said
