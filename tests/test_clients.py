"""Clients of transformers' interfaces, with the package and with the code that travels with a checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shapes import assert_near, randomize, tiny, tokens
from torch.utils._pytree import tree_map
from transformers import CompileConfig, DynamicCache, Trainer, TrainingArguments
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from leanqkv import ConfigError, LeanConfig, LeanForCausalLM, LeanQuantizedCache

IDS = tokens(2, 9)
EXPERTS = {"mlp_type": "moe", "num_local_experts": 3, "router_aux_loss_coef": 0.5}


def build(*mechanisms: str, **fields: Any) -> Any:
    model = randomize(LeanForCausalLM(tiny("llama", *mechanisms, **fields)), std=0.2).eval()
    model.generation_config.pad_token_id = 0
    return model


def own(folder: Path) -> Any:
    return LeanForCausalLM.from_pretrained(folder)


def traveling(folder: Path) -> Any:
    """With the code in the folder alone: as in a process without the package."""
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.pop("leanqkv")
    cls = get_class_from_dynamic_module("causal_lm.LeanForCausalLM", folder)
    assert cls is not LeanForCausalLM
    return cls.from_pretrained(folder)


both = pytest.mark.parametrize("load", [own, traveling], ids=lambda load: load.__name__)


def saved(model: Any, folder: Path, load: Callable[[Path], Any]) -> Any:
    model.save_pretrained(folder)
    loaded = load(folder).eval()
    loaded.generation_config.pad_token_id = 0
    return loaded


def trainer(model: Any, folder: Path, **arguments: Any) -> Trainer:
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    given = TrainingArguments(str(folder / "run"), use_cpu=True, report_to="none", **arguments)
    return Trainer(model, given, train_dataset=rows, eval_dataset=rows)


# --- Trainer and TRL --------------------------------------------------------------------------------------------------


@both
def test_attributes_that_tools_set_on_a_configuration_are_kept(load, tmp_path: Path, caplog) -> None:
    model = build()
    model.config.output_router_logits = True
    setattr(model.config, f"note_of_{load.__name__}", [1, 2])
    loaded = saved(model, tmp_path, load)
    assert "is kept and changes nothing" in caplog.text
    assert loaded.config.output_router_logits is True
    assert getattr(loaded.config, f"note_of_{load.__name__}") == [1, 2]
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@both
def test_smoothed_labels_are_those_of_the_next_tokens(load, tmp_path: Path) -> None:
    """(1 - e) of the cross-entropy, e of its mean over all tokens of the vocabulary."""
    model = saved(build(), tmp_path, load)
    found = trainer(model, tmp_path, label_smoothing_factor=0.1).compute_loss(model, {"input_ids": IDS, "labels": IDS})
    logs = model(IDS).logits.log_softmax(-1)
    losses = [
        -0.9 * logs[row, place, IDS[row, place + 1]] - 0.1 * logs[row, place].mean()
        for row in range(2)
        for place in range(8)
    ]
    assert_near(found, torch.stack(losses).mean(), 1e-5)


def test_only_models_with_experts_have_router_logits() -> None:
    """By the presence of these attributes TRL decides whether there is a balance loss."""
    dense, experts = tiny("gpt"), tiny("gpt", **EXPERTS)
    assert not hasattr(dense, "output_router_logits") and not hasattr(dense, "num_experts")
    assert (dense.router_aux_loss_coef, experts.router_aux_loss_coef) == (0.0, 0.5)
    assert (experts.output_router_logits, experts.num_experts) == (False, 3)
    dense.output_router_logits, dense.router_aux_loss_coef = False, 0.0  # as TRL leaves them
    assert LeanConfig(**dense.as_overrides()) == tiny("gpt")
    with pytest.raises(ConfigError, match="router_aux_loss_coef needs mlp_type 'moe'"):
        tiny("gpt", router_aux_loss_coef=0.1)


@both
def test_experts_are_balanced_where_router_logits_are_asked_for(load, tmp_path: Path) -> None:
    """Without, `Trainer.predict` finds the logits behind the loss."""
    model = saved(build(**EXPERTS), tmp_path, load)
    plain = model(IDS, labels=IDS)
    assert list(plain) == ["loss", "logits", "past_key_values"]
    entropy = torch.nn.functional.cross_entropy(plain.logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    assert_near(plain.loss, entropy, 1e-5)
    predicted = trainer(model, tmp_path).predict(trainer(model, tmp_path).eval_dataset)
    assert_near(torch.from_numpy(predicted.predictions), plain.logits, 1e-5)

    model.config.output_router_logits = True  # as TRL does
    full = model(IDS, labels=IDS)
    assert list(full)[:3] == ["loss", "aux_loss", "logits"] and len(full.router_logits) == 3
    assert full.aux_loss >= 1
    assert_near(full.loss, entropy + 0.5 * full.aux_loss, 1e-5)
    assert_near(model(IDS).aux_loss, full.aux_loss, 1e-6)
    assert model(IDS, labels=IDS, output_router_logits=False).loss == plain.loss
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    model.generate(IDS, attention_mask=mask, max_new_tokens=3)


# --- layers that other tools add, remove or leave out -----------------------------------------------------------------

EXITS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "baseline": ((), {}),
    "skipv1": (("skipv1", "gqa"), {}),
    "shared blocks": ((), {"num_hidden_groups": 2}),
    "source in the third layer": (("skipv3",), {}),  # no model of two layers has that
    "windows": (("yoco:local=true",), {"sliding_window": 4}),  # in other layers than in a model of two
    "late windows": ((), {"sliding_window": 4, "window_layers": [3]}),
    "prefix": ((), {"mask_type": "prefix"}),
}


@pytest.mark.parametrize("seed", range(8))
def test_a_draft_has_the_prefix_of_the_prompt(seed: int) -> None:
    """It reads the prompt's last token again where the first one that it drafted was refused."""
    model, draft = (build(mask_type="prefix").double() for _ in range(2))
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    expected = model.generate(IDS[:1], max_new_tokens=12, do_sample=False)
    for given in ({}, {"prefix_mask": torch.ones_like(IDS[:1])}):
        found = model.generate(IDS[:1], max_new_tokens=12, do_sample=False, assistant_model=draft, **given)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("what", EXITS)
