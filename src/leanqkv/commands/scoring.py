"""What `leanqkv eval` does."""

import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ..cache_bits import CacheBits
from ..checkpoints.open import Checkpoint, load_model, open_causal_lm, open_checkpoint
from ..checkpoints.tensors import weights_hash
from ..checkpoints.tokenizer import differing, has_tokenizer, load_tokenizer, vocabulary
from ..data import EvaluationText, MaskedTokens, evaluation_text
from ..environment import made_on
from ..errors import LeanError
from ..evaluate import (
    cached_states,
    last_states,
    loss_figures,
    masked_figures,
    masked_losses,
    obstacle,
    paired_record,
    spread_windows,
    strided_losses,
    strided_windows,
)
from ..evaluate.harness import load_tasks, mean_accuracy, task_figures
from ..files import RECORD_FORMAT, write_json
from ..model.cache_quantized import BLOCK
from ..model.shapes import count_parameters
from ..progress import console, progress_bar
from ..report import conversion
from ..train import Precision, parse_precision
from .texts import TaskScoring, TextScoring


@dataclass(frozen=True)
class Scored:
    """The checkpoint to score, and how the arithmetic is done."""

    checkpoint: Checkpoint
    precision: Precision
    device: str
    batch_size: int
    cache_bits: CacheBits

    def load(self) -> Any:
        """Return the model, on the device."""
        with progress_bar("reading the weights"):
            model = load_model(self.checkpoint, torch.float32)
            self.precision.apply(model)
            return model.to(self.device)

    def record(self) -> dict[str, Any]:
        """Return a record's entries on the model and the machine; no path of this machine."""
        with progress_bar("hashing the weights"):
            digest = weights_hash(self.checkpoint.directory)
        return {
            "role": "evaluation",
            "name": self.checkpoint.directory.resolve().name,
            "config": self.checkpoint.config.as_overrides(),
            "weights_sha256": digest,
            "precision": str(self.precision),
            **made_on(self.device),
            "batch_size": self.batch_size,
        }


def score(
    source: Path,
    text: TextScoring,
    tasks: TaskScoring,
    batch_size: int,
    precision: str,
    device: str,
    out: Path | None,
) -> None:
    """Score a checkpoint on the tasks if some are asked for, else on the text; write the record to `out`, if any."""
    arithmetic = parsed_precision(precision)
    opened = open_checkpoint(source)
    if tasks.tasks is not None or opened.config.task != "masked_lm":
        opened = open_causal_lm(source)
    if tasks.tasks is not None and opened.config.mask_type == "prefix":
        raise LeanError(
            f"{source} attends to prefixes, and lm-eval gives none: tasks cannot be scored; leave out `tasks`"
        )
    scored = Scored(opened, arithmetic, device, batch_size, CacheBits.of(text.cache_bits))
    started = time.perf_counter()
    figures = score_text(scored, text) if tasks.tasks is None else score_tasks(scored, tasks)
    if out is not None:
        seconds = round(time.perf_counter() - started, 2)
        write_json(out, {"record": RECORD_FORMAT, **scored.record(), **figures, "seconds": seconds})
        console.print(f"{out}: the record")


