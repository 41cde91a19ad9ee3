"""Encoders, prefixes and windows: who sees whom, whatever else the model is made of."""

from typing import Any

import pytest
import torch
from shapes import assert_near, randomize, tiny, tokens
from torch._subclasses import FakeTensorMode
from transformers import AutoModelForMaskedLM, DynamicCache

from leanqkv import ConfigError, LeanConfig, LeanForCausalLM, LeanForMaskedLM, cache_bytes, plan
from leanqkv.model import transformer
from leanqkv.model.position import make_masks

SHAPES = ["gpt", "llama"]
VARIANTS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    ((), {}),
    (("skipv1", "nonlinear-query", "gqa"), {}),
    (("mla", "skipv1"), {}),
    (("keys-as-values",), {}),
    (("yoco", "denseformer"), {"num_hidden_layers": 4}),
    (("resformer:mode=per_token",), {"block_type": "parallel", "norm_type": "rmsnorm"}),
]
variants = pytest.mark.parametrize(
    "shape, names, overrides", [(shape, *variant) for shape in SHAPES for variant in VARIANTS], ids=str
)


def encoder(shape: str, names: tuple[str, ...], overrides: dict[str, Any]) -> LeanForMaskedLM:
    return randomize(LeanForMaskedLM(tiny(shape, *names, task="masked_lm", **overrides))).double().eval()


def seen_by(model: torch.nn.Module, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """[positions, positions]: whether a token's embedding moves the logits of another position."""
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, **inputs).logits[0]
    rows = [torch.autograd.grad(row.sum(), embedded, retain_graph=True)[0][0] for row in logits.square()]
    return torch.stack(rows).abs().amax(-1) > 1e-12


@variants
def test_an_encoder_sees_everything_but_padding(shape, names, overrides) -> None:
    model = encoder(shape, names, overrides)
    ids = tokens(1, 7)
    assert seen_by(model, ids).all()
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
    seen = seen_by(model, ids, attention_mask=mask)
    assert seen[:5, :5].all() and not seen[:5, 5:].any()


@variants
def test_padding_changes_nothing_for_an_encoder(shape, names, overrides) -> None:
    model = encoder(shape, names, overrides)
    ids = tokens(3, 8)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    mask[1, 3:] = 0
    with torch.no_grad():
        together = model(input_ids=ids, attention_mask=mask).logits
        for row, length in enumerate((5, 3, 8)):
            alone = model(input_ids=ids[row : row + 1, :length]).logits
            assert_near(together[row : row + 1, :length], alone, 1e-11)


def test_the_loss_of_an_encoder_is_that_of_the_masked_tokens() -> None:
    model = encoder("gpt", ("skipv1",), {})
    ids, labels = tokens(2, 8), torch.full((2, 8), -100)
    labels[0, 2], labels[1, 5], labels[1, 6] = 11, 12, 13
    output = model(input_ids=ids, labels=labels)
    chosen = labels != -100
    expected = torch.nn.functional.cross_entropy(output.logits[chosen], labels[chosen])
    assert_near(output.loss, expected, 1e-6)


def test_an_encoder_is_saved_and_loaded(tmp_path) -> None:
    model = encoder("llama", ("mla", "skipv1"), {}).float()
    model.save_pretrained(tmp_path)
    again = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    ids = tokens(1, 5)
    assert isinstance(again, LeanForMaskedLM)
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


def test_every_parameter_of_an_encoder_learns() -> None:
    model = LeanForMaskedLM(tiny("gpt", "skipv1", "nonlinear-query", task="masked_lm")).double()
    ids = tokens(4, 20)
    model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 1e-10, name


def test_tasks_and_masks_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="see the token it is to predict"):
        LeanConfig(mask_type="bidirectional")
    with pytest.raises(ConfigError, match="bidirectionally"):
        LeanConfig(task="masked_lm", mask_type="causal")
    with pytest.raises(ConfigError, match="LeanForCausalLM builds models of task 'causal_lm'"):
        LeanForCausalLM(tiny("gpt", task="masked_lm"))
    with pytest.raises(ConfigError, match="sliding_window"):
        LeanConfig(mask_type="prefix", sliding_window=4)


@variants
def test_a_prefix_sees_itself_and_is_seen(shape, names, overrides) -> None:
    model = randomize(LeanForCausalLM(tiny(shape, *names, mask_type="prefix", **overrides))).double().eval()
    ids = tokens(1, 7)
    expected = torch.ones(7, 7).tril().bool()
    assert torch.equal(seen_by(model, ids), expected)
    expected[:, :4] = True
    prefix = torch.tensor([[1, 1, 1, 1, 0, 0, 0]])
    assert torch.equal(seen_by(model, ids, prefix_mask=prefix), expected)


