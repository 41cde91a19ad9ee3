"""Errors that the user can fix: shown as one line, exit code 2, never a traceback."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any


class LeanError(Exception):
    """What is wrong, what was found, what to do; one line."""

    exit_code = 2


class UnreachableError(LeanError):
    """A network source broke off; rerunning the command resumes after the part that was read."""


class TimeIsUpError(LeanError):
    """A run stopped before its time limit; rerunning the command resumes it."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


def first_line(error: BaseException) -> str:
    """Return the first line of another library's message, to quote it in one of ours; its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def listed(words: Sequence[str], last: str = "and") -> str:
    """Return "a, b and c"."""
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def needs(extra: str, package: str) -> Any:
    """Import and return an optional package, which comes with `pip install 'leanqkv[extra]'`.

    Raises:
        LeanError: it is not installed.
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
        raise LeanError(f"{error.name} is not installed: pip install 'leanqkv[{extra}]'") from None
