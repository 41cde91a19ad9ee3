"""A conversion as a table, a page and a model card, from conversion.json alone."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from rich.table import Table as TerminalTable

from ..checkpoints.card import CARD, LICENSE, card
from ..compare.statistics import Band
from .figures import Series, measured_lines
from .page import Figure, Kind, Page, Section, described, footer
from .text import ABSENT, Table, plus_minus, signed, span

# Of what `loss_figures` returns, with the digits that are shown.
SCORES = {"loss": ("loss, nats per token", 4), "perplexity": ("perplexity", 2), "bits_per_byte": ("bits per byte", 4)}
# By the first word of a number's name in a layer's entry.
MISSED = "missed"
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


def terminal(record: dict[str, Any]) -> TerminalTable:
    """Return sizes and scores before and after, for a terminal."""
    return result_table(record).terminal(whole=("source", "result", "change"))


def result_table(record: dict[str, Any]) -> Table:
    """Return sizes and scores before and after."""
    rows = []
    sizes = {"parameters": "parameters", "kv_bytes_per_token_bf16": f"KV cache, bytes per token (bf16){_until(record)}"}
    if "at_context" in record:
        sizes["kv_bytes_at_context_bf16"] = f"KV cache at {record['at_context']:,} tokens, bytes (bf16)"
    for name, words in sizes.items():
        before, after = record[name]
        if before:  # an encoder has no cache
            rows.append([words, _count(before), _count(after), f"{after / before - 1:+.1%}".replace("-", "−")])
    if (evaluation := record.get("evaluation")) is None:
        return Table(("", "source", "result", "change"), rows, note=NOT_EVALUATED)
    for name, (words, digits) in SCORES.items():
        before, after = (evaluation[which].get(name) for which in ("before", "after"))
        if before is not None:
            change = signed(round(after - before, digits) + 0.0, digits)
            change = _with_width(evaluation["loss_difference"]) if name == "loss" else change
            rows.append([words, f"{before:,.{digits}f}", f"{after:,.{digits}f}", change])
    divergence = _with_width(evaluation["divergence"], write="{:.4f}".format)
    agreement = _with_width(evaluation["agreement"], ".1%", "{:.1%}".format)
    rows += [["KL(source ‖ result), nats per token", ABSENT, ABSENT, divergence]]
    rows += [["same likeliest token", ABSENT, ABSENT, agreement]]
    return Table(("", "source", "result", "change"), rows, note=_scored_on(evaluation))


def _until(record: dict[str, Any]) -> str:
    """Return up to where layers with a sliding window keep the bytes of every token."""
    source = record.get("source")
    window = source.get("sliding_window") if isinstance(source, dict) else None
    return f" until a window of {window} is full" if window else ""


def position_table(parts: list[dict[str, Any]]) -> Table:
    """Return losses by position in the window, of one model or of two, from what `by_position` returns."""
    paired = "before" in parts[0]
    scores = ("source", "result", "change", "same likeliest token") if paired else ("loss, nats per token",)
    rows = []
    for part in parts:
        cells = [f"{part[name]:.4f}" for name in (("before", "after") if paired else ("loss",))]
        if paired:
            cells += [_with_width(part["loss_difference"]), _with_width(part["agreement"], ".1%", "{:.1%}".format)]
        rows.append([f"{part['from']:,}–{part['to']:,}", f"{part['tokens']:,}", *cells])
    return Table(("position in the window", "tokens", *scores), rows, note="Losses are in nats per token.")


def layer_lines(record: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each layer that was fitted, and one for heads that were pooled."""
    if "pools" in record:
        yield f"{'key and value heads' if record['to'] == 'gqa' else 'value heads'} pooled: {record['pools']}"
    for layer in record.get("layers", ()):
        if "rank" in layer:
            keys = f"keys cached in {layer['key_rank']} columns, " if "key_rank" in layer else ""
            did = f"{keys}values in {layer['rank']}{' beside the keys' if layer.get('from_keys') else ''}"
        elif "merged" in layer:
            pairs = " and ".join(f"{first} with {second}" for first, second in layer["merged"])
            did = f"merged heads {pairs}" if pairs else "all heads kept"
        elif "kept" in layer:
            pairs = ", ".join(f"{head}: {first}" for head, first in layer.get("paired", {}).items())
            tied = f", their order fixed by {layer['tied_by']}" if "tied_by" in layer else ""
            did = f"heads {layer['kept']} keep their values, the others take the first layer's ({pairs}){tied}"
        else:
            did = "the values it lends are fitted to all layers"
        error = f"{layer['missed']:.2%} of attention's output missed" if "missed" in layer else "fitted"
        yield f"layer {layer['layer']}: {did}; {error}"


