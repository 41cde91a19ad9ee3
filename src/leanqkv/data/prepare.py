"""Tokenizes a corpus once, into memory-mapped files cached by content, however much larger than memory it is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from transformers import PreTrainedTokenizerFast

from ..errors import LeanError
from ..files import hash_files
from .cache import made_once
from .corpus import open_corpus, reading
from .mixture import Part, parse_mixture, write_mixture
from .tokenizer import TRAINING_CHARACTERS, leading_text, load_tokenizer, train_tokenizer

# One document in this many goes to the validation split; short corpora give up as large a tail instead.
VALIDATION_SHARE = 20
FORMAT = 1


@dataclass(frozen=True)
class TokenData:
    """Token files on disk.

    Attributes:
        directory: holds train.bin, validation.bin and the tokenizer (a nanoGPT folder: train.bin and val.bin).
        dtype: of the token files, "uint16" or "uint32".
        sha256: of the training tokens, then the validation tokens.
        bytes_per_token: UTF-8 bytes of text per token; None for files of tokens without their text.
        parts: of a mixture, each text's description, sha256, share and tokens.
    """

    kind: ClassVar[str] = "text"

    directory: Path
    description: str
    dtype: str
    train_tokens: int
    validation_tokens: int
    sha256: str
    vocab_size: int
    bytes_per_token: float | None
    train_file: str = "train.bin"
    validation_file: str = "validation.bin"
    parts: Sequence[Mapping[str, Any]] = ()

    def train(self) -> np.ndarray:
        """Return the training tokens, [train_tokens]. Raises a LeanError if the file has fewer."""
        return self._open(self.train_file, self.train_tokens)[: self.train_tokens]

    def validation(self) -> np.ndarray:
        """Return the held-out tokens, [validation_tokens]. Raises a LeanError if the file has fewer."""
        tokens = self._open(self.validation_file, self.validation_tokens)
        return tokens[len(tokens) - self.validation_tokens :]  # of a lone nanoGPT file the tail

    def _open(self, name: str, tokens: int) -> np.ndarray:
        """The tokens of a file, of which there must be so many at least."""
        file, itemsize = self.directory / name, np.dtype(self.dtype).itemsize
        if (size := file.stat().st_size) < tokens * itemsize or size % itemsize:
            raise LeanError(
                f"{file} is cut off: it has {size:,} bytes, {tokens:,} tokens take {tokens * itemsize:,}. Delete the "
                f"folder {file.parent} and start again"
            )
        return np.memmap(file, dtype=self.dtype, mode="r")

    def tokenizer(self) -> PreTrainedTokenizerFast | None:
        """Return the tokenizer, or None for files of tokens without one."""
        directory = self.directory / "tokenizer"
        return load_tokenizer(directory) if directory.is_dir() else None

    def require(self, context_length: int) -> None:
        """Check that both splits hold a sequence of `context_length` tokens and its last target.

        Raises:
            LeanError: a split is shorter.
        """
        for split, tokens in (("training", self.train_tokens), ("validation", self.validation_tokens)):
            if tokens <= context_length:
                raise LeanError(
                    f"the {split} text is too short: {tokens} tokens, one sequence needs {context_length + 1}; "
                    "give more data or a smaller --context-length"
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
        """Return a record's entry on the data; no path of this machine."""
        about = {name: value for name, value in asdict(self).items() if name != "directory"}
        return about if self.parts else {name: value for name, value in about.items() if name != "parts"}


