"""The processes of one run, which torchrun or accelerate starts: the first decides, and all do the same."""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import LeanError, needs

Answer = TypeVar("Answer")
# How long the others wait while the first reads the data and times precisions. torchrun ends them if it fails.
PATIENCE = timedelta(days=1)


def process_count() -> int:
    """Return the number of processes of this run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this is the first process of the run, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def in_torchrun() -> bool:
    """Whether a launcher such as torchrun started this process, alone or among others."""
    return "LOCAL_RANK" in os.environ


def check_shard(shard: str | None) -> None:
    """Raise a LeanError about an unknown shard mode."""
    if shard not in (None, "fsdp"):
        raise LeanError(f"`shard` is {shard!r}; give fsdp, or leave it out")


def connect(device: str, shard: str | None = None) -> None:
    """Connect the processes of this run through the backend that it trains with; alone, do nothing.

    Raises:
        LeanError: `device` is of a kind that several processes cannot train on, or a sharded run was not started by
            torchrun; or accelerate is not installed.
    """
    accelerate = needs("train", "accelerate")
    check_shard(shard)
    if shard is not None and not in_torchrun():
        raise LeanError(
            "`shard` splits a model over the processes of torchrun; start it with torchrun "
            "--nproc-per-node N -m leanqkv"
        )
    if (process_count() == 1 and shard is None) or dist.is_initialized():
        return
    if device not in ("cpu", "cuda"):
        raise LeanError(f"several processes train on cpu or cuda, found `device={device}`; start one process")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device == "cuda" and here > (found := torch.cuda.device_count()):
        raise LeanError(
            f"{here} processes on this machine need a GPU each, found {found}; start {found}, or `device=cpu`"
        )
    # Trainer goes on with the process group that it finds.
    accelerate.PartialState(cpu=device == "cpu", timeout=PATIENCE)


def first_decides(decide: Callable[[], Answer]) -> Answer:
    """Return `decide()`, called in the first process alone, in every process.

    An error of the first is raised there and ends the others with exit code 2, so that it is reported once.
    """
    if process_count() == 1:
        return decide()
    answer: list[Any] = [False, None]
    try:
        if is_first():
            answer = [True, decide()]
    finally:  # after an error too: the others must not wait
        dist.broadcast_object_list(answer)
    if not answer[0]:
        sys.exit(2)
    return answer[1]
