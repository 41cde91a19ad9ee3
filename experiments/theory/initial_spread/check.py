"""The check of the initial logit spread: every query mechanism, every layer, and the ratio against the width; and of
queries and keys that both have the input in them.

Karbevski & Mijoski 2025, appendix B. https://arxiv.org/abs/2510.23912
Karbevski 2026, section 2.2. https://github.com/MarkoKarbevski/beyond_query_linearity
"""

from dataclasses import dataclass
from typing import Any

from leanqkv.presets import preset
from leanqkv.presets.catalog import MECHANISMS

from ..check import Check, Finding, Parts, Progress
from ..report import Record, number, plain_axes, table
from . import statement as spreads

# Every query mechanism that is registered, under the name of its preset; a linear query is no preset.
PRESETS = {mechanism.spec["type"]: name for name, mechanism in MECHANISMS.items() if mechanism.slot == "query"}
# Queries and keys together. The linear ones are no presets.
PAIRS = (
    (),
    ("nonlinear-query",),
    ("nonlinear-key",),
    ("nonlinear-query", "nonlinear-key:anchor=linear"),
    ("nonlinear-query:anchor=linear", "nonlinear-key:anchor=linear"),
    ("nonlinear-query", "nonlinear-key"),
    ("residual-query", "nonlinear-key"),
    ("identity-query", "nonlinear-key"),
    ("identity-query", "identity-key"),
)
LABELS = {"linear": "linear (baseline)", "from_mlp": "from the MLP below"}


@dataclass(frozen=True)
class Settings:
    base: str = "gpt2-124m"
    vocab_size: int = 1000
    layers: int = 12
    seeds: int = 2
    batch: int = 4
    length: int = 64
    widths: tuple[int, ...] = (192, 384, 768, 1536)

    @classmethod
    def quick(cls) -> "Settings":
        return cls(layers=2, seeds=1, widths=(192, 768))


def by_mechanism(settings: Settings) -> list[dict[str, Any]]:
    """Return the spread over that of the linear query by mechanism and layer, mean over seeds.

    Models of one seed share their common tensors.
    """
    linear: list[list[float]] = []
    entries = []
    for kind in ("linear", *PRESETS):
        overrides = {
            "vocab_size": settings.vocab_size,
            "num_hidden_layers": settings.layers,
        }
        mechanisms = (PRESETS[kind],) if kind in PRESETS else ()
        config = preset(settings.base, *mechanisms, **overrides)
        runs = [spreads.logit_spreads(config, seed, settings.batch, settings.length) for seed in range(settings.seeds)]
        if kind == "linear":
            linear = [run[0] for run in runs]
        ratios = [
            [own / base for own, base in zip(run[0], other, strict=True)]
            for run, other in zip(runs, linear, strict=True)
        ]
        ratio = spreads.identity_ratio(config.hidden_size, config.initializer_range)
        entries.append(
            {
                "query": kind,
                "predicted": spreads.PREDICTED[kind](ratio),
                "spread": [sum(layer) / len(layer) for layer in zip(*(run[0] for run in runs), strict=True)],
                "ratio": [sum(layer) / len(layer) for layer in zip(*ratios, strict=True)],
                "scale": runs[0][1],
            }
        )
    return entries


def by_width(settings: Settings) -> list[dict[str, Any]]:
    """Return the identity query's ratio by width, for one layer with heads of 64."""
    entries = []
    for width in settings.widths:
        shape = {
            "hidden_size": width,
            "intermediate_size": width,  # above the attention that is looked at
            "num_attention_heads": width // 64,
            "num_hidden_layers": 1,
            "vocab_size": settings.vocab_size,
        }
        ratios = []
        for seed in range(settings.seeds):
            own, base = (
                spreads.logit_spreads(preset(settings.base, *names, **shape), seed, settings.batch, settings.length)[0]
                for names in (("identity-query",), ())
            )
            ratios.append(own[0] / base[0])
        config = preset(settings.base, **shape)
        predicted = spreads.identity_ratio(width, config.initializer_range)
        entries.append({"width": width, "predicted": predicted, "ratio": sum(ratios) / len(ratios)})
    return entries


def by_pair(settings: Settings) -> list[dict[str, Any]]:
    """Return, for queries and keys together, a token's logit with itself by layer, mean over seeds."""
    entries = []
    for names in PAIRS:
        config = preset(settings.base, *names, vocab_size=settings.vocab_size, num_hidden_layers=settings.layers)
        runs = [spreads.own_logits(config, seed, settings.batch, settings.length) for seed in range(settings.seeds)]
        measured = {
            field: [sum(getattr(one, field) for one in layer) / len(layer) for layer in zip(*runs, strict=True)]
            for field in spreads.OwnLogits._fields
        }
        entries.append({"mechanisms": "+".join(names), "predicted": spreads.own_logit(config), **measured})
    return entries


def parts(settings: Settings, progress: Progress) -> Parts:
    return {
        "by_mechanism": lambda: by_mechanism(settings),
        "by_width": lambda: by_width(settings),
        "by_pair": lambda: by_pair(settings),
    }


