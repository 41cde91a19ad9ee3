"""The command line."""

import errno
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .commands import checkpoints, conversions, evaluation, training
from .commands.options import Device, console
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


@app.command()
def generate(
    directory: Annotated[Path, typer.Argument(help="Directory of a trained model.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among that many likeliest tokens.")] = 50,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Device = None,
) -> None:
    """Continue a prompt with a trained model.

    leanqkv generate runs/skipv1 --prompt "def " --max-new-tokens 64
    """
    import torch
    from transformers import TextStreamer

    from .checkpoints import load_config, load_model
    from .data.tokenizer import load_tokenizer
    from .errors import LeanError
    from .train.environment import check_device, default_device

    if (task := load_config(directory).task) != "causal_lm":
        raise LeanError(f"{directory} holds a model for {task}, which does not continue text")
    model: Any = load_model(directory).to(check_device(device or default_device()))  # type: ignore[arg-type]
    tokenizer = load_tokenizer(directory)
    # As in training, where documents are followed by an end-of-text token and preceded by none.
    inputs = tokenizer(prompt or tokenizer.eos_token, return_tensors="pt", add_special_tokens=False).to(model.device)
    length = inputs["input_ids"].shape[1]
    room = model.config.max_position_embeddings - length
    if model.config.position_embedding_type == "learned" and max_new_tokens > room:
        raise LeanError(
            f"the prompt takes {length} of the model's {model.config.max_position_embeddings} positions: "
            f"--max-new-tokens can be {room} at most, found {max_new_tokens}"
        )
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k} if temperature else {"do_sample": False}
    print(prompt, end="")
    model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **sampling,
    )


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
