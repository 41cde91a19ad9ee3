"""W_Q and W_P removed from a skipless checkpoint of Mistral-7B's shape: time, peak memory, killed and started again.

The checkpoint is made on the spot, bfloat16 in shards; the result is float32. Its gate is the sigmoid and its weights
keep the size of the signal: without norms and skips a SiLU gate squares it in every layer, and after 32 of them it is
zero or infinite, which leaves nothing to certify. `leanqkv eliminate` is killed once on the way and run again; then
`leanqkv inspect` reads the source. Needs 40 GB of disk.

    python benchmarks/eliminate_large.py --directory DIRECTORY --out results/exact/mistral-7b-shape.json
    python benchmarks/eliminate_large.py --tables results/exact/mistral-7b-shape.json
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import harness
import psutil
import torch

from leanqkv import LeanConfig
from leanqkv.checkpoints.tensors import LazyTensors
from leanqkv.checkpoints.write import save_config, write_checkpoint
from leanqkv.errors import LeanError
from leanqkv.files import read_json
from leanqkv.model.shapes import parameter_shapes


def measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.directory is None:
        raise LeanError("give --directory, for the checkpoints")
    source, result = options.directory / "source", options.directory / "result"
    if not source.exists():
        make(source_config(options.layers), source)
    record: dict[str, Any] = {"layers": options.layers, "source_bytes": size(source)}
    command = ["eliminate", str(source), "--remove", "query,output", "--out", str(result)]
    partial = options.directory / ".result.partial"
    record["killed"] = run(command, partial, options.kill_after)
    record["killed"]["shards"] = shards(partial)
    record["eliminate"] = run(command)
    certificate = read_json(result / "certificate.json")
    record["result_bytes"] = size(result)
    record["certificate"] = {
        **{key: certificate[key] for key in ("parameters", "dtypes", "dtype", "exact", "weights_sha256")},
        "worst_condition": max(certificate["conditions"].values()),
    }
    if not options.keep:
        shutil.rmtree(result)
    record["inspect"] = run(["inspect", str(source)])
    if not options.keep:
        shutil.rmtree(source)
    return record


def source_config(layers: int) -> LeanConfig:
    return LeanConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=4096,
        position_embedding_type="rope",
        norm_type="none",
        attention_skip=False,
        mlp_skip=False,
        mlp_type="gated",
        hidden_act="sigmoid",
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )


def tables(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    runs = {
        f"`eliminate`, killed after {record['killed']['shards']} shards": record["killed"],
        "the same command again, to the end": record["eliminate"],
        "`inspect` on the source": record["inspect"],
    }
    costs = [
        (name, f"{cost['seconds'] / 60:.0f} min", f"{cost['peak_resident_bytes'] / 1e9:.2f} GB")
        for name, cost in runs.items()
    ]
    dtypes = ("fp64", "fp32", "bf16")
    errors = [
        (name, *(f"{record['certificate']['dtypes'][dtype][side]['relative']:.1e}" for dtype in dtypes))
        for side, name in (("result", "relative error"), ("original", "of the original"))
    ]
    return "\n\n".join(
        (
            harness.table(("run", "wall time", "peak resident memory"), costs),
            harness.table(("the result, stored in float32, computed in", *dtypes), errors),
        )
    )


def make(config: LeanConfig, directory: Path) -> None:
    """Write a random checkpoint: each matrix from its own seed, N(0, 1 / inputs), with 1.8 times that deviation behind
    the gate, which is 1/2 on average. A large one is drawn row by row in float32 and kept in bfloat16."""
    shapes = parameter_shapes(config)
    numbers = {name: number for number, name in enumerate(shapes)}

    def draw(name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(numbers[name])
        tensor = torch.empty(shapes[name], dtype=torch.bfloat16)
        if tensor.ndim == 1:  # of a norm
            return torch.ones_like(tensor)
        inputs = 1 if "embed" in name else tensor.shape[1]
        deviation = (1.8 if "down_proj" in name else 1) * inputs**-0.5
        for rows in tensor.split(1024):
            rows.copy_(torch.randn(rows.shape, generator=generator) * deviation)
        return tensor

    directory.parent.mkdir(parents=True, exist_ok=True)
    write_checkpoint(
        directory,
        shapes,
        LazyTensors(shapes, draw),
        torch.bfloat16,
        job={"made": "on the spot"},
        finish=lambda where: save_config(config, where),
    )


def shards(directory: Path) -> int:
    return len(list(directory.glob("model-*.safetensors")))


def run(command: list[str], watched: Path | None = None, kill_after: int = 0) -> dict[str, Any]:
    """Run a `leanqkv` command in its own process and return wall and CPU time, exit code and peak resident memory.

    With `watched` it is killed as soon as that directory has `kill_after` shards.
    """

    def kill(launcher: subprocess.Popen[str]) -> None:
        while watched is not None and launcher.poll() is None:
            for child in psutil.Process(launcher.pid).children() if shards(watched) >= kill_after else ():
                child.kill()
            time.sleep(0.5)

    code, cost = harness.launched([sys.executable, "-m", "leanqkv.cli", *command], kill)
    print(command[0], cost, file=sys.stderr, flush=True)
    if watched is None and code:
        sys.exit(f"leanqkv {command[0]} failed")
    return {**cost, "exit": code}


def size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def main() -> None:
    parser = harness.command_line(__doc__)
    parser.add_argument("--directory", type=Path, help="for the checkpoints, 40 GB")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kill-after", type=int, default=3, help="shards written")
    parser.add_argument("--keep", action="store_true", help="do not delete the checkpoints")
    harness.run(parser, measure, tables)


if __name__ == "__main__":
    main()
