"""What a checkpoint or the engine's settings ask for and vLLM cannot do, in one line each."""

from typing import Any

from leanqkv.cache_bits import CacheBits

BITS = "cache_bits"  # in vLLM's `additional_config`
# The widest head that the kernel for GPUs reads, by the bytes of a number: what it works on lies in shared memory.
COLUMNS_ON_GPU = {2: 1024, 4: 256}


def refusal(config: Any) -> str | None:
    """Return why vLLM cannot run what a LeanConfig describes; None: it can."""
    if config.task != "causal_lm":
        return f"a model for {config.task} generates nothing"
    if config.mask_type == "prefix":
        return "mask_type 'prefix' attends in both directions within a prompt, and vLLM computes prompts in pieces"
    return None


def cache_bits(vllm_config: Any) -> CacheBits:
    """Return the precision of the cache that the engine's settings ask for.

    Raises:
        LeanError: there is no such one.
    """
    given = getattr(vllm_config, "additional_config", None)
    return CacheBits.of(given.get(BITS) if isinstance(given, dict) else None)


def bits_refusal(config: Any, bits: CacheBits, vllm_config: Any) -> str | None:
    """Return why the cache cannot be of so many bits with a model and the engine's settings; None: it can."""
    from vllm.platforms import current_platform

    from leanqkv.model.cache_quantized import BLOCK

    cache, dtype = vllm_config.cache_config, vllm_config.model_config.dtype
    if not current_platform.is_cpu() and not current_platform.is_cuda_alike():
        return f"{BITS} {bits} is possible on CPUs, and on GPUs of NVIDIA and AMD; found {current_platform.device_name}"
    if current_platform.is_cuda_alike() and (reason := codes_refusal_on_gpu(config.plan, dtype)):
        return f"{BITS} {bits} is not possible on a GPU: {reason}; give 16, or a CPU"
    if cache.user_specified_block_size and cache.block_size != BLOCK:
        return f"{BITS} {bits} needs pages of {BLOCK} tokens; found block_size {cache.block_size}, give {BLOCK}"
    if cache.cache_dtype not in ("auto", str(dtype).removeprefix("torch.")):
        return f"{BITS} {bits} and kv_cache_dtype {cache.cache_dtype!r} are both the cache's precision; give one"
    if vllm_config.speculative_config is not None:
        return f"{BITS} {bits} is not possible with speculative_config: a rejected draft cannot be taken out of codes"
    return None


def codes_refusal_on_gpu(plan: Any, dtype: Any) -> str | None:
    """Return what the kernel for GPUs cannot read of codes, so that each step would gather it; None: it reads all."""
    most = COLUMNS_ON_GPU[dtype.itemsize]
    for layer in plan.layers:
        if layer.value.reads_keys:
            return f"layer {layer.layer} makes values of its keys, which the kernel for GPUs does not turn back"
        if layer.key.before_rotary:
            return f"layer {layer.layer} turns its keys when it reads them, which the kernel for GPUs does not"
        lenders = {source.layer for source in (*layer.layout.keys, *layer.layout.values)}
        if layer.latent is not None and (len(lenders) > 1 or len(layer.layout.values) > 1):
            return f"the latent of layer {layer.layer} comes from several layers, and the kernel for GPUs reads one"
        if (wide := max((tensor.head_dim for tensor in layer.cached), default=0)) > most:
            return f"layer {layer.layer} caches {wide} columns, and the kernel for GPUs reads {most} at most of {dtype}"
    return None


def settings_refusal(config: Any, vllm_config: Any) -> str | None:
    """Return why a model cannot run with the engine's settings; None: it can."""
    from .parallel import refusal as parallel_refusal  # which imports vLLM

    longest, limit = vllm_config.model_config.max_model_len, config.cached_positions
    if limit is not None and longest > limit:
        learned = config.position_embedding_type == "learned"
        turned = f"rotary positions are others beyond {limit} tokens, and cached keys would be wrong"
        reason = f"the model has {limit} positions" if learned else turned
        return f"{reason}; found max_model_len {longest}, give --max-model-len {limit} or less"
    if vllm_config.quant_config is not None:
        return f"quantized weights ({vllm_config.quant_config.get_name()}) are not possible; give unquantized ones"
    bits = cache_bits(vllm_config)
    if bits.quantized and (reason := bits_refusal(config, bits, vllm_config)):
        return reason
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if ranks > 1 and (reason := parallel_refusal(config, ranks)):
        return f"tensor_parallel_size {ranks} is not possible: {reason}"
    for name in ("pipeline_parallel_size", "decode_context_parallel_size"):
        if (size := getattr(vllm_config.parallel_config, name, 1)) > 1:
            return f"{name} is {size}; only 1 is possible"
    if getattr(vllm_config, "kv_transfer_config", None) is not None:
        return "kv_transfer_config is not possible: moving the cache elsewhere needs pages that are one piece of memory"
    return None
