"""What ends a demo before its verdict."""

from __future__ import annotations


class DemoFailed(Exception):
    """A step couldn't be carried through; the message says which and why. The answer is then no."""
