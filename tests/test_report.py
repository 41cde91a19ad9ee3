"""The report: its numbers, what it says of runs that are missing or diverged, and that the page stands alone."""

import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from comparison_record import ARCHITECTURES, build, diverge, edit, folders, record, save
from pages import Page
from rich.console import Console

from leanqkv.compare.records import load_comparison
from leanqkv.compare.statistics import Band
from leanqkv.report import figures
from leanqkv.report.comparison import markdown, reading, remarks, terminal_table, warnings
from leanqkv.report.comparison_page import KIND
from leanqkv.report.text import percent


def terminal(directory: Path) -> list[str]:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(terminal_table(load_comparison(directory)))
    return capture.get().splitlines()


def markdown_rows(directory: Path) -> dict[str, list[str]]:
    lines = [line for line in markdown(load_comparison(directory)).splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row[1:] for row in rows}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("finished"))


@pytest.fixture(scope="module")
def page(finished: Path) -> str:
    return KIND.write(finished).read_text()


def test_markdown_holds_the_numbers(finished: Path) -> None:
    rows = markdown_rows(finished)
    assert list(rows) == list(ARCHITECTURES)
    assert rows["tiny"] == ["baseline", "3.9050 (0.0071)", "2,048 (100%)", "1.33M (794k)", "0.003", "26,098"]
    # Differences -0.0210 and -0.0212: mean -0.0211, half-width 12.706 * 0.0001 = 0.0013.
    assert rows["tiny+skipv1"][:3] == ["**−0.0211 ± 0.0013**", "3.8839 (0.0069)", "1,664 (81%)"]
    assert rows["tiny+mqa"][2] == "512 (25%)"
    assert rows["tiny+mqa"][0] == "**+0.0514 ± 0.0051**"
    # -0.004 and +0.006: half-width 12.706 * 0.005 = 0.0635, not clear and so not bold.
    assert rows["tiny+identity-query"][0] == "+0.0010 ± 0.0635"


def test_shares_are_rounded_to_whole_percents() -> None:
    assert [percent(part, 3) for part in (0, 1, 2, 4)] == ["0%", "33%", "67%", "133%"]
    assert percent(None, 3) == percent(1, 0) == "–"


def test_terminal_table_fits_100_columns_with_the_same_numbers(finished: Path) -> None:
    lines = terminal(finished)
    assert max(map(len, lines)) <= 100
    assert not any("…" in line for line in lines)
    row = re.compile(r"(tiny|\+)\S*\s+(\W\d|baseline)")
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if row.match(line)}
    assert next(iter(rows)) == "tiny"
    assert rows["+skipv1"] == "−0.0211 ± 0.0013 3.8839 (0.0069) 1,664 (81%) 1.31M (770k) 0.003 25,714"


def test_large_models_fit_100_columns_too(tmp_path: Path) -> None:
    names = ["gpt2-124m", "gpt2-124m+nonlinear-query:layers=0,3", "gpt2-124m+identity-query+skipv1"]
    directory = build(tmp_path, grid=False)
    shutil.rmtree(directory / "runs")
    edit(directory / "compare.json", groups=[names])
    for place, name in enumerate(names):
        for seed in (0, 1):
            run = record("tiny", seed, 10.25 + 0.2 * place * seed, rate=1.25e-4) | {
                "name": name,
                "parameters": {"total": 124_439_808, "non_embedding": 123_653_376},
                "kv_bytes_per_token": {"bfloat16": 136_864, "float32": 273_728},
                "tokens_per_second": 1_234_567.0,
            }
            save(directory, run)
    lines = terminal(directory)
    assert max(map(len, lines)) <= 100
    assert not any("…" in line for line in lines)
    row = next(line.split() for line in lines if line.startswith("gpt2-124m "))
    assert row[3:7] == ["136,864", "(100%)", "124M", "(124M)"]
    assert row[-2:] == ["0.000125", "1,234,567"]


def test_reading_says_which_differences_are_clear(finished: Path) -> None:
    said = reading(load_comparison(finished))
    lower, higher, unclear = said.split("; ")
    assert "over 2 seeds" in lower
    assert "clearly lower for tiny+skipv1 (−0.0211 with 81% of the KV cache)" in lower
    assert "tiny+nonlinear-query (−0.0302)" in lower
    assert higher == "clearly higher for tiny+mqa (+0.0514 with 25% of the KV cache)"
    assert unclear.startswith("not clearly different for tiny+identity-query (+0.0010) and tiny+identity-query+skipv1")
    caption = terminal_table(load_comparison(finished)).caption
    assert said in str(caption)
    assert said in markdown(load_comparison(finished))


