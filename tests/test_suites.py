"""The suites: every entry can be built, recipes and numbers are the papers', pairs and divergence are reported."""

import json
import re
import sys

import pytest
from corpus import SHAPE
from rich.console import Console
from test_report import Page
from test_report import record as a_record

from leanqkv import LeanError, count_parameters, kv_bytes_per_token, preset
from leanqkv.cli import main
from leanqkv.compare.comparison import Comparison, run_comparison
from leanqkv.compare.records import Run, load_comparison
from leanqkv.compare.suite import PAPER, SCALES, SMALL, TINY, Entry
from leanqkv.compare.suites import SUITES, choose
from leanqkv.presets import recipe
from leanqkv.report.comparison import markdown_table, reading, terminal_report
from leanqkv.report.comparison_page import write_report
from leanqkv.report.published import METRICS, number
from leanqkv.report.stability import outcome

SETUPS = [(name, scale) for name, suite in SUITES.items() for scale in suite.scales]


@pytest.fixture(scope="module", autouse=True)
def _one_core():
    """Models this small are many times slower on two threads than on one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leanqkv.compare.comparison.available_cores", lambda: 1)
        yield


def entry(suite, scale, row):
    [found] = [entry for entry in SUITES[suite].scales[scale].entries if entry.row == row]
    return found


@pytest.mark.parametrize(("suite", "scale"), SETUPS)
def test_every_entry_can_be_built_and_trained(suite, scale):
    setup = SUITES[suite].scales[scale]
    Comparison("", setup.groups, (0,), {}, "")  # no label twice
    assert all(len(group) > 1 for group in setup.groups)
    for one in setup.entries:
        config, full = preset(one.model), one.full_recipe({})
        assert full.warmup_steps < full.steps
        assert config.plan.count_parameters().total < (10e6 if scale == TINY else 30e6 if scale == SMALL else 4e9)
    for group in setup.groups:
        batches = {(full.steps, full.batch_size) for full in (one.full_recipe({}) for one in group)}
        assert len(batches) == 1, "a group sees the same batches"


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_has_the_papers_rows_at_every_scale_and_says_what_is_ours(suite):
    scales = SUITES[suite].scales
    if suite == "quickstart":
        assert [*scales] == [TINY]
        return
    assert [*scales] == [*SCALES]
    text = ("Skylion007/openwebtext", "Geralt-Targaryen/openwebtext2", "allenai/c4:en")
    assert scales[PAPER].data in (("cifar10",) if suite == "vision" else text)
    assert all(setup.notes for setup in scales.values())
    for scale in (TINY, SMALL):
        assert scales[scale].data is None
        assert {one.row for one in scales[scale].entries} <= {one.row for one in scales[PAPER].entries}
    assert {one.row for one in scales[TINY].entries} == {one.row for one in scales[SMALL].entries}


@pytest.mark.parametrize("suite", [name for name, suite in SUITES.items() if suite.published])
def test_published_rows_are_paired_as_ours(suite):
    setup = SUITES[suite].scales[PAPER]
    baselines = {(one.row, group[0].row) for group in setup.groups for one in group}
    for published in SUITES[suite].published:
        assert published.metric in METRICS
        for group in published.groups:
            assert {(row, next(iter(group))) for row in group} <= baselines


# Copied from the papers' tables: suite, table, metric -> rows with what they print.
PRINTED = {
    ("query", "P1 Table 2", "validation loss"): {
        "P1 smaller MLP": "3.026",
        "P1 smaller d": "3.027",
        "P1 W_Q = Id": "3.018",
        "P1 baseline": "3.016",
        "P1 W_Q = Id, larger MLP": "3.004",
    },
    ("query", "P1b Table 2", "validation loss"): {
        "smaller MLP": "2.955",
        "smaller d": "2.956",
        "W_Q = Id": "2.944",
        "baseline": "2.944",
        "W_Q = Id, larger MLP": "2.929",
    },
    ("query", "P2 Table 1", "validation loss"): {
        "baseline": "2.956",
        "MLP 4.75": "2.927",
        "MLP 4.75 scaled": "2.928",
        "Res. GELU, 2.6e-3": "2.919",
        "Res. GELU, 3e-3": "2.915",
    },
    ("query", "P1 Table 2, both versions", "parameters, millions"): {
        f"{version}{row}": value
        for version in ("P1 ", "")
        for row, value in (
            ("smaller MLP", "117.30"),
            ("smaller d", "117.92"),
            ("W_Q = Id", "117.30"),
            ("baseline", "124.37"),
            ("W_Q = Id, larger MLP", "124.37"),
        )
    },
    ("query", "P1 Table 2, both versions", "non-embedding parameters, millions"): {
        f"{version}{row}": value
        for version in ("P1 ", "")
        for row, value in (
            ("smaller MLP", "77.88"),
            ("smaller d", "79.73"),
            ("W_Q = Id", "77.88"),
            ("baseline", "84.95"),
            ("W_Q = Id, larger MLP", "84.95"),
        )
    },
    ("query", "P2 Table 1", "non-embedding parameters, millions"): {
        "baseline": "85",
        "MLP 4.75": "96",
        "MLP 4.75 scaled": "96",
        "Res. GELU, 2.6e-3": "85",
        "Res. GELU, 3e-3": "85",
    },
    ("query-sweep", "P2 Table 1", "validation loss"): {
        "baseline": "2.956",
        "MLP 4.75": "2.927",
        "MLP 4.75 scaled": "2.928",
        "Res. GELU, 0.0026 to 3e-05, decay 0.03125": "2.919",
        "Res. GELU, 0.003 to 3e-05, decay 0.03125": "2.915",
    },
    ("skip-ratio", "P3 Table 7", "validation loss"): {"1/4": "2.716", "1/2": "2.711", "3/4": "2.717", "0": "2.723"},
    ("injection", "P3 Table 13", "validation loss"): {
        "skipv1": "2.885",
        "pooling": "2.881",
        "dynamic": "2.885",
        "odd/even": "2.883",
        "skipv1 + resformer": "2.889",
    },
    ("gqa-mla", "P3 Table 2", "validation loss"): {
        "gqa": "2.912",
        "skipv1-gqa": "2.893",
        "mla": "2.896",
        "skipv1-mla": "2.888",
    },
    ("gqa-mla", "P3 Table 2", "perplexity"): {
        "gqa": "18.39",
        "skipv1-gqa": "18.04",
        "mla": "18.10",
        "skipv1-mla": "17.95",
    },
    ("gqa-mla", "P3 Table 2", "parameters, millions"): {
        "gqa": "334.7",
        "skipv1-gqa": "328.9",
        "mla": "337.4",
        "skipv1-mla": "334.4",
    },
    ("gqa-mla", "P3 Table 2", "KV bytes per token"): {
        "gqa": "98304",
        "skipv1-gqa": "74752",
        "mla": "13824",
        "skipv1-mla": "7680",
    },
    ("llama-sizes", "P3 Figure 5(a)", "validation loss"): {
        "60M": "3.549",
        "130M": "3.229",
        "350M": "2.931",
        "1B": "2.723",
        "3B": "2.664",
        "60M skipv1": "3.504",
        "130M skipv1": "3.192",
        "350M skipv1": "2.885",
        "1B skipv1": "2.711",
        "3B skipv1": "2.652",
    },
    ("llama-sizes", "P3 Figure 5(a)", "perplexity"): {
        "60M": "34.78",
        "130M": "25.25",
        "350M": "18.75",
        "1B": "15.23",
        "3B": "14.35",
        "60M skipv1": "33.25",
        "130M skipv1": "24.34",
        "350M skipv1": "17.90",
        "1B skipv1": "15.04",
        "3B skipv1": "14.18",
    },
    ("llama-sizes", "P3 Table 5", "validation loss"): {"1B": "2.740", "1B skipv1": "2.729"},
    ("tinyllama", "P3 Table 6", "validation loss"): {
        "1.1B": "2.750",
        "315M": "2.936",
        "125M": "3.420",
        "1.1B skipv1": "2.742",
        "315M skipv1": "2.916",
        "125M skipv1": "3.370",
    },
}
SAID = {
    "kv-sharing": {"skipv1", "resformer", "denseformer", "yoco-v", "cla-v", "baseline"},
    "skip-ratio": {"0", "1/4", "1/2", "3/4", "1"},
    "skip-ratio-gpt2": {"0", "1/4", "1/2", "3/4", "1"},
    "skip-layer": {"baseline", "skipv0", "skipv1", "skipv2", "skipv3", "skipv4"},
    "vision": {"baseline", "skipv1"},
    "kv-both": {"baseline", "skipv1", "skipkv1", "skipv1-yoco", "fusedkv-lite (ours)"},
}


def test_every_published_number_is_there_and_right():
    found = {}
    for name, suite in SUITES.items():
        for published in suite.published:
            rows = {row: text for group in published.groups for row, text in group.items()}
            if any(number(text) is None for text in rows.values()):
                assert published.source.startswith("P3 Figure"), "only figures print no numbers"
                assert rows.keys() == SAID[name]
            else:
                found[name, published.source, published.metric] = rows
    assert found == PRINTED
    seeds = " ".join(SUITES["llama-sizes"].claims)
    assert all(f"{loss}" in seeds for loss in (2.723, 2.753, 2.744, 2.711, 2.743, 2.732))
    assert re.search(r"before 20k steps at weight decay 0\.05", " ".join(SUITES["stability"].claims))
    assert "0.98%, 0.94%, 1.24% and 1.40%" in " ".join(SUITES["query"].claims)


@pytest.mark.parametrize("metric", ["parameters, millions", "non-embedding parameters, millions"])
def test_the_models_of_table_2_have_the_published_sizes(metric):
    which = "total" if metric.startswith("param") else "non_embedding"
    for row, printed in PRINTED["query", "P1 Table 2, both versions", metric].items():
        assert f"{getattr(count_parameters(preset(entry('query', PAPER, row).model)), which) / 1e6:.2f}" == printed
    for row, printed in PRINTED["query", "P2 Table 1", "non-embedding parameters, millions"].items():
        assert f"{count_parameters(preset(entry('query', PAPER, row).model)).non_embedding / 1e6:.0f}" == printed


def test_the_caches_of_table_2_are_the_published_ones():
    sizes = {
        row: kv_bytes_per_token(preset(entry("gqa-mla", PAPER, row).model))
        for row in ("gqa", "skipv1-gqa", "mla", "skipv1-mla")
    }
    assert 2 * sizes["gqa"] == 98_304
    assert 2 * sizes["skipv1-gqa"] == 74_752
    assert sizes["mla"] == 13_824
    assert sizes["skipv1-mla"] == 7_936, "7,680 as printed, and the rest of the first layer's latent"


RECIPE = ("steps", "batch_size", "learning_rate", "min_learning_rate", "weight_decay", "warmup_steps", "schedule_steps")


@pytest.mark.parametrize(
    ("suite", "row", "expected"),
    [
        ("query", "P1 baseline", (100_000, 480, 6e-4, 6e-5, 0.1, 2000, 600_000)),
        ("query", "P1 W_Q = Id, larger MLP", (100_000, 480, 6e-4, 6e-5, 2**-5, 2000, 600_000)),
        ("query", "smaller d", (60_000, 480, 6e-4, 6e-5, 0.1, 2000, None)),
        ("query", "W_Q = Id", (60_000, 480, 1.6e-3, 2e-5, 0.1, 2000, None)),
        ("query", "W_Q = Id, larger MLP", (60_000, 480, 2e-3, 2e-5, 0.1, 2000, None)),
        ("query", "MLP 4.75 scaled", (60_000, 480, 5.66e-4, 5.66e-5, 0.1, 2000, None)),
        ("query", "Res. GELU, 2.6e-3", (60_000, 480, 2.6e-3, 3e-5, 2**-5, 2000, None)),
        ("query", "Res. GELU, 3e-3", (60_000, 480, 3e-3, 3e-5, 2**-5, 2000, None)),
        ("query-sweep", "Res. GELU, 0.0034 to 3e-05, decay 0.03125", (60_000, 480, 3.4e-3, 3e-5, 2**-5, 2000, None)),
        ("query-sweep", "Res. GELU, 0.002 to 0.00012, decay 0.015625", (60_000, 480, 2e-3, 1.2e-4, 2**-6, 2000, None)),
        ("skip-layer", "skipv2", (40_000, 120, 1e-3, 1e-4, 0.1, 4000, None)),
        ("skip-ratio", "3/4", (25_000, 512, 1e-3, 1e-4, 0.1, 2500, None)),
        ("injection", "pooling", (15_000, 512, 2e-3, 2e-4, 0.0, 1500, None)),
        ("gqa-mla", "skipv1-mla", (40_000, 120, 1e-3, 1e-4, 0.1, 4000, None)),
        ("llama-sizes", "60M", (2_500, 512, 2e-3, 2e-4, 0.0, 250, None)),
        ("llama-sizes", "130M skipv1", (5_000, 512, 2e-3, 2e-4, 0.0, 500, None)),
        ("llama-sizes", "3B skipv1", (30_000, 512, 5e-4, 5e-5, 0.1, 3000, None)),
    ],
)
def test_at_paper_the_recipe_is_the_published_one(suite, row, expected):
    full = entry(suite, PAPER, row).full_recipe({})
    found = [getattr(full, name) for name in RECIPE]
    assert found == [value if value is None else pytest.approx(value, rel=1e-3) for value in expected]


def test_p3_trains_with_dropout_on_gpt2_alone():
    setups = SUITES["kv-sharing"].scales[PAPER].entries, SUITES["llama-sizes"].scales[PAPER].entries
    assert [{preset(one.model).hidden_dropout for one in entries} for entries in setups] == [{0.2}, {0.0}]
    assert {one.model.partition("+")[0] for one in setups[0]} == {f"gpt2-{size}m" for size in (125, 200, 355, 550)}


def test_ours_keep_the_papers_proportions():
    assert preset(entry("query", PAPER, "smaller d").model).hidden_size == 744
    assert preset(entry("query", PAPER, "larger d").model).head_dim == 68
    assert preset(entry("query", PAPER, "smaller MLP").model).intermediate_size == 2688
    for scale in SCALES:
        d = preset(entry("query", scale, "baseline").model).hidden_size
        assert preset(entry("query", scale, "smaller d").model).hidden_size == d * 31 / 32
        assert preset(entry("query", scale, "smaller MLP").model).intermediate_size == 3.5 * d
        assert preset(entry("query", scale, "MLP 4.75").model).intermediate_size == 4.75 * d
        best, second = (entry("query", scale, row).full_recipe({}) for row in ("Res. GELU, 3e-3", "Res. GELU, 2.6e-3"))
        assert best.min_learning_rate / best.learning_rate == pytest.approx(0.01)
        assert second.learning_rate / best.learning_rate == pytest.approx(2.6 / 3, rel=1e-4)
        p1 = entry("query", scale, "P1 baseline").full_recipe({})
        assert p1.schedule_steps == 6 * p1.steps
        lengths = [entry("llama-sizes", scale, size).full_recipe({}).steps for size in ("60M", "130M", "350M")]
        assert [steps / lengths[0] for steps in lengths] == [1, 2, 6]
        ratios = [entry("skip-ratio", scale, row) for row in ("0", "1/4", "1/2", "3/4", "1")]
        heads = [layer.computed_value_heads for one in ratios for layer in preset(one.model).plan.layers[1:2]]
        assert [count / heads[0] for count in heads] == [1, 0.75, 0.5, 0.25, 0]


def test_p3s_models_share_one_learning_rate():
    """At tiny the preset of skipv1 has one of its own."""
    assert recipe("tiny+skipv1").learning_rate != recipe("tiny").learning_rate
    for suite in ("kv-sharing", "skip-ratio", "skip-layer", "kv-both"):
        assert len({one.full_recipe({}).learning_rate for one in SUITES[suite].scales[TINY].entries}) == 1


def test_what_a_person_asks_for_goes_over_the_entries():
    p1 = entry("query", TINY, "P1 W_Q = Id").full_recipe({"steps": 80})
    assert (p1.steps, p1.schedule_steps, p1.warmup_steps, p1.weight_decay) == (80, 480, 8, 2**-5)
    assert entry("query", TINY, "MLP 4.75").full_recipe({"batch_size": 4}).batch_size == 4
    groups = SUITES["stability"].scales[TINY].groups
    for asked, learning_rates in (({"learning_rate": 1e-3}, None), ({"weight_decay": 0.1}, None), ({}, (1e-3, 2e-3))):
        with pytest.raises(LeanError, match=r"differ in (learning rate|weight decay); leave it to them"):
            Comparison("", groups, (0,), asked, "", learning_rates=learning_rates)
    Comparison("", SUITES["kv-sharing"].scales[TINY].groups, (0,), {"learning_rate": 1e-3}, "")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((["quickstart"], None, "small"), "quickstart exists only at tiny, found --scale small"),
        (([], "quickstart", "paper"), "quickstart exists only at tiny"),
        (([], "kv-sharing", "large"), "scale 'large' is not known: did you mean|scale 'large' is not known: valid"),
        (([], "kv-sharring", None), "there is no suite 'kv-sharring': did you mean 'kv-sharing'"),
        ((["tiny"], "query", None), "--suite query names what is compared; leave out tiny"),
        ((["tiny", "small"], None, "tiny"), "--scale is for suites"),
        (([], None, None), "nothing to compare"),
    ],
)
def test_what_cannot_be_chosen_is_refused(asked, message):
    with pytest.raises(LeanError, match=message) as error:
        choose(*asked)
    assert "\n" not in str(error.value)


def test_the_command_line_lists_and_runs_suites(monkeypatch, capsys):
    def cli(*arguments):
        monkeypatch.setattr(sys, "argv", ["leanqkv", "compare", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, *capsys.readouterr()

    code, out, _ = cli("--list")
    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert lines.keys() == SUITES.keys()
    assert "18 runs at tiny" in lines["kv-sharing"]
    assert "P3 Figure 4" in lines["kv-sharing"]
    code, _, err = cli("--suite", "quickstart", "--scale", "small", "--out", "x")
    assert (code, err) == (2, "error: quickstart exists only at tiny, found --scale small\n")


def run(data, out, suite, groups, recipe, seeds=(0, 1)):
    comparison = Comparison(
        title=SUITES[suite].title,
        groups=groups,
        seeds=seeds,
        recipe=recipe,
        command="leanqkv compare ...",
        suite=suite,
        scale=TINY,
        notes=SUITES[suite].scales[TINY].notes,
        context_length=16,
        evaluation_sequences=4,
        evaluate_every=2,
    )
    run_comparison(comparison, data, out, precision="fp32", device="cpu", jobs=1)
    return load_comparison(out)


def terminal(comparison):
    console = Console(width=100)
    with console.capture() as capture:
        console.print(terminal_report(comparison))
    return capture.get()


@pytest.fixture(scope="module")
def sizes(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("sizes") / "out"
    groups = SUITES["llama-sizes"].scales[TINY].groups
    return out, run(data, out, "llama-sizes", groups, {"steps": 2, "batch_size": 2}, (0,))


def test_every_size_is_paired_with_its_own_baseline(sizes):
    out, comparison = sizes
    records = [json.loads(path.read_text()) for path in out.glob("runs/*/record.json")]
    losses = {(r["name"], r["seed"]): r["final"]["validation_loss"] for r in records}
    assert len(losses) == 6
    for result in comparison.results:
        label = result.name.removesuffix("+skipv1")
        assert (result.baseline is None) == (result.name == label)
        if result.baseline:
            assert result.baseline.name == label
            assert result.difference is not None
            assert result.difference.by_seed == {0: losses[result.name, 0] - losses[label, 0]}
    said = reading(comparison)
    assert all(f"Against llama-{size}/8, validation" in said for size in ("60m", "130m", "350m"))
    assert "not all" not in "".join(markdown_table(comparison)), "sizes of unequal length are no fault"


def test_published_differences_stand_beside_ours_and_losses_do_not(sizes):
    _, comparison = sizes
    table = markdown_table(comparison)
    _, _, beside = table.partition("P3 Figure 5(a), validation loss.")
    heading, _, rows = beside.partition("\n")
    assert "LLaMA, C4, the steps of Table 4" in heading
    assert re.search(r"Here: scale tiny, \S+ to \S+ parameters, 64 training tokens, corpus\.txt", heading)
    ours = next(result for result in comparison.results if result.name == "llama-60m/8+skipv1")
    assert ours.difference is not None
    line = next(line for line in rows.splitlines() if line.startswith("| `llama-60m/8+skipv1`"))
    assert [cell.strip() for cell in line.split("|")][2:4] == ["3.504", "−0.045 (−1.27%)"]
    assert f"{ours.difference.mean:+.4f}".replace("-", "−") in line
    assert "| `3B skipv1` | 2.652 | −0.012 (−0.45%) | not run |" in rows
    assert "compare signs and proportions, not losses" in rows
    for result in comparison.results:
        assert f"{result.mean_loss:.4f}" not in beside
    assert SUITES["llama-sizes"].claims[0] in table


def test_page_and_terminal_have_the_papers_too(sizes):
    out, comparison = sizes
    text = " ".join("".join(Page(write_report(out).read_text()).text).split())
    shown = terminal(comparison)
    assert max(map(len, shown.splitlines())) <= 100
    for where in (text, " ".join(shown.split())):
        assert "P3 Table 5, validation loss. Published: LLaMA-1B" in where
        assert "−0.011 (−0.40%)" in where
    assert "suite llama-sizes at scale tiny" in text
    assert SUITES["llama-sizes"].scales[TINY].notes[0] in text
    assert "Improvement over its own baseline" in text


def test_figures_without_numbers_say_what_their_text_says(data, tmp_path):
    groups = (SUITES["skip-ratio-gpt2"].scales[TINY].groups[0][:3],)
    comparison = run(data, tmp_path / "out", "skip-ratio-gpt2", groups, {"steps": 2, "batch_size": 2}, (0,))
    table = markdown_table(comparison)
    assert "P3 Figure 9(a), validation loss. Published: GPT-2 355M" in table
    assert re.search(r"\| `tiny\+skipv1` \| lowest \| – \| [+−]\d\.\d{4} \([+−]\d\.\d\d%\) \|", table)
    assert "| `3/4` | above 1/2 | – | not run |" in table


def test_divergence_is_caught_and_reported(data, tmp_path):
    model = f"tiny{SHAPE}"
    huge = {"learning_rate": 1e18}
    groups = (
        (Entry(model), Entry(f"{model}+identity-query", "identity, calm")),
        (Entry(model, "huge rate", huge), Entry(f"{model}+identity-query", "identity, huge rate", huge)),
    )
    comparison = run(data, tmp_path / "out", "stability", groups, {"steps": 8, "batch_size": 2})
    table = markdown_table(comparison)
    heading = "Which runs diverged. Here: scale tiny"
    rows = [line for line in table.partition(heading)[2].splitlines() if line.startswith("| `")]
    outcomes = {cells[1].strip("` "): cells[2:8] for cells in (line.split("|") for line in rows)}
    assert [*outcomes] == [model, "identity, calm", "huge rate", "identity, huge rate"]
    assert outcomes[model][3].strip() == "finished (2 seeds)"
    assert outcomes["huge rate"][0].strip() == "1e+18"
    assert re.fullmatch(r"diverged at step \d( \(2 seeds\)|<br>diverged at step \d)", outcomes["huge rate"][3].strip())
    assert "huge rate and identity, huge rate diverged." in reading(comparison)
    assert "to report yet" not in reading(comparison)
    text = "".join(Page(write_report(tmp_path / "out").read_text()).text)
    for where in (text, terminal(comparison), table):
        assert "diverged at step" in where
        assert "20k steps at weight decay 0.05" in " ".join(where.split())


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([6.0, 5.0, 4.5, 4.4], "finished"),
        ([6.0, 5.0, 5.3, 5.2], "finished"),
        ([6.0, 5.0, 7.5, 4.9], "spike at step 30"),
        ([6.0, 5.0, 5.6, 6.9], "diverged at step 30"),
        ([6.0, 5.0, 5.2, 6.9], "diverged at step 40"),
        ([9.9, 9.8, 9.7, 9.7], "diverged at step 10"),  # ln 4096 is 8.3
    ],
)
def test_a_loss_that_rises_and_stays_up_is_divergence_too(losses, expected):
    content = a_record("tiny", 0, losses[-1])
    content["data"]["vocab_size"] = 4096
    content["evaluations"] = [{"step": 10 * (i + 1), "loss": loss} for i, loss in enumerate(losses)]
    assert outcome(Run.from_record(content)) == expected
