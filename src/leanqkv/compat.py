"""Names that PyTorch and transformers do not promise to keep, each with a way to do without it.

A name that is missing or behaves differently in another version is noticed here. The way without it is slower or
refuses; its results are the same. `model/` cannot import this module: it travels alone with every checkpoint.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from transformers.utils import logging

from .errors import LeanError, first_line


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Show no progress bars and no messages below errors from transformers while the body runs."""
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def set_backend(tokenizer: Any, backend: Any) -> None:
    """Make a fast tokenizer of transformers use this `tokenizers.Tokenizer`; its constructor would change it.

    Raises:
        LeanError: this version of transformers keeps it elsewhere.
    """
    tokenizer._tokenizer = backend
    if tokenizer.backend_tokenizer is not backend:
        raise LeanError("this version of transformers does not take a tokenizer as it is; install transformers 5.17")


@contextmanager
def panics_are_errors(place: str) -> Iterator[None]:
    """Turn errors of tokenizers' Rust code into a LeanError; `place` says whose text it was.

    They are bare Exceptions, and panics, which are none: patterns that backtrack without end cause one.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise LeanError(f"{place} cannot be tokenized: {first_line(error)}") from None


def compile_cpp(source: str, *flags: str) -> Any | None:
    """Compile C++ source with the toolchain of `torch.compile` and load it; None, with a warning, if that fails.

    Inductor's `CppCodeCache` compiles for this processor and keeps the library on disk for the next process.
    """
    try:
        from torch._inductor.codecache import CppCodeCache

        return CppCodeCache.load(source, extra_flags=flags)
    except Exception as error:  # No compiler, no space, a changed interface: each raises another type.
        lines = (str(error).strip() or type(error).__name__).splitlines()
        reason = next((line for line in lines if "error:" in line), lines[0])
        warnings.warn(
            f"the kernel for decoding cannot be compiled: {reason}; PyTorch's attention is used", RuntimeWarning, 2
        )
        return None


def pack_linear(weight: Tensor, bias: Tensor | None, rows: int) -> Callable[[Tensor], Tensor]:
    """Return `x -> x W^T + b` over a copy of the weight in oneDNN's layout, chosen for inputs of `rows` rows."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
    return lambda inputs: torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")


@functools.cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether `pack_linear` exists for `dtype` on this machine and computes what `nn.functional.linear` does."""
    if not torch.backends.mkldnn.is_available() or dtype not in (torch.float32, torch.bfloat16):
        return False
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        weight = torch.arange(32, device="cpu").remainder(5).to(dtype).reshape(4, 8)  # All results are exact.
        bias, inputs = weight[:, 0].clone(), weight[:2].clone()
        with torch.no_grad():
            works = torch.equal(pack_linear(weight, bias, 2)(inputs), nn.functional.linear(inputs, weight, bias))
        reason = "its result differs"
    except AttributeError:
        return False
    except (RuntimeError, TypeError) as error:
        works, reason = False, str(error).splitlines()[0]
    if not works:
        warnings.warn(f"linear layers in {dtype} cannot be packed: {reason}; they run unpacked", RuntimeWarning, 2)
    return works


def attention_implementation(model: nn.Module) -> str | None:
    """The name of the attention function that a transformers model uses; None if that is unknown."""
    return getattr(model.config, "_attn_implementation", None)


def use_one_device(arguments: Any) -> None:
    """Keep `transformers.Trainer` from spreading one process over several GPUs with DataParallel.

    Raises:
        LeanError: there are several GPUs, and this version offers no way to use one of them.
    """
    if hasattr(arguments, "_n_gpu"):
        arguments._n_gpu = min(arguments._n_gpu, 1)
    if arguments.n_gpu > 1:
        raise LeanError(f"{arguments.n_gpu} GPUs are visible; start with torchrun, or set CUDA_VISIBLE_DEVICES to one")


def shard_on_cpus(accelerator: Any, plugin_arguments: dict[str, Any]) -> bool:
    """Let accelerate shard on CPUs, where it takes its FSDP plugin and does nothing; return whether it shards."""
    state = accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**plugin_arguments)
    return state.distributed_type == DistributedType.FSDP
