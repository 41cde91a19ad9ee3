"""Values that are made of cached keys: these are turned back to what was projected, whatever the cache went through."""

from collections.abc import Iterable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from latents import assert_same_results, results
from shapes import assert_near, randomize, tiny, tokens
from torch import Tensor
from torch.func import functional_call
from transformers import DynamicCache, StaticCache

from leanqkv import ConfigError, LeanConfig, LeanForCausalLM, LeanQuantizedCache, cache_bytes
from leanqkv.inference import Decoder, allocate_cache
from leanqkv.model import latent_heads
from leanqkv.model.latent_heads import LatentHeadsAttention
from leanqkv.model.position import history_positions

EXACT = 1000 * torch.finfo(torch.float64).eps  # sums in another order, after a few layers of large weights
KEYS = "latent-values:rank=5,keys=true"
LIMIT = 16  # positions up to which "longrope" and "dynamic" keep their frequencies
Case = tuple[tuple[str, ...], dict[str, Any]]


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **parameters}}


STRETCHED = {"factor": 4.0, "original_max_position_embeddings": LIMIT}
LONGROPE = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0, 5.0], **STRETCHED}
CASES: dict[str, Case] = {
    "grouped": ((KEYS, "gqa"), {"attention_bias": True}),
    "latent keys": (("latent-keys:columns=0,2,3,1", KEYS), {"attention_bias": True}),
    "some layers": ((f"{KEYS},layers=1", "latent-keys:layers=1,2", "gqa"), {}),
    "some layers rotary": ((KEYS, "latent-keys:rank=6", "gqa"), {"rope_layers": [0, 2]}),
    "beside windows": ((f"{KEYS},layers=1", "gqa"), {"sliding_window": 4, "window_layers": [0, 2]}),
    "one block": ((KEYS, "mqa"), {"num_hidden_groups": 1}),
    "half of each head": ((KEYS,), rope("default", partial_rotary_factor=0.5)),
    "keys before rotary positions": ((KEYS, "latent-keys:before_rotary=true,rank=9"), {"attention_bias": True}),
    "keys before their norm": ((KEYS, "latent-keys:before_rotary=true,rank=9", "gqa"), {"qk_norm": True}),
    "keys before one norm": ((KEYS, "latent-keys:before_rotary=true,rank=9"), {"qk_norm": "width"}),
    "heads of some, in part": (
        (KEYS, "latent-keys:before_rotary=true,rank=6,layers=1", "gqa"),
        rope("default", partial_rotary_factor=0.5),
    ),
    "before yarn": ((KEYS, "latent-keys:before_rotary=true"), rope("yarn", **STRETCHED)),
    "linear": ((KEYS, "latent-keys"), rope("linear", factor=2.0)),
    "llama3": ((KEYS,), rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **STRETCHED)),
    "yarn": ((KEYS, "latent-keys"), rope("yarn", **STRETCHED)),
    "longrope": ((KEYS,), rope("longrope", **LONGROPE)),
    "dynamic": ((KEYS, "gqa"), {**rope("dynamic", factor=2.0), "max_position_embeddings": LIMIT}),
    "learned": ((KEYS, "gqa"), {"position_embedding_type": "learned", "attention_bias": True}),
    "no positions": ((KEYS, "latent-keys:rank=6"), {"position_embedding_type": "none"}),
}
every = pytest.mark.parametrize("case", CASES)
SOME = (
    "grouped",
    "latent keys",
    "yarn",
    "some layers rotary",
    "keys before rotary positions",
    "keys before their norm",
    "keys before one norm",
    "heads of some, in part",
)
some = pytest.mark.parametrize("case", SOME)


def build(case: str, std: float = 0.3, **fields: Any) -> LeanForCausalLM:
    names, overrides = CASES[case]
    config = tiny("llama", *names, pad_token_id=0, **{**overrides, **fields})
    return randomize(LeanForCausalLM(config), std).double().eval()


def counted(mask: Tensor) -> Tensor:
    """Positions as `generate` counts them."""
    return (mask.cumsum(-1) - 1).clamp_min(0)


