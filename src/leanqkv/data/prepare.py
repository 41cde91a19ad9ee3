"""Tokenize a corpus of any size once, into memory-mapped files that are cached by content."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from ..checkpoints.tokenizer import framing, identity, load_tokenizer, vocabulary
from ..errors import LeanError
from .cache import MANIFEST, cached_directory
from .corpus import open_corpus
from .mixture import Part, parse_mixture, write_mixture
from .token_files import TokenData, stored_tokens
from .tokenizer import TRAINING_CHARACTERS, leading_text, train_tokenizer
from .tokenizing import write_tokens

# Of the directories in the cache.
FORMAT = 3


def prepare_data(
    source: str | None = None,
    *,
    vocab_size: int,
    tokenizer: str | None = None,
    text_field: str = "text",
    max_documents: int | None = None,
    workers: int = 1,
    left_free: int = 0,
    progress: Callable[[str], None] = lambda doing: None,
) -> TokenData:
    """Return token files of `source`, made on first use and read from the cache afterwards, by content hash.

    One pass over the text, in the memory of a few thousand documents. An interrupted start is resumed after its last
    complete shard of 64 Mi tokens.

    Args:
        source: see `open_corpus`; or files of tokens, see `stored_tokens`; or a mixture of texts, see `parse_mixture`.
        vocab_size: the model's vocabulary, which every token must fit into.
        tokenizer: a directory or hub name; None trains a byte-level BPE of `vocab_size` on the corpus. Of files of
            tokens the one that has made them; then a directory may be without.
        max_documents, workers: documents read, at most; processes that tokenize.
        left_free: numbers at the end of the vocabulary that a tokenizer trained here does not use.
        progress: called with the current phase and how much of it is done.

    Raises:
        LeanError: data or tokenizer missing, unreadable or empty, or a text with a token that the model does not have.
    """
    whole, vocab_size = vocab_size, vocab_size - (left_free if tokenizer is None else 0)
    if len(parts := parse_mixture(source)) > 1:
        if stored := [part.source for part in parts if stored_tokens(Path(part.source), vocab_size) is not None]:
            raise LeanError(f"{stored[0]} holds tokens, not text; a mixture is made of texts")
        if tokenizer is None:
            tokenizer = _mixture_tokenizer(parts, vocab_size, text_field, max_documents, progress)
        options: dict[str, Any] = {"tokenizer": tokenizer, "text_field": text_field, "workers": workers}
        options |= {"vocab_size": vocab_size, "max_documents": max_documents, "progress": progress}
        return _prepare_mixture(parts, [prepare_data(part.source, **options) for part in parts])
    if source is not None and (tokens := stored_tokens(Path(source), whole)) is not None:
        if max_documents is not None:
            raise LeanError(f"{source} holds tokens, not text: `max_documents` does not apply to it")
        return tokens if tokenizer is None else tokens.made_with(tokenizer)
    progress("reading the data")
    corpus = open_corpus(source, text_field)
    named = load_tokenizer(tokenizer) if tokenizer is not None else None
    about_tokenizer = f"bpe {vocab_size}" if named is None else _identity(named, vocab_size)
    content = f"{FORMAT}\0{corpus.fingerprint}\0{about_tokenizer}\0{max_documents}"

    def fill(directory: Path) -> dict[str, Any]:
        chosen = named
        if chosen is None and (directory / MANIFEST).exists():
            chosen = load_tokenizer(directory / "tokenizer")
        elif chosen is None:
            progress("training the tokenizer")
            chosen = train_tokenizer(islice(corpus.documents(), max_documents), vocab_size, progress)
        if named is None and (tokens := vocabulary(chosen)) > vocab_size:
            raise LeanError(
                f"a tokenizer of bytes has at least {tokens} tokens, the model only {vocab_size}"
                f"{' beside a mask token' if left_free else ''}; set vocab_size, or give `tokenizer`"
            )
        chosen.save_pretrained(directory / "tokenizer")
        facts = write_tokens(directory, corpus, chosen, progress, max_documents, workers, vocab_size=vocab_size)
        return {"description": corpus.description, "vocab_size": min(vocab_size, vocabulary(chosen)), **facts}

    try:
        return TokenData(**cached_directory("data", content, fill))
    except BrokenProcessPool:
        raise LeanError(
            f"one of the {workers} processes that tokenize was killed, perhaps for want of memory; the same command "
            "goes on, with fewer `workers` if it is memory"
        ) from None


def _identity(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> str:
    """Return a string that differs between tokenizers that make other tokens of a text."""
    around = framing(tokenizer)
    bound = f"\0{vocab_size}" if vocabulary(tokenizer) > vocab_size else ""  # of which not all may occur
    return identity(tokenizer) + ("" if around.begin is None else f"\0{around}") + bound


def _mixture_tokenizer(
    parts: Sequence[Part], vocab_size: int, text_field: str, max_documents: int | None, progress: Callable[[str], None]
) -> str:
    """Return the directory of a tokenizer trained on the texts of a mixture, each of which gives its share."""
    corpora = [open_corpus(part.source, text_field) for part in parts]

    def leading() -> Iterator[str]:
        for part, corpus in zip(parts, corpora, strict=True):
            documents = islice(corpus.documents(), max_documents)
            yield from leading_text(documents, int(part.share * TRAINING_CHARACTERS))

    def fill(directory: Path) -> dict[str, Any]:
        progress("training the tokenizer")
        train_tokenizer(leading(), vocab_size, progress).save_pretrained(directory)
        return {}

    texts = "\0".join(f"{part.share} {corpus.fingerprint}" for part, corpus in zip(parts, corpora, strict=True))
    content = f"{FORMAT}\0{texts}\0bpe {vocab_size}\0{max_documents}"
    return str(cached_directory("tokenizer", content, fill)["directory"])


def _prepare_mixture(parts: Sequence[Part], prepared: Sequence[TokenData]) -> TokenData:
    """Mix texts that were prepared with one tokenizer."""
    # The name of a part's directory stands for its text and its tokenizer.
    made_of = "\0".join(f"{part.share} {data.directory.name}" for part, data in zip(parts, prepared, strict=True))
    content = f"{FORMAT}\0mixture\0{made_of}"
    return TokenData(**cached_directory("data", content, lambda directory: write_mixture(directory, parts, prepared)))
