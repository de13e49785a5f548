"""Seriatim: a message broker for records that must be consumed in absolute order.

Packages, lower ones first:

- `protocol`: what crosses a process boundary.
- `coordinator`, `broker_group`: the servers.
- `producer`, `consumer`: the client libraries.
- `cli`: the `seriatim` command.
"""

from __future__ import annotations

__version__ = "0.1.0"
