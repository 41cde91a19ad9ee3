"""Our decoder against transformers' `generate`, on the same weights: tokens per second, both sides in turns.

GPT-2 small and a LLaMA of its size, random weights, 128 tokens of prompt and 256 new ones, greedy. In float32 the
tokens must be the same ones.

    OMP_NUM_THREADS=2 python benchmarks/decode.py --out results/decode/transformers.json
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import harness
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from leanqkv import LeanForCausalLM
from leanqkv.checkpoints.open import load_weights, open_checkpoint
from leanqkv.compat import quiet_transformers
from leanqkv.inference import Decoder

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "GPT2LMHeadModel": lambda: GPT2LMHeadModel(GPT2Config()),
    "LlamaForCausalLM": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32_000,
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=12,
            num_attention_heads=12,
            max_position_embeddings=1024,
        )
    ),
}
SIDES = ("ours", "theirs")
# The ratio ours / theirs that was the goal before the decoder was written, by dtype and batch.
TARGETS = {("bfloat16", 1): 1.5, ("bfloat16", 8): 2.0, ("float32", 1): 1.05, ("float32", 8): 1.4}


def imported(theirs: PreTrainedModel) -> LeanForCausalLM:
    with tempfile.TemporaryDirectory() as directory, quiet_transformers():
        theirs.save_pretrained(directory)
        opened = open_checkpoint(Path(directory))
        ours = LeanForCausalLM(opened.config)
        load_weights(ours, opened.tensors)
    return ours.eval()


def measure(name: str, dtype: torch.dtype, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return one row: tokens per second of both sides, and their ratio over the rounds."""
    torch.manual_seed(0)
    theirs = MODELS[name]().eval()
    ours = Decoder(imported(theirs).to(dtype))
    theirs = theirs.to(dtype)
    theirs.generation_config.eos_token_id = None
    ids = torch.randint(theirs.config.vocab_size, (batch, options.prompt))
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    generated: dict[str, torch.Tensor] = {}

    def run(side: str, tokens: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            if side == "ours":
                generated[side] = ours.generate(ids, max_new_tokens=tokens)
            else:
                generated[side] = theirs.generate(ids, max_new_tokens=tokens, **settings)
        return batch * tokens / (time.perf_counter() - start)

    for side in SIDES:
        run(side, 4)
    rates = [[run(side, options.new) for side in SIDES] for _ in range(options.rounds)]
    if dtype == torch.float32 and not torch.equal(generated["ours"], generated["theirs"]):
        raise SystemExit(f"{name}: the tokens differ")
    dtype_name = str(dtype).removeprefix("torch.")
    ours_speed, theirs_speed = (median(rate) for rate in zip(*rates, strict=True))
    ratio = harness.spread([ours_rate / theirs_rate for ours_rate, theirs_rate in rates])
    speeds = f"ours {ours_speed:.1f}, theirs {theirs_speed:.1f} tokens/s"
    print(f"{name} {dtype_name} batch {batch}: {speeds}, ratio {harness.spread_text(ratio)}", flush=True)
    return {
        "model": name,
        "dtype": dtype_name,
        "batch": batch,
        "ours_tokens_per_second": ours_speed,
        "theirs_tokens_per_second": theirs_speed,
        "ratio": ratio,
        "target": TARGETS.get((dtype_name, batch)),
    }


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    cells = product(MODELS, (torch.bfloat16, torch.float32), (1, 8))
    rows = [measure(*cell, options) for cell in cells]
    return {"prompt": options.prompt, "new": options.new, "rounds": options.rounds, "rows": rows}


def tables(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    rows = []
    for row in record["rows"]:
        speeds = (f"{row[f'{side}_tokens_per_second']:.0f}" for side in SIDES)
        ratio = harness.spread_text(row["ratio"])
        rows.append((row["model"], row["dtype"], str(row["batch"]), *speeds, ratio, f"{row['target']:.2f}"))
    headers = ("model", "dtype", "batch", "ours, tokens/s", "`generate`, tokens/s", "ratio", "asked for")
    return harness.table(headers, rows, "llrrrrr")


def main() -> None:
    parser = harness.command_line(__doc__)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens to generate")
    parser.add_argument("--rounds", type=int, default=3)
    harness.run(parser, measure_all, tables)


if __name__ == "__main__":
    main()
