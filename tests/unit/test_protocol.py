"""Errors on the wire, marks, hashes, settings, the chain document's JSON, and who is first in line."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from pathlib import Path

import grpc
import grpc.aio
import pytest

import seriatim
from seriatim.protocol import errors, hashing, marks, rpc, settings
from seriatim.protocol.election import first_in_line
from seriatim.protocol.marks import SourceSpan
from seriatim.protocol.names import (
    Epoch,
    Incarnation,
    Index,
    Token,
    automatic_seq,
)
from seriatim.protocol.registration import Registration
from seriatim.protocol.zookeeper import SessionExpired


def _classes(root: type[errors.SeriatimError]) -> list[type[errors.SeriatimError]]:
    return [root, *(one for child in root.__subclasses__() for one in _classes(child))]


def test_every_error_survives_the_wire_and_has_a_code_of_its_own():
    for module in pkgutil.walk_packages(seriatim.__path__, "seriatim."):
        if not module.name.endswith("__mypyc"):
            importlib.import_module(module.name)
    classes = [cls for cls in _classes(errors.SeriatimError) if cls.__module__.startswith("seriatim.")]
    of_codes: dict[str, type] = {}
    for cls in classes:
        assert of_codes.setdefault(cls.code, cls) is cls
    for cls in classes:
        if cls.__module__ == errors.__name__:
            arrived = errors.from_wire(errors.to_wire(cls("what happened", epoch=3, queue="q")))
            assert type(arrived) is cls
            assert arrived.details == {"epoch": 3, "queue": "q"}


def test_an_error_of_a_newer_version_is_still_an_error():
    assert type(errors.from_wire('{"code": "brand-new", "message": "m"}')) is errors.SeriatimError


def test_details_that_name_their_own_words_are_details():
    told = errors.from_wire('{"code": "waiting", "message": "m", "details": {"message": 1, "self": 2}}')
    assert (type(told), told.message, told.details) == (errors.Waiting, "m", {"message": 1, "self": 2})


@pytest.mark.parametrize("text", ["{", "[]", "null", "[" * 100_000, ""])
def test_what_is_no_error_is_malformed(text):
    with pytest.raises(errors.MalformedFrame):
        errors.from_wire(text)


def test_what_a_proxy_says_of_a_call_is_none_of_our_errors():
    metadata = grpc.aio.Metadata()
    failure = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, details="{no healthy upstream}")
    assert type(rpc.translated(failure)) is errors.Unreachable


def test_who_asks_a_server_of_another_kind_is_told_so():
    """As where a broker's address was given for a coordinator's: nobody answered there, it said."""
    metadata = grpc.aio.Metadata()
    failure = grpc.aio.AioRpcError(grpc.StatusCode.UNIMPLEMENTED, metadata, metadata, details="Method not found!")
    told = rpc.translated(failure, "h:1")
    assert type(told) is errors.Unreachable
    assert told.message.startswith("what answers at h:1 is another kind of server")


def test_automatic_seqs_rise_from_one_elected_sender_to_the_next():
    assert automatic_seq(Token(1), 2**40 - 1) < automatic_seq(Token(2), 0) < automatic_seq(Token(2), 1) < 2**64
    for token, counter in [(2**24, 0), (0, 2**40), (-1, 0)]:
        with pytest.raises(OverflowError):
            automatic_seq(Token(token), counter)


def test_marks():
    spans = [SourceSpan("p", 3, 5, 3), SourceSpan("q", 1, 1, 1)]
    assert marks.raised({"p": 4, "r": 9}, spans) == {"p": 5, "q": 1, "r": 9}
    assert marks.merged({"p": 4}, {"p": 2, "q": 0}) == {"p": 4, "q": 0}
    assert marks.is_resend({"p": 5, "q": 1}, spans)
    assert not marks.is_resend({"p": 5}, spans)
    assert marks.overlaps({"p": 3}, spans)
    assert not marks.overlaps({"p": 2}, spans)


def test_the_chain_hash_needs_every_part():
    base = hashing.hash_after_link(hashing.EMPTY_HASH, Epoch(1), Index(5), b"x" * 32)
    others = [
        hashing.hash_after_link(b"y" * 32, Epoch(1), Index(5), b"x" * 32),
        hashing.hash_after_link(hashing.EMPTY_HASH, Epoch(2), Index(5), b"x" * 32),
        hashing.hash_after_link(hashing.EMPTY_HASH, Epoch(1), Index(6), b"x" * 32),
        hashing.hash_after_link(hashing.EMPTY_HASH, Epoch(1), Index(5), b"z" * 32),
    ]
    assert len({base, *others}) == 5


def test_the_first_in_line_has_the_smallest_number_whatever_its_name():
    assert first_in_line(["z-0000000002", "a-0000000010"]) == "z-0000000002"
    assert first_in_line([]) is None


def test_a_registration_survives_json():
    one = Registration(Incarnation("d", 2), "127.0.0.1:1", Incarnation("e", 1), True, False, "disk full")
    assert Registration.decode(one.encode()) == one
    assert Registration.decode(dataclasses.replace(one, peer=None).encode()).peer is None


@dataclasses.dataclass(frozen=True)
class _Settings:
    directory: Path
    port: int = 1
    ratio: float = 0.5
    is_quiet: bool = False
    name: str | None = None


def _load(tmp_path, text="", environment=None, **flags):
    file = tmp_path / "settings.toml"
    file.write_text(text)
    return settings.load(_Settings, section="broker", file=file, environment=environment or {}, flags=flags)


def test_a_flag_goes_before_the_environment_and_that_before_the_file(tmp_path):
    text = '[broker]\ndirectory = "/f"\nport = 2\nratio = 2\nname = "file"'
    environment = {"SERIATIM_PORT": "3", "SERIATIM_IS_QUIET": "yes"}
    assert _load(tmp_path, text, environment, name="flag", port=None) == _Settings(Path("/f"), 3, 2.0, True, "flag")


@pytest.mark.parametrize(
    ("text", "environment", "what"),
    [
        ("[broker]\nprot = 1", {}, "prot"),
        ("[broker]\nport = 'x'", {}, "port"),
        ("[broker]", {"SERIATIM_PORT": "many"}, "SERIATIM_PORT"),
        ("[broker]\nport = true", {}, "port"),
        ("[broker", {}, "TOML"),
        ("[broker]", {}, "--directory"),
        ("[broker]", {"SERIATIM_DIRECTORY": ""}, "SERIATIM_DIRECTORY: ''"),
    ],
)
def test_wrong_settings_are_named(tmp_path, text, environment, what):
    with pytest.raises(errors.InvalidArgument, match=what):
        _load(tmp_path, text, environment)


@pytest.mark.parametrize(
    ("status", "raised", "understood"),
    [
        # A coordinator whose own session is over: a client of it asks another one, and goes on.
        (grpc.StatusCode.UNAVAILABLE, SessionExpired("the ZooKeeper session has expired"), errors.Unreachable),
        (grpc.StatusCode.UNAVAILABLE, errors.StaleCursor("stale"), errors.StaleCursor),
        (grpc.StatusCode.FAILED_PRECONDITION, SessionExpired("of another kind"), errors.SeriatimError),
    ],
)
def test_a_server_that_cannot_serve_for_a_reason_unknown_here_is_unreachable(status, raised, understood):
    failed = grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(), errors.to_wire(raised))
    assert type(rpc.translated(failed)) is understood


@pytest.mark.parametrize(
    ("status", "details", "understood"),
    [
        # Of gRPC's core, where bytes had changed on their way: it ended readers, and members, as by a defect of their own.
        (
            grpc.StatusCode.UNKNOWN,
            "Stream removed (Failed parsing HTTP/2 (invalid ping: length=8))",
            errors.Unreachable,
        ),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "CLIENT: Received message larger than max (1090519 vs. 6)",
            errors.Unreachable,
        ),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", errors.Unreachable),
        (
            grpc.StatusCode.FAILED_PRECONDITION,
            errors.to_wire(errors.Sealed("s")).replace("sealed", "seaLed"),
            errors.DeadlineOver,
        ),
        (grpc.StatusCode.UNKNOWN, "Unexpected <class 'KeyError'>: 'a'", errors.BugError),
    ],
)
def test_what_grpc_tells_by_itself_is_about_the_connection_but_for_a_servicer_s_defect(status, details, understood):
    failed = grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
    assert type(rpc.translated(failed)) is understood
