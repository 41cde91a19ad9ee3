"""Step time of a training run against a bare PyTorch loop around the same model, in the same precision.

The two take turns in one process, a block of steps each, so that a machine that slows down slows both. Prints the
ratio of the median step times of each pair of blocks.

    python benchmarks/step_time.py --model small --precision bf16+compile+eager --out results/step-time.json
"""

import argparse
import itertools
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import harness
import torch

from leanqkv import LeanForCausalLM, preset, recipe
from leanqkv.data.batches import collate, make_batch_plan
from leanqkv.data.prepare import prepare_data
from leanqkv.data.token_files import TokenData
from leanqkv.environment import default_device
from leanqkv.train.optimizer import make_optimizer, make_schedule
from leanqkv.train.precision import parse_precision
from leanqkv.train.spec import RunSpec
from leanqkv.train.training import train


def training_run(spec: RunSpec, data: TokenData, device: str) -> list[float]:
    """Return the seconds between the ends of the steps of `leanqkv train`."""
    times: list[float] = []
    with tempfile.TemporaryDirectory() as out:
        train(spec, data, Path(out) / "run", device=device, progress=lambda *_: times.append(time.perf_counter()))
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def bare_loop(spec: RunSpec, data: TokenData, device: str) -> list[float]:
    """Return the same of the steps written out: batch, forward, backward, clipping, AdamW, schedule."""
    chosen, precision = spec.recipe, parse_precision(spec.precision)
    assert precision is not None
    plan = make_batch_plan(
        train_tokens=data.train_tokens,
        validation_tokens=data.validation_tokens,
        context_length=spec.context_length,
        batch_size=chosen.batch_size,
        steps=chosen.steps,
        evaluation_sequences=1,
        seed=spec.seed,
    )
    torch.manual_seed(spec.seed)
    model = LeanForCausalLM(preset(spec.name)).to(device).train()
    precision.apply(model)
    optimizer = make_optimizer(model, chosen)
    schedule = make_schedule(optimizer, chosen)
    tokens, times = data.train(), []
    for starts in map(plan.batch, range(plan.steps)):
        batch = {key: value.to(device) for key, value in collate(tokens, starts, spec.context_length).items()}
        with precision.autocast(device):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), chosen.max_grad_norm or torch.inf)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if device != "cpu":
            loss.item()
        times.append(time.perf_counter())
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    config = preset(options.model)
    data = prepare_data(vocab_size=config.vocab_size)
    spec = RunSpec(
        name=options.model,
        config=config.as_overrides(),
        recipe=recipe(options.model, steps=options.steps),
        seed=0,
        context_length=config.max_position_embeddings,
        precision=options.precision,
        data_sha256=data.sha256,
        evaluation_sequences=1,
        evaluate_every=10 * options.steps,
    )
    pairs = []
    for pair in range(options.pairs + 1):
        sides = (run(spec, data, options.device) for run in (training_run, bare_loop))
        ours, bare = (1e3 * median(times[options.steps // 4 :]) for times in sides)
        if pair:
            pairs.append({"training_run_ms": ours, "bare_loop_ms": bare, "ratio": ours / bare})
            print(f"training run {ours:.1f} ms, bare loop {bare:.1f} ms, ratio {ours / bare:.3f}", flush=True)
    return {
        "model": options.model,
        "precision": options.precision,
        "steps": options.steps,
        "pairs": pairs,
        "ratio": harness.spread([pair["ratio"] for pair in pairs]),
    }


def tables(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    ours, bare = (f"{median(pair[key] for pair in record['pairs']):.1f}" for key in ("training_run_ms", "bare_loop_ms"))
    row = (f"`{record['model']}`", record["precision"], ours, bare, harness.spread_text(record["ratio"]))
    return harness.table(("model", "precision", "training run, ms", "bare loop, ms", "ratio"), [row], "llrrr")


def main() -> None:
    parser = harness.command_line(__doc__)
    parser.add_argument("--model", default="small")
    parser.add_argument("--precision", default="bf16+compile+eager")
    parser.add_argument("--steps", type=int, default=24, help="of a block; the first quarter is not counted")
    parser.add_argument("--pairs", type=int, default=5, help="of blocks, after one that is not counted")
    parser.set_defaults(device=default_device())
    harness.run(parser, measure, tables)


if __name__ == "__main__":
    main()
