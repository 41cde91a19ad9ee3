"""The documentation says what the code and the records say."""

import json
import re
import runpy
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import make_figures
import numpy as np
import pytest
import torch
from drawing.elimination import redundant_shares
from markdown_it import MarkdownIt
from markdown_it.token import Token
from typer.main import get_command

import experiments.vision  # noqa: F401, models of images are trained here too
from experiments.analysis import page as analysis
from experiments.analysis.command import analysis as analyze
from experiments.demo.command import demo
from leanqkv import LeanConfig, LeanForCausalLM, kv_bytes_per_token, preset
from leanqkv.cli import alone, app
from leanqkv.compare.records import load_comparison
from leanqkv.compare.statistics import paired_difference
from leanqkv.compare.suites import SUITES
from leanqkv.model import mechanisms
from leanqkv.presets.catalog import MECHANISMS
from leanqkv.presets.recipes import recipe
from leanqkv.report import bench as inference
from leanqkv.report import frontier
from leanqkv.report.comparison import markdown
from leanqkv.report.frontier import read_points

pytestmark = pytest.mark.cheap_cases  # together a minute; every number of every page counts

ROOT = Path(__file__).parent.parent
DOCS, RESULTS = ROOT / "docs", ROOT / "results"
PAGES = sorted((*ROOT.glob("*.md"), *DOCS.glob("*.md")))
PAPERS = (DOCS / "papers.md").read_text()
COMPARISONS = sorted(file.parent for file in RESULTS.glob("*/compare.json"))
# Benchmark, its record, the page that has its tables.
BENCHMARKS = (
    ("norm_removal", "exact/norm-removal.json", "reference-exact.md"),
    ("conversion", "conversion/stdlib.json", "reference-conversion.md"),
    ("conversion", "conversion/torch-headers.json", "reference-conversion.md"),
    ("real", "real/smollm2.json", "reference-conversion.md"),
    ("distill", "real/distillation.json", "reference-conversion.md"),
    ("distill", "real/distillation-latents-75.json", "reference-conversion.md"),
    ("distill", "real/distillation-latents-50.json", "reference-conversion.md"),
    ("distill", "real/distillation-separate-latents-84.json", "reference-conversion.md"),
    ("distill", "real/distillation-skipv1.json", "reference-conversion.md"),
    ("convert_large", "real/llama-7b-shape.json", "reference-conversion.md"),
    ("convert_large", "real/llama-2-7b-shape-latents.json", "reference-conversion.md"),
    ("convert_large", "real/llama-3-8b-shape.json", "reference-conversion.md"),
    ("convert_large", "real/qwen3-8b-shape.json", "reference-conversion.md"),
    ("key_value_sources", "real/key-value-sources.json", "reference-conversion.md"),
    ("partial_rope", "real/partial-rope.json", "reference-conversion.md"),
    ("peers", "real/peers.json", "reference-conversion.md"),
    ("latent_choice", "real/latent-choice.json", "reference-conversion.md"),
    ("tasks", "real/tasks.json", "reference-conversion.md"),
    ("tasks", "real/needle.json", "reference-conversion.md"),
    ("tasks", "real/needle-4096.json", "reference-conversion.md"),
    ("tasks", "real/recall.json", "reference-conversion.md"),
    ("calibration_time", "conversion/gpt2-small-time.json", "reference-conversion.md"),
    ("decode", "decode/transformers.json", "reference-inference.md"),
    ("decode_caches", "decode/caches-bf16.json", "reference-inference.md"),
    ("decode_caches", "decode/caches-fp32.json", "reference-inference.md"),
    ("decode_caches", "decode/caches-fp32-avx2.json", "reference-inference.md"),
    ("decode_caches", "decode/caches-fp32-llama-130m-avx2.json", "reference-inference.md"),
    ("decode_llama_cpp", "real/decode.json", "reference-inference.md"),
    ("decode_parts", "decode/parts.json", "reference-inference.md"),
    ("decode_variants", "decode/variants.json", "reference-inference.md"),
    ("eliminate_large", "exact/mistral-7b-shape.json", "reference-exact.md"),
    ("exact", "exact/gpt2-small.json", "reference-exact.md"),
    ("fused_projection", "fused-projection.json", "reference-inference.md"),
    ("kv_bytes", "kv-bytes.json", "reference-inference.md"),
    ("copying", "tiny-deep-decay/copying.json", "results-trained-to-the-end.md"),
    ("copying", "eighth-length/copying.json", "results-trained-to-the-end.md"),
    ("copying", "quarter-length/copying.json", "results-trained-to-the-end.md"),
    ("copying", "half-length/copying.json", "results-trained-to-the-end.md"),
    ("copying", "tiny-4e-3/copying.json", "results-trained-to-the-end.md"),
    ("copying", "half-tiny-4e-3/copying.json", "results-trained-to-the-end.md"),
    ("scratch_or_converted", "tiny-4e-3/scratch-or-converted.json", "results-trained-to-the-end.md"),
    ("by_scale", "by-size.json", "results-trained-to-the-end.md"),
    ("by_scale", "by-length.json", "results-trained-to-the-end.md"),
    ("by_scale", "by-length-one-decay.json", "results-trained-to-the-end.md"),
    ("two_recipes", "two-recipes.json", "results-trained-to-the-end.md"),
    ("time_to_loss", "skipv1-six-seeds/time-to-loss.json", "results-trained-to-the-end.md"),
    ("claims", "claims.json", "results.md"),
    ("sharding", "sharding.json", "laptop-to-cluster.md"),
    ("sweep", "sweep.json", "laptop-to-cluster.md"),
    ("tokenizing", "tokenizing.json", "laptop-to-cluster.md"),
    ("quantized_cache", "quantized-cache.json", "tools.md"),
    ("tools", "tools.json", "tools.md"),
)


