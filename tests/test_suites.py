"""The suites: every entry can be built, recipes and numbers are the papers', pairs and divergence are reported."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from comparison_record import record as a_record
from corpus import SHAPE
from pages import Page
from rich.console import Console

import experiments.vision  # noqa: F401, models of images are trained here too
from leanqkv import LeanError, count_parameters, kv_bytes_per_token, preset
from leanqkv.cli import main
from leanqkv.compare.comparison import run_comparison
from leanqkv.compare.records import Run, load_comparison
from leanqkv.compare.statistics import over_seeds
from leanqkv.compare.suite import PAPER, SCALES, SMALL, TINY, Entry
from leanqkv.compare.suites import SUITES, choose, load_suite
from leanqkv.presets.recipes import recipe
from leanqkv.report.comparison import markdown, reading, terminal_report
from leanqkv.report.comparison_page import KIND
from leanqkv.report.papers import METRICS, number, outcome, rank_correlation

RESULTS = Path(__file__).parent.parent / "results"
AT_EVERY_SCALE = [(name, scale) for name, suite in SUITES.items() for scale in suite.scales]
P3 = [name for name, suite in SUITES.items() if suite.source.startswith("P3") and name != "vision"]


@pytest.fixture(scope="module", autouse=True)
def _one_core():
    """Models this small are many times slower on two threads than on one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leanqkv.compare.comparison.available_cores", lambda: 1)
        yield


def entry(suite, scale, row):
    [chosen] = [one for one in SUITES[suite].scales[scale].entries.values() if one.row == row]
    return chosen


def recipe_at(suite, scale, row):
    return entry(suite, scale, row).full_recipe({})


def published(suite, source, metric):
    """What the table prints, by row."""
    [table] = [one for one in SUITES[suite].published if (one.source, one.metric) == (source, metric)]
    return table.printed


@pytest.mark.parametrize(("suite", "scale"), AT_EVERY_SCALE)
def test_every_entry_can_be_built_and_trained(suite, scale):
    comparison = SUITES[suite].scales[scale]
    assert all(len(group) > 1 for group in comparison.groups)
    for one in comparison.entries.values():
        config, full = preset(one.model), one.full_recipe({})
        assert full.warmup_steps < full.steps
        assert count_parameters(config).total < (10e6 if scale == TINY else 30e6 if scale == SMALL else 4e9)
        # YAML reads 3e-3 as a word and 800.0 as no count.
        assert {name: type(value) for name, value in one.recipe.items()} == {
            name: int if name.endswith("steps") or name == "batch_size" else float for name in one.recipe
        }
    for group in comparison.groups:
        whole = [one.full_recipe({}) for one in group if one.uptrain is None]
        batches = {(full.steps, full.batch_size) for full in whole}
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
    assert all(comparison.notes for comparison in scales.values())
    rows = {scale: {one.row for one in comparison.entries.values()} for scale, comparison in scales.items()}
    assert rows[TINY] == rows[SMALL] <= rows[PAPER]
    assert scales[TINY].data is scales[SMALL].data is None


@pytest.mark.parametrize("suite", [name for name, suite in SUITES.items() if suite.published])
def test_published_rows_are_paired_as_ours(suite):
    comparison = SUITES[suite].scales[PAPER]
    baselines = {(one.row, group[0].row) for group in comparison.groups for one in group}
    for table in SUITES[suite].published:
        assert table.metric in METRICS
        assert table.baselines.items() <= baselines
        numbers = [number(text) for text in table.printed.values()]
        if None in numbers:
            assert table.source.startswith("P3 Figure"), "only figures print no numbers"
            assert table.printed.keys() == {one.row for one in SUITES[suite].scales[TINY].entries.values()}
        else:
            assert all(isinstance(text, str) for text in table.printed.values()), "a float has lost its last zeros"


def test_rates_that_are_searched_are_no_difference_of_recipes():
    """Every model is tried with each of them, and falls to the same."""
    asked = replace(choose(["tiny", "tiny+skipv1"], None, None), recipe={"min_learning_rate": 4e-5})
    assert asked.recipe_differences == ["the share of its peak that the learning rate falls to (0.006667, 0.01333)"]
    assert replace(asked, learning_rates=(2e-3, 8e-3)).recipe_differences == []


