"""The tables and the page of an analysis, from its record alone."""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from rich.table import Table as TerminalTable

from leanqkv.compare.statistics import paired_difference, standard_deviation
from leanqkv.model.config import LeanConfig
from leanqkv.report.page import Figure, Kind, Note, Page, Section, footer
from leanqkv.report.text import ABSENT, Table, plus_minus, signed, with_interval

from . import measures
from .figures import drawings
from .measures import SCORES, Architecture, Measure, Model, Record

STAGES = 5  # of training, in a table
TABLES = (
    "Means and standard deviations are over the models of an architecture; differences are paired by seed, with "
    "Student's 95 % interval over seeds, in bold where it leaves out zero. Layers and heads count from 0."
)
BORROWED, OWN, SAME_PLACES = "borrowed values", "own values", "at the places of borrowed values"
Value = Callable[[Model], float | None]
Places = list[tuple[int, int]]  # layer, head


def tables(record: Record) -> dict[str, Table]:
    """Return every table under its title; differences are paired by seed, with Student's 95 % interval over seeds."""
    groups, matrices = measures.architectures(record), list(measures.conditions(record).values())
    by_layer = {
        measure: (f"{measure.title}, by layer", _by_layer(groups, measure))
        for measure in (*measures.layer_measures(record), *matrices)
    }
    result = {"Summary": _summary(groups)}
    if measures.PROBE in by_layer:
        result |= [by_layer.pop(measures.PROBE), ("Slope of the probe's loss, nats a layer", _slopes(record))]
    result |= [by_layer.pop(measure) for measure in (measures.HEADS, measures.CONTRIBUTIONS, measures.TOKENS)]
    split = _split_heads(groups)
    result["Heads by where their values come from"] = _head_groups(split)
    if (differences := _head_differences(split)).rows:
        result["Differences between these heads"] = differences
    result["The strongest heads"] = _strongest(record)
    result |= by_layer.values()
    result["Over training"] = _over_training(groups, matrices)
    result["Initial spread of the logits"] = _initial(record)
    return result


def markdown(record: Record) -> str:
    """Return all tables as Markdown."""
    return "\n".join(f"## {title}\n\n{table.markdown()}" for title, table in tables(record).items())


def terminal(record: Record) -> TerminalTable:
    """Return the summary for a terminal; the page has the rest."""
    return tables(record)["Summary"].terminal()


def page(record: Record) -> Page:
    """Return the page of a record."""
    settings, hardware = record["settings"], record["hardware"]
    text = f"{record['data']['description']}; {settings['samples']} sequences of {settings['context_length']} tokens"
    probes = ""
    if settings["probe_steps"]:
        steps = f"probes of {settings['probe_steps']} steps of {settings['probe_batch_size']} sequences"
        probes = f"; {steps} at the best of the rates {', '.join(map(str, settings['probe_rates']))}"
    return Page(
        "experiments.analysis",
        "Analysis: layers, heads, tokens and weights",
        f"{text} held out from it{probes}.",
        [
            Section("Figures", [Figure(drawing, caption) for caption, drawing in drawings(record)]),
            Section("Tables", [Note(TABLES), *(Section(title, [table]) for title, table in tables(record).items())]),
        ],
        made=f"{footer(record)}; {hardware['cpu']}, {hardware['device']}",
        title=f"Analysis: {', '.join(record['models'])}",
    )


# Architectures side by side


def mean_and_deviation(values: Collection[float], digits: int) -> str:
    """Return the mean and the sample's standard deviation, where there are two values: 3.905 ± 0.007."""
    if not values:
        return ABSENT
    mean = f"{np.mean(list(values)):.{digits}f}".replace("-", "−")
    return plus_minus(mean, standard_deviation(list(values)), f".{digits}f")


def _compared(what: str, groups: Sequence[Architecture], rows: Iterable[tuple[str, Value, int]]) -> Table:
    """Every architecture's value, and the difference of every one but the first to the first.

    rows: title, value of a model, digits.
    """
    names = [group.name for group in groups]
    headers = (what, *(f"`{name}`" for name in names), *(f"`{name}` − `{names[0]}`" for name in names[1:]))
    cells = []
    for title, value, digits in rows:
        base, *others = columns = [group.by_seed(value) for group in groups]
        spreads = (mean_and_deviation(column.values(), digits) for column in columns)
        differences = (with_interval(paired_difference(column, base), digits) for column in others)
        cells.append((title, *spreads, *differences))
    return Table(headers, cells)


