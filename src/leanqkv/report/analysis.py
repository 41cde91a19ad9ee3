"""Tables and page of an analysis, from its record alone."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table as RichTable

from ..analyze.record import RECORD
from ..compare.statistics import paired_difference, standard_deviation
from ..files import read_json, write_text
from ..model.config import LeanConfig
from .analysis_figures import drawings
from .html import render
from .text import ABSENT, markdown_table, signed

Model = Mapping[str, Any]
Value = Callable[[Model], float | None]


@dataclass(frozen=True)
class Architecture:
    """Models that differ in their seed alone, by seed; by their order where seeds are unknown or not distinct."""

    name: str
    models: Mapping[int, Model]


@dataclass(frozen=True)
class Table:
    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        return markdown_table(self.headers, self.rows)


def architectures(record: Mapping[str, Any]) -> list[Architecture]:
    """In the order of their first models; names are those of the runs."""
    groups: list[tuple[str, Any, list[Model]]] = []
    for model in record["models"].values():
        for name, config, models in groups:
            if (name, config) == (model["name"], model["config"]):
                models.append(model)
                break
        else:
            groups.append((model["name"], model["config"], [model]))
    found = []
    for name, _, models in groups:
        seeds = [model["seed"] for model in models]
        known = None not in seeds and len(set(seeds)) == len(seeds)
        found.append(Architecture(name, dict(zip(seeds if known else range(len(models)), models, strict=True))))
    return found


def tables(record: Mapping[str, Any]) -> dict[str, Table]:
    """Every table under its title; differences are paired by seed, with Student's 95 % interval over seeds."""
    found = architectures(record)
    made = {"Summary": _summary(found)}
    if _probed(record):
        made["Loss of the linear probe, by layer"] = _by_layer(found, lambda m: m["probe"]["losses"], 3)
        made["Slope of the probe's loss, nats a layer"] = _slopes(record)
    for name, title in (
        ("heads", "Similarity of two heads' outputs before W_O, by layer"),
        ("contributions", "Similarity of what two heads add to the output, after W_O, by layer"),
        ("tokens", "Similarity of two tokens, by layer"),
    ):
        made[title] = _by_layer(found, partial(_similar, name), 3)
    made["Heads by where their values come from"] = _head_groups(found)
    if differences := _head_differences(found):
        made["Differences between these heads"] = differences
    made["The strongest heads"] = _strongest(record)
    made["Spread of the attention logits, by layer"] = _by_layer(found, lambda m: m["logit_spread"], 3)
    for name in _matrices(record):
        made[f"log₁₀ of the condition number of {name}, by layer"] = _by_layer(found, partial(_conditions, name), 2)
    made["Over training"] = _over_training(record, found)
    made["Initial spread of the logits"] = _initial(record)
    return made


def markdown(record: Mapping[str, Any]) -> str:
    return "\n".join(f"## {title}\n\n{table.markdown()}" for title, table in tables(record).items())


def terminal(record: Mapping[str, Any]) -> RichTable:
    """The summary; the page has the rest."""
    summary = tables(record)["Summary"]
    found = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for header in summary.headers:
        found.add_column(header, justify="left" if header == summary.headers[0] else "right")
    for row in summary.rows:
        found.add_row(*row)
    return found


def write_page(directory: Path) -> Path:
    """Writes `report.html` and `table.md` beside analysis.json, from it alone; returns the page's path.

    Raises:
        LeanError: no such record there, or a damaged one.
    """
    record = read_json(directory / RECORD)
    page = render(
        Path(__file__).with_name("analysis.html.j2"),
        record=record,
        tables=tables(record),
        figures=drawings(record, [(a.name, list(a.models.values())) for a in architectures(record)]),
    )
    write_text(directory / "table.md", markdown(record))
    write_text(directory / "report.html", page)
    return directory / "report.html"


def _probed(record: Mapping[str, Any]) -> bool:
    return all(model["probe"] for model in record["models"].values())


def _log(value: float | None) -> float | None:
    return math.log10(value) if value else None


