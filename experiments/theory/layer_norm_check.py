"""The check of a basis change through norms: the identity, how linear f is, and trained activations.

Karbevski & Mijoski 2025, appendix C. https://arxiv.org/abs/2510.23912
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import layer_norm as norms
from .check import Check, Finding, Progress, measured
from .layer_norm import FLOAT
from .report import Record, number, percent, plain_axes, power, table
from .trained import NormInput, norm_inputs

NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "dyt": "DyT"}
ROUNDING = 1e-9


@dataclass(frozen=True)
class Settings:
    """`models`: directories of trained checkpoints; the record names them by their last part."""

    seed: int = 0
    eps: float = 1e-5
    widths: tuple[int, ...] = (8, 64, 256)
    scales: tuple[float, ...] = (1e-3, 1.0, 1e3)  # of the inputs
    draws: int = 5
    defect_widths: tuple[int, ...] = (16, 64, 256, 1024)
    matrices: int = 6
    vectors: int = 2000
    ratios: tuple[float, ...] = (0.01, 0.1, 1.0, 10.0, 100.0)  # ||y||^2 / (d^{3/2} eps)
    variances: tuple[float, ...] = (1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3, 1e4, 1e5)  # over eps
    models: tuple[str, ...] = ()
    tokens: int = 8192
    context: int = 256

    @classmethod
    def quick(cls) -> "Settings":
        return cls(widths=(8, 32), draws=2, defect_widths=(32, 128), matrices=4, vectors=1000, tokens=1024)


def identity(settings: Settings) -> list[dict[str, Any]]:
    """Random A and inputs of several sizes: the largest relative defect of the identity, and the least with every entry
    of D off by up to five per cent, each way."""
    generator = torch.Generator().manual_seed(settings.seed)
    found = []
    for norm in NORMS:
        for d in settings.widths:
            worst, broken = 0.0, float("inf")
            for _ in range(settings.draws):
                a = torch.randn(d, d, generator=generator, dtype=FLOAT)
                made = norms.conjugacy(a, norm)
                # Kept small enough to stay in the ball or cube, so that it is D's direction that is wrong.
                off = 0.95 + 0.05 * torch.rand(d, generator=generator, dtype=FLOAT)
                wrong = 0.5 * (off * made.diagonal)[:, None] * a
                for scale in settings.scales:
                    x = scale * torch.randn(50, d, generator=generator, dtype=FLOAT)
                    worst = max(worst, float(norms.defect(x, made.matrix, norm, settings.eps).max()))
                    if norm == "layernorm":
                        broken = min(broken, float(norms.defect(x, wrong, norm, settings.eps).median()))
            entry = {"norm": norm, "d": d, "defect": worst}
            found.append(entry | ({"wrong_d": broken} if norm == "layernorm" else {}))
    return found


def linearity(settings: Settings) -> list[dict[str, Any]]:
    """Remark 5's random matrices against d: the metric defect, plain and clamped, and alpha at several input sizes."""
    found = []
    for d in settings.defect_widths:
        defects = norms.random_defects(d, settings.matrices, settings.vectors, settings.seed)
        entry: dict[str, Any] = {
            "d": d,
            "rms": float(defects.plain.square().mean().sqrt()),
            "mean_size": float(defects.plain.abs().mean()),
            "clamped_mean": float(defects.clamped.mean()),
            "clamped_spread": float(defects.clamped.std()),
            "largest": defects.largest,
            "alpha": [],
        }
        for ratio in settings.ratios:
            deviation, undefined = norms.alpha_deviation(defects.plain, ratio, d)
            clamped, _ = norms.alpha_deviation(defects.clamped, ratio, d)
            entry["alpha"].append({"ratio": ratio, "deviation": deviation, "undefined": undefined, "clamped": clamped})
        found.append(entry)
    return found


