"""`python -m experiments.theory`: run a check of what a paper proves."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from leanqkv.errors import LeanError
from leanqkv.progress import progress_bar

from .check import CHECKS, Check, load_check, passed
from .page import write_page
from .report import Record

app = typer.Typer(
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()


@app.command(no_args_is_help=True)
def theory(
    name: Annotated[str, typer.Argument(metavar="CHECK", help="all, or the name of a check.")],
    out: Annotated[
        Path,
        typer.Option(help="Directory for record.json, table.md, figure.png and report.html; with all, one each in it."),
    ],
    model: Annotated[
        list[Path] | None,
        typer.Option("--model", help="layer-norm: trained checkpoint for weights and activations; repeatable."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Seconds, at sizes too small to conclude much from.")] = False,
    paper: Annotated[
        bool, typer.Option("--paper", help="basis-transfer: the paper's sizes, hours on an accelerator.")
    ] = False,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="Make table, figure and page again, from the record in --out.")
    ] = False,
) -> None:
    """Check what the papers prove: statement, measurement, outcome. A check that fails has exit code 1.

    [bold]initial-spread[/]: how wide the attention logits of every query mechanism spread at the start (P1, appendix
    B). About a minute.

    [bold]layer-norm[/]: a change of basis through LayerNorm, RMSNorm and DyT (P1, appendix C). About a minute.

    [bold]basis-transfer[/]: an MLP with a skip learns another one in a changed basis (P1, appendix D). Minutes, at
    reduced width and steps.

    [bold]skip-absorption[/]: when a ReLU MLP can do without its skip connection (P1, appendix E). About a minute.

    [bold]hadamard[/]: attention written with block Hadamard products is attention (P1, appendix A). Seconds.

    [bold]in-context[/]: in-context linear regression with and without the first layer's value (P3, Theorem 2). About a
    quarter of an hour on one core.

    python -m experiments.theory all --out runs/theory

    python -m experiments.theory layer-norm --model runs/quickstart/tiny-0 --out runs/layer-norm
    """
    if name not in ("all", *CHECKS):
        raise LeanError(f"there is no check {name!r}; choose all or one of {', '.join(CHECKS)}")
    _refuse_clashes(name, {"--quick": quick, "--paper": paper, "--redraw": redraw, "--model": bool(model)})
    results = []
    for check in map(load_check, CHECKS if name == "all" else (name,)):
        directory = out / check.name if name == "all" else out
        if redraw:
            record: Record = check.load(directory / "record.json")
        else:
            settings: Any = check.settings.quick() if quick else check.settings.paper() if paper else check.settings()
            if model and check.name == "layer-norm":
                settings = replace(settings, models=tuple(model))
            record = _compute(check, settings, directory)
        check.write(record, directory)
        _print(check, record, directory)
        results.append((check, record, directory))
    write_page(out / "report.html", results)
    console.print(f"report: {out / 'report.html'}", highlight=False, soft_wrap=True)
    if not all(passed(check.findings(record)) for check, record, _ in results):
        raise typer.Exit(1)


def _refuse_clashes(name: str, options: dict[str, bool]) -> None:
    for first, second in (
        ("--quick", "--redraw"),
        ("--paper", "--redraw"),
        ("--model", "--redraw"),
        ("--quick", "--paper"),
    ):
        if options[first] and options[second]:
            raise LeanError(f"{first} and {second} clash: use one of them")
    for option, checks in (("--model", ("all", "layer-norm")), ("--paper", ("basis-transfer",))):
        if options[option] and name not in checks:
            raise LeanError(f"{option} is for {checks[-1]}; {name} does not take it")


def _compute(check: Check, settings: Any, directory: Path) -> dict[str, Any]:
    with progress_bar(check.name) as bar:

        def progress(part: str, done: int, total: int) -> None:
            bar.describe(f"{check.name}: {part}")
            bar(done, total)

        return check.compute(settings, directory, progress)


def _print(check: Check, record: Record, directory: Path) -> None:
    console.print(f"[bold]{check.name}[/]: {check.statement} ({check.source})", highlight=False, soft_wrap=True)
    for finding in check.findings(record):
        word = "[green]pass[/]" if finding.passed else "[bold red]FAIL[/]"
        console.print(f"  {word}  {finding.what}: {finding.found}", highlight=False, soft_wrap=True)
    files = ", ".join(file for file in ("record.json", "table.md", "figure.png") if (directory / file).exists())
    console.print(f"{directory}: {files}", highlight=False, soft_wrap=True)
