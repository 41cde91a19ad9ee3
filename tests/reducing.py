"""Sweeps over tiny models under every reduction, and the regression of W_O by hand."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from converting import BIASES, build
from shapes import tokens
from torch import Tensor

from leanqkv import LeanConfig, LeanForCausalLM
from leanqkv.convert.latents import Latents
from leanqkv.convert.merged_values import MergedValues
from leanqkv.convert.output_fit import RIDGES
from leanqkv.convert.sweeps import Converted, Reduction, Sweeps

Model = tuple[LeanConfig, dict[str, Tensor]]
EPS = torch.finfo(torch.float32).eps
LLAMA_BIASES = BIASES | {"norm_bias": False}
THREES = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 4}
SMALL = {"hidden_size": 24, "intermediate_size": 16}

# Sources that are converted without loss where their values allow it: shape, mechanisms, fields.
SOURCES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "gpt": ("gpt", (), {}),
    "gpt with biases": ("gpt", (), BIASES),
    "value bias alone": ("gpt", (), {"attention_bias": True}),
    "output bias alone": ("llama", (), {"attention_output_bias": True}),
    "llama": ("llama", (), {}),
    "gqa": ("llama", ("gqa",), {}),
    "groups of three": ("llama", (), LLAMA_BIASES | THREES),
    "parallel": ("gpt", (), {"block_type": "parallel"}),
    "parallel, one norm": ("llama", (), {"block_type": "parallel_shared_norm"}),
    "no attention skip": ("llama", (), {"attention_skip": False}),
    "no skips": ("gpt", (), {"attention_skip": False, "mlp_skip": False}),
    "norms after": ("llama", (), {"norm_placement": "after"}),
    "norms before and after": ("llama", (), {"norm_placement": "both"} | LLAMA_BIASES),
    "no norms": ("gpt", (), {"norm_type": "none"}),
    "dyt": ("llama", (), {"norm_type": "dyt", "head_dim": 6}),
    "residual_multiplier": ("llama", (), {"residual_multiplier": 0.3}),
    "multipliers": ("llama", (), {"embedding_multiplier": 3.0, "residual_multiplier": 2.0}),
    "qk_norm": ("llama", ("gqa",), {"qk_norm": True}),
    "windows": ("llama", (), {"sliding_window": 4, "window_layers": [0, 2]}),
    "identity query": ("gpt", ("identity-query",), {}),
    "residual query, identity key": ("llama", ("residual-query", "identity-key"), {}),
    "nonlinear query": ("gpt", ("nonlinear-query",), {}),
    "nonlinear query and key": ("gpt", ("nonlinear-query", "nonlinear-key:layers=0,1"), {}),
    "moe": ("llama", (), {"mlp_type": "moe", "num_local_experts": 4}),
    "no positions": ("gpt", (), {"position_embedding_type": "none"}),
}

# Every kind of reduction, and several at once.
KINDS: dict[str, Callable[[Model], list[Reduction]]] = {
    "merged": lambda model: [MergedValues(*model)],
    "latents": lambda model: [Latents(*model, 0.8)],
    "all at once": lambda model: [
        *(Latents(*model, 0.8), MergedValues(*model), Latents(*model, 0.9), Latents(*model, 0.8, separate=True)),
    ],
}


def normals(seed: int = 0) -> Callable[..., Tensor]:
    return partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sample_of(config: LeanConfig, sequences: int, length: int = 12, seed: int = 5) -> np.ndarray:
    return tokens(sequences, length, config.vocab_size, seed).numpy()


def sweeping(
    model: Model, sample: np.ndarray, directory: Path, reductions: str | Sequence[Reduction], **options: Any
) -> Sweeps:
    """`reductions`: a kind of KINDS, or the reductions themselves. Four sequences at a time, if not said otherwise."""
    directory.mkdir(exist_ok=True)
    chosen = KINDS[reductions](model) if isinstance(reductions, str) else reductions
    return Sweeps(*model, sample, directory, chosen, **{"batch_size": 4, **options})


def sweep(model: Model, sample: np.ndarray, directory: Path, reductions: str | Sequence[Reduction], **options: Any):
    """The models converted by every reduction."""
    return sweeping(model, sample, directory, reductions, **options).run()


def merge(
    model: Model, sample: np.ndarray, directory: Path, ratio: float = 0.5, layers: Any = None, **options: Any
) -> Converted:
    (converted,) = sweep(model, sample, directory, [MergedValues(*model, ratio, layers)], **options)
    return converted


def to_latents(
    model: Model,
    sample: np.ndarray,
    directory: Path,
    share: float,
    layers: Any = None,
    keys: bool = True,
    separate: bool = False,
    unrotated: bool = False,
    **options: Any,
) -> Converted:
    reduction = Latents(*model, share, layers, keys, separate, unrotated)
    (converted,) = sweep(model, sample, directory, [reduction], **options)
    return converted


def eager(config: LeanConfig, tensors) -> LeanForCausalLM:
    model = build(config, tensors)
    model.set_attn_implementation("eager")
    return model


def seen_by_hooks(model: Model, sample: np.ndarray):
    """The stream before every layer and its values, by layer, and the patterns of all layers."""
    reference, streams, values = eager(*model), {}, {}
    for i, layer in enumerate(reference.model.layers):
        layer.register_forward_pre_hook(lambda m, x, i=i: streams.update({i: x[0]}))
        layer.self_attn.v_proj.register_forward_hook(lambda m, x, y, i=i: values.update({i: y}))
    patterns = reference(torch.from_numpy(sample), output_attentions=True).attentions
    return streams, values, patterns


def ridge_by_hand(features: Tensor, target: Tensor, start: Tensor, strength: float) -> Tensor:
    damping = (strength * features.square().sum(0).mean()).sqrt()
    rows = torch.cat((features, damping * torch.eye(features.shape[1], dtype=torch.float64)))
    return torch.linalg.lstsq(rows, torch.cat((target, damping * start))).solution


def fit_by_hand(parts: list[tuple[Tensor, Tensor]], start: Tensor) -> tuple[Tensor, float | None, float]:
    """`parts`: features and target of the fit, and of what is held out."""
    (features, target), (held_features, held_target) = parts

    def missed(output: Tensor) -> float:
        return float((held_target - held_features @ output).square().sum() / held_target.square().sum())

    errors = {strength: missed(ridge_by_hand(features, target, start, strength)) for strength in RIDGES}
    best = min(errors, key=errors.__getitem__)
    if missed(start) <= errors[best]:
        return start, None, missed(start)
    everything = [torch.cat((a, b)) for a, b in zip(*parts, strict=True)]
    return ridge_by_hand(*everything, start, best), best, errors[best]


def assert_same(found: Any, expected: dict[str, Tensor]) -> None:
    assert dict(found).keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
