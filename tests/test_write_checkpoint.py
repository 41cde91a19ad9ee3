"""Checkpoints written shard by shard: going on after a stop, full disks, values that do not fit."""

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from leanqkv import LeanError
from leanqkv.checkpoints import write
from leanqkv.checkpoints.tensors import LazyTensors

SHAPES = {f"tensor{i}": (8, 8) for i in range(6)}
BYTES = 8 * 8 * 4


def written(out: Path, compute, **options) -> None:
    options = {"job": {"of": "test"}, "finish": lambda directory: None, "shard_bytes": 2 * BYTES} | options
    write.write_checkpoint(out, SHAPES, LazyTensors(SHAPES, compute), torch.float32, **options)


def value(name: str) -> torch.Tensor:
    return torch.full((8, 8), float(name[-1]))


def interrupted_at(last: str, calls: list[str]):
    def compute(name: str) -> torch.Tensor:
        calls.append(name)
        if name == last:
            raise KeyboardInterrupt
        return value(name)

    return compute


def test_an_interrupted_write_goes_on_after_the_last_whole_shard(tmp_path):
    out, calls = tmp_path / "out", []
    with pytest.raises(KeyboardInterrupt):
        written(out, interrupted_at("tensor3", calls))
    assert not out.exists()
    calls.clear()
    written(out, interrupted_at("none", calls))
    assert calls == ["tensor2", "tensor3", "tensor4", "tensor5"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"]) == list(SHAPES)
    for name, shard in index["weight_map"].items():
        assert torch.equal(load_file(out / shard)[name], value(name))


def test_progress_counts_the_bytes_of_all_shards(tmp_path):
    calls = []
    written(tmp_path / "out", value, progress=lambda done, total: calls.append((done, total)))
    assert {total for _, total in calls} == {6 * BYTES}
    assert list(dict.fromkeys(done for done, _ in calls)) == [number * BYTES for number in range(1, 7)]


def test_what_was_begun_for_something_else_is_not_gone_on_with(tmp_path):
    out, calls = tmp_path / "out", []
    with pytest.raises(KeyboardInterrupt):
        written(out, interrupted_at("tensor3", calls))
    calls.clear()
    written(out, interrupted_at("none", calls), job={"of": "another test"})
    assert calls == list(SHAPES)


def test_a_full_disk_is_told_before_and_survived_while_writing(tmp_path, monkeypatch):
    out, calls = tmp_path / "out", []
    with monkeypatch.context() as patch:
        patch.setattr(write.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 1000))
        with pytest.raises(LeanError, match="the disk has"):
            written(out, value)
    assert not list(tmp_path.iterdir())

    def full(*arguments, **options):
        raise write.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(KeyboardInterrupt):
        written(out, interrupted_at("tensor3", calls))
    with monkeypatch.context() as patch:
        patch.setattr(write, "save_file", full)
        with pytest.raises(OSError) as error:
            written(out, value)
        assert error.value.errno == errno.ENOSPC
    assert not out.exists()
    calls.clear()
    written(out, interrupted_at("none", calls))
    assert calls == ["tensor2", "tensor3", "tensor4", "tensor5"]


def test_values_that_do_not_fit_the_dtype_are_refused(tmp_path):
    with pytest.raises(LeanError, match="tensor0 has values that float32 cannot hold"):
        written(tmp_path / "out", lambda name: torch.full((8, 8), 1e300, dtype=torch.float64))
    assert not list(tmp_path.iterdir())


PEAK = """
from pathlib import Path
import torch
from leanqkv.checkpoints import write
from leanqkv.checkpoints.tensors import LazyTensors
size = 2**28
def peak():  # of this process alone
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
bytearray(b"1") * size  # above what the imports took
start, shapes = peak(), {"large": (size // 2**11, 2**10)}
tensors = LazyTensors(shapes, lambda name: torch.zeros(shapes[name], dtype=torch.bfloat16))
write.write_checkpoint(Path("out"), shapes, tensors, torch.bfloat16, job={}, finish=lambda directory: None)
print((peak() - start) / size)
"""

KEPT = """
from pathlib import Path
import torch
from leanqkv.checkpoints import write
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) * 1024
torch.ones(2**22)  # freed, it raises the size from which glibc maps a block by itself
blocks, pins = [], []
for _ in range(32):  # as sums and factorizations do: freed, each lies below one that is still in use
    blocks.append(torch.ones(2**21))
    pins.append(torch.ones(2**18))
del blocks
before, tensors = resident(), {"small": torch.ones(1)}
write.write_checkpoint(
    Path("out"), {"small": (1,)}, tensors, torch.float32, job={}, finish=lambda directory: print(before - resident())
)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a child's memory alone is read from Linux's /proc")
def test_a_tensor_is_in_memory_as_read_and_twice_as_written(tmp_path):
    """The file's library takes a copy; nothing else may be as large, such as marks of what is not finite."""
    done = subprocess.run([sys.executable, "-c", PEAK], cwd=tmp_path, stdout=subprocess.PIPE, check=True)
    assert float(done.stdout) < 2.4


@pytest.mark.skipif(sys.platform != "linux", reason="a child's memory is read from Linux's /proc")
def test_what_computed_the_tensors_keeps_no_memory_while_they_are_written(tmp_path):
    done = subprocess.run([sys.executable, "-c", KEPT], cwd=tmp_path, stdout=subprocess.PIPE, check=True)
    assert float(done.stdout) > 0.9 * 32 * 2**23
