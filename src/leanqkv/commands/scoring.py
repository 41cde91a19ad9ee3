"""What `leanqkv eval` does."""

import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table as RichTable

from ..cache_bits import PLAIN, CacheBits
from ..checkpoints.open import Checkpoint, load_model, open_causal_lm, open_checkpoint
from ..checkpoints.tensors import weights_hash
from ..checkpoints.tokenizer import check_same_tokens, load_tokenizer, vocabulary
from ..convert.conversion import sizes_of
from ..data.evaluation import EvaluationText
from ..data.objectives import MaskedTokens
from ..environment import check_device, made_on
from ..errors import LeanError
from ..evaluate.harness import TOKENS_AT_A_TIME, TaskScores, load_tasks, mean_accuracy, paired_answers, task_scores
from ..evaluate.loss import masked_figures
from ..evaluate.paired import paired_record, spread_windows
from ..evaluate.states import cached_states, last_states, obstacle
from ..evaluate.strided import NEXT_TOKEN, by_position, loss_figures, strided_windows, window_losses
from ..files import RECORD_FORMAT, check_new_file, write_json
from ..model.cache_quantized import BLOCK
from ..progress import console, progress_bar, terminal
from ..report import conversion
from ..report.text import ABSENT, Table, plus_minus, signed
from ..train.precision import Precision, parse_precision
from .options import read_text
from .texts import ScoringOptions, TaskScoring, TextScoring


@dataclass(frozen=True)
class Scored:
    """The checkpoint to score, and how the arithmetic is done.

    Attributes:
        context: tokens of a window, or of a question whose length can be chosen.
        other: a checkpoint that it is compared with.
    """

    checkpoint: Checkpoint
    precision: Precision
    device: str
    batch_size: int
    cache_bits: CacheBits
    context: int
    other: Checkpoint | None

    def load(self) -> Any:
        """Return the model, on the device."""
        with progress_bar("reading the weights"):
            model = load_model(self.checkpoint, torch.float32)
            self.precision.apply(model)
            return model.to(self.device)

    def record(self) -> dict[str, Any]:
        """Return a record's entries on the model and the machine; no path of this machine."""
        made = {"precision": str(self.precision), **made_on(self.device), "batch_size": self.batch_size}
        return {"role": "evaluation", **_about(self.checkpoint), **made}


