"""Checkpoints of transformers in and out: the same function, the same tensors; what cannot be expressed is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from shapes import GPT, LLAMA, assert_near, randomize, tiny, tokens
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedModel,
    ViTConfig,
    ViTModel,
)

from leanqkv import LeanConfig, LeanError, LeanForCausalLM, LeanForImageClassification
from leanqkv.checkpoints.families import FAMILIES, choose_family, export_tensors, import_tensors
from leanqkv.checkpoints.open import Checkpoint, open_checkpoint
from leanqkv.checkpoints.tensors import LazyTensors, open_tensors

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 3,
    "eos_token_id": [4, 5],
    "pad_token_id": 6,
}
# Those that give the MLP a size and the norms an epsilon that is felt.
FEED: dict[str, Any] = {"intermediate_size": 48}
RMS: dict[str, Any] = FEED | {"rms_norm_eps": 0.01}
NEOX: dict[str, Any] = FEED | {"layer_norm_eps": 0.01}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GRANITE_FIELDS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 7.0,
}
SOME_WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GEMMA = SOME_WINDOWS | {
    "head_dim": 12,
    "num_key_value_heads": 2,
    "query_pre_attn_scalar": 16,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 4.0],
}
QWEN3_MOE = {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-inner": ("gpt2", {"n_inner": 24, "activation_function": "relu", "layer_norm_epsilon": 0.01}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False, "attn_pdrop": 0, "resid_pdrop": 0.2, "embd_pdrop": 0.3}),
    "gpt2-inverse": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "neox": ("gpt_neox", NEOX),
    "neox-serial": ("gpt_neox", NEOX | {"use_parallel_residual": False, "hidden_act": "gelu_new", "rotary_pct": 1.0}),
    "neox-tied": ("gpt_neox", NEOX | {"tie_word_embeddings": True, "rotary_pct": 0.5, "rotary_emb_base": 500.0}),
    "neox-linear": ("gpt_neox", NEOX | {"rope_scaling": {"type": "linear", "factor": 2.0}, "hidden_dropout": 0.1}),
    "neox-unbiased": ("gpt_neox", NEOX | {"attention_bias": False}),
    "llama": ("llama", RMS),
    "llama-gqa-tied": ("llama", RMS | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-biased": ("llama", RMS | {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama-attention-bias": ("llama", RMS | {"attention_bias": True, "num_key_value_heads": 1}),
    "llama-head-dim": ("llama", RMS | {"head_dim": 12, "attention_dropout": 0.1}),
    "llama-llama3": ("llama", RMS | {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", RMS | {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama-yarn": (
        "llama",
        RMS | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    ),
    "mistral": ("mistral", RMS | {"sliding_window": 5, "num_key_value_heads": 2}),
    "mistral-whole": ("mistral", RMS | {"sliding_window": None, "num_key_value_heads": 2, "head_dim": 12}),
    "qwen2": ("qwen2", RMS | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        RMS | {"num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "qwen3": ("qwen3", RMS | {"num_key_value_heads": 2, "head_dim": 12}),
    "qwen3-biased-tied": (
        "qwen3",
        RMS | {"num_key_value_heads": 4, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen2-upper-window": (
        "qwen2",
        RMS | {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3-some-windows": ("qwen3", RMS | SOME_WINDOWS | {"use_sliding_window": True, "num_key_value_heads": 2}),
    "granite": ("granite", RMS | GRANITE_FIELDS | {"num_key_value_heads": 2}),
    "granite-biased-tied": ("granite", RMS | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", RMS | {"no_rope_layer_interval": 2, "num_key_value_heads": 2}),
    "smollm3-window": (
        "smollm3",
        RMS | {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 5, "attention_bias": True},
    ),
    "olmo2": ("olmo2", RMS | {"num_key_value_heads": 2}),
    "olmo2-biased-tied": ("olmo2", RMS | {"attention_bias": True, "tie_word_embeddings": True, "rope_theta": 500.0}),
    "gemma3": ("gemma3_text", RMS | GEMMA),
    "gemma3-defaults": ("gemma3_text", RMS | {"head_dim": 12, "num_key_value_heads": 4, "sliding_window": 5}),
    "gemma3-full": ("gemma3_text", RMS | GEMMA | {"layer_types": ["full_attention"] * 3, "attention_bias": True}),
    "gemma3-windows": ("gemma3_text", RMS | GEMMA | {"layer_types": ["sliding_attention"] * 3, "head_dim": 16}),
    "phi3": ("phi3", RMS | {"num_key_value_heads": 2, "resid_pdrop": 0.1}),
    "phi3-window-tied": ("phi3", RMS | {"sliding_window": 5, "tie_word_embeddings": True, "rope_theta": 500.0}),
    "phi3-partial": ("phi3", RMS | {"partial_rotary_factor": 0.5, "num_key_value_heads": 1}),
    "phi3-long": ("phi3", RMS | {"rope_parameters": LONG, "original_max_position_embeddings": 32}),
    "phi3-longer": ("phi3", RMS | {"rope_parameters": LONG, "original_max_position_embeddings": 8}),
    "mixtral": ("mixtral", RMS | {"num_key_value_heads": 2, "num_local_experts": 4}),
    "mixtral-window": ("mixtral", RMS | {"num_key_value_heads": 4, "num_local_experts": 3, "sliding_window": 5}),
    "qwen3-moe": ("qwen3_moe", RMS | QWEN3_MOE | {"norm_topk_prob": True, "head_dim": 12}),
    "qwen3-moe-unnormed": ("qwen3_moe", RMS | QWEN3_MOE | {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-moe-window": ("qwen3_moe", RMS | QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 5}),
    "smollm3-all-rope": ("smollm3", RMS | {"no_rope_layers": [1, 1, 1]}),
}
IDS = tokens(2, 12, vocab_size=61)


def stock_model(case: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of transformers, random in every weight."""
    model_type, settings = CASES[case]
    torch.manual_seed(0)  # the draws below leave nothing of it
    config = CONFIG_MAPPING[model_type](**SIZES | settings)
    return randomize(AutoModelForCausalLM.from_config(config)).to(dtype).eval()


