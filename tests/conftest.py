"""Fixtures for all tests: a real ZooKeeper for the whole session, and a place of its own in it for each test."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from kazoo.client import KazooClient
from xdist.scheduler import LoadScopeScheduling

from seriatim.cli.embedded.zookeeper import EmbeddedZooKeeper
from seriatim.protocol import direct
from tests.slow_lines import SlowLines

TESTS = Path(__file__).parent
LATE = [TESTS / "simulation", TESTS / "compose"]
PARTS = {"faults": "harmed", "postgres": "harmed", "spark": "behind", "compose": "behind"}
"""Of `make test`, which runs them side by side, since what they do most is to wait for servers: all other folders are a third one."""
_NICENESS = {"behind": 5}
_BEGUN = pytest.StashKey[set[str]]()
hypothesis.settings.register_profile("busy machines", deadline=None)
hypothesis.settings.load_profile("busy machines")


class Hooks:
    """What a folder's conftest.py may have beside pytest's own hooks."""

    def pytest_first_test(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Called before the first test of a part, with all that belongs to it: for what is to be ready later."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-lines", type=int, metavar="SEED", help="some lines of the product, by chance, take their thread a while"
    )
    parser.addoption("--slow-in", default="", metavar="PART", help="of files only whose path has this in it")


def pytest_configure(config: pytest.Config) -> None:
    seed = config.getoption("--slow-lines")
    if seed is not None:
        SlowLines(config.getoption("--slow-in"), seed).__enter__()  # as long as this process runs


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(Hooks)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The simulator's tests come late: what they look at is made by what all others leave of the processors.

    Those in containers come last: their images are made meanwhile.
    """
    items.sort(key=lambda item: next((rank for rank, folder in enumerate(LATE, 1) if folder in item.path.parents), 0))


def _part_of(nodeid: str) -> str:
    folder, _, _ = nodeid.removeprefix("tests/").partition("/")
    return PARTS.get(folder, "all the rest")


class _InParts(LoadScopeScheduling):
    """For `pytest -n 3`: which of the processes runs a test."""

    def _split_scope(self, nodeid: str) -> str:
        return _part_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _InParts:
    return _InParts(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A process that is one of several is told of a part when it begins that, and one that runs all of all at once."""
    session, part = item.session, ""
    items = session.items
    if "PYTEST_XDIST_WORKER" in os.environ:
        part = _part_of(item.nodeid)
        items = [one for one in items if _part_of(one.nodeid) == part]
    begun = session.stash.setdefault(_BEGUN, set())
    if part in begun:
        return
    begun.add(part)
    os.nice(_NICENESS.get(part, 0))
    item.config.hook.pytest_first_test(config=item.config, items=items)


class _Problems(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "exception was never retrieved" in record.getMessage():  # not what `rpc.ignore_shared_poller` is about
            self.found.append(self.format(record))


@pytest.fixture(autouse=True)
def no_unseen_failure() -> Iterator[None]:
    """A task of this process that failed, and nobody looked, fails the test, or the one that runs when it is freed."""
    problems = _Problems()
    logging.getLogger("asyncio").addHandler(problems)
    yield
    logging.getLogger("asyncio").removeHandler(problems)
    assert not problems.found


@pytest.fixture(autouse=True)
def addresses_of_other_tests_are_forgotten() -> None:
    """Ports come again: where one test had a server there may be nobody now, or the next one's stranger."""
    direct._greeted.clear()
    direct._avoided_until_s.clear()


@pytest.fixture(scope="session")
def zookeeper_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedZooKeeper]:
    """One ZooKeeper for the session; a test that harms it starts its own instead."""
    with EmbeddedZooKeeper(tmp_path_factory.mktemp("zookeeper")) as server:
        yield server


@pytest.fixture
def zookeeper(zookeeper_server: EmbeddedZooKeeper) -> str:
    """HOST:PORT/CHROOT for kazoo: an empty tree of this test's own."""
    chroot = f"/test-{uuid.uuid4().hex}"
    client = KazooClient(zookeeper_server.address)
    client.start(timeout=60)
    client.create(chroot)
    client.stop()
    client.close()
    return zookeeper_server.address + chroot


@pytest.fixture
def cluster_name() -> str:
    """A cluster name of this test's own, for code that takes plain HOST:PORT and a cluster."""
    return f"test-{uuid.uuid4().hex}"
