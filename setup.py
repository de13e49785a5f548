"""Compiles the modules that see every record a sender sends, with mypyc; all else about the package is in pyproject.toml.

They are ordinary Python and run as such where mypyc, a C compiler or Python's header files are missing: a record then costs a
sender twice the processor time (docs/benchmarks.md). SERIATIM_COMPILE=0 leaves them as they are, =1 fails where they can't be compiled.
"""

from __future__ import annotations

import os

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

WISH = os.environ.get("SERIATIM_COMPILE", "")

COMPILED = [
    "seriatim/producer/buffer.py",
    "seriatim/producer/guard.py",
    "seriatim/producer/handle.py",
    "seriatim/producer/open_batch.py",
    "seriatim/producer/record.py",
    "seriatim/protocol/batch.py",
]


def extensions() -> list[Extension]:
    """What is to be compiled; nothing where that isn't wanted, or mypyc isn't there."""
    if WISH == "0":
        return []
    try:
        from mypyc.build import mypycify
    except ImportError:
        if WISH == "1":
            raise
        return []
    made: list[Extension] = mypycify(COMPILED, group_name="seriatim", debug_level="0", verbose=False)
    return made


class AllOrNone(build_ext):
    """The compiled modules need each other: where one can't be made, none is."""

    def build_extensions(self) -> None:
        try:
            super().build_extensions()
        except Exception as error:
            if WISH == "1":
                raise
            self.warn(f"not compiled, it runs as Python: {error}")
            self.extensions = []


setup(ext_modules=extensions(), cmdclass={"build_ext": AllOrNone})
