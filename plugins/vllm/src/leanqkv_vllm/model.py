"""leanqkv's own model inside vLLM: its blocks, norms and projections as they are, its attention on vLLM's pages."""

from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import AutoWeightsLoader, maybe_prefix
from vllm.platforms import current_platform

from leanqkv import LeanConfig
from leanqkv.cache_bits import CacheBits
from leanqkv.model.plan import Plan
from leanqkv.model.position import RotaryEmbeddings, Rotations
from leanqkv.model.transformer import LeanModel

from . import paged
from .cache import PagedCache
from .histories import use_histories
from .linear import use_products
from .pages import Group, make_groups
from .parallel import Shards, rank_config, reduce_outputs
from .refusals import cache_bits, refusal, settings_refusal
from .seeds import keep_seeds
from .step import PlainBackend


def kernel_of_platform() -> ModuleType | None:
    """Return the module with the kernel of this platform; None: there is none, and leanqkv's own code attends."""
    name = "kernel_cpu" if current_platform.is_cpu() else "kernel_triton" if current_platform.is_cuda_alike() else None
    return None if name is None else import_module(f".{name}", __package__)


def kernel_in_place() -> ModuleType:
    """Return the module with leanqkv's own kernel of this platform, which reads a history where it lies."""
    if current_platform.is_cuda_alike():
        return import_module(".attention_triton", __package__)
    return import_module("leanqkv.inference.attention")


def choose_kernel(plan: Plan, bits: CacheBits) -> tuple[ModuleType | None, str | None]:
    """Return vLLM's kernel that attends as a plan asks; or None and why leanqkv's own code does."""
    kernel = kernel_of_platform()
    why = "this platform has no kernel" if kernel is None else paged.kernel_refusal(plan, kernel)
    why = f"the cache is of {bits.name}" if bits.quantized else why
    return (kernel, None) if why is None else (None, why)


