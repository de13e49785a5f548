"""What can keep an embedded server from running. Each message says what to do; the command ends with exit code 3.

EmbeddedError
├── Missing           Java, a jar or a package isn't installed
├── PortInUse         it can't be listened on there
├── DirectoryInUse    another supervisor works in the same directory
└── StartFailed       the process ended, or didn't serve in time; the message holds the end of its log
"""

from __future__ import annotations


class EmbeddedError(Exception):
    """Base of all; the message is for a person."""


class Missing(EmbeddedError):
    """Java, a jar or a package isn't installed."""


class PortInUse(EmbeddedError):
    """The port that was asked for can't be listened on: mostly, somebody else does."""


class DirectoryInUse(EmbeddedError):
    """Another supervisor works in the same directory."""


class StartFailed(EmbeddedError):
    """The process ended, or didn't serve in time."""
