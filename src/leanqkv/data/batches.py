"""The batch plan: the sequences of every training batch and every evaluation, drawn once, before any model.

P1 section 5 and P2 section 3.1: all models of a comparison see the same tokens in the same order and are evaluated on
the same tokens.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import LeanError
from ..files import make_directory, read_json, remove_leftovers, write_json
from .token_files import Tokens

# Sequences of a text that are evaluated unless the user says otherwise.
DEFAULT_EVALUATION = 128
# The label of a token that is not predicted, as PyTorch's cross-entropy has it.
IGNORED = -100


# How many starts are drawn at a time, and the most of a plan: at 2,048 tokens each nine trillion, drawn in a minute.
BLOCK = 2**18
MOST_STARTS = 2**32
# Where sequences begin in the tokens.
Starts = Sequence[int] | np.ndarray


class Draws(Sequence[int]):
    """Random numbers that are drawn again whenever they are read, so that any number of them takes kilobytes.

    Kept are the generator's states, one for every block of numbers, and the block that was read last.
    """

    def __init__(
        self, random: np.random.Generator, draw: Callable[[np.random.Generator], np.ndarray], block: int, count: int
    ):
        """Draw nothing yet.

        Args:
            draw: returns the next `block` numbers, int64 [block].
            count: of all numbers.
        """
        self._random, self._draw, self._block, self._count = random, draw, block, count
        self._states = [random.bit_generator.state]
        self._latest = (-1, np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        """Return the number at an index, or those of a slice without a step, int64."""
        if isinstance(index, slice):
            begin, end, step = index.indices(self._count)
            assert step == 1
            return np.concatenate([np.empty(0, dtype=np.int64), *self.pieces(begin, end)])
        if not 0 <= index < self._count:
            raise IndexError(f"there are {self._count} numbers, not one at {index}")
        return int(self._drawn(index // self._block)[index % self._block])

    def _drawn(self, number: int) -> np.ndarray:
        if self._latest[0] != number:
            for block in range(min(number, len(self._states) - 1), number + 1):
                self._random.bit_generator.state = self._states[block]
                self._latest = (block, self._draw(self._random))
                if block + 1 == len(self._states):
                    self._states.append(self._random.bit_generator.state)
        return self._latest[1]

    def pieces(self, begin: int, end: int) -> Iterator[np.ndarray]:
        """Yield the numbers from one index to another, a block at a time."""
        while begin < end:
            number, first = divmod(begin, self._block)
            yield self._drawn(number)[first : first + end - begin]
            begin = (number + 1) * self._block


@dataclass(frozen=True)
class BatchPlan:
    """Start offsets of sequences in the token files, or indices of images.

    A sequence is the `context_length` tokens from its start, and its targets the same shifted by one.

    Attributes:
        train_starts: [steps * batch_size], batch after batch, drawn when they are read.
        evaluation_starts: [sequences] into the validation tokens, or the test images; the same for every seed.
        sha256: of both, and of the targets.
        targets: which tokens are predicted, where it is not every next one.
    """

    train_starts: Draws
    batch_size: int
    evaluation_starts: np.ndarray
    sha256: str
    targets: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def drawn(
        cls,
        train: Draws,
        batch_size: int,
        evaluation: np.ndarray,
        targets: Mapping[str, Any] | None = None,
        samples: Iterable[np.ndarray] = (),
    ) -> "BatchPlan":
        """Return the plan of these starts; they are read once, for its hash.

        Args:
            samples: random numbers of the targets, for the hash: another version of NumPy may draw others.
        """
        digest = hashlib.sha256()
        for array in chain(train.pieces(0, len(train)), [evaluation]):
            digest.update(np.ascontiguousarray(array, dtype="<i8").data)
        if targets:
            digest.update(json.dumps(targets, sort_keys=True).encode())
        for array in samples:
            digest.update(np.ascontiguousarray(array, dtype="<f8").data)
        return cls(train, batch_size, evaluation, digest.hexdigest(), targets or {})

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return len(self.train_starts) // self.batch_size

    def batch(self, step: int) -> np.ndarray:
        """Return the starts of an optimizer step, [batch_size]; the first step is 0."""
        return self.train_starts[step * self.batch_size : (step + 1) * self.batch_size]

    def record(self) -> dict[str, Any]:
        """Return a record's entry on the plan."""
        return {
            "sha256": self.sha256,
            "steps": self.steps,
            "batch_size": self.batch_size,
            "evaluation_sequences": len(self.evaluation_starts),
            **({"targets": dict(self.targets)} if self.targets else {}),
        }


