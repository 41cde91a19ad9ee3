"""The check of a basis change through norms.

Karbevski & Mijoski 2025, appendix C. https://arxiv.org/abs/2510.23912
"""

from typing import Any

from ..check import Check, Finding
from ..report import Record, number, percent, plain_axes, power, table
from .measure import NORMS, Settings, parts

ROUNDING = 1e-9  # of float64


def findings(record: Record) -> list[Finding]:
    measured = record["measured"]
    worst = max(entry["defect"] for entry in measured["identity"])
    wrong = min(entry["wrong_d"] for entry in measured["identity"] if "wrong_d" in entry)
    scaled = [entry["rms"] * entry["d"] ** 0.5 for entry in measured["linearity"]]
    near = [entry["alpha"][0]["deviation"] / entry["alpha"][0]["ratio"] for entry in measured["linearity"]]
    last = measured["linearity"][-1]
    undefined = last["alpha"][-1]["undefined"]
    cube = measured["shifted_cube"]
    lines = [
        Finding(
            "L(f(x)) = D A L(x) for LayerNorm, RMSNorm and DyT without bias",
            f"largest relative defect {worst:.1e}",
            worst < ROUNDING,
        ),
        Finding("another D breaks it for LayerNorm", f"relative defect at least {wrong:.1e}", wrong > 1e-4),
        Finding(
            "the metric defect of a random matrix falls as sqrt(2 / d), and |1 - alpha| with it where f exists",
            f"its root mean square times sqrt(d): {number(min(scaled))} to {number(max(scaled))}; "
            f"median of |1 - alpha| d^1.5 eps / |y|^2: {number(min(near))} to {number(max(near))}",
            max(abs(value - 2**0.5) for value in scaled) < 0.2 and max(abs(value - 0.477) for value in near) < 0.1,
        ),
        Finding(
            "for inputs beyond that, f does not exist for half of them",
            f"{percent(undefined)} at |y|^2 = {last['alpha'][-1]['ratio']:g} d^1.5 eps, d = {last['d']}",
            undefined > 0.4,
        ),
        Finding(
            "clamped singular values do not help: the largest tends to 2, the mean defect stays",
            f"at d = {last['d']}: largest {number(last['largest'])}, mean defect {number(last['clamped_mean'])}, "
            f"limit {number(measured['clamped_limit'])}",
            abs(last["clamped_mean"] - measured["clamped_limit"]) < 0.02 and last["largest"] > 1.8,
        ),
        Finding(
            "with a DyT bias beyond the scale no D does, for some A",
            f"{cube['escape_at_three']} of {cube['matrices']} random A at beta = 3 gamma, "
            f"{cube['escape_at_half']} at gamma / 2",
            cube["escape_at_three"] > 0 and cube["escape_at_half"] == 0,
        ),
    ]
    if measured["trained"]:
        lines += _trained_findings(measured["trained"])
    return lines


def _trained_findings(layers: list[dict[str, Any]]) -> list[Finding]:
    worst = max(entry["defect"] for entry in layers)
    alpha = max(entry["alpha"][1] for entry in layers)
    others = max(entry["other_norms"] for entry in layers)
    lines = [
        Finding(
            "Theorem C.2 on trained weights and activations: D' L(f(x)) = Theta D L(x)",
            f"{len(layers)} layers, largest relative defect {worst:.1e}; "
            f"the lemma through the other norms {others:.1e}",
            max(worst, others) < 1e-6,
        ),
        Finding("there alpha is far from one", f"median at most {alpha:.2g}", alpha < 0.5),
    ]
    linear = [entry["linear_error"] for entry in layers if entry["linear_error"] is not None]
    if linear:
        text = f"the best one misses {percent(min(linear))} to {percent(max(linear))} of f"
        lines.append(Finding("and f is no affine map", text, min(linear) > 0.01))
    return lines


def tables(record: Record) -> str:
    measured = record["measured"]
    last = measured["linearity"][-1]["alpha"]
    parts = [
        table(
            ("norm", "d", "largest defect", "with D off by up to 5 %"),
            [
                (
                    NORMS[entry["norm"]],
                    str(entry["d"]),
                    power(entry["defect"]),
                    power(entry["wrong_d"]) if "wrong_d" in entry else "–",
                )
                for entry in measured["identity"]
            ],
        ),
        table(
            (
                *("d", "√d · rms of Δ/‖y‖²", "√d · mean of its size", "largest σ"),
                *("clamped: mean of Δ/‖y‖²", "its spread"),
            ),
            [
                (
                    str(entry["d"]),
                    number(entry["rms"] * entry["d"] ** 0.5),
                    number(entry["mean_size"] * entry["d"] ** 0.5),
                    *(number(entry[key]) for key in ("largest", "clamped_mean")),
                    number(entry["clamped_spread"]),
                )
                for entry in measured["linearity"]
            ],
        ),
        table(
            (*("‖y‖² / (d^1.5 ε)", "d", "median size of 1 − α, where f exists", "no f for", "the same, clamped"),),
            [
                (
                    f"{at['ratio']:g}",
                    str(entry["d"]),
                    number(at["deviation"], 4),
                    percent(at["undefined"]),
                    number(at["clamped"], 4),
                )
                for index in range(len(last))
                for entry in (measured["linearity"][0], measured["linearity"][-1])
                for at in (entry["alpha"][index],)
            ],
        ),
        table(
            ("variance of x / ε", "α of the lemma's M₀: 5 %", "median", "95 %"),
            [
                (f"{entry['variance_over_eps']:g}", *(f"{value:.2g}" for value in entry["alpha"]))
                for entry in measured["lemma_alpha"]
            ],
        ),
    ]
    if measured["trained"]:
        parts.append(_trained_table(measured["trained"]))
    return "\n".join(parts)


