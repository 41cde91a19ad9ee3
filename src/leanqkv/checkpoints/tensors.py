"""Tensors of a checkpoint, each read or computed only when it is asked for."""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import LeanError
from ..files import read_json

Shape = tuple[int, ...]

# Where weights may lie in a directory; the first that is there is read, as transformers does.
WEIGHTS = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
# The names that safetensors gives dtypes in a file.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
# Elements looked at together for NaN and Inf: 16 MiB of float32.
CHUNK_ELEMENTS = 2**22


class LazyTensors(Mapping[str, Tensor]):
    """Tensors that are computed anew each time they are asked for; nothing is kept.

    `shapes` names them, in order, with the shape that each will have.
    """

    def __init__(self, shapes: Mapping[str, Shape], compute: Callable[[str], Tensor]):
        self.shapes = dict(shapes)
        self._compute = compute

    def __getitem__(self, name: str) -> Tensor:
        promised = self.shapes[name]
        tensor = self._compute(name)
        if tensor.shape != promised:
            raise AssertionError(f"{name}: promised with shape {promised}, computed with {tuple(tensor.shape)}")
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class StoredTensors(LazyTensors):
    """The tensors in a directory of weights. Names, `shapes` and `dtypes` are known without reading any data.

    A tensor is a view of its file, mapped for this one read: it stays valid, and its pages go when it goes.
    """

    def __init__(self, directory: Path, files: Mapping[str, "_SafetensorsFile | _PickledFile"]):
        super().__init__({name: file.shapes[name] for name, file in files.items()}, self._read)
        self.directory = directory
        self.dtypes = {name: file.dtypes[name] for name, file in files.items()}
        self._files = files

    def _read(self, name: str) -> Tensor:
        return self._files[name].read(name)

    def file(self, name: str) -> Path:
        """Which file holds the tensor."""
        return self._files[name].path


class _SafetensorsFile:
    def __init__(self, path: Path):
        self.path = path
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        with _naming(path), safe_open(path, framework="pt") as opened:
            names = opened.keys()
            for name in names:
                entry = opened.get_slice(name)
                if (kind := entry.get_dtype()) not in DTYPES:
                    raise LeanError(f"{path}: {name} has dtype {kind}, which cannot be read here")
                self.shapes[name], self.dtypes[name] = tuple(entry.get_shape()), DTYPES[kind]

    def read(self, name: str) -> Tensor:
        with _naming(self.path, name), safe_open(self.path, framework="pt") as opened:
            return opened.get_tensor(name)


class _PickledFile:
    """A file of torch.save. One written before PyTorch 1.6 is no zip archive and cannot be mapped: it is kept whole."""

    def __init__(self, path: Path):
        self.path = path
        with _naming(path), path.open("rb") as opened:
            self._mapped = opened.read(4) == b"PK\x03\x04"
        contents = self._load()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in contents.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in contents.items()}
        self._kept = None if self._mapped else contents

    def _load(self, wanted: str | None = None) -> dict[str, Tensor]:
        with _naming(self.path, wanted):
            contents: Any = torch.load(self.path, map_location="cpu", mmap=self._mapped, weights_only=True)
        if not isinstance(contents, Mapping):
            raise LeanError(f"{self.path} holds no state dict but a {type(contents).__name__}")
        for name, tensor in contents.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise LeanError(
                    f"{self.path} holds no state dict of tensors: {name!r} is a {type(tensor).__name__}; save the "
                    "model's state dict alone"
                )
        return {name: tensor.detach() for name, tensor in contents.items()}

    def read(self, name: str) -> Tensor:
        contents = self._load(name) if self._kept is None else self._kept
        return contents[name]


@contextmanager
def _naming(path: Path, name: str | None = None) -> Iterator[None]:
    """Says of which file, and of which tensor, the trouble is."""
    what = f"{path} cannot be read" if name is None else f"{path}: {name} cannot be read"
    try:
        yield
    except (LeanError, MemoryError):
        raise
    except Exception as error:  # a damaged file makes its reader raise anything
        # What PyTorch says to a pickle of other things is a page long, and advises to run the file's code.
        if refused := isinstance(error, UnpicklingError) and re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise LeanError(
                f"{path} holds more than tensors ({refused[1]}), and reading that can run code; save the model's state "
                "dict alone, best as safetensors"
            ) from None
        told = str(error).strip() if isinstance(error, (OSError, RuntimeError, SafetensorError)) else ""
        raise LeanError(f"{what}: {told.splitlines()[0] if told else 'it is damaged, or no file of weights'}") from None


