"""`leanqkv convert`: a finished checkpoint with a smaller KV cache, or a nonlinear query."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..progress import Bar, continued_when_repeated, progress_bar, terminal
from .options import SOURCE, Dtype, Out, as_dtype, console

if TYPE_CHECKING:
    import numpy as np

    from ..checkpoints.open import Checkpoint
    from ..data import EvaluationText, TokenData

EVALUATED_TOKENS = 16_384
# The source's bits per byte are compared on so many tokens of the calibration text and of the evaluation text. Texts
# that are further apart than this factor are of other kinds: another language, or code.
COMPARED_TOKENS, DOMAIN_FACTOR = 4096, 1.5


def convert(
    source: Annotated[Path, typer.Argument(help=SOURCE)],
    out: Out,
    to: Annotated[
        str,
        typer.Option(
            help="latents, separate-latents, merged-values, skipv1 or gqa for a smaller cache; nonlinear-query."
        ),
    ] = "latents",
    cache: Annotated[
        str | None,
        typer.Option(help="Latents: share of the source's cache to take at most, as 75%. Default: 84%."),
    ] = None,
    method: Annotated[
        str, typer.Option(help="For skipv1: calibrated, or mean-v, mean-vo, top-v, top-vo, svd from weights alone.")
    ] = "calibrated",
    calibration: Annotated[
        str | None,
        typer.Option(help="Text to calibrate on, as --data of train takes it.", show_default=False),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Calibration tokens. Default: 40 per unit of width, from 24576 to 131072.", show_default=False
        ),
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(help="Of the sequences to calibrate and evaluate on. Default: 512, or all positions.")
    ] = None,
    evaluate: Annotated[
        str | None,
        typer.Option(help="Text on which source and result are compared, as --data of train takes it; no mixture."),
    ] = None,
    evaluate_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens to compare them on. Default: 16384, or all there are.", show_default=False),
    ] = None,
    ratio: Annotated[
        float | None,
        typer.Option(
            help="Merged values, skipv1, gqa: share of the value heads that go: merged with another, the first "
            "layer's instead, pooled with their neighbours (and so the keys). Default: 0.5.",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Latents and merged values: layers whose values may be reduced, as 2,5,8-11. Default: all.",
            show_default=False,
        ),
    ] = None,
    choose: Annotated[bool, typer.Option(help="skipv1: which heads keep a value, by what is lost without.")] = True,
    refit_lent: Annotated[bool, typer.Option(help="skipv1: fit the values that the first layer lends.")] = True,
    refit_values: Annotated[bool, typer.Option(help="skipv1: fit W_V of the kept heads, not W_O alone.")] = True,
    device: Annotated[
        str | None,
        typer.Option(help="Latents and merged values: cpu, cuda or mps, to calibrate on. Default: cpu."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the new matrices of a nonlinear query.")] = 0,
    dtype: Dtype = "fp32",
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print a line for every layer; a log has it anyway.")
    ] = False,
) -> None:
    """Give a checkpoint a smaller KV cache, or a nonlinear query.

    leanqkv convert model.gguf --cache 84% --calibration prose --out hf/smaller --evaluate book.txt

    leanqkv convert hf/llama --cache 75% --calibration prose,code.txt:0.3 --out hf/smaller

    leanqkv convert hf/llama --to merged-values --calibration prose --out hf/merged

    leanqkv convert hf/llama --to skipv1 --calibration prose --out hf/skipv1

    leanqkv convert hf/llama --to skipv1 --method mean-v --out hf/mean

    leanqkv convert hf/llama --to gqa --ratio 0.75 --out hf/grouped

    leanqkv convert runs/baseline --to nonlinear-query --out runs/nonlinear
    """
    import torch

    from ..checkpoints.open import open_checkpoint
    from ..checkpoints.write import check_free
    from ..convert.calibrated import Settings, calibrated_target
    from ..convert.conversion import CACHE, REDUCED, check_request, check_sequence_length, convert_directory, reduction
    from ..environment import check_device
    from ..errors import LeanError
    from ..report import conversion as pages

    heads = Settings.ratio if ratio is None else ratio
    settings = Settings(ratio=heads, choose=choose, refit_lent=refit_lent, refit_values=refit_values)
    stored_dtype = as_dtype(dtype)
    check_free(out, source)
    device = None if device is None else check_device(device)
    chosen_layers = None if layers is None else _read_layers(layers)
    share = None if cache is None else read_share(cache)
    check_request(to, method, settings, calibration is not None, chosen_layers, device is not None, share, ratio)
    if calibration is None and tokens is not None:
        raise LeanError("--tokens goes with --calibration FILE; leave it out")
    opened = open_checkpoint(source)
    if to in REDUCED:  # refuse before any text is read
        reduction(to, opened.config, opened.tensors, cache=share or CACHE, ratio=heads, layers=chosen_layers)
    elif calibration is not None:
        calibrated_target(opened.config, heads)
    length = sequence_length or min(512, opened.config.max_position_embeddings or 512)
    check_sequence_length(opened.config, length)
    comparison = _read_evaluation(source, evaluate, evaluate_tokens, length, calibration)
    about, sample = _about(source, out, device or "cpu"), None
    if calibration is not None:
        tokens = tokens or min(max(40 * opened.config.hidden_size, 24_576), 131_072)
        sample, data = _read_tokens(opened, calibration, tokens, length)
        about["calibration"] = {**data.record(), "sequence_length": length}
        if comparison is not None:
            about["calibration"]["source_bits_per_byte"] = comparison.compare_domains(sample, data)
    with continued_when_repeated(), progress_bar("reading") as bar:

        def show_written(done: int, total: int) -> None:
            if bar.description == "writing":
                bar.start("writing, MB")
            bar(done // 10**6, total // 10**6)

        report = convert_directory(
            source,
            out,
            to=to,
            method=method,
            tokens=sample,
            settings=settings,
            cache=share,
            layers=chosen_layers,
            device=None if device is None else torch.device(device),
            seed=seed,
            dtype=stored_dtype,
            calibrating=bar,
            message=bar.describe,
            progress=show_written,
            about=about,
            evaluate=lambda directory: (
                {} if comparison is None else {"evaluation": comparison.evaluate(directory, bar)}
            ),
            finish=pages.write_pages,
        )
    console.print(pages.terminal_table(report))
    if verbose or not console.is_terminal:
        for line in pages.layer_lines(report):
            console.print(line, highlight=False)
    console.print(f"{out}: conversion.html, conversion.json, README.md (a model card)", highlight=False)


def read_share(text: str, option: str = "--cache") -> float:
    """Return the share of "75%" or "0.75".

    Raises:
        LeanError: it is neither, or not between 0 and 1.
    """
    from ..errors import LeanError

    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)(%?)", text.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share < 1:
        raise LeanError(f"{option} is a share of the source's cache, such as 75%, found {shorten(text, 80)!r}")
    return share


def _read_layers(text: str) -> tuple[int, ...]:
    """Return the layers of "2,5,8-11".

    Raises:
        LeanError: it is no such list.
    """
    from ..errors import LeanError

    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part.strip())
        run = range(0) if match is None else range(int(match[1]), int(match[2] or match[1]) + 1)
        if not run:
            raise LeanError(f"--layers is a list like 2,5,8-11, found {shorten(text, 80)!r}")
        layers |= set(run)
    return tuple(sorted(layers))


@dataclass(frozen=True)
class Comparison:
    """The source, and the text on which it is compared with what becomes of it."""

    source: "Checkpoint"
    text: "EvaluationText"
    tokens: int
    length: int

    def windows(self, tokens: int) -> list[tuple[int, int]]:
        """Return windows with so many tokens to score."""
        from ..evaluate import spread_windows

        return spread_windows(len(self.text.tokens), self.length, max(1, tokens // self.length))

    def evaluate(self, directory: Path, bar: Bar) -> dict[str, Any]:
        """Return the comparison with the model in `directory`, for the report."""
        import torch

        from ..checkpoints.open import load_model, open_causal_lm
        from ..evaluate import paired_record

        bar.start("reading both models")
        before, after = (load_model(opened, torch.float32) for opened in (self.source, open_causal_lm(directory)))
        bar.start("comparing source and result, tokens")
        return paired_record(before, after, self.text, self.windows(self.tokens), self.length, progress=bar)

    def compare_domains(self, sample: "np.ndarray", data: "TokenData") -> float | None:
        """Return the source's bits per byte of the calibration text; warn if the evaluation text is of another kind.

        Args:
            sample: [sequences, length], the calibration tokens; `data` is their text.

        Returns:
            None where one of the texts is known as tokens alone.
        """
        import numpy as np
        import torch

        from ..checkpoints.open import load_model
        from ..evaluate import sequence_losses

        if data.bytes_per_token is None or self.text.bytes is None:
            return None
        windows, width = self.windows(COMPARED_TOKENS), sample.shape[1]
        count = min(len(sample), max(1, COMPARED_TOKENS // width))
        rows = sample[np.linspace(0, len(sample) - 1, count).astype(int)]
        with progress_bar("comparing calibration and evaluation text"):
            model = load_model(self.source, torch.float32)
            calibration = sequence_losses(model, rows.reshape(-1), [i * width for i in range(len(rows))], width - 1, 1)
            evaluation = sequence_losses(model, self.text.tokens, [at for at, _ in windows], windows[0][1], 1)
        bytes_per_token = data.bytes_per_token, self.text.bytes / len(self.text.tokens)
        first, second = (
            losses.mean().item() / math.log(2) / size
            for losses, size in zip((calibration, evaluation), bytes_per_token, strict=True)
        )
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


def _read_evaluation(
    source: Path, evaluate: str | None, tokens: int | None, length: int, calibration: str | None
) -> Comparison | None:
    """Return what is to be compared on the text `evaluate`, or None of no text.

    Raises:
        LeanError: no such text, too short, or read by the calibration too; or too little memory for both models.
    """
    from ..checkpoints.open import open_causal_lm
    from ..data import evaluation_text, unseen_split
    from ..environment import free_memory
    from ..errors import LeanError

    if evaluate is None:
        if tokens is not None:
            raise LeanError("--evaluate-tokens goes with --evaluate FILE; leave it out")
        return None
    opened = open_causal_lm(source)
    needed, free = 2 * 4 * opened.config.plan.count_parameters().total, free_memory("cpu")
    if needed > free:
        raise LeanError(
            f"--evaluate holds source and result in float32: {needed / 1e9:,.1f} GB of memory, and "
            f"{free / 1e9:,.1f} GB are free. Leave it out, and score both with leanqkv eval"
        )
    with progress_bar("reading the evaluation text") as bar:
        split = unseen_split(evaluate, calibration)
        text = evaluation_text(
            evaluate,
            tokenizer=source,
            vocab_size=opened.config.vocab_size,
            split=split,
            progress=bar.describe,
        )
    if tokens is not None and tokens > (there := len(text.tokens) - 1):
        raise LeanError(
            f"--evaluate-tokens {tokens:,} are asked for, the {split} text of {evaluate} has {there:,}. Give more "
            "text, or fewer tokens"
        )
    return Comparison(opened, text, tokens or EVALUATED_TOKENS, min(length, len(text.tokens) - 1))


def _about(source: Path, out: Path, device: str) -> dict[str, Any]:
    """Return the report's entries on how it was made; no path of this machine."""
    from ..checkpoints.card import origin
    from ..environment import command_line, git_commit, hardware, versions

    return {
        "name": out.resolve().name,
        **origin(source),
        "command": command_line(),
        "hardware": hardware(device),
        "versions": versions(),
        "git_commit": git_commit(),
    }


def _read_tokens(source: "Checkpoint", text: str, tokens: int, length: int) -> "tuple[np.ndarray, TokenData]":
    """Return calibration tokens [sequences, length] of the tokenizer beside `source`, and their text."""
    from ..convert.conversion import calibration_tokens
    from ..data import prepare_data

    size, tokenizer = source.config.vocab_size, str(source.directory)
    with progress_bar("reading the calibration text") as bar:
        data = prepare_data(text, vocab_size=size, tokenizer=tokenizer, progress=bar.describe)
    return calibration_tokens(data, source.config, tokens, length), data
