"""Token files, read as one array: shards of our own, nanoGPT's and Megatron's."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from transformers import PreTrainedTokenizerFast

from ..checkpoints.tokenizer import Framing, framing, has_tokenizer, load_tokenizer, vocabulary
from ..errors import LeanError
from ..files import hash_files
from .cache import remembered
from .corpus import reading

# One document in this many goes to the validation split until that has so many tokens; a short corpus, or one that is
# tokens already, gives up as large a tail instead.
VALIDATION_SHARE = 20
VALIDATION_TOKENS = 2**24
# The first bytes of Megatron's index, and its codes of the types that hold tokens.
MEGATRON = b"MMIDIDX\0\0" + (1).to_bytes(8, "little")
MEGATRON_HEADER = 34
MEGATRON_TYPES = {4: "int32", 8: "uint16"}
# The first number of llm.c's token files, whose header nanoGPT's do not have, and what to say of such a file.
LLM_C = {
    20240520: "with a header: cut its first 1,024 bytes off (tail -c +1025)",
    20240801: "with a header and tokens of 32 bits, which are read from Megatron's files alone",
}

# Of a file of tokens: its name, the first token that counts, and how many do.
Shard = tuple[str, int, int]


class TokenFiles:
    """Arrays of tokens, one after another; read by slices.

    `around`: what the tokenizer puts around a text; None: nothing is known of it.
    """

    def __init__(self, arrays: Sequence[np.ndarray], around: Framing | None = None):
        self._arrays, self.around = arrays, around
        lengths = [len(array) for array in arrays]
        self._ends = np.cumsum(lengths)
        self._starts = self._ends - lengths

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, wanted: slice) -> np.ndarray:
        """Return the tokens of a slice, whose step is 1."""
        begin, end, step = wanted.indices(len(self))
        assert step == 1
        first, last = int(np.searchsorted(self._ends, begin, side="right")), int(np.searchsorted(self._ends, end))
        touched = zip(self._arrays[first : last + 1], self._starts[first : last + 1], strict=True)
        parts = [array[max(begin - start, 0) : end - start] for array, start in touched]
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [self._arrays[0][:0]])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype=dtype)


Tokens = np.ndarray | TokenFiles


@dataclass(frozen=True)
class TokenData:
    """Token files on disk.

    Attributes:
        directory: holds the files, and the tokenizer if there is one.
        dtype: of the tokens in the files.
        sha256: of the training tokens, then the validation tokens.
        bytes_per_token: UTF-8 bytes of text per token; None for files of tokens without their text.
        train_shards: the files of the training tokens.
        validation_shards: the files of the held-out tokens.
        parts: of a mixture, each text's description, sha256, share and tokens.
        tokenizer_directory: or hub name, of the tokenizer, where it is not in `directory`.
    """

    kind: ClassVar[str] = "text"

    directory: Path
    description: str
    dtype: str
    sha256: str
    vocab_size: int
    bytes_per_token: float | None
    train_shards: Sequence[Shard]
    validation_shards: Sequence[Shard]
    parts: Sequence[Mapping[str, Any]] = ()
    tokenizer_directory: str | None = None

    @property
    def train_tokens(self) -> int:
        """The number of training tokens."""
        return sum(tokens for _, _, tokens in self.train_shards)

    @property
    def validation_tokens(self) -> int:
        """The number of held-out tokens."""
        return sum(tokens for _, _, tokens in self.validation_shards)

    def train(self) -> TokenFiles:
        """Return the training tokens, [train_tokens]. Raises a LeanError if a file has fewer."""
        return self._open(self.train_shards)

    def validation(self) -> TokenFiles:
        """Return the held-out tokens, [validation_tokens]. Raises a LeanError if a file has fewer."""
        return self._open(self.validation_shards)

    def _open(self, shards: Sequence[Shard]) -> TokenFiles:
        arrays = []
        for name, first, tokens in shards:
            file, itemsize = self.directory / name, np.dtype(self.dtype).itemsize
            if (size := file.stat().st_size) < (needed := (first + tokens) * itemsize) or size % itemsize:
                raise LeanError(
                    f"{file} is cut off: it has {size:,} bytes, {first + tokens:,} tokens take {needed:,}. Delete the "
                    f"folder {file.parent} and start again"
                )
            arrays.append(np.memmap(file, dtype=self.dtype, mode="r")[first : first + tokens])
        return TokenFiles(arrays or [np.empty(0, self.dtype)], self.around)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast | None:
        """The tokenizer; None for files of tokens without one.

        A folder of that name beside other programs' files may be anything: it is theirs if it has all of their tokens.
        """
        directory = self.directory / "tokenizer"
        if self.tokenizer_directory is not None:
            return load_tokenizer(self.tokenizer_directory)
        if not directory.is_dir():
            return None
        if self.bytes_per_token is not None:
            return load_tokenizer(directory)
        with suppress(LeanError):
            tokenizer = load_tokenizer(directory)
            if vocabulary(tokenizer) > self._last_token():
                return tokenizer
        return None

    def _last_token(self) -> int:
        names = {name for name, _, _ in (*self.train_shards, *self.validation_shards)}
        return max(_extremes(self.directory / name, self.dtype)[1] for name in names)

    def made_with(self, tokenizer: str) -> "TokenData":
        """Return the same with the tokenizer of a directory or hub name; without one where a directory has none.

        Raises:
            LeanError: a tokenizer that does not have all of the tokens.
        """
        if Path(tokenizer).exists() and not has_tokenizer(tokenizer):
            return self
        if (size := vocabulary(load_tokenizer(tokenizer))) <= (last := self._last_token()):
            raise LeanError(
                f"{self.description} has token {last}, the tokenizer {tokenizer} ends at {size - 1}: another one has "
                "made these tokens"
            )
        return replace(self, tokenizer_directory=tokenizer)

    @property
    def around(self) -> Framing | None:
        """What the tokenizer puts around a text; None without a tokenizer."""
        return None if self.tokenizer is None else framing(self.tokenizer)

    def require(self, context_length: int) -> None:
        """Check that both splits hold a sequence of `context_length` tokens and its last target.

        Raises:
            LeanError: a split is shorter.
        """
        for split, tokens in (("training", self.train_tokens), ("validation", self.validation_tokens)):
            if tokens <= context_length:
                raise LeanError(
                    f"the {split} text is too short: {tokens} tokens, one sequence needs {context_length + 1}; "
                    "give more data or a smaller `context_length`"
                )

    def evaluations(self, context_length: int) -> int:
        """Return how many different sequences of `context_length` tokens the held-out text has."""
        return self.validation_tokens - context_length

    def sizes(self) -> str:
        """Return the sizes of the splits, in words."""
        return f"{self.train_tokens:,} training and {self.validation_tokens:,} validation tokens"

    def evaluation_size(self, sequences: int) -> int:
        """Return how many sequences an evaluation takes unless the user says otherwise."""
        return sequences

    def record(self) -> dict[str, Any]:
        """Return a record's entry on the data; no path of this machine, and no list of files."""
        entry = {name: getattr(self, name) for name in ("description", "dtype", "train_tokens", "validation_tokens")}
        entry |= {name: getattr(self, name) for name in ("sha256", "vocab_size", "bytes_per_token")}
        if (around := self.around) is not None and around.begin is not None:
            entry["windows_begin_with"] = around.begin
        return entry | ({"parts": self.parts} if self.parts else {})


