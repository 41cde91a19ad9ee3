"""`python -m experiments.analysis`: what is inside trained models, side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from leanqkv.commands.compare import learning_rates
from leanqkv.commands.options import DataOptions, TextOptions, prepare, publish
from leanqkv.data.token_files import TokenData, stored_tokens
from leanqkv.environment import check_device
from leanqkv.errors import LeanError
from leanqkv.files import check_place
from leanqkv.progress import console, progress_bar
from leanqkv.report.page import written

from .page import KIND
from .record import Settings, analyze_models
from .subjects import common_context, open_subjects, shared_tokenizer


def analysis(
    out: Path,
    text: TextOptions,
    models: Annotated[
        list[Path] | None,
        typer.Argument(metavar="DIR...", help="Directories of causal language models.", show_default=False),
    ] = None,
    samples: int = 64,
    context_length: int | None = None,
    probe_steps: int = 500,
    probe_batch_size: int = 2,
    probe_rates: str = "1e-4,2e-4,3e-4",
    device: str | None = None,
) -> None:
    """Analyze models: linear probes, similarity of heads and tokens, copying heads, singular values.

    Models of one vocabulary and tokenizer are compared on the same text: the part of --data that training holds out,
    and for the probes the rest of it. Models that differ only in their seed are averaged. The probes take nearly all of
    the time; --probe-steps 0 leaves them out. If a run's directory still has its checkpoints, their weights and
    attention logits are measured, too. Without models, table and page of an earlier --out are made again.

    python -m experiments.analysis runs/baseline runs/skipv1 --out runs/analysis

    python -m experiments.analysis runs/baseline runs/skipv1 --data FILE --probe-steps 4000 --samples 256 --out runs/n

    Options:
        out: New directory for analysis.json, table.md and report.html.
        samples: Sequences of held-out text to analyze, and as many of repeated random tokens.
        probe_steps: Training steps of the probes. 0: no probes. The paper uses 4000.
        probe_batch_size: Sequences per step of the probes.
        probe_rates: Learning rates, separated by commas; every layer's probe gets its best one.
    """
    if not models:
        if not (out / KIND.file).exists():
            raise LeanError(f"name the directories of models; {out} holds no {KIND.file} to draw again without them")
        page = KIND.write(out)
        console.print(KIND.show(out))
        console.print(written(page), soft_wrap=True)
        return
    check_place(out, *models)
    if out.exists() and any(out.iterdir()):
        raise LeanError(f"{out} is not empty, and nothing is ever overwritten; choose another --out")
    rates = tuple(sorted(learning_rates("--probe-rates", probe_rates, below=1)))
    sizes = (samples, probe_steps, probe_batch_size, rates)
    _analyze(models, out, text, context_length, sizes, check_device(device))


def _analyze(
    models: Sequence[Path],
    out: Path,
    text: TextOptions,
    context_length: int | None,
    sizes: tuple[int, int, int, tuple[float, ...]],
    device: str,
) -> None:
    """Analyze models on one text, and write record and page into `out`.

    Args:
        sizes: samples, steps, batch size and learning rates of the probes, as in `Settings`.
    """
    subjects = open_subjects(models)
    settings = Settings(common_context(subjects, context_length), *sizes)
    config = subjects[0].opened.config
    tokenized = text.data is not None and stored_tokens(Path(text.data), config.vocab_size) is not None
    tokenizer = None if tokenized else str(shared_tokenizer(subjects))
    data = prepare(DataOptions(**vars(text), tokenizer=tokenizer), [config])
    assert isinstance(data, TokenData)
    with progress_bar("analyzing") as bar:
        record = analyze_models(subjects, data, settings, device, bar.show)
    publish(KIND, out, record)
