"""The form of a line of the log, ours and a library's."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest

from seriatim.protocol import log

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A process starts its logging once; these tests share theirs with others."""
    root = logging.getLogger()
    chatty = {name: logging.getLogger(name).level for name in ("kazoo", "py4j")}
    level, handlers = root.level, list(root.handlers)
    root.handlers.clear()  # pytest's own would be closed
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
    for name, before in chatty.items():
        logging.getLogger(name).setLevel(before)


def test_an_event_of_ours_has_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    log.start_logging(to="stdout")
    log.logger("coordinator").info("link sealed", queue="orders", end=12, reason="it is over", group=None)
    assert re.fullmatch(
        STAMP + " INFO coordinator link sealed queue=orders end=12 reason='it is over'\n", capsys.readouterr().out
    )


def test_what_a_library_says_is_the_value_of_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    log.start_logging()
    logging.getLogger("kazoo.client").warning("Connection dropped: %s", "refused")
    assert re.fullmatch(
        STAMP + " WARNING kazoo.client says message='Connection dropped: refused'\n", capsys.readouterr().err
    )


def test_exceptions_on_their_way_through_java_are_not_told_twice(capsys: pytest.CaptureFixture[str]) -> None:
    log.start_logging()
    logging.getLogger("py4j.clientserver").warning("There was an exception while executing the Python Proxy")
    assert not capsys.readouterr().err


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_a_caller_that_has_gone_is_no_error(capsys: pytest.CaptureFixture[str], level: str) -> None:
    """As gRPC says it of a broker that stood still while whoever asked it gave up."""
    log.start_logging(level)
    library = logging.getLogger("grpc._cython.cygrpc")
    said = "ExecuteBatchError raised in core by servicer method [/seriatim.v1.Broker/CommitCursor]"
    library.error(said, exc_info=OSError("Failed"))
    library.error("Unexpected [OSError] raised by servicer method [/a/B]", exc_info=OSError("Failed"))
    brief, *rest = capsys.readouterr().err.splitlines()
    if level == "INFO":
        assert re.fullmatch(STAMP + f" INFO grpc._cython.cygrpc says message='{re.escape(said)}'", brief)
        brief, *rest = rest
    assert "ERROR grpc._cython.cygrpc says message='Unexpected" in brief
    assert rest[-1] == "OSError: Failed"
