"""What every architecture promises, whatever its mechanisms: checked on each of them, at two tiny shapes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from shapes import assert_near, randomize, tiny, tokens
from torch import Tensor
from torch.nn.attention import flex_attention
from transformers import DynamicCache, StaticCache
from variants import ALL, PAD, Variant

from leanqkv import LeanConfig, LeanForCausalLM, cache_bytes, count_parameters, kv_bytes_per_token, plan
from leanqkv.model.mechanisms import KEY_VALUES, KEYS, QUERIES, VALUES
from leanqkv.model.shapes import parameter_shapes
from leanqkv.presets.catalog import MECHANISMS

NEW = 8  # tokens generated
every = pytest.mark.parametrize("variant", ALL, ids=str)


def rounding(dtype: torch.dtype) -> float:
    """What sums of some hundred terms, taken in another order, leave after a few layers of large weights."""
    return 1000 * torch.finfo(dtype).eps


# --- the list above is complete ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "slot, table", [("query", QUERIES), ("key", KEYS), ("value", VALUES)], ids=lambda x: str(x)[:5]
)
def test_every_projection_is_covered(slot: str, table: dict[str, Any]) -> None:
    used = {getattr(layer, slot).kind for variant in ALL for layer in plan(variant.config()).layers}
    assert used == set(table)


def test_every_sharing_is_covered() -> None:
    assert {variant.config().key_value["type"] for variant in ALL} == set(KEY_VALUES)


# --- parameters -------------------------------------------------------------------------------------------------------


@every
def test_parameters_are_the_plans(variant: Variant) -> None:
    config = variant.config()
    built = {name: tuple(p.shape) for name, p in LeanForCausalLM(config).named_parameters()}
    assert built == parameter_shapes(config)
    sizes = {name: torch.Size(shape).numel() for name, shape in built.items()}
    count = count_parameters(config)
    assert count.total == sum(sizes.values())
    assert count.non_embedding == sum(n for name, n in sizes.items() if "embed_" not in name and "lm_head" not in name)


@every
def test_every_parameter_gets_a_gradient(variant: Variant) -> None:
    torch.manual_seed(0)
    model = LeanForCausalLM(variant.config()).double().train()
    if variant.config().norm_type in ("none", "dyt") or variant.config().hyper_connections:
        # Without norms, little of a start so small reaches the last layer; scales of what starts as zero have none.
        randomize(model, std=0.3)
    ids = tokens(4, 40)  # enough for every expert to be chosen
    model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        if "mode=mhc" in str(variant) and name == "model.layers.0.attention_connection.residual":
            continue  # its rows add up to one, and the streams are still equal
        # Float64 rounding leaves some 1e-17 of a gradient that is zero by construction.
        assert parameter.grad.abs().max() > 1e-10, name


@pytest.fixture(scope="module")
def started() -> Callable[[str, int], dict[str, dict[str, Tensor]]]:
    """Initial parameters of every mechanism preset, all of the same depth, by shape and seed."""

    def build(shape: str, seed: int) -> dict[str, dict[str, Tensor]]:
        models = {}
        for name in ("", *MECHANISMS):
            torch.manual_seed(seed)
            model = LeanForCausalLM(tiny(shape, *filter(None, [name]), num_hidden_layers=5))
            models[name] = {n: p.detach() for n, p in model.named_parameters()}
        return models

    return build


@pytest.mark.parametrize("shape", ["gpt", "llama"])
def test_one_seed_one_start(shape: str, started: Callable) -> None:
    """Comparisons between variants start from the same weights, wherever both have them."""
    narrower = 0
    for one, other in combinations(started(shape, seed=1).values(), 2):
        for name in one.keys() & other.keys():
            a, b = one[name], other[name]
            if a.shape == b.shape:
                assert torch.equal(a, b), name
            elif name.endswith("v_proj.weight") and a.shape[1] == b.shape[1]:  # an identity block leaves out columns
                rows = min(len(a), len(b))
                assert torch.equal(a[:rows], b[:rows]), name
                narrower += 1
    assert narrower > 100


def test_another_seed_another_start(started: Callable) -> None:
    for one, other in zip(started("gpt", seed=1).values(), started("gpt", seed=2).values(), strict=True):
        for name, parameter in one.items():
            drawn = parameter.ndim > 1 and bool(parameter.any())  # the matrices of hyper-connections start as zeros
            assert torch.equal(parameter, other[name]) != drawn, name


def test_layers_and_tensors_start_differently() -> None:
    """A stream that forgot the tensor's name would repeat itself."""
    matrices = [p for p in LeanForCausalLM(tiny("llama")).parameters() if p.ndim == 2]
    first_rows = {tuple(p.flatten()[:8].tolist()) for p in matrices}
    assert len(first_rows) == len(matrices)


