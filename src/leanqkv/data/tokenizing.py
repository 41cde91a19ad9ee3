"""Tokenize documents into sharded files, by several processes if asked; an interrupted start is resumed."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ..checkpoints.tokenizer import Framing, check_ids, framing, vocabulary
from ..compat import panics_are_errors
from ..errors import LeanError
from ..files import hash_files, write_json
from ..records import SHARDS_WRITTEN, read_record
from ..workers import children_ignore_interrupts, end_with_parent
from .cache import MANIFEST
from .corpus import Corpus
from .token_files import VALIDATION_SHARE, VALIDATION_TOKENS, Shard, cut, held_out

# Training tokens in a file. Work that is stopped loses less than that.
SHARD_TOKENS = 2**26
VALIDATION = "validation.bin"
Progress = Callable[[str], None]


def tokenized(
    documents: Iterator[str],
    tokenizer: PreTrainedTokenizerFast,
    progress: Progress,
    workers: int = 1,
    number: int = 0,
    validation_tokens: int = 0,
    *,
    vocab_size: int,
) -> Generator[tuple[str, np.ndarray, bool]]:
    """Yield each document, its tokens with those that the tokenizer puts around them, and whether it is held out.

    Args:
        vocab_size: of the model. A tokenizer may have more tokens, which must not occur.
        workers: processes that tokenize; of one, which is this, the tokenizers library takes all cores.
        number: of the first document.
        validation_tokens: how many were held out before it.
    """
    characters = 0
    progress("tokenizing")
    for batch, encoded in _encoded(_batches(documents), tokenizer, workers):
        for document, tokens in zip(batch, encoded, strict=True):
            check_ids(tokens, vocab_size, tokenizer, f"document {number + 1:,} of the text")
            chosen = number % VALIDATION_SHARE == VALIDATION_SHARE - 1 and validation_tokens < VALIDATION_TOKENS
            yield document, tokens, chosen
            validation_tokens += len(tokens) * chosen
            number += 1
        characters += sum(map(len, batch))
        progress(f"tokenizing, {number:,} documents, {characters / 1e6:,.1f} million characters")


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


def _encoded(
    batches: Iterator[list[str]], tokenizer: PreTrainedTokenizerFast, workers: int
) -> Iterator[tuple[list[str], list[np.ndarray]]]:
    """Yield each batch with the tokens of its documents, in order; no more than two batches a worker are read ahead."""
    if workers == 1:
        setting = plain(tokenizer), framing(tokenizer), token_type(tokenizer)
        yield from ((batch, encode(*setting, batch)) for batch in batches)
        return
    # Not forked: the threads of torch and of the tokenizers library do not live on in a fork.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start, (tokenizer,))
    waiting: deque[Any] = deque()
    try:
        for batch in batches:
            with children_ignore_interrupts():
                waiting.append((batch, pool.submit(_encode, batch)))
            if len(waiting) > 2 * workers:
                first, tokens = waiting.popleft()
                yield first, tokens.result()
        for first, tokens in waiting:
            yield first, tokens.result()
    finally:
        pool.shutdown(cancel_futures=True)


def plain(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """Return what turns documents into tokens: whole ones, to which nothing is added.

    A tokenizer's file may ask to cut and to pad texts. What looks like a special token in a document is text.
    """
    with panics_are_errors("the text"):
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def encode(tokenizer: Tokenizer, around: Framing, dtype: str, batch: Sequence[str]) -> list[np.ndarray]:
    """Return the tokens of each document, with those around them."""
    with panics_are_errors("the text"):
        encodings = tokenizer.encode_batch_fast(list(batch), add_special_tokens=False)
    return [np.array(around.frame(encoding.ids), dtype=dtype) for encoding in encodings]


# What a worker's process encodes with.
_setting: tuple[Tokenizer, Framing, str]


def _start(tokenizer: PreTrainedTokenizerFast) -> None:
    """Prepare a worker, which has one thread."""
    global _setting
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _setting = plain(tokenizer), framing(tokenizer), token_type(tokenizer)
    end_with_parent()


def _encode(batch: Sequence[str]) -> list[np.ndarray]:
    return encode(*_setting, batch)


def token_type(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the smallest type of the token files that holds every token."""
    return "uint16" if vocabulary(tokenizer) <= 2**16 else "uint32"


