"""The kernels for GPUs, interpreted on a CPU, or compiled and not run: they have not run on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def start(script: str, *given: str, **environment: str) -> None:
    command = [sys.executable, str(HERE / script), *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert done.returncode == 0 and "RIGHT" in done.stdout, done.stderr[-3000:]


def test_kernels_against_loops() -> None:
    start("interpreted.py")


@pytest.mark.parametrize("cases", [(0, 48), pytest.param((48, 240), marks=pytest.mark.slow)])
def test_attention_over_pages_against_loops(cases: tuple[int, int]) -> None:
    start("interpreted_codes.py", *map(str, cases))


@pytest.mark.parametrize("name", ["gqa+skipv1", pytest.param("mla", marks=pytest.mark.slow)])
def test_the_engine_with_it(name: str, tmp_path: Path) -> None:
    """The plugin as on a GPU, but that tensors are on a CPU and the kernel is interpreted."""
    start("interpreted_engine.py", name, str(tmp_path), TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda 80", "cuda 90", "hip gfx942"])
def test_it_compiles(target: str, tmp_path: Path) -> None:
    start("compiled_codes.py", *target.split(), TRITON_CACHE_DIR=str(tmp_path))
