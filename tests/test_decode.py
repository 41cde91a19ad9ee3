"""A decoding step moves no history around: borrowed heads are read where they lie."""

import pytest
import torch
from shapes import assert_near, randomize, tiny, tokens
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, StaticCache

from leanqkv import LeanForCausalLM
from leanqkv.inference import allocate_cache

PAST = 40


class Copies(TorchFunctionMode):
    """Notes every concatenation or copy whose result holds the history of at least one head."""

    def __init__(self, head_dim: int):
        super().__init__()
        self.least, self.copied = PAST * head_dim, []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if name in ("cat", "stack", "contiguous", "clone", "repeat", "repeat_interleave", "index_select") and (
            isinstance(result, torch.Tensor) and result.numel() >= self.least
        ):
            fresh = name != "contiguous" or result.data_ptr() != args[0].data_ptr()
            self.copied += [(name, (kwargs or {}).get("dim"), tuple(result.shape))] * fresh
        return result


CASES: list[tuple[tuple[str, ...], dict]] = [
    ((), {}),
    (("skipv1",), {}),
    (("skipv1:ratio=0.25",), {}),
    (("skipv1:injection=dynamic",), {}),
    (("skipv1:injection=pooling",), {}),
    (("skipv1:injection=resformer",), {}),
    (("skipv2",), {}),
    (("gqa", "skipv1"), {}),
    (("skipkv1",), {}),
    (("skipv1-yoco",), {"num_hidden_layers": 4}),
    (("resformer",), {}),
    (("yoco",), {"num_hidden_layers": 4}),
    (("cla-v",), {"num_hidden_layers": 4}),
    (("fusedkv-lite",), {"num_hidden_layers": 4}),
    (("borrowed-values",), {}),
    ((), {"key_value": {"type": "borrowed_values", "heads": [[0, 2, 0, 0], [1, 0, 0, 3], [2, 1, 0, 1], [2, 3, 2, 2]]}}),
    (("keys-as-values", "skipv1"), {}),
    (("mla",), {}),
    (("mla", "skipv1"), {}),
]


@pytest.mark.parametrize("mechanisms, overrides", CASES)
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache, allocate_cache], ids=lambda kind: kind.__name__)
def test_a_step_copies_no_history_but_to_grow_the_cache(mechanisms, overrides, kind):
    config = tiny("llama", *mechanisms, **overrides)
    model = LeanForCausalLM(config).eval()
    cache = DynamicCache(config=config) if kind is DynamicCache else kind(config, PAST + 8)
    with torch.no_grad():
        model(tokens(1, PAST), past_key_values=cache)
        with Copies(config.head_dim) as copies:
            model(tokens(1, 1), past_key_values=cache)
    # A dynamic cache grows by concatenation along the positions, each tensor of each layer; nothing else may.
    grown = [copy for copy in copies.copied if copy[:2] == ("cat", -2)]
    expected = sum(len(layer.cached) for layer in config.plan.layers) if kind is DynamicCache else 0
    assert len(grown) == expected
    others = [copy for copy in copies.copied if copy not in grown]
    assert not others, others


ONE_GRAPH = [case for case in CASES if case[0] in ((), ("gqa", "skipv1"), ("yoco",), ("skipkv1",), ("mla", "skipv1"))]


@pytest.mark.long_cases
@pytest.mark.parametrize("mechanisms, overrides", ONE_GRAPH)
@pytest.mark.slow
def test_a_step_with_a_static_cache_is_one_graph(mechanisms, overrides):
    """What `generate(cache_implementation="static")` compiles, and on a GPU captures, has no graph break."""
    config = tiny("llama", *mechanisms, **overrides)
    model = randomize(LeanForCausalLM(config)).eval()
    ids, cache = tokens(2, 9), StaticCache(config=config, max_cache_len=12)
    torch._dynamo.reset()
    step = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        expected = model(ids).logits[:, 6:]
        model(ids[:, :6], past_key_values=cache)
        logits = torch.cat([step(input_ids=ids[:, i : i + 1], past_key_values=cache).logits for i in (6, 7, 8)], dim=1)
    assert_near(logits, expected, 100 * torch.finfo(torch.float32).eps)
