"""Text to evaluate on: one array of tokens, and the number of bytes of the text."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from ..checkpoints.tokenizer import Framing, framing, load_tokenizer
from ..errors import LeanError
from ..files import hash_files
from ..model.registry import suggest
from .corpus import open_corpus
from .mixture import parse_mixture
from .token_files import VALIDATION_SHARE, TokenFiles, Tokens, held_out, stored_tokens, tokens_hash
from .tokenizing import plain, tokenized

SPLITS = ("whole", "validation")


@dataclass(frozen=True)
class EvaluationText:
    """Documents as tokens, one after another, each between the tokens that the tokenizer puts around a text.

    Attributes:
        tokens: [tokens], unsigned integers. The first is one that begins a text, if the tokenizer has one.
        bytes: of the documents in UTF-8; None for files of tokens without their text.
        text_sha256: of the documents, each followed by a NUL byte: the same for every tokenizer; None without text.

    Raises:
        LeanError: fewer than two tokens.
    """

    description: str
    split: str
    tokens: Tokens
    documents: int | None = None
    bytes: int | None = None
    text_sha256: str | None = None

    def __post_init__(self) -> None:
        if (count := len(self.tokens)) < 2:
            raise LeanError(
                f"the {self.split} text of {self.description} is too short: {count} token{'s' * (count != 1)} found, "
                "two needed, since the first is not predicted; give more text"
            )

    @property
    def around(self) -> Framing | None:
        """What the tokenizer puts around a text; None if it begins none with a token of its own."""
        return getattr(self.tokens, "around", None)

    @property
    def predicted(self) -> int:
        """How many tokens a model is to predict: all but the first, and but those that only begin a text."""
        begin = None if self.around is None else self.around.unpredicted
        begins = 0 if begin is None else int((np.asarray(self.tokens)[1:] == begin).sum())
        return len(self.tokens) - 1 - begins

    def record(self) -> dict[str, Any]:
        """Return a record's entry on the text; no path of this machine."""
        return {
            **{name: value for name, value in vars(self).items() if name != "tokens"},
            "tokens_sha256": tokens_hash(np.asarray(self.tokens)),
            "tokens": len(self.tokens),
            "windows_begin_with": None if self.around is None else self.around.begin,
        }


def evaluation_text(
    source: str,
    *,
    tokenizer: str | Path,
    vocab_size: int,
    split: str = "whole",
    text_field: str = "text",
    max_documents: int | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> EvaluationText:
    """Return the text of `source`, tokenized; nothing is cached.

    Args:
        source: as `prepare_data` takes it, but no mixture.
        tokenizer: a directory or hub name. Where `source` holds tokens it may be missing; it says what begins a window.
        split: "whole", or "validation" for the part of the same source that `prepare_data` holds out.
        progress: called with the current phase and how much of it is done.

    Raises:
        LeanError: source or tokenizer missing, unreadable or of more tokens than the model; fewer than two tokens.
    """
    if split not in SPLITS:
        raise LeanError(f"there is no split {split!r}: {suggest(split, SPLITS)}")
    _refuse_mixture(source)
    if (stored := stored_tokens(Path(source), vocab_size)) is not None:
        if max_documents is not None:
            raise LeanError(f"{source} holds tokens, not text: `max_documents` does not apply to it")
        parts = [stored.validation()] if split == "validation" else [stored.train(), stored.validation()]
        around = stored.made_with(str(tokenizer)).around
        return EvaluationText(stored.description, split, _begun(np.concatenate(parts), around))
    if split == "validation" and max_documents is not None and max_documents < VALIDATION_SHARE:
        raise LeanError(f"one document of {VALIDATION_SHARE} is held out: give as many `max_documents`, or more")
    corpus = open_corpus(source, text_field)
    chosen = load_tokenizer(tokenizer)
    labelled = tokenized(islice(corpus.documents(), max_documents), chosen, progress, vocab_size=vocab_size)
    documents = _held_out(labelled, chosen) if split == "validation" else ((text, ids) for text, ids, _ in labelled)
    digest, runs, size = hashlib.sha256(), [], 0
    for text, ids in documents:
        encoded = text.encode()
        digest.update(encoded + b"\0")
        size += len(encoded)
        runs.append(ids)
    if not size:
        raise LeanError(f"there is nothing to evaluate on: the {split} text of {source} is empty")
    tokens = _begun(np.concatenate(runs)[:-1], framing(chosen))  # nothing comes after the last document
    return EvaluationText(corpus.description, split, tokens, len(runs), size, digest.hexdigest())


def _begun(tokens: np.ndarray, around: Framing | None) -> Tokens:
    """Return the tokens of texts, behind the token that begins the first of them, if there is one."""
    if around is None or around.begin is None:
        return tokens
    begin = np.array([around.begin] if list(tokens[:1]) != [around.begin] else [], tokens.dtype)
    return TokenFiles([np.concatenate([begin, tokens])], around)


def unseen_split(source: str, calibration: str | None) -> str:
    """Return the split of `source` that calibration on `calibration` has not seen: "whole", or "validation".

    Texts are compared by document. Calibration reads the training split alone, so that the validation split of the
    same text is new to it.

    Raises:
        LeanError: part of the documents are in both; a text cannot be read.
    """
    _refuse_mixture(source)
    split = "whole"
    own, _ = _document_hashes(source)
    for part in parse_mixture(calibration) if calibration is not None else []:
        theirs, read = _document_hashes(part.source)
        if own == theirs:
            split = "validation"
        elif common := len({*own} & {*read}):
            raise LeanError(
                f"{common:,} of the {len(own):,} documents of {source} are in the calibration text {part.source} too; "
                "evaluate on another text"
            )
    return split


def _refuse_mixture(source: str) -> None:
    if len(parse_mixture(source)) > 1:
        raise LeanError(f"{source!r} is a mixture, which is for training and calibration; score its texts one by one")


def _document_hashes(source: str) -> tuple[list[bytes], list[bytes]]:
    """Return the SHA-256 of every document, and of those that a calibration may read.

    The documents of files of tokens are the files, of which a calibration reads those to train on.
    """
    if (stored := stored_tokens(Path(source), 2**32)) is not None:
        read = dict.fromkeys(name for name, _, _ in stored.train_shards)
        every = read | dict.fromkeys(name for name, _, _ in stored.validation_shards)
        files = {name: hash_files(stored.directory / name).encode() for name in every}
        return [*files.values()], [files[name] for name in read]
    hashes = [hashlib.sha256(text.encode()).digest() for text in open_corpus(source).documents()]
    return hashes, hashes


def _held_out(
    documents: Iterator[tuple[str, np.ndarray, bool]], tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the documents held out for validation; of too few documents the tail that training holds out."""
    early, any_held_out = [], False
    for text, ids, held in documents:
        if held:
            any_held_out = True
            yield text, ids
        elif not any_held_out:
            early.append((text, ids))
    if any_held_out:
        return
    total = sum(len(ids) for _, ids in early)
    skipped = total - held_out(total)
    for text, ids in early:
        if skipped < len(ids):
            # Where the token before ends, since tokenizers may leave a token's leading space out of its offsets.
            offsets = plain(tokenizer).encode(text, add_special_tokens=False).offsets
            own = skipped - (framing(tokenizer).unpredicted is not None)
            yield text[offsets[own - 1][1] if own > 0 else 0 :], ids[skipped:]
        skipped = max(0, skipped - len(ids))