def ours(checkpoint: Checkpoint) -> LeanForCausalLM:
    """A model with exactly the tensors of the checkpoint."""
    tensors = dict(checkpoint.tensors)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == checkpoint.config.plan.parameter_shapes
    if checkpoint.config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model = LeanForCausalLM(checkpoint.config).to(checkpoint.dtype)
    model.load_state_dict(tensors, strict=True)
    return model.eval()


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(input_ids=IDS).logits


def export(checkpoint: Checkpoint, directory: Path, name: str | None = None) -> PreTrainedModel:
    """What transformers loads from the checkpoint written as a family, nothing missing and nothing left over."""
    family = choose_family(checkpoint.config, name)
    family.to_stock(checkpoint.config).save_pretrained(directory)
    dtype = checkpoint.dtype  # Gemma's norm weights come in float64
    tensors = {n: t.to(dtype) for n, t in export_tensors(family, checkpoint.config, checkpoint.tensors).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert type(model).__name__ == family.architecture
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case, tmp_path):
    """Opened, it computes the same; written again by its own family, it is the same, tensor by tensor."""
    reference = stock_model(case)
    reference.save_pretrained(tmp_path / "theirs")
    checkpoint = open_checkpoint(tmp_path / "theirs")
    assert checkpoint.family == CASES[case][0]
    config = checkpoint.config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (3, [4, 5], 6)
    expected = logits(reference)
    assert_near(logits(ours(checkpoint)), expected, 1e-5)

    returned = export(checkpoint, tmp_path / "ours", checkpoint.family)
    if case == "gpt2-inverse":  # the division has been made
        assert not returned.config.scale_attn_by_inverse_layer_idx
        assert_near(logits(returned), expected, 1e-5)
        return
    assert torch.equal(logits(returned), expected)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert open_checkpoint(tmp_path / "ours").config.to_dict() == config.to_dict()


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith(("gpt2", "neox"))])
def test_in_float64(case, tmp_path):
    """Where nothing of the class rounds to float32, nothing else differs."""
    reference = stock_model(case, torch.float64)
    reference.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.dtype == torch.float64
    computed, expected = logits(ours(checkpoint)), logits(reference)
    assert computed.dtype == expected.dtype == torch.float64
    assert_near(computed, expected, 1e-12)


@pytest.mark.parametrize("case", ["gpt2", "neox", "llama-gqa-tied", "gemma3"])
def test_half_precision_stays_as_it_is(case, tmp_path):
    reference = stock_model(case, torch.bfloat16)
    reference.save_pretrained(tmp_path / "theirs")
    checkpoint = open_checkpoint(tmp_path / "theirs")
    exact = torch.float64 if case == "gemma3" else torch.bfloat16  # of one plus a norm's weight
    assert {tensor.dtype for name, tensor in checkpoint.tensors.items() if "norm" in name} == {exact}
    assert {tensor.dtype for name, tensor in checkpoint.tensors.items() if "norm" not in name} == {torch.bfloat16}
    returned = export(checkpoint, tmp_path / "ours")
    assert returned.dtype == torch.bfloat16
    for name, tensor in reference.state_dict().items():
        assert torch.equal(tensor, returned.state_dict()[name]), name


def save_pickled(tensors: dict[str, Tensor], directory: Path, sharded: bool) -> None:
    if not sharded:
        torch.save(tensors, directory / "pytorch_model.bin")
        return
    shards = {name: f"pytorch_model-{i % 3 + 1:05}-of-00003.bin" for i, name in enumerate(tensors)}
    for shard in set(shards.values()):
        torch.save({name: tensor for name, tensor in tensors.items() if shards[name] == shard}, directory / shard)
    index = {"metadata": {}, "weight_map": shards}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("layout", ["sharded safetensors", "bin", "sharded bin"])
@pytest.mark.parametrize("case", ["gpt2", "neox", "llama-gqa-tied", "llama-biased", "qwen3"])
def test_every_layout_gives_the_same_tensors(case, layout, tmp_path):
    reference = stock_model(case)
    reference.save_pretrained(tmp_path / "single")
    other = tmp_path / "other"
    if layout == "sharded safetensors":
        reference.save_pretrained(other, max_shard_size="4KB")
        assert len(list(other.glob("*.safetensors"))) > 2
    else:
        reference.config.save_pretrained(other)
        # A state dict names a tied head, too.
        save_pickled(reference.state_dict(), other, layout == "sharded bin")
    expected, tensors = (open_checkpoint(tmp_path / name).tensors for name in ("single", "other"))
    assert list(tensors) == list(expected)
    for name in expected:
        assert torch.equal(tensors[name], expected[name]), name


def test_qwen2_takes_a_head_dim_that_it_does_not_declare(tmp_path):
    config = CONFIG_MAPPING["qwen2"](**SIZES, **RMS, num_key_value_heads=2, head_dim=12)
    reference = randomize(AutoModelForCausalLM.from_config(config)).eval()
    reference.save_pretrained(tmp_path / "theirs")
    checkpoint = open_checkpoint(tmp_path / "theirs")
    assert checkpoint.config.head_dim == 12
    assert_near(logits(ours(checkpoint)), logits(reference), 1e-5)
    # Others may not look for it there: a class that declares it holds the model.
    returned = export(checkpoint, tmp_path / "ours")
    assert returned.config.model_type == "llama"
    assert_near(logits(returned), logits(reference), 1e-5)


