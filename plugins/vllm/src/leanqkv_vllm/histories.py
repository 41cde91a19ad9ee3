"""Attention of any mechanism: leanqkv's own code, on a cache in vLLM's pages.

The model around it is compiled as a whole. Between a layer's projections and its output stands one custom operator,
which runs the core's attention. Tokens that a request has one or a few of, as in decoding and of drafts, are rows of
one batch whose history is read where it lies, by leanqkv's kernel: leanqkv/inference/attention.cpp, on a GPU
attention_triton.py. For longer pieces of a prompt the history is gathered. In pages of codes (codes.py) these pieces
end where a page ends, and on a CPU heads are read where they lie for them too.
"""

from collections.abc import Sequence
from copy import copy
from functools import cached_property, partial
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

from leanqkv.inference import attention
from leanqkv.inference.attention import compiled_kernels
from leanqkv.inference.history import History
from leanqkv.inference.step import fused_rotate, use_head_products
from leanqkv.model.attention import KeyValues
from leanqkv.model.attention_latent import LatentAttention
from leanqkv.model.latent import Absorbing, absorbing_pays
from leanqkv.model.latent_heads import LatentHeadsAttention
from leanqkv.model.layout import LayerPlan
from leanqkv.model.position import BACK, HISTORY, Rotation, Rotations, make_masks
from leanqkv.model.transformer import LeanModel

from .cache import PagedCache
from .repeated import RepeatedRows
from .rows import FEW, PagedLayer, Pages
from .rows_of_codes import CodesLayer, CodesPages, Kept, pieces_by_page
from .step import Step

# Positions of a history for which absorbing a latent takes fewer multiplications, if it does for any number.
MANY = 2**30