def test_baseline_comes_first_wherever_it_is_listed(finished: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(finished, tmp_path / "copy"))
    [names] = json.loads((directory / "compare.json").read_text())["groups"]
    edit(directory / "compare.json", groups=[["tiny+mqa", *(name for name in names if name != "tiny+mqa")]])
    rows = markdown_rows(directory)
    assert next(iter(rows)) == "tiny+mqa"
    assert rows["tiny"][2] == "2,048 (400%)"
    assert rows["tiny"][0] == "**−0.0514 ± 0.0051**"


@pytest.mark.slow
def test_missing_and_diverged_runs_are_shown(finished: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(finished, tmp_path / "copy"))
    save(directory, diverge(record("tiny+mqa", 1, 4.0), 340))
    for folder in (*folders(directory, "tiny+skipv1", 1), *folders(directory, "tiny+nonlinear-query", 0)):
        shutil.rmtree(folder)
    for seed in (0, 1):
        save(directory, record("tiny+identity-query", seed, 4.0) | {"final": None})
    rows = markdown_rows(directory)
    assert rows["tiny+skipv1"][:2] == ["−0.0210<br>1 seed", "3.8790<br>1 missing"]
    assert rows["tiny+mqa"][:2] == ["+0.0510<br>1 seed", "3.9510<br>1 diverged"]
    assert rows["tiny+identity-query"][:2] == ["–", "2 missing"]
    assert rows["tiny+identity-query"][5] == "–"
    listed = remarks(load_comparison(directory))
    assert "tiny+identity-query: no finished run yet for seeds 0 and 1." in listed
    assert "tiny+mqa, seed 1: diverged at step 340 (loss is nan); left out of every mean." in listed
    assert "tiny+mqa, learning rate 0.01 of the search: diverged at step 120." in listed
    text = "".join(Page(KIND.write(directory).read_text()).text)
    assert "8 of 12 final runs are there" in text
    assert all(line in text for line in listed)
    assert "tiny+identity-query cannot be compared yet" in text


def test_a_loss_that_is_not_a_number_counts_as_diverged(finished: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(finished, tmp_path / "copy"))
    save(directory, record("tiny+mqa", 1, 4.0) | {"final": {"validation_loss": math.nan, "perplexity": math.nan}})
    assert markdown_rows(directory)["tiny+mqa"][1] == "3.9510<br>1 diverged"


def test_nothing_but_the_plan_still_makes_a_report(tmp_path: Path) -> None:
    directory = build(tmp_path)
    shutil.rmtree(directory / "runs")
    plan = json.loads((directory / "compare.json").read_text())
    del plan["chosen_learning_rate"]  # not known before the search is done
    (directory / "compare.json").write_text(json.dumps(plan))
    page = Page(KIND.write(directory).read_text())
    assert page.count("svg") == 0
    assert "There is no difference to tiny to report yet." in "".join(page.text)
    assert set(markdown_rows(directory)["tiny"]) == {"–", "2 missing", "baseline"}


def test_one_seed_has_no_interval(finished: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(finished, tmp_path / "copy"))
    edit(directory / "compare.json", seeds=[0])
    assert markdown_rows(directory)["tiny+skipv1"][:2] == ["−0.0210", "3.8790"]
    assert "known from one seed only, too few to judge" in reading(load_comparison(directory))
    shown = markdown(load_comparison(directory))
    assert "clearly" not in shown.lower() and "±" not in shown
    text = "".join(Page(KIND.write(directory).read_text()).text)
    assert "±" not in text and "95% intervals" not in text
    assert "There are no bands, because one seed gives no interval." in text
    assert "A difference known from one seed has no interval." in text


def test_what_weakens_a_comparison_is_said_beside_its_table(finished: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(finished, tmp_path / "copy"))
    two_seeds = "Fewer than 3 seeds: intervals are wide, and their width is itself uncertain."
    decay = "Recipes differ in the weight decay (0.03125, 0.1). Part of a difference may come from them."
    assert warnings(load_comparison(directory)) == [decay, two_seeds]
    page = KIND.write(directory).read_text()
    assert page.index("</table>") < page.index(two_seeds) < page.index("<h2", page.index("</table>"))
    assert two_seeds in markdown(load_comparison(directory))

    plan = json.loads((directory / "compare.json").read_text())
    edit(directory / "compare.json", seeds=[0, 1, 3], grid=None)
    for name in ARCHITECTURES:
        save(directory, record(name, 3, 3.9))
    unsearched, differ = warnings(load_comparison(directory))
    assert differ == decay
    assert unsearched == "The learning rate (0.003) was not searched. Another may favor another model."

    for folder in (directory / "runs").glob("final-tiny+mqa-*"):
        changed = json.loads((folder / "record.json").read_text())
        changed["recipe"] |= {"learning_rate": 1e-3, "min_learning_rate": 1e-5}
        changed["batch_plan"]["evaluation_sequences"] = 63
        (folder / "record.json").write_text(json.dumps(changed))
    differ, recipes, sequences = warnings(load_comparison(directory))
    assert recipes == (
        "Recipes differ in the weight decay (0.03125, 0.1) and the share of its peak that the learning rate falls to "
        "(0.01, 0.1). Part of a difference may come from them."
    )
    assert differ.startswith("Learning rates differ (0.001 and 0.003); none was searched.")
    assert sequences.startswith("Fewer than 64 evaluation sequences: 63.")
    edit(directory / "compare.json", grid=plan["grid"])
    assert "each is the best of its search" in warnings(load_comparison(directory))[0]
    # A model of another size has a recipe of its own; it is compared within its own group.
    alone = ["tiny+mqa", "tiny+nonlinear-query"]
    others = [name for name in ARCHITECTURES if name not in alone]
    edit(directory / "compare.json", groups=[others, *([name] for name in alone)])
    assert warnings(load_comparison(directory)) == [sequences]