@pytest.mark.parametrize(
    ("family", "theirs", "expected"),
    [
        ("gpt2", {"attn_pdrop": 0, "resid_pdrop": 0.2, "embd_pdrop": 0.3}, (0.0, 0.2, 0.3)),
        ("gpt_neox", {"attention_dropout": 0.1, "hidden_dropout": 0.2}, (0.1, 0.2, 0.2)),
        ("llama", {"attention_dropout": None}, (0.0, 0.0, 0.0)),
        ("qwen3", {"attention_dropout": 0.1}, (0.1, 0.0, 0.0)),
    ],
)
def test_dropouts(family, theirs, expected):
    config = FAMILIES[family].lean_config(theirs)
    assert (config.attention_dropout, config.hidden_dropout, config.embedding_dropout) == expected
    stock = FAMILIES[family].to_stock(config)
    assert {name: getattr(stock, name) for name in theirs} == {name: value or 0 for name, value in theirs.items()}


BUFFERS = {
    "gpt2": ["h.{}.attn.bias", "h.{}.attn.masked_bias"],
    "neox-tied": ["layers.{}.attention.bias", "layers.{}.attention.masked_bias", "rotary_emb.inv_freq"],
    "neox": ["layers.{}.attention.rotary_emb.inv_freq"],
    "llama-gqa-tied": ["layers.{}.self_attn.rotary_emb.inv_freq"],
}


@pytest.mark.parametrize("case", BUFFERS)
def test_old_files_with_buffers_and_without_the_head(case, tmp_path):
    """As `gpt2` itself lies on the hub: the base model's tensors, without its prefix, and buffers among them."""
    reference = stock_model(case)
    reference.config.save_pretrained(tmp_path)
    base = getattr(reference, reference.base_model_prefix)
    tensors = dict(base.state_dict())
    tensors |= {name.format(i): torch.ones(2, dtype=torch.bool) for i in range(3) for name in BUFFERS[case]}
    if not reference.config.tie_word_embeddings:
        tensors["lm_head.weight"] = reference.lm_head.weight.detach()
    for prefix in ("", f"{reference.base_model_prefix}."):
        prefixed = {name if name == "lm_head.weight" else prefix + name: tensor for name, tensor in tensors.items()}
        torch.save(prefixed, tmp_path / "pytorch_model.bin")
        assert_near(logits(ours(open_checkpoint(tmp_path))), logits(reference), 1e-5)


ONE_OF_EACH = (
    "gpt2",
    "neox",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "granite",
    "smollm3",
    "olmo2",
    "gemma3",
    "phi3",
    "mixtral",
    "qwen3-moe",
)


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_a_base_model_with_a_tied_head_is_a_language_model(case, tmp_path):
    """As transformers takes it: the embedding is the head."""
    config = stock_model(case).config
    config.tie_word_embeddings = True
    base = randomize(AutoModel.from_config(config))
    base.save_pretrained(tmp_path)
    assert not any(name.startswith(base.base_model_prefix) for name in open_tensors(tmp_path))
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    assert_near(logits(ours(open_checkpoint(tmp_path))), expected, 1e-5)


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_a_base_model_has_no_head(case, tmp_path):
    config = stock_model(case).config
    config.tie_word_embeddings = False
    AutoModel.from_config(config).save_pretrained(tmp_path)
    family = FAMILIES[CASES[case][0]]
    message = rf"has no language-model head: .* {family.head}\.weight.*; save the {family.architecture}"
    with pytest.raises(LeanError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("case", ["gpt2", "neox-tied", "llama-gqa-tied"])
def test_a_tied_head_in_the_file_must_be_the_embedding(case, tmp_path):
    reference = stock_model(case)
    reference.config.save_pretrained(tmp_path)
    tensors = dict(reference.state_dict())
    head = "embed_out.weight" if case == "neox-tied" else "lm_head.weight"
    for stored in (tensors.pop("lm_head.weight").clone(), None):
        torch.save(tensors | ({} if stored is None else {head: stored}), tmp_path / "pytorch_model.bin")
        assert_near(logits(ours(open_checkpoint(tmp_path))), logits(reference), 1e-5)
    torch.save(tensors | {head: torch.zeros(61, 32)}, tmp_path / "pytorch_model.bin")
    checkpoint = open_checkpoint(tmp_path)  # the data is not looked at before it is asked for
    with pytest.raises(LeanError, match=rf"pytorch_model\.bin: {head} is not .*tie_word_embeddings"):
        checkpoint.tensors["model.embed_tokens.weight"]


def test_nothing_is_read_before_it_is_asked_for(tmp_path, monkeypatch):
    stock_model("neox").save_pretrained(tmp_path)
    read = []
    stored = open_tensors(tmp_path)
    compute = stored._compute
    monkeypatch.setattr(stored, "_compute", lambda name: read.append(name) or compute(name))
    monkeypatch.setattr("leanqkv.checkpoints.open.open_tensors", lambda directory: stored)
    checkpoint = open_checkpoint(tmp_path)
    exported = export_tensors(FAMILIES["gpt_neox"], checkpoint.config, checkpoint.tensors)
    assert not read
    checkpoint.tensors["model.layers.1.self_attn.k_proj.weight"]
    assert read == ["gpt_neox.layers.1.attention.query_key_value.weight"]
    exported["gpt_neox.layers.2.mlp.dense_h_to_4h.bias"]
    assert read[1:] == ["gpt_neox.layers.2.mlp.dense_h_to_4h.bias"]


LOCAL = {"sliding_window": 4, "window_layers": [0, 2], "window_rope_parameters": {"rope_theta": 100.0}}
# What the model is, the family that holds it best, and one of those that hold it with more biases of zeros.
BIASED = {"attention_bias": True}
EXPORTED: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "gpt2-unbiased": ({**GPT}, "gpt2", None),
    "gpt2-some": ({**GPT, **BIASED, "mlp_bias": True}, "gpt2", None),
    "neox-unbiased": ({**GPT, "position_embedding_type": "rope"}, "gpt_neox", None),
    "neox-output": (
        {**GPT, "position_embedding_type": "rope", "block_type": "parallel", "attention_output_bias": True},
        "gpt_neox",
        None,
    ),
    "llama": ({**LLAMA, "num_key_value_heads": 2}, "llama", "qwen2"),
    "llama-output-bias": ({**LLAMA, "attention_output_bias": True}, "llama", None),
    "llama-mlp-bias": ({**LLAMA, **BIASED, "mlp_bias": True}, "llama", None),
    "mistral": ({**LLAMA, "sliding_window": 5, "head_dim": 12}, "mistral", None),
    "qwen2": ({**LLAMA, **BIASED, "num_key_value_heads": 2}, "qwen2", "llama"),
    "qwen2-window": ({**LLAMA, **BIASED, "sliding_window": 5}, "qwen2", None),
    "qwen3": ({**LLAMA, "qk_norm": True, "head_dim": 12, "num_key_value_heads": 2}, "qwen3", None),
    "qwen3-window": ({**LLAMA, "qk_norm": True, "sliding_window": 5, "attention_bias": True}, "qwen3", None),
    "tied": ({**LLAMA, "tie_word_embeddings": True}, "llama", "mistral"),
    # 1 / sqrt(8) is what it would be anyway.
    "default-multiplier": ({**LLAMA, "attention_multiplier": 8**-0.5}, "llama", "granite"),
    "granite": ({**LLAMA, "logits_scaling": 3.0, "num_key_value_heads": 2}, "granite", None),
    "granite-bias": ({**LLAMA, **GRANITE_FIELDS, "attention_output_bias": True, "mlp_bias": True}, "granite", None),
    "smollm3": ({**LLAMA, "rope_layers": [0, 2]}, "smollm3", None),
    "smollm3-window": ({**LLAMA, "rope_layers": [1], "sliding_window": 4, "window_layers": [2]}, "smollm3", None),
    "some-windows": ({**LLAMA, "sliding_window": 4, "window_layers": [0, 2]}, "smollm3", "qwen2"),
    "qwen2-some-windows": ({**LLAMA, **BIASED, "sliding_window": 4, "window_layers": [0, 2]}, "qwen2", None),
    "same-bases": (
        {**LLAMA, "sliding_window": 4, "window_layers": [0], "window_rope_parameters": {"rope_theta": 10000.0}},
        "smollm3",
        None,
    ),
    "olmo2": ({**LLAMA, "norm_placement": "after", "qk_norm": "width", "num_key_value_heads": 2}, "olmo2", None),
    "gemma3": (
        {**LLAMA, **LOCAL, "norm_placement": "both", "qk_norm": True, "embedding_multiplier": 32**0.5},
        "gemma3_text",
        None,
    ),
    "phi3": ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}, "sliding_window": 5}, "phi3", None),
    "mixtral": ({**LLAMA, "mlp_type": "moe", "num_local_experts": 3}, "mixtral", None),
    "qwen3-moe": (
        {**LLAMA, "mlp_type": "moe", "num_local_experts": 3, "norm_topk_prob": False, "qk_norm": True, "head_dim": 12},
        "qwen3_moe",
        None,
    ),
    "linear-named": ({**LLAMA, "query": [{"type": "linear"}]}, "llama", None),
}


