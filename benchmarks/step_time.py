"""Step time of a training run against a bare PyTorch loop around the same model, in the same precision.

The two take turns in one process, a block of steps each, so that a machine that slows down slows both. Prints the
ratio of the median step times of each pair of blocks, and writes a JSON record.

    python benchmarks/step_time.py --model small --precision bf16+compile+eager --out results/step-time.json
"""

import argparse
import itertools
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from leanqkv import LeanForCausalLM, preset, recipe
from leanqkv.data import TokenData, collate, make_batch_plan, prepare_data
from leanqkv.environment import default_device, git_commit, hardware, versions
from leanqkv.files import write_json
from leanqkv.train import RunSpec, parse_precision, train
from leanqkv.train.trainer import make_optimizer, make_schedule


def training_run(spec: RunSpec, data: TokenData, device: str) -> list[float]:
    """Seconds between the ends of the steps of `leanqkv train`."""
    times: list[float] = []
    with tempfile.TemporaryDirectory() as out:
        train(spec, data, Path(out) / "run", device=device, progress=lambda *_: times.append(time.perf_counter()))
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def bare_loop(spec: RunSpec, data: TokenData, device: str) -> list[float]:
    """The same steps written out: batch, forward, backward, clipping, AdamW, schedule."""
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
    for starts in plan.train_starts:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small")
    parser.add_argument("--precision", default="bf16+compile+eager")
    parser.add_argument("--steps", type=int, default=24, help="a block's; the first quarter is not counted")
    parser.add_argument("--pairs", type=int, default=5, help="of blocks, after one that is not counted")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = default_device()
    config = preset(arguments.model)
    data = prepare_data(vocab_size=config.vocab_size)
    spec = RunSpec(
        name=arguments.model,
        config=config.as_overrides(),
        recipe=recipe(arguments.model, steps=arguments.steps),
        seed=0,
        context_length=config.max_position_embeddings,
        precision=arguments.precision,
        data_sha256=data.sha256,
        evaluation_sequences=1,
        evaluate_every=10 * arguments.steps,
    )
    pairs = []
    for pair in range(arguments.pairs + 1):
        ours, bare = (median(run(spec, data, device)[arguments.steps // 4 :]) for run in (training_run, bare_loop))
        if pair:
            pairs.append({"training_run_ms": 1e3 * ours, "bare_loop_ms": 1e3 * bare, "ratio": ours / bare})
            print(
                f"training run {1e3 * ours:.1f} ms, bare loop {1e3 * bare:.1f} ms, ratio {ours / bare:.3f}", flush=True
            )
    ratios = [pair["ratio"] for pair in pairs]
    print(f"ratio: median {median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f} over {len(ratios)} pairs")
    if arguments.out:
        record = {
            "benchmark": "step_time",
            "model": arguments.model,
            "precision": arguments.precision,
            "steps": arguments.steps,
            "pairs": pairs,
            "ratio": {"median": median(ratios), "min": min(ratios), "max": max(ratios)},
            "hardware": hardware(device),
            "versions": versions(),
            "git_commit": git_commit(),
        }
        write_json(arguments.out, record)


if __name__ == "__main__":
    main()
