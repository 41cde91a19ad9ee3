"""The models to analyze, and what they must have in common: vocabulary, tokenizer and context."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from leanqkv.checkpoints.gguf_format import is_gguf
from leanqkv.checkpoints.open import Checkpoint, open_causal_lm
from leanqkv.checkpoints.tokenizer import load_tokenizer
from leanqkv.errors import LeanError
from leanqkv.records import WHOLE, read_record

from .similarity import BUCKETS

# Of the record.json beside a model.
RUN = {"name?": str, "seed?": (WHOLE,), "initial_sha256?": (str,)}


@dataclass(frozen=True)
class Subject:
    """A model to analyze. `label` is its directory's name; `name` and `seed` are those of its run, where it has one;
    `from_seed` whether the run started from nothing but the seed."""

    label: str
    name: str
    seed: int | None
    from_seed: bool
    opened: Checkpoint


def open_subjects(directories: Sequence[Path]) -> list[Subject]:
    """Open the directories; no weights are read yet.

    Raises:
        LeanError: not a checkpoint, or of a model that is not a causal language model; two directories of one name;
            models of different vocabularies.
    """
    subjects: list[Subject] = []
    for directory in directories:
        if not (directory.is_dir() or is_gguf(directory)):
            raise LeanError(f"there is no directory {directory}")
        opened = open_causal_lm(directory)
        if opened.config.mask_type != "causal":
            raise LeanError(
                f"{directory} holds a model that attends to prefixes (mask_type is {opened.config.mask_type!r}); only "
                "causal models can be analyzed"
            )
        label = directory.resolve().name
        if label in [other.label for other in subjects]:
            raise LeanError(f"two of the directories are called {label}; every model needs a name of its own")
        if subjects and (size := subjects[0].opened.config.vocab_size) != opened.config.vocab_size:
            raise LeanError(
                f"{subjects[0].label} has a vocabulary of {size} tokens, {label} one of {opened.config.vocab_size}; "
                "models are analyzed on the same tokens"
            )
        file = directory / "record.json"
        run = read_record(file, RUN, "remove it to analyze the model alone") if file.exists() else {}
        seed = run.get("seed")
        from_seed = seed is not None and run.get("initial_sha256") is None
        subjects.append(Subject(label, run.get("name", label), seed, from_seed, opened))
    return subjects


def shared_tokenizer(subjects: Sequence[Subject]) -> Path:
    """Return the directory of the tokenizer that all models have.

    Raises:
        LeanError: none, or different ones.
    """
    contents = {}
    for subject in subjects:
        contents[subject.label] = load_tokenizer(subject.opened.directory).backend_tokenizer.to_str()
    first = subjects[0]
    for label, content in contents.items():
        if content != contents[first.label]:
            raise LeanError(
                f"{first.label} and {label} have different tokenizers; models are analyzed on the same tokens"
            )
    return first.opened.directory


def common_context(subjects: Sequence[Subject], length: int | None) -> int:
    """Return `length`, or the fewest positions that a model has.

    Raises:
        LeanError: longer than the positions that a model has learned, or too short to analyze.
    """
    fewest = min(subjects, key=lambda subject: subject.opened.config.max_position_embeddings or 0)
    positions = fewest.opened.config.max_position_embeddings
    assert positions is not None
    learned = any(subject.opened.config.position_embedding_type == "learned" for subject in subjects)
    if length is not None and length > positions and learned:
        raise LeanError(f"`context_length={length}` is longer than the {positions} positions of {fewest.label}")
    context = length or positions
    if context < 2 * BUCKETS:
        raise LeanError(f"sequences of {context} tokens are too short to analyze; at least {2 * BUCKETS} are needed")
    return context