def prepare_data(
    source: str | None = None,
    *,
    vocab_size: int,
    tokenizer: str | None = None,
    text_field: str = "text",
    max_documents: int | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> TokenData:
    """Return token files of `source`, made on first use and read from the cache afterwards, by content hash.

    Args:
        source: see `open_corpus`; or a nanoGPT `.bin` file, or a folder with train.bin and val.bin; or a mixture of
            texts, see `parse_mixture`.
        vocab_size: the model's vocabulary, which every token must fit into.
        tokenizer: a directory or hub name; None trains a byte-level BPE of `vocab_size` on the corpus.
        max_documents: read no more than that many.
        progress: called with the current phase and how much of it is done.

    Raises:
        LeanError: data or tokenizer missing, unreadable, empty, or with more tokens than the model has.
    """
    if len(parts := parse_mixture(source)) > 1:
        return _prepare_mixture(parts, vocab_size, tokenizer, text_field, max_documents, progress)
    if source is not None and (tokens := nanogpt(Path(source), vocab_size)) is not None:
        if tokenizer is not None or max_documents is not None:
            raise LeanError(f"{source} holds tokens, not text: --tokenizer and --max-documents do not apply to it")
        return tokens
    progress("reading the data")
    corpus = open_corpus(source, text_field)
    named = fitting_tokenizer(tokenizer, vocab_size) if tokenizer is not None else None
    about_tokenizer = named.backend_tokenizer.to_str() if named is not None else f"bpe {vocab_size}"
    content = f"{FORMAT}\0{corpus.fingerprint}\0{about_tokenizer}\0{max_documents}"

    def fill(directory: Path) -> dict[str, Any]:
        chosen = named
        if chosen is None:
            progress("training the tokenizer")
            chosen = train_tokenizer(islice(corpus.documents(), max_documents), vocab_size, progress)
        chosen.save_pretrained(directory / "tokenizer")
        facts = write_tokens(directory, islice(corpus.documents(), max_documents), chosen, progress)
        return {"description": corpus.description, "vocab_size": len(chosen), **facts}

    return TokenData(**made_once("data", content, fill))


def _prepare_mixture(
    parts: Sequence[Part],
    vocab_size: int,
    tokenizer: str | None,
    text_field: str,
    max_documents: int | None,
    progress: Callable[[str], None],
) -> TokenData:
    """Prepare every text of a mixture with one tokenizer, then the mixture."""
    if tokens := [part.source for part in parts if nanogpt(Path(part.source), vocab_size) is not None]:
        raise LeanError(f"{tokens[0]} holds tokens, not text; a mixture is made of texts")
    if tokenizer is None:
        corpora = [open_corpus(part.source, text_field) for part in parts]

        def leading() -> Iterator[str]:
            for part, corpus in zip(parts, corpora, strict=True):
                documents = islice(corpus.documents(), max_documents)
                yield from leading_text(documents, int(part.share * TRAINING_CHARACTERS))

        def fill_tokenizer(directory: Path) -> dict[str, Any]:
            progress("training the tokenizer")
            train_tokenizer(leading(), vocab_size, progress).save_pretrained(directory)
            return {}

        texts = "\0".join(f"{part.share} {corpus.fingerprint}" for part, corpus in zip(parts, corpora, strict=True))
        content = f"{FORMAT}\0{texts}\0bpe {vocab_size}\0{max_documents}"
        tokenizer = str(made_once("tokenizer", content, fill_tokenizer)["directory"])
    options: dict[str, Any] = {"vocab_size": vocab_size, "tokenizer": tokenizer, "text_field": text_field}
    prepared = [prepare_data(part.source, max_documents=max_documents, progress=progress, **options) for part in parts]
    # The name of a part's directory stands for its text and its tokenizer.
    made_of = "\0".join(f"{part.share} {data.directory.name}" for part, data in zip(parts, prepared, strict=True))
    content = f"{FORMAT}\0mixture\0{made_of}"
    return TokenData(**made_once("data", content, lambda directory: write_mixture(directory, parts, prepared)))


def fitting_tokenizer(name: str | Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a directory or a hub name, for a model of `vocab_size` tokens.

    Raises:
        LeanError: as `load_tokenizer`, and for a tokenizer with more tokens than the model.
    """
    tokenizer = load_tokenizer(name)
    if len(tokenizer) > vocab_size:
        raise LeanError(
            f"the tokenizer {name} has {len(tokenizer)} tokens, the model only {vocab_size}; set vocab_size"
        )
    return tokenizer


def tokenized(
    documents: Iterator[str], tokenizer: PreTrainedTokenizerFast, progress: Callable[[str], None]
) -> Iterator[tuple[str, list[int], bool]]:
    """Yield each document, its tokens with an end-of-text token after them, and whether it is held out."""
    done = characters = 0
    progress("tokenizing")
    for batch in _batches(documents):
        encodings = tokenizer.backend_tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        for document, encoding in zip(batch, encodings, strict=True):
            yield document, [*encoding.ids, tokenizer.eos_token_id], done % VALIDATION_SHARE == VALIDATION_SHARE - 1
            done += 1
        characters += sum(map(len, batch))
        progress(f"tokenizing, {done:,} documents, {characters / 1e6:,.1f} million characters")


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    """Yield lists of 256 documents, or of fewer with 8 Mi characters, between which progress is reported."""
    batch: list[str] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if len(batch) == 256 or characters >= 2**23:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def write_tokens(
    directory: Path, documents: Iterator[str], tokenizer: PreTrainedTokenizerFast, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Write every document and an end-of-text token to train.bin or validation.bin, and return their description."""
    dtype = np.dtype("uint16" if len(tokenizer) <= 2**16 else "uint32")
    size = 0
    counts = {"train": 0, "validation": 0}
    files = {split: directory / f"{split}.bin" for split in counts}
    with files["train"].open("wb") as train, files["validation"].open("wb") as validation:
        for document, tokens, held_out in tokenized(documents, tokenizer, progress):
            (validation if held_out else train).write(np.array(tokens, dtype=dtype).tobytes())
            counts["validation" if held_out else "train"] += len(tokens)
            size += len(document.encode())
    if not counts["train"]:
        raise LeanError("the data is empty: there is no document in it")
    if not counts["validation"]:
        counts["validation"] = counts["train"] // VALIDATION_SHARE
        counts["train"] -= counts["validation"]
        with files["train"].open("rb+") as train:
            train.seek(counts["train"] * dtype.itemsize)
            files["validation"].write_bytes(train.read())
            train.truncate(counts["train"] * dtype.itemsize)
    return {
        "dtype": dtype.name,
        "train_tokens": counts["train"],
        "validation_tokens": counts["validation"],
        "sha256": hash_files(*files.values()),
        "bytes_per_token": size / (counts["train"] + counts["validation"]),
    }


def nanogpt(path: Path, vocab_size: int) -> TokenData | None:
    """Return nanoGPT's token files, uint16 as its data scripts write them; None if `path` is something else."""
    if path.is_dir() and (path / "train.bin").exists():
        train, validation = path / "train.bin", path / "val.bin"
        if not validation.exists():
            raise LeanError(f"{path} has a train.bin but no val.bin beside it")
    elif path.suffix == ".bin" and path.is_file():
        train = validation = path
    else:
        return None
    files = list(dict.fromkeys((train, validation)))
    counts = []
    for file in files:
        with reading(file):
            counts.append(_count_tokens(file, vocab_size))
    if len(files) == 1:
        counts = [counts[0] - counts[0] // VALIDATION_SHARE, counts[0] // VALIDATION_SHARE]
    return TokenData(
        directory=train.parent,
        description=f"{path.name} (nanoGPT tokens)",
        dtype="uint16",
        train_tokens=counts[0],
        validation_tokens=counts[1],
        sha256=hash_files(*files),
        vocab_size=vocab_size,
        bytes_per_token=None,
        train_file=train.name,
        validation_file=validation.name,
    )


def _count_tokens(file: Path, vocab_size: int) -> int:
    """Return the number of uint16 tokens in `file`, each of which the model must have."""
    size = file.stat().st_size
    if size % 2:
        raise LeanError(f"{file} is cut off: {size} bytes are not a whole number of 16-bit tokens")
    if not size:
        raise LeanError(f"the data is empty: {file} has no bytes")
    tokens = np.memmap(file, dtype="uint16", mode="r")
    largest = max(int(tokens[start : start + 2**24].max()) for start in range(0, len(tokens), 2**24))
    if largest >= vocab_size:
        raise LeanError(f"{file} has token {largest}, the model's vocabulary ends at {vocab_size - 1}; set vocab_size")
    return size // 2
