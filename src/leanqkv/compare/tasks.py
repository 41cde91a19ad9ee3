"""Trained models of a comparison on downstream tasks of lm-eval, a file beside each run's record."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.open import load_model, open_checkpoint
from ..checkpoints.tensors import weights_hash
from ..checkpoints.tokenizer import load_tokenizer
from ..environment import check_device, made_on
from ..errors import LeanError
from ..evaluate.harness import load_tasks, mean_accuracy, task_scores, tasks_hash
from ..files import RECORD_FORMAT, read_json, write_json
from ..train.precision import parse_precision
from ..train.processes import connect, first_decides

FILE = "tasks.json"


@dataclass(frozen=True)
class Tasks:
    """What models are scored on; fields as `load_tasks` and `task_scores` take them, and the tasks' hash."""

    names: tuple[str, ...]
    limit: int | None
    include_path: Path | None
    sha256: str

    @classmethod
    def checked(cls, names: tuple[str, ...], limit: int | None, include_path: Path | None) -> "Tasks | None":
        """Return the tasks, or None where there are no names; they are loaded once, before anything is trained.

        Raises:
            LeanError: as `load_tasks`, or options without tasks.
        """
        if not names:
            for name, value in (("limit", limit), ("include_path", include_path)):
                if value is not None:
                    raise LeanError(f"`{name}` goes with `tasks`; leave it out")
            return None
        digest = tasks_hash(load_tasks(names, include_path))
        return cls(names, limit, None if include_path is None else include_path.absolute(), digest)


def score_runs(runs: Sequence[Path], tasks: Tasks, shard: str | None, device: str | None) -> None:
    """Score every run that has a model and no scores of the same tasks yet. Of several processes the first one does."""
    device = check_device(device)
    connect(device, shard)
    first_decides(lambda: _score_all(runs, tasks, device))


def _score_all(runs: Sequence[Path], tasks: Tasks, device: str) -> None:
    loaded = None
    for out in runs:
        if not (out / "config.json").exists():  # not trained here, or diverged
            continue
        asked = {"names": list(tasks.names), "limit": tasks.limit, "tasks_sha256": tasks.sha256}
        asked["weights_sha256"] = weights_hash(out)
        if (out / FILE).exists() and asked.items() <= read_json(out / FILE).items():
            continue
        loaded = loaded or load_tasks(tasks.names, tasks.include_path)
        write_json(out / FILE, {"record": RECORD_FORMAT, **asked, **_figures(out, loaded, tasks.limit, device)})


def _figures(out: Path, tasks: dict[str, dict[str, Any]], limit: int | None, device: str) -> dict[str, Any]:
    """Return a record's entries on a model's scores, in the precision of its run but for compilation."""
    precision = parse_precision(read_json(out / "record.json")["precision"]["choice"])
    assert precision is not None
    precision = replace(precision, compiled=False)
    model = load_model(open_checkpoint(out), torch.float32)
    precision.apply(model)
    dtype = torch.bfloat16 if precision.dtype == "bf16" else None
    figures = task_scores(model.to(device), load_tokenizer(out), tasks, limit=limit, autocast_dtype=dtype).figures
    made = {"precision": str(precision), "lm_eval": version("lm_eval"), **made_on(device)}
    return {"tasks": figures, "mean_acc": mean_accuracy(figures), **made}
