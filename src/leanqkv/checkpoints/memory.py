"""Memory of checkpoints that are read and written a tensor at a time."""

import ctypes
from contextlib import suppress

# glibc's M_MMAP_THRESHOLD: from this size a block is mapped by itself, and given back as soon as it is freed.
M_MMAP_THRESHOLD, BYTES = -3, 2**20


def give_back_freed_memory() -> None:
    """Return freed memory to the system from now on, so that this process's resident size follows its use.

    glibc raises that threshold up to 32 MiB by itself and keeps smaller freed blocks, which add up over large models.
    Other allocators are left alone.
    """
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, BYTES)
