"""`leanqkv theory`: run a check of what a paper proves."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    help="Check what the papers prove, on the models the proofs are about.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()


@app.callback()
def _theory() -> None:
    """Check what the papers prove, on the models the proofs are about."""


@app.command("in-context")
def in_context(
    out: Annotated[Path, typer.Option(help="Directory for record.json, table.md and figure.png.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Seconds, too few samples and steps to conclude from.")
    ] = False,
    redraw: Annotated[bool, typer.Option("--redraw", help="Table and figure again, from the record in --out.")] = False,
) -> None:
    """In-context linear regression with and without the first layer's value (Wu et al. 2025, Theorem 2).

    Exact optima under the paper's assumption, where its statement holds and where not, and the model trained freely.
    About a quarter of an hour on one core.

    leanqkv theory in-context --out runs/theory

    leanqkv theory in-context --redraw --out runs/theory
    """
    from ..errors import LeanError
    from ..files import write_json, write_text
    from .in_context_record import Settings, load, run
    from .in_context_report import draw, markdown_tables

    if quick and redraw:
        raise LeanError("--quick and --redraw clash: the one computes a record, the other reads it; use one of them")
    file = out / "record.json"
    if redraw:
        record = load(file)
    else:
        if out.exists() and not out.is_dir():
            raise LeanError(f"--out takes a directory, and {out} is a file")
        if file.exists():
            load(file)  # another check's record is not written over
        out.mkdir(parents=True, exist_ok=True)
        with console.status("starting") as status:
            record = run(
                Settings.quick() if quick else Settings(),
                lambda part, done, total: status.update(f"{part}, {done:,} of {total:,}"),
            )
        write_json(file, record)
    write_text(out / "table.md", markdown_tables(record))
    draw(record, out / "figure.png")
    for entry in record["grid"]:
        console.print(
            f"d {entry['d']}, n {entry['n']}, sigma {entry['sigma']:g}: gap {entry['gap']:.3f}, "
            f"sampled {entry['sampled_gap']:.3f} ± {entry['sampled_half_width']:.3f}",
            highlight=False,
        )
    console.print(f"{out}: record.json, table.md, figure.png", highlight=False, soft_wrap=True)
