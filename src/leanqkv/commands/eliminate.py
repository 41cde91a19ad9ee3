"""`leanqkv eliminate` and `verify`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..errors import LeanError
from ..files import check_free
from ..progress import continued_when_repeated, progress_bar
from .options import SOURCE, Dtype, Out, as_dtype, console

if TYPE_CHECKING:
    from torch import Tensor

# The largest difference of logits at which two checkpoints are one function, relative to the largest logit, in float64.
TOLERANCE = 1e-3
Text = Annotated[
    Path | None, typer.Option(help="Text to compare on. Default: random tokens from a fixed seed.", show_default=False)
]


def eliminate(
    source: Annotated[Path, typer.Argument(help=SOURCE)],
    remove: str,
    out: Out,
    layer: str = "all",
    format: str = ("strict"),
    family: str | None = None,
    dtype: Dtype = "fp32",
    max_condition: float = 1e8,
    plain: bool = False,
    text: Text = None,
) -> None:
    """Remove weights from a checkpoint; the result computes the same, and a certificate says how exactly.

    leanqkv inspect says what is possible.

    leanqkv eliminate runs/a --remove query --layer 3 --out runs/b

    leanqkv eliminate runs/skipless --remove query,output --out runs/c

    leanqkv eliminate hf/llama --remove block-diagonal --format stock --out hf/llama-vo

    Options:
        remove: query, key, value, output, several of them between commas; block-diagonal; single-head.
        layer: Of query, key, value, output: 3, or 0,2, counted from 0; or all.
        format: strict: ours, with fewer tensors. stock: a class of transformers.
        family: Which class with --format stock: llama, gpt2, … Default: the plainest.
        max_condition: Refuse to solve with a matrix that is worse conditioned.
        plain: The textbook form, not the one that loses least to rounding.
    """
    if format not in ("strict", "stock"):
        raise LeanError(f"--format is strict or stock, found {format!r}")
    if family is not None and format != "stock":
        raise LeanError("--family chooses a class of transformers; it needs --format stock")
    check_free(out, source)
    from ..checkpoints.memory import give_back_freed_memory
    from ..eliminate import eliminate_directory, parse_request

    request = parse_request(remove, layer, max_condition=max_condition, balance=not plain)
    settings = {"dtype": as_dtype(dtype), "stock": format == "stock", "family": family, "inputs": _inputs(source, text)}
    give_back_freed_memory()
    with continued_when_repeated(), progress_bar("reading", in_bytes=True) as bar:
        report = eliminate_directory(source, out, request, **settings, progress=bar, message=bar.start)
    _print_certificate(report)
    console.print(f"{out}: certificate.json", highlight=False)


def verify(
    source: Annotated[Path, typer.Argument(help=SOURCE)],
    other: Annotated[Path, typer.Argument(help="Another, of the same vocabulary.", metavar="DIR")],
    text: Text = None,
    tolerance: float = TOLERANCE,
) -> None:
    """Compare two checkpoints on their logits, in float64, float32 and bfloat16; exit code 1 if they differ.

    leanqkv verify runs/a runs/b --text book.txt

    Options:
        tolerance: Largest difference of logits in float64, relative to the largest logit.
    """
    from ..checkpoints.memory import give_back_freed_memory
    from ..eliminate import verify as compare

    give_back_freed_memory()
    with progress_bar("reading") as bar:
        report = compare(source, other, _inputs(source, text), bar.start)
    console.print(_difference_table(report))
    relative = report["fp64"]["result"]["relative"]
    if relative <= tolerance:
        console.print(f"the same function, up to {relative:.1e}", highlight=False)
        return
    console.print(f"not the same function: in float64 the logits differ by {relative:.1e}", highlight=False)
    raise typer.Exit(1)


def _print_certificate(report: dict[str, Any]) -> None:
    before, after = report["parameters"]["before"], report["parameters"]["after"]
    lines = [f"{before:,} -> {after:,} parameters ({after / before - 1:+.1%})"]
    if after > before:
        lines.append("more than before: the head was tied to the embedding and no longer can be")
    if report["conditions"]:
        name, worst = max(report["conditions"].items(), key=lambda item: item[1])
        lines.append(f"worst condition number: {worst:.3g}, {name}")
    if report["exact"]:
        lines.append(f"before rounding to {report['dtype']}: logits differ by {report['exact']['relative']:.1e}")
    else:
        distance, explained = report["rounding"].values()
        lines.append(
            f"stored in {report['dtype']}: logits lie {distance:.1e} off; rounding explains up to {explained:.1e}"
        )
    if "disabled_norms" in report:
        relative = report["disabled_norms"]["relative"]
        lines.append(
            f"the norms that the epsilon disables: the original differs by {relative:.1e} from the function without "
            "norms, which is the one reproduced"
        )
    console.print("\n".join(lines), highlight=False)
    console.print(_difference_table(report["dtypes"]))


def _difference_table(report: dict[str, Any]) -> Table:
    table = Table(title="Logits against the original's in float64", title_justify="left")
    for column in ("computed in", "", "max |Δ|", "relative", "KL, nats", "same next token"):
        table.add_column(column, justify="left" if column in ("computed in", "") else "right")
    for dtype, pair in report.items():
        for which, values in pair.items():
            if dtype == "fp64" and which == "original":
                continue
            agreement = f"{values['agreement']:.1%}"
            table.add_row(dtype, which, *(f"{values[name]:.2e}" for name in ("max_abs", "relative", "kl")), agreement)
    return table


def _inputs(source: Path, text: Path | None) -> "dict[str, Tensor] | None":
    """Return the beginning of `text` as two sequences of up to 64 of the model's tokens, or None without a text."""
    import torch

    from ..checkpoints.open import open_checkpoint
    from ..checkpoints.tokenizer import check_ids, framing, load_tokenizer
    from ..data import read_pieces

    if text is None:
        return None
    config, beginning = open_checkpoint(source).config, next(read_pieces(text), "")
    tokenizer = load_tokenizer(source)
    around = framing(tokenizer)
    ids = around.frame(tokenizer(beginning, add_special_tokens=False)["input_ids"])[:-1]
    check_ids(ids, config.vocab_size, tokenizer, str(text))
    length = min(64, config.max_position_embeddings, len(ids) // 2)
    if length < 1:
        raise LeanError(f"{text} is too short: it is {len(ids)} tokens")
    sequences = torch.tensor(ids[: 2 * length]).view(2, length)
    if around.begin is not None:
        sequences[:, 0] = around.begin
    return {"input_ids": sequences}
