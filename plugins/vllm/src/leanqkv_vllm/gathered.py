"""Attention of any mechanism: the core's own code, on a cache that is gathered from vLLM's pages at every step.

Slower than a kernel that reads pages, and right for whatever the core can compute. Requests with as many new tokens as
each other, so all that are decoding, go through the model together.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from leanqkv.model.plan import Plan

from .cache import PagedCache
from .step import Step


class GatheredLayer(DynamicLayer):
    """A layer's tensors of some requests: `update` writes the new tokens into their pages and returns all of them.

    Args:
        stores: the layer's tensors in all pages, [pages, heads, block_size, columns], in the order of the plan.
        written, read: page and place in it of every new token and of every token, each [requests, tokens].
    """

    def __init__(self, stores: Sequence[Tensor], written: tuple[Tensor, Tensor], read: tuple[Tensor, Tensor]):
        super().__init__()
        self.stores, self.written, self.read = stores, written, read

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """key_states, value_states: [requests, heads, new tokens, columns], as the layers of the core give them."""
        given = [states for states in (key_states, value_states) if states.shape[1]]
        histories = []
        for store, new in zip(self.stores, given, strict=True):
            page, place = self.written
            store[page, :, place] = new.transpose(1, 2).to(store.dtype)
            page, place = self.read
            histories.append(store[page, :, place].transpose(1, 2).to(new.dtype))
        return histories[0], histories[1] if len(histories) > 1 else histories[0][:, :0]

    def get_seq_length(self) -> int:
        """Return the tokens before the new ones, those that pad a shorter request included."""
        return self.read[0].shape[1] - self.written[0].shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens a mask is for, and the first of them."""
        return self.read[0].shape[1], 0


def run(model: Any, plan: Plan, caches: Sequence[PagedCache], steps: Sequence[Step], **given: Tensor) -> Tensor:
    """Return the last hidden states [tokens, hidden_size] of a step.

    Args:
        steps: the metadata of every one of `caches`.
        given: input_ids [tokens] or inputs_embeds [tokens, hidden_size]; position_ids [tokens].
    """
    states: Any = None
    for requests, tokens in _batches(steps[0]):
        cache, mask = _gather(plan, caches, steps, requests, tokens.shape[1])
        found = model(
            **{name: tensor[tokens] for name, tensor in given.items()},
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        if states is None:
            states = found.new_zeros(len(given["position_ids"]), found.shape[-1])
        states[tokens] = found
    return states


def _batches(step: Step) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield requests with equally many new tokens, and which tokens these are, [requests, new tokens]."""
    starts = step.common.query_start_loc
    counts = starts.diff()
    for count in counts.unique().tolist():
        if count:
            [requests] = torch.where(counts == count)
            yield requests, starts[requests][:, None] + torch.arange(count, device=counts.device)


def _gather(
    plan: Plan, caches: Sequence[PagedCache], steps: Sequence[Step], requests: Tensor, new: int
) -> tuple[Cache, Tensor]:
    """The cache of some requests, padded on the left to the longest, and the mask of its tokens [requests, tokens]."""
    lengths = steps[0].common.seq_lens[requests].long()
    longest = int(lengths.max())
    positions = torch.arange(longest, device=lengths.device) - (longest - lengths)[:, None]
    layers: dict[int, GatheredLayer] = {}
    for cache, step in zip(caches, steps, strict=True):
        found = positions.clamp_min(0)
        pages = step.common.block_table_tensor[requests].gather(1, found // cache.block_size).long()
        # What pads a request is read from the page that belongs to none.
        pages, places = torch.where(positions < 0, 0, pages), found % cache.block_size
        written = pages[:, -new:], places[:, -new:]
        for number in cache.group.layers:
            stores = [cache.heads(number, tensor.name) for tensor in plan.layers[number].cached]
            layers[number] = GatheredLayer(stores, written, (pages, places))
    some = next(iter(layers.values()))
    empty = GatheredLayer((), some.written, some.read)  # of a layer that caches nothing: never written, but measured
    return Cache(layers=[layers.get(layer.layer, empty) for layer in plan.layers]), (positions >= 0).long()
