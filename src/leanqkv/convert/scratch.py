"""Arrays in a temporary directory, for what does not fit into memory.

Files are written by plain writes, never through a memory map: a full disk is then an error, not a signal that ends the
process, and the pages written do not count as memory of the process.
"""

import shutil
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import LeanError
from ..files import disk_full_is_an_error

ADVICE = "set TMPDIR, the temporary directory, to one on a larger disk"


class Stream:
    """A float32 array in a file, read and written a run of its first dimension at a time."""

    def __init__(self, file: Path, shape: tuple[int, ...], advice: str = ADVICE):
        self.shape, self._file, self._row, self._advice = shape, file, prod(shape[1:]), advice
        file.touch()

    @property
    def whole(self) -> bool:
        """Whether the file has room for the last row: all rows have been written, if they were in order."""
        return self._file.stat().st_size >= prod(self.shape) * np.float32().nbytes

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        count, offset = (stop - start) * self._row, start * self._row * np.float32().nbytes
        return torch.from_numpy(np.fromfile(self._file, np.float32, count, offset=offset)).view(-1, *self.shape[1:])

    def __setitem__(self, rows: slice, tensor: Tensor) -> None:
        start, _, _ = rows.indices(self.shape[0])
        with disk_full_is_an_error(self._file.parent, self._advice), self._file.open("r+b") as file:
            file.seek(start * self._row * np.float32().nbytes)
            file.write(tensor.float().cpu().contiguous().numpy().data)


def map_tensor(file: Path, tensor: Tensor) -> Tensor:
    """Write `tensor` to `file` and return it as a map of that file, whose pages the system can drop."""
    array = tensor.contiguous().numpy()
    with disk_full_is_an_error(file.parent, ADVICE):
        file.write_bytes(array.data)
    return torch.from_numpy(np.memmap(file, array.dtype, mode="c", shape=array.shape))


def check_space(directory: Path, needed: int, advice: str) -> None:
    """Raise a LeanError with this advice if `directory` has no room for so many bytes."""
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise LeanError(
            f"calibration needs {needed / 1e6:,.1f} MB in {directory.parent}, which has {free / 1e6:,.1f} MB free. Use "
            f"fewer `tokens`, {advice}"
        )
