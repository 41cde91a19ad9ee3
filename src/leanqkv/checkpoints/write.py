"""Write a model as a checkpoint of ours or of a class of transformers: sharded, resumable, whole or absent."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from ..environment import give_back_freed_memory, return_freed_memory, versions
from ..errors import LeanError
from ..files import check_free, hash_files, remove, replacing, write_json, write_text
from ..job import Job, beside, is_locked, unfinished
from ..model.config import LeanConfig
from ..model.shapes import count_parameters, parameter_shapes
from ..presets.edit import with_fields
from .card import CARD, card, origin
from .dense import to_dense, with_norm_offset
from .disabled_norms import disable_norms
from .families import choose_family, export_tensors, norm_offset_of
from .open import MODELS, Checkpoint, open_checkpoint
from .tensors import WEIGHTS, LazyTensors, count_nonfinite, finite
from .tokenizer import TEMPLATES, TOKENIZER_FILES, copy_tokenizer, has_tokenizer

SHARD_BYTES = 2**30
Progress = Callable[[int, int], None]


def as_stock(
    config: LeanConfig, tensors: Mapping[str, Tensor], family: str | None = None
) -> tuple[PreTrainedConfig, LazyTensors]:
    """Return configuration and lazy tensors of a class of transformers that computes the same, identities written out.

    A model without norms becomes a GPT-2 whose norms an epsilon disables, if its stream has mean zero. `family` is the
    class's model_type; None stands for the plainest that can hold the model. Raises a LeanError if no class can.
    """
    config, tensors = to_dense(config, tensors)
    if config.norm_type == "none":
        config, tensors = disable_norms(config, tensors)
    if config.norm_type == "rmsnorm":
        config, tensors = with_norm_offset(config, tensors, norm_offset_of(config))
    chosen = choose_family(config, family)
    return chosen.to_stock(config), export_tensors(chosen, config, tensors)


def rewrite(
    source: Path,
    out: Path,
    dtype: torch.dtype | None = None,
    *,
    stock: bool = False,
    family: str | None = None,
    progress: Progress = lambda done, total: None,
) -> tuple[str, int]:
    """Write a checkpoint as one of ours, or of a class of transformers; return its class's name and its parameters.

    Args:
        dtype: of the stored weights; None: as stored, and tensors that this would round are refused.
        stock, family: as in `write_model`.
    """
    give_back_freed_memory()
    opened = open_checkpoint(source)
    config, tensors, stored = opened.config, finite(opened.tensors), dtype or opened.dtype

    def finish(directory: Path) -> None:
        made_from = origin(source)
        rounded = "" if dtype is None else f", stored in {str(dtype).removeprefix('torch.')}"
        what = f"The weights of {made_from['base_model']} in another format{rounded}."
        name, tokenizer = out.resolve().name, has_tokenizer(directory)
        write_text(directory / CARD, card(name, config.task, [], made_from, stock, what, tokenizer=tokenizer))

    options: Any = {"stock": stock, "family": family, "exact": dtype is None, "finish": finish, "progress": progress}
    return write_model(opened, out, config, tensors, stored, **options), count_parameters(config).total


def write_model(
    source: Checkpoint,
    out: Path,
    config: LeanConfig,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    stock: bool = False,
    family: str | None = None,
    exact: bool = False,
    settings: Mapping[str, Any] | None = None,
    finish: Callable[[Path], None] = lambda directory: None,
    progress: Progress = lambda done, total: None,
) -> str:
    """Write a model that was made from `source`, with its tokenizer, and return the name of the class written.

    Args:
        stock, family: write it as a class of transformers, as `as_stock` chooses it.
        exact: refuse a tensor whose values `dtype` does not hold, as in `write_checkpoint`.
        settings: whatever decides the content beside the source's files and `config`, for going on after an
            interruption.
        finish: writes more files into the directory, whose weights and configuration are complete.
    """
    stock_config: Any = None
    shapes: Mapping[str, tuple[int, ...]] = parameter_shapes(config)
    if stock:
        stock_config, tensors = as_stock(config, tensors, family)
        shapes = tensors.shapes

    def finish_model(directory: Path) -> None:
        if stock:
            stock_config.dtype = dtype
            stock_config.save_pretrained(directory)
        else:
            save_config(with_fields(config, dtype=dtype), directory)
        copy_tokenizer(source.directory, directory, stock)  # AutoTokenizer reads the configuration too
        finish(directory)

    job = {"source": source_hashes(source), "config": config.to_dict(), "stock": stock, "family": family}
    job |= settings or {}
    write_checkpoint(out, shapes, tensors, dtype, exact=exact, job=job, finish=finish_model, progress=progress)
    return stock_config.architectures[0] if stock else MODELS[config.task].__name__


def write_checkpoint(
    out: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    exact: bool = False,
    job: Mapping[str, Any],
    finish: Callable[[Path], None],
    progress: Progress = lambda done, total: None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `tensors` as safetensors shards of at most `shard_bytes` (a larger tensor has one to itself).

    Everything is written beside `out` and renamed when it is complete. After an interruption a call with the same
    `job`, which decides the content, resumes after the last complete shard.

    Args:
        shapes: name and shape of every tensor, in the order in which they are read; one shard is in memory at a time.
        dtype: of the stored floating tensors.
        exact: refuse a tensor that `dtype`, if narrower than float32, would round. Float32 rounds computed tensors.
        finish: writes the other files of the checkpoint into the directory it is given.
        progress: called with bytes done and bytes in all.

    Raises a LeanError if `out` is not empty or the disk has too little room, an OSError if it is full after all.
    """
    return_freed_memory()  # of what has computed the tensors
    out = Path(os.path.realpath(out))
    check_free(out)
    content = {**job, "versions": versions(), "dtype": str(dtype), "shard_bytes": shard_bytes}
    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    split = split_torch_state_dict_into_shards(empty, max_shard_size=shard_bytes)
    sizes = {file: sum(empty[name].nbytes for name in names) for file, names in split.filename_to_tensors.items()}
    work = Job(beside(out, "partial"), content)
    whole = {file for file in sizes if (work.directory / file).exists()} if work.resume() else set()
    _check_room(out, sum(size for file, size in sizes.items() if file not in whole))
    with unfinished(out, "partial", "writing") as partial:
        check_free(out)  # another process may have finished it
        work.start(keep=sizes)
        done, total = 0, sum(sizes.values())
        for file, names in split.filename_to_tensors.items():
            if not (partial / file).exists():
                for part in _write_shard(partial / file, names, tensors, dtype, exact):
                    progress(done + part, total)
            done += sizes[file]
            progress(done, total)
        if split.is_sharded:
            index = {"metadata": {"total_size": total}, "weight_map": split.tensor_to_filename}
            write_json(partial / "model.safetensors.index.json", index)
        finish(partial)
        work.publish(out)
    # What an interrupted conversion to `out` has left, which another command has now taken the place of.
    if not is_locked(calibration := beside(out, "calibration")):
        remove(calibration)