@cache
def benchmark_tables(name: str, record: str) -> tuple[str, ...]:
    """Each block of what the benchmark makes of its record."""
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"))
    made = benchmark.get("tables", benchmark.get("table"))(json.loads((RESULTS / record).read_text()))
    return tuple("\n\n".join(made.values() if isinstance(made, dict) else [made]).split("\n\n"))


def test_the_page_on_shares_of_value_heads_says_what_the_runs_say():
    """Differences between shares, which the comparison's table, of differences to the baseline, does not have."""
    results = {result.name: result.losses for result in load_comparison(RESULTS / "skip-ratio-gpt2").results}
    half = results["tiny+skipv1"]
    quarter, most, all_of_them = (
        paired_difference(results[f"tiny+skipv1:ratio={ratio}"], half) for ratio in ("0.25", "0.75", "1.0")
    )
    for above in (quarter, all_of_them):
        assert above.clear and min(above.by_seed.values()) > 0
    assert not most.clear and max(most.by_seed.values()) < 0


def test_the_page_on_shares_in_a_second_shape_says_what_the_runs_say():
    """Signs by seed, and differences between shares."""
    baseline, quarter, half, most, all_of_them = (
        result.losses for result in load_comparison(RESULTS / "skip-ratio").results
    )
    for losses in (quarter, half, most, all_of_them):
        assert max(paired_difference(losses, baseline).by_seed.values()) < 0
    above = paired_difference(quarter, half)
    assert above.clear and min(above.by_seed.values()) > 0
    for losses, below in ((most, 2), (all_of_them, 1)):
        other = paired_difference(losses, half)
        assert not other.clear and sum(value < 0 for value in other.by_seed.values()) == below


def test_the_page_on_which_layer_s_values_says_what_the_runs_say():
    """Differences between the models, which the comparison's table does not have."""
    baseline, *others = load_comparison(RESULTS / "skip-layer").results
    none, first, second, third, fourth = (result.losses for result in others)
    for losses in (none, second, third, fourth):
        above = paired_difference(losses, first)
        assert above.clear and min(above.by_seed.values()) > 0
    for losses in (baseline.losses, first, second, third, fourth):
        assert min(paired_difference(none, losses).by_seed.values()) > 0