def test_a_misspelled_field_of_a_suite_is_not_ignored(tmp_path):
    good = "title: t\nsource: ours\nscales: {tiny: {seeds: 1, groups: [{base: tiny, entries: [{}, {add: +skipv1}]}]}}\n"
    file = tmp_path / "mine.yaml"
    file.write_text(good)
    assert [*load_suite(file).scales["tiny"].entries] == ["tiny", "tiny+skipv1"]
    for wrong, right in (("claim: x\nsource", "source"), ("seed: 1, seeds", "seeds"), ("bas: tiny", "base: tiny")):
        file.write_text(good.replace(right, wrong))
        with pytest.raises(TypeError):
            load_suite(file)
    file.write_text(good.replace("add:", "model:"))
    with pytest.raises(TypeError):
        load_suite(file)


@pytest.mark.parametrize("plan", sorted(RESULTS.glob("*/compare.json")), ids=lambda path: path.parent.name)
def test_committed_comparisons_are_what_their_suites_still_ask_for(plan):
    """Otherwise their directories would be refused as another comparison's."""
    content = json.loads(plan.read_text())
    if content["suite"] is None:
        return
    suite = choose([content["suite"]], None, content.get("scale", TINY), content.get("base"))
    assert [name for group in content["groups"] for name in group] == [*suite.entries]
    assert content["notes"] == [*suite.notes]
    for label, written in content.get("entries", {}).items():
        one = suite.entries[label]
        uptrained = {} if one.uptrain is None else {"uptrain": one.uptrain}
        assert written == {"model": one.model, "recipe": one.recipe, "row": one.row, **uptrained}


# --- what is printed agrees with itself and with what is built --------------------------------------------------------


@pytest.mark.parametrize("metric", ["parameters, millions", "non-embedding parameters, millions"])
@pytest.mark.parametrize("suite", ["query", "gqa-mla"])
def test_the_models_have_the_published_sizes(suite, metric):
    which = "total" if metric.startswith("param") else "non_embedding"
    for table in SUITES[suite].published:
        for row, printed in table.printed.items() if table.metric == metric else ():
            digits = len(printed.partition(".")[2])
            millions = getattr(count_parameters(preset(entry(suite, PAPER, row).model)), which) / 1e6
            if suite == "query":
                assert f"{millions:.{digits}f}" == printed, row
            else:  # P3 does not say how it counts; ours are within a tenth
                assert millions == pytest.approx(float(printed), rel=0.1), row


def test_the_caches_of_p3_table_2_are_the_published_ones():
    printed = {row: int(text) for row, text in published("gqa-mla", "P3 Table 2", "KV bytes per token").items()}
    sizes = {row: kv_bytes_per_token(preset(entry("gqa-mla", PAPER, row).model)) for row in printed}
    for row in ("gqa", "skipv1-gqa"):
        assert 2 * sizes[row] == printed[row], "the paper counts 4 bytes an element"
    assert sizes["mla"] == printed["mla"]
    latent = preset(entry("gqa-mla", PAPER, "skipv1-mla").model).kv_lora_rank
    assert sizes["skipv1-mla"] == printed["skipv1-mla"] + latent // 2 * 2, "and the rest of the first layer's latent"


# --- recipes ----------------------------------------------------------------------------------------------------------


def test_at_paper_p3_trains_by_the_presets_recipes():
    for suite in P3:
        for one in SUITES[suite].scales[PAPER].entries.values():
            if one.uptrain is not None:  # P3 appendix B.1
                full = one.full_recipe({})
                assert (full.learning_rate, full.steps) == (1.5e-4, one.uptrain * 40_000)
            elif suite == "gqa-mla":
                assert one.full_recipe({}) == recipe("gpt2-355m")
            else:
                assert one.recipe == {}


@pytest.mark.parametrize("suite", SUITES)
def test_at_paper_training_is_as_long_as_the_settings_say(suite):
    """A setting ends in the length of the cosine, of which a run may see only a part."""
    for table in SUITES[suite].published:
        if table.source != SUITES[suite].source and None in map(number, table.printed.values()):
            continue  # a figure about another model
        for steps in re.findall(r"(\d+)k steps", table.setting):
            for one in SUITES[suite].scales[PAPER].entries.values():
                full = one.full_recipe({})
                if one.row in table.printed:
                    assert (full.schedule_steps or full.steps) == 1000 * int(steps), one.label


