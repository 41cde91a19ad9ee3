"""A conversion as a table, a page and a model card, from conversion.json alone."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table as TerminalTable

from ..checkpoints.card import CARD, card
from ..compare.statistics import Band
from ..convert.conversion import REPORT as RECORD
from ..convert.targets import BUDGETED, SWEPT
from ..files import write_text
from ..records import reading
from . import figures
from .html import TEMPLATES, render
from .text import ABSENT, Table, signed

PAGE = "conversion.html"
SIZES = {"parameters": "parameters", "kv_bytes_per_token_bf16": "KV cache, bytes per token (bf16)"}
# Of what `loss_figures` returns, with the digits that are shown.
SCORES = {"loss": ("loss, nats per token", 4), "perplexity": ("perplexity", 2), "bits_per_byte": ("bits per byte", 4)}
# By the first word of a number's name in a layer's entry.
MISSED = "missed"
# What a layer's missed part is measured on.
FITTED, HELD_OUT = "the calibration text", "calibration sequences held out from the fit"
# Words on the columns of the layers' table.
COLUMNS = {
    "merged": "Merged: pairs of heads that read one value.",
    "rank": "Rank: columns of the layer's values in the cache, of which all its value heads are made.",
    "key_rank": "Key rank: columns that its keys take in the cache.",
    "ridge": "Ridge: how strongly W_O was pulled towards the one that it started from; – where that one stayed.",
    "sink_tokens": "Sinks: held-out tokens whose stream is far larger than that of the others.",
    "kept": "Kept: the heads that keep a value.",
    "paired": "Paired: the other heads, each with the first layer's head whose value it takes.",
}
NOT_EVALUATED = (
    "The quality of the result has not been measured. Measure it: leanqkv eval DIR --against SRC --data FILE."
)


def write_pages(directory: Path) -> Path:
    """Write the page and, where there is none, the model card beside conversion.json; return the page's path.

    A model card is its owner's to edit: one that is there is left alone.

    Raises:
        LeanError: no conversion.json there, or a damaged one.
    """
    with reading(directory / RECORD, "convert again into another --out") as record:
        page, content = _page(record), model_card(record)
    write_text(directory / PAGE, page)
    if not (directory / CARD).exists():
        write_text(directory / CARD, content)
    return directory / PAGE


def terminal_table(record: dict[str, Any]) -> TerminalTable:
    """Return sizes and scores before and after, for a terminal."""
    return result_table(record).terminal(whole=("source", "result", "change"))


def result_table(record: dict[str, Any]) -> Table:
    """Return sizes and scores before and after."""
    rows = []
    for name, words in SIZES.items():
        before, after = record[name]
        rows.append([words, _count(before), _count(after), f"{after / before - 1:+.1%}".replace("-", "−")])
    if (evaluation := record.get("evaluation")) is None:
        return Table(("", "source", "result", "change"), rows, note=NOT_EVALUATED)
    for name, (words, digits) in SCORES.items():
        before, after = (evaluation[which][name] for which in ("before", "after"))
        if before is not None:
            change = signed(round(after - before, digits) + 0.0, digits)
            if name == "loss":
                change = _with_width(evaluation["loss_difference"], signed, ".4f")
            rows.append([words, f"{before:,.{digits}f}", f"{after:,.{digits}f}", change])
    divergence = _with_width(evaluation["divergence"], lambda x: f"{x:.4f}", ".4f")
    agreement = _with_width(evaluation["agreement"], lambda x: f"{x:.1%}", ".1%")
    rows += [["KL(source ‖ result), nats per token", ABSENT, ABSENT, divergence]]
    rows += [["same likeliest token", ABSENT, ABSENT, agreement]]
    return Table(("", "source", "result", "change"), rows, note=_scored_on(evaluation))


def layer_lines(record: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each layer that was fitted, and one for heads that were pooled."""
    if "pools" in record:
        heads = "key and value heads" if record["to"] == "gqa" else "value heads"
        yield f"{heads} pooled: {record['pools']}"
    for layer in record.get("layers", ()):
        error = f"{layer['missed']:.2%} of attention's output missed" if "missed" in layer else "fitted"
        if "rank" in layer:
            keys = f"keys cached in {layer['key_rank']} columns, " if "key_rank" in layer else ""
            beside = " beside the keys" if layer.get("from_keys") else ""
            yield f"layer {layer['layer']}: {keys}values in {layer['rank']}{beside}; {error}"
            continue
        if "merged" in layer:
            pairs = " and ".join(f"{first} with {second}" for first, second in layer["merged"])
            yield f"layer {layer['layer']}: {f'merged heads {pairs}' if pairs else 'all heads kept'}; {error}"
            continue
        if "kept" not in layer:
            yield f"layer {layer['layer']}: the values it lends are fitted to all layers; {error}"
            continue
        pairs = ", ".join(f"{head}: {first}" for head, first in layer.get("paired", {}).items())
        tied = f", their order fixed by {layer['tied_by']}" if "tied_by" in layer else ""
        kept = f"heads {layer['kept']} keep their values, the others take the first layer's ({pairs}){tied}"
        yield f"layer {layer['layer']}: {kept}; {error}"


