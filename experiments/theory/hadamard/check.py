"""The check of the block Hadamard form: random shapes, grouped queries and masks.

Karbevski & Mijoski 2025, appendix A. https://arxiv.org/abs/2510.23912
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..check import Check, Finding, Parts, Progress
from ..report import Record, power, table
from . import statement as hadamard

MASKS = ("none", "causal", "window", "random")
ROUNDING = 1e-12  # sums of at most a few hundred products of order one, in float64


@dataclass(frozen=True)
class Settings:
    seed: int = 0
    cases: int = 400
    largest_groups: int = 4
    largest_group_size: int = 4
    largest_head_width: int = 16
    largest_length: int = 24

    @classmethod
    def quick(cls) -> "Settings":
        return cls(cases=40, largest_length=8)


def make_mask(kind: str, length: int, generator: torch.Generator) -> Tensor:
    """Return [length, length] of 0 and -inf; every token sees itself."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    if kind == "causal":
        seen = distance >= 0
    elif kind == "window":
        seen = (distance >= 0) & (distance < 3)
    elif kind == "random":
        seen = (torch.rand(length, length, generator=generator) < 0.5) | (distance == 0)
    else:
        seen = torch.ones(length, length, dtype=torch.bool)
    return torch.zeros(length, length, dtype=torch.float64).masked_fill(~seen, -torch.inf)


def compare_cases(settings: Settings) -> list[dict[str, Any]]:
    """Compare equation 2 with the same attention head by head, with torch's, and with itself under a block-diagonal
    change (Proposition 3.2). Return per kind of heads and mask the cases and the largest differences."""
    generator = torch.Generator().manual_seed(settings.seed)

    def whole(last: int) -> int:
        return int(torch.randint(1, last + 1, (), generator=generator))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    entries: dict[tuple[str, str], dict[str, Any]] = {}
    for _ in range(settings.cases):
        groups, size = whole(settings.largest_groups), whole(settings.largest_group_size)
        heads, width, length = groups * size, whole(settings.largest_head_width), whole(settings.largest_length)
        kind = "MHA" if groups == heads else "MQA" if groups == 1 else "GQA"
        mask_kind = MASKS[whole(len(MASKS)) - 1]
        d = heads * width
        x, wq, wk, wv = normal(length, d), normal(d, d), normal(d, groups * width), normal(d, groups * width)
        wq, wk, wv = wq / d**0.5, wk / d**0.5, wv / d**0.5
        mask = make_mask(mask_kind, length, generator)
        blocks = hadamard.block_attention(x, wq, wk, wv, mask, heads, groups)
        differences = {
            "by_heads": _difference(blocks, hadamard.attention_by_heads(x, wq, wk, wv, mask, heads, groups), blocks),
            "torch": _difference(blocks, _torch_attention(x, wq, wk, wv, mask, heads, groups), blocks),
        }
        entry = entries.setdefault((kind, mask_kind), {"heads": kind, "mask": mask_kind, "cases": 0, "invariance": 0.0})
        if groups == heads:
            # Well-conditioned blocks: an orthogonal one times a scale.
            q = torch.linalg.qr(normal(heads, width, width)).Q * (0.5 + torch.rand(heads, 1, 1, generator=generator))
            changed = hadamard.block_diagonal_change(wq, wk, q)
            differences["invariance"] = _difference(
                blocks, hadamard.block_attention(x, *changed, wv, mask, heads), blocks
            )
        entry["cases"] += 1
        for name, value in differences.items():
            entry[name] = max(entry.get(name, 0.0), value)
    return [entries[key] for key in sorted(entries)]


def mixing_heads(settings: Settings) -> dict[str, float]:
    """Return the difference under a D that mixes the heads: as large as the output, not rounding."""
    generator = torch.Generator().manual_seed(settings.seed + 1)
    heads, width, length = 4, 4, 8
    d = heads * width
    x, wq, wk, wv, whole = torch.randn(5, d, d, generator=generator, dtype=torch.float64)
    x, whole = x[:length], torch.linalg.qr(whole).Q
    mask = torch.zeros(length, length, dtype=torch.float64)
    before = hadamard.block_attention(x, wq / 4, wk / 4, wv / 4, mask, heads)
    after = hadamard.block_attention(x, wq / 4 @ whole, wk / 4 @ whole, wv / 4, mask, heads)
    return {"difference": _difference(before, after, before)}


def _difference(first: Tensor, second: Tensor, scale: Tensor) -> float:
    return float((first - second).abs().max() / scale.abs().max())


def _torch_attention(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, mask: Tensor, heads: int, groups: int) -> Tensor:
    def split(projected: Tensor, count: int) -> Tensor:
        return projected.unflatten(1, (count, -1)).transpose(0, 1)[None]

    attended = F.scaled_dot_product_attention(
        split(x @ wq, heads), split(x @ wk, groups), split(x @ wv, groups), attn_mask=mask, enable_gqa=True
    )
    return attended[0].transpose(0, 1).flatten(1)


def parts(settings: Settings, progress: Progress) -> Parts:
    return {"cases": lambda: compare_cases(settings), "mixing_heads": lambda: mixing_heads(settings)}


def findings(record: Record) -> list[Finding]:
    cases = record["measured"]["cases"]
    count = sum(entry["cases"] for entry in cases)
    worst = max(max(entry["by_heads"], entry["torch"]) for entry in cases)
    invariance = max(entry["invariance"] for entry in cases)
    mixed = record["measured"]["mixing_heads"]["difference"]
    return [
        Finding(
            "equation 2 is attention head by head, and torch's",
            f"{count} random cases, largest relative difference {worst:.1e}",
            worst < ROUNDING,
        ),
        Finding(
            "a block-diagonal D cancels between W_Q and W_K (Proposition 3.2)",
            f"largest relative difference {invariance:.1e}",
            invariance < ROUNDING,
        ),
        Finding("one that mixes heads does not", f"relative difference {mixed:.2f}", mixed > 0.01),
    ]


def tables(record: Record) -> str:
    rows = [
        (
            entry["heads"],
            entry["mask"],
            str(entry["cases"]),
            power(entry["by_heads"]),
            power(entry["torch"]),
            power(entry["invariance"]) if entry["heads"] == "MHA" else "–",
        )
        for entry in record["measured"]["cases"]
    ]
    head = ("heads", "mask", "cases", "against head by head", "against torch", "under a block-diagonal D")
    return table(head, rows)


CHECK = Check(
    name="hadamard",
    statement="attention written with block Hadamard products is attention, and sees X only through its projections",
    source="Karbevski & Mijoski 2025, equation 2, Propositions 3.2 and A.2",
    settings=Settings,
    parts=parts,
    findings=findings,
    tables=tables,
    draw=None,
)
