"""The measurements of `leanqkv bench`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..inference.bench import bench_record
from ..progress import progress_bar
from ..report.bench import KIND
from .publishing import publish


def measure_and_report(
    models: Sequence[str], contexts: Sequence[int], batches: Sequence[int], out: Path, **settings: Any
) -> None:
    """Measure as `bench_record` does, with these settings, and write record and page into `out`."""
    with progress_bar("measuring") as bar:
        record = bench_record(models, contexts, batches, **settings, progress=bar.show)
    publish(KIND, out, record)
