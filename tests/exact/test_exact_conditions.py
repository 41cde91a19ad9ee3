"""Matrices of prescribed condition: it is reported, refused above the limit, and bounds the error."""

import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext

import pytest
import torch
from exact_models import SKIPLESS, logits, relative, small, tolerance, weights, with_condition
from torch import Tensor

from leanqkv import LeanConfig, LeanError
from leanqkv.eliminate import linalg, parse_request, transform
from leanqkv.eliminate.transform import Transformed


def attention(slot: str, layer: int) -> str:
    return f"model.layers.{layer}.self_attn.{slot[0]}_proj.weight"


def singular(size: int) -> Tensor:
    """Exactly so: an input and an output that nothing goes through."""
    matrix = with_condition(size, 3.0)
    matrix[:, -1] = matrix[-1] = 0
    return matrix


def error(config: LeanConfig, tensors: Mapping[str, Tensor], result: Transformed) -> float:
    return relative(logits(result.config, result.tensors), logits(config, tensors))


def noise(theta: Tensor) -> Tensor:
    """Per coordinate of `x Theta`, how far rounding it reaches: its column times its row of the inverse, squared."""
    return theta.square().sum(0) * torch.linalg.inv(theta).square().sum(1)


def least_noise(theta: Tensor, heads: int) -> float:
    """The least sum of `noise` over all bases inside the heads, `sum (sum of sqrt(eig(A B)))^2 / d_k`."""
    total = 0.0
    for columns, rows in zip(theta.chunk(heads, dim=1), torch.linalg.inv(theta).chunk(heads), strict=True):
        roots = torch.linalg.eigvals(columns.T @ columns @ rows @ rows.T).real.sqrt()
        total += (roots.sum().square() / len(roots)).item()
    return total


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("slot", ["query", "key", "value", "output"])
@pytest.mark.parametrize("condition", [1e3, 1e6, 1e9])
def test_the_condition_is_reported_and_bounds_the_error(slot: str, condition: float, balance: bool) -> None:
    """An embedding that is the identity shows which change of basis was made."""
    config = small(attention_bias=True, attention_output_bias=True, tie_word_embeddings=False)
    name = attention(slot, 1)
    weight = with_condition(12, condition)
    tensors = weights(config) | {name: weight}
    tensors["model.embed_tokens.weight"][:12] = torch.eye(12)
    result = transform(config, tensors, parse_request(slot, 1, max_condition=1e10, balance=balance))
    theta = result.tensors["model.embed_tokens.weight"][:12]
    assert set(result.conditions) == {name}
    assert result.conditions[name] == pytest.approx(torch.linalg.cond(theta).item(), rel=0.01)
    assert error(config, tensors, result) <= tolerance(result.conditions)
    if not balance:
        assert result.conditions[name] == pytest.approx(condition, rel=0.01)
        product = theta.T if slot != "output" else theta.T @ weight
        assert relative(product, weight if slot != "output" else torch.eye(12)) <= tolerance(result.conditions)