@dataclass
class Point:
    """How far the writing of token files has come; the manifest has that of every shard's end.

    Attributes:
        shard: number of the file of training tokens.
        tokens: in that file.
        validation_tokens: held out so far.
        documents: read so far.
        bytes: of those documents in UTF-8.
        part: the file of the corpus that the next document is in, or one before it.
        first: the number of that file's first document.
    """

    shard: int = 0
    tokens: int = 0
    validation_tokens: int = 0
    documents: int = 0
    bytes: int = 0
    part: int = 0
    first: int = 0


def write_tokens(
    directory: Path,
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    progress: Progress,
    max_documents: int | None = None,
    workers: int = 1,
    *,
    vocab_size: int,
) -> dict[str, Any]:
    """Write every document and the tokens around it to a shard of training tokens, or to the validation tokens.

    The manifest in `directory` has every complete shard; those of an earlier start are not made again.

    Returns:
        The description of the files.

    Raises:
        LeanError: there is no document.
    """
    manifest, dtype = directory / MANIFEST, np.dtype(token_type(tokenizer))
    begun = read_record(manifest, SHARDS_WRITTEN, "start again") if manifest.exists() else {"shards": []}
    ends = [Point(**end) for end in begun["shards"]]
    at = replace(ends[-1], shard=len(ends), tokens=0) if ends else Point()
    begins = [(at.part, at.first)]  # parts of the corpus, and the number of the first document of each
    limit = None if max_documents is None else max_documents - at.first
    rest = islice(_documents(corpus, begins), at.documents - at.first, limit)
    encoded = tokenized(rest, tokenizer, progress, workers, at.documents, at.validation_tokens, vocab_size=vocab_size)
    with closing(encoded), (directory / VALIDATION).open("ab") as validation:
        validation.truncate(at.validation_tokens * dtype.itemsize)
        more = True
        while more:
            with (directory / _shard(at.shard)).open("wb") as train:
                more = _write_shard(encoded, train, validation, at)
            at.part, at.first = next(begin for begin in reversed(begins) if begin[1] <= at.documents)
            if at.tokens:
                ends.append(replace(at))
            else:  # what is left was all held out
                (directory / _shard(at.shard)).unlink()
                ends[-1:] = [replace(at, shard=end.shard, tokens=end.tokens) for end in ends[-1:]]
            write_json(manifest, {"shards": [asdict(end) for end in ends]})
            at.shard, at.tokens = at.shard + 1, 0
    if not ends:
        raise LeanError("the data is empty: there is no document in it")
    progress("hashing the tokens")
    return _description(directory, ends, dtype)


def _write_shard(
    documents: Iterator[tuple[str, np.ndarray, bool]], train: IO[bytes], validation: IO[bytes], at: Point
) -> bool:
    """Write documents until the shard is full, and return whether there may be more."""
    full = False
    for document, tokens, held in documents:
        (validation if held else train).write(tokens.tobytes())
        at.tokens += len(tokens) * (not held)
        at.validation_tokens += len(tokens) * held
        at.documents += 1
        at.bytes += len(document.encode())
        # Before a document is held out there is one shard, whose tail it may have to give up.
        if full := at.tokens >= SHARD_TOKENS and at.validation_tokens > 0:
            break
    for stream in (train, validation):
        stream.flush()
        os.fsync(stream.fileno())
    return full


def _shard(number: int) -> str:
    return f"train-{number:05}.bin"


def _description(directory: Path, ends: Sequence[Point], dtype: np.dtype) -> dict[str, Any]:
    train: list[Shard] = [(_shard(end.shard), 0, end.tokens) for end in ends]
    validation: list[Shard] = [(VALIDATION, 0, ends[-1].validation_tokens)]
    if not ends[-1].validation_tokens:
        train, validation = cut(train, ends[-1].tokens - held_out(ends[-1].tokens))
    names = dict.fromkeys(name for name, _, _ in (*train, *validation))
    tokens = sum(count for _, _, count in (*train, *validation))
    return {
        "dtype": dtype.name,
        "train_shards": train,
        "validation_shards": validation,
        "sha256": hash_files(*(directory / name for name in names)),
        "bytes_per_token": ends[-1].bytes / tokens,
    }


def _documents(corpus: Corpus, begins: list[tuple[int, int]]) -> Iterator[str]:
    """Yield the documents of a corpus from the part on that is in `begins`, and add each part to it as it is begun."""
    first, number = begins[0]
    for part, documents in enumerate(corpus.parts[first:], first):
        begins.append((part, number))
        for document in documents():
            number += 1
            yield document
