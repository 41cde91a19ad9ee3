"""The output of `leanqkv inspect`: about ten lines on a model or a checkpoint, and tables of its layers and tensors."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from math import prod
from pathlib import Path
from textwrap import fill

import torch
from rich.filesize import decimal
from rich.table import Table

from .checkpoints.disabled_norms import norms_disabled
from .checkpoints.gguf_format import is_gguf
from .checkpoints.open import MODELS, Checkpoint, open_checkpoint
from .checkpoints.tensors import finite
from .eliminate.audit import WAYS, Finding, Spectrum, findings, weight_table
from .eliminate.audit import spectra as singular_values
from .eliminate.transform import BLOCK_DIAGONAL, SINGLE_HEAD
from .environment import give_back_freed_memory
from .errors import LeanError
from .model.config import MULTIPLIERS, LeanConfig
from .model.layout import HeadSource, LayerPlan
from .model.shapes import count_parameters
from .presets import preset
from .progress import console, progress_bar

# Fields that change what a block computes, shown where they differ from their default.
BLOCK_FIELDS = (
    *("task", "mask_type", "sliding_window", "block_type", "attention_skip", "mlp_skip", "norm_type", "mlp_type"),
    *("num_local_experts", "num_experts_per_tok", "norm_topk_prob", "num_hidden_groups", "group_order", "qk_norm"),
    *("output_gate", "depth_average", "hyper_connections", "norm_placement", "window_layers", "rope_layers"),
    *MULTIPLIERS,
)
NUMBERS = {"layer", "cached per token (bf16)", "saves", "batch 1", "shape", "rank", "condition", "smallest σ"}


def show(source: str, with_layers: bool, with_spectra: bool) -> None:
    """Print what the checkpoint at a path, or the configuration of a name, is.

    Args:
        with_layers: also the plan of every layer, every elimination, and every tensor.
        with_spectra: also the condition numbers of a checkpoint's projections.

    Raises:
        LeanError: neither a checkpoint nor a name.
    """
    exists = Path(source).exists() or is_gguf(source)
    if "/" in source and not exists:
        raise LeanError(f"there is no directory {source}")
    opened = open_checkpoint(Path(source)) if exists else None
    config = preset(source) if opened is None else opened.config
    found, projections = findings(config), []
    if opened is not None and with_spectra:
        give_back_freed_memory()
        with progress_bar("singular values") as bar:
            projections = list(singular_values(config, finite(opened.tensors), bar))
    lines = [_shape_line(config, source, opened), *_plan_lines(config), *_elimination_lines(config, found)]
    if projections:
        lines.append(condition_line(projections))
    for line in lines:
        console.print(fill(line, console.width, subsequent_indent="  "), soft_wrap=True)
    if with_layers or opened is None:
        console.print(layer_table(config, f"Layers, {source}"))
    if with_layers:
        console.print(findings_table(found, f"Exact eliminations, {source}"))
        console.print(query_output_line(config))
    if with_layers and projections:
        console.print(spectra_table(projections, f"Attention's projections, {source}"))


def condition_line(spectra: Sequence[Spectrum]) -> str:
    """Return the worst condition number and its tensor."""
    worst = max(spectra, key=lambda spectrum: spectrum.condition)
    return f"worst condition number: {worst.condition:.3g}, {short_name(worst.tensor)} (of {len(spectra)} projections)"


def query_output_line(config: LeanConfig) -> str:
    """Return what removing all of Q and P would save, Q and P as Graef's table counts them (P4 section 4)."""
    table, total = weight_table(config), count_parameters(config).total
    saved = table["total weights"] - table["total without Q and P"]
    return (
        f"without any Q and P, were that exact: {saved / total:.0%} fewer of {total:,} weights, "
        f"{total / (total - saved):.2f}× at batch 1 (P4)"
    )


def layer_table(config: LeanConfig, title: str) -> Table:
    """Return a table with one row for every run of layers that are described alike."""
    heads = ("rotary key", "latent") if config.kv_lora_rank else ("keys", "values")
    table = _table(title, "layer", "query", *heads, "cached per token (bf16)")
    for row, run in groupby(config.plan.layers, _describe):
        table.add_row(ranges([layer.layer for layer in run]), *row)
    return table


def findings_table(findings: Iterable[Finding], title: str) -> Table:
    """Return a table of what `leanqkv eliminate` can do exactly, what it saves, and the statement it rests on."""
    table = _table(title, "--remove", "exact", "--layer", "saves", "batch 1", "source")
    table.columns[0].no_wrap = True
    for finding in findings:
        if not finding.applies:
            table.add_row(finding.remove, "no", "", "", "", finding.source)
            continue
        layers = "all" if finding.layers is None else f"one of {ranges(finding.layers)}"
        if finding.remove in (BLOCK_DIAGONAL, SINGLE_HEAD):
            layers = ""
        saves = f"{finding.saves:,} ({finding.share:.2%})"
        table.add_row(finding.remove, "yes", layers, saves, f"{finding.speedup:.2f}×", finding.source)
    return table


def spectra_table(spectra: Iterable[Spectrum], title: str) -> Table:
    """Return a table with shape, rank, condition number and smallest singular value of every tensor."""
    table = _table(title, "tensor", "shape", "rank", "condition", "smallest σ")
    for spectrum in spectra:
        shape = "×".join(map(str, spectrum.shape))
        condition, smallest = f"{spectrum.condition:.3g}", f"{spectrum.smallest:.3g}"
        table.add_row(short_name(spectrum.tensor), shape, str(spectrum.rank), condition, smallest)
    return table


