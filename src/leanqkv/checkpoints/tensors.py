"""Tensors of a checkpoint, each read or computed only when it is asked for."""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple
from zipfile import ZipFile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import LeanError
from ..files import hash_files, read_json

Shape = tuple[int, ...]

# Where weights may lie in a directory; the first that is there is read, as transformers does.
WEIGHTS = tuple(name + index for name in ("model.safetensors", "pytorch_model.bin") for index in ("", ".index.json"))
# What torch.compile, FSDP and activation checkpointing put between a module's name and its tensor's, anywhere.
WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Elements looked at together for NaN and Inf: 16 MiB of float32.
CHUNK_ELEMENTS = 2**22


class LazyTensors(Mapping[str, Tensor]):
    """Tensors computed anew each time; `shapes` names them, in order, with the shape that each will have."""

    def __init__(self, shapes: Mapping[str, Shape], compute: Callable[[str], Tensor]):
        self.shapes = dict(shapes)
        self._compute = compute

    def __getitem__(self, name: str) -> Tensor:
        shape, tensor = self.shapes[name], self._compute(name)
        if tensor.shape != shape:
            raise AssertionError(f"{name}: promised with shape {shape}, computed with {tuple(tensor.shape)}")
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class Stored(NamedTuple):
    """A tensor in a file of weights. `dtype` is the one it is used in, whatever `read` returns."""

    file: Path
    shape: Shape
    dtype: torch.dtype
    read: Callable[[], Tensor]


class StoredTensors(LazyTensors):
    """The tensors in a directory of weights. Names, `shapes` and `dtypes` are known without reading any data.

    A tensor is a view of its file, mapped for this one read. It stays valid, and its pages go when it goes. Names are
    those of the plain model, also where a wrapped one was saved. `directory` may also be a file that holds them all;
    `described_by` says where their configuration is.
    """

    def __init__(self, directory: Path, stored: Mapping[str, Stored], described_by: str = "config.json"):
        plain = {name: stored[theirs] for name, theirs in _plain_names(directory, stored).items()}
        shapes = {name: tensor.shape for name, tensor in plain.items()}
        super().__init__(shapes, lambda name: plain[name].read().to(plain[name].dtype))
        self.directory, self.described_by, self._stored = directory, described_by, plain
        self.dtypes = {name: tensor.dtype for name, tensor in plain.items()}

    def file(self, name: str) -> Path:
        """Return the path of the file that holds the tensor."""
        return self._stored[name].file


