"""The directory of a comparison with six architectures, as if it had been trained, for the tests of what reads it."""

import json
import math
from pathlib import Path
from typing import Any

STEPS = list(range(0, 601, 50))
RATES = [1e-3, 3e-3, 1e-2]
# name -> parameters (total, non-embedding), bf16 cache bytes per token, loss above the baseline's at the end, by seed
ARCHITECTURES: dict[str, tuple[int, int, int, tuple[float, float]]] = {
    "tiny": (1_334_784, 794_112, 2048, (0.0, 0.0)),
    "tiny+skipv1": (1_310_208, 769_536, 1664, (-0.0210, -0.0212)),
    "tiny+identity-query": (1_269_248, 728_576, 2048, (-0.004, 0.006)),
    "tiny+nonlinear-query": (1_334_784, 794_112, 2048, (-0.0300, -0.0304)),
    "tiny+mqa": (1_236_480, 695_808, 512, (0.0510, 0.0518)),
    "tiny+identity-query+skipv1": (1_244_672, 704_000, 1664, (-0.013, -0.016)),
}


def curve(end: float) -> list[dict[str, Any]]:
    """From ln 4096 down to `end`, wobbling a little on the way."""
    shape = [math.exp(-step / 110) for step in STEPS]
    wobble = [0.02 * math.sin(end * 90 + step / 40) * (1 - step / 600) for step in STEPS]
    return [
        {"step": step, "loss": end + (8.32 - end) * (s - shape[-1]) / (1 - shape[-1]) + w}
        for step, s, w in zip(STEPS, shape, wobble, strict=True)
    ]


def record(name: str, seed: int, loss: float, role: str = "final", rate: float = 3e-3) -> dict[str, Any]:
    total, non_embedding, kv_bytes, _ = ARCHITECTURES[name]
    return {
        "record": 1,
        "role": role,
        "name": name,
        "seed": seed,
        "recipe": {
            "steps": 600,
            "batch_size": 16,
            "learning_rate": rate,
            "min_learning_rate": rate / 10,
            "weight_decay": 0.03125 if name == "tiny+nonlinear-query" else 0.1,
            "warmup_steps": 60,
            "schedule_steps": None,
            "beta1": 0.9,
            "beta2": 0.95,
            "max_grad_norm": 1.0,
        },
        "context_length": 128,
        "parameters": {"total": total, "non_embedding": non_embedding},
        "kv_bytes_per_token": {"bfloat16": kv_bytes, "float32": 2 * kv_bytes},
        "data": {
            "description": "Public domain English prose, byte-pair vocabulary of 4,096",
            "sha256": "5f2d" * 16,
            "train_tokens": 3_214_567,
            "validation_tokens": 164_211,
            "bytes_per_token": 3.412,
        },
        "batch_plan": {"sha256": f"{seed}c7e" * 16, "evaluation_sequences": 256},
        "precision": {"choice": "fp32", "milliseconds_per_step": {}},
        "hardware": {"device": "cpu", "cpu": "Example CPU @ 2.60GHz", "instructions": "AVX2", "threads": 2},
        "versions": {"leanqkv": "0.1.0", "torch": "2.11.0", "transformers": "5.17.0", "python": "3.11.7"},
        "git_commit": "0123456789abcdef0123456789abcdef01234567",
        "tokens": 600 * 16 * 128,
        "evaluations": curve(loss),
        "training": [{"step": 10, "loss": 7.5}],
        "final": {"validation_loss": loss, "perplexity": math.exp(loss)},
        "tokens_per_second": 24_000.0 + 100 * seed + kv_bytes,
        "seconds": 51.2,
        "diverged": None,
        "rise": None,
        "checkpoints_kept": False,
    }


def diverge(run: dict[str, Any], step: int) -> dict[str, Any]:
    run["evaluations"] = [at for at in run["evaluations"] if at["step"] < step]
    return run | {"final": None, "diverged": {"step": step, "reason": "loss is nan"}}


def save(directory: Path, run: dict[str, Any]) -> Path:
    folder = directory / "runs" / f"{run['role']}-{run['name']}-{run['seed']}-{run['recipe']['learning_rate']:g}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.json").write_text(json.dumps(run))
    return folder / "record.json"


def build(directory: Path, grid: bool = True) -> Path:
    """Six architectures, two seeds, a search over three rates whose highest diverges for one architecture."""
    directory.mkdir(parents=True, exist_ok=True)
    plan = {
        "title": "Smaller caches at the tiny size",
        "suite": "tiny",
        "scale": None,
        "command": "leanqkv compare " + " ".join(ARCHITECTURES) + " --seeds 0,1 --lr-grid 1e-3,3e-3,1e-2",
        "groups": [list(ARCHITECTURES)],
        "entries": {name: {"row": ""} for name in ARCHITECTURES},
        "recipe": {},
        "seeds": [0, 1],
        "grid": {"seed": 2, "learning_rates": RATES} if grid else None,
        "chosen_learning_rate": dict.fromkeys(ARCHITECTURES, 3e-3),
        "notes": ["A size for trying things out; <not> the papers'."],
    }
    (directory / "compare.json").write_text(json.dumps(plan))
    for place, (name, (*_, above)) in enumerate(ARCHITECTURES.items()):
        for seed, extra in enumerate(above):
            save(directory, record(name, seed, 3.9 + 0.01 * seed + extra))
        for rate in RATES if grid else []:
            run = record(name, 2, 3.9 + 0.05 * math.log(rate / 3e-3) ** 2 + 0.01 * place, "grid", rate)
            save(directory, diverge(run, 120) if (name, rate) == ("tiny+mqa", 1e-2) else run)
    return directory


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def folders(directory: Path, name: str, seed: int) -> list[Path]:
    return list((directory / "runs").glob(f"final-{name}-{seed}-*"))