@variants
def test_generation_takes_the_prompt_for_the_prefix(shape, names, overrides) -> None:
    """With and without a cache, padded and not; one prompt at a time, written out."""
    model = randomize(LeanForCausalLM(tiny(shape, *names, mask_type="prefix", pad_token_id=0, **overrides)), std=0.5)
    model = model.double().eval()
    rows = [tokens(1, length, seed=length) for length in (3, 6)]
    expected = []
    for row in rows:
        ids = row
        for _ in range(5):
            prefix = torch.zeros_like(ids)
            prefix[:, : row.shape[1]] = 1
            with torch.no_grad():
                ids = torch.cat((ids, model(input_ids=ids, prefix_mask=prefix).logits[:, -1:].argmax(-1)), dim=1)
        expected.append(ids[:, row.shape[1] :])
    padded = torch.cat([torch.nn.functional.pad(row, (6 - row.shape[1], 0)) for row in rows])
    for options in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        found = model.generate(
            padded, attention_mask=(padded != 0).long(), max_new_tokens=5, do_sample=False, **options
        )
        assert torch.equal(found[:, 6:], torch.cat(expected)), options


@pytest.mark.parametrize("fields", [{"mask_type": "prefix"}, {"task": "masked_lm"}], ids=str)
def test_packed_sequences_are_refused_where_tokens_see_those_behind_them(fields) -> None:
    config = tiny("gpt", **fields)
    model = (LeanForMaskedLM if "task" in fields else LeanForCausalLM)(config)
    prefix = {"prefix_mask": torch.ones(1, 6)} if "mask_type" in fields else {}
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]])
    with pytest.raises(ValueError, match="packed sequences would see each other"):
        model(input_ids=tokens(1, 6), position_ids=packed, **prefix)
    model(input_ids=tokens(1, 6), position_ids=torch.arange(6)[None], **prefix)


def test_a_prefix_comes_in_one_piece() -> None:
    model = LeanForCausalLM(tiny("gpt", mask_type="prefix")).eval()
    cache = DynamicCache(config=model.config)
    ids = tokens(1, 6)
    model(input_ids=ids[:, :3], prefix_mask=torch.ones(1, 3), past_key_values=cache)
    with pytest.raises(ValueError, match="in one piece"):
        model(input_ids=ids[:, 3:], prefix_mask=torch.ones(1, 6), past_key_values=cache)
    with pytest.raises(ValueError, match="mask_type 'prefix'"):
        LeanForCausalLM(tiny("gpt"))(input_ids=ids, prefix_mask=torch.ones(1, 6))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_window_reaches_back_so_far(shape: str) -> None:
    model = randomize(LeanForCausalLM(tiny(shape, sliding_window=3, num_hidden_layers=1))).double().eval()
    band = torch.ones(8, 8).tril().bool() & ~torch.ones(8, 8).tril(-3).bool()
    assert torch.equal(seen_by(model, tokens(1, 8)), band)


@pytest.mark.parametrize("names", [("keys-as-values",), ("keys-as-values", "skipv1", "gqa")])
def test_rotated_values_enter_by_distance_alone(names: tuple[str, ...]) -> None:
    """K = V with rotary positions: moving the whole sequence along changes nothing."""
    model = randomize(LeanForCausalLM(tiny("llama", *names))).double().eval()
    ids, positions = tokens(2, 8), torch.arange(8)[None]
    with torch.no_grad():
        here, there = (model(input_ids=ids, position_ids=positions + shift).logits for shift in (0, 17))
    assert_near(there, here, 1e-5)  # rotary angles are float32


def test_where_no_values_can_be_read_there_is_no_mask(monkeypatch) -> None:
    """As in a compiled graph: positions that the model counts itself are those of one sequence."""
    made = []
    monkeypatch.setattr(transformer, "make_masks", lambda *args: made.append(make_masks(*args)) or made[-1])
    with torch.device("meta"):
        model = LeanForCausalLM(tiny("llama"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu").set_attn_implementation("sdpa")
        model(torch.zeros(2, 8, dtype=torch.long), use_cache=False)
    assert made == [{None: None}]


def test_a_windowed_cache_lets_go_of_a_long_prompt() -> None:
    """transformers keeps a view of the window, and with it the whole prompt."""
    config = tiny("llama", "skipv1", sliding_window=4)
    with torch.no_grad():
        cache = LeanForCausalLM(config).eval()(tokens(1, 200), use_cache=True).past_key_values
    held = plan(config).kv_bytes(200, torch.float32)
    assert held < plan(config).kv_bytes_per_token(torch.float32) * 200 / 40
    assert held <= cache_bytes(cache) <= 2 * held
