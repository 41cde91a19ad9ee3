"""The tables of `leanqkv inspect`: the plan of every layer, what can be eliminated, how tensors are conditioned."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.table import Table

from ..eliminate.audit import Finding, Spectrum
from ..eliminate.transform import BLOCK_DIAGONAL, SINGLE_HEAD
from ..model.config import LeanConfig
from ..model.layout import HeadSource
from ..model.plan import LayerPlan

NUMBERS = {"layer", "cached per token (bf16)", "saves", "batch 1", "shape", "rank", "condition", "smallest σ"}


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
