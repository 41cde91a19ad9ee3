"""The command line."""

import errno
import os
import sys

import typer
from rich.console import Console

from .commands import (
    analyze,
    checkpoints,
    compare,
    convert,
    demo,
    eliminate,
    evaluate,
    inference,
    inspect,
    presets,
    train,
)

app = typer.Typer(
    help="Transformers with fewer attention weights and a smaller KV cache.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
errors = Console(stderr=True)


app.command()(demo.demo)
app.command()(train.train)
app.command()(train.uptrain)
app.command()(compare.compare)
app.command()(compare.report)
app.command()(inspect.inspect)
app.command()(eliminate.eliminate)
app.command()(eliminate.verify)
app.command()(convert.convert)
app.command("import")(checkpoints.import_checkpoint)
app.command("export")(checkpoints.export_checkpoint)
app.command()(inference.generate)
app.command()(inference.serve)
app.command()(inference.bench)
app.command("eval")(evaluate.evaluate)
app.command()(analyze.analyze)
app.command()(presets.presets)


def main() -> None:
    """Run `leanqkv`."""
    run(app)


def run(app: typer.Typer) -> None:
    """Run a command line. An error that its user can mend is printed as one line, with exit code 2."""
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


def _fail(message: str) -> None:
    errors.print(f"[bold red]error:[/] {_escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(2)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(" ".join(text.split()))


if __name__ == "__main__":
    main()
