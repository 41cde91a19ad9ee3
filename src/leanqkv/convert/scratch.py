"""Arrays in a temporary directory, for what does not fit into memory.

Files are written by plain writes, never through a memory map: a full disk is then an error, not a signal that ends the
process, and the pages written do not count as memory of the process.
"""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import LeanError


class Stream:
    """A float32 array in a file, read and written a run of its first dimension at a time."""

    def __init__(self, file: Path, shape: tuple[int, ...]):
        self.shape, self._file, self._row = shape, file, prod(shape[1:])
        file.touch()

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        count, offset = (stop - start) * self._row, start * self._row * np.float32().nbytes
        return torch.from_numpy(np.fromfile(self._file, np.float32, count, offset=offset)).view(-1, *self.shape[1:])

    def __setitem__(self, rows: slice, tensor: Tensor) -> None:
        start, _, _ = rows.indices(self.shape[0])
        with _naming_full_disk(self._file), self._file.open("r+b") as file:
            file.seek(start * self._row * np.float32().nbytes)
            file.write(tensor.float().contiguous().numpy().data)


def map_tensor(file: Path, tensor: Tensor) -> Tensor:
    """Write `tensor` to `file` and return it as a map of that file, whose pages the system can drop."""
    array = tensor.contiguous().numpy()
    with _naming_full_disk(file):
        file.write_bytes(array.data)
    return torch.from_numpy(np.memmap(file, array.dtype, mode="c", shape=array.shape))


def check_space(directory: Path, streams: int, gram_matrices: int) -> None:
    """Raise a LeanError if `directory` has no room for so many bytes of streams and of Gram matrices."""
    needed, free = streams + gram_matrices, shutil.disk_usage(directory).free
    if needed > free:
        tokens = "use fewer --tokens"
        options = (
            f"{tokens}, or save {gram_matrices / 1e6:,.1f} MB by --no-refit-lent" if gram_matrices else f"or {tokens}"
        )
        raise LeanError(
            f"calibration needs {needed / 1e6:,.1f} MB in the temporary directory {directory.parent}, which has "
            f"{free / 1e6:,.1f} MB free. Set TMPDIR to a larger disk, {options}"
        )


@contextmanager
def _naming_full_disk(file: Path) -> Iterator[None]:
    """Turn a full disk into a LeanError: nothing written here is of use to a second attempt."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise LeanError(
            f"the disk of the temporary directory {file.parent.parent} is full. Set TMPDIR to a larger one"
        ) from None
