"""How a command ends: which exit code an error means. The one place that decides it.

0 done; 1 the answer is no (a command says so itself: `context.exit(ANSWER_IS_NO)`); 2 wrong use; 3 unreachable or refused.
Outside of that contract: 70, a defect of this program (as in sysexits.h), and 130, interrupted from the keyboard.
"""

from __future__ import annotations

from contextlib import suppress

import click

from seriatim.cli.embedded.errors import EmbeddedError

DONE = 0
ANSWER_IS_NO = 1
WRONG_USE = 2
REFUSED = 3
DEFECT = 70
INTERRUPTED = 130


def not_installed(error: ModuleNotFoundError, extras: str) -> str:
    """What a person is told of a package that a command needs. `extras`: of ours, which have it, separated by commas."""
    which = "extras" if "," in extras else "extra"
    return f"{error.name} is missing: install seriatim with its {which}, pip install 'seriatim[{extras}]'"


def answer(text: str) -> None:
    """Print what the exit code tells, too: who reads no further (`| head`) gets that all the same, and no 0 for it."""
    with suppress(BrokenPipeError):
        click.echo(text)


def told(error: BaseException) -> str:
    """An error for a person: its sentence, what to do, and the code by which docs and changelog call it, as `[diverged]`."""
    from seriatim.protocol.errors import BugError, CallerError, RefusedError, SeriatimError, WorldError

    if isinstance(error, SeriatimError) and type(error) not in {CallerError, RefusedError, WorldError, BugError}:
        return f"{error} [{error.code}]"
    return str(error)


def exit_code(error: BaseException) -> int:
    """The exit code that an exception means when it ends a command."""
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return INTERRUPTED
    if isinstance(error, click.UsageError | click.FileError):
        return WRONG_USE
    if isinstance(error, click.ClickException):
        # click's own default, 1, means "the answer is no" here.
        return error.exit_code if error.exit_code != 1 else REFUSED
    if isinstance(error, EmbeddedError):
        return REFUSED
    if isinstance(error, OSError) and error.strerror:
        return REFUSED  # the system's word: a full disk, a folder without rights
    # Loaded here: the errors' tree brings gRPC's tables along, which a mere --help needn't wait for.
    from seriatim.protocol.errors import BugError, CallerError, SeriatimError

    if isinstance(error, CallerError):
        return WRONG_USE
    if isinstance(error, SeriatimError) and not isinstance(error, BugError):
        return REFUSED
    return DEFECT
