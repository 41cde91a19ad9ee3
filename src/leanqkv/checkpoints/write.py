"""Writing a checkpoint tensor by tensor: sharded, resumable, whole or absent."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..errors import LeanError
from ..files import partial_name, read_json, write_json
from ..model.config import LeanConfig
from .load import MODELS

SHARD_BYTES = 2**30
# Of the files beside the weights, those that are about the text and not about the tensors.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
JOB = "job.json"
Progress = Callable[[int, int], None]


def check_free(out: Path) -> None:
    """Raises:
    LeanError: `out` exists and is not an empty directory.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise LeanError(f"{out} exists and is not empty; nothing is ever written over, choose another --out")


def write_checkpoint(
    out: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    job: Mapping[str, Any],
    finish: Callable[[Path], None],
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes `tensors` as safetensors shards of at most `shard_bytes` (a larger tensor has one to itself).

    Everything is written beside `out` and renamed when it is complete. Interrupted, the same call goes on after the
    last whole shard; its partial directory is taken over only if `job`, what decides the content, is the same.

    Args:
        shapes: name and shape of every tensor, in the order in which they are read; one shard is in memory at a time.
        dtype: what floating tensors are stored in.
        finish: writes what else belongs to the checkpoint into the directory it is given.
        progress: called with bytes done and bytes in all.

    Raises:
        LeanError: `out` is not empty, or the disk has too little room.
        OSError: the disk is full after all.
    """
    check_free(out)
    partial = out.with_name(f".{out.name}.partial")
    job = {**job, "dtype": str(dtype), "shard_bytes": shard_bytes}
    if partial.exists() and (not (partial / JOB).exists() or read_json(partial / JOB) != _plain(job)):
        shutil.rmtree(partial)
    shards = list(_shards(shapes, dtype, shard_bytes))
    names = [_shard_name(i, len(shards)) for i in range(len(shards))]
    size = {name: sum(_bytes(shapes[t], dtype) for t in shard) for name, shard in zip(names, shards, strict=True)}
    missing = sum(size[name] for name in names if not (partial / name).exists())
    place = next(parent for parent in out.absolute().parents if parent.exists())
    if missing > (free := shutil.disk_usage(place).free):
        raise LeanError(f"the disk has {free / 1e6:,.1f} MB free at {place}, {missing / 1e6:,.1f} MB are needed")
    partial.mkdir(parents=True, exist_ok=True)
    write_json(partial / JOB, _plain(job))
    done, total = 0, sum(size.values())
    try:
        for name, shard in zip(names, shards, strict=True):
            if not (partial / name).exists():
                _write_shard(partial / name, shard, tensors, dtype, _offset_progress(progress, done, total))
            done += size[name]
            _offset_progress(progress, 0, total)(done)
        if len(shards) > 1:
            weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_json(partial / "model.safetensors.index.json", index)
        finish(partial)
    except LeanError:  # starting again would not help
        shutil.rmtree(partial)
        raise
    (partial / JOB).unlink()
    if out.exists():
        out.rmdir()  # empty, as checked
    partial.replace(out)


def save_config(config: LeanConfig, directory: Path) -> None:
    """Writes config.json and the model's code, as `save_pretrained` does, without building the model."""
    from transformers.dynamic_module_utils import custom_object_save

    model = MODELS[config.task].__new__(MODELS[config.task])  # it is only asked for its class and its configuration
    config = type(config).from_dict(config.to_dict())
    config.architectures = [type(model).__name__]
    custom_object_save(model, directory, config=config)  # type: ignore[arg-type]
    config.save_pretrained(directory)


def copy_tokenizer(source: Path, directory: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _write_shard(
    file: Path, names: list[str], tensors: Mapping[str, Tensor], dtype: torch.dtype, progress: Callable[[int], None]
) -> None:
    shard: dict[str, Tensor] = {}
    done = 0
    for name in names:
        tensor = tensors[name]
        # A copy of its own: a view of a mapped file, or of another tensor, cannot be written.
        shard[name] = tensor.to(dtype, copy=True).contiguous() if tensor.is_floating_point() else tensor.clone()
        if not shard[name].isfinite().all():
            raise LeanError(f"{name} has values that {str(dtype).removeprefix('torch.')} cannot hold")
        done += shard[name].nbytes
        progress(done)
    temporary = partial_name(file)
    try:
        save_file(shard, temporary, metadata={"format": "pt"})
        temporary.replace(file)
    except SafetensorError as error:
        if "No space left" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.parent)) from None
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _shards(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, limit: int) -> Iterator[list[str]]:
    shard: list[str] = []
    filled = 0
    for name, shape in shapes.items():
        size = _bytes(shape, dtype)
        if shard and filled + size > limit:
            yield shard
            shard, filled = [], 0
        shard.append(name)
        filled += size
    yield shard


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _shard_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05}-of-{count:05}.safetensors"


def _plain(job: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(job))


def _offset_progress(progress: Progress | None, done: int, total: int) -> Callable[[int], None]:
    """Reports bytes of a part as bytes of the whole, of which `done` came before."""

    def tell(part: int) -> None:
        if progress is not None:
            progress(done + part, total)

    return tell