@torch.no_grad()
def in_pieces(model: Any, ids: Tensor, cache: Any, lengths: Iterable[int], mask: Any = None, by_mask=False) -> Tensor:
    """Logits of `ids`, given in pieces of these lengths, then one by one, behind what the cache holds."""
    start, found = int(cache.get_seq_length()), []
    total, ends = start + ids.shape[1], [start]
    for length in lengths:
        ends.append(min(ends[-1] + length, total))
    ends += range(ends[-1] + 1, total + 1)
    for a, b in pairwise(ends):
        given = {} if mask is None else {"attention_mask": mask[:, :b]}
        given |= {"position_ids": counted(mask[:, :b])[:, a:]} if by_mask else {}
        found.append(model(ids[:, a - start : b - start], past_key_values=cache, **given).logits)
    return torch.cat(found, dim=1)


@torch.no_grad()
def whole(model: Any, ids: Tensor, **given: Any) -> Tensor:
    return model(ids, use_cache=False, **given).logits


# --- positions --------------------------------------------------------------------------------------------------------

PAST, NEW = 4, 2
MASKS = {  # of prompts of four tokens and two more
    "no padding": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]],
    "left": [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]],
    "right": [[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1]],
    "both": [[0, 1, 1, 0, 1, 1], [1, 0, 0, 0, 1, 0]],
    "nothing real": [[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]],
}


def loop(rows: list[list[int]], by_mask: bool) -> list[list[int]]:
    """The position of every slot: its number, or how many real tokens are before it; 0 before the first of them."""
    found: list[list[int]] = []
    for row in rows:
        found.append([])
        for slot in range(len(row)):
            found[-1].append(max(0, sum(row[: slot + 1]) - 1) if by_mask else slot)
    return found


def as_given(rows: list[list[int]], form: str, length: int) -> Tensor:
    """A mask of 1 and 0, or as transformers expands it for attention: query, key; nothing behind the query."""
    if form == "2-D":
        return torch.tensor(rows)
    seen = torch.zeros(len(rows), 1, NEW, length, dtype=torch.bool)
    for row, reals in enumerate(rows):
        for query in range(NEW):
            for key in range(PAST + query + 1):
                seen[row, 0, query, key] = bool(reals[key])
    return seen if form == "bool" else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


def of_tokens(past: Any) -> Any:
    """A cache of so many tokens."""
    return SimpleNamespace(get_seq_length=lambda: past)


@pytest.mark.parametrize("form", ["2-D", "bool", "additive"])
@pytest.mark.parametrize("padding", MASKS)
@pytest.mark.parametrize("length", [PAST + NEW, 9])
@pytest.mark.parametrize("past", [PAST, torch.tensor(PAST)], ids=["number", "tensor"])
def test_history_is_that_of_a_loop(padding: str, form: str, length: int, past: Any) -> None:
    """Slots behind the tokens may have any position that some token has."""
    rows = MASKS[padding]
    mask = as_given(rows, form, length)
    for by_mask in (False, True):
        expected = torch.tensor(loop(rows, by_mask))
        new = expected[:, PAST:]
        masks = (mask, None) if not by_mask or padding == "no padding" else (mask,)
        for positions in (new, new[:1]) if not by_mask else (new,):
            for given in masks:
                found = history_positions(positions, given, of_tokens(past), length)
                assert found.shape[1] == length and found.min() >= 0 and found.max() <= new.max()
                real = torch.tensor(rows).bool()
                found = found[:, : PAST + NEW].expand(2, -1)
                assert torch.equal(found[real], expected[real])


@pytest.mark.parametrize("found", [[[7, 8]], [[4, 6]], [[4, 5], [3, 4]], [[5, 4]], [[0, 1]]], ids=str)
@pytest.mark.parametrize("padding", [None, "left"])
def test_other_positions_are_refused(found: list[list[int]], padding: str | None) -> None:
    mask = None if padding is None else torch.tensor(MASKS[padding])
    with pytest.raises(ValueError, match="cached keys are turned when they are read") as caught:
        history_positions(torch.tensor(found), mask, of_tokens(PAST), PAST + NEW)
    assert str(caught.value).endswith(f"; found {found[0]} behind 4 tokens") and "\n" not in str(caught.value)


def test_a_first_call_has_no_history() -> None:
    """Any positions will do, until cached keys are to be turned back."""
    model, ids = build("grouped"), tokens(2, 6)
    given = {"position_ids": torch.tensor([[5, 9, 2, 0]]), "attention_mask": torch.ones(2, 4)}
    with torch.no_grad():
        output = model(ids[:, :4], use_cache=True, **given)
        assert_near(output.logits, whole(model, ids[:, :4], **given), EXACT)
        with pytest.raises(ValueError, match=r"found \[10, 11\] behind 4 tokens"):
            model(ids[:, 4:], position_ids=torch.tensor([[10, 11]]), past_key_values=output.past_key_values)


