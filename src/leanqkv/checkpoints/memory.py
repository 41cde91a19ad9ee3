"""Memory of checkpoints that are read and written a tensor at a time."""

import ctypes
from contextlib import suppress

# glibc's M_MMAP_THRESHOLD: from this size a block is mapped by itself, and given back as soon as it is freed.
M_MMAP_THRESHOLD, BYTES = -3, 2**20


def give_back_freed_memory() -> None:
    """Keeps what is resident near what is used, from now on, in this process.

    glibc raises that threshold up to 32 MiB by itself, keeps smaller blocks that are freed, and cannot give those back
    that lie below one still in use: over the layers of a large model that grows. Other allocators are left alone.
    """
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, BYTES)
