"""GPT-2 with its norms trained away (eps 1e12, weights 1e6 gamma): eliminated exactly, against plain loops."""

import math
from pathlib import Path

import pytest
import torch
from exact_models import logits, relative, small, tolerance, weights
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from leanqkv import LeanConfig, LeanError, LeanForCausalLM
from leanqkv.checkpoints.disabled_norms import without_norms
from leanqkv.eliminate import eliminate_directory, parse_request

D, HEADS, LAYERS = 12, 3, 3
IDS = torch.randint(17, (2, 7), generator=torch.Generator().manual_seed(5))
EXACT = 1e-9


def gpt2(scale: float = 1.0, seed: int = 0) -> GPT2LMHeadModel:
    """As the LayerNorm-free GPT-2s on the hub are stored; `scale` is that of the embeddings, and so of the stream."""
    config = GPT2Config(
        vocab_size=17,
        n_embd=D,
        n_head=HEADS,
        n_layer=LAYERS,
        n_positions=16,
        layer_norm_epsilon=1e12,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if ".ln_" in name and name.endswith("weight"):
                parameter.copy_(1e6 * (1 + 0.2 * drawn))
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * drawn)
            else:
                parameter.copy_(drawn * (scale if ".wte." in name or ".wpe." in name else len(parameter) ** -0.5))
    return model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    gpt2().save_pretrained(tmp_path / "hub")
    return tmp_path / "hub"


