"""The GGUF format of llama.cpp: one file with a model's settings, its tokenizer and its tensors, read lazily.

The header is read here, not by `gguf.GGUFReader`: that makes two arrays per token of the vocabulary (160 MB and 1.8
seconds for 49,152 tokens) and trusts every length and offset in the file, so that a wrong byte costs any amount of
memory or is noticed by nobody. Types and dequantization are the package's. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import mmap
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from ..errors import LeanError, needs
from .tensors import Shape, naming_file

VERSIONS = (2, 3)
# The struct codes of metadata's types; besides them there are strings and arrays.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MOST_DIMENSIONS = 4
# Types whose values are read as they are; all others are dequantized to float32.
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Array(NamedTuple):
    """An array among the metadata, which is left in the file: its length, and the byte where its values begin."""

    length: int
    start: int


class Entry(NamedTuple):
    """A tensor in the file: `shape` in PyTorch's order, the name of its type, its first byte and its size in bytes."""

    shape: Shape
    kind: str
    start: int
    nbytes: int


def is_gguf(source: str | Path) -> bool:
    """Whether `source` is meant as a GGUF file, by its name; a directory is none."""
    return Path(source).suffix.lower() == ".gguf" and not Path(source).is_dir()


class _Header:
    """Reads a file's header from front to back and never beyond its end."""

    def __init__(self, data: mmap.mmap, path: Path, position: int):
        self.data, self.path, self.position = data, path, position

    def skip(self, size: int) -> int:
        """Go on by `size` bytes and return the position before them."""
        start = self.position
        if size > len(self.data) - start:
            raise LeanError(f"{self.path} is cut off or damaged: its header goes on after its {len(self.data):,} bytes")
        self.position += size
        return start

    def numbers(self, codes: str) -> tuple[Any, ...]:
        layout = f"<{codes}"
        return struct.unpack_from(layout, self.data, self.skip(struct.calcsize(layout)))

    def text(self) -> str:
        start = self.skip(self.numbers("Q")[0])
        try:
            return self.data[start : self.position].decode()
        except UnicodeDecodeError:
            raise self.damaged(f"byte {start:,} of its header begins no text in UTF-8") from None

    def skip_text(self) -> None:
        self.skip(self.numbers("Q")[0])

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self._array()
        if kind not in NUMBERS:
            raise self.damaged(f"its metadata have a value of type {kind}, which does not exist")
        (value,) = self.numbers(NUMBERS[kind])
        # The shortest decimal number that is this float32: 1e-05 instead of 9.999999747378752e-06.
        return float(str(np.float32(value))) if NUMBERS[kind] == "f" else value

    def _array(self) -> Array:
        kind, length = self.numbers("IQ")
        array = Array(length, self.position)
        if kind in NUMBERS:
            self.skip(length * struct.calcsize(NUMBERS[kind]))
        elif kind == STRING:
            for _ in range(length):  # each takes 8 bytes at least, so that a wrong length soon meets the end
                self.skip_text()
        else:
            raise self.damaged(f"its metadata have an array of type {kind}, which does not exist")
        return array

    def damaged(self, why: str) -> LeanError:
        return LeanError(f"{self.path} is damaged: {why}")


