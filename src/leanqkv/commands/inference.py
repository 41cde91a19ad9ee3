"""`leanqkv generate`, `serve` and `bench`."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ..cache_bits import CacheBits
from ..environment import check_device
from ..errors import LeanError, needs
from ..files import check_free
from ..progress import console, progress_bar, terminal
from ..ranges import BATCH, COUNT, Range, check_each
from .options import NAME_HELP, SOURCE, as_dtype, publish
from .texts import AnswerOptions

ENGINES = ("leanqkv", "vllm")


def generate(
    directory: Annotated[Path, typer.Argument(help=SOURCE)],
    prompt: str | None = None,
    interactive: bool = False,
    *,
    options: AnswerOptions,
) -> None:
    """Continue a prompt with a trained model; speed and KV-cache size go to standard error.

    leanqkv generate runs/skipv1 --prompt "def " --max-new-tokens 64

    leanqkv generate runs/skipv1 --interactive

    leanqkv generate runs/assistant --interactive --chat

    leanqkv generate runs/skipv1 --prompt "def " --cache-bits 8/4

    Options:
        prompt: Text to continue.
        interactive: Read prompts from standard input, one per line, until it ends (Ctrl-D). Each is answered by itself,
            with the same seed. A backslash at the end of a line continues the prompt on the next line. Ctrl-C stops an
            answer.
    """
    if (prompt is None) != interactive:
        raise LeanError("generate takes either --prompt or --interactive")
    from .generating import generate_answers

    generate_answers(directory, prompt, options)


def serve(
    directory: Annotated[Path, typer.Argument(help=SOURCE)],
    engine_options: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTIONS]", help="For vLLM, behind --.")
    ] = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str | None = None,
    dtype: str | None = None,
    cache_bits: str = "16",
    engine: str = "leanqkv",
) -> None:
    """Serve a model with OpenAI's API: /v1/completions, /v1/chat/completions, /v1/models; and /health.

    The model is named after its directory. Requests are answered together. There is no authentication: put a reverse
    proxy in front of anything but localhost.

    leanqkv serve runs/skipv1 --port 8000

    leanqkv serve runs/skipv1 --cache-bits 8/4

    leanqkv serve runs/skipv1 --engine vllm -- --max-model-len 2048

    Options:
        host: Address to listen on. 0.0.0.0: every interface.
        port: Port to listen on. 0: any free port.
        dtype: Dtype of the weights: fp64, fp32 or bf16. Default: as stored.
        cache_bits: Bits of cached keys and values: 8, 4, 2 or KEYS/VALUES. 16: the model's own precision.
        engine: leanqkv for a few clients; vllm for many (needs the plugin leanqkv-vllm).
    """
    if engine not in ENGINES:
        raise LeanError(f"--engine is {' or '.join(ENGINES)}, found {engine!r}")
    bits = CacheBits.of(cache_bits)
    if engine == "vllm":
        for name, given in (("device", device), ("dtype", dtype)):
            if given:
                raise LeanError(f"`{name}` is for leanqkv's own server; give vLLM its options behind --")
        from ..inference.vllm_engine import vllm_command

        command = vllm_command(directory, host, port, engine_options or [], bits, warn=terminal.print)
        os.execv(command[0], command)
    if engine_options:
        raise LeanError(f"{engine_options[0]!r} is an option for vLLM; add `engine=vllm`")
    for package in ("fastapi", "uvicorn"):
        needs("serve", package)
    from ..inference.serve import serve as run

    def started(name: str, address: str) -> None:
        cache = f", cache in {bits.name}" if bits.quantized else ""
        console.print(f"{name}: {address}{cache} (Ctrl-C ends it)", soft_wrap=True, markup=False)

    where: dict[str, Any] = {"host": host, "port": port, "device": check_device(device)}
    run(directory, **where, dtype=as_dtype(dtype), cache_bits=bits, started=started)


def bench(
    models: Annotated[list[str], typer.Argument(help=f"Directories, or: {NAME_HELP}, with random weights.")],
    out: Path,
    context: str = "512,1024",
    batch: str = "1,8,16",
    new_tokens: int = 32,
    rounds: int = 3,
    dtype: str = "bf16",
    cache_bits: str = "16",
    device: str | None = None,
) -> None:
    """Measure KV cache, memory, prefill and decoding of several models, in turns in one process.

    leanqkv bench gpt2-124m gpt2-124m+skipv1 --context 256,512,992 --batch 1,8 --out runs/bench

    leanqkv bench runs/baseline runs/skipv1 --out runs/bench

    leanqkv bench llama-130m --cache-bits 16,8/4,4 --context 512,4096 --out runs/bits

    Options:
        out: New directory for bench.json, table.md and report.html.
        context: Prompt lengths in tokens, separated by commas.
        batch: Batch sizes, separated by commas.
        new_tokens: Tokens decoded after each prompt.
        rounds: Rounds of measurement; models take turns in each.
        dtype: bf16 or fp32.
        cache_bits: Precisions of the cache of every model, separated by commas: 16, 8, 4, 2 or KEYS/VALUES. Decoding is
            compared with the first model's first one.
    """
    check_free(out, *map(Path, models))
    if len(set(models)) < len(models):
        raise LeanError("a model is named twice; every model is measured once")
    contexts, batches = _numbers(context, "--context", COUNT), _numbers(batch, "--batch", BATCH)
    if dtype not in ("bf16", "fp32"):
        raise LeanError(f"`dtype` is bf16 or fp32, found {dtype!r}")
    precisions = CacheBits.list_of(cache_bits)
    from ..inference.bench import bench_record
    from ..report.bench import KIND

    how: dict[str, Any] = {"new_tokens": new_tokens, "rounds": rounds, "dtype": dtype, "device": check_device(device)}
    with progress_bar("measuring") as bar:
        record = bench_record(models, contexts, batches, precisions=precisions, **how, progress=bar.show)
    publish(KIND, out, record)


def _numbers(text: str, option: str, allowed: Range) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and len(part) < 20 for part in parts):
        raise LeanError(f"{option} is positive numbers between commas, such as 1,8; found {text!r}")
    numbers = sorted({int(part) for part in parts})
    check_each(f"each number of {option}", numbers, allowed)
    return numbers