def source_hashes(source: Checkpoint) -> dict[str, str]:
    """Return the SHA-256 of every file of `source` that decides the result; its path may hold another one tomorrow."""
    if source.directory.is_file():
        return {source.directory.name: hash_files(source.directory)}
    weights = {source.stored.file(name).name for name in source.stored}
    indices = {name for name in WEIGHTS if name.endswith(".json")}
    templates = {str(file.relative_to(source.directory)) for file in (source.directory / TEMPLATES).glob("*")}
    names = {"config.json", *weights, *indices, *TOKENIZER_FILES, *templates}
    return {name: hash_files(source.directory / name) for name in sorted(names) if (source.directory / name).is_file()}


def save_config(config: LeanConfig, directory: Path) -> None:
    """Write config.json and the model's code, as `save_pretrained` does, without building the model."""
    config = type(config).from_dict(config.to_dict())
    config.architectures = [MODELS[config.task].__name__]
    config.save_pretrained(directory)


def _write_shard(
    file: Path, names: list[str], tensors: Mapping[str, Tensor], dtype: torch.dtype, exact: bool
) -> Iterator[int]:
    """Collect the tensors of a shard and write it; yield the bytes collected after each tensor."""
    shard: dict[str, Tensor] = {}
    for name in names:
        tensor = tensors[name]
        # A copy of its own: a view of a mapped file, or of another tensor, cannot be written.
        shard[name] = tensor.to(dtype, copy=True).contiguous() if tensor.is_floating_point() else tensor.clone()
        if count_nonfinite(shard[name]):
            raise LeanError(f"{name} has values that {str(dtype).removeprefix('torch.')} cannot hold")
        narrower = exact and dtype.itemsize < min(tensor.dtype.itemsize, torch.float32.itemsize)
        if narrower and (count := int((shard[name] != tensor).sum())):
            raise LeanError(
                f"{name} is computed, and {str(dtype).removeprefix('torch.')} would round {count:,} of its "
                f"{tensor.numel():,} values; store all of them with `dtype=fp32`, or round with `dtype=bf16`"
            )
        del tensor  # before the next one is read
        yield sum(one.nbytes for one in shard.values())
    try:
        with replacing(file) as temporary:
            save_file(shard, temporary, metadata={"format": "pt"})
    except SafetensorError as error:
        if "No space left" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.parent)) from None
        raise


def _check_room(out: Path, needed: int) -> None:
    existing = next(parent for parent in out.absolute().parents if parent.exists())
    if needed > (free := shutil.disk_usage(existing).free):
        raise LeanError(f"the disk has {free / 1e6:,.1f} MB free at {existing}, {needed / 1e6:,.1f} MB are needed")