def stored_tokens(path: Path, vocab_size: int) -> TokenData | None:
    """Return token files that other programs wrote; None if `path` is something else.

    nanoGPT: a folder with train.bin and val.bin, or a `.bin` file, uint16 as its scripts write them. Megatron-LM: a
    `.bin` file with its `.idx`, or a folder of such pairs, of which the name's order counts, or which are train and
    val. Without a split of their own, 1/20 of the tokens at the end are held out, and of Megatron's whole documents.

    Raises:
        LeanError: damaged, in a format that is not read, or with a token that the model does not have.
    """
    if path.is_dir() and (path / "train.bin").exists() and not (path / "train.idx").exists():
        if not (path / "val.bin").exists():
            raise LeanError(f"{path} has a train.bin but no val.bin beside it")
        train, validation = ([_nanogpt(path / f"{split}.bin", vocab_size)] for split in ("train", "val"))
        return _stored(path, "nanoGPT tokens", "uint16", vocab_size, train, validation)
    indices = sorted(path.glob("*.idx")) if path.is_dir() else [path.with_suffix(".idx")]
    if path.is_dir() and indices:
        for file in sorted(path.glob("*.bin")):
            if file.with_suffix(".idx") not in indices:
                raise LeanError(f"{file} has no index beside it, as others in {path} have; add it, or move the file")
    if path.suffix in (".bin", ".idx", "") and indices and all(index.is_file() for index in indices):
        return _megatron(path, indices, vocab_size)
    if path.suffix == ".bin" and path.is_file():
        shard = _nanogpt(path, vocab_size)
        return _stored(path, "nanoGPT tokens", "uint16", vocab_size, *cut([shard], shard[2] - held_out(shard[2])))
    return None


