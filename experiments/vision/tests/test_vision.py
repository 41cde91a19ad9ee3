"""Models of images: the classifier against its equations."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from oracle.images import classify
from oracle.test_oracle import exact_angles, gradients_of
from shapes import assert_near, randomize
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from leanqkv import (
    ConfigError,
    LeanConfig,
    LeanError,
    LeanForCausalLM,
    LeanForImageClassification,
    kv_bytes_per_token,
    plan,
    preset,
    recipe,
)
from leanqkv.checkpoints.open import load_model, open_checkpoint
from leanqkv.model.shapes import count_parameters, parameter_shapes

TINY = {
    "image_size": 4,
    "patch_size": 2,
    "num_channels": 2,
    "num_labels": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
}
NO_BIAS = dict.fromkeys(("norm_bias", "attention_bias", "attention_output_bias", "mlp_bias"), False)
ROPE = {"position_embedding_type": "rope"}
FOUR = {"num_hidden_layers": 4}

CASES: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    ((), {}),
    ((), NO_BIAS | ROPE),
    ((), {"position_embedding_type": "none", "patch_size": 4, "num_channels": 1}),
    (("identity-query",), {}),
    (("nonlinear-query",), NO_BIAS),
    (("residual-query", "keys-as-values"), ROPE),
    (("skipv1",), {}),
    (("skipv1", "gqa"), ROPE | NO_BIAS),
    (("skipv0",), {}),
    (("mla", "skipv1"), {}),
    (("mla:rank=7,rope_dim=2",), ROPE),
    (("yoco",), FOUR),
    (("cla-v", "identity-query"), FOUR),
    ((), {"key_value": {"type": "borrowed_values", "heads": [[0, 1, 0, 0], [1, 0, 0, 0]]}}),
    (("resformer:mode=per_token", "denseformer"), {}),
    (("no-output", "identity-query"), {"block_type": "parallel"}),
    (("mlp-query",), {"attention_skip": False}),
    ((), {"block_type": "parallel_shared_norm", "norm_type": "dyt", "qk_norm": True}),
    ((), {"num_hidden_groups": 1}),
    ((), {"mlp_type": "moe", "num_local_experts": 3, "mlp_bias": False}),
]


def vit(*mechanisms: str, **overrides: Any) -> LeanConfig:
    return preset("vit-digits", *mechanisms, **{**TINY, **overrides})


def pixels(config: LeanConfig, batch: int = 2) -> Tensor:
    assert config.num_channels and config.image_size
    shape = (batch, config.num_channels, config.image_size, config.image_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def case_id(case: tuple[tuple[str, ...], dict[str, Any]]) -> str:
    return "+".join((*case[0], *(f"{name}={value}" for name, value in case[1].items()))) or "plain"


every = pytest.mark.parametrize("case", CASES, ids=case_id)


# --- the model --------------------------------------------------------------------------------------------------------


@every
def test_parameters_are_the_plans_and_all_get_a_gradient(case):
    names, overrides = case
    config = vit(*names, **overrides)
    model = LeanForImageClassification(config).double()
    if not config.attention_skip:
        randomize(model)  # of a start so small, little reaches the last layer without its skip
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == parameter_shapes(config)
    assert count_parameters(config).total == sum(p.numel() for p in model.parameters())
    model(pixel_values=pixels(config, 8), labels=torch.arange(8) % 3).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        zero = name.endswith("k_proj.bias") and config.position_embedding_type != "rope"  # shifts all scores alike
        assert zero or parameter.grad.abs().max() > 1e-12, name


@every
def test_model_is_its_equations(case, monkeypatch):
    names, overrides = case
    config = vit(*names, **overrides)
    model = randomize(LeanForImageClassification(config)).double().eval()
    if config.position_embedding_type == "rope":
        exact_angles(model, monkeypatch)
    images = pixels(config).double()
    tensors = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = torch.stack([classify(tensors, config, image) for image in images])
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = gradients_of(expected, direction, tensors)
    floor = 1e-4 * max(gradient.abs().max().item() for gradient in wanted.values())
    for backend in ("eager", "sdpa"):
        model.set_attn_implementation(backend)
        logits = model(pixel_values=images).logits
        assert_near(logits, expected, 1e-10, f"{backend} logits")
        for name, gradient in gradients_of(logits, direction, dict(model.named_parameters())).items():
            assert_near(gradient, wanted[name], 1e-10, f"{backend} gradient of {name}", floor)


def test_plain_model_is_the_vit_of_transformers():
    theirs = ViTForImageClassification(
        ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=24,
            image_size=4,
            patch_size=2,
            num_channels=2,
            layer_norm_eps=1e-6,
            num_labels=3,
        )
    )
    randomize(theirs).double().eval()
    renamed = {
        "vit.embeddings.cls_token": "model.embed_patches.class_token",
        "vit.embeddings.position_embeddings": "model.embed_positions.weight",
        "vit.embeddings.patch_embeddings.projection.": "model.embed_patches.projection.",
        "layernorm_before": "input_layernorm",
        "layernorm_after": "post_attention_layernorm",
        "vit.layernorm.": "model.norm.",
        "attention.attention.query": "self_attn.q_proj",
        "attention.attention.key": "self_attn.k_proj",
        "attention.attention.value": "self_attn.v_proj",
        "attention.output.dense": "self_attn.o_proj",
        "attention.q_proj": "self_attn.q_proj",
        "attention.k_proj": "self_attn.k_proj",
        "attention.v_proj": "self_attn.v_proj",
        "attention.o_proj": "self_attn.o_proj",
        "intermediate.dense": "mlp.up_proj",
        "output.dense": "mlp.down_proj",
        "mlp.fc1": "mlp.up_proj",
        "mlp.fc2": "mlp.down_proj",
        "vit.encoder.layer.": "model.layers.",
        "vit.layers.": "model.layers.",
    }
    tensors = {}
    for name, tensor in theirs.state_dict().items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        tensors[name] = tensor[0] if "class_token" in name or "embed_positions" in name else tensor
    ours = LeanForImageClassification(vit(num_hidden_layers=2)).double().eval()
    ours.load_state_dict(tensors, strict=True)
    images = pixels(ours.config).double()
    assert_near(ours(pixel_values=images).logits, theirs(pixel_values=images).logits, 1e-12)


def test_the_papers_shape_has_the_stated_size_and_keeps_no_cache():
    config = preset("vit-tiny")
    shape = (config.num_hidden_layers, config.num_attention_heads, config.hidden_size, config.intermediate_size)
    assert shape == (12, 3, 192, 768)
    # Per block 12 d^2 + 13 d; patches, class token, positions; final norm; head.
    total = 12 * (12 * 192**2 + 13 * 192) + (3 * 16**2 + 1) * 192 + 192 + 197 * 192 + 2 * 192 + 10 * 193
    assert count_parameters(config).total == total == 5_526_346
    assert f"{count_parameters(preset('vit-tiny', num_labels=100)).total / 1e6:.1f}M" == "5.5M"
    assert count_parameters(config).non_embedding == 12 * (12 * 192**2 + 13 * 192) + 2 * 192
    # Eleven layers without one of three value heads.
    assert total - count_parameters(preset("vit-tiny", "skipv1")).total == 11 * 64 * 193
    assert kv_bytes_per_token(config) == 0
    paper = recipe("vit-tiny")
    assert (paper.steps, paper.batch_size, paper.warmup_steps, paper.weight_decay) == (15_000, 1024, 1500, 0.1)
    assert (paper.learning_rate, paper.min_learning_rate, paper.beta1, paper.beta2) == (1e-3, 1e-4, 0.9, 0.999)


def test_variants_of_one_seed_start_from_the_same_point():
    started = {}
    for name in ("", "skipv1", "nonlinear-query"):
        torch.manual_seed(1)
        model = LeanForImageClassification(vit(*filter(None, [name])))
        started[name] = {name: p.detach() for name, p in model.named_parameters()}
    for name in ("skipv1", "nonlinear-query"):
        for tensor in started[""].keys() & started[name].keys():
            rows = started[name][tensor].shape[0]
            assert torch.equal(started[""][tensor][:rows], started[name][tensor]), tensor
    assert started[""]["model.embed_patches.class_token"].abs().max() > 0


@pytest.mark.parametrize("overrides", [{}, {"mlp_type": "moe", "num_local_experts": 3, "mlp_bias": False}], ids=str)
def test_accumulated_losses_sum_to_the_batchs(overrides):
    config = vit(**overrides, router_aux_loss_coef=0.0) if overrides else vit()
    model = randomize(LeanForImageClassification(config)).double().eval()
    images, labels = pixels(config, 6), torch.arange(6) % 3
    whole = model(pixel_values=images, labels=labels)
    assert_near(whole.loss, torch.nn.functional.cross_entropy(whole.logits, labels), 1e-12)
    parts = [
        model(pixel_values=images[part], labels=labels[part], num_items_in_batch=torch.tensor(6)).loss
        for part in (slice(0, 2), slice(2, 6))
    ]
    assert_near(sum(parts), whole.loss, 1e-12)


def test_experts_are_balanced():
    config = vit(mlp_type="moe", num_local_experts=3, mlp_bias=False, router_aux_loss_coef=0.5)
    config.output_router_logits = True
    model = randomize(LeanForImageClassification(config)).double().eval()
    output = model(pixel_values=pixels(config), labels=torch.tensor([0, 1]))
    cross_entropy = torch.nn.functional.cross_entropy(output.logits, torch.tensor([0, 1]))
    assert output.loss > cross_entropy + 0.5 * 0.9, "even routing costs E times sum 1/E 1/E = 1, uneven one more"


def test_hidden_states_attention_weights_and_checkpointing():
    config = vit("skipv1", attention_dropout=0.0)
    model = randomize(LeanForImageClassification(config)).double()
    model.set_attn_implementation("eager")
    output = model(pixel_values=pixels(config), output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) == 4
    assert output.hidden_states[0].shape == (2, 5, 16)
    assert torch.equal(model.classifier(output.hidden_states[-1][:, 0]), output.logits)
    assert (output.attentions[0] > 0).all(), "every token sees every other"
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.train().zero_grad()
        model(pixel_values=pixels(config), labels=torch.tensor([0, 1])).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert_near(gradients[1][name], gradient, 1e-12, name, 1e-6)
    assert model.get_input_embeddings() is model.model.embed_patches


LOAD_WITHOUT_THE_PACKAGE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "leanqkv":
            raise ImportError("leanqkv is not installed here")

sys.meta_path.insert(0, Blocked())
import torch
from transformers import AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
wanted = torch.load(f"{sys.argv[1]}/wanted.pt")
with torch.no_grad():
    assert torch.equal(model(pixel_values=wanted["pixels"]).logits, wanted["logits"])
assert "leanqkv" not in sys.modules
"""