def lemma_alpha(settings: Settings) -> list[dict[str, Any]]:
    """alpha of the lemma's own M_0 for random A, against the variance of the input over eps: 5, 50 and 95 %."""
    generator = torch.Generator().manual_seed(settings.seed + 1)
    d, found = settings.widths[-1], []
    matrices = [
        norms.conjugacy(torch.randn(d, d, generator=generator, dtype=FLOAT), "layernorm").matrix
        for _ in range(settings.draws)
    ]
    for variance in settings.variances:
        size = (variance * settings.eps) ** 0.5
        alphas = [
            norms.contraction(
                size * torch.randn(200, d, generator=generator, dtype=FLOAT), matrix, "layernorm", settings.eps
            )
            for matrix in matrices
        ]
        found.append({"d": d, "variance_over_eps": variance, "alpha": _quantiles(torch.cat(alphas))})
    return found


def trained(settings: Settings) -> list[dict[str, Any]]:
    """Per model and layer, Theorem C.2 with `Theta = W_Q` and D the norm's weight, on the stream that enters it."""
    found = []
    for model in settings.models:
        norm, eps, layers = norm_inputs(Path(model), settings.tokens, settings.context)
        for layer, given in enumerate(layers):
            found.append({"model": Path(model).name, "layer": layer, "norm": norm, **trained_layer(given, norm, eps)})
    return found


def trained_layer(given: NormInput, norm: str, eps: float) -> dict[str, Any]:
    """`D' L(f(x)) = Theta D L(x)` with `D' = D_lambda^-1`: its defect; what D' spans; alpha; how linear f is. And the
    defect of the lemma's identity for the same A and x through the other norms."""
    a = given.theta * given.weight
    made = norms.conjugacy(a, norm)
    f = norms.carried(given.stream, made.matrix, norm, eps)
    expected = norms.normalised(given.stream, norm, eps) @ a.T
    reached = norms.normalised(f, norm, eps) / made.diagonal
    alpha = norms.contraction(given.stream, made.matrix, norm, eps)
    centred = given.stream - given.stream.mean(-1, keepdim=True) if norm == "layernorm" else given.stream
    scale = made.diagonal.abs()
    return {
        "defect": float(((reached - expected).norm(dim=-1) / expected.norm(dim=-1)).max()),
        "condition": float(torch.linalg.cond(a)),
        "d_span": float(scale.max() / scale.min()),
        "variance_over_eps": float(centred.square().mean(-1).median() / eps),
        "alpha": _quantiles(alpha),
        "shrunk": float((f.norm(dim=-1) / centred.norm(dim=-1)).median()),
        # Fitted to a few tokens per unknown or not at all: with fewer it is the fit that misses.
        "linear_error": norms.linear_error(given.stream, f) if len(f) >= 8 * f.shape[1] else None,
        "other_norms": max(
            float(norms.defect(given.stream, norms.conjugacy(a, other).matrix, other, eps).max())
            for other in NORMS
            if other != norm
        ),
    }


def shifted_cube(settings: Settings) -> dict[str, Any]:
    """DyT with a bias: for how many random A no D keeps the cube, with `|beta| = gamma / 2` and `3 gamma` (d = 8)."""
    generator = torch.Generator().manual_seed(settings.seed + 2)
    matrices = torch.randn(200, 8, 8, generator=generator, dtype=FLOAT)
    return {
        "matrices": len(matrices),
        "escape_at_half": sum(norms.shifted_box_escape(a, -0.5, 1.5) for a in matrices),
        "escape_at_three": sum(norms.shifted_box_escape(a, 2.0, 4.0) for a in matrices),
    }


def _quantiles(values: Tensor) -> list[float]:
    return torch.quantile(values, torch.tensor([0.05, 0.5, 0.95], dtype=values.dtype)).tolist()


