"""What a smaller cache costs in tasks, question by question: a checkpoint with a quantized cache, and latents of it.

Tasks are those of `leanqkv eval --tasks` that are made of local files. All models answer the same questions. Changes
are paired, and p is McNemar's. What is scored is kept in a file beside --out; the same command goes on from there.

    python benchmarks/tasks.py MODEL.gguf --tasks piqa:FOLDER cloze:book.txt --limit 500 --out results/real/tasks.json
    python benchmarks/tasks.py MODEL.gguf --tasks needle:book.txt recall --kinds unrotated-latents --limit 100 \\
        --context 4096 --quantize-latents --out results/real/retrieval.json
    python benchmarks/tasks.py --tables results/real/tasks.json
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import torch
from latent_choice import ranks

from leanqkv.cache_bits import PLAIN, CacheBits
from leanqkv.checkpoints.open import load_model, open_causal_lm
from leanqkv.checkpoints.tensors import finite
from leanqkv.checkpoints.tokenizer import load_tokenizer
from leanqkv.checkpoints.write import source_hashes, write_model
from leanqkv.convert.conversion import calibration_tokens
from leanqkv.convert.sweeps import Sweeps
from leanqkv.convert.targets import BUDGETED, TARGETS, read_options
from leanqkv.data.prepare import prepare_data
from leanqkv.environment import git_commit
from leanqkv.errors import LeanError
from leanqkv.evaluate.harness import load_tasks, paired_answers, task_scores
from leanqkv.files import read_json, write_json
from leanqkv.report.text import signed

SOURCE = "source"
# Of McNemar's test, below which a change is shown as one.
SURE = 0.05


def models(source: Any, options: argparse.Namespace, tokens: Any) -> Iterator[tuple[str, Any, CacheBits, list[Any]]]:
    """Yield what is scored, the source first: its name, the model, its cache, and the ranks of its layers."""
    whole, tensors = load_model(source, torch.float32).eval(), finite(source.tensors)
    precisions = [PLAIN, *map(CacheBits.of, options.bits)]
    for bits in precisions:
        yield SOURCE if bits == PLAIN else f"{SOURCE}, {bits.name}", whole, bits, []
    reductions = {
        f"{kind} {share:.0%}": TARGETS[kind].make(source.config, tensors, read_options(kind, {"cache": share}))
        for kind in options.kinds
        for share in options.shares
    }
    with tempfile.TemporaryDirectory() as place:
        show = lambda text: print(text, flush=True)  # noqa: E731
        sweeps = Sweeps(source.config, tensors, tokens, Path(place), list(reductions.values()), message=show)
        for name, found in zip(reductions, sweeps.run(), strict=True):
            out = Path(place, name)
            write_model(source, out, found.config, found.tensors, torch.float32)
            model = load_model(open_causal_lm(out), torch.float32).eval()
            for bits in precisions if options.quantize_latents else [PLAIN]:
                of_bits = "" if bits == PLAIN else f", {bits.name}"
                yield f"{name}{of_bits}", model, bits, [ranks(layer) for layer in found.layers]


def measure(options: argparse.Namespace) -> harness.Record:
    if options.source is None or not options.tasks:
        raise LeanError("give a checkpoint directory or a .gguf file, and --tasks")
    source = open_causal_lm(options.source)
    config, tokenizer = source.config, load_tokenizer(source.directory)
    data = prepare_data(options.calibration, vocab_size=config.vocab_size, tokenizer=str(source.directory))
    tokens = calibration_tokens(data, config, options.tokens, options.length)
    tasks = load_tasks(options.tasks, None, tokenizer, options.context)
    calibration = {**data.record(), "tokens": tokens.size, "sequence_length": options.length}
    about = {"source": options.source.name, "sha256": source_hashes(source)}
    record: harness.Record = {**about, "calibration": calibration, "limit": options.limit}
    place, done, answers = None, dict[str, Any](), None
    if options.out is not None:
        made_by = {"git_commit": git_commit(), **{name: str(value) for name, value in vars(options).items()}}
        place, started = options.out.with_suffix(".partial.json"), {"made_by": made_by, **record}
        done = scored(place, started)
    for name, model, bits, ranked in models(source, options, tokens):
        if name not in done:
            with torch.inference_mode():
                scores = task_scores(model, tokenizer, tasks, limit=options.limit, cache_bits=bits)
            whole = config.plan.kv_bytes_per_token(torch.bfloat16)
            share = bits.bytes_per_token(model.config.plan, torch.bfloat16) / whole
            row = {"model": name, "share": share, "ranks": ranked, "tasks": scores.figures}
            done[name] = row | {"requests_that_read_the_cache": scores.cached, "answers": scores.answers}
            if place is not None:
                place.parent.mkdir(parents=True, exist_ok=True)
                write_json(place, started | {"rows": [*done.values()]})
        row = done[name]
        answers = row["answers"] if answers is None else answers
        row["paired"] = {task: paired_answers(answers[task], found) for task, found in row["answers"].items()}
        print(cells(row, *row["tasks"]), flush=True)
    if place is not None:
        place.unlink(missing_ok=True)
    rows = [{key: value for key, value in row.items() if key != "answers"} for row in done.values()]
    return {**record, "rows": rows}


def scored(place: Path, started: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return by its name what an earlier start with the same options scored; nothing, of others."""
    found = read_json(place) if place.exists() else {}
    rows = found.pop("rows", [])
    return {row["model"]: row for row in rows} if found == json.loads(json.dumps(started)) else {}


def cells(row: dict[str, Any], *names: str) -> list[str]:
    """Return a line of the table: of the source each task's accuracy, of others what changed, in percent."""
    shown = [row["model"], f"{row['share']:.0%}"]
    for name in names:
        figures, change = row["tasks"][name], row["paired"][name]["acc"]
        if row["model"] == SOURCE:
            shown.append(f"{100 * figures['acc']:.1f} ± {100 * figures['acc_stderr']:.1f}")
            continue
        text = f"{signed(100 * change['difference'], 1)} ± {100 * change['stderr']:.1f}"
        sure = f"**{text}**" if change["p"] < SURE else text
        shown.append(f"{sure} ({change['lost']}, {change['won']})")
    return shown


def tables(record: harness.Record) -> str:
    """Return accuracies and changes with standard errors, and how many answers were lost and won; bold: p < SURE."""
    names = list(record["rows"][0]["tasks"])
    return harness.table(
        ["model", "cache", *names], [cells(row, *names) for row in record["rows"]], "lr" + "r" * len(names)
    )


def main() -> None:
    parser = harness.command_line(__doc__)
    parser.add_argument("source", type=Path, nargs="?", metavar="MODEL", help="a checkpoint or a .gguf file")
    parser.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help="as `leanqkv eval` takes them")
    parser.add_argument("--limit", type=int, default=500, metavar="N", help="questions of each task")
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="tokens of needle's and recall's")
    parser.add_argument("--kinds", nargs="+", choices=BUDGETED, default=["latents"], metavar="KIND", help="of latents")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.84, 0.75, 0.5], help="of the cache, for latents")
    parser.add_argument("--bits", nargs="+", default=["8/4", "4"], help="of the source's cache")
    parser.add_argument("--quantize-latents", action="store_true", help="score latents in these bits too")
    harness.calibration_options(parser)
    harness.run(parser, measure, tables)


if __name__ == "__main__":
    main()