def _similar(what: str, model: Model) -> list[float]:
    """By layer."""
    return [at["mean"] for at in model["similarity"][what]]


def _conditions(matrix: str, model: Model) -> list[float | None]:
    """By layer, as logarithms; None where a layer has no such matrix, or a singular one."""
    return [_log(layer.get(matrix, {}).get("condition")) for layer in model["spectra"]]


def _matrices(record: Mapping[str, Any]) -> list[str]:
    names = [name for model in record["models"].values() for layer in model["spectra"] for name in layer]
    return list(dict.fromkeys(names))


def _spread(values: Sequence[float | None], digits: int) -> str:
    """Mean and standard deviation over models."""
    known = [value for value in values if value is not None]
    if not known:
        return ABSENT
    mean = f"{np.mean(known):.{digits}f}".replace("-", "−")
    deviation = standard_deviation(known)
    return mean if deviation is None else f"{mean} ± {deviation:.{digits}f}"


def _difference(values: Mapping[int, float | None], others: Mapping[int, float | None], digits: int) -> str:
    """Paired, with its interval where there are two pairs; bold where that leaves out zero."""
    first, second = ({at: v for at, v in those.items() if v is not None} for those in (values, others))
    found = paired_difference(first, second)
    if found is None:
        return ABSENT
    if found.half_width is None:
        return signed(found.mean, digits)
    text = f"{signed(found.mean, digits)} ± {found.half_width:.{digits}f}"
    return f"**{text}**" if found.clear else text


def _row(found: Sequence[Architecture], value: Value, digits: int) -> tuple[str, ...]:
    """Every architecture, and every one but the first minus the first."""
    values = [{at: value(model) for at, model in one.models.items()} for one in found]
    return (
        *(_spread(list(those.values()), digits) for those in values),
        *(_difference(those, values[0], digits) for those in values[1:]),
    )


def _headers(what: str, found: Sequence[Architecture]) -> tuple[str, ...]:
    names = [one.name for one in found]
    return (what, *(f"`{name}`" for name in names), *(f"`{name}` − `{names[0]}`" for name in names[1:]))


def _by_layer(found: Sequence[Architecture], values: Callable[[Model], Sequence[float | None]], digits: int) -> Table:
    depth = max(len(values(model)) for one in found for model in one.models.values())

    def at(layer: int) -> Value:
        return lambda model: values(model)[layer] if layer < len(values(model)) else None

    return Table(_headers("layer", found), [(str(i), *_row(found, at(i), digits)) for i in range(depth)])


def _summary(found: Sequence[Architecture]) -> Table:
    def slope(phase: int) -> Value:
        return lambda m: (m["probe"]["slopes"][phase] or {}).get("slope") if m["probe"] else None

    def mean(values: Callable[[Model], Sequence[float]]) -> Value:
        return lambda m: float(np.mean(values(m)))

    def most(score: str) -> Value:
        return lambda m: max(max(layer) for layer in m["heads"][score])

    rows: list[tuple[str, Value, int]] = [
        ("probe's slope, first phase", slope(0), 3),
        ("probe's slope, second phase", slope(1), 3),
        ("similarity of heads before W_O, mean over layers", mean(partial(_similar, "heads")), 3),
        ("similarity of heads after W_O, mean over layers", mean(partial(_similar, "contributions")), 3),
        ("similarity of tokens, mean over layers", mean(partial(_similar, "tokens")), 3),
        ("similarity of tokens, last layer", lambda m: m["similarity"]["tokens"][-1]["mean"], 3),
        ("highest previous-token score", most("previous_token"), 3),
        ("highest induction score", most("induction"), 3),
        ("highest matching score on the text", most("matching"), 3),
        ("loss on random tokens, first copy", lambda m: m["heads"]["copy_loss"]["first"], 3),
        ("loss on random tokens, second copy", lambda m: m["heads"]["copy_loss"]["second"], 3),
        (
            "lost less on the second copy",
            lambda m: m["heads"]["copy_loss"]["first"] - m["heads"]["copy_loss"]["second"],
            3,
        ),
    ]
    made = [(title, *_row(found, value, digits)) for title, value, digits in rows]
    return Table(_headers("", found), [row for row in made if any(cell != ABSENT for cell in row[1:])])


