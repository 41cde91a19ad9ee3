"""Sharded training of two processes on a CPU: time of a step, memory of a process, and the memory that is predicted.

    python benchmarks/sharding.py --out results/sharding.json
    python benchmarks/sharding.py --tables results/sharding.json

Time: `leanqkv train --shard fsdp`, the same without --shard (DDP), and a bare loop around `fully_shard` of the same
model, each started by torchrun, in turns. Memory: weights, gradients and optimizer state after a step. Prediction: what
`leanqkv plan-run` counts with, against the most that tensors hold in a real step, in one process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from leanqkv import LeanConfig, preset
from leanqkv.data.batches import collate
from leanqkv.errors import LeanError
from leanqkv.files import read_json
from leanqkv.memory import PeakMemory
from leanqkv.presets.recipes import Recipe, recipe
from leanqkv.progress import progress_bar
from leanqkv.train.micro_batch import Step
from leanqkv.train.optimizer import make_optimizer, make_schedule
from leanqkv.train.precision import Precision
from leanqkv.train.tasks import task_of

ROOT = Path(__file__).parents[1]
TIMED, CONTEXT, BATCH, STEPS = "small+skipv1", 256, 16, 30
PREDICTED = (("tiny", 16, 128), ("small", 8, 256), ("llama-60m", 4, 256))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record's parts."""
    with progress_bar("predictions") as bar:
        predictions = []
        for done, (name, micro, context) in enumerate(PREDICTED):
            predictions.append(_prediction(name, micro, context))
            bar(done + 1, len(PREDICTED))
    with progress_bar("steps") as bar, tempfile.TemporaryDirectory() as place:
        seconds: dict[str, list[float]] = {"fsdp": [], "ddp": [], "bare": []}
        for done in range(options.rounds * len(seconds)):
            kind = list(seconds)[done % len(seconds)]
            seconds[kind].append(_step_seconds(kind, Path(place, f"{kind}-{done}")))
            bar(done + 1, options.rounds * len(seconds))
    return {
        "predictions": predictions,
        "step": {"model": TIMED, "context": CONTEXT, "batch": BATCH, "steps": STEPS, "seconds": seconds},
        "memory": _memory(),
    }


def _prediction(name: str, micro: int, context: int) -> dict[str, Any]:
    """What a step is predicted to hold, and what one does."""
    config = preset(name)
    step = Step(config, micro, context, "cpu", Precision("bf16"), processes=1)
    model = task_of(config).model_class(config)
    optimizer = make_optimizer(model, recipe(name))
    model(**task_of(config).random_batch(config, 1, context, "cpu")).loss.backward()
    optimizer.step()
    state = sum(p.nbytes + p.grad.nbytes for p in model.parameters())
    state += sum(t.nbytes for one in optimizer.state.values() for t in one.values() if t.ndim)
    batch = task_of(config).random_batch(config, micro, context, "cpu")
    with PeakMemory() as memory, torch.autocast("cpu", torch.bfloat16):
        model(**batch).loss.backward()
    found = {"predicted": step.bytes(micro), "measured": state + memory.peak}
    return {"model": name, "micro_batch": micro, "context": context, **found}


