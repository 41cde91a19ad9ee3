"""What `leanqkv convert` does: its texts, the conversion, and the comparison of its result with the source."""

import datetime
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rich.table import Table

from ..checkpoints.card import origin
from ..checkpoints.open import Checkpoint, load_model, open_causal_lm, open_checkpoint
from ..checkpoints.tokenizer import has_tokenizer
from ..convert.conversion import Conversion, calibration_tokens, sequence_length
from ..convert.estimate import Estimate
from ..data.evaluation import EvaluationText, unseen_split
from ..data.prepare import prepare_data
from ..data.token_files import TokenData
from ..environment import command_line, free_memory, made_on
from ..errors import LeanError
from ..evaluate.paired import paired_record, spread_windows
from ..evaluate.strided import window_losses
from ..model.shapes import count_parameters
from ..progress import Bar, console, continued_when_repeated, progress_bar, terminal
from ..report.conversion import KIND, layer_lines
from ..report.page import NO_PAGE
from .options import read_text
from .texts import ConversionTexts

EVALUATED_TOKENS = 16_384
# The source's bits per byte are compared on so many tokens of the calibration text and of the evaluation text. Texts
# that are further apart than this factor are of other kinds: another language, or code.
COMPARED_TOKENS, DOMAIN_FACTOR = 4096, 1.5