class Histories:
    """What the operators of a model's layers share: the batches of the current step.

    Args:
        model: whose attention `use_histories` has replaced.
        kernel: the module with leanqkv's kernel, which reads a history where it lies.
        limit: positions of the longest request that there can be.
    """

    def __init__(self, model: LeanModel, caches: Sequence[PagedCache], kernel: ModuleType, limit: int):
        self.model, self.plan, self.caches, self.limit = model, model.config.plan, caches, limit
        self.kernel = kernel
        self.config = copy(model.config)
        self.config._attn_implementation = "sdpa"
        self.lenders, self.batches, self.passes = self.plan.lenders, [], 1
        self.repeated = RepeatedRows(len(self.plan.layers), kernel)
        # Whether the kernel reads codes for several tokens of a request, which it does without windows.
        windows = any(layer.window is not None for layer in self.plan.layers)
        self.causal = kernel is attention and not windows and compiled_kernels() is not None
        self._cores: dict[int, Any] = {}
        self._tables: Rotations = {}

    def begin(self, steps: Sequence[Step]) -> None:
        """Prepare a step. steps: the metadata of every one of the caches."""
        common, cache = steps[0].common, self.caches[0]
        like = cache.kv_cache.new_empty(0, dtype=cache.dtype)  # pages of codes are of another
        starts, lengths = common.query_start_loc.long(), common.seq_lens.long()
        counts = starts.diff()
        requests = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        tokens = torch.arange(len(requests), device=counts.device)
        positions = tokens - starts[requests] + (lengths - counts)[requests]
        self.batches, self.passes = [], 1
        self.tables(int(lengths.max()), like)
        if cache.codes is not None:
            for *given, whole, in_place in pieces_by_page(starts, lengths, positions):
                self.batches.append(Batch(self, steps, *given, whole=whole, like=like, in_place=in_place))
            return
        few = counts <= FEW
        if few.any():
            chosen = tokens if few.all() else tokens[few[requests]]
            given = requests[chosen], chosen[:, None], positions[chosen][:, None]
            self.batches.append(Batch(self, steps, *given, whole=len(chosen) == len(tokens), like=like))
        for count in counts[~few].unique().tolist():
            [chosen] = torch.where(counts == count)
            places = starts[chosen][:, None] + torch.arange(count, device=counts.device)
            self.batches.append(Batch(self, steps, chosen, places, positions[places], whole=False, like=like))
        self.passes = 2 if self._read_each_other() else 1

    def _read_each_other(self) -> bool:
        """Whether a batch reads pages that another one writes in this step: of prompts that begin alike."""
        for batch, number in product(self.batches, range(len(self.caches))):
            others = [other.pages[number].written[0].flatten() for other in self.batches if other is not batch]
            if others and torch.isin(batch.pages[number].used(), torch.cat(others)).any():
                return True
        return False

    def attend(self, hidden_states: Tensor, projected: list[Tensor | None], output: Tensor, number: int) -> None:
        """The attention of a layer, of all tokens of the step: see `core_attention`."""
        layer = self.plan.layers[number]
        core = self._core(layer.block)
        # What a batch reads of another one's new tokens is written when it is computed again.
        for batch in self.batches * self.passes:
            hidden = batch.rows_of(hidden_states) if core.mixer is not None else None
            compute = partial(batch.attend, core, layer, hidden, number in self.lenders)
            if batch.kept is None:
                batch.put(output, compute([None if part is None else batch.rows_of(part) for part in projected]))
                continue
            # Later layers read new values of a lender.
            given = number, f" of {number}" if number in self.lenders else "", compute
            if batch.whole:
                batch.kept.attend(*given, projected, output)
                continue
            tokens = batch.tokens[:, 0]
            found = output.new_empty(len(tokens), *output.shape[1:])
            batch.kept.attend(*given, [None if part is None else part[tokens] for part in projected], found)
            output[tokens] = found

    def kept_for(self, batch: "Batch") -> RepeatedRows | None:
        """Return what a batch's steps are repeated by; None: they run as they are written."""
        if batch.new > 1 or not batch.in_place or batch.longest == 1:
            return None
        addresses = [cache.kv_cache.data_ptr() for cache in self.caches]
        kinds = *addresses, *(id(table[0]) for table in self._tables.values()), torch.get_num_threads()
        return self.repeated if self.repeated.begin(len(batch.tokens), batch.longest, *kinds) else None

    def _core(self, block: int) -> Any:
        """The attention of a block, between its projections and its output."""
        if block not in self._cores:
            attention = self.model.layers[block].self_attn
            core = copy(attention)  # which shares its modules
            original = type(attention).__bases__[1]
            core.__class__ = CORES.get(original, original)
            core.project = lambda hidden_states, projected: projected
            core.project_output = lambda heads, gate: heads
            core.config, core.rotate = self.config, fused_rotate
            core.attend = self.kernel.attend_one_query
            core.attend_to_latent = self.kernel.attend_one_query_to_latent
            turned = getattr(self.kernel, "attend_one_query_turned", None)  # of CPUs
            if turned is not None and isinstance(core, Absorbing):
                use_head_products(core)
                core.attend_turned = turned
            self._cores[block] = core
        return self._cores[block]

    def tables(self, longest: int, like: Tensor) -> Rotations:
        """Rotations of positions from 0 to at least `longest`, [positions, rotated dimensions]; and of a history,
        where cached keys are turned."""
        held = next((len(cos) for cos, _ in self._tables.values()), 0)
        rotary = self.model.rotary_emb
        if rotary is not None and held < longest:
            positions = torch.arange(max(longest, min(2 * held, self.limit)), device=like.device)[None]
            history = None if self.plan.turns_keys_in is None else positions
            self._tables = {name: (cos[0], sin[0]) for name, (cos, sin) in rotary(like, positions, history).items()}
        return self._tables