# --- generation -------------------------------------------------------------------------------------------------------

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.8},
    "beam": {"num_beams": 3},
}


def generated(model: LeanForCausalLM, ids: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(0)
    mask = options.pop("attention_mask", torch.ones_like(ids))
    options = {"do_sample": False, "max_new_tokens": NEW} | options
    return model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]


@every
def test_generation_does_not_depend_on_the_cache(variant: Variant) -> None:
    model = variant.trained().double()
    ids = tokens(4, 6)
    for mode, options in MODES.items():
        expected = generated(model, ids, use_cache=False, **options)
        assert expected.shape == (4, NEW), mode
        assert len(expected.unique()) >= 3, f"{mode}: too few distinct tokens to tell a difference"
        assert torch.equal(generated(model, ids, **options), expected), mode
        assert torch.equal(generated(model, ids, cache_implementation="static", **options), expected), f"static {mode}"


@every
def test_guessed_tokens_are_taken_back(variant: Variant) -> None:
    model = variant.trained().double()
    ids = tokens(1, 6).repeat(1, 2)  # so that the last tokens have been there, and what followed is guessed
    assert torch.equal(generated(model, ids, prompt_lookup_num_tokens=3), generated(model, ids))


@every
def test_left_padding_changes_nothing(variant: Variant) -> None:
    model = variant.trained().double()
    rows = [tokens(1, length, seed=length) for length in (3, 7, 5)]
    ids = torch.cat([torch.nn.functional.pad(row, (7 - row.shape[1], 0), value=PAD) for row in rows])
    alone = torch.cat([generated(model, row, use_cache=False) for row in rows])
    assert len({tuple(row.tolist()) for row in alone}) == 3
    for options in ({"use_cache": False}, {}, {"cache_implementation": "static"}):
        assert torch.equal(generated(model, ids, attention_mask=(ids != PAD).long(), **options), alone), options


@every
def test_cache_can_be_filled_in_pieces_and_cut(variant: Variant) -> None:
    """Several tokens onto a filled cache, and back again, as assisted decoding does."""
    model = variant.trained().double()
    ids = tokens(2, 9)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        cache = DynamicCache(config=model.config)
        parts = [model(input_ids=part, past_key_values=cache).logits for part in ids.split([4, 3, 2], dim=1)]
        assert_near(torch.cat(parts, dim=1), expected, rounding(torch.float64))
        if model.config.sliding_window is not None:
            return  # a window that has moved on cannot be moved back
        cache.crop(-4)
        assert_near(model(input_ids=ids[:, 5:], past_key_values=cache).logits, expected[:, 5:], rounding(torch.float64))


# --- cache memory -----------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cache_holds_what_the_formula_says(variant: Variant, dtype: torch.dtype) -> None:
    model = variant.trained().to(dtype)
    per_token = kv_bytes_per_token(model.config, dtype=dtype)
    assert per_token == dtype.itemsize * elements_per_token(model.config)
    ids = tokens(2, 7)
    with torch.no_grad():
        dynamic = model(input_ids=ids, use_cache=True).past_key_values
        assert held(dynamic) == 2 * bytes_of(model.config, 7, dtype)
        model(input_ids=ids[:, :1], past_key_values=dynamic)
        assert held(dynamic) == 2 * bytes_of(model.config, 8, dtype)
        static = StaticCache(config=model.config, max_cache_len=11)
        model(input_ids=ids, past_key_values=static)
        if model.config.sliding_window is None:
            assert cache_bytes(dynamic) == 2 * 8 * per_token
            assert cache_bytes(static) == 2 * 11 * per_token
        else:
            assert cache_bytes(static) < 2 * 11 * per_token


