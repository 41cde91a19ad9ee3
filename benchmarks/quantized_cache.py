"""Bytes of KV cache per token, measured: architectures of GPT-2 124M's shape times plain and quantized caches.

python benchmarks/quantized_cache.py --out results/quantized-cache.json

optimum-quanto has to be installed. The weights are random: the bytes do not depend on them.
"""

import argparse
from typing import Any

import harness
import torch
from transformers.cache_utils import Cache

from leanqkv import LeanForCausalLM, LeanQuantizedCache, cache_bytes, preset
from leanqkv.model.cache import dynamic_cache

BASE = "gpt2-124m"
MODELS = ((), ("skipv1",), ("gqa",), ("gqa", "skipv1"), ("mla",), ("mla", "skipv1"))
LENGTH = 1024
# Backend and options of LeanQuantizedCache; None: a plain cache.
CACHES: dict[str, tuple[str, dict[str, Any]] | None] = {
    "bfloat16": None,
    "8 bits (fp8)": ("fp8", {}),
    "4 bits (quanto)": ("quanto", {"nbits": 4}),
    "2 bits (quanto)": ("quanto", {"nbits": 2}),
    "8 and 4 bits (kivi)": ("kivi", {"key_bits": 8, "value_bits": 4}),
    "4 bits (kivi)": ("kivi", {"key_bits": 4, "value_bits": 4}),
}


def measure(_options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for mechanisms in MODELS:
        model = LeanForCausalLM(preset(BASE, *mechanisms)).to(torch.bfloat16).eval()
        measured = {name: bytes_per_token(model, chosen) for name, chosen in CACHES.items()}
        rows.append({"name": "+".join((BASE, *mechanisms)), "bytes_per_token": measured})
    return {"tokens": LENGTH, "rows": rows}


def bytes_per_token(model: LeanForCausalLM, chosen: tuple[str, dict[str, Any]] | None) -> float:
    cache: Cache = dynamic_cache(model.config.plan)
    if chosen is not None:
        backend, options = chosen
        cache = LeanQuantizedCache(backend, model.config, **options)
    with torch.no_grad():
        model(input_ids=torch.arange(LENGTH)[None], past_key_values=cache, logits_to_keep=1)
    return cache_bytes(cache) / LENGTH


def tables(record: dict[str, Any]) -> str:
    """Return the record as Markdown: bytes, and their share of the first model's plain cache."""
    caches = record["rows"][0]["bytes_per_token"]
    whole = caches["bfloat16"]
    rows = [
        (f"`{row['name']}`", *(f"{size:,.0f} ({size / whole:.0%})" for size in row["bytes_per_token"].values()))
        for row in record["rows"]
    ]
    return harness.table(("model", *caches), rows, "l" + "r" * len(caches))


if __name__ == "__main__":
    harness.run(harness.command_line(__doc__), measure, tables)
