"""`leanqkv generate`, `serve` and `bench`."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..progress import progress_bar
from .options import NAME_HELP, Device, console

if TYPE_CHECKING:
    from ..model.causal_lm import LeanForCausalLM

remarks = Console(stderr=True)


def generate(
    directory: Annotated[Path, typer.Argument(help="Directory of a trained model.")],
    prompt: Annotated[str | None, typer.Option(help="Text to go on from.", show_default=False)] = None,
    interactive: Annotated[
        bool,
        typer.Option(
            "--interactive",
            help="Read prompts from the standard input, one per line, until it ends (Ctrl-D). Each stands alone, with "
            "the same seed; one whose line ends in a backslash goes on in the next line. Ctrl-C stops an answer.",
        ),
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among that many likeliest tokens.")] = 50,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Device = None,
) -> None:
    """Continue a prompt with a trained model; the speed and the size of the KV cache go to the standard error.

    leanqkv generate runs/skipv1 --prompt "def " --max-new-tokens 64

    leanqkv generate runs/skipv1 --interactive
    """
    from ..checkpoints import load_config, load_model
    from ..data.tokenizer import load_tokenizer
    from ..environment import check_device, default_device
    from ..errors import LeanError

    if (prompt is None) != interactive:
        raise LeanError("generate takes either --prompt or --interactive")
    if (task := load_config(directory).task) != "causal_lm":
        raise LeanError(f"{directory} holds a model for {task}, which does not continue text")
    model: Any = load_model(directory).to(check_device(device or default_device()))  # type: ignore[arg-type]
    sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k} if temperature else {"do_sample": False}
    answer = _answerer(model, load_tokenizer(directory), max_new_tokens, seed, sampling)
    if prompt is not None:
        try:
            answer(prompt, lambda: print(prompt, end="", flush=True))
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        return
    for line in _lines():
        try:
            answer(line, lambda: None)
        except KeyboardInterrupt:
            print(flush=True)
            remarks.print("stopped", style="dim")
        except (LeanError, MemoryError, RuntimeError) as error:  # torch has no memory: a RuntimeError
            remarks.print(f"[bold red]error:[/] {_escaped(error)}", highlight=False, soft_wrap=True)


def _answerer(
    model: Any, tokenizer: Any, max_new_tokens: int, seed: int, sampling: dict[str, Any]
) -> Callable[[str, Callable[[], None]], None]:
    """A function that prints the continuation of a prompt, and calls another just before it does."""
    import torch
    from transformers import TextStreamer

    from ..errors import LeanError
    from ..inference import Decoder
    from ..model.cache import cache_bytes

    decoder = Decoder(model)
    positions = model.config.max_position_embeddings
    bounded = model.config.position_embedding_type == "learned"

    def answer(prompt: str, begin: Callable[[], None]) -> None:
        # A tokenizer of ours adds none to a prompt, as in training; LLaMA's begins with one.
        start = tokenizer.bos_token or tokenizer.eos_token
        inputs = tokenizer(prompt or start, return_tensors="pt", add_special_tokens=bool(prompt)).to(model.device)
        length = inputs["input_ids"].shape[1]
        if bounded and max_new_tokens > positions - length:
            way = f"--max-new-tokens can be {positions - length} at most, found {max_new_tokens}"
            way = way if positions > length else "shorten it"
            raise LeanError(f"the prompt takes {length} of the model's {positions} positions: {way}")
        torch.manual_seed(seed)
        begin()
        started = time.perf_counter()
        streamer = TextStreamer(tokenizer, skip_special_tokens=True)
        output = decoder.generate(
            inputs["input_ids"],
            max_new_tokens=max_new_tokens,
            callback=lambda tokens: streamer.put(tokens.cpu()),
            **sampling,
        )
        streamer.end()
        seconds = time.perf_counter() - started
        new = output.shape[1] - length
        assert decoder.cache is not None
        held = cache_bytes(decoder.cache)
        remarks.print(
            f"{new:,} new tokens, {new / seconds:,.1f} tokens/s, KV cache {held:,} bytes", style="dim", highlight=False
        )

    return answer


def _lines() -> Iterator[str]:
    """Prompts from the standard input, until it ends or Ctrl-C comes where one is awaited."""
    ask = "> " if sys.stdin.isatty() else ""
    if ask:
        with suppress(ImportError):
            import readline  # noqa: F401  # input() then has a history and can be edited
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            line = input(ask)
            while line.endswith("\\"):
                line = f"{line[:-1]}\n{input(ask and '. ')}"
            yield line
    if ask:
        print()


def serve(
    directory: Annotated[Path, typer.Argument(help="Directory of a trained model.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for every one of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes one that is free.")] = 8000,
    device: Device = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights: fp64, fp32 or bf16. Default: as stored.", show_default=False)
    ] = None,
) -> None:
    """Answer requests as OpenAI's API does: /v1/completions, chat/completions, responses, models; and /health.

    The model goes by the name of its directory. Requests are answered one after the other. Nobody is asked for a key:
    whoever reaches the address can use it.

    leanqkv serve runs/skipv1 --port 8000
    """
    from importlib.util import find_spec

    from ..environment import check_device, default_device
    from ..errors import LeanError
    from .checkpoints import as_dtype

    if not (find_spec("fastapi") and find_spec("uvicorn")):
        raise LeanError("serving needs packages that are not installed: pip install 'leanqkv[serve]'")
    from ..inference.serve import serve as run

    def started(name: str, address: str) -> None:
        console.print(f"{name}: {address} (Ctrl-C ends it)", highlight=False, soft_wrap=True, markup=False)

    where = check_device(device or default_device())
    try:
        run(directory, host=host, port=port, device=where, dtype=as_dtype(dtype), started=started)
    except KeyboardInterrupt:  # while it was still loading
        raise typer.Exit(130) from None


def _escaped(error: Exception) -> str:
    from rich.markup import escape

    return escape(" ".join(str(error).split()))


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

    from ..environment import check_device, default_device, git_commit, hardware, versions
    from ..errors import LeanError
    from ..files import RECORD_FORMAT, write_json
    from ..inference.bench import measure
    from ..inference.memory import weight_bytes
    from ..report.bench import RECORD, table, write_page

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
    with progress_bar("measuring") as bar:

        def progress(name: str, done: int, total: int) -> None:
            bar.describe(name)
            bar(done, total)

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