class Batch:
    """Requests of a step that attend together, as rows with equally many new tokens.

    Args:
        requests: of every row, [rows].
        tokens, positions: the rows' new tokens among those of the step, and their positions, [rows, new tokens].
        whole: whether these are all tokens of the step, one in each row.
        in_place: of pages of codes, whether the numbers behind them are read where they lie.

    Attributes:
        cache, masks, rotations: as the core's attention takes them.
        padded_right: whether shorter rows are padded on the right, so that positions are counted alike, or on the left.
        causal: whether the rows have several new tokens, which the kernel reads codes for.
        history, real: positions of the padded rows' tokens, [1 or rows, tokens of the longest], and which tokens are.
        borrowed: keys and values of the layers so far that later ones borrow.
        pages: of every group of layers.
    """

    def __init__(
        self,
        histories: Histories,
        steps: Sequence[Step],
        requests: Tensor,
        tokens: Tensor,
        positions: Tensor,
        *,
        whole: bool,
        like: Tensor,
        in_place: bool = True,
    ):
        self.tokens, self.new, self.whole = tokens, tokens.shape[1], whole
        self.positions, self.in_place = positions, in_place
        lengths = positions[:, -1] + 1
        self.longest = int(lengths.max())
        self.kept = histories.kept_for(self)
        self.lengths = self.keep("lengths", lengths)
        self.borrowed: dict[int, KeyValues] = {}
        self._parts: list[Any] = []  # of the last layer, the tensors that are made of pages of codes, and of what
        coded = histories.caches[0].codes is not None
        kinds: tuple[type[Pages], type[PagedLayer]] = (CodesPages, CodesLayer) if coded else (Pages, PagedLayer)
        self.pages = [kinds[0](self, *given, requests) for given in zip(histories.caches, steps, strict=True)]
        self._layers, self._kind = histories.plan.layers, kinds[1]
        self.padded_right = self.new == 1
        self.causal = not self.padded_right and histories.causal
        history = torch.arange(self.longest, device=tokens.device)[None]
        if not self.padded_right:
            history = history - (self.longest - self.lengths)[:, None]
        self.real, self.history = (history >= 0) & (history < self.lengths[:, None]), history.clamp_min(0)
        self.masks = self._masks(histories, like)
        tables = histories.tables(self.longest, like)
        self.rotations = {name: self._rotation(name, table, positions) for name, table in tables.items()} or None
        for pages in self.pages if self.kept is not None else ():
            pages.prepare()

    @cached_property
    def cache(self) -> Cache:
        of = {number: pages for pages in self.pages for number in pages.cache.group.layers}
        return Cache(layers=[self._kind(of.get(one.layer, self.pages[0]), one) for one in self._layers])

    def _rotation(self, name: str, table: Rotation, positions: Tensor) -> Rotation:
        of_history = name.startswith((HISTORY, BACK))
        if of_history and self.padded_right:
            cos, sin = (one[None, : self.longest] for one in table)
        else:
            cos, sin = (one[self.history if of_history else positions] for one in table)
            cos, sin = self.keep(f"{name}: cos", cos), self.keep(f"{name}: sin", sin)
        return cos, sin

    def _masks(self, histories: Histories, like: Tensor) -> dict[int | None, Any]:
        """By window; of rows with one token each, additive masks where the rows are of several lengths."""
        if self.new > 1:
            embeds = like.new_empty(len(self.real), self.new, 1)
            return make_masks(histories.config, histories.plan, embeds, self.real.long(), None, self.cache, None)
        masks = {}
        for window in {layer.window for layer in histories.plan.layers}:
            seen = self.real if window is None else self.real & (self.history >= self.lengths[:, None] - window)
            hidden = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)
            kept = None if self.kept is None else self.keep(f"mask of {window}", hidden[:, None, None])
            masks[window] = kept if kept is not None or seen.all() else hidden[:, None, None]
        return masks

    def make(self, kept: "Kept") -> Tensor:
        """Return the tensor of what is kept, and note that it is made of that."""
        self._parts.append((kept.whole(), kept))
        return self._parts[-1][0]

    def to_lend(self, own: KeyValues) -> KeyValues:
        """Return keys and values for later layers: in the place of a tensor made of codes, what it is made of."""
        found = [next((kept for made, kept in self._parts if made is part), part) for part in own]
        return KeyValues(*found)

    def lent_to(self, layer: LayerPlan) -> dict[int, KeyValues]:
        """Return keys and values that a layer may borrow. Tensors made of codes are made for this layer alone."""
        self._parts = []
        lent = {number: self.borrowed[number] for number in layer.lenders if number in self.borrowed}
        made = {
            number: KeyValues(*(part.whole() if isinstance(part, Kept) else part for part in parts))
            for number, parts in lent.items()
        }
        return {**self.borrowed, **made}

    def attend(
        self, core: Any, layer: LayerPlan, hidden: Tensor | None, lends: bool, parts: Sequence[Tensor | None]
    ) -> Tensor:
        """The attention of a layer, [rows, new tokens, query heads, head_dim], of the rows of what it projects."""
        found, _, own = core(
            hidden,
            layer,
            position_embeddings=self.rotations,
            attention_mask=self.masks[layer.window],
            borrowed=self.lent_to(layer),
            past_key_values=self.cache,
            mlp_hidden=(*parts, None),
        )
        if lends:
            self.borrowed[layer.layer] = self.to_lend(own)
        return found

    def keep(self, name: str, made: Tensor) -> Tensor:
        """Return a tensor, or what is kept of it where steps are repeated."""
        return made if self.kept is None else self.kept.keep(name, made)

    def rows_of(self, tensor: Tensor) -> Tensor:
        """[tokens of the step, ...] to [rows, new tokens, ...]."""
        return tensor[: len(self.tokens), None] if self.whole else tensor[self.tokens]

    def put(self, output: Tensor, found: Tensor) -> None:
        """Write [rows, new tokens, ...] to its places among the tokens of the step."""
        if self.whole:
            output[: len(self.tokens)] = found[:, 0]
        else:
            output[self.tokens] = found


