"""Child processes that ignore SIGINT and exit with their parent."""

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PR_SET_PDEATHSIG = 1  # of prctl(2)


@contextmanager
def children_ignore_interrupts() -> Iterator[None]:
    """Let processes started in the body ignore Ctrl-C, which a terminal sends to all: this one ends them."""
    if threading.current_thread() is not threading.main_thread():  # which alone may say so
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def end_with_parent() -> None:
    """Let this process end when the one that started it does, however that ends.

    Linux ends it at once; elsewhere a thread does, which may have to wait for a kernel of torch.
    """
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_wait_for_the_end, daemon=True).start()


def _wait_for_the_end() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