def held(cache: DynamicCache) -> int:
    """Bytes of the tensors themselves: transformers' windowed layers cut a view and leave the rest to the next step."""
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None]
    return sum(tensor.nbytes for tensor in tensors)


def bytes_of(config: LeanConfig, length: int, dtype: torch.dtype) -> int:
    assert config.sliding_window is not None or plan(config).kv_bytes(length, dtype) == length * kv_bytes_per_token(
        config, dtype=dtype
    )
    return plan(config).kv_bytes(length, dtype)


def elements_per_token(config: LeanConfig) -> int:
    """Keys and values of all layers, less what other layers' replace; written without the plan."""
    sharing, layers = {"ratio": 0.5, "source_layer": 0, **config.key_value}, config.num_hidden_layers
    kind, middle = sharing["type"], layers // 2 - 1
    latent = config.kv_lora_rank is not None
    all_keys, all_values = config.num_key_value_heads, config.num_key_value_heads
    if latent:
        all_keys, all_values = bool(config.qk_rope_head_dim), config.kv_lora_rank
    total = 0
    for layer in range(layers):
        keys, values = all_keys, all_values
        if kind == "first_layer_values" and layer > sharing["source_layer"]:
            values -= int(all_values * sharing["ratio"])
            if not sharing.get("inject", True):
                keys = values
            if sharing.get("keys"):
                keys -= int(all_keys * sharing["ratio"])
            if sharing.get("middle_keys") and layer > middle:
                keys = 0
        elif (
            kind == "first_layer_values" and sharing.get("injection") == "pooling" and layer == sharing["source_layer"]
        ):
            values += int(all_values * sharing["ratio"])
        elif kind in ("shared_middle", "first_values_middle_keys") and layer > middle:
            keys, values = 0 if kind != "shared_middle" or sharing.get("keys") else keys, 0
        elif kind == "borrowed_values" and "heads" in sharing:
            values -= sum(row[0] == layer for row in sharing["heads"])
        elif kind == "borrowed_values" and layer > 0:
            values -= int(all_values * sharing["ratio"])
        elif kind == "shared_adjacent" and layer % sharing.get("group_size", 2):
            keys, values = 0 if sharing.get("keys") else keys, 0
        own_keys, own_values = (
            next((entry for entry in entries if layer in entry.get("layers", [layer])), {})
            for entries in (config.key, config.value)
        )
        if "latent" in (own_keys.get("type"), own_values.get("type")):
            widths = keys * config.head_dim, values * config.head_dim
            rotary = config.position_embedding_type == "rope" and layer in (config.rope_layers or [layer])
            half = (keys + 1) // 2 * config.head_dim if rotary else widths[0] // 2
            columns = own_keys.get("rank") or 2 * sum(own_keys.get("columns") or ()) or half
            total += columns if own_keys.get("type") == "latent" else widths[0]
            total += (own_values.get("rank") or widths[1] // 2) if own_values.get("type") == "latent" else widths[1]
            continue
        if config.value == [{"type": "keys"}] and not (kind == "interpolated_values" and layer > 0):
            values = 0
        if latent:
            total += keys * config.qk_rope_head_dim + values
        else:
            total += (keys + values) * config.head_dim
    return total


@pytest.mark.parametrize("ratio, layers", product([0.25, 0.5, 0.75, 1.0], [2, 3, 8]))
def test_skipv1_saves_what_the_paper_says(ratio: float, layers: int) -> None:
    plain = kv_bytes_per_token(tiny("gpt", num_hidden_layers=layers), dtype=torch.float32)
    assert plain == 2 * 4 * 32 * layers
    skipped = kv_bytes_per_token(tiny("gpt", f"skipv1:ratio={ratio}", num_hidden_layers=layers), dtype=torch.float32)
    assert skipped == round(plain * (1 - ratio / 2 * (1 - 1 / layers)))


# --- saving and loading -----------------------------------------------------------------------------------------------

LOAD_WITHOUT_THE_PACKAGE = """
import json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "leanqkv":
            raise ImportError("leanqkv is not installed here")

sys.meta_path.insert(0, Blocked())
import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
different = []
for folder in json.loads(sys.argv[1]):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    wanted = torch.load(f"{folder}/wanted.pt")
    with torch.no_grad():
        found = model(input_ids=wanted["ids"]).logits
    cached = model.generate(wanted["ids"], max_new_tokens=4, do_sample=False)
    uncached = model.generate(wanted["ids"], max_new_tokens=4, do_sample=False, use_cache=False)
    if not torch.equal(found, wanted["logits"]) or not torch.equal(cached, uncached):
        different.append(folder)
assert "leanqkv" not in sys.modules
print(json.dumps(different))
"""


def save(variant: Variant, folder: Path) -> Path:
    """Write a model, with the logits it gave before."""
    model, ids = variant.trained(), tokens(2, 6)
    model.save_pretrained(folder)
    with torch.no_grad():
        torch.save({"ids": ids, "logits": model(input_ids=ids).logits}, folder / "wanted.pt")
    return folder


@every
@pytest.mark.slow
def test_saved_is_loaded(variant: Variant, tmp_path: Path) -> None:
    model = LeanForCausalLM.from_pretrained(save(variant, tmp_path)).eval()
    wanted = torch.load(tmp_path / "wanted.pt")
    with torch.no_grad():
        assert torch.equal(model(input_ids=wanted["ids"]).logits, wanted["logits"])
    assert plan(model.config) == plan(variant.config())


@pytest.mark.long_cases
@pytest.mark.parametrize("first", range(12))
@pytest.mark.slow
def test_saved_is_loaded_without_the_package(first: int, tmp_path: Path) -> None:
    """One fresh process for every twelfth: the checkpoint's own code is all it has."""
    folders = [str(save(variant, tmp_path / str(variant))) for variant in ALL[first::12]]
    environment = {**os.environ, "HF_HOME": str(tmp_path), "PYTHONPATH": ""}
    command = [sys.executable, "-c", LOAD_WITHOUT_THE_PACKAGE, json.dumps(folders)]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1]) == []