@pytest.mark.parametrize("case", EXPORTED)
def test_models_of_ours_are_written_as_the_family_that_holds_them(case, tmp_path):
    """Biases that the class always has are written as zeros; the function is the same."""
    overrides, expected, other = EXPORTED[case]
    config = LeanConfig(**{**overrides, "hidden_dropout": 0.1})
    model = randomize(LeanForCausalLM(config)).eval()
    model.save_pretrained(tmp_path / "own")
    checkpoint = open_checkpoint(tmp_path / "own")
    assert checkpoint.family is None
    assert choose_family(config).model_type == expected
    for name in (None, expected, *([other] if other else [])):
        returned = export(checkpoint, tmp_path / f"as-{name}", name)
        assert returned.config.model_type == (name or expected)
        assert_near(logits(returned), logits(model), 1e-5)


def test_an_export_comes_back_with_its_zeros(tmp_path):
    config = LeanConfig(**GPT)
    randomize(LeanForCausalLM(config)).save_pretrained(tmp_path / "own")
    export(open_checkpoint(tmp_path / "own"), tmp_path / "gpt2")
    returned = open_checkpoint(tmp_path / "gpt2")
    assert returned.config.mlp_bias and returned.config.norm_bias
    assert not returned.tensors["model.layers.1.mlp.up_proj.bias"].any()


