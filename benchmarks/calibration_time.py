"""How long the calibrated conversion takes, and how much memory, at GPT-2 small's shape (random weights).

python benchmarks/calibration_time.py --out results/conversion/gpt2-small-time.json
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
import torch

from leanqkv import LeanForCausalLM, preset
from leanqkv.data.prepare import prepare_data
from leanqkv.environment import made_on
from leanqkv.files import RECORD_FORMAT, read_json, write_json

MODEL = "gpt2-124m"


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    source, tokens = record["conversion"]["source"], record["conversion"]["calibration_tokens"]
    size = " | ".join(str(source[f"num_{part}"]) for part in ("hidden_layers", "attention_heads"))
    cost = f"{record['seconds'] / 60:.1f} min | {record['peak_resident_bytes'] / 1e9:.1f} GB"
    return (
        "| model | layers | heads | calibration tokens | threads | time | resident, at most |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        f"| `{record['model']}` | {size} | {tokens:,} | {record['threads']} | {cost} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=49_152)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        source, result = Path(directory, "source"), Path(directory, "result")
        torch.manual_seed(0)
        LeanForCausalLM(preset(MODEL)).save_pretrained(source)
        tokenizer = prepare_data(None, vocab_size=4096).tokenizer
        assert tokenizer is not None
        tokenizer.save_pretrained(source)
        command = ["convert", str(source), "--to", "skipv1", "--calibration", "stdlib", "--tokens", str(asked.tokens)]
        code, cost = harness.launched([sys.executable, "-m", "leanqkv.cli", *command, "--out", str(result)])
        if code:
            sys.exit(f"leanqkv convert failed with {code}")
        record = {
            "record": RECORD_FORMAT,
            "model": MODEL,
            "seconds": cost["seconds"],
            "peak_resident_bytes": cost["peak_resident_bytes"],
            "threads": torch.get_num_threads(),
            "conversion": read_json(result / "conversion.json"),
            **made_on("cpu"),
        }
    print(table(record))
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(asked.out, record)


if __name__ == "__main__":
    main()