def _slopes(record: Mapping[str, Any]) -> Table:
    """Each model's, with the interval over the sequences of validation text."""
    rows = []
    for label, model in record["models"].items():
        cells = [
            ABSENT if s is None else f"{signed(s['slope'], 3)} ± {s['half_width']:.3f}"
            for s in model["probe"]["slopes"]
        ]
        spans = [ABSENT if s is None else "–".join(map(str, s["layers"])) for s in model["probe"]["slopes"]]
        rows.append((label, *(cell for pair in zip(spans, cells, strict=True) for cell in pair)))
    return Table(("model", "layers", "slope, 95 %", "layers", "slope, 95 %"), rows)


STAGES = 5  # of training, in a table
SCORES = ("previous_token", "induction", "matching")
Places = list[tuple[int, int]]  # layer, head


def _borrowed(model: Model) -> Places:
    """Heads whose values are those of another layer."""
    return [
        (layer, head)
        for layer, sources in enumerate(model["heads"]["value_layers"])
        for head, source in enumerate(sources or ())
        if source != layer
    ]


def _groups(found: Sequence[Architecture]) -> list[tuple[Architecture, dict[str, Places]]]:
    """Of every architecture the heads with borrowed values and the others of the same layers; of one that borrows
    nothing those at the places where the first one that does has its borrowed ones, and the others there."""
    examples = [next(iter(one.models.values())) for one in found]
    lent = next(filter(None, map(_borrowed, examples)), [])
    groups = []
    for one, model in zip(found, examples, strict=True):
        own = _borrowed(model)
        layers = {layer for layer, _ in own or lent} or set(range(len(model["heads"]["induction"])))
        every = [
            (i, h) for i, scores in enumerate(model["heads"]["induction"]) if i in layers for h in range(len(scores))
        ]
        chosen = [place for place in every if place in (own or lent)]
        rest = [place for place in every if place not in chosen]
        names = ("borrowed values", "own values") if own else ("at the places of borrowed values", "at the others")
        named = dict(zip(names, (chosen, rest), strict=True)) if chosen else {"all": rest}
        groups.append((one, {name: places for name, places in named.items() if places}))
    return groups


def _score(places: Places, score: str, over: Callable[[Sequence[float]], float]) -> Value:
    return lambda model: float(over([model["heads"][score][layer][head] for layer, head in places]))


OVER: Mapping[str, Callable[[Sequence[float]], float]] = {"mean": lambda v: float(np.mean(v)), "highest": max}
SCORE_HEADERS = tuple(f"{score.replace('_', '-')}, {over}" for score in SCORES for over in OVER)


def _head_groups(found: Sequence[Architecture]) -> Table:
    rows = []
    for one, groups in _groups(found):
        for name, places in groups.items():
            cells = [
                _spread([_score(places, score, over)(model) for model in one.models.values()], 3)
                for score in SCORES
                for over in OVER.values()
            ]
            rows.append((f"`{one.name}`, {name}", str(len(places)), *cells))
    return Table(("heads", "how many", *SCORE_HEADERS), rows)


def _head_differences(found: Sequence[Architecture]) -> Table | None:
    """Borrowed against own values in the same model, and against the same places of the first architecture."""
    groups = _groups(found)
    base, at_base = groups[0]
    rows = []
    for one, named in groups:
        if "borrowed values" not in named:
            continue
        against = [("own values", one, named.get("own values"))]
        if one is not base:
            against.append((f"`{base.name}` at the same places", base, at_base.get("at the places of borrowed values")))
        for title, other, places in against:
            if not places:
                continue
            cells = []
            for score in SCORES:
                for over in OVER.values():
                    mine, its = _score(named["borrowed values"], score, over), _score(places, score, over)
                    values = {at: mine(model) for at, model in one.models.items()}
                    cells.append(_difference(values, {at: its(model) for at, model in other.models.items()}, 3))
            rows.append((f"`{one.name}`, borrowed values − {title}", *cells))
    return Table(("heads", *SCORE_HEADERS), rows) if rows else None


