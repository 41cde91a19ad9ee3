"""Names that PyTorch and transformers do not promise to keep, each with a way to do without it.

A name that is missing or behaves differently in another version is noticed here. The way without it is slower or
refuses; its results are the same. `model/` cannot import this module: it travels alone with every checkpoint.
"""

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.utils import logging

from .errors import LeanError, first_line, needs


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
        warn_without_kernels(reason)
        return None


@functools.cache
def warn_without_kernels(reason: str) -> None:
    """Warn once for a reason, whatever the number of sources that it keeps from being compiled."""
    warnings.warn(
        f"the kernels for decoding cannot be compiled: {reason}; PyTorch's operators are used", RuntimeWarning, 3
    )


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
    state, utils = accelerator.state, needs("train", "accelerate.utils")
    if state.distributed_type == utils.DistributedType.MULTI_CPU:
        state.distributed_type = utils.DistributedType.FSDP
        state.fsdp_plugin = utils.FullyShardedDataParallelPlugin(**plugin_arguments)
    return state.distributed_type == utils.DistributedType.FSDP