def tokens_hash(tokens: np.ndarray) -> str:
    """Return the SHA-256 of tokens, whatever their dtype."""
    return hashlib.sha256(np.ascontiguousarray(tokens, dtype="<i8").data).hexdigest()


def held_out(tokens: int) -> int:
    """Return how many of the tokens at the end of a text are held out, where no documents are."""
    return min(tokens // VALIDATION_SHARE, VALIDATION_TOKENS)


def _stored(
    path: Path, kind: str, dtype: str, vocab_size: int, train: Sequence[Shard], validation: Sequence[Shard]
) -> TokenData:
    directory = path if path.is_dir() else path.parent
    files = [directory / name for name in dict.fromkeys(name for name, _, _ in (*train, *validation))]
    sha256 = remembered(files, "sha256", str, lambda: hash_files(*files))
    return TokenData(directory, f"{path.name} ({kind})", dtype, sha256, vocab_size, None, train, validation)


def cut(shards: Sequence[Shard], position: int) -> tuple[list[Shard], list[Shard]]:
    """Return the shards before and behind a position among their tokens."""
    before: list[Shard] = []
    behind: list[Shard] = []
    for name, first, tokens in shards:
        own = min(max(position, 0), tokens)
        if own:
            before.append((name, first, own))
        if own < tokens:
            behind.append((name, first + own, tokens - own))
        position -= tokens
    return before, behind


def _nanogpt(file: Path, vocab_size: int) -> Shard:
    with reading(file), file.open("rb") as stream:
        size, start = file.stat().st_size, stream.read(4)
    if (found := LLM_C.get(int.from_bytes(start, "little"))) is not None:
        raise LeanError(f"{file} is a token file of llm.c, {found}")
    if size % 2:
        raise LeanError(f"{file} is cut off: {size} bytes are not a whole number of 16-bit tokens")
    _check_tokens(file, "uint16", vocab_size)
    start = np.memmap(file, dtype="uint16", mode="r")[: min(size // 4 * 2, 2**13)].reshape(-1, 2).max(0, initial=0)
    if size > 2**6 and start[1] <= min((vocab_size - 1) >> 16, 3) < start[0]:
        raise LeanError(f"{file} seems to hold 32-bit tokens, nanoGPT's have 16 bits; give Megatron's .bin and .idx")
    return file.name, 0, size // 2


def _extremes(file: Path, dtype: str) -> list[int]:
    """Return the least and the largest token of a file."""

    def extremes() -> list[int]:
        tokens = np.memmap(file, dtype=dtype, mode="r")
        pieces = [tokens[start : start + 2**24] for start in range(0, len(tokens), 2**24)]
        return [min(int(piece.min()) for piece in pieces), max(int(piece.max()) for piece in pieces)]

    return remembered([file], f"extremes {dtype}", [int, int], extremes)


def _check_tokens(file: Path, dtype: str, vocab_size: int) -> None:
    """Check that the model has every token of a file."""
    if not file.stat().st_size:
        raise LeanError(f"the data is empty: {file} has no bytes")
    least, found = _extremes(file, dtype)
    if least < 0:
        raise LeanError(f"{file} has token {least}; a token is a number of the vocabulary, from 0 on")
    if found >= vocab_size:
        raise LeanError(f"{file} has token {found}, the model's vocabulary ends at {vocab_size - 1}; set vocab_size")


def _megatron(path: Path, indices: Sequence[Path], vocab_size: int) -> TokenData:
    """Return Megatron-LM's token files: `.bin` holds the tokens, `.idx` their type and where documents begin."""
    shards, begins, ends, dtypes, total = [], [], set(), set(), 0
    for index in indices:
        file = index.with_suffix(".bin")
        with reading(file):
            dtype, documents = _megatron_index(index, file)
        _check_tokens(file, dtype, vocab_size)
        dtypes.add(dtype)
        ends |= set(np.memmap(file, dtype=dtype, mode="r")[documents[1:1001] - 1].tolist())
        shards.append((file.name, 0, int(documents[-1])))
        begins.append(total + documents[:-1])
        total += int(documents[-1])
    if len(dtypes) > 1:
        raise LeanError(f"the token files of {path} are of different types: {', '.join(sorted(dtypes))}")
    kind = "Megatron tokens" + (", no end token between documents" if len(ends) > 1 else "")
    if [index.stem for index in indices] == ["train", "val"]:
        return _stored(path, kind, dtypes.pop(), vocab_size, shards[:1], shards[1:])
    position = total - held_out(total)
    # The first document that begins there or later; where none does, the last one is cut.
    later = [int(some[some >= position][0]) for some in begins if some[-1] >= position]
    return _stored(path, kind, dtypes.pop(), vocab_size, *cut(shards, min(later, default=position)))


def _megatron_index(index: Path, file: Path) -> tuple[str, np.ndarray]:
    """Return the type of the tokens, and where documents begin and the last one ends, int64 [documents + 1].

    Raises:
        LeanError: no index of Megatron-LM, of a type that holds no tokens, or of another `.bin` file.
    """
    content = index.read_bytes()
    if content[:17] != MEGATRON or len(content) < MEGATRON_HEADER:
        raise LeanError(f"{index} is no index of Megatron-LM's token files, version 1")
    if (dtype := MEGATRON_TYPES.get(content[17])) is None:
        raise LeanError(f"{index} has tokens of type {content[17]}; those read are 8 (uint16) and 4 (int32)")
    sequences, boundaries = np.frombuffer(content, "<u8", 2, 18).tolist()
    if len(content) != MEGATRON_HEADER + 12 * sequences + 8 * boundaries or boundaries < 2:
        raise LeanError(f"{index} is cut off: {len(content):,} bytes for {sequences:,} sequences")
    lengths = np.frombuffer(content, "<i4", sequences, MEGATRON_HEADER)
    documents = np.frombuffer(content, "<i8", boundaries, MEGATRON_HEADER + 12 * sequences)
    in_order = documents[0] == 0 and documents[-1] == sequences and (np.diff(documents) >= 0).all()
    if (lengths < 0).any() or not in_order:
        raise LeanError(f"{index} is damaged: its documents are not all sequences, one after another")
    begins = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if (size := int(begins[-1]) * np.dtype(dtype).itemsize) != file.stat().st_size:
        raise LeanError(f"{file} has {file.stat().st_size:,} bytes, its index {index.name} describes {size:,}")
    return dtype, begins[documents]
