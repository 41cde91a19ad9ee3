"""Write a model as a checkpoint of ours or of a class of transformers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..environment import versions
from ..model.config import LeanConfig
from ..presets.edit import with_fields
from .dense import written_out
from .disabled_norms import disable_norms
from .families import choose_family, export_tensors
from .load import MODELS
from .open import Checkpoint, open_checkpoint
from .tensors import LazyTensors, finite
from .write import Progress, check_free, copy_tokenizer, save_config, write_checkpoint


def as_stock(
    config: LeanConfig, tensors: Mapping[str, Tensor], family: str | None = None
) -> tuple[PreTrainedConfig, LazyTensors]:
    """Return configuration and lazy tensors of a class of transformers that computes the same, identities written out.

    A model without norms becomes a GPT-2 whose norms an epsilon disables, if its stream has mean zero.

    family: the class's model_type; None for the plainest that can hold the model.

    Raises:
        LeanError: no class can hold the model; says why.
    """
    config, tensors = written_out(config, tensors)
    if config.norm_type == "none":
        config, tensors = disable_norms(config, tensors)
    chosen = choose_family(config, family)
    return chosen.to_stock(config), export_tensors(chosen, config, tensors)


def convert_format(
    source: Path,
    out: Path,
    *,
    stock: bool,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> tuple[LeanConfig, str]:
    """Write the checkpoint in `source` as one of ours, or with `stock` of a class of transformers.

    Args:
        family: as in `as_stock`.
        dtype: of the stored weights; None: that of the first tensor in `source`.
        progress: called with bytes written and bytes in all.

    Returns:
        our configuration of it, and the name of the class that was written.

    Raises:
        LeanError: it cannot be opened, or no class can hold it; `out` is not empty.
    """
    check_free(out)
    opened = open_checkpoint(source)
    tensors = finite(opened.tensors)
    dtype = dtype or next(iter(tensors.values())).dtype
    written = write_model(opened, out, opened.config, tensors, dtype, stock=stock, family=family, progress=progress)
    return opened.config, written


def write_model(
    source: Checkpoint,
    out: Path,
    config: LeanConfig,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    stock: bool = False,
    family: str | None = None,
    settings: Mapping[str, Any] | None = None,
    finish: Callable[[Path], None] = lambda directory: None,
    progress: Progress | None = None,
) -> str:
    """Write a model that was made from `source`, with its tokenizer, and return the name of the class written.

    Args:
        settings: what decides the content beside the source's files, for going on after an interruption.
        finish: writes more files into the directory, whose weights and configuration are complete.
    """
    stock_config: Any = None
    shapes: Mapping[str, tuple[int, ...]] = config.plan.parameter_shapes
    if stock:
        stock_config, tensors = as_stock(config, tensors, family)
        shapes = tensors.shapes

    def finish_model(directory: Path) -> None:
        copy_tokenizer(source.directory, directory)
        if stock:
            stock_config.dtype = dtype
            stock_config.save_pretrained(directory)
        else:
            save_config(with_fields(config, dtype=dtype), directory)
        finish(directory)

    files = sorted(file for file in source.directory.iterdir() if file.suffix in (".safetensors", ".bin", ".json"))
    job = {
        "source": str(source.directory.resolve()),
        "files": {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files},
        "versions": versions(),
        "stock": stock,
        "family": family,
        **(settings or {}),
    }
    write_checkpoint(out, shapes, tensors, dtype, job=job, finish=finish_model, progress=progress)
    return stock_config.architectures[0] if stock else MODELS[config.task].__name__