# family, its config.json, what the message must contain
IMPORT_REFUSED: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("gpt2", {"add_cross_attention": True}, ("add_cross_attention", "True")),
    ("gpt2", {"scale_attn_weights": False}, ("scale_attn_weights", "False")),
    ("gpt2", {"activation_function": "gelo"}, ("activation_function", "'gelo'", "did you mean", "gelu")),
    ("gpt2", {"n_embd": 33}, ("33", "num_attention_heads")),
    ("gpt2", {"n_layer": "three"}, ("n_layer", "three")),
    ("gpt2", {"n_layer": 0}, ("num_hidden_layers", "0")),
    ("gpt2", {"quantization_config": {"bits": 4}}, ("quantization_config", "bits")),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, ("quantization_config", "fp8")),
    ("llama", {"is_causal": False}, ("is_causal", "False")),
    ("llama", {"per_layer_config": {"0": {"head_dim": 4}}}, ("per_layer_config",)),
    ("llama", {"hidden_act": "swish2"}, ("hidden_act", "'swish2'", "swish")),
    ("llama", {"rope_scaling": {"type": "magic", "factor": 2.0}}, ("rope_type", "magic", "not known")),
    ("llama", {"rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}}, ("rope_type", "axial")),
    ("llama", {"rope_scaling": {"type": "linear"}}, ("factor",)),
    ("llama", {"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
    ("llama", {"hidden_size": 34}, ("34", "4")),
    ("llama", {"head_dim": 7}, ("7",)),
    ("llama", {"num_key_value_heads": 3}, ("num_key_value_heads", "3")),
    ("llama", {"attention_dropout": 1.0}, ("attention_dropout", "1.0")),
    ("mistral", {"layer_types": ["full_attention"] * 3}, ("layer_types",)),
    ("mistral", {"sliding_window": 1}, ("sliding_window", "1")),
    ("qwen3", {"layer_types": ["sliding_attention"] * 3}, ("use_sliding_window", "sliding_attention")),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, ("layer_types",)),
    ("qwen3", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, ("chunked_attention",)),
    ("smollm3", {"no_rope_layers": [0, 0, 0]}, ("rope_layers", "[]")),
    ("smollm3", SOME_WINDOWS, ("use_sliding_window False", "sliding_window 5")),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, ("final_logit_softcapping", "30.0", "None")),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, ("attn_logit_softcapping", "50.0", "None")),
    ("gemma3_text", {"use_bidirectional_attention": True}, ("use_bidirectional_attention", "True")),
    ("gemma3_text", {"sliding_window": None}, ("sliding_attention", "sliding_window None")),
    ("phi3", {"rope_parameters": LONG | {"rope_type": "llama3"}}, ("llama3",)),
    ("qwen3_moe", {"mlp_only_layers": [1]}, ("mlp_only_layers", "[1]", "all layers have experts")),
    ("qwen3_moe", {"decoder_sparse_step": 2}, ("decoder_sparse_step", "2", "all layers have experts")),
    ("mixtral", {"num_experts_per_tok": 9}, ("num_experts_per_tok (9)", "num_local_experts (8)")),
    ("granite", {"residual_multiplier": 0}, ("residual_multiplier", "0")),
    ("granite", {"attention_multiplier": -0.5}, ("attention_multiplier", "-0.5")),
    ("gpt_neox", {"rotary_pct": 0.01}, ("partial_rotary_factor",)),
    ("gpt_neox", {"head_dim": 12}, ("head_dim", "12")),
]