def test_the_page_on_grouped_queries_and_a_latent_says_what_the_runs_say():
    """Signs by seed, which the comparison's table does not have."""
    grouped, grouped_skipv1, latent, latent_skipv1 = load_comparison(RESULTS / "gqa-mla").results
    for baseline, skipv1 in ((grouped, grouped_skipv1), (latent, latent_skipv1)):
        difference = paired_difference(skipv1.losses, baseline.losses)
        assert difference.clear and max(difference.by_seed.values()) < 0 and len(difference.by_seed) == 3


def test_the_page_on_four_query_heads_to_a_value_head_says_what_the_runs_say():
    """Signs by seed, which the comparison's table does not have."""
    large, large_skipv1, small, small_skipv1 = load_comparison(RESULTS / "tinyllama").results
    for baseline, skipv1 in ((large, large_skipv1), (small, small_skipv1)):
        by_seed = paired_difference(skipv1.losses, baseline.losses).by_seed
        assert max(by_seed.values()) < 0 and len(by_seed) == 3


def has_rows(page: str, table: str) -> bool:
    """Whether a page has a table with this header that has these rows among those of other records."""
    *header, rows = table.split("\n", 2)
    shown = page.partition("\n".join(header))[2] if header else ""
    return set(rows.splitlines()) <= set(shown.split("\n\n")[0].splitlines())


@pytest.mark.parametrize("directory", COMPARISONS, ids=lambda directory: directory.name)
def test_committed_tables_are_those_of_the_committed_records(directory):
    table = markdown(load_comparison(directory))
    assert (directory / "table.md").read_text() == table
    pages = "".join(page.read_text() for page in DOCS.glob("results-*.md"))
    assert table.split("\n\n")[0] in pages, "the table in the documentation is another one"


def test_the_readme_leads_with_three_seeds_or_more():
    comparison = load_comparison(RESULTS / "one-decay")
    assert len(comparison.seeds) >= 3
    assert markdown(comparison).split("\n\n")[0] in (ROOT / "README.md").read_text()


def joined_rows() -> list[str]:
    rows = []
    for row in json.loads((RESULTS / "fused-projection.json").read_text())["rows"]:
        ratio = row["ratio"]
        times = f"{row['tokens']:,} | {row['fused_ms']:.1f} | {row['unfused_ms']:.1f}"
        spread = f"{ratio['median']:.2f} ({ratio['min']:.2f}–{ratio['max']:.2f})"
        rows.append(f"| `{row['model']}` | {row['what']} | {times} | {spread} |")
    return rows


def test_the_benchmarks_tables_are_those_of_their_records():
    shown = (DOCS / "reference-inference.md").read_text()
    for row in json.loads((RESULTS / "kv-bytes.json").read_text())["rows"]:
        sizes = f"{row['formula']:,} | {row['measured']:,.0f} | {row['published']:,}"
        assert f"`{row['name']}` | {row['dtype']} | {sizes} |" in shown
        config = preset(row["name"])
        assert kv_bytes_per_token(config, getattr(torch, row["dtype"])) == row["formula"]
    for row in joined_rows():
        assert row in shown
    record = json.loads((RESULTS / "fused-projection.json").read_text())
    assert f"From {record['min_tokens']} tokens on" in shown
    ratio = json.loads((RESULTS / "step-time.json").read_text())["ratio"]
    assert f"{ratio['median']:.2f} times" in shown and f"from {ratio['min']:.2f} to {ratio['max']:.2f}" in shown


@pytest.mark.parametrize(("name", "record", "page"), BENCHMARKS)
def test_the_tables_of_the_other_benchmarks_are_those_of_their_records(name, record, page):
    shown = (DOCS / page).read_text()
    for block in benchmark_tables(name, record):
        assert block in shown or has_rows(shown, block), block.splitlines()[0]