# --- training ---------------------------------------------------------------------------------------------------------


def loss_and_gradients(model: LeanForCausalLM, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@every
def test_gradient_checkpointing_changes_nothing(variant: Variant) -> None:
    model = variant.trained(hidden_dropout=0.1, attention_dropout=0.1).double().train()
    ids = tokens(2, 8)
    calls = []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    uses = [layer.block for layer in plan(model.config).layers].count(0)
    loss, gradients = loss_and_gradients(model, ids)
    assert len(calls) == uses
    model.gradient_checkpointing_enable()
    again, recomputed = loss_and_gradients(model, ids)
    assert len(calls) == 3 * uses, "the block was not computed again"
    assert torch.equal(loss, again)
    # What is small of a gradient is a difference of others that are as large as the largest of all.
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert_near(recomputed[name], gradient, rounding(torch.float64), name, floor=largest)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("shape", ["gpt", "llama"])
@pytest.mark.parametrize(
    "names, overrides", [((), {}), (("skipv1",), {}), (("mlp-query",), {}), ((), {"mlp_type": "moe"})]
)
def test_reentrant_checkpointing_is_right_or_refused(shape: str, names: tuple[str, ...], overrides: dict) -> None:
    """It passes no gradient through what a block returns in a tuple, so borrowed values would silently get none."""
    model = Variant(shape, names, overrides).trained().double().train()
    ids = tokens(2, 8)
    loss, gradients = loss_and_gradients(model, ids)
    try:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    except ValueError as error:
        assert "use_reentrant" in str(error)
        return
    again, recomputed = loss_and_gradients(model, ids)
    assert torch.equal(loss, again)
    for name, gradient in gradients.items():
        assert_near(recomputed[name], gradient, rounding(torch.float64))


@every
def test_dropout_acts_in_training_alone(variant: Variant) -> None:
    ids = tokens(2, 8)
    with torch.no_grad():
        expected = variant.trained()(input_ids=ids).logits
        for name in ("attention_dropout", "hidden_dropout", "embedding_dropout"):
            model = variant.trained(**{name: 0.5})
            assert torch.equal(model(input_ids=ids).logits, expected), name
            model.train()
            assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits), name
        model = variant.trained().train()
        assert torch.equal(model(input_ids=ids).logits, expected)