SPECTRA = {
    "all equal": torch.ones(160),
    "one small": torch.cat([torch.ones(159), torch.tensor([1e-5])]),
    "one large": torch.cat([torch.tensor([1e5]), torch.ones(159)]),
    "two clusters": torch.cat([torch.linspace(1, 1.01, 80), torch.linspace(1e-4, 1.01e-4, 80)]),
    "even": torch.linspace(1, 1e-4, 160),
    "small numbers": torch.logspace(-40, -46, 160, dtype=torch.float64),
    "many small": torch.cat([torch.ones(1), torch.logspace(-6, -6.3, 159)]),
}


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("large", [False, True], ids=["all values", "the extreme two"])
def test_the_condition_of_any_spectrum(spectrum: str, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if large:  # as matrices too large for all their singular values are treated
        monkeypatch.setattr(linalg, "FULL_SPECTRUM", 0)
    config = small(hidden_size=160, num_attention_heads=4, num_hidden_layers=1)
    values = SPECTRA[spectrum].double()
    left, right = with_condition(160, 1.0, seed=1), with_condition(160, 1.0, seed=2)
    tensors = weights(config) | {attention("query", 0): left @ torch.diag(values) @ right}
    reported = transform(config, tensors, parse_request("query", 0, balance=False)).conditions[attention("query", 0)]
    assert reported == pytest.approx((values.max() / values.min()).item(), rel=0.01)


@pytest.mark.parametrize("slot", ["query", "key", "value", "output"])
def test_the_balanced_form_is_the_quietest(slot: str) -> None:
    config = small(attention_bias=True, tie_word_embeddings=False)
    name = attention(slot, 0)
    tensors = weights(config) | {name: with_condition(12, 1e3)}
    tensors["model.embed_tokens.weight"][:12] = torch.eye(12)
    plain, balanced = (
        transform(config, tensors, parse_request(slot, 0, balance=balance)).tensors["model.embed_tokens.weight"][:12]
        for balance in (False, True)
    )
    least = least_noise(plain, 3)
    assert least_noise(balanced, 3) == pytest.approx(least, rel=1e-6)
    assert noise(balanced).sum().item() == pytest.approx(least, rel=1e-6)
    assert least < 0.9 * noise(plain).sum().item()


@pytest.mark.parametrize("balance", [True, False])
def test_heads_of_unlike_size_do_no_harm(balance: bool) -> None:
    """Heads a million times larger than others: the plain form is ill conditioned, the balanced one is not."""
    config = small(mlp_skip=False)
    tensors = weights(config)
    scales = torch.tensor([1e-3, 1.0, 1e3], dtype=torch.float64).repeat_interleave(4)[:, None]
    tensors[attention("query", 1)] = with_condition(12, 2.0) * scales
    tensors[attention("key", 1)] = with_condition(12, 2.0, seed=1) / scales
    result = transform(config, tensors, parse_request("query", balance=balance))
    reported = result.conditions[attention("query", 1)]
    assert reported < 10 if balance else reported > 1e5
    assert error(config, tensors, result) <= tolerance(result.conditions)


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("slot", ["query", "key", "value", "output"])
def test_over_the_limit_is_refused_by_name_and_number(slot: str, balance: bool) -> None:
    config = small()
    name = attention(slot, 1)
    tensors = weights(config) | {name: with_condition(12, 1e10)}
    result = transform(config, tensors, parse_request(slot, 1, balance=balance, max_condition=1e12))
    number = result.conditions[name]
    assert error(config, tensors, result) <= tolerance(result.conditions)
    with pytest.raises(LeanError, match=re.escape(name)) as refusal:
        transform(config, tensors, parse_request(slot, 1, balance=balance))
    numbers = [float(text) for text in re.findall(r"\d+(?:\.\d+)?e[+-]?\d+", str(refusal.value))]
    assert numbers == [pytest.approx(number, rel=0.05), 1e8]
    for limit, allowed in ((number * 0.98, False), (number * 1.02, True)):
        request = parse_request(slot, 1, balance=balance, max_condition=limit)
        with nullcontext() if allowed else pytest.raises(LeanError, match=re.escape(name)):
            transform(config, tensors, request)


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("slot", ["query", "key", "value", "output"])
def test_singular_is_refused_whatever_the_limit(slot: str, balance: bool) -> None:
    config = small()
    for matrix in (singular(12), torch.zeros(12, 12, dtype=torch.float64)):
        tensors = weights(config) | {attention(slot, 1): matrix}
        with pytest.raises(LeanError, match=r"layers\.1\.self_attn\.\w_proj.*singular"):
            transform(config, tensors, parse_request(slot, 1, max_condition=1e300, balance=balance))


@pytest.mark.parametrize("balance", [True, False])
def test_output_projections_of_a_skipless_model_may_be_singular(balance: bool) -> None:
    """Graef 2024, M* = P M: nothing is solved with P."""
    config = small(**SKIPLESS, mlp_bias=True)
    tensors = weights(config) | {attention("output", 0): singular(12)}
    tensors[attention("output", 1)] = torch.zeros(12, 12, dtype=torch.float64)
    result = transform(config, tensors, parse_request("output", balance=balance))
    assert attention("output", 0) not in result.conditions
    assert error(config, tensors, result) <= tolerance({})


@pytest.mark.parametrize(
    "fields",
    [
        {**SKIPLESS, "attention_output_bias": True},
        {**SKIPLESS, "block_type": "parallel"},
        {"attention_skip": False},
        {"mlp_skip": False},
    ],
    ids=str,
)
def test_elsewhere_they_may_not(fields: dict[str, bool]) -> None:
    """A bias, an MLP beside it or a skip writes the same stream, and would have to be divided by P."""
    config = small(**fields)
    with pytest.raises(LeanError, match=r"layers\.0\.self_attn\.o_proj.*singular"):
        transform(config, weights(config) | {attention("output", 0): singular(12)}, parse_request("output", 0))
    tensors = weights(config) | {attention("output", 0): with_condition(12, 1e4)}
    result = transform(config, tensors, parse_request("output", 0, balance=False))
    assert result.conditions == {attention("output", 0): pytest.approx(1e4, rel=0.01)}
    assert error(config, tensors, result) <= tolerance(result.conditions)


def test_a_query_that_alone_reads_the_stream_may_be_singular() -> None:
    """Without skips, a layer that borrows keys and values reads the stream with its query alone."""
    config = small(**SKIPLESS, key_value={"type": "shared_middle", "keys": True})
    tensors = weights(config) | {attention("query", 1): singular(12)}
    result = transform(config, tensors, parse_request("query", 1))
    assert error(config, tensors, result) <= tolerance(result.conditions)


def test_a_tied_embedding_at_the_other_end_is_divided_too() -> None:
    """There the query alone reads the stream, but an average carries it to the head, which is the embedding."""
    sharing = {"type": "shared_middle", "keys": True}
    config = small(**SKIPLESS, num_hidden_layers=5, key_value=sharing, depth_average={"dilation": 3, "period": 5})
    name = attention("query", 2)
    with pytest.raises(LeanError, match=re.escape(name)):
        transform(config, weights(config) | {name: singular(12)}, parse_request("query", 2))
    tensors = weights(config) | {name: with_condition(12, 1e4)}
    result = transform(config, tensors, parse_request("query", 2, balance=False))
    assert result.conditions == {name: pytest.approx(1e4, rel=0.01)}
    assert error(config, tensors, result) <= tolerance(result.conditions)


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("condition", [1e3, 1e6])
def test_identity_blocks_report_the_worst_head(side: str, condition: float) -> None:
    config = small(norm_type="layernorm")
    name = attention(side, 1)
    tensors = weights(config)
    tensors[name][4:8, :4] = with_condition(4, condition)
    tensors[name][:4, :4], tensors[name][8:, :4] = with_condition(4, 10, 1), with_condition(4, 100, 2)
    plain = transform(config, tensors, parse_request("block-diagonal", balance=False))
    assert plain.conditions[name] == pytest.approx(condition, rel=0.01)
    assert getattr(plain.config.plan.layers[1], side).start == 0
    assert error(config, tensors, plain) <= tolerance(plain.conditions)
    with pytest.raises(LeanError, match=re.escape(name)):
        transform(config, tensors, parse_request("block-diagonal", balance=False, max_condition=condition / 2))
    searched = transform(config, tensors, parse_request("block-diagonal"))
    assert searched.conditions[name] < condition / 2
    start = getattr(searched.config.plan.layers[1], side).start
    blocks = [tensors[name][4 * head : 4 * head + 4, start : start + 4] for head in range(3)]
    worst = max(torch.linalg.cond(block).item() for block in blocks)
    assert searched.conditions[name] == pytest.approx(worst, rel=0.01)


class Watched(Mapping[str, Tensor]):
    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors, self.read = tensors, set[str]()

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@pytest.mark.parametrize("remove, layer", [("query", 0), ("output", 1), ("value,output", 0)])
@pytest.mark.parametrize("balance", [True, False])
def test_only_what_is_removed_is_read_before_it_is_asked_for(remove: str, layer: int, balance: bool) -> None:
    config = small(mlp_skip="," not in remove, attention_skip="," not in remove)
    watched = Watched(weights(config))
    result = transform(config, watched, parse_request(remove, layer, balance=balance))
    gone = {attention(slot, layer) for slot in remove.split(",")}
    assert set(result.conditions) <= watched.read <= gone
    for name in ("model.embed_positions.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"):
        if name in result.tensors:
            watched.read.clear()
            assert torch.equal(result.tensors[name], result.tensors[name])
            source = "model.embed_tokens.weight" if name == "lm_head.weight" else name
            assert watched.read - gone == {source}