def test_the_rates_of_the_nonlinear_query_are_those_of_its_rows():
    """At tiny and small they are the base's own times their share of 3e-3, P2's best."""
    for scale in SCALES:
        base = recipe(entry("query-sweep", scale, "baseline").model)
        unit = 1.0 if scale == PAPER else base.learning_rate / 3e-3
        tried = [one for one in SUITES["query-sweep"].scales[scale].entries.values() if one.row.startswith("Res. GELU")]
        assert len(tried) == 29
        for one in tried:
            peak, minimum, decay = map(float, re.findall(r"[\d.]+(?:e-\d+)?", one.row.partition(",")[2]))
            full = one.full_recipe({})
            assert full.learning_rate == pytest.approx(peak * unit, rel=1e-5)
            assert full.min_learning_rate == pytest.approx(minimum * unit, rel=1e-5)
            assert full.weight_decay == pytest.approx(decay, rel=1e-5)
            rates = f"{full.learning_rate:g} to {full.min_learning_rate:g}, decay {full.weight_decay:g}"
            assert one.label == f"{one.model}, {rates}"
        for rate in ("2.6e-3", "3e-3"):
            full = recipe_at("query", scale, f"Res. GELU, {rate}")
            assert full.learning_rate == pytest.approx(float(rate) * unit, rel=1e-5)
            assert full.min_learning_rate == pytest.approx(3e-5 * unit, rel=1e-5)
            assert full.weight_decay == 2**-5


def test_p3_trains_with_dropout_on_gpt2_alone():
    scales = SUITES["kv-sharing"].scales[PAPER].entries, SUITES["llama-sizes"].scales[PAPER].entries
    assert [{preset(one.model).hidden_dropout for one in entries.values()} for entries in scales] == [{0.2}, {0.0}]
    sizes = {one.model.partition("+")[0] for one in scales[0].values()}
    assert sizes == {f"gpt2-{size.lower()}" for size in re.findall(r"\d+M", SUITES["kv-sharing"].published[0].setting)}


