"""A checkpoint of the shape of LLaMA-2-7B, LLaMA-3-8B or Qwen3-8B converted: forward passes of a layer, peak memory.

The checkpoint is random, made on the spot in bfloat16 shards, with as many layers as --layers says; a layer takes
0.4 GB of disk, and 0.4 GB again for the result, beside embedding and head. Its loss means nothing. Calibration runs on
the sources of Python. A forward pass of a layer is that of its block over as many tokens, in float32 with SDPA: the
mean of one timing before the conversion and one after it.

    python benchmarks/convert_large.py --directory DIRECTORY --out results/real/llama-2-7b-shape-latents.json
    python benchmarks/convert_large.py --directory DIRECTORY --shape llama-3-8b --out results/real/llama-3-8b-shape.json
    python benchmarks/convert_large.py --directory DIRECTORY --to merged-values --out results/real/llama-7b-shape.json
    python benchmarks/convert_large.py --tables results/real/llama-2-7b-shape-latents.json
"""

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

import harness
import torch
from eliminate_large import make, run, size

from leanqkv import LeanConfig
from leanqkv.checkpoints.open import open_checkpoint
from leanqkv.convert.activations import Layers
from leanqkv.data.prepare import prepare_data
from leanqkv.errors import LeanError
from leanqkv.files import read_json
from leanqkv.model.shapes import parameter_shapes

LATENTS, UNROTATED, MERGED_VALUES = "latents", "unrotated-latents", "merged-values"
LAYERS = 32  # of LLaMA-7B
# Dense bfloat16 on one H100 is 989 TFLOP/s; large products of float32 inputs (TF32) run at about half of it, of which
# half is a cautious share.
H100_FLOPS = 0.25 * 989e12
SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": {"intermediate_size": 11008, "vocab_size": 32000},
    "llama-3-8b": {"intermediate_size": 14336, "vocab_size": 128_256, "num_key_value_heads": 8},
    "qwen3-8b": {"intermediate_size": 12288, "vocab_size": 151_936, "num_key_value_heads": 8, "qk_norm": True},
}
LENGTH, BATCH, FORWARD_BATCHES = 512, 4, 4


def measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.directory is None:
        raise LeanError("give --directory, for the checkpoints")
    source, result = options.directory / "source", options.directory / "result"
    config = source_config(options.shape, options.layers)
    if not source.exists():
        make(config, source)
        tokenizer = prepare_data(None, vocab_size=4096).tokenizer
        assert tokenizer is not None
        tokenizer.save_pretrained(source)
    command = ["convert", str(source), "--to", options.to, "--calibration", "stdlib", "--dtype", "bf16"]
    before = forward_pass(source, config)
    cost = run([*command, "--tokens", str(options.tokens), "--out", str(result)])
    conversion = read_json(result / "conversion.json")
    block = sum(torch.Size(shape).numel() for name, shape in parameter_shapes(config).items() if "layers.0." in name)
    after, tokens = forward_pass(source, config), conversion["calibration_tokens"]
    forward = {name: (before[name] + after[name]) / 2 for name in before}
    record = {
        "to": options.to,
        "shape": options.shape,
        "layers": options.layers,
        "tokens": tokens,
        "threads": torch.get_num_threads(),
        "source_bytes": size(source),
        "layer_parameters": block,
        "convert": cost,
        "calibration_seconds": conversion["seconds"],
        "seconds_per_layer": conversion["seconds"] / options.layers,
        "forward_per_token": forward,
        "passes": conversion["seconds"] / options.layers / (forward["seconds"] * tokens),
        "passes_cpu": cost["cpu_seconds"] / options.layers / (forward["cpu_seconds"] * tokens),
        "kv_bytes_per_token_bf16": conversion["kv_bytes_per_token_bf16"],
    }
    if not options.keep:
        shutil.rmtree(options.directory)
    return record


@torch.no_grad()
def forward_pass(source: Path, config: LeanConfig) -> dict[str, float]:
    """Return the seconds of a forward pass of one token through a layer."""
    layers = Layers(config, open_checkpoint(source).tensors, LENGTH, torch.device("cpu"))
    layers.config._attn_implementation = "sdpa"
    block, stream = layers.block(0), torch.randn(BATCH, LENGTH, config.hidden_size)
    layers.run(block, 0, stream)  # what only the first pass takes is left out
    started, cpu = time.perf_counter(), time.process_time()
    for _ in range(FORWARD_BATCHES):
        layers.run(block, 0, stream)
    tokens = FORWARD_BATCHES * BATCH * LENGTH
    return {
        "seconds": (time.perf_counter() - started) / tokens,
        "cpu_seconds": (time.process_time() - cpu) / tokens,
    }


def source_config(shape: str, layers: int) -> LeanConfig:
    return LeanConfig(
        hidden_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=32,
        max_position_embeddings=2048,
        position_embedding_type="rope",
        norm_type="rmsnorm",
        mlp_type="gated",
        hidden_act="silu",
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
        **SHAPES[shape],
    )


def tables(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    # Three forward passes of a layer; Gram matrices, attended values and features are as much again.
    flops = 2 * 3 * 2 * record["layer_parameters"] * LAYERS
    measured = "passes" in record
    row = (
        record.get("shape", "llama-7b"),
        record.get("to", MERGED_VALUES),
        f"{record['layers']}",
        f"{record['tokens']:,}",
        f"{record['seconds_per_layer']:.0f} s",
        f"{record['passes']:.1f}" if measured else "",
        f"{record['passes_cpu']:.1f}" if measured else "",
        f"{record['convert']['peak_resident_bytes'] / 1e9:.2f} GB",
        f"{131_072 * flops / H100_FLOPS / 60:.1f} min",
    )
    header = (
        "shape",
        "conversion to",
        "layers",
        "tokens",
        "time per layer",
        "forward passes",
        "whole command, CPU time",
        "peak resident memory",
        "32 layers, 131,072 tokens, one H100",
    )
    return harness.table(header, [row])


def main() -> None:
    parser = harness.command_line(__doc__)
    parser.add_argument("--directory", type=Path, help="for the checkpoints")
    parser.add_argument("--shape", choices=SHAPES, default="llama-2-7b")
    parser.add_argument("--to", choices=(LATENTS, UNROTATED, MERGED_VALUES), default=LATENTS)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--keep", action="store_true", help="do not delete the checkpoints")
    harness.run(parser, measure, tables)


if __name__ == "__main__":
    main()