@pytest.mark.slow
def test_saved_is_loaded_with_and_without_the_package(tmp_path):
    config = vit("skipv1", "nonlinear-query", num_labels=2)
    model = randomize(LeanForImageClassification(config)).eval()
    images = pixels(config)
    with torch.no_grad():
        logits = model(pixel_values=images).logits
    model.save_pretrained(tmp_path)
    for loaded in (
        LeanForImageClassification.from_pretrained(tmp_path),
        AutoModelForImageClassification.from_pretrained(tmp_path),
        load_model(open_checkpoint(tmp_path)),
    ):
        assert isinstance(loaded, LeanForImageClassification)
        assert loaded.config.num_labels == 2
        assert plan(loaded.config) == plan(config)
        assert torch.equal(loaded.eval()(pixel_values=images).logits, logits)
    base = AutoModel.from_pretrained(tmp_path).eval()
    assert torch.equal(model.classifier(base(pixel_values=images).last_hidden_state[:, 0]), logits)
    torch.save({"pixels": images, "logits": logits}, tmp_path / "wanted.pt")
    run = subprocess.run(
        [sys.executable, "-c", LOAD_WITHOUT_THE_PACKAGE, str(tmp_path)],
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.parametrize(
    "config", [preset("vit-tiny"), vit("skipv1", num_labels=2), vit(id2label={0: "a", 1: "b", 2: "c"})]
)
def test_a_configuration_is_what_it_says_it_is(config):
    assert LeanConfig(**json.loads(json.dumps(config.as_overrides()))) == config


REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"image_size": None}, ("needs image_size",)),
    ({"patch_size": 3}, ("patch_size (3)", "divide", "image_size (4)")),
    ({"patch_size": 0}, ("patch_size", "0")),
    ({"num_channels": 0}, ("num_channels", "0")),
    ({"num_labels": 1}, ("num_labels", "from 2 to", "1")),
    ({"id2label": {0: "a", 1: "b"}}, ("num_labels (3)", "id2label (2)")),
    ({"vocab_size": 100}, ("vocab_size", "no vocabulary")),
    ({"tie_word_embeddings": True}, ("tie_word_embeddings", "no vocabulary")),
    ({"pad_token_id": 0}, ("pad_token_id", "no vocabulary")),
    ({"max_position_embeddings": 64}, ("max_position_embeddings (64)", "4 patches, 5")),
    ({"problem_type": "regression"}, ("problem_type", "'regression'")),
    ({"mask_type": "causal"}, ("bidirectionally", "'causal'")),
    ({"sliding_window": 2}, ("sliding_window", "'bidirectional'")),
]


