"""`leanqkv eval`: what a checkpoint is worth, on a text or on tasks."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..progress import progress_bar
from .options import SOURCE, Device, MaxDocuments, TextField, console

if TYPE_CHECKING:
    from ..checkpoints.open import Checkpoint
    from ..train import Precision


def evaluate(
    source: Annotated[Path, typer.Argument(help=SOURCE)],
    data: Annotated[
        str | None,
        typer.Option(help="Text to score, as --data of train takes it; stdlib is the default one there."),
    ] = None,
    split: Annotated[
        str, typer.Option(help="whole: all of --data. validation: the part of it that train holds out.")
    ] = "whole",
    context_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per window. Default: all positions.", show_default=False)
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens from one window to the next; fewer give each token more context. Default: half a window.",
        ),
    ] = None,
    text_field: TextField = "text",
    max_documents: MaxDocuments = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of lm-eval between commas, or p3 for the nine of Wu et al. 2025.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --tasks: only so many examples of each.")] = None,
    include_path: Annotated[
        Path | None, typer.Option(help="With --tasks: folder of YAML files with tasks of your own.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows, or requests of tasks, at a time.")] = 8,
    precision: Annotated[str, typer.Option(help="fp32 or bf16, with +sdpa or +eager.")] = "fp32",
    device: Device = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON file for the record: figures, hashes, hardware, versions.")
    ] = None,
) -> None:
    """Score a checkpoint on every token of a text, or on downstream tasks.

    On a text: loss in nats per token, perplexity, and bits per byte, which compares models of different tokenizers.
    Every token but the first is predicted once, with up to a full window before it; documents follow one another with
    an end-of-text token between them, which is predicted, too.

    leanqkv eval runs/a --data book.txt

    leanqkv eval runs/a --data stdlib --split validation --out a.json

    leanqkv eval hf/llama --tasks p3
    """
    from ..checkpoints.open import open_causal_lm
    from ..environment import check_device, default_device
    from ..errors import LeanError
    from ..files import RECORD_FORMAT, write_json

    if (data is None) == (tasks is None):
        raise LeanError("give a text to score with --data, or tasks with --tasks: one of the two")
    of_text = {
        "--split": split != "whole",
        "--context-length": context_length is not None,
        "--stride": stride is not None,
        "--text-field": text_field != "text",
        "--max-documents": max_documents is not None,
    }
    of_tasks = {"--limit": limit is not None, "--include-path": include_path is not None}
    for option, given in (of_text if data is None else of_tasks).items():
        if given:
            raise LeanError(f"{option} goes with {'--data' if data is None else '--tasks'}; leave it out")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise LeanError(f"--out {out} cannot be written: give a file, in a folder that exists")
    arithmetic = _precision(precision)
    device = check_device(device or default_device())
    opened = open_causal_lm(source)
    started = time.perf_counter()
    if data is not None:
        figures = _on_text(
            opened, arithmetic, device, batch_size, data, split, context_length, stride, text_field, max_documents
        )
    else:
        assert tasks is not None
        names = [name.strip() for name in tasks.split(",")]
        figures = _on_tasks(opened, arithmetic, device, batch_size, names, limit, include_path)
    if out is not None:
        about = _about(opened, arithmetic, device)
        seconds = round(time.perf_counter() - started, 2)
        write_json(out, {"record": RECORD_FORMAT, **about, "batch_size": batch_size, **figures, "seconds": seconds})
        console.print(f"{out}: the record", highlight=False)


def _on_text(
    opened: "Checkpoint",
    arithmetic: "Precision",
    device: str,
    batch_size: int,
    data: str,
    split: str,
    context_length: int | None,
    stride: int | None,
    text_field: str,
    max_documents: int | None,
) -> dict[str, Any]:
    """Scores a text, prints the figures, and returns what the record says of them."""
    from ..data import evaluation_text
    from ..errors import LeanError
    from ..evaluate import loss_figures, strided_losses, strided_windows

    config = opened.config
    context = context_length or config.max_position_embeddings
    assert context is not None and config.max_position_embeddings is not None
    if config.position_embedding_type == "learned" and context > config.max_position_embeddings:
        raise LeanError(
            f"--context-length {context} is longer than the {config.max_position_embeddings} positions of the model"
        )
    stride = stride or max(1, context // 2)
    strided_windows(2, context, stride)  # raises before anything is read
    with progress_bar("reading the text") as bar:
        text = evaluation_text(
            data,
            tokenizer=opened.directory,
            vocab_size=config.vocab_size,
            split=split,
            text_field=text_field,
            max_documents=max_documents,
            progress=lambda stage, done: bar.describe(f"{stage}, {done:,} documents"),
        )
    size = "" if text.bytes is None else f", {text.bytes:,} bytes"
    console.print(f"text: {text.description}, {split}; {len(text.tokens):,} tokens{size}", highlight=False)
    model = _model(opened, arithmetic, device)
    with progress_bar("tokens") as progress:
        losses = strided_losses(
            model,
            text.tokens,
            context_length=context,
            stride=stride,
            batch_size=batch_size,
            autocast=lambda: arithmetic.autocast(device),
            progress=progress,
        )
    figures = loss_figures(losses, text.bytes)
    bits = "" if text.bytes is None else f", {figures['bits_per_byte']:.4f} bits per byte"
    console.print(
        f"loss {figures['loss']:.4f} nats per token, perplexity {figures['perplexity']:.4g}{bits}", highlight=False
    )
    return {"text": text.record(), "context_length": context, "stride": stride, "figures": figures}


def _on_tasks(
    opened: "Checkpoint",
    arithmetic: "Precision",
    device: str,
    batch_size: int,
    names: list[str],
    limit: int | None,
    include_path: Path | None,
) -> dict[str, Any]:
    """Runs the tasks, prints their figures, and returns what the record says of them."""
    from importlib.metadata import version

    import torch

    from ..data.prepare import fitting_tokenizer
    from ..evaluate.harness import load_tasks, mean_accuracy, task_figures

    with progress_bar("loading the tasks"):
        tasks = load_tasks(names, include_path)
    tokenizer = fitting_tokenizer(opened.directory, opened.config.vocab_size)
    figures = task_figures(
        _model(opened, arithmetic, device),
        tokenizer,
        tasks,
        limit=limit,
        batch_size=batch_size,
        autocast_dtype=torch.bfloat16 if arithmetic.dtype == "bf16" else None,
    )
    console.print(_task_table(figures))
    mean = mean_accuracy(figures)
    if mean is not None and len(figures) > 1:
        console.print(f"mean acc: {mean:.4f} over {len(figures)} tasks", highlight=False)
    return {"tasks": figures, "mean_acc": mean, "limit": limit, "lm_eval": version("lm_eval")}


def _task_table(figures: dict[str, dict[str, Any]]) -> Table:
    """Metrics as columns, each with its standard error."""
    about = ("examples", "of", "shots", "version")
    found = dict.fromkeys(name for values in figures.values() for name in values)
    metrics = [name for name in found if name not in about and not name.endswith("_stderr")]
    table = Table("task", "examples", "shots", *metrics)
    for task, values in figures.items():
        cells = ["" if values[name] is None else str(values[name]) for name in ("examples", "shots")]
        for name in metrics:
            error = values.get(f"{name}_stderr")
            cells.append("" if name not in values else f"{values[name]:.4f}" + (f" ± {error:.4f}" if error else ""))
        table.add_row(task, *cells)
    return table


def _precision(asked: str) -> "Precision":
    from ..errors import LeanError
    from ..train import parse_precision

    chosen = parse_precision(asked)
    if chosen is None or chosen.compiled:
        raise LeanError(f"--precision {asked} is for training; here it is fp32 or bf16, with +sdpa or +eager")
    return chosen


def _model(opened: "Checkpoint", arithmetic: "Precision", device: str) -> Any:
    from ..checkpoints.open import causal_lm

    with progress_bar("reading the weights"):
        model: Any = causal_lm(opened)
        arithmetic.apply(model)
        return model.to(device)


def _about(opened: "Checkpoint", arithmetic: "Precision", device: str) -> dict[str, Any]:
    """What a record says about the model and the machine; no path of this machine."""
    from ..checkpoints.tensors import weights_hash
    from ..environment import git_commit, hardware, versions

    return {
        "role": "evaluation",
        "name": opened.directory.resolve().name,
        "config": opened.config.as_overrides(),
        "weights_sha256": weights_hash(opened.directory),
        "precision": str(arithmetic),
        "hardware": hardware(device),
        "versions": versions(),
        "git_commit": git_commit(),
    }