def test_the_page_about_tools_is_what_its_record_makes():
    fill = runpy.run_path(str(ROOT / "benchmarks" / "tools.py"))["fill"]
    page = (DOCS / "tools.md").read_text()
    record = json.loads((RESULTS / "tools.json").read_text())
    assert fill(page, record) == page, "run python benchmarks/tools.py --page results/tools.json"


def test_the_frontiers_table_is_that_of_its_record():
    for directory in (RESULTS / "frontier").iterdir():
        record = json.loads((directory / "frontier.json").read_text())
        assert (directory / "table.md").read_text() == frontier.markdown(record)


@cache
def analysis_tables() -> str:
    directories = (RESULTS / "analysis" / name for name in ("", "probes", "training"))
    return "".join((directory / "table.md").read_text() for directory in directories)


def test_the_analysis_says_what_its_record_says():
    """Its tables are the records', and every decimal number of its text is one of these tables'."""
    for name in ("", "probes", "training"):
        directory = RESULTS / "analysis" / name
        its = analysis.markdown(json.loads((directory / "analysis.json").read_text()))
        assert (directory / "table.md").read_text() == its
    blocks = (DOCS / "reference-analysis.md").read_text().split("\n\n")
    shown = [block for block in blocks if block.startswith("|") and not block.startswith("| statement |")]
    assert len(shown) >= 12
    for block in shown:
        assert block.strip() in analysis_tables(), block
    text = "\n\n".join(block for block in blocks if block not in shown and not block.startswith("    "))
    published = {"1.8"}
    for number in set(re.findall(r"(?<![\w.§])[−+]?\d+\.\d{1,4}(?![\w.])", text)) - published:
        assert re.search(rf"(?<![\d−]){re.escape(number)}(?!\d)", analysis_tables()), f"{number} is in no table"


def test_the_benchmark_of_inference_is_that_of_its_record():
    directory = RESULTS / "bench" / "gpt2-124m"
    made = inference.markdown(json.loads((directory / "bench.json").read_text()))
    assert (directory / "table.md").read_text() == made
    for page in ("reference-inference.md", "generate-and-serve.md"):
        numbers = re.findall(r"[\d.]+(?= MB)", (DOCS / page).read_text())
        shown = [number for number in numbers if "." in number]
        assert len(shown) >= 2
        for number in shown:
            assert f"| {number} |" in made, number


# Numbers in sentences, and in tables that a person has written

CONVERSION, INFERENCE, EXACT = (
    tuple(row[:2] for row in BENCHMARKS if row[2] == page)
    for page in ("reference-conversion.md", "reference-inference.md", "reference-exact.md")
)


class Sources(NamedTuple):
    """A page's decimals come from benchmarks and folders of `results/`, but for the exceptions."""

    benchmarks: tuple[tuple[str, ...], ...] = ()
    folders: tuple[str, ...] = ()
    exceptions: tuple[str, ...] = ()


