"""`leanqkv eval`: the loss of a checkpoint on a text, or its accuracy on tasks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..environment import check_device
from ..errors import LeanError
from ..files import check_new_file
from .options import SOURCE, Device, MaxDocuments, TextField, check_left_out


@dataclass(frozen=True)
class TextScoring:
    """The text to score, and how.

    Options:
        data: Text to score, as --data of train takes it.
        split: whole: all of --data. validation: the part of it that train holds out.
        context_length: Tokens per window. Default: all positions.
        stride: Tokens between the starts of two windows; fewer give each token more context. Default: half a window.
        against: A second checkpoint, for example the source of a conversion: report the difference to it.
    """

    data: str | None = None
    split: str = "whole"
    context_length: int | None = None
    stride: int | None = None
    text_field: TextField = "text"
    max_documents: MaxDocuments = None
    against: Path | None = None


@dataclass(frozen=True)
class TaskScoring:
    """The tasks of lm-eval to score, and how.

    Options:
        tasks: Tasks of lm-eval between commas, or p3 for the nine of Wu et al. 2025.
        limit: With --tasks: score at most this many examples per task.
        include_path: With --tasks: folder of YAML files with tasks of your own.
    """

    tasks: str | None = None
    limit: int | None = None
    include_path: Path | None = None


def evaluate(
    source: Annotated[Path, typer.Argument(help=SOURCE)],
    text: TextScoring,
    tasks: TaskScoring,
    batch_size: int = 8,
    precision: str = "fp32",
    device: Device = None,
    out: Path | None = None,
) -> None:
    """Score a checkpoint on every token of a text, or on downstream tasks.

    On a text: loss in nats per token, perplexity, and bits per byte, which compares models of different tokenizers.
    Every token except the first is predicted exactly once, with up to a full window before it. Documents are joined by
    end-of-text tokens, which are predicted, too.

    leanqkv eval runs/a --data book.txt

    leanqkv eval runs/a --data stdlib --split validation --out a.json

    leanqkv eval hf/skipv1 --against hf/llama --data book.txt

    leanqkv eval hf/llama --tasks p3

    Options:
        batch_size: Windows, or task requests, per batch.
        precision: fp32 or bf16, with +sdpa or +eager.
        out: New JSON file for the record: figures, hashes, hardware, versions.
    """
    if (text.data is None) == (tasks.tasks is None):
        raise LeanError("give a text to score with --data, or tasks with --tasks: one of the two")
    if tasks.tasks is None:
        check_left_out(tasks, "`tasks`")
    else:
        check_left_out(text, "`data`")
    if out is not None:
        check_new_file(out)
    from .scoring import score

    score(source, text, tasks, batch_size, precision, check_device(device), out)
