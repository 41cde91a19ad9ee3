"""`leanqkv inspect`, `eliminate`, `verify`, `import` and `export`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from torch import Tensor

    from ..eliminate.audit import Finding, Spectrum

from .options import NAME_HELP, console

SOURCE = "Checkpoint directory: of leanqkv, or GPT-2, GPT-NeoX, LLaMA, Mistral, Qwen2 or Qwen3"
# How far two checkpoints may lie apart and still be called one function, relative to the largest logit, in float64.
TOLERANCE = 1e-3
Out = Annotated[
    Path, typer.Option(help="New directory; written whole or not at all. Killed and started again it goes on.")
]
Dtype = Annotated[str, typer.Option(help="Of the stored weights: fp64, fp32 or bf16.")]
Text = Annotated[
    Path | None, typer.Option(help="Text to compare on. Default: random tokens from a fixed seed.", show_default=False)
]


def inspect(
    source: Annotated[str, typer.Argument(help=f"{NAME_HELP}; or a checkpoint directory, ours or of transformers")],
    spectra: Annotated[bool, typer.Option(help="Condition numbers of a checkpoint's projections, too.")] = True,
) -> None:
    """Show parameters, KV bytes, the plan of every layer, and what could be eliminated exactly, or why not.

    leanqkv inspect gpt2-124m+skipv1

    leanqkv inspect hf/pythia-160m
    """
    from ..checkpoints.memory import give_back_freed_memory
    from ..checkpoints.open import open_checkpoint
    from ..inspection import layer_table, summary
    from ..presets import preset

    config: Any
    if Path(source).exists():
        give_back_freed_memory()
        opened = open_checkpoint(Path(source))
        config, tensors = opened.config, opened.tensors if spectra else None
    else:
        config, tensors = preset(source), None
    console.print(layer_table(config, source))
    for line in summary(config):
        console.print(line)
    _print_audit(config, tensors, source)


def eliminate(
    source: Annotated[Path, typer.Argument(help=SOURCE)],
    remove: Annotated[
        str,
        typer.Option(help="query, key, value, output, several of them between commas; block-diagonal; single-head."),
    ],
    out: Out,
    layer: Annotated[
        str, typer.Option(help="Of query, key, value, output: 3, or 0,2, counted from 0; or all.")
    ] = "all",
    stock: Annotated[
        str, typer.Option("--format", help="strict: ours, with fewer tensors. stock: a class of transformers.")
    ] = "strict",
    family: Annotated[
        str | None, typer.Option(help="Which class with --format stock: llama, gpt2, … Default: the plainest.")
    ] = None,
    dtype: Dtype = "fp32",
    max_condition: Annotated[
        float, typer.Option(min=1, help="Refuse to solve with a matrix that is worse conditioned.")
    ] = 1e8,
    plain: Annotated[
        bool, typer.Option("--plain", help="The textbook form, not the one that loses least to rounding.")
    ] = False,
    text: Text = None,
) -> None:
    """Remove weights from a checkpoint; the result computes the same, and a certificate says how exactly.

    leanqkv inspect says what is possible.

    leanqkv eliminate runs/a --remove query --layer 3 --out runs/b

    leanqkv eliminate runs/skipless --remove query,output --out runs/c

    leanqkv eliminate hf/llama --remove block-diagonal --format stock --out hf/llama-vo
    """
    from ..eliminate.run import eliminate_directory
    from ..eliminate.transform import parse_request
    from ..errors import LeanError

    if stock not in ("strict", "stock"):
        raise LeanError(f"--format is strict or stock, found {stock!r}")
    if family is not None and stock != "stock":
        raise LeanError("--family chooses a class of transformers; it needs --format stock")
    request = parse_request(remove, layer, max_condition=max_condition, balance=not plain)
    with _progress() as (bar, message):
        report = eliminate_directory(
            source,
            out,
            request,
            dtype=as_dtype(dtype),
            stock=stock == "stock",
            family=family,
            inputs=_inputs(source, text),
            progress=bar,
            message=message,
        )
    _print_certificate(report)
    console.print(f"{out}: certificate.json", highlight=False)


def verify(
    source: Annotated[Path, typer.Argument(help=SOURCE)],
    other: Annotated[Path, typer.Argument(help="Another, of the same vocabulary.", metavar="DIR")],
    text: Text = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Largest difference of logits in float64, relative to the largest logit.")
    ] = TOLERANCE,
) -> None:
    """Compare two checkpoints on their logits, in float64, float32 and bfloat16; exit code 1 if they differ.

    leanqkv verify runs/a runs/b --text book.txt
    """
    from ..eliminate.run import verify as run

    with _progress() as (_, message):
        message("comparing")
        report = run(source, other, _inputs(source, text))
    console.print(_difference_table(report))
    relative = report["fp64"]["result"]["relative"]
    if relative <= tolerance:
        console.print(f"the same function, up to {relative:.1e}", highlight=False)
        return
    console.print(f"not the same function: in float64 the logits differ by {relative:.1e}", highlight=False)
    raise typer.Exit(1)


def import_checkpoint(
    source: Annotated[Path, typer.Argument(help=SOURCE, metavar="HF_DIR")],
    out: Out,
    dtype: Annotated[
        str | None, typer.Option(help="fp64, fp32 or bf16. Default: as stored.", show_default=False)
    ] = None,
) -> None:
    """Turn a checkpoint of transformers into one of leanqkv; every tensor is accounted for.

    leanqkv import hf/pythia-160m --out runs/pythia
    """
    from ..eliminate.run import convert_format

    with _progress() as (bar, message):
        message("writing")
        config, name = convert_format(source, out, stock=False, dtype=as_dtype(dtype), progress=bar)
    console.print(f"{out}: {name}, {config.plan.count_parameters().total:,} parameters", highlight=False)


def export_checkpoint(
    source: Annotated[Path, typer.Argument(help=SOURCE, metavar="DIR")],
    out: Out,
    stock: Annotated[str, typer.Option("--format", help="stock, a class of transformers.")] = "stock",
    family: Annotated[str | None, typer.Option(help="Which one: llama, gpt2, … Default: the plainest.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp64, fp32 or bf16. Default: as stored.", show_default=False)
    ] = None,
) -> None:
    """Turn a checkpoint of leanqkv into one of a class that transformers knows, identities written out.

    leanqkv export runs/a --format stock --out hf/a
    """
    from ..eliminate.run import convert_format
    from ..errors import LeanError

    if stock != "stock":
        raise LeanError(f"--format is stock, found {stock!r}")
    with _progress() as (bar, message):
        message("writing")
        _, name = convert_format(source, out, stock=True, family=family, dtype=as_dtype(dtype), progress=bar)
    console.print(f"{out}: {name}", highlight=False)


def _print_audit(config: Any, tensors: Any, title: str) -> None:
    """Prints what can be eliminated and, with tensors, how the projections are conditioned."""
    from ..checkpoints.tensors import finite
    from ..eliminate.audit import findings, spectra, weight_table

    found_ways = findings(config)
    console.print(_findings_table(found_ways, title))
    reasons: dict[str, list[str]] = {}
    for finding in found_ways:
        if finding.why_not:
            reasons.setdefault(finding.why_not, []).append(finding.remove)
    for reason, ways in reasons.items():
        console.print(f"not {'; '.join(ways)}: {reason}", highlight=False)
    if tensors is not None:
        with _progress() as (_, message):
            found = list(spectra(config, finite(tensors), lambda name: message(f"singular values of {name}")))
        console.print(_spectra_table(found))
    table = weight_table(config)
    console.print(
        f"without any Q and P, were that exact: {table['weight savings']:.0%} fewer of {table['total weights']:,.0f} "
        f"weights, {table['possible speedup at batch 1']:.2f}× at batch 1 (as P4 counts)",
        highlight=False,
    )


def _findings_table(findings: "list[Finding]", title: str) -> Table:
    table = Table(title=f"Exact eliminations, {title}", title_justify="left")
    for column in ("--remove", "exact", "--layer", "saves", "batch 1", "source"):
        table.add_column(column, justify="right" if column in ("saves", "batch 1") else "left")
    for found in findings:
        layers = (
            "" if not found.applies else "all" if found.layer is None else "one of " + ",".join(map(str, found.layer))
        )
        if found.remove in ("block-diagonal", "single-head"):
            layers = ""
        saves = f"{found.saves:,} ({found.saves / (found.parameters + found.saves):.1%})" if found.applies else ""
        speed = f"{found.speedup:.2f}×" if found.applies else ""
        table.add_row(found.remove, "yes" if found.applies else "no", layers, saves, speed, found.source)
    return table


def _spectra_table(spectra: "list[Spectrum]") -> Table:
    table = Table(title="Attention's projections", title_justify="left")
    for column in ("tensor", "shape", "rank", "condition", "smallest singular value"):
        table.add_column(column, justify="left" if column == "tensor" else "right")
    for found in spectra:
        shape = "×".join(map(str, found.shape))
        table.add_row(found.tensor, shape, str(found.rank), f"{found.condition:.3g}", f"{found.smallest:.3g}")
    return table


def _print_certificate(report: dict[str, Any]) -> None:
    before, after = report["parameters"]["before"], report["parameters"]["after"]
    change = f"{before:,} -> {after:,} parameters ({after / before - 1:+.1%})"
    console.print(change, highlight=False)
    if after > before:
        console.print("more than before: the head was tied to the embedding and no longer can be", highlight=False)
    if report["conditions"]:
        name, worst = max(report["conditions"].items(), key=lambda item: item[1])
        console.print(f"worst condition number: {worst:.3g}, {name}", highlight=False)
    if report["exact"]:
        console.print(
            f"before rounding to {report['dtype']}: logits differ by {report['exact']['relative']:.1e}", highlight=False
        )
    if "disabled_norms" in report:
        console.print(
            f"the norms that the epsilon disables: {report['disabled_norms']['relative']:.1e} from the function "
            "without norms, which is what is reproduced",
            highlight=False,
        )
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


def as_dtype(name: str | None) -> Any:
    from ..eliminate.certify import DTYPES
    from ..errors import LeanError

    if name is None:
        return None
    if name not in DTYPES:
        raise LeanError(f"--dtype is one of {', '.join(DTYPES)}, found {name!r}")
    return DTYPES[name]


def _inputs(source: Path, text: Path | None) -> "dict[str, Tensor] | None":
    """The beginning of `text` as two sequences of up to 64 of the model's tokens, or None without a text."""
    from ..checkpoints.open import open_checkpoint
    from ..data.tokenizer import load_tokenizer
    from ..errors import LeanError

    if text is None:
        return None
    config = open_checkpoint(source).config
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LeanError(f"{text} cannot be read: {error}") from None
    ids = load_tokenizer(source)(content, return_tensors="pt", add_special_tokens=False)["input_ids"]
    assert config.max_position_embeddings is not None
    length = min(64, config.max_position_embeddings, ids.shape[1] // 2)
    if length < 1:
        raise LeanError(f"{text} is too short: it is {ids.shape[1]} tokens")
    return {"input_ids": ids[:, : 2 * length].view(2, length)}


@contextmanager
def _progress() -> Iterator[tuple[Any, Any]]:
    """A function for bytes written of bytes in all, and one for what is being done."""
    from ..checkpoints.memory import give_back_freed_memory

    give_back_freed_memory()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("reading", total=None)

        def progress(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total)

        yield progress, lambda text: bars.update(task, description=text)
