"""`leanqkv eval`: the loss of a checkpoint on a text, or its accuracy on tasks."""

import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from ..environment import check_device
from ..errors import LeanError
from ..files import RECORD_FORMAT, check_new_file, write_json
from .options import SOURCE, Device, MaxDocuments, TextField, console, option_groups


@dataclass(frozen=True)
class TextScoring:
    """The text to score, and how."""

    data: Annotated[
        str | None,
        typer.Option(help="Text to score, as --data of train takes it; stdlib is the default one there."),
    ] = None
    split: Annotated[
        str, typer.Option(help="whole: all of --data. validation: the part of it that train holds out.")
    ] = "whole"
    context_length: Annotated[
        int | None, typer.Option(help="Tokens per window. Default: all positions.", show_default=False)
    ] = None
    stride: Annotated[
        int | None,
        typer.Option(
            help="Tokens from one window to the next; fewer give each token more context. Default: half a window.",
        ),
    ] = None
    text_field: TextField = "text"
    max_documents: MaxDocuments = None
    against: Annotated[
        Path | None,
        typer.Option(help="A second checkpoint, such as the source of a conversion: print what the first one loses."),
    ] = None


@dataclass(frozen=True)
class TaskScoring:
    """The tasks of lm-eval to score, and how."""

    tasks: Annotated[
        str | None, typer.Option(help="Tasks of lm-eval between commas, or p3 for the nine of Wu et al. 2025.")
    ] = None
    limit: Annotated[int | None, typer.Option(help="With --tasks: score so many examples of each.")] = None
    include_path: Annotated[
        Path | None, typer.Option(help="With --tasks: folder of YAML files with tasks of your own.")
    ] = None


@option_groups
def evaluate(
    source: Annotated[Path, typer.Argument(help=SOURCE)],
    text: TextScoring,
    tasks: TaskScoring,
    batch_size: Annotated[int, typer.Option(help="Windows, or requests of tasks, at a time.")] = 8,
    precision: Annotated[str, typer.Option(help="fp32 or bf16, with +sdpa or +eager.")] = "fp32",
    device: Device = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON file for the record: figures, hashes, hardware, versions.")
    ] = None,
) -> None:
    """Score a checkpoint on every token of a text, or on downstream tasks.

    On a text: loss in nats per token, perplexity, and bits per byte, which compares models of different tokenizers.
    Every token except the first is predicted exactly once, with up to a full window before it. Documents are joined by
    end-of-text tokens, which are predicted, too.

    leanqkv eval runs/a --data book.txt

    leanqkv eval runs/a --data stdlib --split validation --out a.json

    leanqkv eval hf/skipv1 --against hf/llama --data book.txt

    leanqkv eval hf/llama --tasks p3
    """
    if (text.data is None) == (tasks.tasks is None):
        raise LeanError("give a text to score with --data, or tasks with --tasks: one of the two")
    _refuse(tasks if tasks.tasks is None else text, "--tasks" if tasks.tasks is None else "--data")
    if out is not None:
        check_new_file(out)
    from ..checkpoints.open import open_causal_lm
    from .scoring import Scored, parsed_precision, score_tasks, score_text

    arithmetic = parsed_precision(precision)
    device = check_device(device)
    scored = Scored(open_causal_lm(source), arithmetic, device, batch_size)
    started = time.perf_counter()
    figures = score_text(scored, text) if tasks.tasks is None else score_tasks(scored, tasks)
    if out is not None:
        seconds = round(time.perf_counter() - started, 2)
        write_json(out, {"record": RECORD_FORMAT, **scored.record(), **figures, "seconds": seconds})
        console.print(f"{out}: the record", highlight=False)


def _refuse(options: TextScoring | TaskScoring, leader: str) -> None:
    """Refuse options of the kind of scoring that was not asked for."""
    for field in fields(options):
        if getattr(options, field.name) != field.default:
            raise LeanError(f"--{field.name.replace('_', '-')} goes with {leader}; leave it out")