# --- attention implementations ----------------------------------------------------------------------------------------


@every
def test_eager_is_sdpa(variant: Variant) -> None:
    model = variant.trained()
    ids = torch.nn.functional.pad(tokens(2, 8), (2, 0), value=PAD)
    ids[1, :2] = 5
    mask = (ids != PAD).long()
    logits = {}
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits[name] = model(input_ids=ids, attention_mask=mask).logits[:, 2:]
    assert_near(logits["sdpa"], logits["eager"], rounding(torch.float32))


FLEX = ((), ("gqa", "skipv1"), ("skipv0",), ("yoco",), ("keys-as-values",), ("mla",), ("mla", "skipv1"))


@pytest.mark.parametrize("variant", [v for v in ALL if v.mechanisms in FLEX], ids=str)
@pytest.mark.slow
def test_flex_attention_is_sdpa(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    # Uncompiled: the compiler costs seconds per shape and changes nothing about how the model calls it.
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    model = variant.trained()
    ids = tokens(2, 8)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        expected = model(input_ids=ids).logits
        model.set_attn_implementation("flex_attention")
        assert_near(model(input_ids=ids).logits, expected, rounding(torch.float32))
        cache = DynamicCache(config=model.config)
        pieces = [model(input_ids=piece, past_key_values=cache).logits for piece in ids.split([5, 2, 1], dim=1)]
        assert_near(torch.cat(pieces, dim=1), expected, rounding(torch.float32))


@every
def test_attention_weights(variant: Variant) -> None:
    model = variant.trained()
    model.set_attn_implementation("eager")
    length = 6
    with torch.no_grad():
        found = model(input_ids=tokens(2, length), output_attentions=True).attentions
    layers = plan(model.config).layers
    assert len(found) == len(layers)
    for weights, layer in zip(found, layers, strict=True):
        assert weights.shape == (2, layer.num_query_heads, length, length)
        assert_near(weights.sum(-1), torch.ones(weights.shape[:-1]), rounding(torch.float32))
        assert not weights.triu(1).any()
        assert (weights.diagonal(dim1=-2, dim2=-1)[..., 1:] < 1).any()


# --- the interface ----------------------------------------------------------------------------------------------------


@every
def test_inputs_and_outputs(variant: Variant) -> None:
    model = variant.trained().double()
    ids = tokens(2, 8)
    with torch.no_grad():
        full = model(input_ids=ids, labels=ids)
        balance = model.config.router_aux_loss_coef * full.aux_loss if full.aux_loss is not None else 0
        assert full.logits.shape == (2, 8, 97)

        assert_near(model(input_ids=ids, logits_to_keep=3).logits, full.logits[:, -3:], rounding(torch.float64))
        chosen = torch.tensor([1, 4])
        assert_near(model(input_ids=ids, logits_to_keep=chosen).logits, full.logits[:, chosen], rounding(torch.float64))

        hidden = model(input_ids=ids, output_hidden_states=True).hidden_states
        assert len(hidden) == model.config.num_hidden_layers + 1
        assert torch.equal(model.lm_head(hidden[-1]) / model.config.logits_scaling, full.logits)

        embedded = model(inputs_embeds=model.get_input_embeddings()(ids))
        assert torch.equal(embedded.logits, full.logits)

        expected = torch.nn.functional.cross_entropy(full.logits[:, :-1].reshape(-1, 97), ids[:, 1:].reshape(-1))
        assert_near(full.loss, expected + balance, rounding(torch.float32))
        shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        assert torch.equal(model(input_ids=ids, shift_labels=shifted).loss, full.loss)

        masked = ids.clone()
        masked[:, 5:] = -100
        expected = torch.nn.functional.cross_entropy(full.logits[:, :4].reshape(-1, 97), ids[:, 1:5].reshape(-1))
        assert_near(model(input_ids=ids, labels=masked).loss, expected + balance, rounding(torch.float32))


def test_either_ids_or_embeddings() -> None:
    model = LeanForCausalLM(tiny("gpt"))
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        model(input_ids=tokens(1, 3), inputs_embeds=torch.zeros(1, 3, 32))