def test_what_a_person_asks_for_goes_over_the_entries():
    own, p1 = recipe_at("query", TINY, "P1 W_Q = Id"), entry("query", TINY, "P1 W_Q = Id").full_recipe({"steps": 80})
    assert p1 == replace(own, steps=80, schedule_steps=480, warmup_steps=own.warmup_steps * 80 // own.steps)
    assert entry("query", TINY, "MLP 4.75").full_recipe({"batch_size": 4}).batch_size == 4
    stability = SUITES["stability"].scales[TINY]
    for asked, learning_rates in (({"learning_rate": 1e-3}, None), ({"weight_decay": 0.1}, None), ({}, (1e-3, 2e-3))):
        with pytest.raises(LeanError, match=r"differ in (learning rate|weight decay); leave it to them"):
            replace(stability, recipe=asked, learning_rates=learning_rates)
    replace(SUITES["kv-sharing"].scales[TINY], recipe={"learning_rate": 1e-3})


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
    for name, suite in SUITES.items():
        runs = sum(map(len, suite.scales[TINY].groups)) * len(suite.scales[TINY].seeds)
        assert f"{runs} runs at tiny" in lines[name]
        assert suite.source in lines[name]
    code, _, err = cli("--suite", "quickstart", "--scale", "small", "--out", "x")
    assert (code, err) == (2, "error: quickstart exists only at tiny, found --scale small\n")


def run(data, out, suite, groups, recipe, seeds=(0, 1)):
    comparison = replace(
        SUITES[suite].scales[TINY],
        groups=groups,
        seeds=seeds,
        recipe=recipe,
        command="leanqkv compare ...",
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


@pytest.mark.slow
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
    assert "not all" not in "".join(markdown(comparison)), "sizes of unequal length are no fault"


@pytest.mark.slow
def test_published_differences_stand_beside_ours_and_losses_do_not(sizes):
    _, comparison = sizes
    table = markdown(comparison)
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


def paired(theirs, ours, baselines=None):
    """As `both_differences` returns them; `ours` by seed."""
    baselines = baselines or ["baseline"] * len(theirs)
    results = [SimpleNamespace(baseline=SimpleNamespace(name=name)) for name in baselines]
    return [(result, number, over_seeds(dict(own))) for result, number, own in zip(results, theirs, ours, strict=True)]


def test_the_order_of_models_is_compared_by_ranks():
    """Spearman's formula for ranks without ties, 1 - 6 sum d^2 / (n (n^2 - 1)); the baseline, 0, is a model too."""
    theirs = [-2.0, -1.5, 0.7, 3.0]
    ours = [{0: -0.1, 1: -0.3}, {0: -0.25, 1: -0.2}, {0: 0.1, 1: -0.05}, {0: 0.4, 1: 0.5}]

    def by_hand(own: list[float]) -> float:
        ranks = [[sorted(of).index(value) for value in of] for of in ([0.0, *theirs], [0.0, *own])]
        return 1 - 6 * sum((a - b) ** 2 for a, b in zip(*ranks, strict=True)) / (5 * 24)

    means, *seeds = [sum(own.values()) / 2 for own in ours], *([own[seed] for own in ours] for seed in (0, 1))
    expected = [f"{by_hand(own):.2f}" for own in (means, *seeds)]
    said = rank_correlation(paired(theirs, ours))
    assert f"5 models' order with the published one (Spearman): {expected[0]}" in said
    assert f"of single seeds {min(expected[1:])} to {max(expected[1:])}" in said
    # Without one baseline for all there is no model more, and the other way round the sign is another one.
    said = rank_correlation(paired(theirs, [{0: -number} for number in theirs], ["a", "a", "b", "b"]))
    assert said.endswith("4 models' order with the published one (Spearman): −1.00.")
    assert rank_correlation(paired(theirs[:2], ours[:2])) == "" == rank_correlation([])


@pytest.mark.slow
def test_page_and_terminal_have_the_papers_too(sizes):
    out, comparison = sizes
    text = " ".join("".join(Page(KIND.write(out).read_text()).text).split())
    shown = terminal(comparison)
    assert max(map(len, shown.splitlines())) <= 100
    for where in (text, " ".join(shown.split())):
        assert "P3 Table 5, validation loss. Published: LLaMA-1B" in where
        assert "−0.011 (−0.40%)" in where
    assert "suite llama-sizes at scale tiny" in text
    assert SUITES["llama-sizes"].scales[TINY].notes[0] in text
    assert "Difference to its own baseline" in text
    assert "Beside P3 Figure 5(a)" in text and "Rank correlation of the 3 models" not in text


@pytest.mark.slow
def test_figures_without_numbers_say_what_their_text_says(data, tmp_path):
    groups = (SUITES["skip-ratio-gpt2"].scales[TINY].groups[0][:3],)
    comparison = run(data, tmp_path / "out", "skip-ratio-gpt2", groups, {"steps": 2, "batch_size": 2}, (0,))
    table = markdown(comparison)
    assert "P3 Figure 9(a), validation loss. Published: GPT-2 355M" in table
    assert re.search(r"\| `tiny\+skipv1` \| lowest \| – \| [+−]\d\.\d{4} \([+−]\d\.\d\d%\) \|", table)
    assert "| `3/4` | above 1/2 | – | not run |" in table


@pytest.mark.slow
def test_divergence_is_caught_and_reported(data, tmp_path):
    model = f"tiny{SHAPE}"
    huge = {"learning_rate": 1e18}
    groups = (
        (Entry(model), Entry(f"{model}+identity-query", "identity, calm")),
        (Entry(model, "huge rate", huge), Entry(f"{model}+identity-query", "identity, huge rate", huge)),
    )
    comparison = run(data, tmp_path / "out", "stability", groups, {"steps": 8, "batch_size": 2})
    table = markdown(comparison)
    heading = "Which runs diverged. Here: scale tiny"
    rows = [line for line in table.partition(heading)[2].splitlines() if line.startswith("| `")]
    outcomes = {cells[1].strip("` "): cells[2:8] for cells in (line.split("|") for line in rows)}
    assert [*outcomes] == [model, "identity, calm", "huge rate", "identity, huge rate"]
    assert outcomes[model][3].strip() == "finished (2 seeds)"
    assert outcomes["huge rate"][0].strip() == "1e+18"
    assert re.fullmatch(r"diverged at step \d( \(2 seeds\)|<br>diverged at step \d)", outcomes["huge rate"][3].strip())
    assert "huge rate and identity, huge rate diverged." in reading(comparison)
    assert "to report yet" not in reading(comparison)
    text = "".join(Page(KIND.write(tmp_path / "out").read_text()).text)
    for where in (text, terminal(comparison), table):
        assert "diverged at step" in where
        assert SUITES["stability"].claims[0] in " ".join(where.split())


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
