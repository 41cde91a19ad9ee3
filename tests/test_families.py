"""Checkpoints of transformers in and out: the same function, the same tensors; what cannot be expressed is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from shapes import GPT, LLAMA, assert_near, randomize, tiny, tokens
from stock_models import (
    CASES,
    LOCAL,
    ONE_OF_EACH,
    SIZES,
    stock_model,
)
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from variants import MULTIPLIERS

from leanqkv import LeanConfig, LeanError, LeanForCausalLM
from leanqkv.checkpoints.families import FAMILIES, choose_family, export_tensors
from leanqkv.checkpoints.open import Checkpoint, load_model, open_checkpoint
from leanqkv.checkpoints.tensors import LazyTensors, open_tensors
from leanqkv.checkpoints.write import write_model
from leanqkv.model.shapes import parameter_shapes
from leanqkv.presets.edit import with_fields

IDS = tokens(2, 12, vocab_size=61)


def ours(checkpoint: Checkpoint) -> LeanForCausalLM:
    """A model with exactly the tensors of the checkpoint."""
    tensors = dict(checkpoint.tensors)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == parameter_shapes(checkpoint.config)
    if checkpoint.config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model = LeanForCausalLM(checkpoint.config).to(checkpoint.dtype)
    model.load_state_dict(tensors, strict=True)
    return model.eval()


def run(cli, *arguments: Any) -> tuple[int, str]:
    """The exit code of a command line and what it said."""
    code, out, err = cli(*map(str, arguments))
    return code, " ".join((out + err).split())


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(input_ids=IDS).logits


def export(checkpoint: Checkpoint, directory: Path, name: str | None = None) -> PreTrainedModel:
    """What transformers loads from the checkpoint written as a family, nothing missing and nothing left over."""
    family = choose_family(checkpoint.config, name)
    family.to_stock(checkpoint.config).save_pretrained(directory)
    tensors = dict(export_tensors(family, checkpoint.config, checkpoint.tensors))
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
    # In float64: what differs is the tables of rotary positions, which transformers makes in float32.
    exact = {"dtype": torch.float64, "experts_implementation": "eager"}
    wide = type(reference).from_pretrained(tmp_path / "theirs", **exact)
    assert_near(logits(ours(checkpoint).double()), logits(wide), 1e-5)

    returned = export(checkpoint, tmp_path / "ours", checkpoint.family)
    assert torch.equal(logits(returned), expected)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert open_checkpoint(tmp_path / "ours").config.to_dict() == config.to_dict()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
@pytest.mark.parametrize("case", (*ONE_OF_EACH, "gpt2-inverse"))
def test_what_is_stored_comes_back(case, dtype, tmp_path, cli):
    """Imported and exported, every stored value is the source's, in every dtype, and the function is."""
    reference = stock_model(case, dtype)
    reference.save_pretrained(tmp_path / "theirs")
    for source, out, family in (("theirs", "ours", None), ("ours", "back", CASES[case][0])):
        opened = open_checkpoint(tmp_path / source)
        options: dict[str, Any] = {"stock": family is not None, "family": family, "exact": True}
        write_model(opened, tmp_path / out, opened.config, opened.tensors, opened.dtype, **options)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == dtype and torch.equal(tensor, after[name]), name
    checkpoint = open_checkpoint(tmp_path / "ours")
    assert checkpoint.dtype == checkpoint.config.dtype == dtype
    if case in ("gemma3", "gpt2-inverse"):
        code, output = run(cli, "verify", tmp_path / "theirs", tmp_path / "ours")
        assert code == 0, output
    computed, expected = logits(load_model(checkpoint)), logits(reference)
    assert computed.dtype == expected.dtype == dtype
    exact = logits(reference.float())
    assert_near(computed, exact, max(1e-5, 2 * ((expected - exact).abs().max() / exact.abs().max()).item()))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()), computed)


def test_norms_stored_with_their_one_are_a_gemma_too(tmp_path, cli):
    """As an earlier version stored them: 1 + w, without `norm_offset`. Written back only where no value is rounded."""
    reference = stock_model("gemma3")
    reference.save_pretrained(tmp_path / "theirs")
    config = open_checkpoint(tmp_path / "theirs").config
    for name, dtype in (("ours", torch.float32), ("narrow", torch.bfloat16)):
        old = LeanForCausalLM(with_fields(config, norm_offset=0.0))
        tensors = open_checkpoint(tmp_path / "theirs").tensors
        state = {n: (t + 1).clamp(min=0.1) if n.endswith("norm.weight") else t for n, t in tensors.items()}
        state["model.norm.weight"][0] = 0.1  # less one it takes more digits than bfloat16 has
        old.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
        old.to(dtype).save_pretrained(tmp_path / name)
    expected = logits(load_model(open_checkpoint(tmp_path / "ours")))
    code, output = run(cli, "export", tmp_path / "ours", "--out", tmp_path / "back")
    assert code == 0, output
    assert_near(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "back")), expected, 1e-5)
    code, output = run(cli, "export", tmp_path / "narrow", "--out", tmp_path / "back-narrow")
    assert code == 2 and "bfloat16 would round" in output and "--dtype fp32" in output
    assert not (tmp_path / "back-narrow").exists()
    code, output = run(cli, "export", tmp_path / "narrow", "--out", tmp_path / "back-narrow", "--dtype", "fp32")
    assert code == 0, output


