"""Ctrl-C while the command line loads its libraries: the process ends quietly, with exit code 130."""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any


def _exit_quietly(*_: Any) -> None:
    # Nothing is open yet, and a KeyboardInterrupt in the middle of an import prints the import's traceback.
    os._exit(130)


def _interrupts_are_quiet() -> None:
    """End the process quietly on Ctrl-C from now on, if it is the command line; called before they are loaded."""
    name = Path(sys.argv[0]).stem if sys.argv else ""
    started = name == "leanqkv" or (name == "-m" and bool({"leanqkv", "leanqkv.cli"} & set(sys.orig_argv)))
    # Another handler, or none, is someone else's decision, as in the workers of a comparison.
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if started and default and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _exit_quietly)


def interrupts_are_raised() -> None:
    """Raise KeyboardInterrupt on Ctrl-C again, as Python does."""
    if signal.getsignal(signal.SIGINT) is _exit_quietly:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_interrupts_are_quiet()