WAYS = {  # positions of a prompt of four tokens, the first of them padding, and of two behind it, or None
    "its own, then slots": ([3, 1, 7, 9], None),
    "over the mask, then slots": ([0, 0, 1, 2], None),
    "slots, then over the mask": (None, [3, 4]),
}


@pytest.mark.parametrize("case", ["grouped", "keys before rotary positions"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_that_were_counted_in_another_way_are_refused(case: str, kind: str, way: str) -> None:
    """The positions of new tokens do not tell those of the cached ones."""
    model, ids, mask = build(case), tokens(1, 6), torch.tensor([[0, 1, 1, 1, 1, 1]])
    model.set_attn_implementation("eager")
    prompt, new = (None if given is None else torch.tensor([given]) for given in WAYS[way])
    cache = CACHES[kind](model.config)
    with torch.no_grad(), pytest.raises(ValueError, match="cached keys are turned when they are read"):
        model(ids[:, :4], attention_mask=mask[:, :4], position_ids=prompt, past_key_values=cache)
        model(ids[:, 4:], attention_mask=mask, position_ids=new, past_key_values=cache)


# --- decoding ---------------------------------------------------------------------------------------------------------

CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config, max_cache_len=12),
    "longer static": lambda config: StaticCache(config, max_cache_len=3 * LIMIT),
    "allocated": lambda config: allocate_cache(config, 12),
}


@every
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("lengths", [(1,), (7, 3), (2, 10)], ids=str)
def test_decoding_is_the_uncached_pass(case: str, kind: str, lengths: tuple[int, ...]) -> None:
    model, ids = build(case), tokens(2, 12)
    model.set_attn_implementation("eager" if "static" in kind else "sdpa")
    cache = CACHES[kind](model.config)
    assert_near(in_pieces(model, ids, cache, lengths), whole(model, ids), EXACT)
    if kind != "longer static" and model.config.sliding_window is None:
        assert cache_bytes(cache) == 2 * model.config.plan.kv_bytes(12, torch.float64)


@pytest.mark.parametrize("case", ["grouped", "latent keys", "some layers", "longrope", "dynamic", "one block"])
@pytest.mark.parametrize("kind", ["dynamic", "longer static"])
@pytest.mark.parametrize("padding", ["left", "right", "both"])
@pytest.mark.parametrize("by_mask", [True, False], ids=["given", "left out"])
def test_padding_changes_nothing(case: str, kind: str, padding: str, by_mask: bool) -> None:
    """Positions that are left out count the padding; those of `generate` do not, and every row is as it is alone."""
    model, ids = build(case), tokens(2, 9)
    mask = torch.tensor([[*row, 1, 0, 1] for row in MASKS[padding]])
    real = mask.bool()
    found = in_pieces(model, ids, CACHES[kind](model.config), (4, 2, 2), mask, by_mask)
    given = {"position_ids": counted(mask)} if by_mask else {}
    assert_near(found[real], whole(model, ids, attention_mask=mask, **given)[real], EXACT)
    for row in range(2 if by_mask else 0):
        assert_near(found[row][real[row]], whole(model, ids[row : row + 1, real[row]])[0], EXACT)


@some
def test_a_cache_is_cut_reordered_and_repeated(case: str) -> None:
    """As assisted decoding and beam search do, with a padded row."""
    model, ids, other = build(case), tokens(3, 9), tokens(3, 9, seed=1)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0

    def check(cache: DynamicCache, rows: Tensor, ids: Tensor, mask: Tensor) -> None:
        past = cache.get_seq_length()
        expected = whole(model, ids, attention_mask=mask, position_ids=counted(mask))
        assert_near(in_pieces(model, ids[:, past:], cache, (2,), mask, True), expected[:, past:], EXACT)

    def filled() -> DynamicCache:
        cache = DynamicCache(config=model.config)
        in_pieces(model, ids[:, :6], cache, (4,), mask, True)
        return cache

    cache = filled()
    cache.crop(-3)
    check(cache, ids, torch.cat((ids[:, :3], other[:, 3:]), dim=1), mask)
    cache, beams = filled(), torch.tensor([2, 0, 0])
    cache.reorder_cache(beams)
    check(cache, ids, torch.cat((ids[beams, :6], other[:, 6:]), dim=1), mask[beams])
    cache = filled()
    cache.batch_repeat_interleave(2)
    longer = torch.cat((ids[:, :6].repeat_interleave(2, 0), tokens(6, 3, seed=2)), dim=1)
    check(cache, ids, longer, mask.repeat_interleave(2, 0))