def summary(record: dict[str, Any]) -> str:
    """Return in one or two sentences what became smaller, and what that costs."""
    context = record.get("at_context")
    per = f"per token{_until(record)}" if context is None else f"at {context:,} tokens"
    before, after = record[f"kv_bytes_{'per_token' if context is None else 'at_context'}_bf16"]
    cost = NOT_EVALUATED
    if evaluation := record.get("evaluation"):
        difference, same = _with_width(evaluation["loss_difference"]), f"{evaluation['agreement']['mean']:.1%}"
        cost = f"The loss changes by {difference} nats per token; {same} of the likeliest tokens stay the same."
    share = f"{after / before:.1%} of the source's {before:,}"
    return f"The KV cache takes {after:,} bytes {per} in bfloat16, {share}. {cost}"


def model_card(record: dict[str, Any]) -> str:
    """Return a model card for the Hugging Face Hub, in Markdown."""
    table = result_table(record)
    return card(
        record.get("name", "model"),
        record.get("source", {}).get("task", "causal_lm"),
        ["kv-cache", record["to"]],
        {name: record[name] for name in ("base_model", *LICENSE) if record.get(name)},
        False,
        summary(record).replace(NOT_EVALUATED, "") + f"\n\n## What changed\n\n{_what_changed(record)}",
        f"## Result\n\n{table.markdown()}\n{table.note}",
        "## How it was made\n\n" + "".join(f"- {term}: {text}\n" for term, text in _facts(record)).rstrip(),
        "## Limits\n\n" + "".join(f"- {limit}\n" for limit in _limits(record)).rstrip(),
        tokenizer=record.get("tokenizer", True),
    )


def page(record: dict[str, Any]) -> Page:
    """Return the page of a record."""
    result, layers = result_table(record), record.get("layers", ())
    by_layer = [_figure(layers), Section("All layers", [_layer_table(layers)], folded=True)]
    # Every interval stands below its number, which fits a phone.
    result = replace(result, rows=[[cell.replace(" ± ", "\n± ") for cell in row] for row in result.rows])
    return Page(
        "leanqkv convert",
        f"{record.get('base_model', 'A checkpoint')}, converted to {record['to']}",
        summary(record),
        [
            Section("Result", [_what_changed(record), result]),
            Section("Layers", by_layer if layers else []),
            Section("How it was made", [dict(_facts(record))]),
            Section("Limits", [_limits(record)]),
        ],
        made=footer(record),
    )


def _count(number: int) -> str:
    return f"{number / 1e6:,.2f}M" if number >= 10**7 else f"{number:,}"


def _names(layers: list[dict[str, Any]]) -> list[str]:
    """The measures that any layer has."""
    return [name for name in dict.fromkeys(name for layer in layers for name in layer) if name != "layer"]


def _layer_table(layers: list[dict[str, Any]]) -> Table:
    names = _names(layers)
    rows = [[str(layer["layer"]), *(_cell(name, layer.get(name)) for name in names)] for layer in layers]
    note = " ".join([*(words for name, words in COLUMNS.items() if name in names), "Layers and heads count from 0."])
    return Table(("layer", *(name.replace("_", " ") for name in names)), rows, note=note)


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


def _figure(layers: list[dict[str, Any]]) -> Figure | None:
    """Draw what each layer's attention misses, one line for every such number; None where there are none."""
    series = []
    for style, name in enumerate((name for name in _names(layers) if name.startswith(MISSED)), 1):
        points = [
            Band(layer["layer"], *[100 * layer[name]] * 3)
            for layer in layers
            if isinstance(layer.get(name), int | float) and math.isfinite(layer[name])
        ]
        if points and max(point.high for point in points) > 0:
            series.append(Series(name.replace("_", " "), style, points))
    if not series:
        return None
    held_out = {"rank", "merged"} & {*layers[0]}
    text = "calibration sequences held out from the fit" if held_out else "the calibration text"
    return Figure(
        measured_lines(
            "missed", series, "layer", "missed, % of the square", "Missed part of attention's output, by layer."
        ),
        f"What the result misses of each layer's attention output: squared error over its square, on {text}. 0% is "
        "the source's output.",
    )