class LatentHeadsCore(LatentHeadsAttention):
    """Latents that are read where they lie, however few tokens there are: heads made of them would be gathered."""

    def absorbs(self, up: nn.Module, query: Tensor, positions: int, columns: int) -> bool:
        return super().absorbs(up, query, MANY if query.shape[2] == 1 else positions, columns)


class LatentCore(LatentAttention):
    """MLA whose absorbed form is one call of the kernel, if the latent and the rotary key lie in pages."""

    def _absorbing_pays(self, query: Tensor, pieces: list[Any], mask: Any) -> bool:
        if not isinstance(pieces[0], History):
            return super()._absorbing_pays(query, pieces, mask)
        size = query, MANY, self.latent.rank
        return absorbing_pays(self.k_up_proj, *size) and absorbing_pays(self.v_up_proj, *size)


CORES: dict[type, type] = {LatentHeadsAttention: LatentHeadsCore, LatentAttention: LatentCore}


class OpaqueAttention:
    """Attention of a block, of which `torch.compile` sees the projections and the output alone.

    Attributes:
        pages: the name under which vLLM's context has the `Histories`.
    """

    pages: str

    def forward(self: Any, hidden_states: Tensor, layer: LayerPlan, mlp_hidden: Tensor | None = None, **kwargs: Any):
        """As Attention.forward, of the tokens of a step [1, tokens, hidden_size]."""
        *projected, gate = self.project(hidden_states, mlp_hidden)
        output = hidden_states.new_empty(hidden_states.shape[1], layer.num_query_heads, self.head_dim)
        parts = [None if part is None else part[0] for part in projected]
        torch.ops.vllm.leanqkv_core_attention(hidden_states[0], parts, output, layer.layer, self.pages)
        return self.project_output(output[None], gate), None, KeyValues(None, None, None)


def use_histories(model: LeanModel, caches: Sequence[PagedCache], kernel: ModuleType, limit: int) -> Histories:
    """Make a model's attention run through the operator; return what a step begins with."""
    histories = caches[0].histories = Histories(model, caches, kernel, limit)
    for block in model.layers:
        attention = block.self_attn
        attention.__class__ = type("OpaqueAttention", (OpaqueAttention, type(attention)), {})
        attention.pages = caches[0].layer_name
    return histories


def core_attention(
    hidden_states: Tensor, projected: list[Tensor | None], output: Tensor, layer: int, pages: str
) -> None:
    """Attend with what a layer projects, and write its new keys and values into their pages: the custom operator.

    Args:
        hidden_states: [tokens, hidden_size], which mixers read.
        projected: what the core's `project` returns but for the gate, each [tokens, width].
        output: [tokens, query heads, head_dim], which is written.
    """
    context = get_forward_context()
    if context.attn_metadata is not None:  # None: vLLM measures the memory
        context.no_compile_layers[pages].histories.attend(hidden_states, projected, output, layer)


direct_register_custom_op(
    "leanqkv_core_attention", core_attention, mutates_args=["output"], fake_impl=lambda *arguments: None
)
