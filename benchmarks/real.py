"""A pretrained checkpoint converted in every way: cost of the conversion, loss by method, exact elimination.

The record grows by one part at a time: --parts measures those that are named and leaves the others in --out as they
are. It is written after every step. Conversions and their scores stay in --work, and are not repeated; delete a
directory there to measure it again. A dozen float32 copies of the model lie there at the end.

    python benchmarks/real.py MODEL.gguf --evaluate prose book.txt --out results/real/smollm2.json
    python benchmarks/real.py MODEL.gguf --parts elimination --out results/real/smollm2.json
    python benchmarks/real.py --tables results/real/smollm2.json
"""

import argparse
import hashlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import harness
import numpy as np
import torch

from leanqkv.checkpoints.open import load_model, open_causal_lm
from leanqkv.checkpoints.write import source_hashes
from leanqkv.convert.conversion import calibration_tokens
from leanqkv.convert.targets import METHODS, LatentsOptions
from leanqkv.data.evaluation import EvaluationText, evaluation_text, unseen_split
from leanqkv.data.prepare import prepare_data
from leanqkv.environment import record_header
from leanqkv.errors import LeanError
from leanqkv.evaluate.paired import paired_record, spread_windows
from leanqkv.files import hash_files, make_directory, read_json, write_json
from leanqkv.model.shapes import count_parameters
from leanqkv.report.text import signed

# The conversion may take the time of so many forward passes over its tokens, and twice the weights and so many bytes.
MOST_PASSES, MEMORY_BESIDE = 8, 10**9
BATCH = 4  # sequences of the forward pass
LATENTS, SEPARATE_LATENTS, MERGED_VALUES, SKIPV1 = "latents", "separate-latents", "merged-values", "skipv1"
CACHE = LatentsOptions().cache
WORDS = {LATENTS: f"latents of {CACHE:.0%}", SEPARATE_LATENTS: "separate latents", MERGED_VALUES: "merged values"}
MEASURED = (LATENTS, MERGED_VALUES)  # their cost, and what they lose by number of tokens and on a mixture
OF_A_CONVERSION = (
    *("to", "method", "ratio", "settings", "merged_pairs", "calibration_tokens", "calibration", "seconds"),
    *("parameters", "kv_bytes_per_token_bf16", "layers", "git_commit"),
)
OF_A_CERTIFICATE = (
    *("parameters", "kv_bytes_per_token_bf16", "steps", "conditions", "max_condition", "inputs", "inputs_sha256"),
    *("dtype", "exact", "dtypes", "rounding"),
)
SIDES = (("original", "source"), ("result", "result"))
Save = Callable[[dict[str, Any]], None]


class Refusal(LeanError):
    """A conversion that the source does not allow."""


