"""Seriatim: a message broker for records that must be consumed in absolute order.

Packages, lower ones first:

- `protocol`: what crosses a process boundary.
- `coordinator`, `broker_group`: the servers.
- `producer`, `consumer`: the client libraries.
- `cli`: the `seriatim` command.
"""

from __future__ import annotations

__version__ = "0.1.0"

# Their types are in __init__.pyi: imports here, even for types only, would tie every package to the client libraries.
_HOMES = {
    "Consumer": "seriatim.consumer",
    "Producer": "seriatim.producer",
    "RangeReader": "seriatim.consumer",
    "Record": "seriatim.protocol.record",
    "Subscriber": "seriatim.consumer",
}

__all__ = ["Consumer", "Producer", "RangeReader", "Record", "Subscriber"]


def __dir__() -> list[str]:
    """With what is imported on first use."""
    return sorted({*globals(), *_HOMES})


def __getattr__(name: str) -> object:
    """Import on first use, so that a command's help doesn't wait for gRPC."""
    if name not in _HOMES:
        raise AttributeError(f"module 'seriatim' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
