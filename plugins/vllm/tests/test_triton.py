"""The kernels for GPUs, under Triton's interpreter: they have not run on a GPU."""

import subprocess
import sys
from pathlib import Path


def test_kernels_against_loops() -> None:
    command = [sys.executable, str(Path(__file__).with_name("interpreted.py"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "RIGHT" in done.stdout, done.stderr[-3000:]
