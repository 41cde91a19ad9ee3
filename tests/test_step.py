"""The kernels of a decoding step beside attention: against formulas in float64, and in the place of modules."""

import copy

import pytest
import torch
from decoding import build
from shapes import tokens
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from leanqkv.inference import Decoder
from leanqkv.inference.decoder import prepared
from leanqkv.inference.step import ROWS, FusedNorm, HeadProduct, Product, fused_hidden, fused_rotate
from leanqkv.model.latent_heads import LatentHeadsAttention
from leanqkv.model.layers import GatedMLP, OffsetRMSNorm
from leanqkv.model.position import rotate

pytestmark = pytest.mark.usefixtures("needs_compiler")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Numbers with NaN behind them in memory, which nobody may read."""
    size = torch.Size(shape).numel()
    memory = torch.full((size + 64,), torch.nan, dtype=dtype)
    memory[:size] = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return memory[:size].view(shape)


def assert_rounded(found: Tensor, expected: Tensor, size: Tensor | float, terms: int) -> None:
    """Whether `found` is `expected`, summed in float32 of so many terms of absolute sum `size`, and rounded once."""
    error = (found.double() - expected).abs()
    allowed = (terms + 8) * 2**-24 * size + torch.finfo(found.dtype).eps * expected.abs() + 2**-24
    assert found.isfinite().all() and bool((error <= allowed).all())


@every_dtype
@pytest.mark.parametrize("inputs, outputs", [(32, (16,)), (1, (1,)), (37, (5, 16, 33)), (100, (17,)), (576, (64, 3))])
def test_products(dtype: torch.dtype, inputs: int, outputs: tuple[int, ...]) -> None:
    maps = [
        (drawn(n, inputs, dtype=dtype, seed=n), drawn(n, dtype=dtype, seed=1) if i % 2 else None)
        for i, n in enumerate(outputs, len(outputs))
    ]
    product = Product(maps)
    for rows in range(1, ROWS + 2):
        x = drawn(rows, 1, inputs, dtype=dtype, seed=rows)
        with torch.inference_mode():
            results = product(x)
        for found, (weight, bias) in zip(results, maps, strict=True):
            assert found.shape == (rows, 1, len(weight)) and found.dtype == dtype
            added = torch.zeros(1).double() if bias is None else bias.double()
            size = F.linear(x.double().abs(), weight.double().abs()) + added.abs()
            assert_rounded(found, F.linear(x.double(), weight.double()) + added, size, inputs)


@every_dtype
def test_a_row_with_nan_spoils_no_other(dtype: torch.dtype) -> None:
    weight, x = drawn(20, 40, dtype=dtype), drawn(6, 40, dtype=dtype)
    x[2, 39] = torch.nan
    with torch.inference_mode():
        (found,) = Product([(weight, None)])(x)
        normed = FusedNorm(nn.RMSNorm(40, eps=1e-6).to(dtype))(x)
    for result in (found, normed):
        assert result[2].isnan().all() and result[[0, 1, 3, 4, 5]].isfinite().all()


def test_weights_are_read_where_they_lie() -> None:
    linear = nn.Linear(24, 8, bias=False)
    model = nn.Sequential(linear)
    product, x = Product([(linear.weight, None)]), torch.randn(2, 24)
    with torch.inference_mode():
        before = linear(x)
        assert torch.allclose(product(x)[0], before, atol=1e-5)
    with torch.no_grad():
        linear.weight.mul_(2)
    with torch.inference_mode():
        assert torch.allclose(product(x)[0], 2 * before, atol=1e-5)
        model.to(torch.float16)  # its memory is another one; the product keeps what it has read
        assert product(x.half())[0].dtype == torch.float16


@pytest.mark.parametrize("way", ["gradients", "another dtype", "autocast", "transposed weight", "two dtypes"])
def test_pytorch_computes_the_rest(way: str) -> None:
    linear, x = nn.Linear(24, 8), torch.randn(2, 24)
    maps = [(linear.weight, linear.bias)]
    if way == "gradients":
        x.requires_grad_()
        (found,) = Product(maps)(x)
        found.sum().backward()
        assert x.grad is not None and linear.weight.grad is not None
    elif way == "another dtype":
        with torch.inference_mode(), pytest.raises(RuntimeError, match="dtype"):
            Product(maps)(x.double())
    elif way == "autocast":
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            assert Product(maps)(x)[0].dtype == torch.bfloat16
    elif way == "transposed weight":
        turned = torch.randn(24, 8).t()
        with torch.inference_mode():
            assert torch.allclose(Product([(turned, None)])(x)[0], x @ turned.t(), atol=1e-5)
    else:
        mixed = [*maps, (linear.weight.double(), None)]
        assert not Product(mixed).readable


@every_dtype
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("width", [1, 20, 64, 577])
def test_norms(dtype: torch.dtype, offset: float, width: int) -> None:
    norm = OffsetRMSNorm(width, 1e-5, offset) if offset else nn.RMSNorm(width, eps=1e-5)
    norm.weight = nn.Parameter(drawn(width, dtype=dtype, seed=3))
    fused = FusedNorm(norm)
    for shape in ((1,), (3, 1), (2, 5, 3)):
        x = drawn(*shape, width, dtype=dtype, seed=len(shape))
        wide = x.double()
        weight = norm.weight.double() + offset
        expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
        with torch.inference_mode():
            assert_rounded(fused(x), expected, expected.abs(), width)
            assert_rounded(fused(x.transpose(0, -2).contiguous().transpose(0, -2)), expected, expected.abs(), width)


@every_dtype
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [2, 20, 64, 577])
def test_layer_norms(dtype: torch.dtype, bias: bool, width: int) -> None:
    norm = nn.LayerNorm(width, eps=1e-5, bias=bias)
    norm.weight = nn.Parameter(drawn(width, dtype=dtype, seed=3))
    if bias:
        norm.bias = nn.Parameter(drawn(width, dtype=dtype, seed=4))
    fused = FusedNorm(norm)
    for shape in ((1,), (2, 5, 3)):
        x = drawn(*shape, width, dtype=dtype, seed=len(shape)) + 2  # a mean that is not next to zero
        wide = x.double()
        far = wide - wide.mean(-1, keepdim=True)
        scale = (far.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight.double()
        added = norm.bias.double() if bias else torch.zeros(1).double()
        with torch.inference_mode():
            assert_rounded(fused(x), far * scale + added, (wide.abs() + wide.mean()) * scale.abs() + added.abs(), width)


@every_dtype
@pytest.mark.parametrize("head_dim, turned", [(8, 8), (64, 64), (20, 12), (6, 2), (80, 66)])
@pytest.mark.parametrize("batch, positions, tables", [(1, 1, 1), (3, 1, 3), (3, 1, 1), (2, 7, 2), (2, 7, 1)])
def test_rotary_positions(dtype: torch.dtype, head_dim: int, turned: int, batch: int, positions: int, tables: int):
    heads = drawn(batch, positions, 3, head_dim, dtype=dtype).transpose(1, 2)
    cos, sin = (drawn(tables, positions, turned, dtype=dtype, seed=seed) for seed in (1, 2))
    expected = rotate(heads.double(), (cos.double(), sin.double()))
    size = rotate(heads.double().abs(), (cos.double().abs(), sin.double().abs()))
    with torch.inference_mode():
        assert_rounded(fused_rotate(heads, (cos, sin)), expected, size, 2)


@every_dtype
@pytest.mark.parametrize("name", ["silu", "swish", "gelu_pytorch_tanh", "gelu_new", "gelu"])
@pytest.mark.parametrize("shape", ["llama", "gpt"])
def test_activations(dtype: torch.dtype, name: str, shape: str) -> None:
    """Of gates, and alone."""
    mlp = build(shape, hidden_act=name).model.layers[0].mlp
    gates = torch.cat((drawn(33, dtype=dtype) * 4, torch.tensor([-30000.0, -30.0, 0.0, 30.0, 30000.0]).to(dtype)))
    up = drawn(len(gates), dtype=dtype, seed=1) if shape == "llama" else torch.ones_like(gates)
    if shape == "llama":
        mlp.project = lambda hidden_states: (gates, up)
    else:
        mlp.up_proj = nn.Identity()
    with torch.inference_mode():
        found = fused_hidden(mlp)(gates)
    act = ACT2FN["gelu_pytorch_tanh" if name == "gelu_new" else name]
    expected = act(gates.double()) * up.double()
    # Against the largest term of the GELU's own cancellation.
    assert_rounded(found, expected, (gates.double() * up.double()).abs(), 64)
    gates[5] = torch.nan
    with torch.inference_mode():
        assert fused_hidden(mlp)(gates).isnan().nonzero().tolist() == [[5]]


GEMMA = {"norm_placement": "both", "qk_norm": True, "norm_offset": 1.0, "hidden_act": "gelu_pytorch_tanh"}
# By name: the shape, its fields, and whether what comes before and after attention is one call.
MODELS = {
    "llama": ("llama", (), {}, (True, True)),
    "gemma": ("llama", ("gqa",), GEMMA, (True, True)),
    "biases": ("llama", (), {"attention_bias": True, "mlp_bias": True}, (True, True)),
    "a part turned": (
        "llama",
        (),
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        (True, True),
    ),
    "borrowed values": ("llama", ("gqa", "skipv1"), {}, (True, True)),
    "values mixed by their token": ("llama", ("resformer:mode=per_token",), {}, (True, True)),
    "norms after": ("llama", (), {"norm_placement": "after", "qk_norm": "width"}, (False, True)),
    "residual multiplier": ("llama", (), {"residual_multiplier": 0.5}, (True, False)),
    "no skip": ("llama", (), {"mlp_skip": False}, (True, False)),
    "parallel": ("llama", (), {"block_type": "parallel"}, (True, False)),
    "GPT": ("gpt", (), {}, (True, True)),
    "GPT with biases": (
        "gpt",
        ("skipv1",),
        {"norm_bias": True, "mlp_bias": True, "attention_bias": True},
        (True, True),
    ),
    "identity query": ("llama", ("identity-query",), {}, (True, True)),
    "identity key, norms of heads": ("llama", ("identity-key",), {"qk_norm": True}, (True, True)),
    "identities without positions": (
        "llama",
        ("identity-query", "identity-value"),
        {"position_embedding_type": "learned"},
        (True, True),
    ),
    "keys and values of another layer": ("llama", ("cla",), {"num_hidden_layers": 4}, (True, True)),
    "nonlinear query": ("llama", ("nonlinear-query",), {}, (True, True)),
    "nonlinear query alone": ("llama", ("nonlinear-query", "identity-key", "identity-value"), {}, (False, True)),
    "nonlinear query without norms": ("llama", ("nonlinear-query:norm_in=false,norm_out=false",), {}, (True, True)),
    "nonlinear query with relu": ("llama", ("nonlinear-query:activation=relu",), {}, (False, True)),
    "linear anchors": (
        "llama",
        ("nonlinear-query:anchor=linear", "nonlinear-key:anchor=linear", "nonlinear-value:anchor=linear"),
        {"qk_norm": True},
        (True, True),
    ),
    "grouped heads with linear anchors": (
        "llama",
        ("gqa", "nonlinear-query", "nonlinear-value:anchor=linear"),
        {},
        (True, True),
    ),
    "slices of the input": ("llama", ("skipv1", "nonlinear-value"), {}, (False, True)),
    "residual query": ("llama", ("residual-query",), {}, (True, True)),
    "mlp query": ("llama", ("mlp-query",), {}, (False, False)),
    "latents": ("llama", ("latent-keys",), {}, (False, True)),
    "latent values": ("llama", ("latent-values",), {}, (False, True)),
    "latent values, norms of heads": ("llama", ("latent-values",), {"qk_norm": True}, (False, True)),
    "both latents": ("llama", ("latent-keys", "latent-values"), {}, (False, True)),
    "values from keys": ("llama", ("values-from-keys",), {}, (False, True)),
    "latents without positions": (
        "llama",
        ("latent-keys", "latent-values"),
        {"position_embedding_type": "learned"},
        (False, True),
    ),
    "mla": ("llama", ("mla",), {}, (False, True)),
}


@pytest.mark.parametrize("name", MODELS)
@every_dtype
def test_halves_of_layers(name: str, dtype: torch.dtype) -> None:
    """Which of them are one call, and that these give what their modules give."""
    shape, mechanisms, fields, expected = MODELS[name]
    model = build(shape, *mechanisms, **fields).to(dtype)
    decoder, wide = Decoder(model), copy.deepcopy(model).double()
    for block in decoder.model.model.layers[1:]:
        usual = expected == (True, True) or type(block.self_attn) is LatentHeadsAttention
        mixes = getattr(block.self_attn, "mixer", None) is not None
        assert ("forward" in vars(block)) == (usual and not mixes)
        found = tuple(
            name in vars(part) for name, part in (("project_heads", block.self_attn), ("after_attention", block))
        )
        assert found == expected
    for rows in (1, 2, 5, 8, 11, ROWS, ROWS + 1):
        ids = tokens(rows, 6)
        with torch.no_grad():
            plain = model(ids).logits[:, 4:].double()
            exact = wide(ids).logits[:, 4:]
        logits = [decoder.prefill(ids[:, :5], room=1), decoder.step(ids[:, 5])]
        error, theirs = ((found - exact).abs().max() for found in (torch.stack(logits, 1).double(), plain))
        assert error <= 2 * theirs + 4 * torch.finfo(dtype).eps * exact.abs().max()


PLACES = ["mlp", "mlp.activation", "mlp.down_proj", "mlp.up_proj", "post_attention_layernorm"]
ATTENTION_PLACES = ["self_attn", "self_attn.o_proj", "self_attn.k_proj", "input_layernorm"]


@pytest.mark.parametrize("place", PLACES + ATTENTION_PLACES)
def test_hooks_run(place: str) -> None:
    model, seen = build("llama"), []
    module = model.model.layers[1].get_submodule(place)
    module.register_forward_hook(lambda module, given, output: seen.append(place))
    decoder = Decoder(model)
    blocks = decoder.model.model.layers
    assert ["forward" in vars(block) for block in blocks[:2]] == [True, False]
    assert ["after_attention" in vars(block) for block in blocks[:2]] == [True, place in ATTENTION_PLACES]
    decoder.prefill(tokens(1, 4), room=1)
    decoder.step(tokens(1, 1)[:, 0])
    assert seen == [place] * 2


def test_weights_of_attention_are_still_given() -> None:
    model = build("llama")
    model.set_attn_implementation("eager")
    ids, decoder = tokens(2, 4), Decoder(model)
    with torch.inference_mode():
        expected = model(ids[:, :1], output_attentions=True)
        found = decoder.model(ids[:, :1], output_attentions=True)
    assert len(found.attentions) == len(expected.attentions) > 0
    assert torch.allclose(found.logits, expected.logits, atol=1e-4)


def test_the_model_stays_as_it_is() -> None:
    model = build("llama")
    before = {name: (type(module), set(vars(module))) for name, module in model.named_modules()}
    copied = prepared(model)
    assert {name: (type(module), set(vars(module))) for name, module in model.named_modules()} == before
    assert {id(weight) for weight in copied.parameters()} == {id(weight) for weight in model.parameters()}
    assert isinstance(copied.model.layers[0].mlp, GatedMLP) and isinstance(copied.model.norm, FusedNorm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_by_head(dtype, needs_compiler):
    """Of queries that share a head's map, with and without a bias, and odd widths."""
    for batch, heads, group, inputs, outputs in ((1, 3, 3, 160, 64), (2, 1, 5, 7, 33), (3, 4, 1, 64, 161)):
        generator = torch.Generator().manual_seed(inputs)
        weight, bias, given = (
            torch.randn(shape, generator=generator).to(dtype)
            for shape in ((heads, outputs, inputs), (heads, outputs), (batch, heads * group, inputs))
        )
        for added in (None, bias):
            with torch.no_grad():
                found = HeadProduct(weight, added)(given)
            expected = torch.einsum("bhgi,hoi->bhgo", given.double().unflatten(1, (heads, group)), weight.double())
            expected = (expected + (0 if added is None else added.double()[:, None])).flatten(1, 2)
            eps = torch.finfo(dtype).eps * (4 if dtype == torch.float32 else 1)
            assert found is not None and (found.double() - expected).abs().max() <= eps * expected.abs().max()
    assert HeadProduct(weight)(given[:, :-1].double()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [(1, 0, 3, 2), (40, 1, 0, 31)], ids=str)
