"""Where a difference between trained models lies: in tokens that could be copied from their context, or in others.

    python benchmarks/copying.py runs/mine --out results/mine/copying.json
    python benchmarks/copying.py --tables results/mine/copying.json

A token can be copied where the pair of the token before it and itself stands earlier in its sequence: what an induction
head completes (Olsson et al. 2022, https://arxiv.org/abs/2209.11895). Such pairs are frequent ones, too. So the same
pairs are also scored where they stand in a sequence for the first time.

The models are those of a finished comparison, or of as much of it as is there; every one scores the same held-out
sequences, in as many forward passes. An --out that is there keeps the runs that it has, so that seeds can be measured
one after another.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import torch

from leanqkv import LeanForCausalLM
from leanqkv.compare.records import ComparisonRecord, Run, load_comparison
from leanqkv.compare.statistics import PairedDifference, over_seeds
from leanqkv.data.batches import collate
from leanqkv.data.prepare import prepare_data
from leanqkv.errors import LeanError
from leanqkv.evaluate.paired import spread_windows
from leanqkv.evaluate.strided import window_losses
from leanqkv.files import read_json
from leanqkv.progress import progress_bar
from leanqkv.report.text import ABSENT, with_interval

KINDS = ("copied", "other", "same pairs at first")


def can_be_copied(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return where the pair (input, target) stands earlier in the same sequence; all [sequences, positions]."""
    found = []
    for sequence, following in zip(inputs, targets, strict=True):
        same = (sequence[:, None] == sequence) & (following[:, None] == following)
        found.append(same.tril(-1).any(-1))
    return torch.stack(found)


def weights_of_kinds(inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the weight of every position in the mean of each of KINDS, float64 [sequences, positions], of sum one.

    The last is the mean over the pairs that can be copied somewhere, where they cannot, each pair with the number of
    times that it can.
    """
    copied = can_be_copied(inputs, targets)
    pairs, index = torch.unique(torch.stack((inputs, targets), -1).flatten(0, 1), dim=0, return_inverse=True)
    index = index.view_as(inputs)
    times, other_times = (index[chosen].bincount(minlength=len(pairs)).double() for chosen in (copied, ~copied))
    weights = (
        copied.double(),
        (~copied).double(),
        ~copied * (times / other_times)[index],  # a pair that can be copied stood somewhere for the first time
    )
    for kind, each in zip(KINDS, weights, strict=True):
        if not each.any():
            raise LeanError(f"there are no tokens of the kind {kind!r}; give more --sequences")
    return {kind: each / each.sum() for kind, each in zip(KINDS, weights, strict=True)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record's parts."""
    if options.comparison is None:
        raise LeanError("name the directory of a comparison")
    comparison = load_comparison(options.comparison)
    if options.sequences < 1:
        raise LeanError(f"--sequences must be at least 1, found {options.sequences}")
    if len(comparison.baselines) > 1:
        raise LeanError("the comparison has several baselines; this benchmark takes one group of models")
    runs = dict(_trained(options.comparison, comparison))
    if not runs:
        raise LeanError(f"{options.comparison} holds no trained models, only records")
    first = next(iter(runs.values()))
    vocabulary = LeanForCausalLM.config_class.from_pretrained(next(iter(runs))).vocab_size
    data = prepare_data(options.data, vocab_size=vocabulary)
    if data.sha256 != first.data["sha256"]:
        raise LeanError(f"the comparison was trained on other data than {data.description}")
    length = first.context_length
    tokens = data.validation()
    starts = [start for start, _ in spread_windows(len(tokens), length, options.sequences)]
    batch = collate(tokens, starts, length)
    weights = weights_of_kinds(batch["input_ids"], batch["shift_labels"])
    names = [result.name for result in comparison.results]
    common = {"baseline": comparison.baselines[0], "data": data.record(), "sequences": len(starts)}
    common |= {"context_length": length, "copied_share": float((weights["copied"] > 0).double().mean())}
    common |= {"steps": first.recipe["steps"], "batch_size": first.recipe["batch_size"]}
    rows = {row["run"]: row for row in _earlier(options.out, common, names)}
    with progress_bar("models") as bar:
        for done, (folder, run) in enumerate(runs.items()):
            model = LeanForCausalLM.from_pretrained(folder)
            losses, _ = window_losses(model, tokens, [(start, length) for start in starts], length, batch_size=32)
            means = {kind: float((weight * losses.view(weight.shape)).sum()) for kind, weight in weights.items()}
            rows[folder.name] = {"run": folder.name, "model": run.name, "seed": run.seed, "loss": means}
            bar(done + 1, len(runs))
    return common | {"rows": sorted(rows.values(), key=lambda row: (names.index(row["model"]), row["seed"]))}


def _trained(directory: Path, comparison: ComparisonRecord) -> Iterator[tuple[Path, Run]]:
    """Yield the final runs that are finished and whose weights are there."""
    by_name = {(run.name, run.seed): run for run in comparison.finals}
    for file in sorted(directory.glob("runs/*-final-*/record.json")):
        record = read_json(file)
        run = by_name.get((record["name"], record["seed"]))
        if run is not None and file.with_name("model.safetensors").exists():
            yield file.parent, run


def _earlier(out: Path | None, common: dict[str, Any], models: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a record that is there, if it is of the same tokens and models."""
    if out is None or not out.exists():
        return []
    record = harness.read_record(out)
    same = all(record.get(key) == value for key, value in common.items())
    if not same or any(row["model"] not in models for row in record["rows"]):
        raise LeanError(f"{out} is of other text, models or training; choose another --out")
    return record["rows"]


def differences(record: dict[str, Any]) -> dict[str, dict[str, PairedDifference]]:
    """By model and kind of token, the difference to the baseline over the seeds that both have."""
    losses: dict[str, dict[int, dict[str, float]]] = {}
    for row in record["rows"]:
        losses.setdefault(row["model"], {})[row["seed"]] = row["loss"]
    baseline = losses.pop(record["baseline"], {})
    found = {}
    for model, by_seed in losses.items():
        seeds = sorted(by_seed.keys() & baseline.keys())
        if seeds:
            found[model] = {
                kind: over_seeds({seed: by_seed[seed][kind] - baseline[seed][kind] for seed in seeds}) for kind in KINDS
            }
    return found


def tables(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    share = record["copied_share"]
    rows = []
    for model, found in differences(record).items():
        part, rest = share * found["copied"].mean, (1 - share) * found["other"].mean
        of_the_difference = f"{part / (part + rest):.0%}" if part * rest > 0 else ABSENT
        rows.append([f"`{model}`", *map(with_interval, found.values()), of_the_difference])
    headers = (
        "model",
        f"can be copied ({share:.0%} of the tokens)",
        f"others ({1 - share:.0%})",
        "the first kind's pairs, where they cannot",
        "share of the difference in what can be copied",
    )
    return harness.table(headers, rows)


def command_line() -> argparse.ArgumentParser:
    """Return the options of this benchmark."""
    parser = harness.command_line(__doc__)
    parser.add_argument("comparison", type=Path, nargs="?", help="directory of a comparison, with its models")
    parser.add_argument("--data", default="stdlib", help="what it was trained on")
    parser.add_argument("--sequences", type=int, default=1000, help="held-out sequences that are scored")
    return parser


if __name__ == "__main__":
    harness.run(command_line(), measure, tables)
