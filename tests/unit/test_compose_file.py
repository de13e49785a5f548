"""What compose/compose.yaml comes to, as Compose reads it. Nothing is started."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.compose.deployment import COMPOSE_FILE, COORDINATORS, MEMBERS, PASSWORD, compose_command

CLIENTS = ("capture-1", "capture-2", "replay", "reader-1", "reader-2")


def services(**settings: str) -> dict[str, str]:
    """What each is made of, by name, on one line."""
    try:
        compose = compose_command()
    except (AssertionError, FileNotFoundError) as error:
        pytest.skip(f"there is no Compose: {error}")
    command = (*compose, "-f", str(COMPOSE_FILE), "--profile", "demo", "config")
    read = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=os.environ | settings)
    found = re.findall(r"^  ([\w-]+):\n((?:    .*\n)+)", read.stdout, re.MULTILINE)
    return {name: " ".join(lines.split()) for name, lines in found}


def test_senders_and_readers_too_are_given_up_after_the_session_that_is_set() -> None:
    """Readers kept the default, whatever was set."""
    found = services(SESSION_TIMEOUT_MS="2500")
    for name in (*COORDINATORS, *MEMBERS, *CLIENTS):
        assert re.search(r"SERIATIM_SESSION_TIMEOUT_MS: ['\"]2500['\"]", found[name]), name


def test_a_password_of_any_letters_is_the_databases_and_in_no_address() -> None:
    """Captures and the replay started again and again, and what follows its @ was logged as a host."""
    found = services(POSTGRES_PASSWORD=PASSWORD)
    for name in ("postgres-east", "postgres-west"):
        assert f"POSTGRES_PASSWORD: {PASSWORD} " in found[name], name
    for name in ("capture-1", "capture-2", "replay", "customers"):
        assert f"PGPASSWORD: {PASSWORD} " in found[name], name
    for name, lines in found.items():
        assert not re.search(r"://\S*w:rd", lines), name


def test_what_sparks_executors_say_fills_no_disk() -> None:
    """It grew for as long as the worker's container was there, in it."""
    worker = services()["spark-worker"]
    assert "init: true" in worker
    for setting in ("strategy=size", "maxSize=", "maxRetainedFiles="):
        assert f"-Dspark.executor.logs.rolling.{setting}" in worker
