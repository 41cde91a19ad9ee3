"""A comparison whose runs are jobs, of which some are killed, against the same comparison undisturbed.

    python benchmarks/sweep.py --out results/sweep.json
    python benchmarks/sweep.py --tables results/sweep.json

Twelve tiny runs: once by one command, once as jobs of submitit's executor for one machine, of which two are killed with
SIGKILL after their first checkpoint. Losses at every step of the log and the weights are compared bit by bit.
"""

import argparse
import hashlib
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import psutil

from leanqkv.compare.comparison import run_comparison
from leanqkv.compare.jobs import Update
from leanqkv.compare.launch import Cluster
from leanqkv.compare.suite import Comparison, Entry
from leanqkv.data.prepare import prepare_data
from leanqkv.data.token_files import TokenData
from leanqkv.files import read_json
from leanqkv.presets import preset
from leanqkv.progress import progress_bar

NAMES = ("tiny", "tiny+skipv1", "tiny+nonlinear-query", "tiny+resformer")
COMPARISON = Comparison(
    title="A sweep",
    groups=(tuple(map(Entry, NAMES)),),
    seeds=(0, 1, 2),
    recipe={"steps": 60, "batch_size": 4},
    command="",
    evaluation_sequences=8,
    evaluate_every=15,
)
KILLED = 2


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record's parts."""
    data = prepare_data("stdlib", vocab_size=preset("tiny").vocab_size, max_documents=200)
    with progress_bar("sweeps") as bar, tempfile.TemporaryDirectory() as place:
        undisturbed, seconds = _run(data, Path(place, "undisturbed"))
        bar(1, 2)
        killed: list[str] = []

        def kill(update: Update) -> None:
            name = update.job.out.name
            if update.record is None and update.step >= 15 and len(killed) < KILLED and name not in killed:
                killed.append(name)
                _kill_the_job_of(update.job.out)

        jobs, with_jobs = _run(data, Path(place, "jobs"), cluster=Cluster("local"), on_update=kill)
        bar(2, 2)
    return {
        "runs": len(undisturbed),
        "killed": killed,
        "equal": sum(jobs.get(name) == content for name, content in undisturbed.items()),
        "seconds": {"one command": seconds, "jobs": with_jobs},
    }


def _run(data: TokenData, out: Path, **given: Any) -> tuple[dict[str, str], float]:
    """Return what each run of the comparison left, as a hash, and the time of all."""
    begun = time.perf_counter()
    run_comparison(replace(COMPARISON), data, out, precision="fp32", device="cpu", jobs=2, **given)
    seconds = time.perf_counter() - begun
    found = {}
    for file in sorted(out.glob("runs/*/record.json")):
        record = read_json(file)
        digest = hashlib.sha256(repr([record["evaluations"], [e["loss"] for e in record["training"]]]).encode())
        digest.update((file.parent / "model.safetensors").read_bytes())
        found[file.parent.name] = digest.hexdigest()
    return found, seconds


def _kill_the_job_of(out: Path) -> None:
    """Kill the process that has the lock of a run open."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if any(Path(file.path).parent == out for file in process.open_files()):
                process.kill()


def tables(record: dict[str, Any]) -> str:
    """Return the table of the documentation."""
    row = [str(record["runs"]), str(len(record["killed"])), str(record["equal"])]
    return harness.markdown_table(("runs as jobs", "killed", "equal to the undisturbed ones, bit for bit"), [row])


if __name__ == "__main__":
    harness.run(harness.command_line(__doc__), measure, tables)
