"""`leanqkv generate`, `serve` and `bench`."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from ..environment import check_device
from ..errors import LeanError
from ..files import check_free, make_directory, write_json
from ..progress import console, progress_bar, terminal
from ..ranges import BATCH, COUNT, Range, check_each
from .options import NAME_HELP, SOURCE, Device, as_dtype

ENGINES = ("leanqkv", "vllm")


def generate(
    directory: Annotated[Path, typer.Argument(help=SOURCE)],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.", show_default=False)] = None,
    interactive: Annotated[
        bool,
        typer.Option(
            "--interactive",
            help="Read prompts from standard input, one per line, until it ends (Ctrl-D). Each is answered by itself, "
            "with the same seed. A backslash at the end of a line continues the prompt on the next line. Ctrl-C stops "
            "an answer.",
        ),
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt into the model's chat template, as a user's message.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option()] = 64,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample among this many likeliest tokens.")] = 50,
    seed: Annotated[int, typer.Option()] = 0,
    device: Device = None,
) -> None:
    """Continue a prompt with a trained model; speed and KV-cache size go to standard error.

    leanqkv generate runs/skipv1 --prompt "def " --max-new-tokens 64

    leanqkv generate runs/skipv1 --interactive

    leanqkv generate runs/assistant --interactive --chat
    """
    if (prompt is None) != interactive:
        raise LeanError("generate takes either --prompt or --interactive")
    from .generating import generate_answers

    sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k} if temperature else {"do_sample": False}
    generate_answers(directory, prompt, chat=chat, seed=seed, device=device, max_new_tokens=max_new_tokens, **sampling)


def serve(
    directory: Annotated[Path, typer.Argument(help=SOURCE)],
    engine_options: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTIONS]", help="For vLLM, behind --.", show_default=False)
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    device: Device = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights: fp64, fp32 or bf16. Default: as stored.", show_default=False)
    ] = None,
    engine: Annotated[
        str, typer.Option(help="leanqkv, for one person or a few; vllm, for many, with the plugin leanqkv-vllm.")
    ] = "leanqkv",
) -> None:
    """Serve a model with OpenAI's API: /v1/completions, chat/completions, responses, models; and /health.

    The model is named after its directory. Requests are answered together. There is no authentication: put a reverse
    proxy in front of anything but localhost.

    leanqkv serve runs/skipv1 --port 8000

    leanqkv serve runs/skipv1 --engine vllm -- --max-model-len 2048
    """
    if engine not in ENGINES:
        raise LeanError(f"--engine is {' or '.join(ENGINES)}, found {engine!r}")
    if engine == "vllm":
        for name, value in (("device", device), ("dtype", dtype)):
            if value is not None:
                raise LeanError(f"`{name}` is for leanqkv's own server; give vLLM its options behind --")
        from ..inference.vllm_engine import vllm_command

        command = vllm_command(directory, host, port, engine_options or [], warn=terminal.print)
        os.execv(command[0], command)
    if engine_options:
        raise LeanError(f"{engine_options[0]!r} is an option for vLLM; add `engine=vllm`")
    if not (find_spec("fastapi") and find_spec("uvicorn")):
        raise LeanError("serving needs packages that are not installed: pip install 'leanqkv[serve]'")
    from ..inference.serve import serve as run

    def started(name: str, address: str) -> None:
        console.print(f"{name}: {address} (Ctrl-C ends it)", highlight=False, soft_wrap=True, markup=False)

    device = check_device(device)
    try:
        run(directory, host=host, port=port, device=device, dtype=as_dtype(dtype), started=started)
    except KeyboardInterrupt:  # The model was still loading.
        raise typer.Exit(130) from None


def bench(
    models: Annotated[list[str], typer.Argument(help=f"Directories, or: {NAME_HELP}, with random weights.")],
    out: Annotated[Path, typer.Option(help="New directory for bench.json, table.md and report.html.")],
    context: Annotated[str, typer.Option(help="Tokens of the prompts, between commas.")] = "512,1024",
    batch: Annotated[str, typer.Option(help="Sequences at a time, between commas.")] = "1,8,16",
    new_tokens: Annotated[int, typer.Option(help="Decoded after every prompt.")] = 32,
    rounds: Annotated[int, typer.Option(help="The models take turns in each.")] = 3,
    dtype: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    device: Device = None,
) -> None:
    """Measure KV cache, memory, prefill and decoding of several models, in turns in one process.

    leanqkv bench gpt2-124m gpt2-124m+skipv1 --context 256,512,992 --batch 1,8 --out runs/bench

    leanqkv bench runs/baseline runs/skipv1 --out runs/bench
    """
    check_free(out, *map(Path, models))
    if len(set(models)) < len(models):
        raise LeanError("a model is named twice; every model is measured once")
    contexts, batches = _numbers(context, "--context", COUNT), _numbers(batch, "--batch", BATCH)
    if dtype not in ("bf16", "fp32"):
        raise LeanError(f"`dtype` is bf16 or fp32, found {dtype!r}")
    from ..inference.bench import bench_record
    from ..report.bench import RECORD, table, write_page

    device = check_device(device)
    sizes = {"new_tokens": new_tokens, "rounds": rounds}
    with progress_bar("measuring") as bar:
        record = bench_record(models, contexts, batches, **sizes, dtype=dtype, device=device, progress=bar.show)
    make_directory(out)
    write_json(out / RECORD, record)
    console.print(table(record))
    console.print(f"report: {write_page(out)}", highlight=False, soft_wrap=True)


def _numbers(text: str, option: str, allowed: Range) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and len(part) < 20 for part in parts):
        raise LeanError(f"{option} is positive numbers between commas, such as 1,8; found {text!r}")
    numbers = sorted({int(part) for part in parts})
    check_each(f"each number of {option}", numbers, allowed)
    return numbers
