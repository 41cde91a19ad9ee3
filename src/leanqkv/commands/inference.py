"""`leanqkv generate`, `serve` and `bench`."""

import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ..environment import check_device
from ..errors import LeanError
from ..files import check_place, make_directory, write_json
from ..progress import progress_bar, terminal
from ..ranges import BATCH, COUNT, Range, check_each
from .options import NAME_HELP, SOURCE, Device, as_dtype, console

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
    from ..checkpoints.open import load_model, open_causal_lm
    from ..inference import Decoder

    opened = open_causal_lm(directory)
    tokenizer = _tokenizer(directory, chat)
    model = load_model(opened).to(check_device(device))
    decoder = Decoder(model)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k} if temperature else {"do_sample": False}
    options = {"max_new_tokens": max_new_tokens, **sampling}
    if prompt is not None:
        try:
            _print_answer(decoder, tokenizer, prompt, seed, options, chat=chat, echo=not chat)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        return
    for line in _input_lines():
        try:
            _print_answer(decoder, tokenizer, line, seed, options, chat=chat)
        except KeyboardInterrupt:
            print(flush=True)
            terminal.print("stopped", style="dim")
        except (LeanError, MemoryError, RuntimeError) as error:  # PyTorch reports missing memory as a RuntimeError.
            message = " ".join(str(error).split())
            terminal.print("error:", style="bold red", end=" ")
            terminal.print(message, highlight=False, soft_wrap=True, markup=False)


def _tokenizer(directory: Path, chat: bool) -> Any:
    """Return a model's tokenizer; say so if it has a chat template that is not asked for.

    Raises:
        LeanError: there is none, or `chat` is true and its chat template is missing or cannot be applied.
    """
    from ..checkpoints.tokenizer import load_tokenizer
    from ..inference.text import check_chat_template

    tokenizer = load_tokenizer(directory)
    if chat:
        check_chat_template(tokenizer)
    if chat and not tokenizer.chat_template:
        raise LeanError(f"{directory} has no chat template, it continues text; leave out --chat")
    if tokenizer.chat_template and not chat:
        note = "this model has a chat template, and the prompt is continued without it; --chat applies it"
        terminal.print(note, style="dim", highlight=False, soft_wrap=True)
    return tokenizer


def _print_answer(
    decoder: Any, tokenizer: Any, prompt: str, seed: int, options: dict[str, Any], *, chat: bool, echo: bool = False
) -> None:
    """Print the continuation of a prompt while it is generated, after the prompt itself if `echo`.

    Raises:
        LeanError: the prompt is none that the model can read, prompt and answer do not fit its positions, or their
            cache the memory.
    """
    import torch

    from ..data.tokenizer import encode_prompt
    from ..inference.cache import token_bytes
    from ..inference.decoder import last_position, position_limit
    from ..inference.text import TextStream, check_tokens, encode_chat, end_tokens, render_chat
    from ..memory import check_cache
    from ..model.cache import cache_bytes

    if chat:
        ids = encode_chat(tokenizer, render_chat(tokenizer, [{"role": "user", "content": prompt}]))
    else:
        ids = encode_prompt(tokenizer, prompt)
    check_tokens(ids[0].tolist(), decoder.config.vocab_size, tokenizer)
    inputs = ids.to(decoder.model.device)
    length = inputs.shape[1]
    positions = last_position(decoder.config, length)
    new = options["max_new_tokens"]
    if positions is not None and new > (room := positions - length):
        advice = f"--max-new-tokens can be {room} at most, found {new}" if room > 0 else "shorten it"
        raise LeanError(f"the prompt takes {length} of {position_limit(decoder.config, positions)}: {advice}")
    check_cache(decoder.model, 1, length + new, "--max-new-tokens")
    if echo:
        print(prompt, end="", flush=True)
    torch.manual_seed(seed)
    start = time.perf_counter()
    stream = TextStream(tokenizer, ids[0].tolist())

    def show(tokens: torch.Tensor) -> None:
        print(stream.add(int(tokens)), end="", flush=True)

    ends = end_tokens(decoder.generation_config, tokenizer)
    output = decoder.generate(inputs, callback=show, eos_token_id=ends, **options)
    print(stream.finish(), flush=True)
    new, seconds = output.shape[1] - length, time.perf_counter() - start
    held, allocated = token_bytes(decoder.cache), cache_bytes(decoder.cache)
    cache = f"KV cache {held:,} bytes of tokens in {allocated:,} allocated"
    summary = f"{new:,} new tokens, {new / seconds:,.1f} tokens/s, {cache}"
    terminal.print(summary, style="dim", highlight=False)


def _input_lines() -> Iterator[str]:
    """Yield prompts from standard input, until it ends or Ctrl-C comes while one is awaited."""
    marker = "> " if sys.stdin.isatty() else ""
    if marker:
        with suppress(ImportError):
            import readline  # noqa: F401  # gives input() a history and a line that can be edited
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no UTF-8 spoil one prompt, not all
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            line = input(marker)
            while line.endswith("\\"):
                line = f"{line[:-1]}\n{input(marker and '. ')}"
            yield line
    if marker:
        print()


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
        _serve_with_vllm(directory, host, port, engine_options or [], {"--device": device, "--dtype": dtype})
    if engine_options:
        raise LeanError(f"{engine_options[0]!r} is an option for vLLM; add --engine vllm")
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


def _serve_with_vllm(directory: Path, host: str, port: int, options: list[str], ours: dict[str, Any]) -> NoReturn:
    """Become vLLM's server."""
    from ..inference.vllm_engine import vllm_command

    if given := next((name for name, value in ours.items() if value is not None), None):
        raise LeanError(f"{given} is for leanqkv's own server; give vLLM its options behind --")
    command = vllm_command(directory, host, port, options, warn=terminal.print)
    os.execv(command[0], command)


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
    check_place(out, *map(Path, models))
    if out.exists() and any(out.iterdir()):
        raise LeanError(f"{out} is not empty and nothing is overwritten; choose another --out")
    if len(set(models)) < len(models):
        raise LeanError("a model is named twice; every model is measured once")
    contexts, batches = _numbers(context, "--context", COUNT), _numbers(batch, "--batch", BATCH)
    from ..inference.bench import DTYPES, bench_record
    from ..report.bench import KIND
    from ..report.page import written

    if dtype not in DTYPES:
        raise LeanError(f"--dtype is {' or '.join(DTYPES)}, found {dtype!r}")
    device = check_device(device)
    sizes = {"new_tokens": new_tokens, "rounds": rounds}
    with progress_bar("measuring") as bar:
        record = bench_record(models, contexts, batches, **sizes, dtype=dtype, device=device, progress=bar.show)
    make_directory(out)
    write_json(out / KIND.file, record)
    page = KIND.write(out)
    console.print(KIND.terminal(record))
    console.print(written(page), highlight=False, soft_wrap=True)


def _numbers(text: str, option: str, allowed: Range) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and len(part) < 20 for part in parts):
        raise LeanError(f"{option} is positive numbers between commas, such as 1,8; found {text!r}")
    numbers = sorted({int(part) for part in parts})
    check_each(f"each number of {option}", numbers, allowed)
    return numbers