@some
def test_the_decoder_gives_the_same(case: str) -> None:
    """In chunks of three tokens, with padding; its kernel for one query is made for float32."""
    model, ids = build(case), tokens(3, 10)
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, :1] = 0, 0
    expected = whole(model, ids, attention_mask=mask, position_ids=counted(mask))[:, 6:]
    for dtype, tolerance in ((torch.float64, EXACT), (torch.float32, 1e-4)):
        decoder = Decoder(model.to(dtype), chunk=3)
        found = [decoder.prefill(ids[:, :7], mask[:, :7], room=3)] + [decoder.step(ids[:, at]) for at in (7, 8, 9)]
        assert_near(torch.stack(found, dim=1), expected, tolerance)


@some
def test_quantized_keys_are_turned_back(case: str) -> None:
    """Of 8 bits: codes are 1/255 of their range apart, and an entry is off by half of that; nothing else is."""
    model, ids = build(case, max_position_embeddings=512), tokens(2, 140)
    cache = LeanQuantizedCache("kivi", model.config, key_bits=8, value_bits=8)
    found, expected = in_pieces(model, ids, cache, (130, 8)), whole(model, ids)
    assert_near(found[:, :130], expected[:, :130], EXACT)
    error = (found - expected)[:, 130:].abs().max() / expected.abs().max()
    assert EXACT < error < 10 / 255


# --- precisions -------------------------------------------------------------------------------------------------------


# --- one function -----------------------------------------------------------------------------------------------------


def dense_tensors(model: LeanForCausalLM) -> dict[str, Tensor]:
    """The weights of the same function with plain W_K and W_V, made of those of `model`."""
    found, inputs, biased = dict(model.named_parameters()), model.config.hidden_size, model.config.attention_bias
    for layer, block in enumerate(model.model.layers):
        name = f"model.layers.{layer}.self_attn"
        latent, up = found[f"{name}.v_proj.weight"].T, found.pop(f"{name}.v_up_proj.weight").T
        rows = {"k_proj": found[f"{name}.k_proj.weight"].T, "v_proj": latent @ up[: latent.shape[1]]}
        if biased:
            biases = {"k_proj": found[f"{name}.k_proj.bias"], "v_proj": found.pop(f"{name}.v_up_proj.bias")}
            rows = {projection: torch.cat((rows[projection], biases[projection][None])) for projection in rows}
        rows["v_proj"] = rows["v_proj"] + rows["k_proj"] @ up[latent.shape[1] :]
        if found.pop(f"{name}.k_up_proj.weight", None) is not None:
            rows["k_proj"] = block.self_attn.k_up_proj(rows["k_proj"])
        for projection, made in rows.items():
            found[f"{name}.{projection}.weight"] = made[:inputs].T
            if biased:
                found[f"{name}.{projection}.bias"] = made[inputs]
    return found


def dense_config(case: str, **fields: Any) -> LeanConfig:
    names, overrides = CASES[case]
    return tiny("llama", *(name for name in names if "latent" not in name), **{**overrides, **fields})


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("some layers", "beside windows", "one block")])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_it_is_one_function_with_plain_keys_and_values(case: str, dropout: float) -> None:
    """Logits and the gradients of all weights, in training, where the same attention weights drop out."""
    model = build(case, attention_dropout=dropout).train()
    model.set_attn_implementation("eager")
    dense = LeanForCausalLM(dense_config(case, attention_dropout=dropout)).double().train()
    dense.set_attn_implementation("eager")
    ids, parameters = tokens(2, 9), dict(model.named_parameters())
    found = []
    for one, tensors in ((model, parameters), (dense, dense_tensors(model))):
        torch.manual_seed(0)
        output = functional_call(one, tensors, args=(), kwargs={"input_ids": ids, "labels": ids})
        found.append((output.logits, torch.autograd.grad(output.loss, list(parameters.values()))))
    assert_near(found[0][0], found[1][0], EXACT)
    floor = 1e-4 * max(gradient.abs().max().item() for gradient in found[1][1])
    for name, one, other in zip(parameters, found[0][1], found[1][1], strict=True):
        assert_near(one, other, EXACT, name, floor)