class Bench:
    """The parts of the benchmark on one source."""

    def __init__(self, options: argparse.Namespace):
        self.path, self.work, self.rounds = options.model, options.work, options.rounds
        self.calibration, self.mixture, self.amounts = options.calibration, options.mixture, sorted(options.tokens)
        self.source = open_causal_lm(self.path)
        self.length = min(options.sequence_length, self.source.config.max_position_embeddings or sys.maxsize)
        self.names, self.evaluated_tokens = options.evaluate, options.evaluate_tokens
        self._claim_work()

    @cached_property
    def model(self) -> Any:
        """The source in float32."""
        return load_model(self.source, torch.float32)

    def about(self) -> dict[str, Any]:
        """Return the record's entry on the source."""
        plan = self.source.config.plan
        return {
            "name": self.path.name,
            "sha256": source_hashes(self.source),
            "parameters": count_parameters(self.source.config).total,
            "kv_bytes_per_token_bf16": plan.kv_bytes_per_token(torch.bfloat16),
            "config": self.source.config.as_overrides(),
        }

    def _claim_work(self) -> None:
        """Make --work, or check that what lies there was made of the same source and texts."""
        file = self.work / "source.json"
        made_of = {"sha256": source_hashes(self.source), "calibration": self.calibration, "length": self.length}
        if file.exists() and read_json(file) != made_of:
            raise LeanError(f"{self.work} holds conversions of another source or text; choose another --work")
        make_directory(self.work)
        write_json(file, made_of)

    # --- cost of the conversion ---------------------------------------------------------------------------------------

    def conversion(self, save: Save) -> None:
        """Measure conversions and forward pass in turns, for every number of calibration tokens."""
        rows: list[dict[str, Any]] = []
        for amount in self.amounts:
            tokens = self._tokens(amount)
            self._forward(tokens[:1])  # what only the first pass takes is left out
            rounds: dict[str, list[dict[str, Any]]] = {target: [] for target in MEASURED}
            for turn in range(self.rounds):
                forward = self._forward(tokens)
                for target, measured in rounds.items():
                    cost = self._timed(target, amount, turn == self.rounds - 1)
                    measured.append({"forward": forward, "conversion": cost})
            weights = count_parameters(self.source.config).total
            rows += [conversion_row(target, tokens, weights, measured) for target, measured in rounds.items()]
            save({"text": self._calibration.record(), "sequence_length": self.length, "rows": rows})

    @cached_property
    def _calibration(self) -> Any:
        directory, size = str(self.source.directory), self.source.config.vocab_size
        return prepare_data(self.calibration, vocab_size=size, tokenizer=directory)

    def _tokens(self, amount: int) -> np.ndarray:
        """The tokens [sequences, length] that `leanqkv convert` calibrates on."""
        return calibration_tokens(self._calibration, self.source.config, amount, self.length)

    @torch.no_grad()
    def _forward(self, tokens: np.ndarray) -> dict[str, float]:
        """Seconds of the source's forward pass over the tokens; those of its head, a part of them, on their own."""
        started, cpu, head = time.perf_counter(), time.process_time(), 0.0
        for start in range(0, len(tokens), BATCH):
            ids = torch.from_numpy(tokens[start : start + BATCH])
            hidden = self.model.model.forward(input_ids=ids, use_cache=False).last_hidden_state
            before_head = time.perf_counter()
            self.model.lm_head(hidden)
            head += time.perf_counter() - before_head
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, "head_seconds": head}

    def _timed(self, target: str, amount: int, keep: bool) -> dict[str, float]:
        """The cost of a conversion in a new place, where nothing of an earlier one can be gone on with."""
        with tempfile.TemporaryDirectory(dir=self.work) as directory:
            out, kept = Path(directory, "result"), self.work / fitted(target, amount)
            cost = self._convert(out, *self._fitting(target, amount))
            cost["calibration_seconds"] = read_json(out / "conversion.json")["seconds"]
            if keep and not kept.exists():
                out.rename(kept)
        return cost

    # --- loss by method -----------------------------------------------------------------------------------------------

    def methods(self, save: Save) -> None:
        """Compare the source with every conversion on every evaluation text."""
        rows: list[dict[str, Any]] = []
        for name, label, arguments in self._methods():
            out, row = self.work / name, {"name": name, "method": label}
            print(f"{label} ...", file=sys.stderr, flush=True)
            try:
                if not (out / "conversion.json").exists():
                    self._convert(out, *arguments)
            except Refusal as error:
                if SKIPV1 not in arguments:
                    raise
                rows.append({**row, "refused": str(error)})
            else:
                report = read_json(out / "conversion.json")
                row["conversion"] = {key: report[key] for key in OF_A_CONVERSION if key in report}
                rows.append({**row, "evaluations": self._evaluations(out)})
            save({"sequence_length": self.length, "rows": rows})

    def _methods(self) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
        """Yield each conversion's directory, its words in the table, and its arguments."""
        most = self.amounts[-1]
        fits = [*itertools.product(MEASURED, self.amounts), (SEPARATE_LATENTS, most)]
        for target, amount in fits:
            yield fitted(target, amount), f"{WORDS[target]}, {amount:,} tokens", self._fitting(target, amount)
        layers = cheapest_layers(read_json(self.work / fitted(MERGED_VALUES, most) / "conversion.json"))
        chosen = ("--layers", ",".join(map(str, layers)))
        yield (
            "merged-half",
            f"merged values, in {len(layers)} of {self.source.config.num_hidden_layers} layers",
            (*self._fitting(MERGED_VALUES, most), *chosen),
        )
        for target in MEASURED if self.mixture is not None else ():
            name = f"{target}-mixture-{hashlib.sha256(self.mixture.encode()).hexdigest()[:8]}"
            yield name, f"{WORDS[target]}, calibrated on a mixture", self._fitting(target, most, self.mixture)
        text = ("--calibration", self.calibration, "--tokens", most)
        fixed = ("--to", SKIPV1, "--no-refit-lent", "--no-refit-values", *text)
        yield "skipv1-calibrated", "SkipV1, calibrated, W_O fitted alone", fixed
        for method in METHODS:
            yield f"skipv1-{method}", f"SkipV1, {method}", ("--to", SKIPV1, "--method", method)

    def _fitting(self, target: str, amount: int, text: str | None = None) -> tuple[Any, ...]:
        share = () if target == MERGED_VALUES else ("--cache", f"{CACHE:.0%}")
        return "--to", target, *share, "--calibration", text or self.calibration, "--tokens", amount

    @cached_property
    def _texts(self) -> list[EvaluationText]:
        """The evaluation texts; of those that a calibration reads, the part that it never sees."""
        size, read = self.source.config.vocab_size, [self.calibration, self.mixture or self.calibration]
        texts = []
        for name in self.names:
            seen = any(unseen_split(name, calibration) == "validation" for calibration in read)
            split = "validation" if seen else "whole"
            texts.append(evaluation_text(name, tokenizer=self.path, vocab_size=size, split=split))
        return texts

    def _evaluations(self, directory: Path) -> list[dict[str, Any]]:
        """The comparison of source and result on every text; those that were made before are read."""
        file, made = directory.with_name(f"{directory.name}.scores.json"), hash_files(directory / "conversion.json")
        known = read_json(file) if file.exists() else {}
        asked = {"tokens": self.evaluated_tokens, "length": self.length, "conversion": made}
        scores = known["scores"] if known.get("asked") == asked else []
        result = None
        for text in self._texts:
            if any(score["text"] == text.record() for score in scores):
                continue
            result = result or load_model(open_causal_lm(directory), torch.float32)
            length = min(self.length, len(text.tokens) - 1)
            windows = spread_windows(len(text.tokens), length, max(1, self.evaluated_tokens // length))
            scores.append(paired_record(self.model, result, text, windows, length))
            write_json(file, {"asked": asked, "scores": scores})
        return [next(score for score in scores if score["text"] == text.record()) for text in self._texts]

    # --- exact elimination --------------------------------------------------------------------------------------------

    def elimination(self, save: Save) -> None:
        """Remove the identity blocks and keep the certificate."""
        with tempfile.TemporaryDirectory(dir=self.work) as directory:
            out = Path(directory, "result")
            cost = self._run("eliminate", self.path, "--remove", "block-diagonal", "--out", out)
            certificate = read_json(out / "certificate.json")
        save({"cost": cost, "certificate": {key: certificate[key] for key in OF_A_CERTIFICATE}})

    # --- commands -----------------------------------------------------------------------------------------------------

    def _convert(self, out: Path, *arguments: Any) -> dict[str, float]:
        return self._run("convert", self.path, *arguments, "--sequence-length", self.length, "--out", out)

    def _run(self, *arguments: Any) -> dict[str, float]:
        """Run `leanqkv` in its own process, with as many threads as this one; return its cost.

        Raises:
            Refusal: the command refused, in its own words.
            LeanError: it failed otherwise.
        """
        command = [sys.executable, "-m", "leanqkv", *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        log = self.work / "last.log"
        with log.open("w") as errors:
            code, cost = harness.launched(command, stderr=errors, env=environment)
        if code == 2:
            lines = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
            raise Refusal(lines[-1].removeprefix("error: ") if lines else f"{arguments[0]} refused; see {log}")
        if code:
            raise LeanError(f"leanqkv {arguments[0]} failed with exit code {code}; see {log}")
        return cost


PARTS = {"conversion": Bench.conversion, "methods": Bench.methods, "elimination": Bench.elimination}


def fitted(target: str, amount: int) -> str:
    """Return the directory of a conversion that was fitted to so many tokens."""
    return f"{target}-{amount}"


def cheapest_layers(report: dict[str, Any]) -> list[int]:
    """Return half of the layers: those with merged heads that miss least of attention's output, in order."""
    layers = sorted((layer for layer in report["layers"] if layer["merged"]), key=lambda layer: layer["missed"])
    return sorted(layer["layer"] for layer in layers[: max(1, len(report["layers"]) // 2)])


def conversion_row(target: str, tokens: np.ndarray, parameters: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the rounds say of one target and number of tokens: medians, ratios and the limits of both."""
    middle = {
        part: {key: median(one[part][key] for one in rounds) for key in rounds[0][part]}
        for part in ("forward", "conversion")
    }
    ratios = {
        key: median(one["conversion"][key] / one["forward"][of] for one in rounds)
        for key, of in {
            "seconds": "seconds",
            "cpu_seconds": "cpu_seconds",
            "calibration_seconds": "seconds",
        }.items()
    }
    return {
        "to": target,
        "calibrated_tokens": tokens.size,
        "threads": torch.get_num_threads(),
        "median": middle,
        "ratio": ratios,
        "most_passes": MOST_PASSES,
        "peak_resident_bytes": max(one["conversion"]["peak_resident_bytes"] for one in rounds),
        "most_resident_bytes": 2 * 4 * parameters + MEMORY_BESIDE,
        "rounds": rounds,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record with the parts that are asked for measured anew, and the others as --out has them."""
    if options.model is None:
        raise LeanError("give the checkpoint: a directory or a .gguf file")
    bench = Bench(options)
    source = bench.about()
    record = read_json(options.out) if options.out is not None and options.out.exists() else {}
    if record.get("source", source) != json.loads(json.dumps(source)):
        raise LeanError(f"{options.out} is of {record['source']['name']}, another checkpoint; choose another --out")
    parts = {"source": source, **{part: record[part] for part in PARTS if part in record}}
    for part in options.parts:
        header = record_header("benchmark", "real")
        made = {key: header[key] for key in ("command", "time", "git_commit", "hardware", "versions")}

        def save(content: dict[str, Any], part: str = part, header: dict = header, made: dict = made) -> None:
            parts[part] = {"made": made, **content}
            if options.out is not None:
                make_directory(options.out.parent)
                write_json(options.out, header | in_order(parts))

        PARTS[part](bench, save)
    return in_order(parts)


def in_order(parts: dict[str, Any]) -> dict[str, Any]:
    """Return the record's entries in one order, whichever was measured first."""
    return {name: parts[name] for name in ("source", *PARTS) if name in parts}


def tables(record: dict[str, Any]) -> str:
    """Return every part that the record has as Markdown."""
    blocks: list[str] = []
    if "conversion" in record:
        blocks.append(conversion_table(record["conversion"]["rows"]))
    if "methods" in record:
        blocks += method_tables(record["methods"]["rows"])
    if "elimination" in record:
        blocks += elimination_tables(record["elimination"])
    return "\n\n".join(blocks)


def conversion_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the cost of the conversion against the forward pass."""
    headers = (
        *(
            "conversion to",
            "calibration tokens",
            "threads",
            "forward pass",
            "calibration",
            "whole command",
            "CPU time of it",
        ),
        *("passes", "passes, CPU time", "at most", "peak memory", "at most"),
    )
    cells = []
    for row in rows:
        forward, conversion, ratio = row["median"]["forward"], row["median"]["conversion"], row["ratio"]
        seconds = (forward["seconds"], *(conversion[f"{key}seconds"] for key in ("calibration_", "", "cpu_")))
        memory = (f"{row[f'{key}_resident_bytes'] / 1e9:.2f} GB" for key in ("peak", "most"))
        passes = (f"{ratio['seconds']:.1f}", f"{ratio['cpu_seconds']:.1f}", str(row["most_passes"]))
        first = (WORDS[row["to"]], f"{row['calibrated_tokens']:,}", str(row["threads"]))
        cells.append((*first, *(f"{value:,.0f} s" for value in seconds), *passes, *memory))
    return harness.table(headers, cells, "l" + "r" * (len(headers) - 1))


def method_tables(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield one table for each evaluation text, under a line that names it."""
    headers = ("model", "KV bytes per token (bf16)", "loss", "difference", "KL, nats", "same likeliest token")
    measured = [row for row in rows if "evaluations" in row]
    refused = [(row["method"], "refused", *[""] * 4) for row in rows if "refused" in row]
    for place, first in enumerate(measured[0]["evaluations"] if measured else ()):
        text, before = first["text"], first["before"]
        size = measured[0]["conversion"]["kv_bytes_per_token_bf16"][0]
        cells = [("source", f"{size:,} (100%)", f"{before['loss']:.4f}", "", "", "")]
        for row in measured:
            found, after = row["evaluations"][place], row["conversion"]["kv_bytes_per_token_bf16"][1]
            numbers = (
                f"{found['after']['loss']:.4f}",
                f"{signed(found['loss_difference']['mean'], 4)}{width(found['loss_difference'], '.4f')}",
                f"{found['divergence']['mean']:.4f}{width(found['divergence'], '.4f')}",
                f"{found['agreement']['mean']:.1%}{width(found['agreement'], '.1%')}",
            )
            cells.append((row["method"], f"{after:,} ({after / size:.0%})", *numbers))
        yield (
            f"{text['description']}, {text['split']}: {before['tokens']:,} tokens in {first['windows']} windows of "
            f"{first['context_length']}"
        )
        yield harness.table(headers, [*cells, *refused])


def width(found: dict[str, float | None], digits: str) -> str:
    """Return half of the 95% interval as it follows its mean; nothing of a single window."""
    return "" if found["half_width"] is None else f" ± {found['half_width']:{digits}}"


def elimination_tables(part: dict[str, Any]) -> Iterator[str]:
    """Yield what exact elimination saves, and its certificate."""
    certificate, cost = part["certificate"], part["cost"]
    before, after = certificate["parameters"]["before"], certificate["parameters"]["after"]
    conditions = sorted(certificate["conditions"].values())
    yield harness.table(
        ("weights", "weights removed", "condition number, median", "worst", "time", "peak memory"),
        [
            (
                f"{before:,} → {after:,}",
                f"{before - after:,} ({(before - after) / before:.2%})",
                f"{median(conditions):.1f}",
                f"{conditions[-1]:.1f}",
                f"{cost['seconds']:.0f} s",
                f"{cost['peak_resident_bytes'] / 1e9:.2f} GB",
            )
        ],
        "r" * 6,
    )
    compared = {
        "result before rounding, in fp64": certificate["exact"],
        **{f"{which}, in {dtype}": pair[key] for dtype, pair in certificate["dtypes"].items() for key, which in SIDES},
    }
    headers = (
        "logits against the source's in float64",
        "largest difference",
        "relative",
        "KL, nats",
        "same next token",
    )
    del compared["source, in fp64"]  # compared with itself
    rows = [
        (words, *(f"{found[key]:.1e}" for key in ("max_abs", "relative", "kl")), f"{found['agreement']:.1%}")
        for words, found in compared.items()
        if found is not None
    ]
    yield harness.table(headers, rows)


def main() -> None:
    parser = harness.command_line(__doc__)
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL", help="a checkpoint or a .gguf file")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--evaluate", nargs="+", metavar="TEXT", default=["prose"], help="as leanqkv convert takes it")
    parser.add_argument("--evaluate-tokens", type=int, default=16_384, metavar="N", help="of every text")
    parser.add_argument("--calibration", default="prose", metavar="TEXT")
    parser.add_argument("--mixture", metavar="TEXT", help="calibrate one more conversion on it, as prose,book.txt:0.5")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 24_576], metavar="N", help="to calibrate on")
    parser.add_argument("--sequence-length", type=int, default=512, metavar="N")
    parser.add_argument("--rounds", type=int, default=3, help="of conversion and forward pass, in turns")
    parser.add_argument("--work", type=Path, default=Path("runs/real/benchmark"), help="for the conversions")
    harness.run(parser, measure, tables)


if __name__ == "__main__":
    main()
