"""The metadata of a step, for attention that needs nothing beyond vLLM's own."""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata


@dataclass
class Step:
    """Which tokens a step computes: starts and lengths of requests, their pages, and the slots of new tokens."""

    common: CommonAttentionMetadata


class StepBuilder(AttentionMetadataBuilder[Step]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        return Step(common_attn_metadata)


class PlainBackend(AttentionBackend):
    """Metadata alone: our own code attends."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "LEANQKV"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("leanqkv's own code attends; vLLM has no layer of attention to build for it")

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True
