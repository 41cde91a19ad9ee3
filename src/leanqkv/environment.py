"""Where a record was made: hardware, versions, the commit of the code."""

import ctypes
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from .errors import LeanError
from .files import RECORD_FORMAT

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def default_device() -> str:
    """Return the accelerator that torch finds, else "cpu"."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def check_device(device: str | None) -> str:
    """Return `device` if this machine has it; of None the default one.

    Raises:
        LeanError: not a kind of device, or not on this machine.
    """
    device = device or default_device()
    available = {"cpu", default_device()}
    if device not in available:
        raise LeanError(f"there is no device {device!r} here; `device` can be {' or '.join(sorted(available))}")
    return device


def free_memory(device: str) -> int:
    """Return the bytes that this process can still take on `device`; processes on one CPU share its memory evenly."""
    import torch

    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    if device == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    available = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # outside of Linux, or without a limit
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        available = min(available, limit - used)
    return available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def available_cores() -> int:
    """Return the number of cores that this process may use; under taskset fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_freed_memory(device: str) -> None:
    """Let a process that computes on the CPU keep the memory that it frees, instead of returning it to the system.

    Each step frees its large tensors and asks for the same sizes again; glibc would return their pages and get others,
    which the system fills with zeros first. With another C library nothing changes.
    """
    if device != "cpu":
        return
    with suppress(OSError, AttributeError, TypeError):
        libc = ctypes.CDLL(None)
        # Before 2.35 glibc takes 32 MB at most. To set one threshold alone would fix the other one at its start.
        if libc.mallopt(MMAP_THRESHOLD, 2**30) or libc.mallopt(MMAP_THRESHOLD, 2**25):
            libc.mallopt(TRIM_THRESHOLD, -1)


@contextmanager
def denormals_as_zero(device: str) -> Iterator[None]:
    """Let this thread take float32 below 1.2e-38 for zero while the body computes on a CPU.

    A softmax over scores that lie far apart is full of such numbers, and many CPUs are slow with them. On a processor
    that cannot do without them nothing changes.
    """
    import torch

    if device != "cpu" or torch.tensor(1e-40) * 1 == 0:  # another caller's choice, which stays
        yield
        return
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def give_back_freed_memory() -> None:
    """Return freed memory to the system from now on, so that this process's resident size follows its use.

    glibc raises the size from which a block is mapped by itself up to 32 MiB, and keeps smaller freed blocks, which add
    up over the tensors of a large model. With another C library nothing changes.
    """
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 2**20)


def return_freed_memory() -> None:
    """Return to the system what glibc keeps of freed memory: after a step that took much, or `keep_freed_memory`."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def hardware(device: str) -> dict[str, Any]:
    """Return a record's entry on the machine."""
    import torch

    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "cpu": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
    }


def place_of(hardware: Mapping[str, Any]) -> str:
    """Return where a record was made in words, of its entry on the machine."""
    if hardware["device"] != "cpu":
        return hardware["device"]
    # A name such as "AMD EPYC" stands for several processors.
    threads = hardware["threads"]
    return f"{hardware['cpu']} ({hardware['instructions']}) with {threads} thread{'' if threads == 1 else 's'}"


def same_place(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two records were made where sums round alike, of their entries on the machine."""
    if one["device"] != "cpu" or other["device"] != "cpu":
        return one["device"] == other["device"]
    return all(one[name] == other[name] for name in ("cpu", "instructions", "threads"))


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of those `packages` that are installed, by default a training run's."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in packages or ("leanqkv", "torch", "transformers", "accelerate", "tokenizers", "numpy"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def record_header(kind: str, name: str, device: str = "cpu") -> dict[str, Any]:
    """Return the fields that every record opens with: what it holds and how, when and where it was made.

    Args:
        kind: what made the record, such as "benchmark" or "theory".
        name: which one of that kind.
        device: "cpu", "cuda" or "mps".
    """
    made = made_on(device)
    return {
        "record": RECORD_FORMAT,
        "kind": kind,
        "name": name,
        "command": command_line(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": made.pop("git_commit"),
        **made,
    }


def made_on(device: str, **more: Any) -> dict[str, Any]:
    """Return a record's entries on where it was made: machine, with `more` on it, versions, and commit of the code."""
    return {"hardware": {**hardware(device), **more}, "versions": versions(), "git_commit": git_commit()}


def command_line() -> str:
    """Return this process's command, as a record names it."""
    return without_places(sys.orig_argv[1:] if Path(sys.argv[0]).name == "leanqkv" else sys.orig_argv)


def without_places(words: Iterable[str]) -> str:
    """Return a command with absolute paths cut to their last part: a record must not name a machine."""
    return shlex.join(re.sub(r"(^|=)/.*?([^/]+)/?$", r"\1\2", word) for word in words)


def git_commit() -> str | None:
    """Return the commit of this code, with "+changes" if files differ from it; None for an installed package."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with suppress(OSError, subprocess.CalledProcessError):
        git("ls-files", "--error-unmatch", __file__)  # fails if the repository around this file is another project's
        commit = git("rev-parse", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    return None


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
