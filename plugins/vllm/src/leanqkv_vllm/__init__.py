"""leanqkv checkpoints on vLLM, with a paged cache of exactly the plan's size."""

from .refusals import refusal

__all__ = ["TESTED", "refusal", "register"]

TESTED = ("0.32.0",)


def register() -> None:
    """Entry point of `vllm.general_plugins`; vLLM calls it in every process, sometimes more than once."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from leanqkv import LeanConfig

    AutoConfig.register("leanqkv", LeanConfig, exist_ok=True)
    ModelRegistry.register_model("LeanForCausalLM", "leanqkv_vllm.model:LeanForCausalLM")