@some
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_absorbed_is_expanded(case: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of keys and of values, each alone and both."""
    model = build(case)
    model.set_attn_implementation(implementation)
    found = []
    for keys, values in ((False, False), (True, False), (False, True), (True, True)):
        monkeypatch.setattr(latent_heads, "absorbing_pays", lambda *_, absorbed=keys: absorbed)
        monkeypatch.setattr(
            LatentHeadsAttention, "_absorbs_values", lambda made, *_, on=values: on and made.v_up_proj is not None
        )
        found.append(results(model))
    for other in found[1:]:
        assert_same_results(other, found[0])


@pytest.mark.parametrize("by_mask", [True, False], ids=["given", "left out"])
@pytest.mark.long_cases
@pytest.mark.slow
def test_a_decoding_step_is_one_graph(by_mask: bool) -> None:
    """What `generate(cache_implementation="static")` compiles, with padding."""
    model, ids = build("latent keys", num_hidden_layers=1), tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    given = {"position_ids": counted(mask)} if by_mask else {}
    expected = whole(model, ids, attention_mask=mask, **given)[:, 6:]
    torch._dynamo.reset()
    step = torch.compile(model, backend="eager", fullgraph=True)
    cache = CACHES["longer static"](model.config)
    in_pieces(model, ids[:, :6], cache, (6,), mask, by_mask)
    assert_near(in_pieces(step, ids[:, 6:], cache, (1,), mask, by_mask), expected, EXACT)
    elsewhere = torch.full((2, 1), 20)
    with pytest.raises(RuntimeError, match="need position_ids that are counted on"):
        step(ids[:, 6:], attention_mask=mask, position_ids=elsewhere, past_key_values=cache)


# --- refused, and adapted ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names, fields, message",
    [
        ((KEYS,), {"sliding_window": 4}, r"in layer 0: .* sliding window \(4\) .* leave keys=true out there"),
        ((KEYS,), {"sliding_window": 4, "window_layers": [2]}, r"in layer 2: .* sliding window \(4\)"),
        ((KEYS,), {"qk_norm": True}, r"in layer 0: .* norms these .* leave keys=true out, or .* before_rotary=true"),
        ((KEYS,), {"qk_norm": "width"}, r"in layer 0: .* qk_norm"),
        (("latent-keys",), {"qk_norm": True}, r"in layer 0: qk_norm norms .*; with before_rotary=true they are made"),
        ((f"{KEYS},layers=1",), {"qk_norm": True}, r"in layer 1: .* qk_norm"),
        ((KEYS, "mla"), {}, r"value 'latent' in layer 0: with a latent \(kv_lora_rank\)"),
        ((KEYS, "skipv1"), {}, r"value 'latent' in layer 0: key_value 'first_layer_values' shares value heads"),
        ((KEYS, "cla"), {"num_hidden_layers": 4}, r"value 'latent' in layer 0: key_value 'shared_adjacent' shares"),
        (("latent-values:keys=3",), {}, "'keys'.* true or false"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_refused_by_name(names: tuple[str, ...], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        tiny("llama", *names, **fields).plan  # noqa: B018
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", ["grouped", "latent keys"])
@pytest.mark.slow
def test_an_adapter_of_the_keys_changes_values_too(case: str) -> None:
    """LoRA on k_proj; merging it gives the same logits, with a cache and without."""
    peft = pytest.importorskip("peft")
    ids, values = tokens(2, 9), []
    model = peft.get_peft_model(
        build(case), peft.LoraConfig(target_modules=["k_proj"], r=2, init_lora_weights=False)
    ).eval()
    first = model.get_base_model().model.layers[0].self_attn.v_up_proj
    hook = first.register_forward_hook(lambda module, given, output: values.append(output))
    expected = whole(model, ids)
    with model.disable_adapter():
        plain = whole(model, ids)
    hook.remove()
    assert (values[0] - values[1]).abs().max() > 0.1 and (plain - expected).abs().max() > 0.1
    for one in (model, model.merge_and_unload()):
        assert_near(whole(one, ids), expected, EXACT)
        assert_near(in_pieces(one, ids, DynamicCache(config=one.config), (5, 2)), expected, EXACT)