def test_queries_on_complex_columns(dtype, columns, needs_compiler):
    """Every pair of a query's numbers meets the columns of its own frequency alone; in loops."""
    generator = torch.Generator().manual_seed(sum(columns))
    for batch, heads, group in ((1, 3, 3), (3, 2, 1), (2, 1, 40)):
        weight = torch.randn(heads, sum(columns), 2, generator=generator).to(dtype)
        query = torch.randn(batch, heads * group, 8, generator=generator).to(dtype)
        with torch.no_grad():
            found = HeadProduct(weight, columns=columns, inputs=8)(query)
        expected = torch.zeros(batch, heads * group, 2 * sum(columns), dtype=torch.complex128)
        places = [f for f, count in enumerate(columns) for _ in range(count)]
        for column, f in enumerate(places):
            for head in range(heads * group):
                own = torch.view_as_complex(weight.double())[head // group, column]
                asked = torch.complex(query[:, head, f].double(), query[:, head, 4 + f].double())
                expected[:, head, column] = own.conj() * asked
        expected = torch.cat((expected[..., : sum(columns)].real, expected[..., : sum(columns)].imag), -1)
        eps = torch.finfo(dtype).eps * (4 if dtype == torch.float32 else 1)
        assert found is not None and (found.double() - expected).abs().max() <= eps * expected.abs().max()
