"""Chain documents as other versions write them."""

from __future__ import annotations

from seriatim.protocol import chain_json


def without_checksum(data: bytes) -> bytes:
    """As an earlier version would have written it; what is changed in it then is no damage."""
    return b"{" + data[chain_json._CHECKED_FROM :]
