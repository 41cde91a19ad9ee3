"""The answers of `leanqkv generate`, printed while they are generated."""

import io
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..cache_bits import CacheBits
from ..checkpoints.open import load_model, open_causal_lm
from ..checkpoints.tokenizer import load_tokenizer
from ..data.tokenizer import encode_prompt
from ..environment import check_device
from ..errors import LeanError
from ..inference import Decoder
from ..inference.cache import token_bytes
from ..inference.decoder import last_position, position_limit
from ..inference.text import TextStream, check_chat_template, check_tokens, encode_chat, end_tokens, render_chat
from ..memory import check_cache
from ..model.cache import cache_bytes
from ..progress import terminal
from .texts import AnswerOptions


def generate_answers(directory: Path, prompt: str | None, options: AnswerOptions) -> None:
    """Answer a prompt, or each line of standard input where `prompt` is None.

    Raises:
        LeanError: no causal language model or tokenizer, or a prompt that is refused. One refused line of standard
            input is reported, and the next one is read.
    """
    opened = open_causal_lm(directory)
    tokenizer = _tokenizer(directory, options.chat)
    model = load_model(opened).to(check_device(options.device))
    decoder = Decoder(model, cache_bits=CacheBits.of(options.cache_bits))
    if prompt is not None:
        _print_answer(decoder, tokenizer, prompt, options, echo=not options.chat)
        return
    for line in _input_lines():
        try:
            _print_answer(decoder, tokenizer, line, options)
        except KeyboardInterrupt:
            print(flush=True)
            terminal.print("stopped", style="dim")
        except (LeanError, MemoryError, RuntimeError) as error:  # PyTorch reports missing memory as a RuntimeError.
            terminal.print("error:", style="bold red", end=" ")
            terminal.print(" ".join(str(error).split()), soft_wrap=True)


def _tokenizer(directory: Path, chat: bool) -> Any:
    """Return a model's tokenizer; say so if it has a chat template that is not asked for.

    Raises:
        LeanError: there is none, or `chat` is true and its chat template is missing or cannot be applied.
    """
    tokenizer = load_tokenizer(directory)
    if chat:
        check_chat_template(tokenizer)
    if chat and not tokenizer.chat_template:
        raise LeanError(f"{directory} has no chat template, it continues text; leave out `chat`")
    if tokenizer.chat_template and not chat:
        note = "this model has a chat template, and the prompt is continued without it; --chat applies it"
        terminal.print(note, style="dim", soft_wrap=True)
    return tokenizer


def _print_answer(decoder: Decoder, tokenizer: Any, prompt: str, options: AnswerOptions, echo: bool = False) -> None:
    """Print the continuation of a prompt while it is generated, after the prompt itself if `echo`.

    Raises:
        LeanError: the model cannot read the prompt, prompt and answer exceed its positions, or their cache the memory.
    """
    if options.chat:
        ids = encode_chat(tokenizer, render_chat(tokenizer, [{"role": "user", "content": prompt}]))
    else:
        ids = encode_prompt(tokenizer, prompt)
    check_tokens(ids[0].tolist(), decoder.config.vocab_size, tokenizer)
    length, new = ids.shape[1], options.max_new_tokens
    positions = last_position(decoder.config, length)
    if positions is not None and new > (room := positions - length):
        advice = f"--max-new-tokens can be {room} at most, found {new}" if room > 0 else "shorten it"
        raise LeanError(f"the prompt takes {length} of {position_limit(decoder.config, positions)}: {advice}")
    if length + new > (trained := decoder.config.max_position_embeddings):
        beyond = f"warning: prompt and answer of {length + new} tokens are longer than the model's {trained} positions"
        terminal.print(f"{beyond}; it was not trained on what lies behind them", soft_wrap=True)
    check_cache(decoder.model, 1, length + new, "--max-new-tokens", decoder.cache_bits)
    if echo:
        print(prompt, end="", flush=True)
    torch.manual_seed(options.seed)
    start = time.perf_counter()
    stream = TextStream(tokenizer, ids[0].tolist())

    def show(tokens: torch.Tensor) -> None:
        print(stream.add(int(tokens)), end="", flush=True)

    ends, greedy = end_tokens(decoder.generation_config, tokenizer), options.temperature == 0
    how: dict[str, Any] = {"do_sample": not greedy, "temperature": options.temperature, "top_k": options.top_k}
    output = decoder.generate(ids.to(decoder.model.device), max_new_tokens=new, callback=show, eos_token_id=ends, **how)
    print(stream.finish(), flush=True)
    assert decoder.cache is not None
    new, seconds = output.shape[1] - length, time.perf_counter() - start
    held, allocated = token_bytes(decoder.cache), cache_bytes(decoder.cache)
    bits = f", in {decoder.cache_bits.name}" if decoder.cache_bits.quantized else ""
    cache = f"KV cache {held:,} bytes of tokens in {allocated:,} allocated{bits}"
    terminal.print(f"{new:,} new tokens, {new / seconds:,.1f} tokens/s, {cache}", style="dim")


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
