"""`leanqkv analyze`: what is inside trained models, side by side."""

from pathlib import Path
from typing import Annotated

import typer

from ..environment import check_device, default_device
from ..errors import LeanError
from ..files import check_place
from .compare import learning_rates
from .options import ContextLength, Device, TextOptions


def analyze(
    models: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Directories of causal language models.")],
    out: Path,
    text: TextOptions,
    samples: int = 64,
    context_length: ContextLength = None,
    probe_steps: int = 500,
    probe_batch_size: int = 2,
    probe_rates: str = "1e-4,2e-4,3e-4",
    device: Device = None,
) -> None:
    """Analyze models: linear probes, similarity of heads and tokens, copying heads, singular values.

    Models of one vocabulary and tokenizer are compared on the same text: the part of --data that training holds out,
    and for the probes the rest of it. Models that differ only in their seed are averaged. The probes take nearly all of
    the time; --probe-steps 0 leaves them out. If a run's directory still has its checkpoints, their weights and
    attention logits are measured, too.

    leanqkv analyze runs/baseline runs/skipv1 --out runs/analysis

    leanqkv analyze runs/baseline runs/skipv1 --data FILE --probe-steps 4000 --samples 256 --out runs/analysis

    Options:
        out: New directory for analysis.json, table.md and report.html.
        samples: Sequences of held-out text to analyze, and as many of repeated random tokens.
        probe_steps: Training steps of the probes. 0: no probes. The paper uses 4000.
        probe_batch_size: Sequences per step of the probes.
        probe_rates: Learning rates, separated by commas; every layer's probe gets its best one.
    """
    check_place(out, *models)
    if out.exists() and any(out.iterdir()):
        raise LeanError(f"{out} is not empty, and nothing is ever overwritten; choose another --out")
    rates = tuple(sorted(learning_rates("--probe-rates", probe_rates, below=1)))
    from .analyzing import analyze_and_report

    sizes = (samples, probe_steps, probe_batch_size, rates)
    analyze_and_report(models, out, text, context_length, sizes, check_device(device or default_device()))
