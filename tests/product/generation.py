"""Tools that generate: what feeds the model, and what holds its cache."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from shapes import tokens
from torch import Tensor
from torch.nn.attention import flex_attention
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from leanqkv import LeanForCausalLM, LeanQuantizedCache, cache_bytes
from leanqkv.inference import Decoder
from product.mechanisms import Case
from product.tools import FLOAT32, HANDED_OUT, Tool, full_pass, relative_error

PROMPT, NEW = 7, 5


def generated(model: LeanForCausalLM, **options: Any) -> Tensor:
    """Logits [batch, NEW, vocab_size] of greedy generation."""
    options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None} | options
    result = model.generate(**options, return_dict_in_generate=True, output_logits=True)
    return torch.stack(result.logits, dim=1)


def prompt() -> dict[str, Tensor]:
    ids = tokens(2, PROMPT)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def decoder(case: Case) -> float:
    """In float32, for which linear layers are packed and attention has its kernel."""
    model, ids = case.model().float(), tokens(2, PROMPT)
    expected = full_pass(model, ids, NEW)
    decoding = Decoder(model)
    logits = [decoding.prefill(ids, room=NEW)]
    for place in range(NEW - 1):
        logits.append(decoding.step(expected[:, place].argmax(-1)))
    return relative_error(torch.stack(logits, dim=1), expected)


def embedded(case: Case) -> float:
    model, given = case.model(), prompt()
    expected = full_pass(model, given["input_ids"], NEW)
    embeddings = model.get_input_embeddings()(given["input_ids"])
    found = generated(model, inputs_embeds=embeddings, attention_mask=given["attention_mask"])
    return relative_error(found, expected)


def prefilled(case: Case) -> float:
    """The cache holds the prompt but for its last token, or of a prefix model the prefix."""
    model, given = case.model(), prompt()
    expected = full_pass(model, given["input_ids"], NEW)
    cache = DynamicCache(config=model.config)
    is_prefix = model.config.mask_type == "prefix"
    with torch.no_grad():
        if is_prefix:
            first = model(**given, prefix_mask=given["attention_mask"], past_key_values=cache).logits[:, -1]
            ids = torch.cat((given["input_ids"], first.argmax(-1, keepdim=True)), dim=1)
            prefix = torch.tensor([[1] * PROMPT + [0]]).expand(2, -1)
            mask = torch.ones_like(ids)
            found = generated(
                model, input_ids=ids, attention_mask=mask, prefix_mask=prefix, past_key_values=cache, max_new_tokens=4
            )
            return relative_error(torch.cat((first[:, None], found), dim=1), expected)
        model(given["input_ids"][:, :-1], past_key_values=cache)
    return relative_error(generated(model, **given, past_key_values=cache), expected)


def static(case: Case) -> float:
    model, given = case.model(), prompt()
    found = generated(model, **given, cache_implementation="static", disable_compile=True)
    return relative_error(found, full_pass(model, given["input_ids"], NEW))


class RoundedLayer(DynamicLayer):
    """Keeps what an 8-bit float with one scale for the first tokens and all later ones leaves of keys and values."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        given = (key_states, value_states)
        if first := not self.is_initialized:
            self.scales = [float(tensor.abs().max()) / 448 if tensor.numel() else 1.0 for tensor in given]
        rounded = [
            (tensor / scale).to(torch.float8_e4m3fn).to(tensor.dtype) * scale
            for tensor, scale in zip(given, self.scales, strict=True)
        ]
        histories = super().update(*rounded)
        return given if first else histories


def fp8(case: Case) -> float:
    """Logits after a prefill, a few tokens more and one, against a cache that is rounded by hand; and the bytes."""
    model, ids = case.model().float(), tokens(2, PROMPT + 3)
    quantized, rounded = LeanQuantizedCache("fp8", model.config), DynamicCache(config=model.config)
    rounded.layers = [RoundedLayer() for _ in rounded.layers]
    found, expected = (in_pieces(model, ids, cache) for cache in (quantized, rounded))
    scales = sum(2 * 4 for layer in quantized.layers if layer.is_initialized)
    assert cache_bytes(quantized) <= cache_bytes(rounded) / 4 + scales
    return relative_error(found, expected)


def int4(case: Case) -> float:
    """A step on a history of 4 bits, against a plain cache that is given what the quantized one reads."""
    from optimum.quanto.library.extensions.cpp import ext

    ext._lib = SimpleNamespace(unpack=unpacked)  # its own takes a minute to compile
    model, ids = case.model().float(), tokens(2, PROMPT + 1)
    quantized = LeanQuantizedCache("quanto", model.config, nbits=4, q_group_size=4)
    plain = DynamicCache(config=model.config)
    for cache in (quantized, plain):
        in_pieces(model, ids[:, :PROMPT], cache, [PROMPT])
    lost = 0.0
    for stored, layer in zip(quantized.layers, plain.layers, strict=True):
        if layer.is_initialized:
            keys = stored._dequantize(stored._quantized_keys)
            lost = max(lost, relative_error(keys, layer.keys))
            layer.keys, layer.values = keys, stored._dequantize(stored._quantized_values)
    assert lost > 0.01, "nothing was rounded"
    with torch.no_grad():
        found, expected = (model(ids[:, PROMPT:], past_key_values=cache).logits for cache in (quantized, plain))
    return relative_error(found, expected)


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """The integers of so many bits in bytes: first the lowest ones of all, then the next."""
    return torch.cat([packed >> shift & (2**bits - 1) for shift in range(0, 8, bits)])


def in_pieces(model: LeanForCausalLM, ids: Tensor, cache: Cache, pieces: Sequence[int] = (PROMPT, 2, 1)) -> Tensor:
    """Logits of all positions; the first piece is a prefix model's prefix."""
    prefix = {"prefix_mask": torch.ones(len(ids), pieces[0])} if model.config.mask_type == "prefix" else {}
    logits = []
    with torch.no_grad():
        for piece in ids.split(list(pieces), dim=1):
            logits.append(model(piece, past_key_values=cache, **prefix).logits)
    return torch.cat(logits, dim=1)


def attention(case: Case, name: str) -> float:
    model, given = case.model().float(), prompt()
    model.set_attn_implementation("sdpa")
    found = generated(model, **given)
    model.set_attn_implementation(name)
    return relative_error(found, generated(model, **given))


def flex(case: Case) -> float:
    """Uncompiled: PyTorch's compiled kernel is one more way to sum."""
    debug, flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = (
        flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG,
        True,
    )
    try:
        with torch.compiler.set_stance("force_eager"):
            return attention(case, "flex_attention")
    finally:
        flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = debug


def eager(case: Case) -> float:
    return attention(case, "eager")


AGAINST_FULL = "logits against full passes without a cache"
TOOLS = [
    Tool("`Decoder`", decoder, FLOAT32, f"{AGAINST_FULL}, float32"),
    Tool("`generate(inputs_embeds=…)`", embedded, HANDED_OUT, AGAINST_FULL),
    Tool("`generate` on a prefilled cache", prefilled, HANDED_OUT, AGAINST_FULL),
    Tool("static cache", static, HANDED_OUT, AGAINST_FULL),
    Tool("8-bit cache", fp8, FLOAT32, "against a cache rounded by hand", "transformers.cache_utils:Fp8QuantizedLayer"),
    Tool("4-bit cache", int4, FLOAT32, "against a cache of the rounded tensors", "optimum.quanto"),
    Tool("eager attention", eager, FLOAT32, "logits against SDPA, float32"),
    Tool("flex attention", flex, FLOAT32, "logits against SDPA, float32"),
]
