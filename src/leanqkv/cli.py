"""The command line."""

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from tempfile import NamedTemporaryFile
from textwrap import shorten
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup
from typer.main import get_command

from . import __version__
from .commands.options import option_groups
from .errors import LeanError, first_line

# By name: the module under commands/ and its function.
COMMANDS = {
    "train": ("train", "train"),
    "uptrain": ("train", "uptrain"),
    "plan-run": ("plan_run", "plan_run"),
    "tokenize": ("tokenize", "tokenize"),
    "compare": ("compare", "compare"),
    "report": ("compare", "report"),
    "inspect": ("inspect", "inspect"),
    "eliminate": ("eliminate", "eliminate"),
    "verify": ("eliminate", "verify"),
    "convert": ("convert", "convert"),
    "frontier": ("frontier", "frontier"),
    "import": ("checkpoints", "import_checkpoint"),
    "export": ("checkpoints", "export_checkpoint"),
    "generate": ("inference", "generate"),
    "serve": ("inference", "serve"),
    "bench": ("inference", "bench"),
    "eval": ("evaluate", "evaluate"),
    "presets": ("presets", "presets"),
}
HELP = {"help_option_names": ["-h", "--help"]}
# Of Typer's options, whichever copy of Click it brings.
USAGE_ERROR: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "UsageError")


class Group(TyperGroup):
    """A group of these commands. The module of each is imported when the command is asked for."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command, or None of an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        module, function = COMMANDS[cmd_name]
        return get_command(alone(getattr(import_module(f".commands.{module}", __package__), function), cmd_name))


def alone(command: Callable[..., Any], name: str | None = None) -> typer.Typer:
    """Return the command line of a single command."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    app.command(name, context_settings=HELP)(option_groups(command))
    return app


app = typer.Typer(
    cls=Group, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich", context_settings=HELP
)
errors = Console(stderr=True, highlight=False)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"leanqkv {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; LEANQKV_DEBUG=1 does the same.")
    ] = False,
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version, and stop.")
    ] = False,
) -> None:
    """Transformers with fewer attention weights and a smaller KV cache."""
    if debug:
        os.environ["LEANQKV_DEBUG"] = "1"


def main() -> None:
    """Run `leanqkv`."""
    run(app)


def run(app: typer.Typer) -> None:
    """Run a command line and exit. An error is one line: exit code 2 if its user can mend it, 1 if it is a defect."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        _refuse_empty(sys.argv[1:])
        sys.exit(app(standalone_mode=False) or 0)
    except Exception as error:
        if os.environ.get("LEANQKV_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        if isinstance(error, USAGE_ERROR) and type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # the help, which Typer gives where nothing is asked
            sys.exit(2)
        message = _user_message(error)
        if message is None:
            _fail(_unforeseen(error), 1)
        _fail(_as_options(message, app), getattr(error, "exit_code", 2))


def _refuse_empty(arguments: list[str]) -> None:
    """Refuse empty values: an empty path would be the current directory. An empty prompt is one."""
    for before, argument in zip(["leanqkv", *arguments], arguments, strict=False):
        name, equals, value = argument.partition("=") if argument.startswith("--") else (before, "=", argument)
        if equals and not value and name != "--prompt":
            raise LeanError(f"the value after {name} is empty; give one or leave the option out")


def _user_message(error: Exception) -> str | None:
    """Return what a person should read about an error that they or their machine caused; None of any other."""
    if isinstance(error, USAGE_ERROR):
        command = error.ctx.command_path if error.ctx is not None else "leanqkv"
        message = error.format_message()
        return f"{message}{'' if message.endswith(('.', '?')) else '.'} See {command} --help"
    if isinstance(error, LeanError):
        return str(error)
    if isinstance(error, OSError) and error.errno is not None:
        where = f": {name}" if (name := error.filename2 or error.filename) else ""
        reasons = {errno.ENOSPC: "the disk is full", errno.EACCES: "permission denied", errno.EROFS: "read-only"}
        if error.errno in reasons:
            return f"{reasons[error.errno]}{where}; what was complete is kept, the same command goes on from there"
        return f"{error.strerror}{where}" if where else None
    # PyTorch reports missing memory as a RuntimeError.
    if isinstance(error, MemoryError) or re.search("out of memory|can't allocate memory|not enough memory", str(error)):
        return f"out of memory; choose smaller batches or sequences ({first_line(error)})"
    from .model.registry import ConfigError

    return str(error) if isinstance(error, ConfigError) else None


def _as_options(message: str, app: typer.Typer) -> str:
    """Replace parameters that the library names, `steps` or `to=gqa`, by the options of the command that is run."""
    command: Any = get_command(app)
    if name := next((word for word in sys.argv[1:] if word in getattr(command, "commands", ())), None):
        command = command.get_command(None, name)
    parameters = {parameter.name: parameter for parameter in command.params}

    def option(found: re.Match[str]) -> str:
        name, value = found.groups()
        if (parameter := parameters.get(name)) is None:
            return found[0]
        if parameter.param_type_name == "argument":
            return name.upper()
        if value == "False":
            return str(parameter.secondary_opts[0])
        return f"{parameter.opts[0]} {value}" if value else str(parameter.opts[0])

    return re.sub(r"`(\w+)(?:=([^\s`]+))?`", option, message)


def _unforeseen(error: Exception) -> str:
    """Write the traceback to a file, and return the line about it."""
    if isinstance(error, typer.Abort) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # an EOFError, which Typer takes for the end of a person's input
    text = "".join(traceback.format_exception(error))
    try:
        with NamedTemporaryFile("w", prefix="leanqkv-", suffix=".log", delete=False, encoding="utf-8") as file:
            file.write(text.encode(errors="backslashreplace").decode())
        where = f"its traceback is in {file.name}"
    except OSError:
        where = "leanqkv --debug shows its traceback"
    return f"a defect of leanqkv, unforeseen {type(error).__name__}: {shorten(first_line(error), 200)}; {where}"


def _shortened(line: str) -> str:
    """Cut the middle out of long words and lists, which quote a value, and out of a line that is long even so."""

    def cut(found: re.Match[str]) -> str:
        is_path = "/" in found[0] and len(found[0]) < 5000
        return found[0] if is_path else f"{found[0][:80]}…{found[0][-30:]}"

    line = re.sub(r"\[[^][]{200,}\]|\{[^{}]{200,}\}|\S{121,}", cut, line)
    return line if len(line) <= 1500 else f"{line[:1000]}…{line[-400:]}"


def _fail(message: str, code: int) -> NoReturn:
    line = _shortened(" ".join(message.split()))
    # Neither a terminal's control characters nor bytes that are no text come from a message.
    printable = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    errors.print(f"[bold red]error:[/] {escape(printable)}", soft_wrap=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
