"""What latents lose by the way their columns are chosen: exact sums, random signs, and random signs on fewer tokens.

All are calibrated on the same tokens and scored on the same windows. `exact` sums the Gram matrices of the values over
all tokens and head by head; `signs` takes one matrix of the heads' sum with random signs; `latents` are what `convert`
makes, which choose by a part of the tokens on top.

    python benchmarks/latent_choice.py MODEL.gguf --evaluate prose book.txt --out results/real/latent-choice.json
    python benchmarks/latent_choice.py --tables results/real/latent-choice.json
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import harness
import torch

from leanqkv.checkpoints.open import load_model, open_causal_lm
from leanqkv.checkpoints.tensors import finite
from leanqkv.checkpoints.write import source_hashes, write_model
from leanqkv.convert.conversion import calibration_tokens
from leanqkv.convert.latents import Latents
from leanqkv.convert.sweeps import Converted, Sweeps
from leanqkv.data.evaluation import EvaluationText, evaluation_text, unseen_split
from leanqkv.data.prepare import prepare_data
from leanqkv.errors import LeanError
from leanqkv.evaluate.paired import PairedScores, mean_over_windows, paired_scores, spread_windows
from leanqkv.report.text import signed

BATCH = 4
EXACT, SIGNS, OURS = "exact", "signs", "latents"


def choices(source: Any, share: float) -> dict[str, Latents]:
    """Return the reductions to that share of the cache."""
    tensors = finite(source.tensors)
    exact, ours = Latents(source.config, tensors, share, exact=True), Latents(source.config, tensors, share)
    signs = Latents(source.config, tensors, share)
    signs.name, signs.measures, signs.choosing_tokens = f"signs-{ours.name}", f"signs-{ours.measures}", None
    return {EXACT: exact, SIGNS: signs, OURS: ours}


def convert(source: Any, tokens: Any, shares: list[float], directory: Path) -> list[tuple[float, str, Converted]]:
    """Return the model of every share and choice; the source is run once for all."""
    arms = [(share, name, one) for share in shares for name, one in choices(source, share).items()]
    sweeps = Sweeps(
        source.config,
        finite(source.tensors),
        tokens,
        directory,
        [one for *_, one in arms],
        message=lambda text: print(text, flush=True),
    )
    return [(share, name, found) for (share, name, _), found in zip(arms, sweeps.run(), strict=True)]


def score(source: Any, found: Converted, model: Any, texts: list[EvaluationText], options: Any) -> list[PairedScores]:
    """Return the scores of a converted model against the source's on every text."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "model")
        write_model(source, out, found.config, found.tensors, torch.float32)
        after = load_model(open_causal_lm(out), torch.float32)
    scores = []
    for text in texts:
        windows = spread_windows(len(text.tokens), options.length, options.evaluate_tokens // options.length)
        scores += paired_scores(model, after, text.tokens, windows, options.length, batch_size=BATCH)
    return scores


def measure(options: argparse.Namespace) -> harness.Record:
    if options.source is None:
        raise LeanError("give a checkpoint directory or a .gguf file")
    source, size = open_causal_lm(options.source), open_causal_lm(options.source).config.vocab_size
    data = prepare_data(options.calibration, vocab_size=size, tokenizer=str(source.directory))
    tokens = calibration_tokens(data, source.config, options.tokens, options.length)
    texts = [
        evaluation_text(name, tokenizer=options.source, vocab_size=size, split=unseen_split(name, options.calibration))
        for name in options.evaluate
    ]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        converted = convert(source, tokens, options.shares, Path(directory))
        model, exact = load_model(source, torch.float32), []
        for share, name, found in converted:
            scores = score(source, found, model, texts, options)
            exact = scores if name == EXACT else exact
            rows.append({"cache": share, "choice": name, "ranks": [ranks(layer) for layer in found.layers]})
            rows[-1]["scores"] = [
                {
                    "lost": mean_over_windows(one.after - one.before, one.window),
                    "divergence": mean_over_windows(one.divergence, one.window),
                    "beyond_exact": mean_over_windows(one.after - other.after, one.window),
                }
                for one, other in zip(scores, exact, strict=True)
            ]
            print(row_cells(rows[-1]), flush=True)
    calibration = {**data.record(), "tokens": tokens.size, "sequence_length": options.length}
    evaluated = [{**text.record(), "tokens": options.evaluate_tokens} for text in texts]
    about = {"source": options.source.name, "sha256": source_hashes(source)}
    return {**about, "calibration": calibration, "texts": evaluated, "rows": rows}


def ranks(layer: dict[str, Any]) -> list[int]:
    """Return the columns of a layer's keys and values."""
    return [layer["key_rank"], layer["rank"]] if "key_rank" in layer else [layer["rank"]]


def row_cells(row: dict[str, Any]) -> list[str]:
    cells = [f"{row['cache']:.0%}", row["choice"]]
    for score in row["scores"]:
        for name in ("lost", "beyond_exact"):
            mean, width = score[name]["mean"], score[name]["half_width"]
            nothing = row["choice"] == EXACT and name == "beyond_exact"
            cells.append("" if nothing else f"{signed(mean, 4)} ± {width or 0:.4f}")
    return cells


def tables(record: harness.Record) -> str:
    """Return what every choice loses, and what it loses beyond the exact one."""
    names = [text["description"].split(",")[0] for text in record["texts"]]
    headers = ["cache", "choice", *(head for name in names for head in (f"{name}: lost", "beyond `exact`"))]
    return harness.table(headers, [row_cells(row) for row in record["rows"]])


def main() -> None:
    parser = harness.command_line(__doc__)
    parser.add_argument("source", type=Path, nargs="?", metavar="MODEL", help="a checkpoint or a .gguf file")
    parser.add_argument("--evaluate", nargs="+", default=["prose"], metavar="TEXT")
    parser.add_argument("--evaluate-tokens", type=int, default=8192, metavar="N", help="of every text")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.84, 0.75, 0.5], help="of the cache")
    harness.calibration_options(parser)
    harness.run(parser, measure, tables)


if __name__ == "__main__":
    main()
