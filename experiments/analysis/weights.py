"""Which weights matter: singular values of attention's matrices, and how far its logits spread.

Condition numbers say how near W_Q, W_K, W_V and W_O are to not being invertible, which the exact eliminations need;
the spread is in `evaluate.observe`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from leanqkv.evaluate.observe import logit_spreads
from leanqkv.model.causal_lm import LeanForCausalLM
from leanqkv.model.config import LeanConfig
from leanqkv.model.registry import ConfigError
from leanqkv.model.shapes import parameter_shapes

# Of each spectrum as many singular values are kept, evenly over the ranks, the first and the last among them.
SPECTRUM_POINTS = 17

# The mechanisms of QUERIES whose first logits are compared, with the scale that sets the identity query apart.
QUERY_KINDS: Mapping[str, dict[str, Any]] = {
    "linear": {"type": "linear"},
    "identity, scale 1": {"type": "identity", "scale": 1.0},
    "identity, scale ½": {"type": "identity", "scale": 0.5},
    "nonlinear": {"type": "nonlinear"},
    "residual": {"type": "residual"},
    "from_mlp": {"type": "from_mlp"},
}


def attention_spectra(
    config: LeanConfig, tensors: Mapping[str, Tensor], progress: Callable[[], None] = lambda: None
) -> list[dict[str, dict[str, Any]]]:
    """Return per layer the spectra of its attention's matrices, by name within it (`q_proj`, `q_proj.down_proj`, …).

    Args:
        tensors: a checkpoint's, under our names.
        progress: called after each layer.

    Returns:
        of each matrix its `shape`, `condition` (largest over smallest singular value, infinite where that is zero),
        `stable_rank` (squared Frobenius norm over squared spectral norm) and `singular_values`, SPECTRUM_POINTS of
        them at most; computed in float64.
    """
    shapes, spectra = parameter_shapes(config), []
    for plan in config.plan.layers:
        prefix = f"model.layers.{plan.block}.self_attn."
        names = [name for name, shape in shapes.items() if name.startswith(prefix) and len(shape) == 2]
        spectra.append({n.removeprefix(prefix).removesuffix(".weight"): _spectrum(tensors[n]) for n in names})
        progress()
    return spectra


def _spectrum(weight: Tensor) -> dict[str, Any]:
    values = torch.linalg.svdvals(weight.double())
    ranks = torch.linspace(0, len(values) - 1, min(len(values), SPECTRUM_POINTS)).round().long()
    largest, smallest = values[0].item(), values[-1].item()
    return {
        "shape": list(weight.shape),
        "condition": largest / smallest if smallest else float("inf"),
        "stable_rank": (values.square().sum() / values[0].square()).item() if largest else 0.0,
        "singular_values": values[ranks].tolist(),
    }


def initial_model(config: LeanConfig, seed: int) -> LeanForCausalLM:
    """Return the model that training starts from with that seed; torch's own random state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LeanForCausalLM(config).eval()


def initial_spreads(
    config: LeanConfig, tokens: Tensor, seed: int, progress: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Return `logit_spreads` before training, with every kind of query that fits `config`'s shape in place of its own.

    progress: called after each of QUERY_KINDS.
    """
    spreads = {}
    for name, query in QUERY_KINDS.items():
        try:
            model = initial_model(LeanConfig(**{**config.as_overrides(), "query": [query]}), seed)
        except ConfigError:
            continue
        finally:
            progress()
        spreads[name] = logit_spreads(model, tokens)
    return spreads
