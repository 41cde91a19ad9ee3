"""What a checkpoint or the engine's settings ask for and vLLM cannot do, in one line each."""

from typing import Any


def refusal(config: Any) -> str | None:
    """Return why vLLM cannot run what a LeanConfig describes; None: it can."""
    if config.task != "causal_lm":
        return f"a model for {config.task} generates nothing"
    if config.mask_type == "prefix":
        return "mask_type 'prefix' attends in both directions within a prompt, and vLLM computes prompts in pieces"
    return None


def settings_refusal(config: Any, vllm_config: Any) -> str | None:
    """Return why a model cannot run with the engine's settings; None: it can."""
    from .parallel import refusal as parallel_refusal  # which imports vLLM

    longest, limit = vllm_config.model_config.max_model_len, config.cached_positions
    if limit is not None and longest > limit:
        return (
            f"rotary positions are others beyond {limit} tokens, and cached keys would be wrong; found max_model_len "
            f"{longest}, give --max-model-len {limit} or less"
        )
    if vllm_config.quant_config is not None:
        return f"quantized weights ({vllm_config.quant_config.get_name()}) are not possible; give unquantized ones"
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if ranks > 1 and (reason := parallel_refusal(config, ranks)):
        return f"tensor_parallel_size {ranks} is not possible: {reason}"
    for name in ("pipeline_parallel_size", "decode_context_parallel_size"):
        if (size := getattr(vllm_config.parallel_config, name, 1)) > 1:
            return f"{name} is {size}; only 1 is possible"
    if getattr(vllm_config, "kv_transfer_config", None) is not None:
        return "kv_transfer_config is not possible: moving the cache elsewhere needs pages that are one piece of memory"
    return None