def test_an_early_exit_runs_the_first_layers(what: str) -> None:
    mechanisms, fields = EXITS[what]
    model = build(*mechanisms, num_hidden_layers=4, **fields)
    ids = IDS[:1]
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False, assistant_early_exit=2), expected)
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states[2]
        model.config.num_hidden_layers = 2
        assert_near(model(ids).logits, model.logits(model.model.norm(hidden)), 1e-6)
        cache = model(ids[:, :6], use_cache=True).past_key_values
        assert_near(model(ids[:, 6:], past_key_values=cache).logits, model(ids).logits[:, 6:], 1e-5)


@both
def test_layers_that_the_plan_does_not_know_are_refused(load, tmp_path: Path) -> None:
    needed = (
        r"^the model was built of 4 blocks for 4 layers and now has \d for \d; .* build another one from a LeanConfig"
    )
    model = saved(build(num_hidden_layers=4), tmp_path, load)
    layers = model.model.layers
    for kept, count in ((layers[:2], 4), (layers[:2], 2), ([*layers, layers[3]], 5), (layers, 5), (layers, 0)):
        model.model.layers, model.config.num_hidden_layers = torch.nn.ModuleList(kept), count
        with pytest.raises(ValueError, match=needed):
            model(IDS)
    model.model.layers, model.config.num_hidden_layers = layers, 4
    with pytest.raises(ValueError, match=needed):
        model.generate(IDS[:1], max_new_tokens=3, assistant_early_exit=5)
    assert model.generate(IDS, max_new_tokens=3).shape == (2, 12)


def test_replicated_layers_are_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(layer_replication=[(0, 2), (1, 3)], target_modules=["q_proj"])
    with pytest.raises(ValueError, match="built of 3 blocks for 3 layers and now has 4 for 4"):
        peft.get_peft_model(build(), config)(IDS)


# --- static caches ----------------------------------------------------------------------------------------------------

STATIC: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "skipv1": (("skipv1", "gqa"), {}),
    "mla": (("mla",), {}),
    "values from keys": (("values-from-keys", "gqa"), {}),
    "windows in some layers": (("gqa",), {"sliding_window": 4, "window_layers": [0, 2]}),
    "prefix": ((), {"mask_type": "prefix"}),
}


@pytest.mark.long_cases
@pytest.mark.slow
@pytest.mark.parametrize("what", ["skipv1", "windows in some layers", "prefix"])
def test_a_compiled_step_sees_masks_of_one_shape(what: str) -> None:
    mechanisms, fields = STATIC[what]
    model, given = build(*mechanisms, **fields), {"attention_mask": torch.ones_like(IDS), "do_sample": False}
    given["attention_mask"][0, :3] = 0
    expected = model.generate(IDS, **given, max_new_tokens=8)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiling = CompileConfig(backend="eager", fullgraph=True)
    compiling._compile_all_devices = True
    static = {**given, "cache_implementation": "static"}
    assert torch.equal(model.generate(IDS, **static, max_new_tokens=8, compile_config=compiling), expected)
    # A static cache with windows counts in whole numbers, which Dynamo notices once.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1 + ("sliding_window" in fields)
    shapes = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(str(tree_map(lambda mask: mask.shape, kwargs["attention_mask"]))),
        with_kwargs=True,
    )
    assert torch.equal(model.generate(IDS, **static, max_new_tokens=8), expected)
    assert len(shapes) == 8 and len(set(shapes[1:])) == 1, shapes


EXPORTED = {**STATIC, "yoco": (("yoco",), {"num_hidden_layers": 4}), "latents": (("latent-keys", "latent-values"), {})}


