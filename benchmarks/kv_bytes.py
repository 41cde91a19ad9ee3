"""P3's Table 2: KV bytes per token by formula, measured on a real cache of the paper's size, and as printed.

python benchmarks/kv_bytes.py --out results/kv-bytes.json
"""

import argparse
from typing import Any

import harness
import torch

from leanqkv import LeanForCausalLM, cache_bytes, kv_bytes_per_token, preset

# LLaMA-350M: 24 layers, 16 heads of 64; grouped by two; d_c = 256, d_R = 32. The paper counts GQA in elements of 4
# bytes and MLA in elements of 2.
ROWS = (
    ("Transformer-GQA", ("gqa",), "float32", 98_304),
    ("SkipV1Former-GQA", ("skipv1", "gqa"), "float32", 74_752),
    ("Transformer-MLA", ("mla",), "bfloat16", 13_824),
    ("SkipV1Former-MLA", ("skipv1", "mla"), "bfloat16", 7_680),
)
LENGTH = 16


def measure(_options: argparse.Namespace) -> dict[str, Any]:
    return {"tokens": LENGTH, "rows": [row(*which) for which in ROWS]}


def row(title: str, mechanisms: tuple[str, ...], dtype_name: str, published: int) -> dict[str, Any]:
    dtype = getattr(torch, dtype_name)
    config = preset("llama-350m", *mechanisms)
    model = LeanForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        cache = model(input_ids=torch.arange(LENGTH)[None], use_cache=True, logits_to_keep=1).past_key_values
    return {
        "model": title,
        "name": f"llama-350m+{'+'.join(mechanisms)}",
        "dtype": dtype_name,
        "formula": kv_bytes_per_token(config, dtype=dtype),
        "measured": cache_bytes(cache) / LENGTH,
        "published": published,
    }


def tables(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    rows = []
    for row in record["rows"]:
        sizes = (f"{row['formula']:,}", f"{row['measured']:,.0f}", f"{row['published']:,}")
        rows.append((f"{row['model']}, `{row['name']}`", row["dtype"], *sizes))
    return harness.table(("model", "element", "by formula", "measured", "P3 Table 2"), rows, "llrrr")


if __name__ == "__main__":
    harness.run(harness.command_line(__doc__), measure, tables)
