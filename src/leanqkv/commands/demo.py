"""`leanqkv demo`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..environment import check_device, default_device
from ..files import read_json
from ..job import check_out
from ..progress import progress_bar
from .compare import train_with_display
from .options import DataOptions, Device, console, prepare

if TYPE_CHECKING:
    from ..demo.phases import Settings
    from ..job import Job


def demo(
    out: Annotated[Path, typer.Option(help="Directory of the demo; goes on where an earlier start left off.")],
    steps: Annotated[int, typer.Option(help="Optimizer steps of both models.")] = 400,
    device: Device = None,
) -> None:
    """Show every tool on one small model, and write one page about it: one to two minutes on two CPU cores.

    Trains a baseline and a SkipV1 model on the same batches, converts the trained baseline to a smaller KV cache,
    removes weights from it exactly, scores all of them on held-out text, and decodes with each.

    leanqkv demo --out runs/demo
    """
    started = time.monotonic()
    check_out(out, "demo")
    import torch

    from ..data import check_plan
    from ..demo.phases import PHASES, Settings, claim
    from ..report.demo import RECORD, SCALE, terminal_table, write_page

    device = check_device(device or default_device())
    if device == "cpu":
        torch.set_num_threads(1)  # as the runs do: models this small are slower on several threads
    settings = Settings(steps=steps)
    sequences = settings.evaluation_sequences
    check_plan(steps=steps, batch_size=settings.batch_size, evaluation_sequences=sequences, different=sequences)
    job = claim(out, settings, device)
    console.print(SCALE, highlight=False)
    if any(phase not in job.content for phase in PHASES):
        _run_phases(job, settings, device)
    page = write_page(out)
    console.print(terminal_table(read_json(out / RECORD)))
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    console.print(f"done in {minutes}:{seconds:02} min", highlight=False)
    console.print(f"report: {page}", highlight=False, soft_wrap=True)


def _run_phases(job: "Job", settings: "Settings", device: str) -> None:
    """Run the phases that the record does not have yet; it is stored after each."""
    from ..demo import phases
    from ..presets import preset
    from ..report.comparison_page import write_report

    data: Any = prepare(DataOptions(settings.data, max_documents=settings.documents), [preset(settings.baseline)])
    out, record = job.directory, job.content
    phases.check_data(record, data)

    def begin(phase: str, title: str) -> bool:
        console.print(f"{phases.PHASES.index(phase) + 1}/{len(phases.PHASES)} {title}", highlight=False, style="bold")
        return phase not in record

    models = f"{settings.baseline} and {settings.variant}"
    if begin("training", f"train {models} on the same batches, {settings.steps:,} steps"):
        # bfloat16 is emulated on many CPUs, and timing what is faster takes as long as these runs.
        train_with_display(settings.comparison(), data, out / phases.COMPARISON, precision="fp32", device=device)
        write_report(out / phases.COMPARISON)
        job.write(training=phases.training_results(out, settings, data))
    if begin("conversion", f"convert the trained {settings.baseline} to a smaller KV cache"):
        with progress_bar("passes over the calibration text") as bar:
            job.write(conversion=phases.convert(out, settings, data, bar))
    before, after = record["conversion"]["kv_bytes_per_token_bf16"]
    console.print(f"{before:,} -> {after:,} bytes of KV cache per token ({after / before - 1:+.1%})", highlight=False)
    if begin("elimination", f"remove weights from the trained {settings.baseline} exactly, and verify"):
        with progress_bar("solving") as bar:
            job.write(elimination=phases.eliminate(out, settings, data, bar.describe))
    certificate = record["elimination"]["certificate"]
    before, after = certificate["parameters"].values()
    console.print(
        f"{before:,} -> {after:,} parameters ({after / before - 1:+.1%}); logits differ by "
        f"{certificate['exact']['relative']:.0e} in float64, before rounding",
        highlight=False,
        soft_wrap=True,
    )
    if begin("evaluation", "score all four models on the same held-out text"):
        with progress_bar("models scored") as bar:
            job.write(evaluation=phases.evaluate(out, settings, data, device, bar))
    if begin("decoding", "decode the same prompt with each"):
        with progress_bar("continuations") as bar:
            job.write(decoding=phases.decode(out, settings, data, device, bar))