def test_a_head_without_norms_is_not_rounded_by_the_epsilon(tmp_path, cli):
    """Norms that an epsilon switches off have its root as weights: exact in bfloat16."""
    torch.manual_seed(0)
    model = LeanForCausalLM(tiny("gpt", norm_type="none")).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            axis = 0 if name.endswith(("o_proj.weight", "down_proj.weight")) else -1
            if "embed" in name or axis == 0:  # rows whose mean is zero, in bfloat16
                half = parameter.shape[axis] // 2
                first, second = parameter.split(half, axis)
                second.copy_(-first)
    model.save_pretrained(tmp_path / "ours")
    code, output = run(cli, "export", tmp_path / "ours", "--out", tmp_path / "theirs")
    assert code == 0, output
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float64)
    assert_near(logits(theirs), logits(model.double()), 1e-9)


def test_a_gated_model_becomes_a_qwen3_next(tmp_path, cli):
    """With norms that multiply by their weight, and an identity query that is written out, as the class knows none."""
    mechanisms = ("output-gate", "gqa", "identity-query:layers=1")
    model = randomize(LeanForCausalLM(tiny("llama", *mechanisms, qk_norm=True, vocab_size=61))).eval()
    model.save_pretrained(tmp_path / "ours")
    code, output = run(cli, "export", tmp_path / "ours", "--out", tmp_path / "theirs")
    assert code == 0 and "Qwen3NextForCausalLM" in output, output
    assert_near(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")), logits(model), 1e-5)


def test_qwen2_takes_a_head_dim_that_it_does_not_declare(tmp_path):
    config = CONFIG_MAPPING["qwen2"](**SIZES, intermediate_size=48, num_key_value_heads=2, head_dim=12)
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
    tensors, buffers = dict(base.state_dict()), [name.format(i) for i in range(3) for name in BUFFERS[case]]
    tensors |= {name: torch.ones(2, dtype=torch.bool) for name in buffers}
    if not reference.config.tie_word_embeddings:
        tensors["lm_head.weight"] = reference.lm_head.weight.detach()
    for prefix in ("", f"{reference.base_model_prefix}."):
        prefixed = {name if name == "lm_head.weight" else prefix + name: tensor for name, tensor in tensors.items()}
        torch.save(prefixed, tmp_path / "pytorch_model.bin")
        assert_near(logits(ours(open_checkpoint(tmp_path))), logits(reference), 1e-5)
    halves = {name: tensor.half() for name, tensor in tensors.items()} | {name: torch.ones(2) for name in buffers}
    torch.save(halves, tmp_path / "pytorch_model.bin")
    assert open_checkpoint(tmp_path).dtype == torch.float16


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


# What the model is, the family that holds it best, and one of those that hold it with more biases of zeros.
BIASED = {"attention_bias": True}
ROOT = 32**0.5
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
    "granite-bias": ({**LLAMA, **MULTIPLIERS, "attention_output_bias": True, "mlp_bias": True}, "granite", None),
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
        {**LLAMA, **LOCAL, "norm_placement": "both", "norm_offset": 1.0, "qk_norm": True, "embedding_multiplier": ROOT},
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


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LLaMAForCausalLM", "LlamaForCausalLMEagle", "LlamaModel", None])
def test_names_that_say_nothing_of_another_head_are_no_obstacle(name, tmp_path):
    stock_model("llama").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"architectures": name and [name]}))
    assert open_checkpoint(tmp_path).family == "llama"


@pytest.mark.parametrize("mechanisms", [("skipv1", "nonlinear-query"), ("resformer:mode=per_token",), ("mla",)])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_own_checkpoints(mechanisms, tied, tmp_path):
    model = randomize(LeanForCausalLM(tiny("llama", *mechanisms, tie_word_embeddings=tied)))
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.family is None and checkpoint.directory == tmp_path
    assert isinstance(checkpoint.tensors, LazyTensors)
    state = model.state_dict()
    assert list(checkpoint.tensors) == list(parameter_shapes(checkpoint.config))
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
