"""Class archives: what a Java process has read and verified of its classes, for the next one to map instead (JEP 350).

Problem: a third of the processor time that Spark takes to start goes to finding, parsing and verifying the same 15,000
classes, each time. A replay that takes over from another waits for that, and so does whoever tries the demo.

Idea: once, when all is installed, a process does what a replay does and writes its classes to a file as it ends. That file
lies in the environment that holds the jars, and goes with it. Whether it fits is Java's to judge: with another Java, or
other jars, it is passed over, in silence.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

SPARK: Final = "spark"
ZOOKEEPER: Final = "zookeeper"

END_S: Final = 300.0
"""What a process that writes its archive is given to end: a second's work, in which it may have hardly a processor."""

_SILENT: Final = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")


def path(name: str) -> Path:
    """Where the archive of that name lies, if it was made."""
    return Path(sys.prefix) / "share" / "seriatim" / f"{name}.jsa"


def using(name: str) -> tuple[str, ...]:
    """Java's options to start with the archive of that name; none where it wasn't made."""
    archive = path(name)
    return (f"-XX:SharedArchiveFile={archive}", "-Xshare:auto", *_SILENT) if archive.is_file() else ()


def making(archive: Path) -> tuple[str, ...]:
    """Java's options to write an archive when the process ends."""
    return (f"-XX:ArchiveClassesAtExit={archive}", *_SILENT)