def test_the_last_differences_of_the_figure_are_those_of_the_table(finished: Path, monkeypatch: Any) -> None:
    drawn: list[figures.Series] = []

    def keep(name: str, series: list[figures.Series], measure: Any) -> figures.Drawing:
        drawn.extend(series)
        return figures.Drawing("", "")

    monkeypatch.setattr(figures, "difference_curves", keep)
    KIND.write(finished)
    rows = markdown_rows(finished)
    assert len(drawn) == len(ARCHITECTURES) - 1
    for series in drawn:
        end = series.points[-1]
        shown = f"{end.mean:+.4f} ± {(end.high - end.low) / 2:.4f}".replace("-", "−")
        assert rows[series.label][0].strip("*") == shown


@pytest.mark.parametrize(("evaluations", "left_out"), [(1, 0), (2, 0), (3, 0), (4, 0), (8, 1), (13, 2), (100, 19)])
def test_the_axes_of_the_curves_hold_most_evaluations(evaluations: int, left_out: int) -> None:
    """The first fifth of the steps is left out, but never more than a quarter of the evaluations."""
    points = [Band(step, *3 * (8 - step / evaluations,)) for step in range(1, evaluations + 1)]
    series = figures.Series("tiny", 0, points)
    assert bool(figures.edge_note([series])) == (left_out > 0)
    assert len(series.settled) == evaluations - left_out


def test_a_figure_of_runs_under_way_says_what_its_bands_are(finished: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(finished, tmp_path / "copy"))
    for name in ARCHITECTURES:
        for folder in (*folders(directory, name, 0), *folders(directory, name, 1)):
            edit(folder / "record.json", final=None)
    shutil.rmtree(*folders(directory, "tiny+mqa", 1))
    text = "".join(Page(KIND.write(directory).read_text()).text)
    assert "The bands are 95% intervals of the difference to tiny, over seeds. One seed gives none: tiny+mqa." in text


def test_the_command_wraps_and_the_difference_is_the_second_column(page: str) -> None:
    assert re.search(r"pre \{[^}]*white-space: pre-wrap; overflow-wrap: anywhere", page)
    headers = re.findall(r'<th scope="col">(.*?)</th>', page, flags=re.DOTALL)
    assert headers[:2] == ["model", "difference to<br>baseline, 95%"]


def test_runs_that_cannot_be_paired_are_named(finished: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(finished, tmp_path / "copy"))
    [folder] = folders(directory, "tiny+mqa", 1)
    edit(folder / "record.json", batch_plan={"sha256": "f" * 64, "evaluation_sequences": 256}, tokens=1)
    listed = warnings(load_comparison(directory))
    assert listed[0] == "Seed 1: the runs did not all see the same batches; their differences are not paired."
    assert listed[0] in markdown(load_comparison(directory))
    assert listed[0] in " ".join(" ".join(terminal(directory)).split())
    assert "The runs were not all trained on the same number of tokens." in listed
    assert not any("Seed 0" in line or "same data" in line for line in listed)


@pytest.mark.slow
def test_the_same_records_give_the_same_bytes(finished: Path, page: str, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(finished, tmp_path / "elsewhere"))
    with matplotlib.rc_context({"font.size": 30, "axes.linewidth": 9, "svg.fonttype": "path"}):
        again = KIND.write(directory)
    assert again == directory / "report.html"
    assert again.read_bytes() == page.encode()
    assert sorted(file.name for file in directory.iterdir()) == ["compare.json", "report.html", "runs", "table.md"]