def _by_layer(groups: Sequence[Architecture], measure: Measure) -> Table:
    def at(layer: int, model: Model) -> float | None:
        layers = measure.of(model)
        return layers[layer] if layer < len(layers) else None

    depth = max(len(measure.of(model)) for group in groups for model in group.models.values())
    return _compared("layer", groups, [(str(layer), partial(at, layer), measure.digits) for layer in range(depth)])


def _summary(groups: Sequence[Architecture]) -> Table:
    def slope(phase: int, model: Model) -> float | None:
        return (model["probe"]["slopes"][phase] or {}).get("slope") if model["probe"] else None

    def highest(score: str, model: Model) -> float:
        return max(map(max, model["heads"][score]))

    def copy_loss(first: int, second: int, model: Model) -> float:
        losses = model["heads"]["copy_loss"]
        return first * losses["first"] + second * losses["second"]

    rows: dict[str, Value] = {
        "probe's slope, first phase": partial(slope, 0),
        "probe's slope, second phase": partial(slope, 1),
        "similarity of heads before W_O, mean over layers": measures.HEADS.mean,
        "similarity of heads after W_O, mean over layers": measures.CONTRIBUTIONS.mean,
        "similarity of tokens, mean over layers": measures.TOKENS.mean,
        "similarity of tokens, last layer": lambda model: measures.TOKENS.of(model)[-1],
        "highest previous-token score": partial(highest, "previous_token"),
        "highest induction score": partial(highest, "induction"),
        "highest matching score on the text": partial(highest, "matching"),
        "loss on random tokens, first copy": partial(copy_loss, 1, 0),
        "loss on random tokens, second copy": partial(copy_loss, 0, 1),
        "lost less on the second copy": partial(copy_loss, 1, -1),
    }
    table = _compared("", groups, [(title, value, 3) for title, value in rows.items()])
    return Table(table.headers, [row for row in table.rows if set(row[1:]) != {ABSENT}])


def _over_training(groups: Sequence[Architecture], matrices: Sequence[Measure]) -> Table:
    """Means over layers, at the start, at the checkpoints that are left, and at the end; of many checkpoints some, as
    the figures show them all."""
    models = [model for group in groups for model in group.models.values()]
    steps = sorted({stage["step"] for model in models for stage in model["training"]})
    if len(steps) > STAGES:
        steps = [steps[round(i * (len(steps) - 1) / (STAGES - 1))] for i in range(STAGES)]

    def at(step: int | None, measure: Measure, model: Model) -> float | None:
        by_step = {None: model} | {stage["step"]: stage for stage in model["training"]}
        return measure.mean(by_step[step]) if step in by_step else None

    titles = {"spread of the logits": measures.SPREAD} | {matrix.title: matrix for matrix in matrices}
    rows = [
        (f"{title}, {'end' if step is None else f'step {step:,}'}", partial(at, step, measure), measure.digits)
        for title, measure in titles.items()
        for step in (*steps, None)
    ]
    return _compared("mean over layers", groups, rows)


# Single models


def _slopes(record: Record) -> Table:
    """Each model's, with the interval over the sequences of validation text."""

    def cells(slope: dict[str, Any] | None) -> tuple[str, str]:
        if slope is None:
            return ABSENT, ABSENT
        return "–".join(map(str, slope["layers"])), f"{signed(slope['slope'], 3)} ± {slope['half_width']:.3f}"

    rows = [
        (label, *(cell for slope in model["probe"]["slopes"] for cell in cells(slope)))
        for label, model in record["models"].items()
    ]
    return Table(("model", "layers", "slope, 95 %", "layers", "slope, 95 %"), rows)


def _strongest(record: Record) -> Table:
    """Per model the head that scores highest in each, and the layer its values come from."""
    rows = []
    for label, model in record["models"].items():
        cells = []
        for score in SCORES:
            heads = [(v, i, h) for i, layer in enumerate(model["heads"][score]) for h, v in enumerate(layer)]
            best, layer, head = max(heads)
            sources = model["heads"]["value_layers"][layer]
            source = ABSENT if sources is None else "its own" if sources[head] == layer else f"layer {sources[head]}"
            cells += [f"layer {layer}, head {head}", f"{best:.3f}", source]
        rows.append((label, *cells))
    rows.append(("chance", *(cell for score in SCORES for cell in ("", f"{record['chance'][score]:.3f}", ""))))
    return Table(("model", *(header for name in SCORES.values() for header in (name, "score", "values"))), rows)


