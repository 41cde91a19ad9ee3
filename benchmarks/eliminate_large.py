"""Q and P out of a skipless checkpoint of Mistral-7B's shape: time, peak memory, killed and started again.

The checkpoint is made on the spot, bfloat16 in shards; the result is float32. Its gate is the sigmoid and its weights
keep the size of the signal: without norms and skips a SiLU gate squares it in every layer, and 32 of them leave zero or
infinity, by which nothing can be certified. `leanqkv eliminate` is
killed once on the way and run again; then `leanqkv inspect` reads the source. Needs 40 GB of disk.

    python benchmarks/eliminate_large.py --directory DIRECTORY --out results/exact/mistral-7b-shape.json
    python benchmarks/eliminate_large.py --tables results/exact/mistral-7b-shape.json
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from leanqkv import LeanConfig
from leanqkv.checkpoints.tensors import LazyTensors
from leanqkv.checkpoints.write import save_config, write_checkpoint
from leanqkv.environment import git_commit, hardware, versions
from leanqkv.files import read_json, write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, help="print a record as Markdown, and do nothing else")
    parser.add_argument("--directory", type=Path, help="where the checkpoints are made")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kill-after", type=int, default=3, help="shards written")
    parser.add_argument("--keep", action="store_true", help="do not delete the checkpoints")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.tables is not None:
        print(tables(read_json(asked.tables)))
        return
    if asked.directory is None:
        parser.error("give --directory")
    source, result = asked.directory / "source", asked.directory / "result"
    config = LeanConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=asked.layers,
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
    if not source.exists():
        make(config, source)
    record: dict[str, Any] = {"record": 1, "layers": asked.layers, "source_bytes": size(source)}
    command = ["eliminate", str(source), "--remove", "query,output", "--out", str(result)]
    partial = asked.directory / ".result.partial"
    record["killed"] = run(command, partial, asked.kill_after)
    record["killed"]["shards"] = shards(partial)
    record["eliminate"] = run(command)
    certificate = json.loads((result / "certificate.json").read_text())
    record["result_bytes"] = size(result)
    record["certificate"] = {
        **{key: certificate[key] for key in ("parameters", "dtypes", "dtype", "exact", "weights_sha256")},
        "worst_condition": max(certificate["conditions"].values()),
    }
    if not asked.keep:
        shutil.rmtree(result)
    record["inspect"] = run(["inspect", str(source)])
    if not asked.keep:
        shutil.rmtree(source)
    record |= {"hardware": hardware("cpu"), "versions": versions(), "git_commit": git_commit()}
    print(json.dumps(record, indent=1))
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(asked.out, record)


def tables(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    runs = (
        (f"`eliminate`, killed after {record['killed']['shards']} shards", record["killed"]),
        ("the same command again, to the end", record["eliminate"]),
        ("`inspect` on the source", record["inspect"]),
    )
    lines = ["| run | wall time | peak resident memory |", "| --- | ---: | ---: |"]
    for name, of in runs:
        lines.append(f"| {name} | {of['seconds'] / 60:.0f} min | {of['peak_resident_bytes'] / 1e9:.2f} GB |")
    lines += ["", "| the result, stored in float32, computed in | fp64 | fp32 | bf16 |", "| --- | ---: | ---: | ---: |"]
    for side in ("result", "original"):
        errors = (
            f"{record['certificate']['dtypes'][dtype][side]['relative']:.1e}" for dtype in ("fp64", "fp32", "bf16")
        )
        lines.append(f"| {'relative error' if side == 'result' else 'of the original'} | " + " | ".join(errors) + " |")
    return "\n".join(lines)


def make(config: LeanConfig, directory: Path) -> None:
    """Each tensor from its own seed, N(0, 1 / inputs), and 1.8 times that deviation behind the gate, which is 1/2
    on average. A large one is drawn row by row in float32 and kept in bfloat16."""
    shapes = config.plan.parameter_shapes
    numbers = {name: number for number, name in enumerate(shapes)}

    def draw(name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(numbers[name])
        tensor = torch.empty(shapes[name], dtype=torch.bfloat16)
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
    """Wall time and peak resident memory of a `leanqkv` command in a process of its own, which is killed as soon as
    `watched` has so many shards."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "leanqkv.cli", *command], stdout=sys.stderr)
    if watched is not None:
        while shards(watched) < kill_after and process.poll() is None:
            time.sleep(0.5)
        process.send_signal(signal.SIGKILL)
    _, status, usage = os.wait4(process.pid, 0) if process.returncode is None else (0, process.returncode, None)
    found = {"seconds": time.perf_counter() - start, "exit": os.waitstatus_to_exitcode(status) if usage else status}
    if usage is not None:
        unit = 1 if sys.platform == "darwin" else 1024
        found["peak_resident_bytes"] = usage.ru_maxrss * unit
    print(command[0], found, file=sys.stderr, flush=True)
    if watched is None and found["exit"]:
        sys.exit(f"leanqkv {command[0]} failed")
    return found


def size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


if __name__ == "__main__":
    main()
