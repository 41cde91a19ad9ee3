"""From a model with norms to one without and with fewer weights: train, remove the norms, eliminate, verify.

    python benchmarks/norm_removal.py --work runs/norm-removal --out results/exact/norm-removal.json
    python benchmarks/norm_removal.py --tables results/exact/norm-removal.json

Each shape is trained, trained on while its norms go (`leanqkv uptrain --remove-norms`), and, as the control, trained on
for as long with its norms. From the norm-free model goes what its skips allow. All losses are on the same held-out
sequences. Every part is a `leanqkv` command whose output stays in --work; started again, it goes on.
"""

import argparse
from pathlib import Path
from typing import Any

import harness
from harness import Command

from leanqkv.checkpoints.open import load_model, open_checkpoint
from leanqkv.data.batches import batch_plan
from leanqkv.data.prepare import prepare_data
from leanqkv.eliminate import eliminate_directory, parse_request
from leanqkv.files import read_json

# The fields of a shape, what goes from it, and of which layers.
SHAPES: dict[str, tuple[str, str, str]] = {
    "all skips (P1 Thm 4.2)": ("", "query", "0"),
    "attention skip alone (P1 Thm 4.4)": ("+mlp_skip=false", "query", "all"),
    "skipless (P4 Table 1)": ("+attention_skip=false+mlp_skip=false", "query,output", "all"),
}
STAGES = {"none": "with norms", "MLP": "MLP norms gone", "MLP and attention": "attention's too", "all": "the last too"}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "base": options.base,
        "data": options.data,
        "rows": [row(options, name, *SHAPES[name]) for name in options.only or SHAPES],
    }


def row(options: argparse.Namespace, name: str, fields: str, remove: str, layer: str) -> dict[str, Any]:
    """Return what one shape came to, from the records of its commands."""
    work = options.work / (fields.strip("+") or "all-skips")
    shared = ("--seed", options.seed, "--evaluation-sequences", options.evaluation_sequences)
    shared += () if options.data is None else ("--data", options.data)
    shared += tuple(options.run)
    trained = Command(work / "trained", ("train", f"{options.base}{fields}", "--steps", options.steps, *shared))
    harness.run_commands([trained], 1)
    on = ("uptrain", trained.out, "--steps", options.removal_steps, "--learning-rate", options.learning_rate, *shared)
    free = Command(work / "norm-free", (*on, "--remove-norms"))
    control = Command(work / "control", on)
    harness.run_commands([free, control], 1)
    less = work / "eliminated"
    if not less.exists():
        eliminate_directory(free.out, less, parse_request(remove, layer))
    certificate, norms = read_json(less / "certificate.json"), free.record["norms"]
    return {
        "name": name,
        "fields": fields,
        "remove": remove,
        "layer": layer,
        "steps": [record["recipe"]["steps"] for record in (trained.record, free.record)],
        "trained": trained.record["final"],
        "control": control.record["final"],
        "norms": norms,
        "eliminated": {"loss": loss(options, free, less)},
        "parameters": {
            "trained": trained.record["parameters"]["total"],
            "norm-free": free.record["parameters"]["total"],
            "eliminated": certificate["parameters"]["after"],
        },
        "condition": max(certificate["conditions"].values(), default=None),
        "distance": {dtype: pair["result"]["relative"] for dtype, pair in certificate["dtypes"].items()},
    }


def loss(options: argparse.Namespace, run: Command, directory: Path) -> float:
    """Return the loss of a model on the sequences that a run evaluates."""
    model, record = load_model(open_checkpoint(directory)), run.record
    data = prepare_data(options.data, vocab_size=model.config.vocab_size, tokenizer=str(run.out))
    plan = batch_plan(
        run.out / "batches",
        **{name: record["data"][name] for name in ("train_tokens", "validation_tokens")},
        **{name: record["recipe"][name] for name in ("steps", "batch_size")},
        **{name: record[name] for name in ("seed", "context_length", "evaluation_sequences")},
    )
    starts, length = plan.evaluation_starts, record["context_length"]
    return harness.sequence_losses(model, data.validation(), starts, length, 8).mean().item()


def tables(record: dict[str, Any]) -> dict[str, str]:
    rows = record["rows"]
    losses = [
        (
            row["name"],
            *(f"{row[name]['validation_loss']:.4f}" for name in ("trained", "control")),
            *(f"{stage['loss']:.4f}" for stage in row["norms"]["stages"]),
            f"{row['eliminated']['loss']:.4f}",
        )
        for row in rows
    ]
    weights = [
        (
            row["name"],
            f"{row['remove']}, {'all layers' if row['layer'] == 'all' else 'layer ' + row['layer']}",
            *(f"{count:,}" for count in row["parameters"].values()),
            "–" if row["condition"] is None else f"{row['condition']:,.0f}",
            *(f"{row['distance'][dtype]:.1e}" for dtype in ("fp64", "fp32", "bf16")),
        )
        for row in rows
    ]
    return {
        "losses": harness.table(("shape", "trained", "control", *STAGES.values(), "eliminated"), losses),
        "weights": harness.table(
            ("shape", "what goes", "trained", "norm-free", "eliminated", "condition", "fp64", "fp32", "bf16"), weights
        ),
    }


def main() -> None:
    parser = harness.command_line(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/norm-removal"), help="of the commands' output")
    parser.add_argument("--base", default="small+tie_word_embeddings=false", help="size, as `leanqkv train` takes it")
    parser.add_argument("--only", action="append", choices=list(SHAPES), help="this shape; again for more")
    parser.add_argument("--data", help="text, as `leanqkv train` takes it")
    parser.add_argument("--steps", type=int, default=1800, help="of training")
    parser.add_argument("--removal-steps", type=int, default=600, help="of the removal, and of the control")
    parser.add_argument("--learning-rate", type=float, default=6e-4, help="peak, of the removal and of the control")
    parser.add_argument("--evaluation-sequences", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("run", nargs="*", help="after --: more options of every run, such as --precision fp32")
    harness.run(parser, measure, lambda record: "\n\n".join(tables(record).values()))


if __name__ == "__main__":
    main()