def _step_seconds(kind: str, out: Path) -> float:
    """Seconds of a step, of two processes."""
    numbers = {"--steps": STEPS, "--evaluate-every": STEPS, "--context-length": CONTEXT, "--batch-size": BATCH}
    numbers |= {"--micro-batch-size": BATCH // 2, "--evaluation-sequences": 2}
    arguments = [str(part) for pair in numbers.items() for part in pair]
    if kind == "bare":
        return float(_torchrun(__file__, "--bare").splitlines()[-1])
    shard = ["--shard", "fsdp"] if kind == "fsdp" else []
    where = ["--precision", "fp32", "--device", "cpu", "--out", str(out)]
    _torchrun("-m", "leanqkv", "train", TIMED, *arguments, *shard, *where)
    return BATCH * CONTEXT / read_json(out / "record.json")["tokens_per_second"]


def _torchrun(*arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise LeanError(f"{' '.join(arguments[:4])}: {done.stderr[-2000:]}")
    return done.stdout


def run_bare() -> None:
    """The same steps by hand: print the median time of ten of them, over intervals of ten as the trainer logs."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = preset(TIMED)
    model = task_of(config).model_class(config)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = make_optimizer(model, recipe(TIMED))
    schedule = make_schedule(optimizer, Recipe(STEPS, BATCH, 1e-3, 1e-4, 0.1, 3))
    tokens = torch.randint(config.vocab_size, (100_000,)).numpy()
    seconds = []
    for step in range(STEPS):
        if step % 10 == 0:
            seconds.append(time.perf_counter())
        starts = torch.randint(90_000, (BATCH // 2,)).tolist()
        model(**collate(tokens, starts, CONTEXT), use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    seconds.append(time.perf_counter())
    if dist.get_rank() == 0:
        print(median(second - first for first, second in pairwise(seconds[1:])) / 10)
    dist.destroy_process_group()


def _memory() -> dict[str, Any]:
    """Weights, gradients and optimizer state of a process after a step, alone and of two."""
    alone = _state(*_one_step(preset(TIMED), shard=False))
    return {"model": TIMED, "alone": alone, "of_two": json.loads(_torchrun(__file__, "--memory").splitlines()[-1])}


def _one_step(config: LeanConfig, shard: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = task_of(config).model_class(config)
    if shard:
        sys.path.insert(0, str(ROOT / "tests"))
        from two_processes import sharded

        model = sharded(model)
    optimizer = make_optimizer(model, recipe(TIMED))
    model(**task_of(config).random_batch(config, 2, 64, "cpu")).loss.backward()
    optimizer.step()
    return model, optimizer


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    tensors = [one for p in model.parameters() for one in (p, p.grad, *optimizer.state[p].values())]
    return sum(getattr(one, "_local_tensor", one).nbytes for one in tensors if one.ndim)


def run_memory() -> None:
    """Print the largest state of a process."""
    dist.init_process_group("gloo")
    found = [0] * dist.get_world_size()
    dist.all_gather_object(found, _state(*_one_step(preset(TIMED), shard=True)))
    if dist.get_rank() == 0:
        print(max(found))
    dist.destroy_process_group()


def tables(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    step, memory = record["step"], record["memory"]
    rows = []
    for kind, name in (("fsdp", "`--shard fsdp`"), ("ddp", "DDP"), ("bare", "bare `fully_shard` loop")):
        ratios = [one / other for one, other in zip(step["seconds"][kind], step["seconds"]["bare"], strict=True)]
        times = harness.spread([1000 * one for one in step["seconds"][kind]])
        rows.append((name, harness.spread_text(times, 0), harness.spread_text(harness.spread(ratios))))
    made = [harness.table(("two processes", "ms a step", "of the bare loop"), rows)]
    share = f"{memory['of_two'] / memory['alone']:.2f}"
    sizes = (f"{memory[name] / 1e6:,.1f} MB" for name in ("alone", "of_two"))
    made.append(harness.table(("one process", "each of two", "share"), [(*sizes, share)], "rrr"))
    rows = [
        (
            one["model"],
            f"{one['micro_batch']} x {one['context']}",
            *(f"{one[name] / 1e6:,.1f} MB" for name in ("predicted", "measured")),
            f"{one['predicted'] / one['measured']:.2f}",
        )
        for one in record["predictions"]
    ]
    made.append(harness.table(("model", "micro-batch", "predicted", "measured", "ratio"), rows))
    return "\n\n".join(made)


def main() -> None:
    if sys.argv[1:] in (["--bare"], ["--memory"]):
        run_bare() if sys.argv[1] == "--bare" else run_memory()
        return
    parser = harness.command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of the three kinds of training, in turns")
    harness.run(parser, measure, tables)


if __name__ == "__main__":
    main()
