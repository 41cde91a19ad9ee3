"""The page on serving shows what its records say."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("record", ["serving", "float32", "smollm2", "long-requests"])
def test_the_tables_are_those_of_the_record(record: str) -> None:
    tables = runpy.run_path(str(ROOT / "plugins/vllm/benchmarks/serving.py"))["tables"]
    page = (ROOT / "docs/serve-with-vllm.md").read_text()
    blocks = tables(json.loads((ROOT / f"results/vllm/{record}.json").read_text())).split("\n\n")
    assert blocks
    for block in blocks:
        assert block in page, block.splitlines()[0]