def summary(record: dict[str, Any]) -> str:
    """Return in one or two sentences what became smaller, and what that costs."""
    before, after = record["kv_bytes_per_token_bf16"]
    cache = (
        f"The KV cache takes {after:,} bytes per token in bfloat16, {after / before:.1%} of the source's {before:,}."
    )
    if (evaluation := record.get("evaluation")) is None:
        return f"{cache} {NOT_EVALUATED}"
    difference = _with_width(evaluation["loss_difference"], signed, ".4f")
    agreement = f"{evaluation['agreement']['mean']:.1%}"
    return (
        f"{cache} The loss changes by {difference} nats per token; {agreement} of the likeliest tokens stay the same."
    )


def model_card(record: dict[str, Any]) -> str:
    """Return a model card for the Hugging Face Hub, in Markdown."""
    table = result_table(record)
    return card(
        record.get("name", "model"),
        record["source"].get("task", "causal_lm") if "source" in record else "causal_lm",
        ["kv-cache", record["to"]],
        {name: record[name] for name in ("base_model", "license") if record.get(name)},
        False,
        summary(record).replace(NOT_EVALUATED, "") + f"\n\n## What changed\n\n{_what_changed(record)}",
        f"## Result\n\n{table.markdown()}\n{table.note}",
        "## How it was made\n\n" + "".join(f"- {term}: {text}\n" for term, text in _facts(record)).rstrip(),
        "## Limits\n\n" + "".join(f"- {limit}\n" for limit in _limits(record)).rstrip(),
    )


def _page(record: dict[str, Any]) -> str:
    return render(
        TEMPLATES / "conversion.html.j2",
        record={"git_commit": None, **record},
        heading=f"{record.get('base_model', 'A checkpoint')}, converted to {record['to']}",
        lead=summary(record),
        result=_narrow(result_table(record)),
        changed=_what_changed(record),
        layers=_layer_table(record),
        missed_on=HELD_OUT if record["to"] in SWEPT else FITTED,
        figure=_figure(record),
        facts=_facts(record),
        limits=_limits(record),
    )


def _narrow(table: Table) -> Table:
    """Return the table with every interval below its number, which fits a phone."""
    return replace(table, rows=[[cell.replace(" ± ", "\n± ") for cell in row] for row in table.rows])


def _count(number: int) -> str:
    return f"{number / 1e6:,.2f}M" if number >= 10**7 else f"{number:,}"


def _layer_table(record: dict[str, Any]) -> Table | None:
    """Return what is known of each layer, or None of a conversion from the weights alone."""
    layers = record.get("layers", ())
    names = [name for name in dict.fromkeys(name for layer in layers for name in layer) if name != "layer"]
    rows = [[str(layer["layer"]), *(_cell(name, layer.get(name)) for name in names)] for layer in layers]
    headers = ("layer", *(name.replace("_", " ") for name in names))
    note = " ".join([*(words for name, words in COLUMNS.items() if name in names), "Layers and heads count from 0."])
    return Table(headers, rows, note=note) if layers else None


def _cell(name: str, value: Any) -> str:
    if value is None or value == []:
        return ABSENT
    if name == "merged":
        return ", ".join(f"{first} with {second}" for first, second in value)
    if name.startswith(MISSED) and isinstance(value, int | float):
        return f"{value:.2%}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {entry}" for key, entry in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _figure(record: dict[str, Any]) -> figures.Drawing | None:
    """Draw what each layer's attention misses, one line for every such number; None where there are none."""
    layers = record.get("layers", ())
    names = [name for name in dict.fromkeys(name for layer in layers for name in layer) if name.startswith(MISSED)]
    series = []
    for style, name in enumerate(names, 1):
        points = [
            Band(layer["layer"], *[100 * layer[name]] * 3)
            for layer in layers
            if isinstance(layer.get(name), int | float) and math.isfinite(layer[name])
        ]
        if points and max(point.high for point in points) > 0:
            series.append(figures.Series(name.replace("_", " "), style, points))
    words = "Missed part of attention's output, by layer."
    return figures.measured_lines("missed", series, "layer", "missed, % of the square", words) if series else None


def _columns(record: dict[str, Any], name: str) -> str:
    """The fewest and the most columns of a layer, in words."""
    low, high = (choose(layer[name] for layer in record["layers"]) for choose in (min, max))
    return str(low) if low == high else f"{low} to {high}"


