"""What a way to a smaller cache keeps of a token, and the losses of its model, window by window; for peers.py."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leanqkv.data.batches import IGNORED, collate
from leanqkv.data.evaluation import EvaluationText
from leanqkv.errors import LeanError
from leanqkv.evaluate.paired import mean_over_windows, spread_windows
from leanqkv.model.cache import cached_tensors

OURS = "leanqkv latents"
UNROTATED = "leanqkv unrotated latents"  # whose keys are cached before rotary positions, as Palu's
DECODED = 8  # tokens
Losses = list[list[float]]  # of every text and window, nats per token


def columns_for(share: float, source: int, parts: int = 1) -> int:
    """Return the most columns of `parts` layers that are within the share of the source's, so many in each."""
    return math.floor(share * source * parts + 1e-6)


def joint_rank(columns: int, kept: int, heads: int) -> int:
    """Return MHA2MLA's rank for each of so many key heads, which keep `kept` columns of keys in all; 0: too few."""
    return max(0, (columns - kept) // heads)


def group_of(heads: int) -> int:
    """Return how many key heads Palu takes together: as many of up to four, its own number, as divide all."""
    return max(size for size in range(1, 5) if heads % size == 0)


def lost(losses: Losses, before: Losses) -> list[dict[str, float | None]]:
    """Return by how much the windows' losses are above others of the same windows, for every text."""
    pairs = zip(losses, before, strict=True)
    differences = [torch.tensor(one, dtype=torch.float64) - torch.tensor(other) for one, other in pairs]
    return [mean_over_windows(found, torch.arange(len(found))) for found in differences]


def beside(amount: int, rows: Sequence[dict[str, Any]]) -> int:
    """Return how many tokens the latents are given that rows with `amount` are compared with: as many, or the most."""
    own = {row["calibration_tokens"] for row in rows if row["method"] == OURS}
    return amount if amount in own else max(own, default=amount)


def compared(rows: Sequence[dict[str, Any]], source: Losses) -> list[dict[str, Any]]:
    """Return the rows with what each loses, and what it loses beyond latents of its share (see `beside`)."""
    ours = {(row["calibration_tokens"], row["share"]): row["losses"] for row in rows if row["method"] == OURS}
    found = []
    for row in rows:
        latents = ours.get((beside(row["calibration_tokens"], rows), row["share"]))
        one = {key: value for key, value in row.items() if key != "losses"} | {"lost": lost(row["losses"], source)}
        beyond = {} if row["method"] == OURS or latents is None else {"beyond": lost(row["losses"], latents)}
        found.append({**one, **beyond, "losses": row["losses"]})
    return found


@torch.no_grad()
def losses_of(model: Any, windows: dict[str, Tensor]) -> Losses:
    """Return the loss of every window that `windows_of` returns."""
    found = []
    for number in range(len(windows) // 2):
        pairs = zip(windows[f"ids.{number}"], windows[f"targets.{number}"], strict=True)
        found.append([_loss(model, ids, wanted) for ids, wanted in pairs])
    return found


def _loss(model: Any, ids: Tensor, wanted: Tensor) -> float:
    logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
    return torch.nn.functional.cross_entropy(logits, wanted, ignore_index=IGNORED).item()


def windows_of(texts: Sequence[EvaluationText], length: int, count: int) -> dict[str, Tensor]:
    """Return inputs and targets of every text's windows, [windows, length]."""
    found = {}
    for number, text in enumerate(texts):
        starts = [start for start, _ in spread_windows(len(text.tokens), length, count)]
        batch = collate(text.tokens, starts, min(length, len(text.tokens) - 1))
        found |= {f"ids.{number}": batch["input_ids"], f"targets.{number}": batch["shift_labels"]}
    return found


@torch.no_grad()
def decoded(model: Any, ids: Tensor) -> float:
    """Return the columns of a token that `past_key_values` holds a layer after generating from ids, [1, length]."""
    options: dict[str, Any] = {"max_new_tokens": DECODED, "min_new_tokens": DECODED, "do_sample": False}
    found = model.generate(ids, return_dict_in_generate=True, **options)
    again = model.generate(ids, use_cache=False, **options)
    if not torch.equal(found.sequences, again):
        raise LeanError("decoding with a cache gives other tokens than without")
    cache = found.past_key_values
    layers = [sum(tensor.nbytes for tensor in cached_tensors(layer)) for layer in cache.layers]
    return sum(layers) / len(layers) / cache.get_seq_length() / torch.float32.itemsize