@pytest.mark.parametrize(("family", "settings", "needles"), IMPORT_REFUSED)
def test_a_configuration_that_cannot_be_expressed_is_refused(family, settings, needles, tmp_path):
    sizes = SIZES | {"num_key_value_heads": 2}
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4}
    (tmp_path / "config.json").write_text(json.dumps(sizes | settings | {"model_type": family}))
    with pytest.raises(LeanError) as caught:
        open_checkpoint(tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    for needle in (str(tmp_path / "config.json"), *needles):
        assert needle in message


def test_settings_that_change_nothing_are_taken():
    """A stored window that is not used, a whole head that is rotated, no quantisation."""
    sizes = SIZES | {"num_key_value_heads": 2}
    plain = FAMILIES["qwen2"].lean_config(sizes).to_dict()
    for settings in (
        {"sliding_window": 16, "max_window_layers": 2},
        {"partial_rotary_factor": 1.0},
        {"quantization_config": None, "is_causal": True},
        {"rope_theta": 10000.0, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        {"layer_types": ["full_attention"] * 3},
    ):
        assert FAMILIES["qwen2"].lean_config(sizes | settings).to_dict() == plain


def test_what_a_config_json_leaves_out_is_the_class_default():
    config = FAMILIES["gpt2"].lean_config({})
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (50257, 768, 3072)
    assert (config.hidden_act, config.tie_word_embeddings, config.bos_token_id) == ("gelu_new", True, 50256)
    assert (config.attention_dropout, config.hidden_dropout, config.embedding_dropout) == (0.1, 0.1, 0.1)
    assert FAMILIES["gpt_neox"].lean_config({}).rope_parameters["partial_rotary_factor"] == 0.25
    assert FAMILIES["mistral"].lean_config({}).sliding_window == 4096
    assert FAMILIES["qwen3"].lean_config({}).head_dim == 128


# The config.json of models on the hub, and what some of our settings must be.
ON_THE_HUB: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        """{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": null, "summary_first_dropout": 0.1,
        "summary_type": "cls_index", "vocab_size": 50257,
        "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}}""",
        {"hidden_act": "gelu_new", "intermediate_size": 3072, "max_position_embeddings": 1024, "norm_bias": True},
    ),
    "pythia-70m": (
        """{"architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
        "hidden_size": 512, "initializer_range": 0.02, "intermediate_size": 2048, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 8, "num_hidden_layers": 6,
        "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": false, "torch_dtype": "float16",
        "use_cache": true, "use_parallel_residual": true, "vocab_size": 50304}""",
        {
            "block_type": "parallel",
            "attention_output_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25},
            "dtype": torch.float16,
        },
    ),
    "TinyLlama-1.1B": (
        """{"architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632, "model_type": "llama",
        "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 22, "num_key_value_heads": 4,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null, "tie_word_embeddings": false,
        "torch_dtype": "float32", "use_cache": true, "vocab_size": 32000}""",
        {
            "num_key_value_heads": 4,
            "head_dim": 64,
            "norm_eps": 1e-05,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "Mistral-7B-v0.1": (
        """{"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "model_type": "mistral",
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 32000}""",
        {"sliding_window": 4096, "head_dim": 128, "num_key_value_heads": 8},
    ),
    "Qwen2.5-0.5B": (
        """{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "use_cache": true, "use_mrope": false, "use_sliding_window": false, "vocab_size": 151936}""",
        {"sliding_window": None, "attention_bias": True, "attention_output_bias": False, "tie_word_embeddings": True},
    ),
    "granite-3.1-2b": (
        """{"architectures": ["GraniteForCausalLM"], "attention_bias": false, "attention_dropout": 0.1,
        "attention_multiplier": 0.015625, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
        "logits_scaling": 8.0, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "granite",
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0,
        "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 5000000.0,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 49155}""",
        {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "head_dim": 64},
    ),
    "SmolLM3-3B": (
        """{"architectures": ["SmolLM3ForCausalLM"], "attention_bias": false, "bos_token_id": null,
        "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11008,
        "layer_types": ["full_attention", "full_attention", "full_attention", "full_attention"],
        "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": false, "model_type": "smollm3",
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0], "num_attention_heads": 16, "num_hidden_layers": 4,
        "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06,
        "rope_scaling": null, "rope_theta": 5000000.0, "sliding_window": null, "torch_dtype": "bfloat16",
        "use_cache": false, "use_sliding_window": false, "vocab_size": 128256}""",
        {"rope_layers": [0, 1, 2], "sliding_window": None, "tie_word_embeddings": True},
    ),
    "OLMo-2-0425-1B": (
        """{"architectures": ["Olmo2ForCausalLM"], "attention_bias": false, "eos_token_id": 100257,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 4096,
        "model_type": "olmo2", "num_attention_heads": 16, "num_hidden_layers": 16, "num_key_value_heads": 16,
        "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 500000,
        "tie_word_embeddings": false, "torch_dtype": "float32", "use_cache": false, "vocab_size": 100352}""",
        {"norm_placement": "after", "qk_norm": "width", "num_key_value_heads": 16},
    ),
    "gemma-3-1b-it": (
        """{"architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attn_logit_softcapping": null,
        "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106], "final_logit_softcapping": null,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
        "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": null, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16", "use_cache": true,
        "vocab_size": 262144}""",
        {
            "window_layers": [layer for layer in range(26) if (layer + 1) % 6],
            "sliding_window": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
            "window_rope_parameters": {"rope_type": "default", "rope_theta": 10000},
            "attention_multiplier": None,
            "embedding_multiplier": 1152**0.5,
            "norm_placement": "both",
        },
    ),
    "Phi-4-mini": (
        """{"architectures": ["Phi3ForCausalLM"], "attention_bias": false, "bos_token_id": 199999,
        "embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1, "hidden_act": "silu", "hidden_size": 3072,
        "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": false, "max_position_embeddings": 131072,
        "mlp_bias": false, "model_type": "phi3", "num_attention_heads": 24, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "original_max_position_embeddings": 4096, "pad_token_id": 199999,
        "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "rope_scaling": {"long_factor": LONG, "short_factor": SHORT, "type": "longrope"}, "sliding_window": 262144,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 200064}""".replace(
            "LONG", str([2.0] * 48)
        ).replace("SHORT", str([1.0] * 48)),
        {"sliding_window": 262144, "cached_positions": 4096, "rotary_head_dim": 128},
    ),
    "Mixtral-8x7B-v0.1": (
        """{"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
        "num_hidden_layers": 2, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": null,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 32000}""",
        {"num_local_experts": 8, "norm_topk_prob": True, "router_aux_loss_coef": 0.02},
    ),
    "Qwen3-30B-A3B": (
        """{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 2, "num_key_value_heads": 4, "output_router_logits": false,
        "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true,
        "use_sliding_window": false, "vocab_size": 151936}""",
        {"head_dim": 128, "intermediate_size": 768, "num_local_experts": 128, "num_experts_per_tok": 8},
    ),
}


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_configurations_as_on_the_hub(name):
    text, expected = ON_THE_HUB[name]
    hf = json.loads(text)
    family = FAMILIES[hf["model_type"]]
    config = family.lean_config(hf)
    assert {field: getattr(config, field) for field in expected} == expected
    assert family.lean_config(family.to_stock(config).to_dict()).to_dict() == config.to_dict()
    assert choose_family(config) is family


# mechanisms, overrides, family, what the message must contain
EXPORT_REFUSED: list[tuple[str, tuple[str, ...], dict[str, Any], str, tuple[str, ...]]] = [
    ("llama", ("identity-query",), {}, "llama", ("query is 'identity', it has 'linear'",)),
    ("llama", ("identity-query:layers=1",), {}, "llama", ("query is 'linear' and 'identity'",)),
    ("llama", ("identity-key", "identity-value"), {}, "qwen3", ("key is 'identity'", "value is 'identity'", "qk_norm")),
    ("llama", ("no-output",), {}, "mistral", ("output is 'identity'",)),
    ("llama", ("skipv1",), {}, "llama", ("key_value", "first_layer_values")),
    (
        "llama",
        (),
        {"key_value": {"type": "borrowed_values", "heads": [[2, 1, 1, 0], [2, 3, 0, 0]]}},
        "llama",
        ("key_value", "borrowed_values", "2 rows"),
    ),
    ("llama", ("denseformer",), {}, "llama", ("depth_average",)),
    ("llama", ("mla",), {}, "llama", ("kv_lora_rank",)),
    ("gpt", ("gqa",), {}, "gpt2", ("num_key_value_heads is 2, it has 4",)),
    ("gpt", (), {"head_dim": 12}, "gpt2", ("head_dim is 12, it has 8",)),
    ("llama", (), {"head_dim": 12}, "qwen2", ("head_dim is 12, it has 8",)),
    ("llama", (), {"hidden_size": 36, "head_dim": 8, "num_attention_heads": 8}, "llama", ("36", "8")),
    ("gpt", (), {}, "llama", ("position_embedding_type", "'learned'", "norm_type", "mlp_type")),
    ("gpt", (), {"position_embedding_type": "none"}, "gpt2", ("position_embedding_type is 'none', it has 'learned'",)),
    ("llama", (), {"norm_type": "dyt"}, "llama", ("norm_type is 'dyt', it has 'rmsnorm'",)),
    ("gpt", (), {"norm_type": "none"}, "gpt2", ("norm_type is 'none'",)),
    ("gpt", (), {"norm_bias": True}, "llama", ("norm_bias is True, it has False",)),
    ("llama", (), {"mlp_bias": True}, "mistral", ("mlp_bias is True, it has False",)),
    ("llama", (), {"attention_output_bias": True}, "qwen2", ("attention_output_bias is True",)),
    ("llama", (), {"qk_norm": True}, "llama", ("qk_norm is True, it has False",)),
    ("llama", (), {}, "qwen3", ("qk_norm is False, it has True",)),
    ("llama", (), {"sliding_window": 5}, "llama", ("sliding_window is 5, it has None",)),
    ("llama", (), {"block_type": "parallel"}, "llama", ("block_type is 'parallel', it has 'serial'",)),
    (
        "gpt",
        (),
        {"position_embedding_type": "rope", "block_type": "parallel_shared_norm"},
        "gpt_neox",
        ("block_type is 'parallel_shared_norm'",),
    ),
    ("gpt", (), {"attention_skip": False}, "gpt2", ("attention_skip is False",)),
    ("gpt", (), {"mlp_skip": False}, "gpt2", ("mlp_skip is False",)),
    ("gpt", (), {"num_hidden_groups": 1}, "gpt2", ("num_hidden_groups is 1",)),
    ("gpt", (), {"mask_type": "prefix"}, "gpt2", ("mask_type is 'prefix'",)),
    ("gpt", (), {"task": "masked_lm"}, "gpt2", ("task is 'masked_lm'",)),
    ("llama", (), {"mlp_type": "moe"}, "llama", ("mlp_type is 'moe', it has 'gated'",)),
    ("llama", (), {"rope_parameters": {"partial_rotary_factor": 0.5}}, "llama", ("rope_parameters", "0.5")),
    ("llama", (), {"embedding_multiplier": 2.0}, "llama", ("embedding_multiplier is 2.0, it has 1.0",)),
    ("llama", (), {"residual_multiplier": 0.5}, "qwen2", ("residual_multiplier is 0.5, it has 1.0",)),
    ("llama", (), {"attention_multiplier": 0.5}, "llama", ("attention_multiplier is 0.5, it has 0.35",)),
    ("llama", (), {"logits_scaling": 8.0}, "mistral", ("logits_scaling is 8.0, it has 1.0",)),
    ("gpt", (), {"embedding_multiplier": 2.0}, "gpt2", ("embedding_multiplier is 2.0, it has 1.0",)),
    ("llama", (), {"sliding_window": 5, "window_layers": [1]}, "mistral", ("sliding_window is [None, 5, None], it",)),
    ("llama", (), {"rope_layers": [1]}, "llama", ("rope_parameters is [None, {",)),
    (
        "llama",
        (),
        {"sliding_window": 5, "window_layers": [1], "window_rope_parameters": {"rope_theta": 3.0}},
        "qwen2",
        ("rope_parameters is [", "'rope_theta': 3.0"),
    ),
    ("llama", (), LOCAL, "gemma3_text", ("embedding_multiplier is 1.0, it has 5.65", "norm_placement", "qk_norm")),
    ("llama", (), {"mlp_type": "moe", "norm_topk_prob": False}, "mixtral", ("norm_topk_prob is False, it has True",)),
    ("llama", (), {"norm_placement": "both"}, "llama", ("norm_placement is 'both', it has 'before'",)),
    ("llama", (), {"qk_norm": "width"}, "qwen3", ("qk_norm is 'width', it has True",)),
    ("llama", (), {"norm_placement": "after"}, "granite", ("norm_placement is 'after'",)),
]


@pytest.mark.parametrize(("shape", "mechanisms", "overrides", "family", "needles"), EXPORT_REFUSED)
def test_a_model_that_a_class_cannot_hold_is_refused(shape, mechanisms, overrides, family, needles):
    config = tiny(shape, *mechanisms, **overrides)
    for refusing in (
        lambda: FAMILIES[family].to_stock(config),
        lambda: choose_family(config, family),
        lambda: export_tensors(FAMILIES[family], config, {}),
    ):
        with pytest.raises(LeanError) as caught:
            refusing()
        message = str(caught.value)
        assert "\n" not in message
        for needle in (FAMILIES[family].architecture, *needles):
            assert needle in message


def test_no_family_holds_it():
    with pytest.raises(LeanError) as caught:
        choose_family(tiny("llama", "skipv1"))
    assert "LlamaForCausalLM and MistralForCausalLM" in str(caught.value)
    assert "first_layer_values" in str(caught.value)
    assert "GPT2" not in str(caught.value)
    # Those whose settings the model does not have are not near, though they say so in one error.
    assert "Mixtral" not in str(caught.value)
    with pytest.raises(LeanError, match="no family 'lama': did you mean 'llama'"):
        choose_family(tiny("llama"), "lama")


def test_other_checkpoints_are_refused(tmp_path):
    with pytest.raises(LeanError, match="not a checkpoint"):
        open_checkpoint(tmp_path)
    known = "leanqkv, llama, mistral, qwen2, qwen3, gpt_neox, gpt2"
    for content, refusal in (
        ({"model_type": "bert"}, f"'bert' checkpoint; only {known}"),
        ({"model_type": "gemma3"}, f"gemma3.*reads images.*gemma3_text.*{known}"),
        ({"model_type": "gemma2"}, f"gemma2.*soft-capping.*{known}"),
        ({"model_type": "gpt_oss"}, f"gpt_oss.*sinks.*{known}"),
        ({"model_type": "qwen2_moe"}, f"qwen2_moe.*share some experts.*{known}"),
        ({}, "model_type is a name, found None"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(LeanError, match=refusal):
            open_checkpoint(tmp_path)


WEIGHTS_REFUSED = {
    "missing": (["layers.1.mlp.up_proj.weight"], {}, ("lack tensors model.layers.1.mlp.up_proj.weight",)),
    "many missing": (["layers"], {}, ("lack tensors", "and 24 more")),
    "unknown": ([], {"score.weight": torch.ones(2, 32)}, ("unknown tensors score.weight",)),
    "another layer": ([], {"model.layers.3.mlp.up_proj.weight": torch.ones(1)}, ("unknown", "layers.3")),
    "no head": (["lm_head"], {}, ("lm_head.weight",)),
    "shape": (
        [],
        {"model.layers.2.mlp.up_proj.weight": torch.ones(47, 32)},
        ("layers.2.mlp.up_proj.weight in model.safetensors has shape (47, 32)", "(48, 32)"),
    ),
    "dtype": (
        [],
        {"model.norm.weight": torch.ones(32, dtype=torch.int8)},
        ("model.safetensors: model.norm.weight is int8", "floating-point"),
    ),
}


@pytest.mark.parametrize("case", WEIGHTS_REFUSED)
@pytest.mark.parametrize("own", [False, True], ids=["theirs", "ours"])
def test_weights_that_are_not_the_configurations_are_refused(case, own, tmp_path):
    without, more, needles = WEIGHTS_REFUSED[case]
    if own:
        LeanForCausalLM(LeanConfig(**{**LLAMA, "num_hidden_layers": 3})).save_pretrained(tmp_path)
    else:
        stock_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if not any(part in name for part in without)}
    save_file(tensors | more, file)
    with pytest.raises(LeanError) as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)
    for needle in (str(tmp_path), *needles):
        assert needle in str(caught.value)


# transformers has no such classes for the others.
WITH_HEADS = [case for case in ONE_OF_EACH if case not in ("granite", "olmo2", "gemma3", "phi3")]
HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "case, head", [("gpt2", "DoubleHeadsModel"), *((case, head) for case in WITH_HEADS for head in HEADS)]
)
def test_another_head_is_not_a_language_models(case, head, tied, tmp_path):
    config = stock_model(case).config
    config.tie_word_embeddings = tied
    name = type(AutoModel.from_config(config)).__name__.removesuffix("Model") + head
    getattr(transformers, name)(config).save_pretrained(tmp_path)
    architecture = FAMILIES[CASES[case][0]].architecture
    with pytest.raises(LeanError, match=rf"config\.json: it is a {name}; only a {architecture} can be opened"):
        open_checkpoint(tmp_path)
    # Without the name it is told by the tensors.
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"architectures": None}))
    with pytest.raises(LeanError, match=r"no language-model head|(unknown|lack) tensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LLaMAForCausalLM", "LlamaForCausalLMEagle", "LlamaModel", None])
