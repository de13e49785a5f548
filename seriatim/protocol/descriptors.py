"""How many connections a process takes, so that some of the files that it may have open are left.

A broker's connections and its disk's files are counted together. Where none is left, it can't open the next file that it has to write, and its
disk counts as failed until the process ends: a port scan, or clients that leak connections, would take both members out of service.
A coordinator without any never comes back to ZooKeeper, nor to a broker, as long as its clients stay.
"""

from __future__ import annotations

import resource
from typing import Final

_WITHOUT_END: Final = 2**31 - 1


def share(parts: int) -> int:
    """One of so many equal parts of the files that this process may have open now."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (_WITHOUT_END if limit == resource.RLIM_INFINITY else limit) // parts
