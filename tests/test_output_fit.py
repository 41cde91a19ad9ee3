"""W_O by ridge regression: its sums, its strength and its tokens' weights, against explicit features."""

import numpy as np
import pytest
import torch
from converting import build, source
from reducing import EPS, SMALL, fit_by_hand, normals
from shapes import assert_near
from torch import Tensor

from leanqkv.convert import output_fit
from leanqkv.convert.heads import felt_output, split_heads
from leanqkv.convert.output_fit import SINK, Fit, felt_weights, fit_output, token_weights


def fits(columns: int = 6, noise: float = 0.5, seed: int = 0) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Features and target of the fit and of what is held out, and the start."""
    normal = normals(seed)
    start = normal(columns, 4)
    true = start + 0.3 * normal(columns, 4)
    parts = []
    for rows in (20, 12):
        features = normal(rows, columns)
        parts.append((features, features @ true + noise * normal(rows, 4)))
    return parts, start


def test_the_strength_is_the_one_that_misses_least() -> None:
    chosen = set()
    for seed, noise in enumerate(np.geomspace(0.01, 10, 24)):
        parts, start = fits(noise=noise, seed=seed)
        sums = Fit(), Fit()
        for fit, (features, target) in zip(sums, parts, strict=True):
            for rows in (slice(0, 5), slice(5, None)):
                fit.add(features[rows], target[rows])
        output, strength, missed = fit_output(*sums, start)
        expected, best, error = fit_by_hand(parts, start)
        assert strength == best
        assert_near(output, expected, 1e-10)
        assert missed == pytest.approx(error, rel=1e-9)
        assert missed <= sums[1].missed(start)
        chosen.add(strength)
    assert None in chosen and len(chosen) > 4


def test_what_is_right_already_stays() -> None:
    parts, start = fits(noise=0.0)
    sums = Fit(), Fit()
    for fit, (features, _) in zip(sums, parts, strict=True):
        fit.add(features, features @ start)
    output, _, missed = fit_output(*sums, start)
    assert missed < 1e-13
    assert_near(output, start, 1e-12)


def test_the_strength_of_a_wide_target_is_found_on_mixtures(monkeypatch) -> None:
    """Of its columns; nearly always the same one, and the fit and what it misses are those of all columns."""
    monkeypatch.setattr(output_fit, "MANY", 8)
    monkeypatch.setattr(output_fit, "SKETCHED", 64)
    same = 0
    for seed, noise in enumerate(np.geomspace(0.03, 3, 12)):
        normal = normals(seed)
        start, parts = normal(6, 200), []
        true = start + 0.3 * normal(6, 200)
        sums = Fit(), Fit()
        for fit, rows in zip(sums, (20, 12), strict=True):
            features = normal(rows, 6)
            parts.append((features, features @ true + noise * normal(rows, 200)))
            fit.add(*parts[-1])
        output, strength, missed = fit_output(*sums, start)
        expected, best, error = fit_by_hand(parts, start)
        same += strength == best
        if strength == best:
            assert_near(output, expected, 1e-10)
            assert missed == pytest.approx(error, rel=1e-9)
    assert same >= 10
    normal = normals()
    matrix = normal(5, 300)
    assert float(output_fit.sketched(matrix).square().sum()) == pytest.approx(float(matrix.square().sum()), rel=0.3)
    assert output_fit.sketched(normal(5, 7)).shape == (5, 7)


def test_token_weights_and_sinks() -> None:
    stream = normals()(3, 7, 16)
    stream[1, 2] *= 2 * SINK**0.5 / stream[1, 2].square().mean().sqrt()
    stream[2, 4] *= 0.5 * SINK**0.5 / stream[2, 4].square().mean().sqrt()
    stream[0, 3] = 0
    stream[0, 6] *= 1e-6
    weights, sinks = token_weights(stream.float(), 1e-6)
    assert sinks.nonzero().tolist() == [[1, 2]]
    for b, t in np.ndindex(3, 7):
        square = sum(float(x) ** 2 for x in stream[b, t]) / 16
        assert float(weights[b, t]) == pytest.approx((square + 1e-6) ** -0.5, rel=1e-6)
    assert weights.max() <= 1e3 * (1 + EPS)


NORMS = {
    "rmsnorm": {"norm_placement": "after"},
    "gemma's": {"norm_placement": "both", "norm_offset": 1.0},
    "layernorm": {"norm_placement": "both", "norm_type": "layernorm"},
    "dyt": {"norm_placement": "after", "norm_type": "dyt"},
    "before": {},
}


@pytest.mark.parametrize("name", NORMS)
@torch.no_grad()
def test_an_error_counts_as_the_norm_behind_attention_lets_it(name: str) -> None:
    """Against the norm's derivative: of errors across attention's output, which is all that such a norm passes on."""
    config, tensors = source("llama", **SMALL | NORMS[name])
    block, normal, layer = build(config, tensors).model.layers[1], normals(), 1
    attended, error = normal(2, 3, config.hidden_size), normal(2, 3, config.hidden_size)
    if config.norm_type == "dyt":  # where it is not saturated
        attended = 1e-6 * attended
    if config.norm_type == "layernorm":
        error = error - error.mean(-1, keepdim=True)
        attended = attended - attended.mean(-1, keepdim=True)
    error = error - attended * (error * attended).sum(-1, keepdim=True) / attended.square().sum(-1, keepdim=True)
    _, passed = torch.func.jvp(block.attention_output_layernorm, (attended,), (error,))
    heads = split_heads(config, tensors, layer)
    columns = felt_output(config, tensors, layer) / heads.output.mT  # what each of the output's is multiplied by
    assert_near(error * felt_weights(block, attended)[..., None] * columns[0, 0, 0], passed, 1e-8)