def test_names_that_say_nothing_of_another_head_are_no_obstacle(name, tmp_path):
    stock_model("llama").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"architectures": name and [name]}))
    assert open_checkpoint(tmp_path).family == "llama"


def test_an_encoder_of_images_is_of_no_family(tmp_path):
    ViTModel(
        ViTConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    ).save_pretrained(tmp_path)
    with pytest.raises(LeanError, match="is a 'vit' checkpoint; only leanqkv, llama"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("mechanisms", [("skipv1", "nonlinear-query"), ("resformer:mode=per_token",), ("mla",)])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_own_checkpoints(mechanisms, tied, tmp_path):
    model = randomize(LeanForCausalLM(tiny("llama", *mechanisms, tie_word_embeddings=tied)))
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.family is None and checkpoint.directory == tmp_path
    assert isinstance(checkpoint.tensors, LazyTensors)
    state = model.state_dict()
    assert list(checkpoint.tensors) == list(checkpoint.config.plan.parameter_shapes)
    for name, tensor in checkpoint.tensors.items():
        assert torch.equal(tensor, state[name]), name
    # A head that is written once more.
    for head, fits in ((state["lm_head.weight"].clone(), True), (torch.zeros(97, 32), not tied)):
        save_file(dict(checkpoint.tensors) | {"lm_head.weight": head}, tmp_path / "other.safetensors")
        (tmp_path / "other.safetensors").replace(tmp_path / "model.safetensors")
        opened = open_checkpoint(tmp_path)
        if fits:
            assert torch.equal(opened.tensors["model.embed_tokens.weight"], state["model.embed_tokens.weight"])
        else:
            with pytest.raises(LeanError, match=r"model\.safetensors: lm_head\.weight is not"):
                opened.tensors["model.embed_tokens.weight"]


def test_own_models_of_images(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    images = {"task": "image_classification", "image_size": 8, "patch_size": 4, "num_labels": 5}
    model = randomize(LeanForImageClassification(LeanConfig(**sizes, **images)))
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    state = model.state_dict()
    assert set(checkpoint.tensors) == set(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in checkpoint.tensors.items())


def test_import_tensors_of_a_configuration_made_by_hand(tmp_path):
    """As `open_checkpoint` does it, in steps."""
    reference = stock_model("gpt2-inverse")
    reference.save_pretrained(tmp_path)
    family, hf = FAMILIES["gpt2"], json.loads((tmp_path / "config.json").read_text())
    config = family.lean_config(hf)
    tensors = import_tensors(family, config, open_tensors(tmp_path), hf)
    query = reference.transformer.h[2].attn.c_attn.weight.detach().T[:32]
    assert torch.equal(tensors["model.layers.2.self_attn.q_proj.weight"], query / 3)
    assert torch.equal(
        tensors["model.layers.0.self_attn.q_proj.bias"], reference.transformer.h[0].attn.c_attn.bias[:32]
    )