@pytest.mark.parametrize(("overrides", "parts"), REFUSED, ids=str)
def test_a_configuration_without_meaning_is_refused(overrides, parts):
    with pytest.raises((LeanError, ConfigError)) as refused:
        vit(**overrides)
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize("name", ["image_size", "patch_size", "num_channels", "num_labels"])
def test_text_has_no_pixels(name):
    with pytest.raises(ConfigError, match=f"{name} needs task 'image_classification', found 'causal_lm'"):
        preset("tiny", **{name: 4})


def test_wrong_inputs_are_refused():
    config = vit()
    model = LeanForImageClassification(config)
    images = pixels(config)
    for wrong, message in (
        ({"pixel_values": images[:, :1]}, r"\[2, 4, 4\].*found \[2, 1, 4, 4\]"),
        ({"pixel_values": images[0]}, r"found \[2, 4, 4\]"),
        ({"pixel_values": torch.zeros(2, 2, 4, 4, dtype=torch.uint8)}, "uint8"),
        ({"pixel_values": images, "attention_mask": torch.ones(2, 5)}, "attention_mask"),
        ({"pixel_values": images, "input_ids": torch.ones(2, 5, dtype=torch.long)}, "input_ids"),
        ({"pixel_values": None}, "takes pixel_values"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**wrong)
    text = LeanForCausalLM(preset("tiny", num_hidden_layers=1))
    with pytest.raises(ValueError, match="pixel_values need a model of images"):
        text(pixel_values=images)
    with pytest.raises(ConfigError, match="LeanForCausalLM builds models of task 'causal_lm'"):
        LeanForCausalLM(config)
