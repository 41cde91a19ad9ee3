"""A training step of two processes against one process that accumulates, for any model."""

import atexit
import faulthandler
import functools
import multiprocessing
import os
import tempfile
import warnings
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor
from transformers import TrainingArguments

import experiments.vision  # noqa: F401, models of images are trained here too
from leanqkv import LeanConfig
from leanqkv.compat import shard_on_cpus
from leanqkv.train.sharding import sharding_arguments
from leanqkv.train.tasks import task_of
from leanqkv.train.trainer import checkpoint_activations

SEQUENCES, LENGTH, SECONDS = 4, 24, 120


def two_process_step(config: LeanConfig, gradient_checkpointing: bool = False, shard: bool = False) -> float:
    """Return the largest difference between the gradients of two processes, half of a batch each, and those of one
    process that takes the halves one after the other, relative to the largest gradient. In float64, without dropout.
    With `shard` each process has a half of every tensor, as `leanqkv train --shard fsdp` splits them.

    The processes are started by the first call and serve all that follow. An error in them is raised here. Where a
    signal ends one, as the system does that is out of memory, both are started once more.
    """
    expected = gradients(config, gradient_checkpointing, range(2))
    try:
        found = _answers((config, gradient_checkpointing, shard))
    except _Died as died:
        warnings.warn(f"the processes ended with {died}; they are started again", stacklevel=2)
        found = _answers((config, gradient_checkpointing, shard))
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for answer in found:
        if isinstance(answer, Exception):
            raise answer
        assert answer.keys() == expected.keys()
    return max((a[name] - expected[name]).abs().max().item() for a in found for name in expected) / largest


def gradients(
    config: LeanConfig, gradient_checkpointing: bool, halves: range, shard: bool = False
) -> dict[str, Tensor]:
    """Return the gradients by name, after the mean loss of these halves of a batch."""
    torch.manual_seed(0)
    model = task_of(config).model_class(config).double().train()
    if gradient_checkpointing:
        checkpoint_activations(model)
    batch = task_of(config).random_batch(config, SEQUENCES, min(LENGTH, config.max_position_embeddings), "cpu")
    batch = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}
    # As the trainer sets it: a parameter without a gradient would be an error of a later step.
    called: torch.nn.Module = model
    if shard:
        called = model = sharded(model)
    elif dist.is_initialized():
        called = torch.nn.parallel.DistributedDataParallel(model)
    for half in halves:
        part = slice(half * SEQUENCES // 2, (half + 1) * SEQUENCES // 2)
        (called(**{k: v[part] if isinstance(v, Tensor) else v for k, v in batch.items()}).loss / len(halves)).backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing, f"without a gradient: {missing}"
    if shard:
        assert all(p.to_local().numel() <= max(p.numel() // 2 + p[0].numel(), 1) for p in model.parameters())
        return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    """The model as the trainer shards it."""
    plugin = TrainingArguments(use_cpu=True, report_to="none", **sharding_arguments()).fsdp_plugin_args
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**plugin))
    assert shard_on_cpus(accelerator, plugin)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters()))[0]


class _Died(Exception):
    """A process of the two has ended; the exit codes of both say how."""


def _answers(asked: tuple[LeanConfig, bool, bool]) -> list[Any]:
    """Return what each process answers."""
    processes, connections = _workers()
    try:
        for connection in connections:
            connection.send(asked)
        for connection in connections:
            assert connection.poll(SECONDS), "a process of two does not answer"
        return [connection.recv() for connection in connections]
    except (EOFError, OSError) as error:
        for process in processes:
            process.join(1)
        codes = [process.exitcode for process in processes]
        for process in processes:  # the other one waits for it in vain
            process.kill()
        _workers.cache_clear()
        raise _Died(f"exit codes {codes}") from error


@functools.cache
def _workers() -> tuple[list[BaseProcess], list[Connection]]:
    context = multiprocessing.get_context("spawn")
    folder = tempfile.mkdtemp(prefix="leanqkv-two-processes-")
    processes, connections = [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(rank, folder, theirs), daemon=True)
        process.start()
        theirs.close()  # so that the end of the process is the end of what it sends
        atexit.register(process.terminate)
        processes.append(process)
        connections.append(ours)
    return processes, connections


def _serve(rank: int, folder: str, connection: Connection) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{Path(folder, 'store')}", rank=rank, world_size=2)
    while True:
        config, gradient_checkpointing, shard = connection.recv()
        try:
            connection.send(gradients(config, gradient_checkpointing, range(rank, rank + 1), shard))
        except Exception as error:
            connection.send(error)
