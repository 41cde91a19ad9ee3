"""`leanqkv demo`."""

from pathlib import Path

from ..environment import check_device, default_device
from ..job import check_out
from .options import Device


def demo(out: Path, steps: int = 400, device: Device = None) -> None:
    """Run every tool on one small model and write one page: one to two minutes on two CPU cores.

    Trains a baseline and a SkipV1 model on the same batches, converts the trained baseline to a smaller KV cache,
    removes weights from it exactly, scores all of them on held-out text, and decodes with each.

    leanqkv demo --out runs/demo

    Options:
        out: Directory of the demo. Rerun to resume.
        steps: Optimizer steps of both models.
    """
    check_out(out, "demo")
    from .showing import run_demo

    run_demo(out, steps, check_device(device or default_device()))
