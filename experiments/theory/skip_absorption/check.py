"""The check of skip absorption: constructed weights, random weights, and the corollary both ways.

Karbevski & Mijoski 2025, appendix E. https://arxiv.org/abs/2510.23912
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..check import Check, Finding, Parts, Progress
from ..report import Record, plain_axes, power, table
from . import statement as skips

POINTS = 1000
ROUNDING = 1e-9  # of float64, where an inverse of a random matrix may be ill-conditioned


@dataclass(frozen=True)
class Settings:
    """`widths`: (h, m) pairs; the theorem's m = 4h, and others that Remark 8 covers."""

    seed: int = 0
    widths: tuple[tuple[int, int], ...] = ((2, 4), (2, 8), (3, 6), (3, 12), (4, 8), (4, 16))
    draws: int = 100

    @classmethod
    def quick(cls) -> "Settings":
        return cls(widths=((2, 8), (3, 6)), draws=5)


def constructed(settings: Settings) -> list[dict[str, Any]]:
    """Return of absorbable weights the largest relative difference of both sides at random points, how often the
    decision procedure finds the J, and the largest difference of integer weights, which must be zero."""
    rng, entries = np.random.default_rng(settings.seed), []
    for h, m in settings.widths:
        different, least, same, exact = 0.0, 0.0, 0, 0
        for draw in range(settings.draws):
            w1, w2, chosen = skips.absorbable_weights(h, m, h + draw % (m - h + 1), rng)
            v1, v2 = skips.absorb(w1, w2, chosen)
            x = rng.standard_normal((h, POINTS))
            expected = skips.mlp(w1, w2, x, np.eye(h))
            different = max(different, _relative(skips.mlp(v1, v2, x), expected))
            decided, distance = skips.nearest_index_set(w1, w2, -np.eye(h))
            least = max(least, distance)
            same += bool((decided == chosen).all())
            exact = max(exact, integer_difference(h, m, rng))
        entries.append(
            {
                "h": h,
                "m": m,
                "draws": settings.draws,
                "difference": different,
                "distance": least,
                "same_set": same,
                "integer_difference": exact,
            }
        )
    return entries


def integer_difference(h: int, m: int, rng: np.random.Generator) -> int:
    """Return the largest difference of both sides for integer weights at integer points, in int64."""
    w1, w2, chosen = skips.absorbable_integers(h, m, rng)
    x = rng.integers(-1000, 1001, (h, POINTS))
    absorbed = skips.mlp(*skips.absorb(w1, w2, chosen), x)
    return int(np.abs(absorbed - skips.mlp(w1, w2, x, np.eye(h, dtype=np.int64))).max())


def random_weights(settings: Settings) -> list[dict[str, Any]]:
    """Return for random weights how near the best J comes to -I (Theorem E.1), and to Z' - Z for a Z' drawn on its own
    (Corollary E.2 with Z' fixed); and how far V_2 ReLU(V_1 x) of the best J is from the function."""
    rng, entries = np.random.default_rng(settings.seed + 1), []
    for h, m in settings.widths:
        distances, fixed, differences = [], [], []
        for _ in range(settings.draws):
            w1, w2 = rng.standard_normal((m, h)), rng.standard_normal((h, m))
            chosen, distance = skips.nearest_index_set(w1, w2, -np.eye(h))
            distances.append(distance)
            x = rng.standard_normal((h, POINTS))
            expected = skips.mlp(w1, w2, x, np.eye(h))
            differences.append(_relative(skips.mlp(*skips.absorb(w1, w2, chosen), x), expected))
            z, other = rng.standard_normal((2, h, h))
            fixed.append(skips.nearest_index_set(w1, w2, other - z)[1])
        entries.append(
            {
                "h": h,
                "m": m,
                "sets": 2**m,
                "distances": sorted(distances),
                "fixed_distances": sorted(fixed),
                "least_difference": min(differences),
            }
        )
    return entries


def counterexamples(settings: Settings) -> list[dict[str, Any]]:
    """Return how exactly Corollary E.2 fails as quantified, over all Z': for random (W_1, W_2, Z) and a random J of at
    least h indices."""
    rng, entries = np.random.default_rng(settings.seed + 2), []
    for h, m in settings.widths:
        different, singular = 0.0, np.inf
        for draw in range(settings.draws):
            w1, w2, z = rng.standard_normal((m, h)), rng.standard_normal((h, m)), rng.standard_normal((h, h))
            chosen = np.zeros(m, dtype=bool)
            chosen[rng.permutation(m)[: h + draw % (m - h + 1)]] = True
            other, moved = skips.moved_skip(w1, w2, z, chosen)
            x = rng.standard_normal((h, POINTS))
            different = max(different, _relative(skips.mlp(moved, w2, x, other), skips.mlp(w1, w2, x, z)))
            singular = min(singular, float(np.linalg.svd(other - z, compute_uv=False)[-1]))
        entries.append({"h": h, "m": m, "difference": different, "least_singular_value": singular})
    return entries


def _relative(output: skips.Array, expected: skips.Array) -> float:
    return float(np.abs(output - expected).max() / np.abs(expected).max())


