"""A checkpoint of LLaMA-7B's shape converted: time per layer and peak memory.

The checkpoint is random, made on the spot in bfloat16 shards, with as many layers as --layers says; a layer takes
0.4 GB of disk, and 0.4 GB again for the result. Its loss means nothing. Calibration runs on the sources of Python.

    python benchmarks/convert_large.py --directory DIRECTORY --tokens 16384 --out results/real/llama-7b-latents.json
    python benchmarks/convert_large.py --directory DIRECTORY --to merged-values --out results/real/llama-7b-shape.json
    python benchmarks/convert_large.py --tables results/real/llama-7b-shape.json
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

import harness
import torch
from eliminate_large import make, run, size

from leanqkv import LeanConfig
from leanqkv.data import prepare_data
from leanqkv.errors import LeanError
from leanqkv.files import read_json
from leanqkv.model.shapes import parameter_shapes

LATENTS, MERGED_VALUES = "latents", "merged-values"
LAYERS = 32  # of LLaMA-7B
# Dense bfloat16 on one H100 is 989 TFLOP/s; large products of float32 inputs (TF32) run at about half of it, of which
# half is a cautious share.
H100_FLOPS = 0.25 * 989e12


def measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.directory is None:
        raise LeanError("give --directory, for the checkpoints")
    source, result = options.directory / "source", options.directory / "result"
    config = source_config(options.layers)
    if not source.exists():
        make(config, source)
        tokenizer = prepare_data(None, vocab_size=4096).tokenizer()
        assert tokenizer is not None
        tokenizer.save_pretrained(source)
    command = ["convert", str(source), "--to", options.to, "--calibration", "stdlib", "--dtype", "bf16"]
    cost = run([*command, "--tokens", str(options.tokens), "--out", str(result)])
    conversion = read_json(result / "conversion.json")
    block = sum(torch.Size(shape).numel() for name, shape in parameter_shapes(config).items() if "layers.0." in name)
    record = {
        "to": options.to,
        "layers": options.layers,
        "tokens": conversion["calibration_tokens"],
        "threads": torch.get_num_threads(),
        "source_bytes": size(source),
        "layer_parameters": block,
        "convert": cost,
        "calibration_seconds": conversion["seconds"],
        "seconds_per_layer": conversion["seconds"] / options.layers,
        "kv_bytes_per_token_bf16": conversion["kv_bytes_per_token_bf16"],
    }
    if not options.keep:
        shutil.rmtree(options.directory)
    return record


def source_config(layers: int) -> LeanConfig:
    return LeanConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=layers,
        num_attention_heads=32,
        vocab_size=32000,
        max_position_embeddings=2048,
        position_embedding_type="rope",
        norm_type="rmsnorm",
        mlp_type="gated",
        hidden_act="silu",
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )


def tables(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    # Three forward passes of a layer; Gram matrices, attended values and features are as much again.
    flops = 2 * 3 * 2 * record["layer_parameters"] * LAYERS
    row = (
        record.get("to", MERGED_VALUES),
        f"{record['layers']}",
        f"{record['tokens']:,}",
        f"{record['seconds_per_layer']:.0f} s",
        f"{record['convert']['peak_resident_bytes'] / 1e9:.2f} GB",
        f"{131_072 * flops / H100_FLOPS / 60:.1f} min",
    )
    header = (
        "conversion to",
        "layers",
        "tokens",
        "time per layer",
        "peak resident memory",
        "32 layers, 131,072 tokens, one H100",
    )
    return harness.table(header, [row])


def main() -> None:
    parser = harness.command_line(__doc__)
    parser.add_argument("--directory", type=Path, help="for the checkpoints")
    parser.add_argument("--to", choices=(LATENTS, MERGED_VALUES), default=LATENTS)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--keep", action="store_true", help="do not delete the checkpoints")
    harness.run(parser, measure, tables)


if __name__ == "__main__":
    main()
