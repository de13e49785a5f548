"""The chain document as it stands in ZooKeeper: JSON, a line for each link, compressed where it gets long.

A switch writes the document three times, and each time coordinators and members read it again. Most of it is links that ended, and
never change: each one's text is read, and written, once, and known again by its line. So what a switch costs doesn't grow with the
links that retention keeps.

It begins with the checksum of all that follows, as a first `format`: of two keys of one name every reader of JSON takes the last, and versions
before refuse one that they don't know. A compressed one has it behind it, where they don't look. What has none was written by those.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import zstandard
from crc32c import crc32c
from google.protobuf.message import DecodeError

from seriatim.protocol.chain import (
    ROTATE_MS,
    Abandoned,
    Certificate,
    ChainDocument,
    ChainMember,
    Dropped,
    Durability,
    Link,
    LinkState,
    QueueSettings,
    Readmit,
    StaleCursors,
    Subscription,
    whose_from,
)
from seriatim.protocol.checksums import with_checksum, without_checksum
from seriatim.protocol.errors import ChainTooLong, IncompatibleVersion, NoChainDocument
from seriatim.protocol.names import Incarnation, MemberName

FORMAT = 1
MAX_BYTES: Final = 1_000_000
"""ZooKeeper breaks the connection of who sends it a node of 1 MiB (`jute.maxbuffer`)."""
PLAIN_BYTES: Final = 64 * 1024
"""Longer ones are compressed; versions before couldn't read them."""
MAX_PLAIN_BYTES: Final = 256 * 1024 * 1024
KNOWN_BYTES: Final = 8 * 1024 * 1024
"""Bound on the texts of links that are known, in a process."""
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_NEEDS = "start the version that wrote it, or a newer one"
_OPEN, _CLOSE = '"links":[', "]}"
_BEGINNING: Final = b'{"format":'
_CHECKSUM: Final = b'"crc32c '
_CHECKED_FROM: Final = len(_BEGINNING) + len(_CHECKSUM) + len('01234567",')
_UNCHECKED: Final = re.compile(rb'{"format": ?[0-9]+,')
"""How it begins in versions before."""


def encode(document: ChainDocument) -> bytes:
    """The document, as it stands in ZooKeeper. Raises ChainTooLong where no node takes it."""
    data = _encoded(document)
    if len(data) > MAX_BYTES:
        raise ChainTooLong(
            f"the chain of queue {document.name} would take {len(data):,} bytes, more than a node of ZooKeeper holds",
            queue=document.name,
            links=len(document.links),
            limit_bytes=MAX_BYTES,
        )
    return data


def size_bytes(document: ChainDocument) -> int:
    """How much of a node the document takes, or would take."""
    return len(_encoded(document))


def _encoded(document: ChainDocument) -> bytes:
    content = {"format": FORMAT} | _plain(document)
    del content["links"]
    # JSON has no line breaks but these: in texts they are escaped.
    links = ",\n".join(map(_links.text, document.links))
    lines = f"\n{links}\n" if links else ""
    data = f"{_ENCODER.encode(content)[1:-1]},{_OPEN}{lines}{_CLOSE}".encode()
    data = _checksum(data) + data
    if len(data) > PLAIN_BYTES:
        data = with_checksum(zstandard.ZstdCompressor(level=1, write_content_size=True).compress(data))
    return data


def _checksum(data: bytes) -> bytes:
    """How a document begins whose rest this is."""
    return b'%b%b%08x",' % (_BEGINNING, _CHECKSUM, crc32c(data))


def is_whole(data: bytes) -> bool:
    """Whether these bytes are as they were written, as far as can be told: not of what somebody else wrote, or a version before."""
    try:
        without_checksum(data)
    except DecodeError:
        return False
    is_checked = data.startswith(_BEGINNING) or data[len(_BEGINNING) :].startswith(_CHECKSUM)
    return not is_checked or bool(_UNCHECKED.match(data)) or data.startswith(_checksum(data[_CHECKED_FROM:]))


def decode(data: bytes) -> ChainDocument:
    """Read the document. Raises IncompatibleVersion where a newer version of Seriatim wrote it, NoChainDocument where none did."""
    try:
        return _decoded(data)
    except (KeyError, TypeError, ValueError, zstandard.ZstdError) as error:
        # Of the same format, with something new in it.
        raise IncompatibleVersion(
            f"a chain document holds what this version doesn't know ({error}): {_NEEDS}"
        ) from error


def _decoded(data: bytes) -> ChainDocument:
    if not is_whole(data):
        raise NoChainDocument("what stands in a queue's node isn't what was written there: bits have changed")
    try:
        if data.startswith(_ZSTD_MAGIC):
            data = zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_PLAIN_BYTES)
        first, *lines = data.decode().split("\n")
        is_in_lines = bool(lines) and first.endswith(_OPEN) and lines[-1] == _CLOSE
        content = json.loads(first + _CLOSE if is_in_lines else data)  # an earlier version wrote one line
        found = content["format"]
    except (KeyError, TypeError, ValueError, zstandard.ZstdError) as error:
        raise NoChainDocument(
            f"what stands in a queue's node is no chain document ({type(error).__name__}): {_NEEDS}"
        ) from error
    if found != FORMAT:
        raise IncompatibleVersion(
            f"a chain document has format {found}, this version reads {FORMAT}: {_NEEDS}", format=found
        )
    if is_in_lines:
        links = [_links.link(line.removesuffix(",")) for line in lines[:-1]]
    else:
        links = [_link(link) for link in content["links"]]
    return _document(content, tuple(links))