def run(settings: Settings, progress: Progress) -> dict[str, Any]:
    parts = {
        "identity": lambda: identity(settings),
        "linearity": lambda: linearity(settings),
        "clamped_limit": norms.clamped_defect_limit,
        "lemma_alpha": lambda: lemma_alpha(settings),
        "shifted_cube": lambda: shifted_cube(settings),
        "trained": lambda: trained(settings),
    }
    named = replace(settings, models=tuple(Path(model).name for model in settings.models))
    return measured(CHECK, named, parts, progress)


def findings(record: Record) -> list[Finding]:
    found = record["measured"]
    worst = max(entry["defect"] for entry in found["identity"])
    wrong = min(entry["wrong_d"] for entry in found["identity"] if "wrong_d" in entry)
    scaled = [entry["rms"] * entry["d"] ** 0.5 for entry in found["linearity"]]
    near = [entry["alpha"][0]["deviation"] / entry["alpha"][0]["ratio"] for entry in found["linearity"]]
    last = found["linearity"][-1]
    undefined = last["alpha"][-1]["undefined"]
    cube = found["shifted_cube"]
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
            f"limit {number(found['clamped_limit'])}",
            abs(last["clamped_mean"] - found["clamped_limit"]) < 0.02 and last["largest"] > 1.8,
        ),
        Finding(
            "with a DyT bias beyond the scale no D does, for some A",
            f"{cube['escape_at_three']} of {cube['matrices']} random A at beta = 3 gamma, "
            f"{cube['escape_at_half']} at gamma / 2",
            cube["escape_at_three"] > 0 and cube["escape_at_half"] == 0,
        ),
    ]
    if found["trained"]:
        lines += _trained_findings(found["trained"])
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
        found = f"the best one misses {percent(min(linear))} to {percent(max(linear))} of f"
        lines.append(Finding("and f is no affine map", found, min(linear) > 0.01))
    return lines


def tables(record: Record) -> str:
    found = record["measured"]
    last = found["linearity"][-1]["alpha"]
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
                for entry in found["identity"]
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
                for entry in found["linearity"]
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
                for entry in (found["linearity"][0], found["linearity"][-1])
                for at in (entry["alpha"][index],)
            ],
        ),
        table(
            ("variance of x / ε", "α of the lemma's M₀: 5 %", "median", "95 %"),
            [
                (f"{entry['variance_over_eps']:g}", *(f"{value:.2g}" for value in entry["alpha"]))
                for entry in found["lemma_alpha"]
            ],
        ),
    ]
    if found["trained"]:
        parts.append(_trained_table(found["trained"]))
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
    """The defect against d, alpha against the input's size, and alpha of the lemma's M_0 with trained layers on it."""
    found = record["measured"]
    figure.set_size_inches(13, 4)
    first, second, third = plain_axes(figure, 1, 3)[0]
    widths = [entry["d"] for entry in found["linearity"]]
    first.plot(widths, [(2 / d) ** 0.5 for d in widths], color="#1b5e8c", label="√(2/d)")
    first.plot(widths, [entry["rms"] for entry in found["linearity"]], "o", color="#1b5e8c", label="rms, random matrix")
    first.axhline(found["clamped_limit"], color="#a8480f", label="limit of the clamped mean")
    clamped = [entry["clamped_mean"] for entry in found["linearity"]]
    first.plot(widths, clamped, "s", color="#a8480f", label="mean, singular values clamped to 1")
    first.set_xscale("log", base=2)
    first.set_yscale("log")
    first.set_xlabel("d")
    first.set_ylabel("metric defect Δ/‖y‖²")
    for entry, color in ((found["linearity"][0], "#7a4fa3"), (found["linearity"][-1], "#3c7d3c")):
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
    at = [entry["variance_over_eps"] for entry in found["lemma_alpha"]]
    third.plot(at, [entry["alpha"][1] for entry in found["lemma_alpha"]], color="#1b5e8c", label="random A, median")
    for index, entry in enumerate(found["trained"]):
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
    run=run,
    findings=findings,
    tables=tables,
    draw=draw,
)
