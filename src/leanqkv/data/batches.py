"""The batch plan: the tokens or images of every training batch and every evaluation, drawn once, before any model.

P1 section 5 and P2 section 3.1: all models of a comparison see the same tokens in the same order and are evaluated on
the same tokens.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..environment import free_memory
from ..errors import LeanError
from ..files import make_directory, remove_leftovers, replacing

# Sequences of a text that are evaluated unless the user says otherwise.
DEFAULT_EVALUATION = 128


@dataclass(frozen=True)
class BatchPlan:
    """Start offsets of sequences in the token files, or indices of images.

    A sequence is the `context_length` tokens from its start, and its targets the same shifted by one.

    Attributes:
        train_starts: [steps, batch_size]; row i is optimizer step i.
        evaluation_starts: [sequences] into the validation tokens, or the test images; the same for every seed.
        sha256: of both arrays.
    """

    train_starts: np.ndarray
    evaluation_starts: np.ndarray
    sha256: str

    def record(self) -> dict[str, Any]:
        """Return a record's entry on the plan."""
        steps, batch_size = self.train_starts.shape
        return {
            "sha256": self.sha256,
            "steps": steps,
            "batch_size": batch_size,
            "evaluation_sequences": len(self.evaluation_starts),
        }


def check_plan(*, steps: int, batch_size: int, evaluation_sequences: int, different: int) -> None:
    """Check that a plan fits in memory, and that the data has what it evaluates, before anything is written.

    Args:
        different: how many different sequences or images there are to evaluate.

    Raises:
        LeanError: it does not.
    """
    needed, free = 8 * steps * batch_size, free_memory("cpu")
    if needed > free:
        raise LeanError(
            f"the plan of {steps:,} batches of {batch_size:,} takes {needed / 1e9:,.1f} GB of memory, and "
            f"{free / 1e9:,.1f} GB are free; choose fewer steps or smaller batches"
        )
    # Of a short text as many as by default are taken, some of them twice.
    if evaluation_sequences > (most := max(different, DEFAULT_EVALUATION)):
        raise LeanError(
            f"{evaluation_sequences:,} are to be evaluated, and the held-out data has {different:,} to choose from; "
            f"choose {most:,} or fewer"
        )


def make_batch_plan(
    *,
    train_tokens: int,
    validation_tokens: int,
    context_length: int,
    batch_size: int,
    steps: int,
    evaluation_sequences: int,
    seed: int,
) -> BatchPlan:
    """Draw the starts uniformly.

    Training starts depend on `seed`, and a plan with more steps begins with the same batches. Evaluation starts do not.
    """
    train = np.random.default_rng([seed, 0]).integers(0, train_tokens - context_length, (steps, batch_size))
    evaluation = np.random.default_rng([0, 1]).integers(0, validation_tokens - context_length, evaluation_sequences)
    return _plan(train, evaluation)


def make_image_plan(
    *, train_images: int, test_images: int, batch_size: int, steps: int, evaluation_images: int, seed: int
) -> BatchPlan:
    """Draw an order of all training images for every epoch and cut batches from it, across the ends of epochs too.

    The evaluation takes `evaluation_images` of the test split, the same for every seed.
    """
    random = np.random.default_rng([seed, 0])
    epochs = -(-steps * batch_size // train_images)
    order = np.concatenate([random.permutation(train_images) for _ in range(epochs)])
    train = order[: steps * batch_size].reshape(steps, batch_size)
    evaluation = np.sort(np.random.default_rng([0, 1]).permutation(test_images)[:evaluation_images])
    return _plan(train, evaluation)


def batch_plan(directory: Path, make: Callable[..., BatchPlan] = make_batch_plan, **sizes: int) -> BatchPlan:
    """Return the plan saved in `directory`, made and saved there on first use.

    The names of its files hold all of `sizes`, so that one directory serves plans for several sets of data.

    Args:
        make: `make_batch_plan` or `make_image_plan`; `sizes` are its arguments.

    Raises:
        LeanError: a saved plan of another shape than its name says, or with starts outside of the data.
    """
    if "train_images" in sizes:
        stem = "seed{seed}-{steps}x{batch_size}-of-{train_images}-images-{evaluation_images}-of-{test_images}"
        train_end, evaluation_end = sizes["train_images"], sizes["test_images"]
        evaluated = min(sizes["evaluation_images"], evaluation_end)
    else:
        stem = (
            "seed{seed}-{steps}x{batch_size}x{context_length}-of-{train_tokens}"
            "-{evaluation_sequences}-of-{validation_tokens}"
        )
        train_end, evaluation_end = (sizes[f"{s}_tokens"] - sizes["context_length"] for s in ("train", "validation"))
        evaluated = sizes["evaluation_sequences"]
    files = [directory / f"{stem.format(**sizes)}-{part}.npy" for part in ("train", "evaluation")]
    for file in files:  # another process may have made it while one that was killed was writing
        remove_leftovers(directory, file.name)
    if not all(file.exists() for file in files):
        plan = make(**sizes)
        make_directory(directory)
        for file, array in zip(files, (plan.train_starts, plan.evaluation_starts), strict=True):
            with replacing(file) as partial, partial.open("wb") as stream:
                np.save(stream, array)
    train, evaluation = (np.load(file, mmap_mode="r") for file in files)
    _check_starts(files[0], train, (sizes["steps"], sizes["batch_size"]), train_end)
    _check_starts(files[1], evaluation, (evaluated,), evaluation_end)
    return _plan(train, evaluation)


def _check_starts(file: Path, starts: np.ndarray, shape: tuple[int, ...], end: int) -> None:
    if starts.shape != shape or starts.min() < 0 or starts.max() >= end:
        raise LeanError(
            f"{file} is not the batch plan that its name says: it needs {shape} starts below {end:,}, found "
            f"{starts.shape} from {starts.min():,} to {starts.max():,}. Delete it, and it is made again"
        )


def _plan(train: np.ndarray, evaluation: np.ndarray) -> BatchPlan:
    digest = hashlib.sha256()
    for array in (train, evaluation):
        digest.update(np.ascontiguousarray(array, dtype="<i8").data)
    return BatchPlan(train, evaluation, digest.hexdigest())


def collate(tokens: np.ndarray, starts: Sequence[int] | np.ndarray, context_length: int) -> dict[str, torch.Tensor]:
    """Return one batch: `input_ids` and, one token on, `shift_labels`, both int64 [batch, context_length]."""
    windows = np.asarray(starts)[:, None] + np.arange(context_length + 1)
    batch = torch.from_numpy(tokens[windows].astype(np.int64))
    return {"input_ids": batch[:, :-1].contiguous(), "shift_labels": batch[:, 1:].contiguous()}