def check_plan(*, steps: int, batch_size: int, evaluation_sequences: int, different: int) -> None:
    """Check that a plan can be drawn, and that the data has what it evaluates, before anything is written.

    Args:
        different: how many different sequences or images there are to evaluate.

    Raises:
        LeanError: it does not.
    """
    if (total := steps * batch_size) > MOST_STARTS:
        raise LeanError(
            f"{steps:,} batches of {batch_size:,} are {total:,} sequences, and a plan has {MOST_STARTS:,} at most; "
            "choose fewer steps or smaller batches"
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
    targets: Mapping[str, Any] | None = None,
    samples: Iterable[np.ndarray] = (),
) -> BatchPlan:
    """Draw the starts uniformly; `targets` and `samples` are as `BatchPlan.drawn` takes them.

    Training starts depend on `seed`, and a plan with more steps begins with the same batches. Evaluation starts do not.
    """

    def draw(random: np.random.Generator) -> np.ndarray:
        return random.integers(0, train_tokens - context_length, BLOCK)

    train = Draws(np.random.default_rng([seed, 0]), draw, BLOCK, steps * batch_size)
    evaluation = np.random.default_rng([0, 1]).integers(0, validation_tokens - context_length, evaluation_sequences)
    return BatchPlan.drawn(train, batch_size, evaluation, targets, samples)


def batch_plan(
    directory: Path, targets: Mapping[str, Any] | None = None, samples: Iterable[np.ndarray] = (), **sizes: int
) -> BatchPlan:
    """Return the plan of these arguments of `make_batch_plan`. Raises as `kept_plan`."""
    of = "seed{seed}-{steps}x{batch_size}x{context_length}-of-{train_tokens}"
    name = f"{of}-{{evaluation_sequences}}-of-{{validation_tokens}}".format(**sizes)
    kind = f"-{targets['kind']}" if targets else ""
    return kept_plan(directory / f"{name}{kind}.json", make_batch_plan(**sizes, targets=targets, samples=samples))


def kept_plan(file: Path, plan: BatchPlan) -> BatchPlan:
    """Return a plan whose hash is written to `file` on first use.

    The name of the file holds all of its sizes, so that one directory serves plans for several sets of data.

    Raises:
        LeanError: the plan is not the one of first use, since this version of NumPy draws other numbers.
    """
    remove_leftovers(file)  # another process may have made it while one that was killed was writing
    if not file.exists():
        make_directory(file.parent)
        write_json(file, {"sha256": plan.sha256, "numpy": np.__version__})
    about = read_json(file)
    if about.get("sha256") != plan.sha256:
        raise LeanError(
            f"{file} was written with NumPy {about.get('numpy')}, and NumPy {np.__version__} draws other batches; go "
            "on with that version, or choose another `out`"
        )
    return plan


def collate(tokens: Tokens, starts: Starts, context_length: int) -> dict[str, torch.Tensor]:
    """Return one batch: `input_ids` and, one token on, `shift_labels`, both int64 [batch, context_length].

    Where the tokenizer begins a text with a token, every sequence begins with it, in place of its own first token, and
    the label where a text begins is IGNORED: the token is given, and no model is meant to predict it. Then there are
    `labels` too, for transformers' Trainer, which counts the targets of a whole batch only where there are some.

    Args:
        tokens: an array, or what gives slices as one does.
    """
    rows = np.stack([tokens[start : start + context_length + 1] for start in np.asarray(starts).tolist()])
    windows = torch.from_numpy(rows.astype(np.int64))
    inputs, labels = windows[:, :-1].clone(), windows[:, 1:].clone()  # one sequence would be given views of itself
    batch = {"input_ids": inputs, "shift_labels": labels}
    if (around := getattr(tokens, "around", None)) is not None and around.begin is not None:
        inputs[:, 0] = around.begin
        if around.unpredicted is not None:
            labels[labels == around.unpredicted] = IGNORED
            batch["labels"] = inputs.masked_fill(inputs == around.unpredicted, IGNORED)
    return batch
