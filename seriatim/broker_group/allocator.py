"""How the process keeps memory: freed batches are kept for the next ones, instead of being given back and faulted in again."""

from __future__ import annotations

import ctypes
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_TOP_PAD: Final = -2
M_MMAP_THRESHOLD: Final = -3
"""mallopt(3), malloc.h."""

KEPT_BYTES: Final = 128 * 1024 * 1024
"""So much may be free at the end of the heap; what is more goes back to the system."""
MAPPED_BYTES: Final = 32 * 1024 * 1024
"""glibc's own limit of M_MMAP_THRESHOLD: only what is larger is mapped alone, and goes back when it is freed."""
GROWTH_BYTES: Final = 8 * 1024 * 1024


def keep_freed_memory() -> bool:
    """Of this whole process, before it takes much. False where the C library isn't asked like that: it goes on as it is."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    limits = ((M_TRIM_THRESHOLD, KEPT_BYTES), (M_MMAP_THRESHOLD, MAPPED_BYTES), (M_TOP_PAD, GROWTH_BYTES))
    return all(mallopt(what, size_bytes) == 1 for what, size_bytes in limits)