def _initial(record: Record) -> Table:
    """Against the linear query's, and what appendix B of Karbevski & Mijoski 2025 comes to at this shape: an identity
    query spreads the logits `scale / (initializer_range sqrt(hidden_size))` times as wide."""
    spreads = record["initial_spread"]["by_query"]
    config = LeanConfig(**record["models"][record["initial_spread"]["of"]]["config"])
    unit = 1 / (config.initializer_range * config.hidden_size**0.5)
    derived = {"identity, scale 1": f"{unit:.2f}", "identity, scale ½": f"{unit / 2:.2f}"}
    rows = []
    for name, values in spreads.items():
        first, *deeper = (value / base for value, base in zip(values, spreads["linear"], strict=True))
        span = f"{min(deeper):.2f}–{max(deeper):.2f}" if deeper else ABSENT
        rows.append((name, f"{values[0]:.4f}", f"{first:.2f}", derived.get(name, ABSENT), span))
    return Table(("query", "first layer", "over linear", "as derived", "over linear, deeper layers"), rows)


# Groups of heads


def _borrowed(model: Model) -> Places:
    """Heads whose values are those of another layer."""
    return [
        (layer, head)
        for layer, sources in enumerate(model["heads"]["value_layers"])
        for head, source in enumerate(sources or ())
        if source != layer
    ]


def _split_heads(architectures: Sequence[Architecture]) -> list[tuple[Architecture, dict[str, Places]]]:
    """Of every architecture the heads with borrowed values and the others of the same layers; of one that borrows
    nothing those at the places where the first one that does has its borrowed ones, and the others there."""
    lent = next(filter(None, (_borrowed(one.first) for one in architectures)), [])
    result = []
    for one in architectures:
        own = _borrowed(one.first)
        chosen = own or lent
        layers = {layer for layer, _ in chosen}
        scores = enumerate(one.first["heads"]["induction"])
        places = [(i, head) for i, heads in scores if i in layers or not chosen for head in range(len(heads))]
        inside, outside = (BORROWED, OWN) if own else (SAME_PLACES, "at the others")
        split = {inside: [at for at in places if at in chosen], outside: [at for at in places if at not in chosen]}
        if not split[inside]:
            split = {"all": split[outside]}
        result.append((one, {name: group for name, group in split.items() if group}))
    return result


SCORE_COLUMNS = {
    f"{title}, {name}": (score, reduce)
    for score, title in SCORES.items()
    for name, reduce in (("mean", np.mean), ("highest", np.max))
}


def _scores(architecture: Architecture, places: Places) -> list[dict[int, float]]:
    """Return the columns of SCORE_COLUMNS for these heads, by seed."""

    def of(score: str, reduce: Any, model: Model) -> float:
        return float(reduce([model["heads"][score][layer][head] for layer, head in places]))

    return [architecture.by_seed(partial(of, *column)) for column in SCORE_COLUMNS.values()]


def _head_groups(split: Sequence[tuple[Architecture, dict[str, Places]]]) -> Table:
    rows = []
    for one, groups in split:
        for name, places in groups.items():
            cells = (mean_and_deviation(values.values(), 3) for values in _scores(one, places))
            rows.append((f"`{one.name}`, {name}", str(len(places)), *cells))
    return Table(("heads", "how many", *SCORE_COLUMNS), rows)


def _head_differences(split: Sequence[tuple[Architecture, dict[str, Places]]]) -> Table:
    """Borrowed against own values in the same model, and against the same places of the first architecture."""
    base, at_base = split[0]
    rows = []
    for one, places in split:
        against = {OWN: (one, places.get(OWN))}
        if one is not base:
            against[f"`{base.name}` at the same places"] = (base, at_base.get(SAME_PLACES))
        for title, (other, others) in against.items():
            if others and BORROWED in places:
                pairs = zip(_scores(one, places[BORROWED]), _scores(other, others), strict=True)
                cells = (with_interval(paired_difference(*pair), 3) for pair in pairs)
                rows.append((f"`{one.name}`, {BORROWED} − {title}", *cells))
    return Table(("heads", *SCORE_COLUMNS), rows)


KIND = Kind("analysis.json", "analyze again into another directory", page, terminal, markdown)