def findings(record: Record) -> list[Finding]:
    mechanisms = {entry["query"]: entry for entry in record["measured"]["by_mechanism"]}
    identity = mechanisms["identity"]
    deeper = identity["ratio"][1:]
    scaled = identity["ratio"][0] * identity["scale"][0]
    off = max(abs(entry["ratio"][0] / entry["predicted"] - 1) for entry in mechanisms.values())
    widths = max(abs(entry["ratio"] / entry["predicted"] - 1) for entry in record["measured"]["by_width"])
    pairs = record["measured"]["by_pair"]
    passed = [entry["own"][0] for entry in pairs if entry["predicted"]]
    own = max(abs(entry["own"][0] - entry["predicted"]) for entry in pairs)
    return [
        Finding(
            "an identity query's logits spread about 1.8 times as wide as a linear one's",
            f"first layer {number(identity['ratio'][0], 2)}, "
            f"deeper {number(min(deeper), 2)} to {number(max(deeper), 2)}",
            abs(identity["ratio"][0] - 1.8) < 0.15 and min(deeper) > 1.4 and max(deeper) < 2.2,
        ),
        Finding("with half the scale about 0.9", f"first layer {number(scaled, 2)}", abs(scaled - 0.9) < 0.08),
        Finding(
            "the first layer of every mechanism is as predicted",
            f"{len(mechanisms)} mechanisms, at most {100 * off:.0f} % off",
            off < 0.15,
        ),
        Finding(
            "the ratio is 1 / (sigma sqrt(d)): 1.8 is that of one width",
            f"{len(record['measured']['by_width'])} widths, at most {100 * widths:.0f} % off",
            widths < 0.15,
        ),
        Finding(
            "a token's first logit with itself stands out where query and key both have X in them, and only there",
            f"{number(min(passed), 2)} to {number(max(passed), 2)} nats above the others; {len(pairs)} pairs, at most "
            f"{number(own, 2)} nats off",
            own < 0.1,
        ),
    ]


def tables(record: Record) -> str:
    rows = []
    for entry in record["measured"]["by_mechanism"]:
        deeper, used = entry["ratio"][1:], [r * s for r, s in zip(entry["ratio"], entry["scale"], strict=True)]
        rows.append(
            (
                LABELS.get(entry["query"], entry["query"]),
                number(entry["predicted"], 2),
                number(entry["ratio"][0], 2),
                f"{number(min(deeper), 2)} to {number(max(deeper), 2)}",
                f"{entry['scale'][-1]:g}",
                number(used[0], 2),
                f"{number(min(used[1:]), 2)} to {number(max(used[1:]), 2)}",
            )
        )
    head = (
        *("query", "predicted, first layer", "first layer", "deeper layers", "its scale"),
        *("first layer, scaled", "deeper, scaled"),
    )
    widths = [
        (str(entry["width"]), number(entry["predicted"], 2), number(entry["ratio"], 2))
        for entry in record["measured"]["by_width"]
    ]
    made = (
        table(head, rows),
        table(("d", "1 / (σ√d)", "identity over linear, first layer"), widths),
        pair_table(record),
    )
    return "\n".join(made)


def pair_table(record: Record) -> str:
    rows = []
    for entry in record["measured"]["by_pair"]:
        deeper = entry["own"][1:]
        rows.append(
            (
                entry["mechanisms"].replace("+", ", ") or LABELS["linear"],
                number(entry["predicted"], 2),
                number(entry["own"][0], 2),
                f"{number(min(deeper), 2)} to {number(max(deeper), 2)}",
                number(entry["spread"][0], 2),
                f"{number(100 * entry['weight'][0], 1)} %",
            )
        )
    head = (
        *("query and key", "own logit, predicted", "first layer", "deeper layers", "spread of the others"),
        f"weight on itself, of {record['settings']['length']}",
    )
    return table(head, rows)


def draw(record: Record, figure: Any) -> None:
    """Draw every layer's ratio by mechanism, and the identity's ratio by width."""
    left, right = plain_axes(figure, 1, 2)[0]
    for entry in record["measured"]["by_mechanism"]:
        layers = range(1, len(entry["ratio"]) + 1)
        left.plot(layers, entry["ratio"], "o-", markersize=4, label=LABELS.get(entry["query"], entry["query"]))
    left.set_xlabel("layer")
    left.set_ylabel("spread over the linear query's, same scale")
    left.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=8)
    widths = record["measured"]["by_width"]
    right.plot([e["width"] for e in widths], [e["predicted"] for e in widths], color="#1b5e8c", label="1 / (σ√d)")
    right.plot([e["width"] for e in widths], [e["ratio"] for e in widths], "o", color="#a8480f", label="measured")
    right.set_xscale("log", base=2)
    right.set_xlabel("d")
    right.set_ylabel("identity over linear, first layer")
    right.legend(frameon=False, fontsize=8)


CHECK = Check(
    name="initial-spread",
    statement=(
        "at the start an identity query's attention logits spread about 1.8 times as wide as a linear one's; "
        "with X in query and key, tokens attend to themselves"
    ),
    source="Karbevski & Mijoski 2025, appendix B; Karbevski 2026, section 2.2",
    settings=Settings,
    parts=parts,
    findings=findings,
    tables=tables,
    draw=draw,
)
