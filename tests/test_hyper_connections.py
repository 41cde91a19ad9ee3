"""Hyper-connections: they start as skip connections, mix doubly stochastically, and keep a stream's precision."""

from typing import Any

import pytest
import torch
from shapes import randomize, tiny, tokens

from leanqkv import LeanConfig, LeanForCausalLM
from leanqkv.model.hyper_connections import MODES, HyperConnection, doubly_stochastic


def model_of(config: LeanConfig) -> LeanForCausalLM:
    torch.manual_seed(0)
    return LeanForCausalLM(config).eval()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", ["gpt", "llama"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"norm_type": "none", "norm_eps": 1e-5}, {"block_type": "parallel"}, {"num_hidden_groups": 1}],
    ids=str,
)
def test_starts_as_skip_connections(shape: str, mode: str, fields: dict[str, Any]) -> None:
    """The same weights, the same logits and the same hidden states; mHC's mappings are float32 numbers at the start."""
    connected = tiny(shape, f"hyper-connections:streams=3,mode={mode}", **fields)
    ids = tokens(2, 9)
    plain, found = (
        model_of(config).double()(input_ids=ids, output_hidden_states=True)
        for config in (tiny(shape, **fields), connected)
    )
    eps = torch.finfo(torch.float32 if mode == "mhc" else torch.float64).eps
    for one, other in zip((plain.logits, *plain.hidden_states), (found.logits, *found.hidden_states), strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= 20 * eps * one.abs().max()


@pytest.mark.parametrize("block", ["serial", "parallel"])
def test_sublayers_first_read_one_stream_after_another(block: str) -> None:
    model = model_of(tiny("gpt", "hyper-connections:streams=3,mode=static", block_type=block, num_hidden_layers=4))
    found = [one for one in model.modules() if isinstance(one, HyperConnection)]
    read = [int(one.initial_values()["pre"].argmax()) for one in found]
    assert read == [number % 3 for number in range(8 if block == "serial" else 4)]


@pytest.mark.parametrize("mode", MODES)
def test_streams_part_in_training(mode: str) -> None:
    """Equal streams with equal gradients would stay one stream. Each sublayer first reads another of them."""
    model = model_of(tiny("gpt", f"hyper-connections:mode={mode}")).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=tokens(4, 12), labels=tokens(4, 12)).loss.backward()
        optimizer.step()
    streams: list[torch.Tensor] = []
    model.model.layers[-1].register_forward_hook(lambda _module, _inputs, output: streams.append(output[3]))
    model.eval()(input_ids=tokens(1, 5))
    [last] = streams
    assert (last - last.mean(-2, keepdim=True)).abs().max() > 1e-5 * last.abs().max()


@pytest.mark.parametrize("size", [0.0, 1.0, 5.0, 300.0])
def test_mixing_is_doubly_stochastic(size: float) -> None:
    """After 20 iterations rows add up to one, and columns nearly; nothing underflows, nor does a gradient."""
    logits = (size * torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(0))).requires_grad_()
    matrix = doubly_stochastic(logits)
    assert torch.allclose(matrix.sum(-1), torch.ones(5, 4), atol=1e-5) and (matrix >= 0).all()
    if size <= 1:
        assert torch.allclose(matrix.sum(-2), torch.ones(5, 4), atol=1e-5)
    matrix.square().sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_keeps_its_precision_under_autocast(mode: str) -> None:
    """As a stream with skip connections does: what is added may be bfloat16, the sum is float32."""
    connection = HyperConnection(tiny("gpt"), mode, 4, 1)
    randomize(connection)
    streams = torch.randn(2, 3, 4, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        read, write = connection(streams)
        found = write(read.bfloat16())
    wide, expected = connection(streams)
    assert read.dtype == found.dtype == torch.float32
    torch.testing.assert_close(read, wide, rtol=0, atol=0)
    torch.testing.assert_close(found, expected(read.bfloat16()), rtol=0, atol=0)


def test_counts() -> None:
    """Static: n^2 + 2 n numbers a sublayer. Dynamic: n + 2 more for every feature, and two scales. mHC: n^2 + 2 n for
    every feature of every stream, and three."""
    n, d, sublayers = 4, 32, 6
    plain = sum(p.numel() for p in LeanForCausalLM(tiny("gpt")).parameters())
    expected = {"static": 0, "dynamic": (n + 2) * d + 2, "mhc": n * d * n * (n + 2) + 3}
    for mode, more in expected.items():
        model = LeanForCausalLM(tiny("gpt", f"hyper-connections:mode={mode}"))
        assert sum(p.numel() for p in model.parameters()) - plain == sublayers * (n * (n + 2) + more)
        assert model.config.plan.kv_bytes_per_token(torch.float32) == tiny("gpt").plan.kv_bytes_per_token(torch.float32)
