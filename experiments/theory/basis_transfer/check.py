"""The check of basis transfer: a trained MLP with a skip against the best linear map.

Karbevski & Mijoski 2025, appendix D. https://arxiv.org/abs/2510.23912
"""

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from ..check import Check, Finding, Parts, Progress
from ..report import Record, number, percent, plain_axes, table
from . import statement as transfer
from .statement import READINGS, Recipe

PUBLISHED = {"linear": (0.11, 0.14), "mlp": (0.04, 0.06)}  # relative error over d = 256, 512, 768
COLORS = ("#1b5e8c", "#a8480f")


@dataclass(frozen=True)
class Settings:
    """Reduced width, steps and batch; `paper()` has the paper's. `readings`: those that are trained."""

    seed: int = 0
    widths: tuple[int, ...] = (32, 64, 128)
    readings: tuple[str, ...] = transfer.FITTING
    recipe: Recipe = field(default_factory=Recipe)

    @classmethod
    def quick(cls) -> "Settings":
        recipe = Recipe(steps=1500, batch_size=256, learning_rate=1e-2, evaluation=2000, ridge_samples=20_000)
        return cls(widths=(16,), recipe=recipe)

    @classmethod
    def paper(cls) -> "Settings":
        recipe = Recipe(
            steps=20_000,
            batch_size=65_536,
            learning_rate=2e-3,
            warmup_steps=500,
            evaluation=65_536,
            ridge_samples=500_000,
        )
        return cls(widths=(256, 512, 768), recipe=recipe)


def transfers(settings: Settings, progress: Progress) -> list[dict[str, Any]]:
    """Return relative error and cosine distance of the best linear map and the trained MLP, by reading and width."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recipe, entries = settings.recipe, []
    jobs = [(reading, d) for reading in settings.readings for d in settings.widths]
    for done, (reading, d) in enumerate(jobs):

        def report(step: int, done: int = done) -> None:
            progress("training steps", done * recipe.steps + step, len(jobs) * recipe.steps)

        begin = time.perf_counter()
        target = transfer.Target(
            *(part.to(device) for part in transfer.make_target(d, READINGS[reading], settings.seed))
        )
        draws = torch.Generator(device).manual_seed(10_000 + settings.seed)
        linear = transfer.streaming_ridge(target, recipe.ridge_samples, recipe.ridge, draws).float()
        student = transfer.train(target, recipe, settings.seed, report)
        with torch.no_grad():
            x = torch.randn(recipe.evaluation, d, generator=draws, device=device)
            expected = target(x)
            outputs = {"linear": x @ linear.T, "limit": x @ transfer.best_linear(target).float().T, "mlp": student(x)}
            entries.append(
                {"reading": reading, "d": d, "device": device}
                | {f"{name}_error": transfer.relative_error(output, expected) for name, output in outputs.items()}
                | {f"{name}_cosine": transfer.cosine_distance(output, expected) for name, output in outputs.items()}
                | {"seconds": round(time.perf_counter() - begin, 1)}
            )
    return entries


def parts(settings: Settings, progress: Progress) -> Parts:
    return {
        "readings": lambda: [
            {"reading": name, "linear_error": transfer.large_width_error(reading)} for name, reading in READINGS.items()
        ],
        "transfers": lambda: transfers(settings, progress),
    }


def findings(record: Record) -> list[Finding]:
    entries = record["measured"]["transfers"]
    widths = ", ".join(str(d) for d in record["settings"]["widths"])
    off = max(abs(entry["linear_error"] / entry["limit_error"] - 1) for entry in entries)
    better = min(entry["linear_error"] / entry["mlp_error"] for entry in entries)
    low, high = (pick(entry["mlp_error"] for entry in entries) for pick in (min, max))
    lines = sorted({round(entry["linear_error"], 3) for entry in entries})
    return [
        Finding(
            "the linear baseline is the best linear map in closed form",
            f"its error differs by at most {percent(off, 2)}",
            off < 0.02,
        ),
        Finding(
            "the trained MLP is better than the best linear map",
            f"d = {widths}: by a factor of at least {number(better, 1)}",
            better > 1.3,
        ),
        Finding(
            "its relative error is near the paper's 4 to 6 %",
            f"{percent(low)} to {percent(high)}, linear {percent(lines[0])} to {percent(lines[-1])} "
            "(published 11 to 14 %, at d = 256 to 768)",
            high < 0.075,
        ),
    ]


def tables(record: Record) -> str:
    measured = record["measured"]
    return "\n".join(
        (
            table(
                ("how W₁ and W₂ are normalised", "best linear map, d → ∞"),
                [(entry["reading"], percent(entry["linear_error"])) for entry in measured["readings"]],
            ),
            table(
                (
                    *("reading", "d", "linear, ridge", "linear, closed form", "MLP", "ratio"),
                    *("1 − cosine, linear", "1 − cosine, MLP"),
                ),
                [
                    (
                        entry["reading"],
                        str(entry["d"]),
                        *(percent(entry[key]) for key in ("linear_error", "limit_error", "mlp_error")),
                        number(entry["linear_error"] / entry["mlp_error"], 1),
                        *(number(entry[key], 4) for key in ("linear_cosine", "mlp_cosine")),
                    )
                    for entry in measured["transfers"]
                ],
            ),
        )
    )


def draw(record: Record, figure: Any) -> None:
    """Draw relative error and cosine distance against d, with the published ranges."""
    left, right = plain_axes(figure, 1, 2)[0]
    entries = record["measured"]["transfers"]
    for name, label in (("linear", "published, linear"), ("mlp", "published, MLP")):
        left.axhspan(*(100 * edge for edge in PUBLISHED[name]), color="#555555", alpha=0.12, linewidth=0)
        place = {"xy": (0.76, 100 * PUBLISHED[name][0] + 0.15), "xycoords": ("axes fraction", "data")}
        left.annotate(label, fontsize=8, **place)
    for reading, color in zip(record["settings"]["readings"], COLORS, strict=False):
        shown = [entry for entry in entries if entry["reading"] == reading]
        widths = [entry["d"] for entry in shown]
        for name, style in (("linear", "s--"), ("mlp", "o-")):
            label = f"{'MLP' if name == 'mlp' else 'linear'}: {reading}"
            left.plot(widths, [100 * entry[f"{name}_error"] for entry in shown], style, color=color, label=label)
            right.plot(widths, [entry[f"{name}_cosine"] for entry in shown], style, color=color, label=label)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(record["settings"]["widths"], map(str, record["settings"]["widths"]))
        axes.set_xlabel("d")
        axes.set_ylim(bottom=0)
    left.set_ylabel("relative error, %")
    right.set_ylabel("1 − mean cosine")
    left.legend(frameon=False, fontsize=8, loc="lower right")


CHECK = Check(
    name="basis-transfer",
    statement="a GELU MLP with a skip learns another in a changed basis, to 4 to 6 %; no linear map comes near",
    source="Karbevski & Mijoski 2025, equation 3, appendix D",
    settings=Settings,
    parts=parts,
    findings=findings,
    tables=tables,
    draw=draw,
)