def test_without_matplotlib_there_is_a_table_and_no_page(
    finished: Path, tmp_path: Path, cli: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Path(shutil.copytree(finished, tmp_path / "copy"))
    for file in ("report.html", "table.md"):
        (directory / file).unlink(missing_ok=True)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert KIND.write(directory) is None
    assert (directory / "table.md").exists() and not (directory / "report.html").exists()
    code, _, errors = cli("report", str(directory))
    assert code == 2 and "pip install 'leanqkv[report]'" in errors


def test_page_is_well_formed_and_stands_alone(page: str) -> None:
    parsed = Page(page)
    assert page.startswith("<!DOCTYPE html>")
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in parsed.tags
    assert not {"link", "script", "img", "iframe", "object", "image"} & {tag for tag, _ in parsed.tags}
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(|href=")#([^)"]+)', page)) <= set(ids)
    assert {attributes["aria-labelledby"] for _, attributes in parsed.tags if "aria-labelledby" in attributes} <= set(
        ids
    )


def test_page_has_every_figure_twice_with_a_caption_and_a_label(page: str) -> None:
    parsed = Page(page)
    assert parsed.count("figure") == parsed.count("figcaption") == 4
    drawings = [attributes for tag, attributes in parsed.tags if tag == "svg"]
    assert len(drawings) == 8
    assert all(drawing["role"] == "img" and drawing["aria-label"] for drawing in drawings)
    widths = [float(drawing["viewbox"].split()[2]) for drawing in drawings]
    assert widths == [900, 360] * 4
    assert all(attributes.get("scope") in ("col", "row") for tag, attributes in parsed.tags if tag == "th")


def test_page_without_a_search_has_three_figures(tmp_path: Path) -> None:
    page = KIND.write(build(tmp_path, grid=False)).read_text()
    assert Page(page).count("figure") == 3
    assert "The learning rate search" not in page


def test_figures_follow_the_theme(page: str) -> None:
    light, dark = page.split("@media (prefers-color-scheme: dark)")
    dark = dark[: dark.index("\n}\n")]
    used = set(re.findall(r"var\((--[\w-]+)\)", page))
    assert {f"--series-{place}" for place in range(len(ARCHITECTURES))} <= used
    for name in used:
        assert f"{name}: #" in light, f"{name} has no value in the light theme"
        assert f"{name}: #" in dark, f"{name} has no value in the dark theme"
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert all("currentColor" in drawing and not re.search(r":\s*#[0-9a-f]{3}", drawing) for drawing in drawings)


def test_page_says_how_it_was_measured(page: str) -> None:
    text = " ".join("".join(Page(page).text).split())
    for fact in (
        "5f2d" * 16,
        "seed 1: " + "1c7e" * 16,
        "600 steps of 16 sequences of 128 tokens: 1,228,800 tokens",
        "the one of 0.001, 0.003 and 0.01 with the lowest validation loss on seed 2, which no run in the table uses",
        "torch 2.11.0",
        "Example CPU @ 2.60GHz",
        "0123456789abcdef0123456789abcdef01234567",
        "leanqkv compare tiny tiny+skipv1",
        "The same for all: warmup steps 60, schedule steps none, beta1 0.9, beta2 0.95, max grad norm 1.",
        "tiny+nonlinear-query 0.003 0.0003 0.03125",
        "A size for trying things out; <not> the papers'.",
        "tiny+skipv1 1 3.8888 48.85 −0.0212 25,764 0.9",
    ):
        assert fact in text, fact


def test_differences_by_length_are_in_the_table_and_on_the_page(tmp_path):
    """Where an eighth, a quarter and a half of the training were evaluated; elsewhere the table is left out."""
    directory = build(tmp_path, grid=False)
    assert "by length" not in markdown(load_comparison(directory))
    for file in directory.glob("runs/*/record.json"):
        run = json.loads(file.read_text())
        gap = 0.02 if "skipv1" in run["name"] else 0.0
        losses = {75: 5.0 - 3 * gap, 150: 4.5 - 2 * gap, 300: 4.2 - gap, 600: 4.0 + 0.0 * gap}
        losses = {step: loss - 0.001 * run["seed"] * bool(gap) for step, loss in losses.items()}
        edit(file, evaluations=[{"step": step, "loss": loss} for step, loss in losses.items()])
    table = markdown(load_comparison(directory))
    assert (
        "| model | 154k tokens | 307k tokens | 614k tokens | 1.23M tokens | per doubling | 12.3M tokens, predicted |"
        in table
    )
    row = next(line for line in table.splitlines() if line.startswith("| `tiny+skipv1` | **−0.0605"))
    assert "| **+0.0200 ± 0.0000** |" in row and "+0.0659 ± 0.0064" in row
    page = KIND.write(directory).read_text()
    assert "Differences by length of training" in page and "a run that ends there has another loss" in page