class _Links:
    """Links by their text and texts by their link, of those read or written last."""

    def __init__(self, most_bytes: int) -> None:
        self._room_bytes = most_bytes
        self._by_text: dict[str, Link] = {}
        self._text_of: dict[int, str] = {}
        """By `id`: a link that is known here is kept, so that no other one gets its number."""

    def link(self, text: str) -> Link:
        """The link of a line."""
        known = self._by_text.pop(text, None)
        if known is None:
            return self._keep(text, _link(json.loads(text)))
        self._by_text[text] = known  # as the newest
        return known

    def text(self, link: Link) -> str:
        """A link's line."""
        known = self._text_of.get(id(link))
        if known is not None:
            return known
        text = _ENCODER.encode(link)
        if text not in self._by_text:
            self._keep(text, link)
        return text

    def _keep(self, text: str, link: Link) -> Link:
        self._by_text[text] = link
        self._text_of[id(link)] = text
        self._room_bytes -= len(text)
        while self._room_bytes < 0:
            oldest = next(iter(self._by_text))
            del self._text_of[id(self._by_text.pop(oldest))]
            self._room_bytes += len(oldest)
        return link


_links = _Links(KNOWN_BYTES)
"""One for the process: a link never changes, so it is no matter who reads it."""


def _plain(value: Any) -> Any:
    """What JSON doesn't know as what it knows: dataclasses and mappings as objects, bytes as hexadecimal."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return dict(value)
    content = {name: getattr(value, name) for name in value.__dataclass_fields__}
    later = _LATER.get(type(value))
    if later is not None and content[later[0]] == later[1]:
        del content[later[0]]
    return content


_LATER: Final[dict[type, tuple[str, Any]]] = {Subscription: ("cause_id", ""), QueueSettings: ("rotate_ms", ROTATE_MS)}
"""Fields that versions before can't read: left out where they hold this, which nobody chose."""


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_plain)


def _incarnation(content: dict[str, Any]) -> Incarnation:
    return Incarnation(content["disk_id"], content["start"])


def _member(content: dict[str, Any]) -> ChainMember:
    name = content["name"]
    return ChainMember(MemberName(name["group"], name["member"]), _incarnation(content["incarnation"]))


def _certificate(content: dict[str, Any]) -> Certificate:
    chain_hash = content["chain_hash"]
    return Certificate(
        **content
        | {
            "answered": tuple(_incarnation(one) for one in content["answered"]),
            "durability": Durability(content["durability"]),
            "link_hash": bytes.fromhex(content["link_hash"]),
            "chain_hash": None if chain_hash is None else bytes.fromhex(chain_hash),
        }
    )


def _link(content: dict[str, Any]) -> Link:
    certificate = content["certificate"]
    return Link(
        **content
        | {
            "master": _member(content["master"]),
            "slave": _member(content["slave"]),
            "state": LinkState(content["state"]),
            "durability": Durability(content["durability"]),
            "certificate": None if certificate is None else _certificate(certificate),
        }
    )


def _subscription(content: dict[str, Any]) -> Subscription:
    return Subscription(**content | {"consume_list": tuple(content["consume_list"])})


def _stale_note(content: dict[str, Any] | list[Any], subscriptions: Iterable[Subscription]) -> StaleCursors:
    """An earlier version noted epoch and member alone: of everybody who reads the link."""
    if isinstance(content, list):
        epoch, member = content
        return StaleCursors(epoch, member, tuple(one.whose for one in subscriptions if epoch in one.consume_list))
    return StaleCursors(**content | {"of": whose_from(content["of"])})


def _document(content: dict[str, Any], links: tuple[Link, ...]) -> ChainDocument:
    del content["format"]
    settings = content["settings"]
    dropped = content["dropped"]
    subscriptions = tuple(map(_subscription, content["subscriptions"]))
    return ChainDocument(
        **content
        | {
            "settings": QueueSettings(
                **settings
                | {
                    "durability": Durability(settings["durability"]),
                    "groups": tuple(settings["groups"]),
                    "readmit": Readmit(settings["readmit"]),
                }
            ),
            "dropped": Dropped(**dropped | {"chain_hash": bytes.fromhex(dropped["chain_hash"])}),
            "send_list": tuple(content["send_list"]),
            "links": links,
            "subscriptions": subscriptions,
            "stale_cursors": tuple(_stale_note(one, subscriptions) for one in content["stale_cursors"]),
            "abandoned": tuple(Abandoned(**one) for one in content["abandoned"]),
        }
    )