def _trained_table(layers: list[dict[str, Any]]) -> str:
    return table(
        (
            *("model", "layer", "variance of x / ε", "κ(ΘD)", "span of D′", "defect"),
            *("α: 5 %", "median", "95 %", "‖f‖/‖x‖", "best affine map misses"),
        ),
        [
            (
                entry["model"],
                str(entry["layer"] + 1),
                f"{entry['variance_over_eps']:.2g}",
                f"{entry['condition']:.2g}",
                f"{entry['d_span']:.2g}",
                power(entry["defect"]),
                *(f"{value:.2g}" for value in entry["alpha"]),
                f"{entry['shrunk']:.2g}",
                "–" if entry["linear_error"] is None else percent(entry["linear_error"]),
            )
            for entry in layers
        ],
    )


def draw(record: Record, figure: Any) -> None:
    """Draw the defect against d, alpha against the input's size, and alpha of the lemma's M_0 with trained layers."""
    measured = record["measured"]
    figure.set_size_inches(13, 4)
    first, second, third = plain_axes(figure, 1, 3)[0]
    widths = [entry["d"] for entry in measured["linearity"]]
    first.plot(widths, [(2 / d) ** 0.5 for d in widths], color="#1b5e8c", label="√(2/d)")
    first.plot(
        widths, [entry["rms"] for entry in measured["linearity"]], "o", color="#1b5e8c", label="rms, random matrix"
    )
    first.axhline(measured["clamped_limit"], color="#a8480f", label="limit of the clamped mean")
    clamped = [entry["clamped_mean"] for entry in measured["linearity"]]
    first.plot(widths, clamped, "s", color="#a8480f", label="mean, singular values clamped to 1")
    first.set_xscale("log", base=2)
    first.set_yscale("log")
    first.set_xlabel("d")
    first.set_ylabel("metric defect Δ/‖y‖²")
    for entry, color in ((measured["linearity"][0], "#7a4fa3"), (measured["linearity"][-1], "#3c7d3c")):
        ratios = [at["ratio"] for at in entry["alpha"]]
        second.plot(
            ratios, [at["deviation"] for at in entry["alpha"]], "o-", color=color, label=f"1 − α, d = {entry['d']}"
        )
        second.plot(ratios, [at["undefined"] for at in entry["alpha"]], "x:", color=color, label="share without an f")
        second.plot(ratios, [at["clamped"] for at in entry["alpha"]], "s--", color=color, label="1 − α, clamped")
    second.set_xscale("log")
    second.set_xlabel("‖y‖² / (d^1.5 ε)")
    second.set_ylim(0, 1)
    second.set_ylabel("median size of 1 − α; share of inputs")
    at = [entry["variance_over_eps"] for entry in measured["lemma_alpha"]]
    third.plot(at, [entry["alpha"][1] for entry in measured["lemma_alpha"]], color="#1b5e8c", label="random A, median")
    for index, entry in enumerate(measured["trained"]):
        low, middle, high = entry["alpha"]
        label = "trained layers, 5 to 95 %" if index == 0 else None
        place = [entry["variance_over_eps"]]
        reach = [[middle - low], [high - middle]]
        third.errorbar(place, [middle], reach, fmt="o", color="#a8480f", markersize=3, label=label)
    third.axhline(1, color="black", linewidth=1)
    third.set_xscale("log")
    third.set_yscale("log")
    third.set_xlabel("variance of x / ε")
    third.set_ylabel("α of the lemma's M₀ (1: linear)")
    for axes in (first, second, third):
        axes.legend(frameon=False, fontsize=7)


CHECK = Check(
    name="layer-norm",
    statement="for every invertible A there are a diagonal D and an f with L(f(x)) = D A L(x)",
    source="Karbevski & Mijoski 2025, Lemma C.1, Remarks 5 and 6, Theorem C.2",
    settings=Settings,
    parts=parts,
    findings=findings,
    tables=tables,
    draw=draw,
)