def score(source: Path, text: TextScoring, tasks: TaskScoring, options: ScoringOptions, out: Path | None) -> None:
    """Score a checkpoint on the tasks if some are asked for, else on the text; write the record to `out`, if any."""
    device, precision = check_device(options.device), parsed_precision(options.precision)
    opened = open_checkpoint(source)
    if tasks.tasks is not None or opened.config.task != "masked_lm":
        opened = open_causal_lm(source)
    positions = opened.config.max_position_embeddings
    context = options.context_length or positions
    if context > positions:
        beyond = f"--context-length {context} is longer than the {positions} positions of the model"
        if tasks.tasks is not None or opened.config.position_embedding_type == "learned":
            raise LeanError(beyond)
        terminal.print(f"warning: {beyond}; losses behind them are of positions that it was not trained on")
    other = None if options.against is None else _open_other(opened, options.against, context)
    batch_size = options.batch_size or max(1, min(8, TOKENS_AT_A_TIME // context))
    scored = Scored(opened, precision, device, batch_size, CacheBits.of(options.cache_bits), context, other)
    started = time.perf_counter()
    figures = score_text(scored, text) if tasks.tasks is None else score_tasks(scored, tasks)
    if out is not None:
        check_new_file(out)  # another process may have written it
        seconds = round(time.perf_counter() - started, 2)
        write_json(out, {"record": RECORD_FORMAT, **scored.record(), **figures, "seconds": seconds})
        console.print(f"{out}: the record")


def score_text(scored: Scored, options: TextScoring) -> dict[str, Any]:
    """Score a text, print the figures, and return a record's entries on them."""
    config, context = scored.checkpoint.config, scored.context
    masked = config.task == "masked_lm"
    for name, given in (("stride", options.stride is not None), ("cache_bits", scored.cache_bits.quantized)):
        if masked and given:
            raise LeanError(f"`{name}` is for models that predict the next token, and this one predicts masked tokens")
    stride = options.stride or max(1, context // 2)
    strided_windows(2, context, stride)  # raises before anything is read
    objective = _masks(scored.checkpoint) if masked else None
    assert options.data is not None
    how: dict[str, Any] = {"text_field": options.text_field, "max_documents": options.max_documents}
    text = read_text(scored.checkpoint, options.data, options.split, **how)
    size = "" if text.bytes is None else f", {text.bytes:,} bytes"
    if text.around is not None and text.around.begin is not None:
        size += f"; every window begins with token {text.around.begin}, as the tokenizer begins a text"
    console.print(f"text: {text.description}, {options.split}; {len(text.tokens):,} tokens{size}")
    about = {"stride": stride} if objective is None else {"targets": objective.record()}
    tokens, length = len(text.tokens), min(context, len(text.tokens) - 1)
    about |= _cache(scored, length)
    windows = spread_windows(tokens, context, tokens) if masked else strided_windows(tokens, context, stride)
    how = {"objective": objective or NEXT_TOKEN, "autocast": lambda: scored.precision.autocast(scored.device)}
    if scored.other is not None:
        return {**about, **_compare(scored, replace(scored, checkpoint=scored.other), text, windows, length, **how)}
    figures = _score(scored, text, windows, length, **how)
    return {"text": text.record(), "context_length": context, **about, "figures": figures}


def _cache(scored: Scored, length: int) -> dict[str, Any]:
    """Return a record's entry on the quantized cache through which windows of this length are read, and print it."""
    bits, config = scored.cache_bits, scored.checkpoint.config
    if reason := obstacle(bits, config, length):
        raise LeanError(f"`cache_bits={bits}`: {reason}")
    if not bits.quantized:
        return {}
    cache = _cache_record(scored)
    size = f"{cache['bytes_per_token']:,.0f} bytes per token"
    console.print(f"cache in {bits.name}, {size}; {BLOCK} tokens are read together")
    return {"cache": cache}


def _cache_record(scored: Scored) -> dict[str, Any]:
    size = scored.cache_bits.bytes_per_token(scored.checkpoint.config.plan, torch.bfloat16)
    return {**vars(scored.cache_bits), "bytes_per_token": size, "tokens_read_together": BLOCK}


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
    scored: Scored, text: EvaluationText, windows: list[tuple[int, int]], length: int, **how: Any
) -> dict[str, Any]:
    """Score a text with one model as `window_losses` does, print the figures, and return them."""
    model = scored.load()
    states = cached_states(scored.cache_bits) if scored.cache_bits.quantized else None
    with progress_bar("tokens scored") as bar:
        how |= {"batch_size": scored.batch_size, "states": states, "progress": bar}
        losses, positions = window_losses(model, text.tokens, windows, length, **how)
    if isinstance(how["objective"], MaskedTokens):
        count = f"{len(losses):,} of {len(text.tokens):,} tokens"
        console.print(f"loss of masked tokens {losses.mean().item():.4f} nats, of {count}")
        return masked_figures(losses)
    figures: dict[str, Any] = loss_figures(losses, text.bytes)
    bits = "" if text.bytes is None else f", {figures['bits_per_byte']:.4f} bits per byte"
    console.print(f"loss {figures['loss']:.4f} nats per token, perplexity {figures['perplexity']:.4g}{bits}")
    if parts := by_position(positions, lambda here: {"loss": losses[here].mean().item()}):
        console.print(conversion.position_table(parts).terminal())
        figures |= {"by_position": parts}
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
    check_same_tokens(checkpoint.directory, directory, "--against", "compare the bits per byte of two `leanqkv eval`")
    positions = other.config.max_position_embeddings
    if other.config.position_embedding_type == "learned" and context_length > positions:
        raise LeanError(f"--against {directory} has {positions:,} positions; give --context-length {positions} or less")
    return other


def _compare(
    scored: Scored, other: Scored, text: EvaluationText, windows: list[tuple[int, int]], length: int, **how: Any
) -> dict[str, Any]:
    """Score a text with both models, print what the first one loses, and return a record's entries on it."""
    before, after = other.load(), scored.load()
    states = last_states, [cached_states(scored.cache_bits)]
    with progress_bar("tokens scored") as bar:
        figures = paired_record(before, after, text, windows, length, states=states, progress=bar, **how)
    sizes = sizes_of(other.checkpoint.config, scored.checkpoint.config)
    console.print(conversion.terminal({**sizes, "evaluation": figures}))
    if parts := figures.get("by_position"):
        console.print(conversion.position_table(parts).terminal())
    return {**figures, **sizes, "figures": figures["after"], "against": _about(other.checkpoint)}


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a record's entries on a model; no path of this machine."""
    with progress_bar("hashing the weights"):
        digest = weights_hash(checkpoint.directory)
    name, config = checkpoint.directory.resolve().name, checkpoint.config.as_overrides()
    return {"name": name, "config": config, "weights_sha256": digest}


def read_tasks(checkpoint: Checkpoint, options: TaskScoring, context: int) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Return the tokenizer of a checkpoint, and the tasks that are asked for.

    Args:
        context: tokens of a question whose length can be chosen.

    Raises:
        LeanError: the checkpoint cannot answer, it has no tokenizer, or there are no such tasks.
    """
    assert options.tasks is not None
    if checkpoint.config.mask_type == "prefix":
        raise LeanError(
            f"{checkpoint.directory} attends to prefixes, and lm-eval gives none: tasks cannot be scored; leave out "
            "`tasks`"
        )
    names = [name.strip() for name in options.tasks.split(",")]
    tokenizer = load_tokenizer(checkpoint.directory)
    with progress_bar("loading the tasks"):
        return tokenizer, load_tasks(names, options.include_path, tokenizer, context)


def score_tasks(scored: Scored, options: TaskScoring) -> dict[str, Any]:
    """Run the tasks, print their figures, and return a record's entries on them."""
    tokenizer, tasks = read_tasks(scored.checkpoint, options, scored.context)
    record: dict[str, Any] = {"limit": options.limit, "lm_eval": version("lm_eval")}
    scores = _score_tasks(scored, tokenizer, tasks, options.limit)
    console.print(_task_table(scores.figures))
    for name, figures in scores.figures.items():
        if depths := figures.get("by_depth"):
            shown = ", ".join(f"{depth}% {one['acc']:.2f} ({one['loss']:.2f})" for depth, one in depths.items())
            console.print(f"{name}: acc (loss) by depth in the text: {shown}", highlight=False)
    mean = mean_accuracy(scores.figures)
    if mean is not None and len(scores.figures) > 1:
        console.print(f"mean acc: {mean:.4f} over {len(scores.figures)} tasks")
    if scores.cached is not None:
        record["cache"] = cache = _cache_record(scored) | {"requests_that_read_it": scores.cached}
        console.print(
            f"cache in {scored.cache_bits.name}, {cache['bytes_per_token']:,.0f} bytes per token, read by "
            f"{scores.cached:.1%} of the requests; the others have at most {BLOCK} tokens, which are not quantized"
        )
    if scored.other is not None:
        plain = replace(scored, checkpoint=scored.other, cache_bits=PLAIN)
        before = _score_tasks(plain, tokenizer, tasks, options.limit)
        pairs = {name: paired_answers(before.answers[name], answers) for name, answers in scores.answers.items()}
        console.print(_pair_table(before.figures, scores.figures, pairs))
        record |= {"before": before.figures, "paired": pairs, "against": _about(scored.other)}
    return {"tasks": scores.figures, "mean_acc": mean, **record}


def _score_tasks(scored: Scored, tokenizer: Any, tasks: dict[str, dict[str, Any]], limit: int | None) -> TaskScores:
    model = scored.load()
    with progress_bar("scoring the tasks", log_only=True) as bar:  # on a terminal, lm-eval has bars of its own
        return task_scores(
            model,
            tokenizer,
            tasks,
            limit=limit,
            batch_size=scored.batch_size,
            autocast_dtype=torch.bfloat16 if scored.precision.dtype == "bf16" else None,
            cache_bits=scored.cache_bits,
            progress=lambda sequences: bar.describe(f"scoring the tasks, {sequences:,} sequences done"),
        )


def _pair_table(before: Any, after: Any, pairs: dict[str, dict[str, dict[str, Any]]]) -> RichTable:
    """Return what changes from the source's answers, with standard errors and McNemar's test."""
    rows = []
    for task, metrics in pairs.items():
        for metric, pair in metrics.items():
            change = plus_minus(signed(pair["difference"] + 0.0), pair["stderr"])
            counts = [str(pair["lost"]), str(pair["won"]), f"{pair['p']:.3f}"] if "p" in pair else [ABSENT] * 3
            rows.append([task, metric, *(f"{one[task][metric]:.4f}" for one in (before, after)), change, *counts])
    headers = ("task", "metric", "source", "result", "change", "lost", "won", "p")
    note = "± is the standard error of the change, question by question. p: McNemar's exact test of lost against won."
    return Table(headers, rows, note=note).terminal()


def _task_table(figures: dict[str, dict[str, Any]]) -> RichTable:
    """Return a table with metrics as columns, each with its standard error."""
    about = ("examples", "of", "shots", "version", "made_of", "by_depth")
    columns = dict.fromkeys(name for values in figures.values() for name in values)
    metrics = [name for name in columns if name not in about and not name.endswith("_stderr")]
    table = RichTable("task", "examples", "shots", *metrics)
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