def score_text(scored: Scored, options: TextScoring) -> dict[str, Any]:
    """Score a text, print the figures, and return a record's entries on them."""
    config = scored.checkpoint.config
    positions = config.max_position_embeddings
    context = options.context_length or positions
    if config.position_embedding_type == "learned" and context > positions:
        raise LeanError(f"--context-length {context} is longer than the {positions} positions of the model")
    masked = config.task == "masked_lm"
    for name, given in (("stride", options.stride is not None), ("cache_bits", scored.cache_bits.quantized)):
        if masked and given:
            raise LeanError(f"`{name}` is for models that predict the next token, and this one predicts masked tokens")
    stride = options.stride or max(1, context // 2)
    strided_windows(2, context, stride)  # raises before anything is read
    other = None if options.against is None else _open_other(scored.checkpoint, options.against, context)
    objective = _masks(scored.checkpoint) if masked else None
    assert options.data is not None
    with progress_bar("reading the text") as bar:
        text = evaluation_text(
            options.data,
            tokenizer=scored.checkpoint.directory,
            vocab_size=config.vocab_size,
            split=options.split,
            text_field=options.text_field,
            max_documents=options.max_documents,
            progress=bar.describe,
        )
    size = "" if text.bytes is None else f", {text.bytes:,} bytes"
    if text.around is not None and text.around.begin is not None:
        size += f"; every window begins with token {text.around.begin}, as the tokenizer begins a text"
    console.print(f"text: {text.description}, {options.split}; {len(text.tokens):,} tokens{size}")
    about = {"stride": stride} if objective is None else {"targets": objective.record()}
    about |= _cache(scored, min(context, len(text.tokens) - 1))
    if other is not None:
        return {**about, **_compare(scored, replace(scored, checkpoint=other), text, context, stride, objective)}
    figures = _score(scored, text, context, stride, objective)
    return {"text": text.record(), "context_length": context, **about, "figures": figures}


def _cache(scored: Scored, length: int) -> dict[str, Any]:
    """Return a record's entry on the quantized cache through which windows of this length are read, and print it."""
    bits, config = scored.cache_bits, scored.checkpoint.config
    if reason := obstacle(bits, config, length):
        raise LeanError(f"`cache_bits={bits}`: {reason}")
    if not bits.quantized:
        return {}
    size = bits.bytes_per_token(config.plan, torch.bfloat16)
    console.print(f"cache in {bits.name}, {size:,.0f} bytes per token; {BLOCK} tokens are read together")
    bits_of = {"key_bits": bits.key_bits, "value_bits": bits.value_bits}
    return {"cache": {**bits_of, "bytes_per_token": size, "tokens_read_together": BLOCK}}


def _masks(checkpoint: Checkpoint) -> MaskedTokens:
    """Return how an encoder's masks are drawn; raise a LeanError if its tokenizer has no mask token."""
    tokenizer = load_tokenizer(checkpoint.directory)
    vocab_size = checkpoint.config.vocab_size
    if tokenizer.mask_token_id is None or tokenizer.mask_token_id >= vocab_size:
        raise LeanError(
            f"the tokenizer of {checkpoint.directory} has no mask token that the model knows, and the model predicts "
            "masked tokens; name its mask_token in tokenizer_config.json"
        )
    return MaskedTokens.of(tokenizer, min(vocab_size, vocabulary(tokenizer)))


def _score(
    scored: Scored, text: EvaluationText, context: int, stride: int, objective: MaskedTokens | None
) -> dict[str, Any]:
    """Score a text with one model, print the figures, and return them."""
    model = scored.load()
    how: dict[str, Any] = {"autocast": lambda: scored.precision.autocast(scored.device)}
    if objective is not None:
        windows = spread_windows(len(text.tokens), context, len(text.tokens))
        length = min(context, len(text.tokens) - 1)
        with progress_bar("windows scored") as bar:
            how |= {"batch_size": scored.batch_size, "progress": bar}
            figures = masked_figures(masked_losses(model, text.tokens, windows, length, objective, **how))
        count = figures["masked_tokens"]
        console.print(f"loss of masked tokens {figures['loss']:.4f} nats, of {count:,} of {len(text.tokens):,} tokens")
        return figures
    with progress_bar("tokens scored") as bar:
        how |= {"context_length": context, "stride": stride, "batch_size": scored.batch_size, "progress": bar}
        if scored.cache_bits.quantized:
            how["states"] = cached_states(scored.cache_bits)
        losses = strided_losses(model, text.tokens, **how)
    figures = loss_figures(losses, text.bytes)
    bits = "" if text.bytes is None else f", {figures['bits_per_byte']:.4f} bits per byte"
    console.print(f"loss {figures['loss']:.4f} nats per token, perplexity {figures['perplexity']:.4g}{bits}")
    return figures


def _open_other(checkpoint: Checkpoint, directory: Path, context_length: int) -> Checkpoint:
    """Open the checkpoint that `checkpoint` is compared with.

    Raises:
        LeanError: it has another task, vocabulary or tokenizer, or too few positions.
    """
    task = checkpoint.config.task
    other = open_causal_lm(directory) if task == "causal_lm" else open_checkpoint(directory)
    if other.config.task != task:
        raise LeanError(f"--against {directory} is a model for {other.config.task}, the first one for {task}")
    sizes = [opened.config.vocab_size for opened in (checkpoint, other)]
    if sizes[0] != sizes[1]:
        raise LeanError(f"--against {directory} has {sizes[1]:,} tokens, the first model {sizes[0]:,}: not comparable")
    _check_same_text(checkpoint.directory, directory)
    positions = other.config.max_position_embeddings
    if other.config.position_embedding_type == "learned" and context_length > positions:
        raise LeanError(f"--against {directory} has {positions:,} positions; give --context-length {positions} or less")
    return other


def _check_same_text(first: Path, second: Path) -> None:
    """Check that two checkpoints read the same tokens of a text, where both have a tokenizer.

    A GGUF file and the checkpoint that it was made of have other files, and one of them can have unused tokens more.

    Raises:
        LeanError: they do not.
    """
    if not has_tokenizer(first) or not has_tokenizer(second):
        return
    tokenizers = [load_tokenizer(directory) for directory in (first, second)]
    one, other = (tokenizer.get_vocab().items() for tokenizer in tokenizers)
    if not (one <= other or other <= one) or differing(*tokenizers) is not None:
        raise LeanError(f"--against {second} has another tokenizer; compare the bits per byte of two `leanqkv eval`")


def _compare(
    scored: Scored, other: Scored, text: EvaluationText, context: int, stride: int, objective: MaskedTokens | None
) -> dict[str, Any]:
    """Score a text with both models, print what the first one loses, and return a record's entries on it."""
    before, after = other.load(), scored.load()
    windows = strided_windows(len(text.tokens), context, stride)
    drawn: dict[str, Any] = {}
    if objective is not None:
        windows, drawn = spread_windows(len(text.tokens), context, len(text.tokens)), {"objective": objective}
    with progress_bar("tokens scored") as bar:
        figures = paired_record(
            before,
            after,
            text,
            windows,
            min(context, len(text.tokens) - 1),
            **drawn,
            states=(last_states, [cached_states(scored.cache_bits)]),
            autocast=lambda: scored.precision.autocast(scored.device),
            progress=bar,
        )
    configs = [one.checkpoint.config for one in (other, scored)]
    sizes = {
        "parameters": [count_parameters(config).total for config in configs],
        "kv_bytes_per_token_bf16": [config.plan.kv_bytes_per_token(torch.bfloat16) for config in configs],
    }
    console.print(conversion.terminal({**sizes, "evaluation": figures}))
    about = {"name": other.checkpoint.directory.resolve().name, "config": other.checkpoint.config.as_overrides()}
    about["weights_sha256"] = weights_hash(other.checkpoint.directory)
    return {**figures, **sizes, "figures": figures["after"], "against": about}


def score_tasks(scored: Scored, options: TaskScoring) -> dict[str, Any]:
    """Run the tasks, print their figures, and return a record's entries on them."""
    assert options.tasks is not None
    names = [name.strip() for name in options.tasks.split(",")]
    with progress_bar("loading the tasks"):
        tasks = load_tasks(names, options.include_path)
    tokenizer = load_tokenizer(scored.checkpoint.directory)
    model = scored.load()
    with progress_bar("scoring the tasks", log_only=True) as bar:  # on a terminal, lm-eval has bars of its own
        figures = task_figures(
            model,
            tokenizer,
            tasks,
            limit=options.limit,
            batch_size=scored.batch_size,
            autocast_dtype=torch.bfloat16 if scored.precision.dtype == "bf16" else None,
            progress=lambda sequences: bar.describe(f"scoring the tasks, {sequences:,} sequences done"),
        )
    console.print(_task_table(figures))
    mean = mean_accuracy(figures)
    if mean is not None and len(figures) > 1:
        console.print(f"mean acc: {mean:.4f} over {len(figures)} tasks")
    return {"tasks": figures, "mean_acc": mean, "limit": options.limit, "lm_eval": version("lm_eval")}


def _task_table(figures: dict[str, dict[str, Any]]) -> Table:
    """Return a table with metrics as columns, each with its standard error."""
    about = ("examples", "of", "shots", "version")
    columns = dict.fromkeys(name for values in figures.values() for name in values)
    metrics = [name for name in columns if name not in about and not name.endswith("_stderr")]
    table = Table("task", "examples", "shots", *metrics)
    for task, values in figures.items():
        cells = ["" if values[name] is None else str(values[name]) for name in ("examples", "shots")]
        for name in metrics:
            error = values.get(f"{name}_stderr")
            cells.append("" if name not in values else f"{values[name]:.4f}" + (f" ± {error:.4f}" if error else ""))
        table.add_row(task, *cells)
    return table


def parsed_precision(text: str) -> Precision:
    precision = parse_precision(text)
    if precision is None or precision.compiled:
        raise LeanError(f"`precision={text}` is for training; here it is fp32 or bf16, with +sdpa or +eager")
    return precision
