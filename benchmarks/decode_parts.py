"""What each part of the decoder brings: a step's time with all of it, and without one part, in turns in one process.

`llama-130m` with random weights, 128 tokens of prompt, the 256 steps after it.

    OMP_NUM_THREADS=2 python benchmarks/decode_parts.py --out results/decode/parts.json
    python benchmarks/decode_parts.py --tables results/decode/parts.json
"""

import argparse
import itertools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any
from unittest.mock import patch

import harness
import torch
from transformers import DynamicCache

from leanqkv import LeanForCausalLM
from leanqkv.inference import Decoder
from leanqkv.model.attention import attend
from leanqkv.presets import preset

BASE, PROMPT, STEPS = "llama-130m", 128, 256
WHOLE = "all of it"


# What is replaced while the decoder is made, and while it takes in the prompt.
PARTS: dict[str, tuple[Callable[[], AbstractContextManager], Callable[[], AbstractContextManager]]] = {
    WHOLE: (nullcontext, nullcontext),
    "PyTorch's attention": (lambda: patch("leanqkv.inference.decoder.attend_one_query", attend), nullcontext),
    "PyTorch's products": (lambda: patch("leanqkv.inference.decoder.use_products", lambda _: None), nullcontext),
    "PyTorch's small operations": (lambda: patch("leanqkv.inference.decoder.fuse", lambda _: None), nullcontext),
    "a call for every operation": (
        lambda: patch("leanqkv.inference.decoder.use_programs", lambda _: None),
        nullcontext,
    ),
    "every step as it is written": (
        lambda: patch("leanqkv.inference.decoder.RepeatedLayers", lambda model, *_: model._run_layers),
        nullcontext,
    ),
    "a cache that grows": (
        nullcontext,
        lambda: patch("leanqkv.inference.decoder.allocate_cache", lambda config, *_: DynamicCache(config=config)),
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
        ratio = harness.spread(ratios)
        row["parts"][name] = {"milliseconds": median(of), "ratio": ratio}
        print(f"{row['dtype']} batch {batch}, {name}: {median(of):.2f} ms, {ratio['median']:.2f}x", flush=True)
    return row


def tables(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    columns = record["rows"]
    rows = []
    for name in columns[0]["parts"]:
        parts = [column["parts"][name] for column in columns]
        if name == WHOLE:
            rows.append((name, *(f"{part['milliseconds']:.1f}" for part in parts)))
        else:
            rows.append((f"with {name}", *(f"× {harness.spread_text(part['ratio'])}" for part in parts)))
    return harness.table(("a step, ms", *(f"{row['dtype']}, batch {row['batch']}" for row in columns)), rows)


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    cells = itertools.product((torch.bfloat16, torch.float32), (1, 8))
    rows = [measure(dtype, batch, options.rounds) for dtype, batch in cells]
    return {"base": BASE, "prompt": PROMPT, "steps": STEPS, "rounds": options.rounds, "rows": rows}


def main() -> None:
    parser = harness.command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    harness.run(parser, measure_all, tables)


if __name__ == "__main__":
    main()