def _compiles(vllm_config: VllmConfig) -> bool:
    """Whether vLLM may compile the model: our own code must not end up in a graph of a GPU's launches."""
    plan, bits = vllm_config.model_config.hf_config.plan, cache_bits(vllm_config)
    return current_platform.is_cpu() or choose_kernel(plan, bits)[0] is not None


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0, "inputs_embeds": 0}, enable_if=_compiles)
class CompiledModel(LeanModel):
    """The model on the tokens of a step, which vLLM compiles where it is asked to."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", lean_config: LeanConfig):
        super().__init__(lean_config)

    def forward(self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        """Return the last hidden states [tokens, hidden_size]."""
        name, given = ("input_ids", input_ids) if inputs_embeds is None else ("inputs_embeds", inputs_embeds)
        outputs = super().forward(**{name: given[None]}, position_ids=positions[None], use_cache=False)
        return outputs.last_hidden_state[0]


class RotaryTables(nn.Module):
    """The rotations of all positions, made once: a compiled model would make cosines for every head of every layer."""

    def __init__(self, rotary: RotaryEmbeddings, positions: int, like: Tensor):
        super().__init__()
        made = rotary(like, torch.arange(positions, device=like.device)[None])
        self.fields = tuple(made)
        for field, (cos, sin) in made.items():
            self.register_buffer(f"{field}_cos", cos[0], persistent=False)
            self.register_buffer(f"{field}_sin", sin[0], persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor, history: None = None) -> Rotations:
        """As RotaryEmbeddings.forward, of positions below those of the tables and without a history."""
        tables = ((field, getattr(self, f"{field}_cos"), getattr(self, f"{field}_sin")) for field in self.fields)
        return {field: (cos[position_ids], sin[position_ids]) for field, cos, sin in tables}


class LeanForCausalLM(nn.Module):
    """A checkpoint of leanqkv, as vLLM calls it."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.config = config = vllm_config.model_config.hf_config
        if reason := refusal(config) or settings_refusal(config, vllm_config):
            raise ValueError(f"leanqkv-vllm: {reason}")
        self.ranks = vllm_config.parallel_config.tensor_parallel_size
        config = rank_config(config, self.ranks) if self.ranks > 1 else config
        self.plan: Plan = config.plan
        self.bits = cache_bits(vllm_config)
        self.kernel, why = choose_kernel(self.plan, self.bits)
        if reason := paged.precision_refusal(vllm_config, self.kernel, why):
            raise ValueError(f"leanqkv-vllm: {reason}")
        config._attn_implementation = paged.IMPLEMENTATION
        if current_platform.is_cpu():
            keep_seeds(import_module("vllm.v1.worker.cpu_model_runner").CPUModelRunner)
        self.model = CompiledModel(vllm_config=vllm_config, prefix=prefix, lean_config=config)
        self.model.requires_grad_(False).eval()
        self.shard = Shards(self.config, self.ranks, get_tensor_model_parallel_rank()) if self.ranks > 1 else None
        self.caches = self._make_caches(maybe_prefix(prefix, "model"))
        given = self.model, self.caches, kernel_in_place(), vllm_config.model_config.max_model_len
        self.histories = use_histories(*given) if self.kernel is None else None
        self.positions = vllm_config.model_config.max_model_len
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        self.logits_processor = LogitsProcessor(config.vocab_size, scale=1 / config.logits_scaling)

    def _make_caches(self, prefix: str) -> list[PagedCache]:
        """Register the pages of every group of layers, and let attention use them."""
        groups = make_groups(self.plan, together=self.bits.quantized)
        if self.kernel is None:
            return [self._cache(prefix, number, group, PlainBackend) for number, group in enumerate(groups)]
        calls = {layer.layer: paged.calls_of(layer) for layer in self.plan.layers}
        caches, used = [], {}
        for number, group in enumerate(groups):
            members = [layer for layer in calls if calls[layer][0].keys.layer in group.layers]
            shapes = {call.shape: None for layer in members for call in calls[layer]}
            cache = self._cache(prefix, number, group, self.kernel.Backend, tuple(shapes))
            cache.kernel, cache.calls = self.kernel, {layer: calls[layer] for layer in members}
            used |= dict.fromkeys(members, cache.layer_name)
            caches.append(cache)
        for block in self.model.layers:
            paged.use_pages(block.self_attn, used, self.kernel)
        return caches

    def _cache(self, prefix: str, number: int, group: Group, backend: Any, shapes: tuple = ()) -> PagedCache:
        name = f"{prefix}.layers.{number}.pages"
        return PagedCache(name, group, self.config.head_dim, backend, shapes, self.bits)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [tokens, hidden_size]."""
        return self.model.task.embed(self.model.get_input_embeddings(), input_ids[None], None, None, None)[0]

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the last hidden states [tokens, hidden_size] of the tokens of a step."""
        metadata = get_forward_context().attn_metadata
        if self.histories is not None and metadata is not None:
            self.histories.begin([metadata[cache.layer_name] for cache in self.caches])
        return self.model(input_ids, positions, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits [tokens, vocab_size]."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take the checkpoint's tensors; return the names that were."""

        def with_head() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in weights:
                yield name, tensor if self.shard is None else self.shard(name, tensor)
                if self.config.tie_word_embeddings and name == "model.embed_tokens.weight":
                    yield "lm_head.weight", tensor

        wanted = {name for name, _ in self.named_parameters()}
        if missing := wanted - AutoWeightsLoader(self).load_weights(with_head()):
            raise ValueError(f"leanqkv-vllm: the checkpoint has no tensor {min(missing)}")
        embedding = self.model.get_input_embeddings().weight
        if self.config.tie_word_embeddings and embedding.shape == self.lm_head.weight.shape:
            self.lm_head.weight = embedding  # else the head has rows more, up to a multiple that kernels like
        if self.kernel is not None and self.model.rotary_emb is not None:
            like = self.model.get_input_embeddings().weight.new_empty(0)
            self.model.rotary_emb = RotaryTables(self.model.rotary_emb, self.positions, like)
        if self.ranks > 1:
            reduce_outputs(self.model)
        if current_platform.is_cpu():
            use_products(self.model)
        return {name for name, _ in self.named_parameters()}  # vLLM looks for those that there are now
