"""Models that other tools have changed or wrapped: decoded as `model.generate` does, or refused by name."""

import functools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from types import MethodType
from typing import Any

import pytest
import torch
from shapes import randomize, tiny, tokens
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from leanqkv import LeanForCausalLM, LeanForMaskedLM
from leanqkv.inference import Decoder, prepared

IDS, NEW = tokens(2, 9), 6
MECHANISMS = [(), ("gqa", "skipv1"), ("nonlinear-query",), ("mla",)]


def build(*mechanisms: str, **fields: Any) -> LeanForCausalLM:
    model = randomize(LeanForCausalLM(tiny("llama", *mechanisms, **fields)), std=0.2).eval()
    model.generation_config.pad_token_id = 0
    return model


def generated(model: Any) -> Tensor:
    return model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=NEW, do_sample=False)


def assert_decoded(model: Any, expected: Tensor | None = None) -> None:
    expected = generated(model) if expected is None else expected
    assert torch.equal(Decoder(model).generate(IDS, max_new_tokens=NEW), expected)
    assert torch.equal(generated(prepared(model)), expected)


def greedy(model: Any) -> Tensor:
    """What `generate` gives, every token from the whole sequence: no cache."""
    ids = IDS
    for _ in range(NEW):
        with torch.no_grad():
            ids = torch.cat((ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    return ids


SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "stock": (lambda: LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **SIZES)), "a LlamaForCausalLM cannot be"),
    "no head": (lambda: build().model, "a LeanModel cannot be decoded, only a LeanForCausalLM"),
    "another head": (lambda: LeanForMaskedLM(tiny("gpt", task="masked_lm")), "a LeanForMaskedLM cannot be decoded"),
    "its own copy": (lambda: Decoder(build()).model, "this model is a Decoder's own copy"),
    "a layer": (lambda: nn.Linear(2, 2), "a Linear cannot be decoded"),
    "nothing": (lambda: None, "a NoneType cannot be decoded"),
    "a name": (lambda: "runs/a", "a str cannot be decoded"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_no_language_model_of_ours_is_refused_in_one_line(what: str) -> None:
    make, message = OTHERS[what]
    with pytest.raises(ValueError, match=message) as caught:
        Decoder(make())
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_checkpoints_own_code_is_taken(tmp_path) -> None:
    """Its class has our name and lies in another module."""
    model = build("gqa", "skipv1")
    model.save_pretrained(tmp_path)
    loaded = get_class_from_dynamic_module("causal_lm.LeanForCausalLM", tmp_path).from_pretrained(tmp_path).eval()
    assert not isinstance(loaded, LeanForCausalLM)
    assert_decoded(loaded, generated(model))


# --- hooks ------------------------------------------------------------------------------------------------------------

HOOKED = [name for name, _ in build("gqa", "skipv1", "nonlinear-query", num_hidden_layers=2).named_modules()]
HOOKED_LATENT = [name for name, _ in build("mla", num_hidden_layers=1).named_modules()]


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
@pytest.mark.parametrize(
    "mechanisms, layers, name",
    [
        *((("gqa", "skipv1", "nonlinear-query"), 2, name) for name in HOOKED),
        *((("mla",), 1, name) for name in HOOKED_LATENT),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_hook_on_any_module_acts(mechanisms, layers, name: str, kind: str) -> None:
    model, calls = build(*mechanisms, num_hidden_layers=layers), []

    def larger(value: Any) -> Any:
        return 1.5 * value if isinstance(value, Tensor) and value.is_floating_point() else value

    def after(module: nn.Module, given: Any, output: Any) -> Any:
        calls.append(module)
        return larger(output)

    def before(module: nn.Module, given: tuple) -> tuple:
        calls.append(module)
        return tuple(larger(value) for value in given)

    hook = after if kind == "forward" else before
    getattr(model.get_submodule(name), f"register_{kind}_hook")(hook)
    assert_decoded(model)
    expected = greedy(model)  # with a cache or without
    acted = bool(calls)
    assert torch.equal(generated(model), expected)
    calls.clear()
    Decoder(model).generate(IDS, max_new_tokens=NEW)
    assert bool(calls) == acted


def test_what_a_hook_collects_is_where_its_owner_looks() -> None:
    class Collector:
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

        def __call__(self, module: nn.Module, given: Any, output: Tensor) -> None:
            self.seen.append(output)

        method = __call__

    def into(seen: list[Tensor], module: nn.Module, given: Any, output: Tensor) -> None:
        seen.append(output)

    model, collectors, partly = build(), [Collector(), Collector()], []
    for hook in (collectors[0], collectors[1].method, functools.partial(into, partly)):
        model.model.layers[0].mlp.register_forward_hook(hook)
    Decoder(model).generate(IDS, max_new_tokens=3)
    assert [len(seen) for seen in (collectors[0].seen, collectors[1].seen, partly)] == [3, 3, 3]


def test_a_layer_with_a_forward_of_its_own_keeps_it() -> None:
    """As tools that trace or offload put it there."""
    for name in ("mlp.down_proj", "mlp.gate_proj", "self_attn.q_proj"):
        model = build()
        linear = model.model.layers[1].get_submodule(name)
        linear.forward = MethodType(lambda self, x: 1.5 * nn.functional.linear(x, self.weight), linear)
        assert_decoded(model)


# --- other tools ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanisms", MECHANISMS, ids="+".join)
def test_dynamically_quantised(mechanisms) -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this build of PyTorch has no kernels for quantised layers")
    model = torch.ao.quantization.quantize_dynamic(build(*mechanisms), {nn.Linear}, dtype=torch.qint8)
    assert any("quantized" in type(module).__module__ for module in model.modules())
    assert_decoded(model)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_compiled_in_place_and_around() -> None:
    """In a process of its own: after many other models, Dynamo compiles inner functions alone, and not all of them."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(check_compiled_in_place_and_around).result()


def check_compiled_in_place_and_around() -> None:
    """The copy is not compiled: it must not call the original, which may be in training mode."""
    model = build("gqa", "skipv1", hidden_dropout=0.5)
    expected = generated(model)
    around = torch.compile(model, backend="eager")
    model.compile(backend="eager")
    for wrapped in (model, around):
        assert_decoded(wrapped, expected)
    model.train()
    assert_decoded(model, expected)


@pytest.mark.parametrize("mechanisms", MECHANISMS, ids="+".join)
def test_dropout_does_not_act(mechanisms) -> None:
    model = build(*mechanisms, attention_dropout=0.5, hidden_dropout=0.5, embedding_dropout=0.5)
    expected = generated(model)
    model.train()
    assert_decoded(model, expected)
    assert model.training and all(module.training for module in model.modules())


def adapted(mechanisms: tuple[str, ...], config: str, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(build(*mechanisms), getattr(peft, config)(**options)).eval()


@pytest.mark.parametrize("mechanisms", MECHANISMS, ids="+".join)
@pytest.mark.slow
def test_lora(mechanisms) -> None:
    """On every linear layer; with a cache it is the same function as without."""
    model = adapted(mechanisms, "LoraConfig", target_modules="all-linear", r=4, init_lora_weights=False)
    base = model.get_base_model()
    assert_decoded(model, greedy(model))
    assert_decoded(base, greedy(model))
    merged = model.merge_and_unload()
    assert_decoded(merged, greedy(merged))


@pytest.mark.parametrize("config", ["PromptTuningConfig", "PrefixTuningConfig"])
@pytest.mark.slow
def test_trained_prompts_are_refused(config: str) -> None:
    model = adapted((), config, task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ValueError, match=r"puts trained tokens before every prompt, .* use model.generate"):
        Decoder(model)
