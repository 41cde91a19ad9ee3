"""`leanqkv bench`: inference of several models, side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .options import NAME_HELP, Device, console

if TYPE_CHECKING:
    from ..model.causal_lm import LeanForCausalLM


def bench(
    models: Annotated[list[str], typer.Argument(help=f"Directories, or: {NAME_HELP}, with random weights.")],
    out: Annotated[Path, typer.Option(help="New directory for bench.json, table.md and report.html.")],
    context: Annotated[str, typer.Option(help="Tokens of the prompts, between commas.")] = "512,1024",
    batch: Annotated[str, typer.Option(help="Sequences at a time, between commas.")] = "1,8,16",
    new_tokens: Annotated[int, typer.Option(min=1, help="Decoded after every prompt.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="The models take turns in each.")] = 3,
    dtype: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    device: Device = None,
) -> None:
    """Measure KV cache, memory, prefill and decoding of several models, in turns in one process.

    leanqkv bench gpt2-124m gpt2-124m+skipv1 --context 256,512,992 --batch 1,8 --out runs/bench

    leanqkv bench runs/baseline runs/skipv1 --out runs/bench
    """
    import torch

    from ..bench import measure, weight_bytes
    from ..compare.inference import RECORD, table, write_page
    from ..errors import LeanError
    from ..files import RECORD_FORMAT, write_json
    from ..train.environment import check_device, default_device, git_commit, hardware, versions

    if out.exists() and any(out.iterdir()):
        raise LeanError(f"{out} is not empty; nothing is ever written over, choose another --out")
    if len(set(models)) < len(models):
        raise LeanError("a model is named twice; every model is measured once")
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    if dtype not in dtypes:
        raise LeanError(f"--dtype is bf16 or fp32, found {dtype!r}")
    contexts, batches = (_numbers(text, option) for text, option in ((context, "--context"), (batch, "--batch")))
    where = check_device(device or default_device())
    built: dict[str, Any] = {name: _build(name, max(contexts) + new_tokens) for name in models}
    for model in built.values():
        model.to(where, dtypes[dtype]).eval()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("measuring", total=None)

        def progress(name: str, done: int, total: int) -> None:
            bars.update(task, description=name, completed=done, total=total)

        rows = measure(built, contexts, batches, new_tokens=new_tokens, rounds=rounds, progress=progress)
    record: dict[str, Any] = {
        "record": RECORD_FORMAT,
        "models": {
            name: {
                "parameters": model.config.plan.count_parameters().total,
                "kv_bytes_per_token": model.config.plan.kv_bytes_per_token(dtypes[dtype]),
                "weights": weight_bytes(model),
                "config": model.config.as_overrides(),
            }
            for name, model in built.items()
        },
        "dtype": dtype,
        "new_tokens": new_tokens,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "rows": [row.as_json() for row in rows],
        "hardware": hardware(torch.device(where).type),
        "versions": versions(),
        "git_commit": git_commit(),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / RECORD, record)
    console.print(table(record))
    console.print(f"report: {write_page(out)}", highlight=False, soft_wrap=True)


def _build(name: str, tokens: int) -> "LeanForCausalLM":
    from ..checkpoints.load import load_weights
    from ..checkpoints.open import open_checkpoint
    from ..errors import LeanError
    from ..model.causal_lm import LeanForCausalLM
    from ..presets import preset

    directory = Path(name)
    opened = open_checkpoint(directory) if directory.exists() else None
    config = preset(name) if opened is None else opened.config
    if config.task != "causal_lm":
        raise LeanError(f"{name} is a model for {config.task}, which has no cache and decodes nothing")
    if config.position_embedding_type == "learned" and tokens > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise LeanError(f"{name} has {limit} positions; the longest --context and --new-tokens are {tokens}")
    model = LeanForCausalLM(config)
    if opened is not None:
        load_weights(model, opened.tensors)
    return model


def _numbers(text: str, option: str) -> list[int]:
    from ..errors import LeanError

    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise LeanError(f"{option} is positive numbers between commas, such as 1,8; found {text!r}")
    return sorted({int(part) for part in parts})