def _strongest(record: Mapping[str, Any]) -> Table:
    """Per model the head that scores highest in each, and the layer its values come from."""
    rows = []
    for label, model in record["models"].items():
        cells = []
        for score in SCORES:
            values = model["heads"][score]
            best, layer, head = max((v, i, h) for i, scores in enumerate(values) for h, v in enumerate(scores))
            sources = model["heads"]["value_layers"][layer]
            source = ABSENT if sources is None else "its own" if sources[head] == layer else f"layer {sources[head]}"
            cells += [f"layer {layer}, head {head}", f"{best:.3f}", source]
        rows.append((label, *cells))
    chance = record["chance"]
    rows.append(("chance", *(cell for score in SCORES for cell in ("", f"{chance[score]:.3f}", ""))))
    names = (score.replace("_", "-") for score in SCORES)
    return Table(("model", *(header for name in names for header in (name, "score", "values"))), rows)


def _over_training(record: Mapping[str, Any], found: Sequence[Architecture]) -> Table:
    """Means over layers, at the start, at the checkpoints that are left, and at the end; of many checkpoints some, as
    the figures show them all."""
    steps = sorted({at["step"] for model in record["models"].values() for at in model["training"]})
    if len(steps) > STAGES:
        steps = [steps[round(i * (len(steps) - 1) / (STAGES - 1))] for i in range(STAGES)]

    def stage(model: Model, step: int | None) -> Model | None:
        if step is None:
            condition = [{name: m["condition"] for name, m in layer.items()} for layer in model["spectra"]]
            return {"logit_spread": model["logit_spread"], "condition": condition}
        return next((at for at in model["training"] if at["step"] == step), None)

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if known else None

    rows = []
    for step in (*steps, None):

        def spread(model: Model, step: int | None = step) -> float | None:
            at = stage(model, step)
            return mean(at["logit_spread"]) if at else None

        name = "end" if step is None else f"step {step:,}"
        rows.append((f"spread of the logits, {name}", *_row(found, spread, 3)))
    for matrix in _matrices(record):
        for step in (*steps, None):

            def condition(model: Model, step: int | None = step, matrix: str = matrix) -> float | None:
                at = stage(model, step)
                return mean([_log(layer.get(matrix)) for layer in at["condition"]]) if at else None

            name = "end" if step is None else f"step {step:,}"
            rows.append((f"log₁₀ of the condition number of {matrix}, {name}", *_row(found, condition, 2)))
    return Table(_headers("mean over layers", found), rows)


def _initial(record: Mapping[str, Any]) -> Table:
    """Against the linear query's, and what appendix B of Karbevski & Mijoski 2025 comes to at this shape: an identity
    query spreads the logits `scale / (initializer_range sqrt(hidden_size))` times as wide."""
    spreads = record["initial_spread"]["by_query"]
    config = LeanConfig(**record["models"][record["initial_spread"]["of"]]["config"])
    linear = spreads["linear"]
    rows = []
    for name, values in spreads.items():
        ratios = [value / base for value, base in zip(values, linear, strict=True)]
        deeper = f"{min(ratios[1:]):.2f}–{max(ratios[1:]):.2f}" if len(ratios) > 1 else ABSENT
        scale = {"identity, scale 1": 1.0, "identity, scale ½": 0.5}.get(name)
        derived = ABSENT
        if scale is not None:
            derived = f"{scale / (config.initializer_range * config.hidden_size**0.5):.2f}"
        rows.append((name, f"{values[0]:.4f}", f"{ratios[0]:.2f}", derived, deeper))
    return Table(("query", "first layer", "over linear", "as derived", "over linear, deeper layers"), rows)