@contextmanager
def _header(path: Path, position: int = 0) -> Iterator[_Header]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield _Header(data, path, position)


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file's metadata, and where its tensors are."""

    path: Path
    metadata: Mapping[str, Any]
    entries: Mapping[str, Entry]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read metadata and table of tensors; raise a LeanError for a file that is damaged or unsupported."""
        needs("gguf", "gguf")
        if not path.exists():
            raise LeanError(f"there is no file {path}")
        with naming_file(path):
            with path.open("rb") as file:
                if file.read(4) != b"GGUF":
                    raise LeanError(f"{path} is no GGUF file: it does not begin with GGUF")
            with _header(path, 4) as header:
                return cls(path, *_parse(header))

    def required(self, key: str) -> Any:
        """Return the metadata `key`; raise a LeanError if it is missing or an array."""
        if key not in self.metadata:
            raise LeanError(f"{self.path} lacks the metadata {key}; convert the model again")
        if isinstance(value := self.metadata[key], Array):
            raise LeanError(
                f"{self.path}: {key} has {value.length} values, one per layer; only one for all can be read"
            )
        return value

    def read(self, name: str) -> Tensor:
        """Return a tensor by its name in the file, of its shape there; dequantized to float32 if it is quantized."""
        entry = self.entries[name]
        with naming_file(self.path, name), np.errstate(all="ignore"):  # values that are not finite are found later
            # Copied on writing: PyTorch has no tensors that cannot be written.
            stored = np.memmap(self.path, mode="c", offset=entry.start, shape=(entry.nbytes,), dtype=np.uint8)
            if entry.kind in PLAIN:
                return torch.from_numpy(stored).view(PLAIN[entry.kind]).view(entry.shape)
            return torch.from_numpy(_dequantized(stored, prod(entry.shape[:-1]), entry.kind)).view(entry.shape)

    def texts(self, key: str, wanted: Collection[int]) -> dict[int, str]:
        """Return those elements of an array of strings that have the `wanted` numbers."""
        array, found = self.metadata[key], {}
        with _header(self.path, array.start) as header:
            for number in range(array.length):
                if number in wanted:
                    found[number] = header.text()
                else:
                    header.skip_text()
        return found


def _parse(header: _Header) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Return metadata and tensors of a file whose header is read from its version on."""
    path = header.path
    (version,) = header.numbers("I")
    if version not in VERSIONS:
        order = "; it is big-endian" if version and not version & 0xFFFF else ""
        raise LeanError(f"{path} is GGUF version {version}; versions 2 and 3 can be read{order}")
    tensor_count, metadata_count = header.numbers("QQ")
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = header.text()
        if key in metadata:
            raise header.damaged(f"it has the metadata {key} twice")
        metadata[key] = header.value(*header.numbers("I"))
    if (parts := metadata.get("split.count", 0)) not in (0, 1):  # 0: put together again
        raise LeanError(
            f"{path} is one of {parts} parts of a split model; put them together with llama-gguf-split --merge"
        )
    table: dict[str, tuple[Shape, int, int]] = {}
    for _ in range(tensor_count):
        name = header.text()
        if name in table:
            raise header.damaged(f"it has the tensor {name} twice")
        (dimensions,) = header.numbers("I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise header.damaged(f"{name} has {dimensions} dimensions")
        table[name] = (header.numbers(f"{dimensions}Q")[::-1], *header.numbers("IQ"))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise header.damaged(f"general.alignment is {alignment!r}, not a power of two")
    start = -(-header.position // alignment) * alignment
    entries, size = dict[str, Entry](), len(header.data)
    for name, (shape, number, offset) in table.items():
        kind, block, block_bytes = _type(path, name, number)
        if 0 in shape or shape[-1] % block:
            raise header.damaged(f"{name} has shape {shape}, {kind} comes in blocks of {block}")
        entries[name] = entry = Entry(shape, kind, start + offset, prod(shape) // block * block_bytes)
        if entry.start + entry.nbytes > size:
            end = entry.start + entry.nbytes
            raise LeanError(f"{path} is cut off: {name} ends at byte {end:,}, the file at {size:,}")
    return metadata, entries


def _type(path: Path, name: str, number: int) -> tuple[str, int, int]:
    """Return the name of a tensor's type, its values and its bytes per block; refuse one that cannot be read."""
    gguf = needs("gguf", "gguf")
    known = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    try:
        block, block_bytes = gguf.GGML_QUANT_SIZES[number]
        if known[number] not in PLAIN:
            _dequantized(np.zeros(block_bytes, np.uint8), 1, known[number])
    except (ValueError, KeyError, NotImplementedError):
        shown = known.get(number, number)
        raise LeanError(f"{path}: {name} is of type {shown}, which the package gguf cannot dequantize") from None
    return known[number], block, block_bytes


def _dequantized(stored: np.ndarray, rows: int, kind: str) -> np.ndarray:
    gguf = needs("gguf", "gguf")
    return gguf.quants.dequantize(stored.reshape(rows, -1), gguf.GGMLQuantizationType[kind])
