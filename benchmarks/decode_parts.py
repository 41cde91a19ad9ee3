"""What each part of the decoder brings: a step's time with all of it, and without one part, in turns in one process.

`llama-130m` with random weights, 128 tokens of prompt, the 256 steps after it.

    OMP_NUM_THREADS=2 python benchmarks/decode_parts.py --out results/decode/parts.json
    python benchmarks/decode_parts.py --tables results/decode/parts.json
"""

import argparse
import copy
import itertools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import DynamicCache

from leanqkv import LeanForCausalLM
from leanqkv.environment import git_commit, hardware, versions
from leanqkv.files import RECORD_FORMAT, read_json, write_json
from leanqkv.inference import Decoder
from leanqkv.model.attention import attend
from leanqkv.presets import preset

BASE, PROMPT, STEPS = "llama-130m", 128, 256
WHOLE = "all of it"


def unpacked(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


# What is replaced while the decoder is made, and while it takes in the prompt.
PARTS: dict[str, tuple[Callable[[], AbstractContextManager], Callable[[], AbstractContextManager]]] = {
    WHOLE: (nullcontext, nullcontext),
    "PyTorch's attention": (lambda: patch("leanqkv.inference.decoder.attend_one_query", attend), nullcontext),
    "weights as they are": (lambda: patch("leanqkv.inference.decoder.packed", unpacked), nullcontext),
    "products of one input apart": (
        lambda: patch("leanqkv.inference.linear.join_projections", lambda *_: []),
        nullcontext,
    ),
    "a cache that grows": (
        nullcontext,
        lambda: patch("leanqkv.inference.decoder.allocate_cache", lambda config, _: DynamicCache(config=config)),
    ),
}


def measure(dtype: torch.dtype, batch: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = LeanForCausalLM(preset(BASE)).to(dtype).eval()
    decoders = {}
    for name, (made, _) in PARTS.items():
        with made():
            decoders[name] = Decoder(model)
    ids = torch.randint(model.config.vocab_size, (batch, PROMPT))

    def run(name: str, steps: int) -> float:
        decoder = decoders[name]
        with PARTS[name][1]():
            logits = decoder.prefill(ids, room=steps)
        start = time.perf_counter()
        for _ in range(steps):
            logits = decoder.step(logits.argmax(-1))
        return 1e3 * (time.perf_counter() - start) / steps

    times: dict[str, list[float]] = {name: [] for name in PARTS}
    for name in PARTS:
        run(name, 4)
    for round_ in range(rounds):
        for name in (reversed if round_ % 2 else list)(list(PARTS)):
            times[name].append(run(name, STEPS))
    row: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "batch": batch, "parts": {}}
    for name, of in times.items():
        ratios = [one / whole for one, whole in zip(of, times[WHOLE], strict=True)]
        spread = {"median": median(ratios), "min": min(ratios), "max": max(ratios)}
        row["parts"][name] = {"milliseconds": median(of), "ratio": spread}
        print(f"{row['dtype']} batch {batch}, {name}: {median(of):.2f} ms, {spread['median']:.2f}x", flush=True)
    return row


def tables(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    rows = record["rows"]
    lines = ["| a step, ms | " + " | ".join(f"{row['dtype']}, batch {row['batch']}" for row in rows) + " |"]
    lines.append("| --- |" + " ---: |" * len(rows))
    for name in rows[0]["parts"]:
        cells = []
        for row in rows:
            milliseconds, ratio = row["parts"][name]["milliseconds"], row["parts"][name]["ratio"]
            spread = f" × {ratio['median']:.2f} ({ratio['min']:.2f}–{ratio['max']:.2f})"
            cells.append(f"{milliseconds:.1f}" if name == WHOLE else spread.strip())
        lines.append(f"| {name if name == WHOLE else f'with {name}'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, help="print a record as Markdown, and do nothing else")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.tables is not None:
        print(tables(read_json(asked.tables)))
        return
    cells = itertools.product((torch.bfloat16, torch.float32), (1, 8))
    record: dict[str, Any] = {"record": RECORD_FORMAT, "base": BASE, "prompt": PROMPT, "steps": STEPS}
    record["rows"] = [measure(dtype, batch, asked.rounds) for dtype, batch in cells]
    record |= {"rounds": asked.rounds, "threads": torch.get_num_threads(), "hardware": hardware("cpu")}
    record |= {"versions": versions(), "git_commit": git_commit()}
    print(tables(record))
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(asked.out, record)


if __name__ == "__main__":
    main()