def open_tensors(directory: Path) -> StoredTensors:
    """The weights in `directory`, safetensors or those of torch.save, in one file or in shards with an index.

    Raises:
        LeanError: no weights; a file that is missing, damaged or no state dict of tensors; an index and its shards that
            disagree. Names the file, and the tensor.
    """
    found = next((directory / name for name in WEIGHTS if (directory / name).is_file()), None)
    if found is None:
        raise LeanError(f"{directory} has no weights: there is none of {', '.join(WEIGHTS)}")
    if found.suffix != ".json":
        file = _open_file(found)
        return StoredTensors(directory, dict.fromkeys(file.shapes, file))
    shards = read_json(found).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise LeanError(f"{found} has no weight_map from the tensors' names to the files they are in")
    opened = {}
    for shard in dict.fromkeys(shards.values()):
        if not (directory / shard).is_file():
            raise LeanError(f"{directory / shard} is missing: {found.name} names it")
        opened[shard] = _open_file(directory / shard)
    for name, shard in shards.items():
        if name not in opened[shard].shapes:
            raise LeanError(f"{directory / shard} does not hold {name}, which {found.name} says is in it")
    return StoredTensors(directory, {name: opened[shard] for name, shard in shards.items()})


def _open_file(path: Path) -> _SafetensorsFile | _PickledFile:
    return _SafetensorsFile(path) if path.suffix == ".safetensors" else _PickledFile(path)


def check_stored(stored: StoredTensors, expected: Mapping[str, Shape], ignorable: Callable[[str], bool]) -> None:
    """That `stored` holds the expected tensors, floating, and besides them only what may be ignored.

    Raises:
        LeanError: naming the tensors and what is wrong with them.
    """
    misfit = f"the weights in {stored.directory} do not fit its config.json"
    for what, names in (
        ("lack", [name for name in expected if name not in stored]),
        ("hold unknown", [name for name in stored if name not in expected and not ignorable(name)]),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise LeanError(f"{misfit}: they {what} tensors {', '.join(names[:3])}{more}")
    for name, shape in expected.items():
        if stored.shapes[name] != shape:
            raise LeanError(
                f"{misfit}: {name} in {stored.file(name).name} has shape {stored.shapes[name]}, the configuration says "
                f"{shape}"
            )
        if not stored.dtypes[name].is_floating_point:
            kind = str(stored.dtypes[name]).removeprefix("torch.")
            raise LeanError(f"{stored.file(name)}: {name} is {kind}; only floating-point weights can be read")


def read_tied(stored: StoredTensors, embedding: str, head: str) -> Tensor:
    """The embedding that a model with tied weights uses for its head, too; a file may hold the head once more.

    Raises:
        LeanError: the file's head is another matrix.
    """
    tensor = stored[embedding]
    if head in stored and not torch.equal(tensor, stored[head]):
        raise LeanError(
            f"{stored.file(head)}: {head} is not {embedding}, though config.json says tie_word_embeddings; make that "
            "false"
        )
    return tensor


class _Finite(Mapping[str, Tensor]):
    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if count := count_nonfinite(tensor):
            raise LeanError(f"{name} has {count:,} values that are NaN or infinite, of {tensor.numel():,}")
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def finite(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The same tensors; one that has a NaN or an infinite value raises a LeanError when it is read, with their
    number."""
    return _Finite(tensors)


def count_nonfinite(tensor: Tensor) -> int:
    """How many values are NaN or infinite, without a temporary of the tensor's size."""
    rows = tensor if tensor.ndim else tensor[None]
    count = 0
    for chunk in rows.split(max(1, CHUNK_ELEMENTS * len(rows) // max(1, rows.numel()))):
        # A sum passes over the values once; that of finite ones may still overflow.
        if not chunk.sum().isfinite():
            count += int((~chunk.isfinite()).sum())
    return count


def weights_hash(directory: Path) -> str:
    """SHA-256 over the files of weights, in the order of their names."""
    digest = hashlib.sha256()
    for file in sorted(file for file in directory.iterdir() if file.suffix in (".safetensors", ".bin")):
        with file.open("rb") as opened:
            while block := opened.read(2**24):
                digest.update(block)
    return digest.hexdigest()