def norm_free(weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """The function without norms, position by position and head by head: centre, times gamma, plus bias."""
    w = {name: tensor.double() for name, tensor in weights.items()}

    def centred(x: Tensor, norm: str) -> Tensor:
        mean = sum(x.tolist()) / D
        return (x - mean) * (w[f"{norm}.weight"] / 1e6) + w[f"{norm}.bias"]

    def gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    stream = [w["transformer.wte.weight"][t] + w["transformer.wpe.weight"][i] for i, t in enumerate(tokens)]
    width = D // HEADS
    for layer in range(LAYERS):
        block = f"transformer.h.{layer}"
        joined = []
        for x in stream:
            joined.append(
                centred(x, f"{block}.ln_1") @ w[f"{block}.attn.c_attn.weight"] + w[f"{block}.attn.c_attn.bias"]
            )
        after = []
        for i, x in enumerate(stream):
            heads = []
            for h in range(HEADS):
                at = slice(h * width, (h + 1) * width)
                scores = [
                    (joined[i][:D][at] @ joined[j][D : 2 * D][at]).item() / math.sqrt(width) for j in range(i + 1)
                ]
                powers = [math.exp(score - max(scores)) for score in scores]
                heads.append(sum(power / sum(powers) * joined[j][2 * D :][at] for j, power in enumerate(powers)))
            attended = torch.cat(heads) @ w[f"{block}.attn.c_proj.weight"] + w[f"{block}.attn.c_proj.bias"]
            y = x + attended
            hidden = gelu(centred(y, f"{block}.ln_2") @ w[f"{block}.mlp.c_fc.weight"] + w[f"{block}.mlp.c_fc.bias"])
            after.append(y + hidden @ w[f"{block}.mlp.c_proj.weight"] + w[f"{block}.mlp.c_proj.bias"])
        stream = after
    return torch.stack([w["transformer.wte.weight"] @ centred(x, "transformer.ln_f") for x in stream])


def reference(source: Path) -> Tensor:
    weights = load_file(source / "model.safetensors")
    return torch.stack([norm_free(weights, row) for row in IDS.tolist()])


@torch.no_grad()
def ours(directory: Path) -> Tensor:
    """The stored result, built plainly."""
    config = LeanConfig.from_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model = LeanForCausalLM(config).double().eval()
    model.load_state_dict(tensors, strict=True)
    return model(input_ids=IDS).logits


@pytest.mark.parametrize("slot", ["query", "key", "value"])
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.slow
def test_the_function_without_norms_is_kept(slot: str, layer: int, source: Path, tmp_path: Path) -> None:
    request = parse_request(slot, layer)
    certificate = eliminate_directory(source, tmp_path / "out", request, dtype=torch.float64)
    assert relative(ours(tmp_path / "out"), reference(source)) <= EXACT
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    module = f"model.layers.{layer}.self_attn.{slot[0]}_proj"
    assert f"{module}.weight" not in tensors
    assert tensors[f"{module}.bias"].any()
    assert certificate["exact"]["relative"] <= EXACT


def test_what_is_certified_is_the_trick_apart(tmp_path: Path) -> None:
    """The disabled norms are off by about var / 2e12; the elimination is not."""
    differences = {}
    for scale in (1.0, 30.0):
        source, out = tmp_path / f"hub{scale:.0f}", tmp_path / f"out{scale:.0f}"
        model = gpt2(scale)
        model.save_pretrained(source)
        certificate = eliminate_directory(source, out, parse_request("query", 1), dtype=torch.float64)
        wanted = reference(source)
        with torch.no_grad():
            trick = relative(model.double()(input_ids=IDS).logits, wanted)
        assert relative(ours(out), wanted) <= min(EXACT, tolerance(certificate["conditions"]))
        assert certificate["exact"]["relative"] <= tolerance(certificate["conditions"])
        differences[scale] = trick, certificate["disabled_norms"]["relative"]
    for trick, reported in differences.values():
        assert trick / 30 < reported < 30 * trick  # on other tokens than these
    assert differences[1.0][0] < 1e-10
    assert 100 * differences[1.0][0] < differences[30.0][0] < 1e-7


@pytest.mark.parametrize("slot", ["query", "key", "value"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_as_stock_gpt2(slot: str, dtype: torch.dtype, source: Path, tmp_path: Path) -> None:
    """The class centres again: the basis must keep the mean zero. The identity is there to the last bit."""
    layer = 1
    out = tmp_path / "out"
    certificate = eliminate_directory(source, out, parse_request(slot, layer), dtype=dtype, stock=True)
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype=dtype)
    assert isinstance(model, GPT2LMHeadModel)
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    parts = model.transformer.h[layer].attn.c_attn.weight.split(D, dim=1)
    assert torch.equal(parts[("query", "key", "value").index(slot)], torch.eye(D, dtype=dtype))
    with torch.no_grad():
        computed = model.double().eval()(input_ids=IDS).logits
    rounding = torch.finfo(torch.float32).eps * max(certificate["conditions"].values())
    assert relative(computed, reference(source)) <= (EXACT if dtype == torch.float64 else rounding)


def test_stock_needs_heads_whose_basis_is_free(source: Path, tmp_path: Path) -> None:
    with pytest.raises(LeanError, match=r"\w+ \w+ \w+"):
        eliminate_directory(source, tmp_path / "out", parse_request("output", 1), stock=True)
    assert not (tmp_path / "out").exists()


def test_norms_that_act_are_not_taken_away(tmp_path: Path) -> None:
    """An ordinary epsilon, or a stream so large that even 1e12 is little beside it, is no norm disabled."""
    model = gpt2()
    model.config.layer_norm_epsilon = 1e-5
    model.save_pretrained(tmp_path / "hub")
    with pytest.raises(LeanError, match=r"[Nn]orm"):
        eliminate_directory(tmp_path / "hub", tmp_path / "out", parse_request("query", 1))
    assert not (tmp_path / "out").exists()


def test_all_layers_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(LeanError, match=r"layer 0.*layer 1"):
        eliminate_directory(source, tmp_path / "out", parse_request("query"))


MULTIPLIERS = {
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 3.0,
}
DISABLED = {"norm_type": "layernorm", "norm_bias": True, "norm_eps": 1e12}


def test_multipliers_are_taken_along() -> None:
    """The last norm's bias goes into an MLP's, which the stream takes times the residual multiplier."""
    config = small(**DISABLED, **MULTIPLIERS)
    tensors = weights(config)
    tensors |= {name: 1e6 * tensor for name, tensor in tensors.items() if "norm.weight" in name}
    assert tensors["model.norm.bias"].any()
    new, without = without_norms(config, tensors)
    assert new.norm_type == "none"
    assert relative(logits(new, without), logits(config, tensors)) <= EXACT


@pytest.mark.parametrize("placement", ["after", "both"])
def test_norms_after_the_sublayers_stay(placement: str) -> None:
    with pytest.raises(LeanError, match=f"norm_placement is '{placement}'"):
        without_norms(small(**DISABLED, norm_placement=placement), {})


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_the_bias_of_a_norm_becomes_that_of_latent_keys(position: str, biases: bool) -> None:
    """They have theirs before they are rotated."""
    config = small(
        norm_type="layernorm",
        norm_eps=1e12,
        norm_bias=True,
        attention_bias=biases,
        position_embedding_type=position,
        key=[{"type": "latent", "rank": 6}],
    )
    tensors = weights(config)
    for name in tensors:
        if name.endswith("norm.weight"):
            tensors[name] = 1e6 * tensors[name]
    without, folded = without_norms(config, tensors)
    assert relative(logits(without, folded), logits(config, tensors)) <= EXACT


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("key", [None, "linear", "latent"])
def test_the_bias_of_a_norm_reaches_latent_values(key: str | None, biases: bool) -> None:
    """It goes through the latent, which has no bias of its own, into that of the values; through keys that the values
    are made of, into that of the keys."""
    config = small(
        norm_type="layernorm",
        norm_eps=1e12,
        norm_bias=True,
        attention_bias=biases,
        position_embedding_type="rope" if key else "learned",
        key=[{"type": key or "linear"}],
        value=[{"type": "latent", "rank": 5, "keys": key is not None}],
    )
    tensors = weights(config)
    for name in tensors:
        if name.endswith("norm.weight"):
            tensors[name] = 1e6 * tensors[name]
    without, folded = without_norms(config, tensors)
    assert relative(logits(without, folded), logits(config, tensors)) <= EXACT


def test_norms_of_a_gated_model_are_folded_into_the_gate() -> None:
    """Their weight into its matrix, their bias into a bias of its own."""
    gate = {"type": "sigmoid", "per_head": True}
    config = small(norm_type="layernorm", norm_eps=1e12, norm_bias=True, output_gate=gate)
    tensors = {name: 1e6 * t if name.endswith("norm.weight") else t for name, t in weights(config).items()}
    without, folded = without_norms(config, tensors)
    assert folded["model.layers.0.self_attn.g_proj.bias"].abs().min() > 1e-3
    assert relative(logits(without, folded), logits(config, tensors)) <= EXACT