NUMBERS = {
    "README.md": Sources(
        (
            *CONVERSION,
            ("two_recipes", "two-recipes.json"),
            ("by_scale", "by-length.json"),
            ("decode_caches", "decode/caches-bf16.json"),
        ),
        (
            "one-decay",
            "skipv1-six-seeds",
            "muon",
            "tiny-deep-decay",
            "tiny-prose",
            "kv-sharing",
            "small-h100",
            "stability",
            "frontier",
        ),
        ("0.0345",),
    ),  # the sign is in words; the shares have a test of their own
    "shrink-a-checkpoint.md": Sources((*CONVERSION, ("decode_caches", "decode/caches-fp32-avx2.json")), ("frontier",)),
    "remove-weights.md": Sources(EXACT, (), ("0.06", "0.25", "0.95", "3.5")),  # the shares; 3.54 GB
    "train-and-compare.md": Sources((), ("kv-sharing",), ("12.7", "4.3")),  # Student's t at 1 and 2 degrees of freedom
    "generate-and-serve.md": Sources(INFERENCE, ("bench",), ("2.11", "5.17")),  # of transformers
    "look-inside.md": Sources((), ("analysis",)),
    "reference-conversion.md": Sources(
        CONVERSION,
        # Of all frontiers, numbers with two digits are found by chance.
        ("frontier/smollm2-4096", "frontier/gemma3-270m", "frontier/gemma3-270m-4096"),
        # Tested below; a table's number with fewer digits or with its sign in words.
        exceptions=("0.0047", "3.1067", "36.7", "0.17", "0.18", "0.37", "0.63", "1.33"),
    ),
    "reference-exact.md": Sources(EXACT, (), ("1.9", "13.6", "3.5")),  # tested below; 3.54 GB
    # The sign is in words; the papers' gains.
    "results.md": Sources((("claims", "claims.json"),), (), ("0.01", "0.05", "0.0345")),
    "results-trained-to-the-end.md": Sources(
        tuple(row[:2] for row in BENCHMARKS if row[2] == "results-trained-to-the-end.md"),
        (
            "tiny",
            "eight-seeds",
            "muon",
            "muon-larger",
            "one-decay",
            "skipv1-six-seeds",
            "tiny-deep-decay",
            "eighth-length",
            "eighth-length-one-decay",
            "quarter-length",
            "quarter-length-one-decay",
            "half-length",
            "half-length-one-decay",
            "tiny-4e-3",
            "tiny-prose",
            "quarter-tiny-4e-3",
            "half-tiny",
            "half-tiny-4e-3",
            "half-tiny-prose",
        ),
        ("3.3", "6.4", "9.4"),  # the sign is in words
    ),
    "results-on-a-gpu.md": Sources((), ("small-h100",)),
    "results-extensions.md": Sources((), ("extensions", "nonlinear-key", "prefix", "encoder")),
    # Half-widths with fewer digits, percentages and tokens; the sign is in words.
    "results-sharing-values.md": Sources(
        (),
        (
            "kv-sharing",
            "kv-both",
            "skip-ratio-gpt2",
            "skip-ratio",
            "llama-sizes",
            "skip-layer",
            "injection",
            "gqa-mla",
            "tinyllama",
            "uptraining",
        ),
        ("0.02", "0.06"),
    ),
    "results-queries.md": Sources((), ("query",), ("2.6",)),
    # A difference of two rows; the sign is in words.
    "results-recipes.md": Sources(
        (),
        ("stability", "query-sweep", "query-recipe", "rate-times-2", "rate-times-5"),
        ("0.7655", "0.7995", "0.8354", "1.1410"),
    ),
    "results-quickstart.md": Sources((), ("quickstart",)),
    "results-images.md": Sources((), ("vision",), ("2.9",)),
    "reference-inference.md": Sources(INFERENCE, ("bench",), ("2.5",)),  # P2
    "tools.md": Sources(tuple(row[:2] for row in BENCHMARKS if row[2] == "tools.md"), (), ("2.13",)),  # PyTorch
    "laptop-to-cluster.md": Sources(tuple(row[:2] for row in BENCHMARKS if row[2] == "laptop-to-cluster.md")),
    "mechanisms.md": Sources(),
    "add-a-mechanism.md": Sources(),
    "evaluate.md": Sources(),
}


@pytest.mark.parametrize("page", NUMBERS)
def test_every_decimal_of_a_page_is_in_a_record(page):
    """Or is what a number of a record rounds to, with three decimals or more."""
    sources = NUMBERS[page]
    tables = [block for row in sources.benchmarks for block in benchmark_tables(*row)]
    tables += [file.read_text() for folder in sources.folders for file in (RESULTS / folder).rglob("table.md")]
    tables += joined_rows() if page == "reference-inference.md" else []
    values = re.findall(r"[−+-]?\d+\.\d+", "\n".join(tables))
    text = (ROOT / page if page == "README.md" else DOCS / page).read_text()
    statements = r"(?:§|(?:Prop\.|Propositions?|Thm|Theorems?|Lemma|appendix) )\d+\.\d+"
    code = r"```[\s\S]*?```|^    .*$|`[^`]*`|\]\([^)]*\)|https?:\S+"
    text = re.sub(f"{code}|{statements}", "", text, flags=re.MULTILINE)
    numbers = set(re.findall(r"(?<![\w.§])[−+-]?\d+\.\d+(?![\w.])", text))

    def as_float(number: str) -> float:
        return float(number.replace("−", "-"))

    def is_known(number: str) -> bool:
        if any(value.lstrip("+") == number.lstrip("+") for value in values):
            return True
        digits = len(number.partition(".")[2])
        return digits >= 3 and any(round(as_float(value), digits) == as_float(number) for value in values)

    unknown = {number for number in numbers if not is_known(number)}
    assert sorted(unknown) == sorted(sources.exceptions), "decimals that are in no record's table"