def short_name(tensor: str) -> str:
    """Return `layer 16 q_proj` for `model.layers.16.self_attn.q_proj.weight`."""
    _, _, block, _, projection, _ = tensor.split(".")
    return f"layer {block} {projection}"


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as `0-2,5`."""
    runs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ends)


def _shape_line(config: LeanConfig, title: str, checkpoint: Checkpoint | None) -> str:
    """Return what the model is; `checkpoint` is None for one that has no weights yet."""
    heads = f"{config.num_attention_heads} heads of {config.head_dim}"
    if config.num_key_value_heads != config.num_attention_heads:
        heads += f" ({config.num_key_value_heads} for keys and values)"
    if config.task == "image_classification":
        outputs = f"{config.num_labels} labels"
    else:
        outputs = f"vocabulary {config.vocab_size:,}"
    if checkpoint is None:
        architecture, dtypes, size = MODELS[config.task].__name__, "bfloat16", 2 * count_parameters(config).total
    else:
        architecture, stored = checkpoint.architecture, checkpoint.stored
        dtypes = " and ".join(sorted({str(dtype).removeprefix("torch.") for dtype in stored.dtypes.values()}))
        size = sum(prod(shape) * stored.dtypes[name].itemsize for name, shape in stored.shapes.items())
    return (
        f"{title}: {architecture}, {config.num_hidden_layers} layers, width {config.hidden_size:,}, {heads}, "
        f"{outputs}, {decimal(size)} in {dtypes}"
    )


def _plan_lines(config: LeanConfig) -> list[str]:
    """The block's unusual fields, the parameters and the KV cache."""
    plan, count = config.plan, count_parameters(config)
    default = LeanConfig()
    fields = [(name, getattr(config, name)) for name in BLOCK_FIELDS if getattr(config, name) != getattr(default, name)]
    lines = ["blocks: " + ", ".join(f"{name} {value}" for name, value in fields)] if fields else []
    lines.append(f"parameters: {count.total:,} ({count.non_embedding:,} without embeddings and output head)")
    if config.bidirectional:
        return [*lines, "KV cache: none, the model reads its whole input at once"]
    mha = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    size = plan.kv_bytes_per_token(torch.bfloat16)
    until = ""
    if window := max((layer.window for layer in plan.layers if layer.window is not None and layer.cached), default=0):
        behind = plan.kv_bytes(window, torch.bfloat16) - plan.kv_bytes(window - 1, torch.bfloat16)
        until = f" until a window of {window} is full, then {behind:,}"
    return [*lines, f"KV cache, bfloat16: {size:,} bytes per token{until}, {size / (2 * mha):.1%} of MHA"]


def _elimination_lines(config: LeanConfig, findings: Sequence[Finding]) -> list[str]:
    """Return the exact eliminations with their savings, and the impossible ones with their reasons, one line each."""
    exact: dict[tuple, list[Finding]] = {}
    reasons: dict[str, list[str]] = {}
    for finding in findings:
        if finding.applies:
            exact.setdefault((finding.saves, finding.layers), []).append(finding)
        if finding.why_not:
            reasons.setdefault(finding.why_not, []).append(finding.remove)
    lines = [f"removable exactly: {_savings(group)}" for group in exact.values()] or ["removable exactly: nothing"]
    if config.norm_type != "none" and not norms_disabled(config):
        small = max(finding.share for finding in findings) < 0.01
        amount = ", so that less than 1% of the weights can be removed exactly" if small else ""
        lines.append(f"norms rule out every other elimination{amount}")
    projections = [",".join(slots) for slots in WAYS]
    for reason, names in reasons.items():
        what = "projections" if names == projections else "; ".join(names)
        part_of_it = reason.startswith(("Q-K", "V-O", "of all layers"))
        lines.append(f"not removable: {what}{' ' if part_of_it else ': '}{reason}")
    return lines


def _savings(findings: Sequence[Finding]) -> str:
    first = findings[0]
    ways = "--remove " + " | ".join(finding.remove for finding in findings)
    layers = "" if first.layers is None else f" of one layer (any of {ranges(first.layers)})"
    if first.saves < 0:
        return f"{ways}{layers} adds {-first.saves:,} weights ({-first.share:.2%}), because it unties the head"
    speed = f", {first.speedup:.2f}× at batch 1 (predicted)" if first.speedup >= 1.005 else ""
    return f"{ways}{layers} saves {first.saves:,} weights ({first.share:.2%}){speed}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in NUMBERS else "left")
    return table


def _describe(layer: LayerPlan) -> tuple[str, ...]:
    query = f"{layer.query.kind} ({layer.num_query_heads} heads)"
    key, value = ("", "") if layer.latent else (layer.key.kind, layer.value.kind)
    keys, values = _heads(key, layer.layout.keys, layer.layer), _heads(value, layer.layout.values, layer.layer)
    if layer.layout.mixed_with is not None:
        values += f", mixed with layer {layer.layout.mixed_with}"
    elif layer.layout.mixer is not None:
        values += f", and {layer.layout.derived_value_heads} means of them"
    size = f"{2 * sum(cached.elements for cached in layer.cached):,} B"
    window = f", last {layer.window - 1} tokens" if layer.window is not None and layer.cached else ""
    return query, keys, values, size + window


def _heads(kind: str, sources: tuple[HeadSource, ...], layer: int) -> str:
    def describe(source: HeadSource) -> str:
        origin = f" {kind}".rstrip() if source.layer == layer else f" of layer {source.layer}"
        return ranges(range(source.start, source.stop)) + origin

    return ", ".join(map(describe, sources)) or "none"
