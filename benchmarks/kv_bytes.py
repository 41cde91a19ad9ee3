"""P3's Table 2: KV bytes per token, by formula, measured on a real cache at the paper's size, and as printed.

python benchmarks/kv_bytes.py --out results/kv-bytes.json
"""

import argparse
from pathlib import Path

import torch

from leanqkv import LeanForCausalLM, cache_bytes, kv_bytes_per_token, preset
from leanqkv.environment import git_commit, hardware, versions
from leanqkv.files import write_json

# LLaMA-350M: 24 layers, 16 heads of 64; grouped by two; d_c = 256, d_R = 32. The paper counts GQA in elements of 4
# bytes and MLA in elements of 2.
ROWS = (
    ("Transformer-GQA", ("gqa",), "float32", 98_304),
    ("SkipV1Former-GQA", ("skipv1", "gqa"), "float32", 74_752),
    ("Transformer-MLA", ("mla",), "bfloat16", 13_824),
    ("SkipV1Former-MLA", ("skipv1", "mla"), "bfloat16", 7_680),
)
LENGTH = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows = []
    for title, mechanisms, name, printed in ROWS:
        dtype = getattr(torch, name)
        config = preset("llama-350m", *mechanisms)
        model = LeanForCausalLM(config).to(dtype).eval()
        with torch.no_grad():
            cache = model(input_ids=torch.arange(LENGTH)[None], use_cache=True, logits_to_keep=1).past_key_values
        measured = cache_bytes(cache) / LENGTH
        formula = kv_bytes_per_token(config, dtype=dtype)
        rows.append(
            {"model": title, "name": f"llama-350m+{'+'.join(mechanisms)}", "dtype": name, "formula": formula}
            | {"measured": measured, "published": printed}
        )
        print(f"| {title} | {name} | {formula:,} | {measured:,.0f} | {printed:,} |", flush=True)
    if asked.out:
        about = {"hardware": hardware("cpu"), "versions": versions(), "git_commit": git_commit()}
        record = {"record": 1, "command": "python benchmarks/kv_bytes.py", "tokens": LENGTH, "rows": rows}
        write_json(asked.out, record | about)


if __name__ == "__main__":
    main()