def test_the_savings_of_cache_are_those_of_the_plan():
    saving = 1 - kv_bytes_per_token(preset("small", "skipv1")) / kv_bytes_per_token(preset("small"))
    assert (ROOT / "README.md").read_text().count(f"{saving:.0%} less KV cache") == 1
    text = (DOCS / "shrink-a-checkpoint.md").read_text()
    for layers in (6, 12, 32):
        sizes = [kv_bytes_per_token(preset("small", *names, num_hidden_layers=layers)) for names in (("skipv1",), ())]
        assert re.search(rf"\b{sizes[0] / sizes[1]:.0%} at\s+{layers}\b", text), layers


def test_the_shares_that_exact_elimination_removes_are_those_of_the_shapes():
    shares = redundant_shares()
    readme, page = (ROOT / "README.md").read_text(), (DOCS / "remove-weights.md").read_text()
    for model, share in shares.items():
        assert f"{share:.2%} of {model}" in " ".join(readme.split()), model
        assert re.search(rf"\| {model}, as published \|.*\| {share:.2%} \|", page), model
    assert max(shares.values()) < 0.01
    record = json.loads((RESULTS / "exact" / "gpt2-small.json").read_text())
    for speed in record["speed"]:
        assert f"| {1 - speed['parameters'][1] / speed['parameters'][0]:.1%} |" in page
    savings = record["weight_table"]["Mistral-7B"]["weight savings"]
    assert f"{savings:.0%} of the weights at Mistral-7B's shape" in readme


def test_the_text_about_conversion_says_what_its_records_say():
    text = (DOCS / "reference-conversion.md").read_text()
    for name, phrase in (("stdlib", "{:.4f} to {:.4f} off the loss"), ("torch-headers", "{:.4f} and {:.4f} off")):
        record = json.loads((RESULTS / "conversion" / f"{name}.json").read_text())
        gained = record["baseline"]["last_tenth"].values()
        assert phrase.format(min(gained), max(gained)) in text
    assert record["baseline"]["data"]["description"].rpartition(", ")[2] == "36.7 MB"
    grouped = json.loads((RESULTS / "conversion" / "stdlib.json").read_text())["grouped"]
    assert f"loss {grouped['loss']:.4f}" in text
    points = read_points(json.loads((RESULTS / "frontier/smollm2/frontier.json").read_text()))
    [short] = [point for point in points if point.label == "unrotated-latents 84%, 16 bits"]
    assert "({:+.4f} and\n{:+.4f})".format(*(mean for mean, _ in short.losses)) in text


def test_no_case_of_this_file_is_left_out(request):
    """A page that only some weeks look at is wrong in the others."""

    class Item(SimpleNamespace):
        def get_closest_marker(self, name):
            return self.marks.get(name)

        def add_marker(self, mark):
            self.marks[mark.name] = mark

    sampling = request.config.pluginmanager.get_plugin(str(ROOT / "conftest.py"))

    def left_out(marks):
        items = [Item(nodeid=f"tests/test_docs.py::test_of_benchmarks[{i}]", marks=dict(marks)) for i in range(50)]
        sampling.pytest_collection_modifyitems(items)
        return sum("exhaustive" in item.marks for item in items)

    assert left_out({mark.name: mark for mark in request.node.iter_markers()}) == 0 and left_out({}) >= 45


