"""`python -m experiments.demo`: the phases, one after the other."""

import time
from pathlib import Path
from typing import Any

import torch

from leanqkv.commands.compare import train_with_display
from leanqkv.commands.options import DataOptions, prepare
from leanqkv.data.batches import check_plan
from leanqkv.environment import check_device
from leanqkv.errors import LeanError
from leanqkv.job import Job, check_out
from leanqkv.presets import preset
from leanqkv.progress import console, progress_bar
from leanqkv.report import comparison_page
from leanqkv.report.page import written
from leanqkv.train.processes import in_torchrun

from . import phases
from .page import KIND, SCALE
from .phases import PHASES


def demo(out: Path, steps: int = 400, device: str | None = None) -> None:
    """Run every tool on one small model and write one page: one to two minutes on two CPU cores.

    Trains a baseline and a SkipV1 model on the same batches, converts the trained baseline to a smaller KV cache,
    removes weights from it exactly, scores all of them on held-out text, and decodes with each.

    python -m experiments.demo --out runs/demo

    Options:
        out: Directory of the demo. Rerun to resume.
        steps: Optimizer steps of both models.
    """
    check_out(out, "demo")
    if in_torchrun():
        raise LeanError("a demo trains its small models in processes of its own; start it without torchrun")
    device = check_device(device)
    started = time.monotonic()
    if device == "cpu":
        torch.set_num_threads(1)  # as the runs do: models this small are slower on several threads
    settings = phases.Settings(steps=steps)
    sequences = settings.evaluation_sequences
    check_plan(steps=steps, batch_size=settings.batch_size, evaluation_sequences=sequences, different=sequences)
    job = phases.claim(out, settings, device)
    console.print(SCALE)
    if any(phase not in job.content for phase in PHASES):
        _run_phases(job, settings, device)
    page = KIND.write(out)
    console.print(KIND.show(out))
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    console.print(f"done in {minutes}:{seconds:02} min")
    console.print(written(page), soft_wrap=True)


def _run_phases(job: Job, settings: phases.Settings, device: str) -> None:
    """Run the phases that the record does not have yet; it is stored after each."""
    data: Any = prepare(DataOptions(settings.data, max_documents=settings.documents), [preset(settings.baseline)])
    out, record = job.directory, job.content
    phases.check_data(record, data)

    def begin(phase: str, title: str) -> bool:
        console.print(f"{PHASES.index(phase) + 1}/{len(PHASES)} {title}", style="bold")
        return phase not in record

    models = f"{settings.baseline} and {settings.variant}"
    if begin("training", f"train {models} on the same batches, {settings.steps:,} steps"):
        # bfloat16 is emulated on many CPUs, and timing what is faster takes as long as these runs.
        train_with_display(settings.comparison(), data, out / phases.COMPARISON, precision="fp32", device=device)
        comparison_page.KIND.write(out / phases.COMPARISON)
        job.write(training=phases.training_results(out, settings, data))
    if begin("conversion", f"convert the trained {settings.baseline} to a smaller KV cache"):
        with progress_bar("passes over the calibration text") as bar:
            job.write(conversion=phases.convert(out, settings, data, bar))
    before, after = record["conversion"]["kv_bytes_per_token_bf16"]
    console.print(f"{before:,} -> {after:,} bytes of KV cache per token ({after / before - 1:+.1%})")
    if begin("elimination", f"remove weights from the trained {settings.baseline} exactly, and verify"):
        with progress_bar("solving") as bar:
            job.write(elimination=phases.eliminate(out, settings, data, bar.describe))
    certificate = record["elimination"]["certificate"]
    before, after = certificate["parameters"].values()
    console.print(
        f"{before:,} -> {after:,} parameters ({after / before - 1:+.1%}); logits differ by "
        f"{certificate['exact']['relative']:.0e} in float64, before rounding",
        soft_wrap=True,
    )
    if begin("evaluation", "score all four models on the same held-out text"):
        with progress_bar("models scored") as bar:
            job.write(evaluation=phases.evaluate(out, settings, data, device, bar))
    if begin("decoding", "decode the same prompt with each"):
        with progress_bar("continuations") as bar:
            job.write(decoding=phases.decode(out, settings, data, device, bar))
