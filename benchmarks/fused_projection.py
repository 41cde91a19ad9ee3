"""Fused against unfused projections: time of a training step and of a prefill, by model and number of tokens.

The two take turns in one process, a block of repetitions each, so that a machine that slows down slows both. `ratio` is
fused / unfused, the median over the pairs of blocks, with their range. `attention.input` times the projections of one
layer alone, which is where the whole difference arises.

    python benchmarks/fused_projection.py --out results/fused-projection.json
"""

import argparse
import copy
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import harness
import torch

from leanqkv import LeanForCausalLM, preset
from leanqkv.environment import default_device
from leanqkv.inference.joined import join_projections

MODELS = ("gpt2-124m", "gpt2-124m+nonlinear-query")
TOKENS = (1, 16, 64, 256, 1024, 4096)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    dtype = getattr(torch, options.dtype)
    rows: list[dict[str, Any]] = []
    for name in options.models:
        config = preset(name, num_hidden_layers=max(options.layers, 2), vocab_size=1024)
        torch.manual_seed(0)
        separate = LeanForCausalLM(config).to(options.device, dtype)
        joined = copy.deepcopy(separate, {id(parameter): parameter for parameter in separate.parameters()})
        join_projections(joined)
        models = {True: joined, False: separate}
        for tokens in options.tokens:
            for what, once in cases(config, tokens, options.device, dtype).items():
                row = {"model": name, "what": what, "tokens": tokens, **compare(models, once, options)}
                rows.append(row)
                ratio = harness.spread_text(row["ratio"], 3)
                print(f"{name:34} {what:16} {tokens:6} tokens  fused/unfused {ratio}", flush=True)
    return {"dtype": options.dtype, "layers": options.layers, "rows": rows}


def cases(config: Any, tokens: int, device: str, dtype: torch.dtype) -> dict[str, Callable[[LeanForCausalLM], Any]]:
    """Return the timed calls: the projections of one layer, a prefill and a training step of the whole model."""
    ids = torch.randint(0, 1024, (max(1, tokens // 1024), min(tokens, 1024)), device=device)
    hidden = torch.randn(*ids.shape, config.hidden_size, device=device, dtype=dtype)

    def projections(model: LeanForCausalLM) -> None:
        with torch.no_grad():
            model.model.layers[1].self_attn.project(hidden, None)

    def prefill(model: LeanForCausalLM) -> None:
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, logits_to_keep=1)

    def step(model: LeanForCausalLM) -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return {"attention.input": projections, "prefill": prefill} | ({"training step": step} if tokens >= 256 else {})


def compare(
    models: dict[bool, LeanForCausalLM], once: Callable[[LeanForCausalLM], Any], options: argparse.Namespace
) -> dict[str, Any]:
    def seconds(fuse: bool, repetitions: int) -> float:
        synchronize(options.device)
        start = time.perf_counter()
        for _ in range(repetitions):
            once(models[fuse])
        synchronize(options.device)
        return (time.perf_counter() - start) / repetitions

    for fuse in (True, False):
        seconds(fuse, 2)
    repetitions = max(1, round(options.seconds / seconds(False, 1)))
    pairs = []
    for block in range(options.blocks):
        times = {fuse: seconds(fuse, repetitions) for fuse in ((True, False) if block % 2 else (False, True))}
        pairs.append((times[True], times[False]))
    ratios = [one / other for one, other in pairs]
    return {
        "fused_ms": 1e3 * median(one for one, _ in pairs),
        "unfused_ms": 1e3 * median(other for _, other in pairs),
        "ratio": harness.spread(ratios),
    }


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def tables(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    rows = []
    for row in record["rows"]:
        times = (f"{row['fused_ms']:.1f}", f"{row['unfused_ms']:.1f}", harness.spread_text(row["ratio"]))
        rows.append((f"`{row['model']}`", row["what"], f"{row['tokens']:,}", *times))
    headers = ("model", "what", "tokens", "fused, ms", "unfused, ms", "fused / unfused")
    return harness.table(headers, rows, "llrrrr")


def main() -> None:
    parser = harness.command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--layers", type=int, default=2, help="layers that are built of each model")
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=list(TOKENS), help="of one sequence of 1024, or several"
    )
    parser.add_argument("--blocks", type=int, default=5, help="pairs of blocks")
    parser.add_argument("--seconds", type=float, default=0.3, help="a block repeats for about so long")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default=default_device())
    harness.run(parser, measure, tables)


if __name__ == "__main__":
    main()