@pytest.mark.parametrize("what", EXPORTED)
def test_the_static_cache_of_an_exported_model_is_the_plans(what: str) -> None:
    """What transformers' recipe for ExecuTorch exports: one token at a time, with the cache in buffers."""
    mechanisms, fields = EXPORTED[what]
    model = build(*mechanisms, **fields)
    model.generation_config.cache_implementation = "static"
    module = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=16)
    buffers = [buffer for name, buffer in module.named_buffers() if name.startswith(("key_cache", "value_cache"))]
    assert sum(buffer.nbytes for buffer in buffers) == 16 * model.config.plan.kv_bytes_per_token(torch.float32)
    first = {"input_ids": IDS[:1, :1], "cache_position": torch.tensor([0])}
    with torch.no_grad():
        expected = model(IDS[:1]).logits
        step = torch.export.export(module, (), first).module() if what in ("skipv1", "yoco") else module
        found = [step(input_ids=IDS[:1, i : i + 1], cache_position=torch.tensor([i])) for i in range(9)]
    assert_near(torch.cat(found, dim=1), expected, 1e-5)


@pytest.mark.parametrize("what, length", [("skipv1", 5), ("mla", 6), ("mla", 5), ("values from keys", 7)])
@pytest.mark.parametrize("axis", [0, -1])
def test_a_prompt_of_any_length_is_quantized(what: str, length: int, axis: int) -> None:
    """Quanto's groups hold 64 numbers; what is left over is as near as the rest."""
    pytest.importorskip("optimum.quanto")
    model = build(*STATIC[what][0])
    cache = LeanQuantizedCache("quanto", model.config, nbits=4, axis_key=axis, axis_value=axis)
    ids, exact = tokens(2, length), DynamicCache(config=model.config)
    with torch.no_grad():
        for held in (cache, exact):
            model(ids, past_key_values=held)
    for found, expected in zip(cache.layers, exact.layers, strict=True):
        for name in ("keys", "values"):
            tensor = getattr(expected, name)
            again = found._dequantize(getattr(found, f"_quantized_{name}"))
            assert again.shape == tensor.shape
            if tensor.numel():
                assert_near(again, tensor, 0.2, f"{name} of {length} tokens")
    options = {"backend": "quanto", "nbits": 4, "axis_key": axis, "axis_value": axis, "residual_length": 1}
    given = {"attention_mask": torch.ones_like(ids), "cache_implementation": "quantized", "cache_config": options}
    assert model.generate(ids, **given, max_new_tokens=3).shape == (2, length + 3)


def test_continuous_batching_is_refused() -> None:
    with pytest.raises(ValueError, match=r"continuous batching cannot hold .* use `model.generate`"):
        build("skipv1").generate_batch([[1, 2, 3]])


def test_classification_of_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_labels .* no head here classifies text: put one of your own"):
        tiny("gpt", num_labels=3)


# --- PEFT -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanisms", [(), ("gqa", "skipv1"), ("nonlinear-query",), ("mla",), ("no-output",)], ids=str)
def test_lora_has_default_targets(mechanisms: tuple[str, ...]) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build(*mechanisms), peft.LoraConfig(task_type="CAUSAL_LM"))
    linear = [name for name, module in build(*mechanisms).named_modules() if type(module) is torch.nn.Linear]
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert adapted == {f"base_model.model.{name}" for name in linear if name != "lm_head"}


@pytest.mark.parametrize("mechanisms", [(), ("gqa", "skipv1"), ("mla",)], ids=str)
def test_ia3_has_default_targets(mechanisms: tuple[str, ...]) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build(*mechanisms), peft.IA3Config(task_type="CAUSAL_LM"))
    adapted = {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "ia3_l")}
    assert adapted == ({"kv_down_proj", "down_proj"} if "mla" in mechanisms else {"k_proj", "v_proj", "down_proj"})


def prefixed(*mechanisms: str, **fields: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return peft.get_peft_model(build(*mechanisms, **fields), config).eval()


@pytest.mark.parametrize("mechanisms", [("gqa",), ("yoco",), ("nonlinear-query",)], ids=str)
def test_prefix_tuning_of_layers_that_cache_whole_heads(mechanisms: tuple[str, ...]) -> None:
    model, ids = prefixed(*mechanisms, num_hidden_layers=4), IDS
    with torch.no_grad():
        for _ in range(3):
            ids = torch.cat((ids, model(input_ids=ids).logits[:, -1:].argmax(-1)), dim=1)
        found = model.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=3, do_sample=False)
    assert torch.equal(found, ids)


@pytest.mark.parametrize("mechanisms", [("skipv1",), ("mla",), ("keys-as-values",), ("latent-keys",)], ids=str)
def test_prefix_tuning_of_other_layers_is_refused(mechanisms: tuple[str, ...]) -> None:
    model = prefixed(*mechanisms)
    for call in (lambda: model(IDS, labels=IDS), lambda: model.generate(input_ids=IDS, max_new_tokens=2)):
        with pytest.raises(ValueError, match=r"^the cache given holds 4 heads of 8 .* so use prompt tuning or LoRA"):
            call()