def test_the_text_about_elimination_says_what_its_record_says():
    text = (DOCS / "reference-exact.md").read_text()
    cases = json.loads((RESULTS / "exact" / "gpt2-small.json").read_text())["cases"]
    errors = [[case[form]["distance"]["bf16"]["result"]["relative"] for form in ("plain", "quiet")] for case in cases]
    factors = [plain / quiet for plain, quiet in errors]
    assert f"by factors of {min(factors):.1f} to {max(factors):.1f}" in text
    page = (DOCS / "remove-weights.md").read_text()
    balanced = [case["quiet"]["distance"] for case in cases]
    worst = [max(distance[dtype]["result"]["relative"] for distance in balanced) for dtype in ("fp64", "fp32")]
    assert "{:.1e} of the largest logit in float64 and {:.1e} in float32".format(*worst) in page
    percent = [100 * balanced for _, balanced in errors]
    assert f"move by {min(percent):.0f} to {max(percent):.0f}% of the largest logit" in page


def test_there_are_committed_results():
    assert {directory.name for directory in COMPARISONS} >= {"quickstart"}


def test_the_quickstarts_rates_are_those_the_sweep_found():
    found = json.loads((RESULTS / "quickstart" / "compare.json").read_text())["chosen_learning_rate"]
    assert found == {name: recipe(name).learning_rate for name in SUITES["quickstart"].scales["tiny"].entries}


# Figures


def test_every_figure_is_drawn_by_the_script_and_shown_on_a_page():
    files = {file.name for file in make_figures.FIGURES.iterdir()}
    assert files == {f"{name}.svg" for name in make_figures.ALL}
    shown = {Path(image).name for page in PAGES for image in targets(page, images=True)}
    assert files <= shown


@pytest.mark.parametrize("name", make_figures.ALL)
def test_a_figure_is_the_one_that_its_records_make(name):
    """The same words and marks, at the same places up to half a pixel; the description names the records' hash."""
    file = make_figures.FIGURES / f"{name}.svg"
    committed, drawn = file.read_text(), make_figures.make(name)
    assert file.stat().st_size < 100_000
    assert make_figures.signature(make_figures.ALL[name]) in committed, "run python docs/make_figures.py"
    if f"matplotlib=={version('matplotlib')}" not in (ROOT / "constraints.txt").read_text():
        pytest.skip("another Matplotlib places marks elsewhere")
    number = r"-?\d+\.?\d*(?:e-?\d+)?"

    def marks(svg: str) -> tuple[str, list[float]]:
        ids = re.sub(r'\b(id="|#|href="#)[mp]?[0-9a-f]{8,}', r"\1", svg)
        return re.sub(number, "0", ids), [float(at) for at in re.findall(number, ids)]

    (shape, places), (expected_shape, expected_places) = marks(committed), marks(drawn)
    assert shape == expected_shape, "run python docs/make_figures.py"
    np.testing.assert_allclose(places, expected_places, atol=0.5)


def test_every_page_that_reports_numbers_has_a_figure():
    for page in DOCS.glob("*.md"):
        measured = re.search(r"± \d|\b\d+(\.\d+)? ?%( of| less|\b)", re.sub(r"`[^`]*`", "", page.read_text()))
        if measured and page.name not in ("README.md", "life-of-a-token.md"):
            assert targets(page, images=True), page.name


# Pages


def targets(page: Path, images: bool = False) -> list[str]:
    """What a page links to, or its images."""

    def walk(tokens: list[Token]) -> list[Token]:
        return [found for token in tokens for found in (token, *walk(token.children or []))]

    tokens = walk(MarkdownIt("commonmark").enable("table").parse(page.read_text()))
    html = re.findall(r'<img src="([^"]+)"', page.read_text())
    if images:
        return [str(token.attrs["src"]) for token in tokens if token.type == "image"] + html
    return [str(token.attrs["href"]) for token in tokens if token.type == "link_open"]


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub gives a page's headings."""
    lines = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).splitlines()
    titles = [line.lstrip("#").strip() for line in lines if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_images_lead_somewhere(page):
    for target in targets(page) + targets(page, images=True):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}: no such heading"