def _what_changed(record: dict[str, Any]) -> str:
    if record["to"] == "nonlinear-query":
        return (
            "Every layer has a nonlinear query, which starts as exactly the function of the source's. Nothing is "
            "gained before training goes on."
        )
    if record["to"] in BUDGETED:
        columns = f"{_columns(record, 'rank')} columns of values"
        made, same, changed = "value heads are", "Queries, keys", "Value"
        if "key_rank" in record["layers"][0]:
            columns = f"{_columns(record, 'key_rank')} columns of keys and {columns}"
            made, same, changed = "heads are", "Queries", "Key, value"
        both = " Values are made of the keys as well." if any(at.get("from_keys") for at in record["layers"]) else ""
        return (
            f"The cache holds {columns} in each layer, of which its {made} made.{both} {same}, MLPs, norms and "
            f"embeddings are the source's. {changed} and output projections were fitted to text; nothing was trained."
        )
    if record["to"] == "merged-values":
        count = sum(len(layer["merged"]) for layer in record["layers"])
        merged = "1 pair of value heads is merged" if count == 1 else f"{count:,} pairs of value heads are merged"
        return (
            f"{merged}: both key heads of a pair read one value, which is cached once. Queries, keys, MLPs, norms and "
            "embeddings are the source's. Value and output projections were fitted to text; nothing was trained."
        )
    if record["to"] == "gqa":
        left = len(record["pools"])
        return (
            f"Neighbouring key and value heads are pooled to their mean, {left} in each layer; everything else is the "
            "source's. Nothing was fitted or trained: such a model needs training before it is of use."
        )
    layer = next((layer for layer in record.get("layers", ()) if "kept" in layer and "paired" in layer), None)
    share = "part of its"
    if layer is not None:
        taken, kept = len(layer["paired"]), len(layer["kept"])
        share = f"{taken} of its {taken + kept}"
    fitted = " Value and output projections were fitted to text; nothing was trained." if "layers" in record else ""
    return (
        f"Every layer beyond the first reads {share} value heads from the first layer, whose values are cached "
        f"once (SkipV1Former). Queries, keys, MLPs, norms and embeddings are the source's.{fitted}"
    )


def _limits(record: dict[str, Any]) -> list[str]:
    limits = ["The license and the intended use are the source model's."]
    if record["to"] == "nonlinear-query":
        return limits
    if "evaluation" in record:
        limits += [
            "The scores and their intervals are of one text; they say nothing about other texts.",
            f"No downstream task and no context beyond {record['evaluation']['context_length']:,} tokens was measured.",
        ]
    if "layers" in record:
        limits.append(
            "The values were fitted to the calibration text. Text of another kind, such as another language, can lose "
            "more."
        )
    return limits


def _facts(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Return how the model was made, term by term."""
    facts = [("Conversion", ", ".join(filter(None, (record["to"], record.get("method")))))]
    if calibration := record.get("calibration"):
        facts.append(("Calibration text", calibration["description"]))
        sequences = f"sequences of {calibration['sequence_length']:,}"
        facts.append(("Calibration tokens", f"{record['calibration_tokens']:,}, in {sequences}"))
    if "cache" in record:
        facts.append(("Cache", f"at most {record['cache']:.2%} of the source's".replace(".00%", "%")))
    if "ratio" in record:
        facts.append(("Ratio", f"{record['ratio']:g} of the value heads go at most"))
    if settings := record.get("settings"):
        facts.append(("Settings", ", ".join(f"{name} {value}" for name, value in settings.items())))
    if evaluation := record.get("evaluation"):
        facts.append(("Evaluation text", f"{evaluation['text']['description']}, {evaluation['text']['split']}"))
        bits = (record.get("calibration") or {}).get("source_bits_per_byte"), evaluation["before"]["bits_per_byte"]
        if None not in bits:
            facts.append(
                (
                    "Source, bits per byte",
                    f"{bits[0]:.2f} on the calibration text, {bits[1]:.2f} on the evaluation text",
                )
            )
    if "command" in record:
        facts.append(("Command", f"`{record['command']}`"))
    if "versions" in record:
        facts.append(("Versions", ", ".join(f"{name} {value}" for name, value in record["versions"].items())))
    return facts


def _scored_on(evaluation: dict[str, Any]) -> str:
    tokens, windows = evaluation["before"]["tokens"], evaluation["windows"]
    note = f"On {tokens:,} tokens of {evaluation['text']['description']}"
    width = "" if windows < 2 else f" ± is half of a 95% interval over the {windows:,} windows."
    note += f", {evaluation['text']['split']}, in windows of {evaluation['context_length']:,} tokens."
    return f"{note}{width} KL is 0 where both models give every next token the same probability."


def _with_width(measured: dict[str, float | None], write: Any, digits: str) -> str:
    width = "" if measured["half_width"] is None else f" ± {measured['half_width']:{digits}}"
    return f"{write(round(measured['mean'] or 0, 4) + 0.0)}{width}"  # + 0.0: no minus sign before a zero
