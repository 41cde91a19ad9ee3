"""The command line."""

import errno
import os
import sys
from dataclasses import fields
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from .commands import analysis, checkpoints, conversions, evaluation, generation, inference, training
from .commands.options import console
from .theory.command import app as theory_app

app = typer.Typer(
    help="Transformers with fewer attention weights and a smaller KV cache.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
errors = Console(stderr=True)


@app.command()
def presets() -> None:
    """List the base sizes and the mechanisms, each with its source."""
    import torch

    from .presets import BASES, MECHANISMS, preset

    table = Table(title="Bases", title_justify="left")
    for column in ("name", "parameters", "KV B/token (bf16)", "source"):
        table.add_column(column, justify="right" if column[0] in "pK" else "left")
    for name, base in BASES.items():
        plan = preset(name).plan
        parameters = f"{plan.count_parameters().total / 1e6:,.1f} M"
        table.add_row(name, parameters, f"{plan.kv_bytes_per_token(torch.bfloat16):,}", base.source)
    console.print(table)
    for source, note in {base.source: base.note for base in BASES.values() if base.note}.items():
        console.print(f"{source}: {note}", highlight=False)
    console.print()
    table = Table(title="Mechanisms", title_justify="left")
    for column in ("name", "what it does", "options", "source"):
        table.add_column(column, overflow="fold")
    for name, mechanism in MECHANISMS.items():
        table.add_row(name, mechanism.summary, _options(mechanism), mechanism.source)
    console.print(table)
    console.print("A model is BASE+MECHANISM+…, with options as in tiny+skipv1:ratio=0.25+identity-query:layers=0,3;")
    console.print("any configuration field as in tiny+intermediate_size=576.", highlight=False)


def _options(mechanism: Any) -> str:
    from .model.depth_average import DEFAULTS
    from .model.registry import KEY_VALUES, KEYS, OUTPUTS, QUERIES, VALUES

    if "type" not in mechanism.spec:
        options = DEFAULTS if mechanism.slot == "depth_average" else mechanism.spec
        return ", ".join(f"{name}={'by width' if value is None else value}" for name, value in options.items())
    tables: dict[str, Any] = {
        "query": QUERIES,
        "key": KEYS,
        "value": VALUES,
        "output": OUTPUTS,
        "key_value": KEY_VALUES,
    }
    cls = tables[mechanism.slot][mechanism.spec["type"]]
    options = [f"{f.name}={mechanism.spec.get(f.name, f.default)}" for f in fields(cls.Options)]
    return ", ".join(options + (["layers=all"] if mechanism.slot != "key_value" else []))


app.command()(generation.generate)
app.command()(generation.serve)
app.command()(training.train)
app.command()(training.compare)
app.command()(training.report)
app.command()(checkpoints.inspect)
app.command()(checkpoints.eliminate)
app.command()(checkpoints.verify)
app.command("import")(checkpoints.import_checkpoint)
app.command("export")(checkpoints.export_checkpoint)
app.command()(conversions.convert)
app.command()(conversions.uptrain)
app.command()(inference.bench)
app.command()(analysis.analyze)
app.command("eval")(evaluation.evaluate)
app.add_typer(theory_app, name="theory")


def main() -> None:
    """Runs the command line; what a person can mend is one line and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from .errors import LeanError

    try:
        app()
    except (LeanError, ValueError) as error:
        from .model.registry import ConfigError

        if not isinstance(error, LeanError | ConfigError):
            raise
        _fail(str(error))
    except OSError as error:
        reasons = {errno.ENOSPC: "the disk is full", errno.EACCES: "permission denied", errno.EROFS: "read-only"}
        if error.errno not in reasons:
            raise
        where = f": {name}" if (name := error.filename2 or error.filename) else ""
        _fail(f"{reasons[error.errno]}{where}; what was complete is kept, the same command goes on from there")
    except KeyboardInterrupt:
        errors.print("\nstopped; the same command goes on from the last checkpoint", highlight=False)
        sys.exit(130)


def _fail(message: str) -> None:
    errors.print(f"[bold red]error:[/] {_escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(2)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(" ".join(text.split()))


if __name__ == "__main__":
    main()