def test_every_page_is_on_the_map():
    """Those of a comparison are on the page about results."""
    of_results = {page.name for page in DOCS.glob("results-*.md")}
    shown = {target for target in targets(DOCS / "README.md") if "/" not in target}
    assert {page.name for page in DOCS.glob("*.md")} - of_results == {"README.md"} | shown
    assert of_results <= set(targets(DOCS / "results.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page):
    """A path may leave out the folders in front of it; the example of a new mechanism is to be written."""
    files = {f"/{file.relative_to(ROOT)}" for room in ("src", "tests", "benchmarks", "experiments", "docs", "plugins")
             for file in (ROOT / room).rglob("*.py")}  # fmt: skip
    for path in set(re.findall(r"(?<![\w/*])[\w/]+\.py\b", page.read_text())) - {"model/query_gated.py"}:
        if path != "tests/test_x.py":
            assert any(file.endswith(f"/{path}") for file in files), f"{page.name} names {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_page_names_exists(page):
    group = get_command(app)
    beside = {f"experiments.{command.__name__}": get_command(alone(command)) for command in (demo, analyze)}
    programs = r"(?:^    |`|-m )(?:leanqkv(?:\.cli)? |(?=experiments\.(?:demo|analysis) ))([^`\n]+)"
    for line in re.findall(programs, page.read_text(), flags=re.MULTILINE):
        name, *words = line.partition("  #")[0].split()
        if re.fullmatch(r"[a-z.]+", name):
            assert name in (*group.commands, *beside), f"{page.name}: {name}"
            command = beside.get(name) or group.get_command(None, name)
            options = {option for parameter in command.params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= options | {"--help"}, f"{page.name}: {line}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_layout_names_every_room():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for folder in (ROOT / "src" / "leanqkv").iterdir():
        if (folder / "__init__.py").exists():
            assert re.search(rf"^      {folder.name}/ +\w", text, flags=re.MULTILINE), folder.name


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


def test_the_readmes_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (example,) = python_blocks(ROOT / "README.md")
    assert '"gpt2-124m"' in example
    exec(example.replace('"gpt2-124m"', '"tiny"'), {})
    assert "ParameterCount" in capsys.readouterr().out
    assert LeanForCausalLM.from_pretrained(tmp_path / "runs" / "model").config.plan.layers[1].borrowed


def test_the_example_of_a_mechanism_is_one(monkeypatch):
    names: dict = {"__package__": "leanqkv.model"}
    exec(python_blocks(DOCS / "add-a-mechanism.md")[0], names)
    monkeypatch.setitem(mechanisms.QUERIES, "gated", names["Gated"])
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}
    config = LeanConfig(**sizes, max_position_embeddings=16, query=[{"type": "gated"}])
    model = LeanForCausalLM(config)
    assert model.model.layers[1].self_attn.q_proj.gate.tolist() == [1.0] * 4
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    assert model.model.layers[0].self_attn.q_proj.gate.grad.abs().min() > 0


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_preset_has_a_row(name):
    assert f"`{name}" in PAPERS, f"docs/papers.md has no row for {name}"
    assert f"`{name}" in (DOCS / "mechanisms.md").read_text(), f"docs/mechanisms.md has no row for {name}"


def test_every_mechanism_file_has_a_row_and_says_where_it_is_from():
    tables = (mechanisms.QUERIES, mechanisms.KEYS, mechanisms.VALUES, mechanisms.KEY_VALUES)
    for cls in {cls for table in tables for cls in table.values()}:
        file = ROOT / "src" / Path(*cls.__module__.split(".")).with_suffix(".py")
        head = file.read_text().split('"""')[1]
        assert "http" in head + cls.__doc__, f"{file.name} does not open with its source"
        if file.stem != "registry":
            assert f"model/{file.name}" in PAPERS, f"docs/papers.md has no row for {file.name}"
