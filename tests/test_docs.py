"""The documentation says what the code and the records say."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch

from leanqkv import kv_bytes_per_token, preset
from leanqkv.compare.records import load_comparison
from leanqkv.compare.suites import SUITES
from leanqkv.model import fused, registry
from leanqkv.presets import MECHANISMS, recipe
from leanqkv.report import analysis
from leanqkv.report import bench as inference
from leanqkv.report.comparison import markdown

ROOT = Path(__file__).parent.parent
PAPERS = (ROOT / "docs" / "papers.md").read_text()
COMPARISONS = sorted(file.parent for file in (ROOT / "results").glob("*/compare.json"))


@pytest.mark.parametrize("directory", COMPARISONS, ids=lambda directory: directory.name)
def test_committed_tables_are_those_of_the_committed_records(directory):
    table = markdown(load_comparison(directory))
    assert (directory / "table.md").read_text() == table
    shown = (ROOT / "README.md").read_text() + (ROOT / "docs" / "results.md").read_text()
    assert table.split("\n\n")[0] in shown, "the table in the documentation is another one"


def test_the_benchmarks_tables_are_those_of_their_records():
    shown = (ROOT / "docs" / "results.md").read_text()
    for row in json.loads((ROOT / "results" / "kv-bytes.json").read_text())["rows"]:
        sizes = f"{row['formula']:,} | {row['measured']:,.0f} | {row['published']:,}"
        assert f"`{row['name']}` | {row['dtype']} | {sizes} |" in shown
        config = preset(row["name"])
        assert kv_bytes_per_token(config, getattr(torch, row["dtype"])) == row["formula"]
    record = json.loads((ROOT / "results" / "fused-projection.json").read_text())
    assert record["min_tokens"] == fused.MIN_TOKENS
    for row in record["rows"]:
        ratio = row["ratio"]
        times = f"{row['tokens']:,} | {row['fused_ms']:.1f} | {row['unfused_ms']:.1f}"
        spread = f"{ratio['median']:.2f} ({ratio['min']:.2f}–{ratio['max']:.2f})"
        assert f"| `{row['model']}` | {row['what']} | {times} | {spread} |" in shown


def test_the_tables_of_exact_eliminations_are_those_of_the_record():
    """Made by the code of the benchmark that made the record."""
    shown = (ROOT / "docs" / "exact.md").read_text()
    tables = runpy.run_path(str(ROOT / "benchmarks" / "exact.py"))["tables"]
    for name, table in tables(json.loads((ROOT / "results" / "exact" / "gpt2-small.json").read_text())).items():
        assert table in shown, name


def test_the_tables_of_the_other_benchmarks_are_those_of_their_records():
    for name, function, record, document in (
        ("conversion", "tables", "conversion/stdlib.json", "conversion.md"),
        ("conversion", "tables", "conversion/torch-headers.json", "conversion.md"),
        ("calibration_time", "table", "conversion/gpt2-small-time.json", "conversion.md"),
        ("decode", "table", "decode/transformers.json", "results.md"),
        ("decode_parts", "tables", "decode/parts.json", "results.md"),
        ("decode_variants", "tables", "decode/variants.json", "results.md"),
        ("eliminate_large", "tables", "exact/mistral-7b-shape.json", "exact.md"),
    ):
        make = runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"))[function]
        made = make(json.loads((ROOT / "results" / record).read_text()))
        assert made in (ROOT / "docs" / document).read_text(), document


def test_the_analysis_says_what_its_record_says():
    """Its tables are the records', and every decimal number of its text is one of these tables'."""
    made = ""
    for name in ("", "probes", "training"):
        directory = ROOT / "results" / "analysis" / name
        its = analysis.markdown(json.loads((directory / "analysis.json").read_text()))
        assert (directory / "table.md").read_text() == its
        made += its
    blocks = (ROOT / "docs" / "analysis.md").read_text().split("\n\n")
    shown = [block for block in blocks if block.startswith("|")]
    assert len(shown) >= 8
    for block in shown:
        assert block.strip() in made, block
    text = "\n\n".join(block for block in blocks if not block.startswith(("|", "    ")))
    published = {"1.8"}
    for number in set(re.findall(r"(?<![\w.§])[−+]?\d+\.\d{1,4}(?![\w.])", text)) - published:
        assert re.search(rf"(?<![\d−]){re.escape(number)}(?!\d)", made), f"{number} is not in the record's tables"


def test_the_benchmark_of_inference_is_that_of_its_record():
    directory = ROOT / "results" / "bench" / "gpt2-124m"
    made = inference.markdown(json.loads((directory / "bench.json").read_text()))
    assert (directory / "table.md").read_text() == made
    shown = (ROOT / "docs" / "results.md").read_text()
    said = shown[shown.index("### KV cache, memory") : shown.index("### What a mechanism does")]
    for number in re.findall(r"[\d.]+(?= MB)", said):
        assert f"| {number} |" in made, number


def test_there_are_committed_results():
    assert {directory.name for directory in COMPARISONS} >= {"quickstart"}


def test_the_quickstarts_rates_are_those_the_sweep_found():
    found = json.loads((ROOT / "results" / "quickstart" / "compare.json").read_text())["chosen_learning_rate"]
    assert found == {name: recipe(name).learning_rate for name in SUITES["quickstart"].architectures}


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_preset_has_a_row(name):
    assert f"`{name}" in PAPERS, f"docs/papers.md has no row for {name}"


def test_every_mechanism_file_has_a_row_and_says_where_it_is_from():
    tables = (registry.QUERIES, registry.KEYS, registry.VALUES, registry.KEY_VALUES)
    for module in {cls.__module__ for table in tables for cls in table.values()}:
        file = ROOT / "src" / Path(*module.split(".")).with_suffix(".py")
        head = file.read_text().split('"""')[1]
        assert "http" in head, f"{file.name} does not open with its source"
        if module.rpartition(".")[2] != "projection_linear":
            assert f"model/{file.name}" in PAPERS, f"docs/papers.md has no row for {file.name}"


def test_links_between_documents_lead_somewhere():
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