def _plain_names(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the name in the plain model -> the name in the file: DDP puts "module." before all of them."""
    plain = {name: WRAPPERS.sub("", name) for name in names}
    while plain and all(name.startswith("module.") for name in plain.values()):
        plain = {theirs: name.removeprefix("module.") for theirs, name in plain.items()}
    stored = {name: theirs for theirs, name in plain.items()}
    if twice := next((theirs for theirs, name in plain.items() if stored[name] != theirs), None):
        raise LeanError(f"the weights in {directory} hold one tensor twice: {twice} and {stored[plain[twice]]}")
    return stored


def _read_file(path: Path) -> dict[str, Stored]:
    """Return the tensors of a file of weights, safetensors or of torch.save, each read on its own.

    Plain float8 tensors, in which nothing computes, are bfloat16 here: it holds every value of every float8 kind.
    """
    with naming_file(path), path.open("rb") as file:
        # What torch.save wrote before PyTorch 1.6 is no zip archive and cannot be mapped: it is held whole.
        mapped = path.suffix == ".safetensors" or file.read(4) == b"PK\x03\x04"
    tensors = _load(path, mapped)
    if mapped and path.suffix != ".safetensors":
        with naming_file(path):
            _check_records(path, tensors.values())
    held = None if mapped else tensors

    def read(name: str) -> Tensor:
        return (held or _load(path, mapped, name))[name]

    return {
        name: Stored(path, tuple(tensor.shape), _computing(tensor.dtype), partial(read, name))
        for name, tensor in tensors.items()
    }


def _load(path: Path, mapped: bool, wanted: str | None = None) -> dict[str, Tensor]:
    """Return the tensor `wanted`, or all. Those of a mapped file are views of it: no data is read."""
    with naming_file(path, wanted):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in ([wanted] if wanted else file.keys())}
        with warnings.catch_warnings():  # of old pickles: they are read or refused
            warnings.simplefilter("ignore")
            contents: Any = torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    if not isinstance(contents, Mapping):
        raise LeanError(f"{path} holds no state dict but a {type(contents).__name__}")
    for name, tensor in contents.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise LeanError(
                f"{path} holds no state dict of tensors: {name!r} is a {type(tensor).__name__}; save the model's state "
                "dict alone"
            )
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
            kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else str(tensor.layout)
            raise LeanError(f"{path}: {name} is a {kind.removeprefix('torch.')} tensor; save dense ones that have data")
    return {name: tensor.detach() for name, tensor in contents.items()}


def _check_records(path: Path, tensors: Iterable[Tensor]) -> None:
    """Check that mapped storages are as long as their records: PyTorch does so only where it reads them.

    Raises:
        LeanError: a storage would reach into the next one, or beyond the file.
    """
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    with ZipFile(path) as archive:
        records = [info for info in archive.infolist() if re.fullmatch(r"[^/]+/data/\d+", info.filename)]
    lengths = [info.file_size for info in sorted(records, key=lambda info: info.header_offset) if info.file_size]
    if [size for _, size in sorted(storages.items()) if size] != lengths:
        raise LeanError(f"{path} is damaged: its tensors do not have the lengths of the data that is stored for them")


def _computing(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if str(dtype).startswith("torch.float8") else dtype


@contextmanager
def naming_file(path: Path, name: str | None = None) -> Iterator[None]:
    """Turn whatever a reader raises into a LeanError that names the file, and the tensor."""
    try:
        yield
    except (LeanError, MemoryError):
        raise
    except Exception as error:  # a damaged file makes its reader raise anything
        # PyTorch's own message about a pickle of other things is a page long, and advises to run the file's code.
        if refused := isinstance(error, UnpicklingError) and re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise LeanError(
                f"{path} holds more than tensors ({refused[1]}), and reading that can run code; save the model's state "
                "dict alone, best as safetensors"
            ) from None
        reason = str(error).strip() if isinstance(error, (OSError, RuntimeError, SafetensorError)) else ""
        raise LeanError(
            f"{path}{f': {name}' if name else ''} cannot be read: "
            + (reason.splitlines()[0] if reason else "it is damaged, or no file of weights")
        ) from None


def open_tensors(directory: Path) -> StoredTensors:
    """Open the weights in `directory`, safetensors or those of torch.save, in one file or in shards with an index.

    Raises a LeanError that names the file, and the tensor, for files that are missing, damaged or no state dict of
    tensors, and for an index and shards that disagree.
    """
    weights = next((directory / name for name in WEIGHTS if (directory / name).is_file()), None)
    if weights is None:
        raise LeanError(f"{directory} has no weights: there is none of {', '.join(WEIGHTS)}")
    if weights.suffix != ".json":
        return StoredTensors(directory, _read_file(weights))
    shards = read_json(weights).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise LeanError(f"{weights} has no weight_map from the tensors' names to the files they are in")
    files: dict[str, dict[str, Stored]] = {}
    for shard in dict.fromkeys(shards.values()):
        if Path(shard).name != shard:
            raise LeanError(f"{weights} names {shard!r}; shards lie beside their index, give the name alone")
        if not (directory / shard).is_file():
            raise LeanError(f"{directory / shard} is missing: {weights.name} names it")
        files[shard] = _read_file(directory / shard)
    for name, shard in shards.items():
        if name not in files[shard]:
            raise LeanError(f"{directory / shard} does not hold {name}, which {weights.name} says is in it")
    return StoredTensors(directory, {name: files[shard][name] for name, shard in shards.items()})


def some(names: Sequence[str]) -> str:
    """Return the first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_stored(stored: StoredTensors, expected: Mapping[str, Shape], ignorable: Callable[[str], bool]) -> None:
    """Raise a LeanError unless `stored` holds the expected tensors, floating, and besides them only ignorable ones."""
    misfit = f"the weights in {stored.directory} do not fit its {stored.described_by}"
    for what, names in (
        ("lack", [name for name in expected if name not in stored]),
        ("hold unknown", [name for name in stored if name not in expected and not ignorable(name)]),
    ):
        if names:
            raise LeanError(f"{misfit}: they {what} tensors {some(names)}")
    for name, shape in expected.items():
        if stored.shapes[name] != shape:
            raise LeanError(
                f"{misfit}: {name} in {stored.file(name).name} has shape {stored.shapes[name]}, the configuration says "
                f"{shape}"
            )
        if not stored.dtypes[name].is_floating_point or stored.dtypes[name].itemsize < 2:
            kind = str(stored.dtypes[name]).removeprefix("torch.")
            raise LeanError(f"{stored.file(name)}: {name} is {kind}; only floating-point weights can be read")


def read_tied(stored: StoredTensors, embedding: str, head: str) -> Tensor:
    """Return the embedding of a model with a tied head; raise a LeanError if the file holds another head."""
    tensor = stored[embedding]
    if head in stored and not torch.equal(tensor, stored[head]):
        raise LeanError(
            f"{stored.file(head)}: {head} is not {embedding}, though config.json says tie_word_embeddings; make that "
            "false"
        )
    return tensor


def finite(tensors: Mapping[str, Tensor]) -> LazyTensors:
    """Return the same tensors; reading one that has NaN or infinite values raises a LeanError with their number."""

    def read(name: str) -> Tensor:
        tensor = tensors[name]
        if count := count_nonfinite(tensor):
            raise LeanError(f"{name} has {count:,} values that are NaN or infinite, of {tensor.numel():,}")
        return tensor

    if isinstance(tensors, LazyTensors):
        return LazyTensors(tensors.shapes, read)
    return LazyTensors({name: tuple(tensor.shape) for name, tensor in tensors.items()}, read)


def count_nonfinite(tensor: Tensor) -> int:
    """Return how many values are NaN or infinite, without a temporary of the tensor's size."""
    rows = tensor if tensor.ndim else tensor[None]
    count = 0
    for chunk in rows.split(max(1, CHUNK_ELEMENTS * len(rows) // max(1, rows.numel()))):
        # A sum passes over the values once; that of finite ones may still overflow.
        if not chunk.sum().isfinite():
            count += int((~chunk.isfinite()).sum())
    return count


def weights_hash(directory: Path) -> str:
    """Return the SHA-256 of the files of weights, in the order of their names, or of the one file that holds all."""
    if directory.is_file():
        return hash_files(directory)
    return hash_files(*sorted(file for file in directory.iterdir() if file.suffix in (".safetensors", ".bin")))