def _what_changed(record: dict[str, Any]) -> str:
    to, layers = record["to"], record.get("layers", ())
    fitted = "were fitted to text; nothing was trained."
    if to == "nonlinear-query":
        return (
            "Every layer has a nonlinear query, which starts as exactly the function of the source's. Nothing is "
            "gained before training goes on."
        )
    if to == "gqa":
        return (
            f"Neighbouring key and value heads are pooled to their mean, {len(record['pools'])} in each layer; "
            "everything else is the source's. Nothing was fitted or trained: such a model needs training before it is "
            "of use."
        )
    if to == "merged-values":
        count = sum(len(layer["merged"]) for layer in layers)
        merged = "1 pair of value heads is merged" if count == 1 else f"{count:,} pairs of value heads are merged"
        return (
            f"{merged}: both key heads of a pair read one value, which is cached once. Queries, keys, MLPs, norms and "
            f"embeddings are the source's. Value and output projections {fitted}"
        )
    if to == "skipv1":
        heads = [(len(layer["paired"]), len(layer["kept"])) for layer in layers if "paired" in layer]
        share = f"{heads[0][0]} of its {sum(heads[0])}" if heads else "part of its"
        return (
            f"Every layer beyond the first reads {share} value heads from the first layer, whose values are cached "
            "once (SkipV1Former). Queries, keys, MLPs, norms and embeddings are the source's."
            + (f" Value and output projections {fitted}" if "layers" in record else "")
        )
    columns = span([layer["rank"] for layer in layers])
    keys = f"{span([layer['key_rank'] for layer in layers])} columns of keys and " if "key_rank" in layers[0] else ""
    made, same, changed = (
        ("heads are", "Queries", "Key, value") if keys else ("value heads are", "Queries, keys", "Value")
    )
    both = " Values are made of the keys as well." if any(layer.get("from_keys") for layer in layers) else ""
    return (
        f"The cache holds {keys}{columns} columns of values in each layer, of which its {made} made."
        f"{both} {same}, MLPs, norms and embeddings are the source's. {changed} and output projections {fitted}"
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
        fitted = "The values were fitted to the calibration text."
        limits.append(f"{fitted} Text of another kind, such as another language, can lose more.")
    return limits


def _facts(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield how the model was made, term by term."""
    yield "Conversion", ", ".join(filter(None, (record["to"], record.get("method"))))
    calibration, evaluation = record.get("calibration"), record.get("evaluation")
    if calibration:
        yield "Calibration text", calibration["description"]
        sequences = f"sequences of {calibration['sequence_length']:,}"
        yield "Calibration tokens", f"{record['calibration_tokens']:,}, in {sequences}"
    if "cache" in record:
        yield "Cache", f"at most {record['cache']:.2%} of the source's".replace(".00%", "%")
    if "ratio" in record:
        yield "Ratio", f"{record['ratio']:g} of the value heads go at most"
    if settings := record.get("settings"):
        yield "Settings", described(settings)
    if evaluation:
        yield "Evaluation text", f"{evaluation['text']['description']}, {evaluation['text']['split']}"
        bits = (calibration or {}).get("source_bits_per_byte"), evaluation["before"]["bits_per_byte"]
        if None not in bits:
            text = f"{bits[0]:.2f} on the calibration text, {bits[1]:.2f} on the evaluation text"
            yield "Source, bits per byte", text
    if "command" in record:
        yield "Command", f"`{record['command']}`"
    if "versions" in record:
        yield "Versions", described(record["versions"])


def _scored_on(evaluation: dict[str, Any]) -> str:
    text, windows, before = evaluation["text"], evaluation["windows"], evaluation["before"]
    masked = before.get("masked_tokens")
    scored, given = (f"{masked:,} masked", "masked") if masked else (f"{before['tokens']:,}", "next")
    width = "" if windows < 2 else f" ± is half of a 95% interval over the {windows:,} windows."
    return (
        f"On {scored} tokens of {text['description']}, {text['split']}, in windows of "
        f"{evaluation['context_length']:,} tokens.{width} KL is 0 where both models give every {given} token the same "
        "probability."
    )


def _with_width(measured: dict[str, float | None], form: str = ".4f", write: Callable[[float], str] = signed) -> str:
    """The mean, and half its interval."""
    mean = round(measured["mean"] or 0, 4) + 0.0  # + 0.0: no minus sign before a zero
    return plus_minus(write(mean), measured["half_width"], form)


AGAIN = "convert again into another directory"
# A model card is its owner's to edit.
KIND = Kind("conversion.json", AGAIN, page, terminal, model_card, CARD, kept=True, html="conversion.html")
