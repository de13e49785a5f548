"""What compose/compose.yaml comes to, as Compose reads it. Nothing is started."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from tests.compose.deployment import COMPOSE_FILE, COORDINATORS, MEMBERS, compose_command

CLIENTS = ("capture-1", "capture-2", "replay", "reader-1", "reader-2")


def services(**settings: str) -> dict[str, str]:
    """What each is made of, by name, on one line."""
    if shutil.which("docker") is None:
        pytest.skip("Compose isn't there")
    command = (*compose_command(), "-f", str(COMPOSE_FILE), "--profile", "demo", "config")
    read = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=os.environ | settings)
    found = re.findall(r"^  ([\w-]+):\n((?:    .*\n)+)", read.stdout, re.MULTILINE)
    return {name: " ".join(lines.split()) for name, lines in found}


def test_senders_and_readers_too_are_given_up_after_the_session_that_is_set() -> None:
    """Readers kept the default, whatever was set."""
    found = services(SESSION_TIMEOUT_MS="2500")
    for name in (*COORDINATORS, *MEMBERS, *CLIENTS):
        assert re.search(r"SERIATIM_SESSION_TIMEOUT_MS: ['\"]2500['\"]", found[name]), name
