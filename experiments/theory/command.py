"""`python -m experiments.theory`: run a check of what a paper proves."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .check import CHECKS, Check, load_check, passed
from .page import write_page

app = typer.Typer(
    help="Check what the papers prove: statement, measurement, outcome.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()

Out = Annotated[Path, typer.Option(help="Directory for record.json, table.md, figure.png and report.html.")]
Done = tuple[Check, dict[str, Any], Path]  # with its record, and the directory of both
Quick = Annotated[bool, typer.Option("--quick", help="Seconds, at sizes too small to conclude much from.")]
Redraw = Annotated[bool, typer.Option("--redraw", help="Table and figure again, from the record in --out.")]
Models = Annotated[
    list[Path] | None,
    typer.Option("--model", help="Trained checkpoint for weights and activations; repeatable. Without: random ones."),
]


@app.callback()
def _theory() -> None:
    """Check what the papers prove: statement, measurement, outcome. A check that fails has exit code 1."""


@app.command("initial-spread")
def initial_spread(out: Out, quick: Quick = False, redraw: Redraw = False) -> None:
    """How wide the attention logits of every query mechanism spread at the start (P1, appendix B). About a minute."""
    _finish(out, [_one("initial-spread", out, quick, redraw)])


@app.command("layer-norm")
def layer_norm(out: Out, model: Models = None, quick: Quick = False, redraw: Redraw = False) -> None:
    """A basis change through LayerNorm, RMSNorm and DyT (P1, appendix C). About a minute.

    python -m experiments.theory layer-norm --model runs/quickstart/tiny-0 --out runs/layer-norm
    """
    _finish(out, [_one("layer-norm", out, quick, redraw, models=model)])


@app.command("basis-transfer")
def basis_transfer(
    out: Out,
    quick: Quick = False,
    paper: Annotated[
        bool, typer.Option("--paper", help="Widths 256, 512, 768, 20,000 steps of 65,536: hours on an accelerator.")
    ] = False,
    redraw: Redraw = False,
) -> None:
    """An MLP with a skip learns another one in a changed basis (P1, appendix D). Minutes at reduced width and steps."""
    _finish(out, [_one("basis-transfer", out, quick, redraw, paper=paper)])


@app.command("skip-absorption")
def skip_absorption(out: Out, quick: Quick = False, redraw: Redraw = False) -> None:
    """When a ReLU MLP can do without its skip connection (P1, appendix E). About a minute."""
    _finish(out, [_one("skip-absorption", out, quick, redraw)])


@app.command("hadamard")
def hadamard(out: Out, quick: Quick = False, redraw: Redraw = False) -> None:
    """Attention written with block Hadamard products is attention (P1, appendix A). Seconds."""
    _finish(out, [_one("hadamard", out, quick, redraw)])


@app.command("in-context")
def in_context(out: Out, quick: Quick = False, redraw: Redraw = False) -> None:
    """In-context linear regression with and without the first layer's value (Wu et al. 2025, Theorem 2).

    Exact optima under the paper's assumption, where its statement holds and where not, and the model trained freely.
    About a quarter of an hour on one core.

    python -m experiments.theory in-context --out runs/theory

    python -m experiments.theory in-context --redraw --out runs/theory
    """
    _finish(out, [_one("in-context", out, quick, redraw)])


@app.command("all")
def everything(
    out: Annotated[Path, typer.Option(help="Directory; every check gets one of its own in it.")],
    model: Models = None,
    quick: Quick = False,
    redraw: Redraw = False,
) -> None:
    """Every check, each into its own directory below --out, and one page of all. About half an hour on one core."""
    done = []
    for name in CHECKS:
        done.append(_one(name, out / name, quick, redraw, models=model if name == "layer-norm" else None))
    _finish(out, done)


def _one(
    name: str, out: Path, quick: bool, redraw: bool, *, paper: bool = False, models: list[Path] | None = None
) -> Done:
    """Runs one check, or reads its record; writes table and figure, and prints the outcome."""
    from leanqkv.errors import LeanError

    given = {"--quick": quick, "--paper": paper, "--redraw": redraw, "--model": bool(models)}
    for first, second in (
        ("--quick", "--redraw"),
        ("--paper", "--redraw"),
        ("--model", "--redraw"),
        ("--quick", "--paper"),
    ):
        if given[first] and given[second]:
            raise LeanError(f"{first} and {second} clash: use one of them")
    check = load_check(name)
    if redraw:
        record = check.load(out / "record.json")
    else:
        settings: Any = check.settings.quick() if quick else check.settings.paper() if paper else check.settings()
        if models:
            settings = replace(settings, models=tuple(map(str, models)))
        with console.status("starting") as status:
            record = check.compute(
                settings, out, lambda part, done, total: status.update(f"{name}: {part}, {done:,} of {total:,}")
            )
    check.write(record, out)
    console.print(f"[bold]{name}[/]: {check.statement} ({check.source})", highlight=False, soft_wrap=True)
    findings = check.findings(record)
    for finding in findings:
        word = "[green]pass[/]" if finding.passed else "[bold red]FAIL[/]"
        console.print(f"  {word}  {finding.what}: {finding.found}", highlight=False, soft_wrap=True)
    files = ", ".join(file for file in ("record.json", "table.md", "figure.png") if (out / file).exists())
    console.print(f"{out}: {files}", highlight=False, soft_wrap=True)
    return check, record, out


def _finish(out: Path, done: list[Done]) -> None:
    write_page(out / "report.html", done)
    console.print(f"report: {out / 'report.html'}", highlight=False, soft_wrap=True)
    if not all(passed(check.findings(record)) for check, record, _ in done):
        raise typer.Exit(1)
