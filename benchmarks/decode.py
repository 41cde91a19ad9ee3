"""Our decoder against transformers' `generate`, on the same weights: tokens per second, both sides in turns.

GPT-2 small and a LLaMA of its size, random weights, 128 tokens of prompt and 256 new ones, greedy. In float32 the
tokens must be the same ones.

    OMP_NUM_THREADS=2 python benchmarks/decode.py --out results/decode/transformers.json
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from leanqkv import LeanForCausalLM
from leanqkv.checkpoints.load import load_weights
from leanqkv.checkpoints.open import open_checkpoint
from leanqkv.compat import quiet_transformers
from leanqkv.environment import git_commit, hardware, versions
from leanqkv.files import RECORD_FORMAT, write_json
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
# What was asked of the decoder before it was written: dtype, batch -> ours / theirs.
TARGETS = {("bfloat16", 1): 1.5, ("bfloat16", 8): 2.0, ("float32", 1): 1.05, ("float32", 8): 1.4}


def imported(theirs: PreTrainedModel) -> LeanForCausalLM:
    with tempfile.TemporaryDirectory() as directory, quiet_transformers():
        theirs.save_pretrained(directory)
        opened = open_checkpoint(Path(directory))
        ours = LeanForCausalLM(opened.config)
        load_weights(ours, opened.tensors)
    return ours.eval()


def measure(name: str, dtype: torch.dtype, batch: int, prompt: int, new: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    theirs = MODELS[name]().eval()
    ours = Decoder(imported(theirs).to(dtype))
    theirs = theirs.to(dtype)
    theirs.generation_config.eos_token_id = None
    ids = torch.randint(theirs.config.vocab_size, (batch, prompt))
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    found: dict[str, torch.Tensor] = {}

    def run(side: str, tokens: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            if side == "ours":
                found[side] = ours.generate(ids, max_new_tokens=tokens)
            else:
                found[side] = theirs.generate(ids, max_new_tokens=tokens, **options)
        return batch * tokens / (time.perf_counter() - start)

    rates: dict[str, list[float]] = {"ours": [], "theirs": []}
    for side in rates:
        run(side, 4)
    for _ in range(rounds):
        for side, rate in rates.items():
            rate.append(run(side, new))
    if dtype == torch.float32 and not torch.equal(found["ours"], found["theirs"]):
        raise SystemExit(f"{name}: the tokens differ")
    ratios = sorted(a / b for a, b in zip(rates["ours"], rates["theirs"], strict=True))
    kind = str(dtype).removeprefix("torch.")
    row = {
        "model": name,
        "dtype": kind,
        "batch": batch,
        **{f"{side}_tokens_per_second": median(rate) for side, rate in rates.items()},
        "ratio": {"median": median(ratios), "min": ratios[0], "max": ratios[-1]},
        "target": TARGETS.get((kind, batch)),
    }
    speeds = f"ours {median(rates['ours']):.1f}, theirs {median(rates['theirs']):.1f} tokens/s"
    spread = f"{median(ratios):.2f}x ({ratios[0]:.2f}-{ratios[-1]:.2f})"
    print(f"{name} {kind} batch {batch}: {speeds}, {spread}", flush=True)
    return row


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    lines = ["| model | dtype | batch | ours, tokens/s | `generate`, tokens/s | ratio | asked for |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for row in record["rows"]:
        ratio = row["ratio"]
        cells = (
            row["model"],
            row["dtype"],
            str(row["batch"]),
            *(f"{row[f'{s}_tokens_per_second']:.0f}" for s in SIDES),
        )
        spread = f"{ratio['median']:.2f} ({ratio['min']:.2f}–{ratio['max']:.2f})"
        lines.append("| " + " | ".join((*cells, spread, f"{row['target']:.2f}")) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows = [
        measure(name, dtype, batch, asked.prompt, asked.new, asked.rounds)
        for name in MODELS
        for dtype in (torch.bfloat16, torch.float32)
        for batch in (1, 8)
    ]
    if asked.out is not None:
        record = {"record": RECORD_FORMAT, "prompt": asked.prompt, "new": asked.new, "rows": rows}
        record |= {"threads": torch.get_num_threads(), "hardware": hardware("cpu"), "versions": versions()}
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(asked.out, record | {"git_commit": git_commit()})


if __name__ == "__main__":
    main()
