"""Ctrl-C while the command line loads its libraries: the process ends quietly, with exit code 130."""

import os
import signal
import sys
import threading
from pathlib import Path
from traceback import walk_stack
from types import FrameType


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, as Python does, but end the process in the middle of an import.

    Libraries take seconds to load, catch what they should not, and print tracebacks.
    """
    files = (above.f_code.co_filename for above, _ in walk_stack(frame))
    if any(file.startswith("<frozen importlib") for file in files):
        os._exit(130)
    signal.default_int_handler(number, frame)


def quiet_imports() -> None:
    """Let Ctrl-C end the process quietly while it imports, if it is the command line's."""
    name = Path(sys.argv[0]).stem if sys.argv else ""
    started = name == "leanqkv" or (name == "-m" and bool({"leanqkv", "leanqkv.cli"} & set(sys.orig_argv)))
    # Another handler, or none, is someone else's decision, as in the workers of a comparison.
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if started and default and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _interrupt)


quiet_imports()