def parts(settings: Settings, progress: Progress) -> Parts:
    return {
        "constructed": lambda: constructed(settings),
        "random": lambda: random_weights(settings),
        "counterexamples": lambda: counterexamples(settings),
    }


def findings(record: Record) -> list[Finding]:
    made, drawn, moved = (record["measured"][part] for part in ("constructed", "random", "counterexamples"))
    draws = sum(entry["draws"] for entry in made)
    difference = max(entry["difference"] for entry in made)
    integers = max(entry["integer_difference"] for entry in made)
    decided = sum(entry["same_set"] for entry in made)
    least = min(entry["distances"][0] for entry in drawn)
    fixed = min(entry["fixed_distances"][0] for entry in drawn)
    equal = max(entry["difference"] for entry in moved)
    singular = min(entry["least_singular_value"] for entry in moved)
    return [
        Finding(
            "with W_2[:, J] W_1[J, :] = -I the skip is absorbed, exactly in integers",
            f"{draws} draws: relative difference {difference:.1e}, in integers {integers}",
            difference < ROUNDING and integers == 0,
        ),
        Finding(
            "the decision procedure finds the J that was built in",
            f"{decided} of {draws}",
            decided == draws and max(entry["distance"] for entry in made) < ROUNDING,
        ),
        Finding(
            "random weights have no such J",
            f"{draws} draws, every J tried: W_2[:, J] W_1[J, :] no nearer to -I than {least:.2g}",
            least > 1e-4,
        ),
        Finding(
            "Corollary E.2 holds for a Z' that is fixed",
            f"no J nearer to Z' - Z than {fixed:.2g}",
            fixed > 1e-4,
        ),
        Finding(
            "as quantified, over all Z', it does not: Z' = Z + W_2[:, J] W_1[J, :] is the same function",
            f"relative difference {equal:.1e}, with Z' - Z invertible (smallest singular value {singular:.1e})",
            equal < ROUNDING and singular > 1e-8,
        ),
    ]


def tables(record: Record) -> str:
    made, drawn, moved = (record["measured"][part] for part in ("constructed", "random", "counterexamples"))
    return "\n".join(
        (
            table(
                ("h", "m", "draws", "difference, float64", "difference, integers", "J found again"),
                [
                    (
                        *(str(entry[key]) for key in ("h", "m", "draws")),
                        power(entry["difference"]),
                        str(entry["integer_difference"]),
                        str(entry["same_set"]),
                    )
                    for entry in made
                ],
            ),
            table(
                (
                    "h",
                    "m",
                    "index sets",
                    "to −I, nearest",
                    "median",
                    "to Z′ − Z, nearest",
                    "median",
                    "best J, difference",
                ),
                [
                    (
                        *(str(entry["h"]), str(entry["m"]), f"{entry['sets']:,}"),
                        *(
                            f"{value:.2g}"
                            for key in ("distances", "fixed_distances")
                            for value in (entry[key][0], float(np.median(entry[key])))
                        ),
                        f"{entry['least_difference']:.2g}",
                    )
                    for entry in drawn
                ],
            ),
            table(
                ("h", "m", "difference at Z′ = Z + W₂[:, J] W₁[J, :]", "smallest singular value of Z′ − Z"),
                [
                    (
                        str(entry["h"]),
                        str(entry["m"]),
                        power(entry["difference"]),
                        power(entry["least_singular_value"]),
                    )
                    for entry in moved
                ],
            ),
        )
    )


def draw(record: Record, figure: Any) -> None:
    """Draw the distances of the best J by width: random weights against constructed ones."""
    made, drawn = record["measured"]["constructed"], record["measured"]["random"]
    figure.set_size_inches(8, 4)
    axes = plain_axes(figure, 1, 1)[0, 0]
    for index, (entry, built) in enumerate(zip(drawn, made, strict=True)):
        for key, shift, color, name in (
            ("distances", -0.15, "#a8480f", "random weights, to −I"),
            ("fixed_distances", 0.15, "#1b5e8c", "random weights, to Z′ − Z with Z′ fixed"),
        ):
            heights = entry[key]
            label = name if index == 0 else None
            axes.plot([index + shift] * len(heights), heights, "o", color=color, alpha=0.4, markersize=4, label=label)
        label = "constructed weights, to −I (largest)" if index == 0 else None
        axes.plot([index], [built["distance"]], "s", color="#3c7d3c", markersize=5, label=label)
    axes.set_yscale("log")
    axes.set_xticks(range(len(drawn)), [f"h = {entry['h']}\nm = {entry['m']}" for entry in drawn])
    axes.set_ylabel("least distance over every J")
    axes.set_title("W₂[:, J] W₁[J, :]: how near the best index set comes", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="center left")


CHECK = Check(
    name="skip-absorption",
    statement="a ReLU MLP's skip can be absorbed at the same width if and only if W_2[:, J] W_1[J, :] = -I for some J",
    source="Karbevski & Mijoski 2025, Theorem E.1, Corollary E.2",
    settings=Settings,
    parts=parts,
    findings=findings,
    tables=tables,
    draw=draw,
)