def convert_checkpoint(
    source: Path,
    out: Path,
    to: str,
    given: Mapping[str, Any],
    texts: ConversionTexts,
    dtype: torch.dtype,
    verbose: bool,
    dry_run: bool,
) -> None:
    """Convert the checkpoint `source` to a target with the options that were `given`, and show the result.

    With `dry_run` show what that takes, and write nothing.

    Raises:
        LeanError: the source or the texts cannot be used, or the target does not take these options.
    """
    opened = open_checkpoint(source) if texts.evaluate is None else open_causal_lm(source)
    conversion = Conversion(opened, to, **given)
    conversion.check_text(texts.calibration is not None)
    length = sequence_length(opened.config, texts.sequence_length)
    tokens = texts.tokens or max(min(max(40 * opened.config.hidden_size, 24_576), 131_072), 4 * length)
    if dry_run:
        with progress_bar("timing one layer"):
            found = conversion.estimate((max(1, tokens // length), length), dtype)
        show_estimate(found, out, given.get("device", "cpu"), texts.evaluate is not None)
        return
    comparison = read_evaluation(opened, texts, length)
    about, sample = about_conversion(source, out, given.get("device", "cpu")), None
    if texts.calibration is not None:
        data = read_calibration(opened, texts.calibration)
        sample = calibration_tokens(data, opened.config, tokens, length)
        about["calibration"] = {**data.record(), "sequence_length": length}
        if comparison is not None:
            about["calibration"]["source_bits_per_byte"] = comparison.compare_domains(sample, data)
    with continued_when_repeated(), progress_bar("reading") as bar:
        report = conversion.write(
            out,
            sample,
            dtype=dtype,
            calibrating=bar,
            message=bar.describe,
            progress=partial(_show_written, bar),
            about=about,
            evaluate=lambda directory: (
                {} if comparison is None else {"evaluation": comparison.evaluate(directory, bar)}
            ),
            finish=KIND.write,
        )
    console.print(KIND.terminal(report))
    if verbose or not console.is_terminal:
        for line in layer_lines(report):
            console.print(line, highlight=False)
    page = KIND.html if (out / KIND.html).exists() else NO_PAGE
    console.print(f"{out}: {page}, {KIND.file}, README.md (a model card)", highlight=False)


def show_estimate(found: Estimate, out: Path, device: str, evaluates: bool) -> None:
    """Print what a conversion takes, beside what is free."""
    place = next(parent for parent in out.absolute().parents if parent.exists())
    memory, disk = free_memory("cpu"), shutil.disk_usage(place).free
    on_disk, resident = found.scratch_bytes + found.written_bytes, psutil.Process().memory_info().rss

    def size(needed: int, free: int | None = None) -> str:
        text = f"{needed / 1e9:,.1f} GB" if needed >= 1e8 else f"{needed / 1e6:,.1f} MB"
        return text if free is None else f"{text}, {free / 1e9:,.1f} GB are free" + ": too little" * (needed > free)

    table = Table("", "", show_header=False)
    table.add_row("calibration tokens", f"{found.tokens:,}")
    table.add_row("forward passes over them", f"{found.passes:.1f}")
    table.add_row(f"time on {device}", f"{datetime.timedelta(seconds=round(found.seconds))}")
    table.add_row("memory at most", size(found.memory_bytes, memory + resident))
    if evaluates:
        table.add_row("memory of --evaluate", size(found.evaluation_bytes, memory))
    table.add_row("weights to read", size(found.read_bytes))
    table.add_row("result, about", size(found.written_bytes))
    table.add_row("calibration's files", size(found.scratch_bytes))
    table.add_row("disk at most", size(on_disk, disk))
    console.print(table)


def _show_written(bar: Bar, done: int, total: int) -> None:
    if bar.description == "writing":
        bar.start("writing, MB")
    bar(done // 10**6, total // 10**6)


@dataclass(frozen=True)
class Comparison:
    """The source, and the text on which it is compared with what becomes of it."""

    source: Checkpoint
    text: EvaluationText
    tokens: int
    length: int

    def windows(self, tokens: int) -> list[tuple[int, int]]:
        """Return windows with so many tokens to score."""
        return spread_windows(len(self.text.tokens), self.length, max(1, tokens // self.length))

    def evaluate(self, directory: Path, bar: Bar) -> dict[str, Any]:
        """Return the comparison with the model in `directory`, for the report."""
        bar.start("reading both models")
        before, after = (load_model(opened, torch.float32) for opened in (self.source, open_causal_lm(directory)))
        bar.start("comparing source and result, tokens")
        return paired_record(before, after, self.text, self.windows(self.tokens), self.length, progress=bar)

    def compare_domains(self, sample: np.ndarray, data: TokenData) -> float | None:
        """Return the source's bits per byte of the calibration text; warn if the evaluation text is of another kind.

        Args:
            sample: [sequences, length], the calibration tokens; `data` is their text.

        Returns:
            None where one of the texts is known as tokens alone.
        """
        if data.bytes_per_token is None or self.text.bytes is None:
            return None
        windows, width = self.windows(COMPARED_TOKENS), sample.shape[1]
        count = min(len(sample), max(1, COMPARED_TOKENS // width))
        rows = sample[np.linspace(0, len(sample) - 1, count).astype(int)]
        with progress_bar("comparing calibration and evaluation text"):
            model = load_model(self.source, torch.float32)
            sampled = [(i * width, width - 1) for i in range(len(rows))]
            calibration, _ = window_losses(model, rows.reshape(-1), sampled, width - 1, batch_size=1)
            evaluation, _ = window_losses(model, self.text.tokens, windows, windows[0][1], batch_size=1)
        first = calibration.mean().item() / math.log(2) / data.bytes_per_token
        second = evaluation.mean().item() / math.log(2) / (self.text.bytes / len(self.text.tokens))
        # A mixture's kinds are its owner's choice.
        if not data.parts and not 1 / DOMAIN_FACTOR <= first / second <= DOMAIN_FACTOR:
            terminal.print(
                f"warning: the calibration text takes the source {first:.2f} bits per byte, the evaluation text "
                f"{second:.2f}, more than a factor of {DOMAIN_FACTOR} apart. They are of different kinds; calibrate on "
                "text like what the model is for.",
                highlight=False,
                soft_wrap=True,
            )
        return first


def read_evaluation(source: Checkpoint, texts: ConversionTexts, length: int) -> Comparison | None:
    """Return what is to be compared on the text of --evaluate, or None of no text.

    Raises:
        LeanError: no such text, too short, or read by the calibration too; or too little memory for both models.
    """
    if texts.evaluate is None:
        return None
    needed, free = 2 * 4 * count_parameters(source.config).total, free_memory("cpu")
    if needed > free:
        raise LeanError(
            f"--evaluate holds source and result in float32: {needed / 1e9:,.1f} GB of memory, and "
            f"{free / 1e9:,.1f} GB are free. Leave it out, and score both with leanqkv eval"
        )
    split, tokens = unseen_split(texts.evaluate, texts.calibration), texts.evaluate_tokens
    text = read_text(source, texts.evaluate, split)
    if tokens is not None and tokens > (there := len(text.tokens) - 1):
        raise LeanError(
            f"--evaluate-tokens {tokens:,} are asked for, the {split} text of {texts.evaluate} has {there:,}. Give "
            "more text, or fewer tokens"
        )
    return Comparison(source, text, tokens or EVALUATED_TOKENS, min(length, len(text.tokens) - 1))


def about_conversion(source: Path, out: Path, device: str) -> dict[str, Any]:
    """Return the report's entries on how it was made; no path of this machine."""
    about = {"name": out.resolve().name, **origin(source), "tokenizer": has_tokenizer(source)}
    return {**about, "command": command_line(), **made_on(device)}


def read_calibration(source: Checkpoint, text: str) -> TokenData:
    """Return a text to calibrate on, in tokens of the tokenizer beside `source`."""
    size, tokenizer = source.config.vocab_size, str(source.directory)
    with progress_bar("reading the calibration text") as bar:
        return prepare_data(text, vocab_size=size, tokenizer=tokenizer, progress=bar.describe)
