"""Benchmarks that go on from comparisons: what can be copied, SkipV1 from scratch or converted, several sizes."""

import json
import math
import random
import shutil
import statistics
import sys
from collections import Counter
from pathlib import Path

import by_scale
import claims
import copying
import harness
import pytest
import scratch_or_converted
import time_to_loss
import torch
import two_recipes
from corpus import SHAPE, prepare

from leanqkv import LeanForCausalLM
from leanqkv.compare.comparison import run_comparison
from leanqkv.compare.records import load_comparison
from leanqkv.compare.suite import Comparison, Entry
from leanqkv.data.batches import collate
from leanqkv.files import read_json
from leanqkv.report.text import with_interval

pytestmark = pytest.mark.slow
NAMES = (f"tiny{SHAPE}", f"tiny{SHAPE}+skipv1")


def by_loops(inputs, targets, losses):
    """Means by kind, position by position."""
    where = []
    for row in range(len(inputs)):
        seen = set()
        for position in range(len(inputs[row])):
            pair = (int(inputs[row][position]), int(targets[row][position]))
            where.append((pair, pair in seen, float(losses[row][position])))
            seen.add(pair)
    times = Counter(pair for pair, copied, _ in where if copied)
    other = Counter(pair for pair, copied, _ in where if not copied)
    means = {"copied": 0.0, "other": 0.0, "same pairs at first": 0.0}
    for pair, copied, loss in where:
        means["copied" if copied else "other"] += loss / (times if copied else other).total()
        if not copied:
            means["same pairs at first"] += loss * times[pair] / other[pair] / times.total()
    return means


def test_kinds_of_tokens_are_those_of_loops():
    draw = random.Random(3)
    tokens = torch.tensor([[draw.choice((0, 1, 2, 3, 9)) for _ in range(13)] for _ in range(6)])
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    losses = torch.rand(inputs.shape, dtype=torch.float64, generator=torch.manual_seed(0))
    weights = copying.weights_of_kinds(inputs, targets)
    assert tuple(weights) == copying.KINDS
    found = {kind: float((weight * losses).sum()) for kind, weight in weights.items()}
    assert found == pytest.approx(by_loops(inputs, targets, losses), abs=1e-14)
    assert 0.1 < copying.can_be_copied(inputs, targets).double().mean() < 0.9


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """A finished comparison of two seeds, its directory in the one of its corpus; and its data."""
    directory = tmp_path_factory.mktemp("comparison")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEANQKV_CACHE", str(directory / "cache"))
        patch.setattr("leanqkv.compare.comparison.available_cores", lambda: 1)
        data = prepare(directory)
        asked = Comparison(
            title="Two models",
            groups=(tuple(map(Entry, NAMES)),),
            seeds=(0, 1),
            recipe={"steps": 8, "batch_size": 4},
            command="leanqkv compare ...",
            evaluation_sequences=8,
            evaluate_every=4,
        )
        run_comparison(asked, data, directory / "out", precision="fp32", device="cpu", jobs=1)
        yield directory / "out", data


@pytest.fixture
def out(comparison, tmp_path):
    return Path(shutil.copytree(comparison[0], tmp_path / "out"))


@pytest.fixture
def run(comparison, out, monkeypatch, capsys):
    """Measures by a benchmark's command line; returns its record and what it printed."""
    file, text = out.parent / "record.json", str(comparison[0].parent / "corpus.txt")

    def measure(benchmark, *options):
        monkeypatch.setattr(sys, "argv", ["benchmark.py", str(out), "--out", str(file), "--data", text, *options])
        harness.run(benchmark.command_line(), benchmark.measure, benchmark.tables)
        return read_json(file), capsys.readouterr().out

    return measure


@pytest.fixture
def refused(run, capsys):
    """One line and exit code 2."""

    def measure(benchmark, *options):
        with pytest.raises(SystemExit) as end:
            run(benchmark, *options)
        assert end.value.code == 2
        return capsys.readouterr().err

    return measure


def test_losses_of_finished_models_are_split(comparison, out, run, refused):
    """Seeds measured one after another give the record of both; it is refused for other text or without models."""
    options, data = ("--sequences", "5"), comparison[1]
    record, _ = run(copying, *options)
    assert [(row["model"], row["seed"]) for row in record["rows"]] == [(name, s) for name in NAMES for s in (0, 1)]
    starts = [(data.validation_tokens - 33) * part // 4 for part in range(5)]
    for row in record["rows"]:
        model = LeanForCausalLM.from_pretrained(out / "runs" / row["run"]).eval()
        batch = collate(data.validation(), starts, 32)
        with torch.no_grad():
            logits = model(batch["input_ids"]).logits.double()
        losses = -logits.log_softmax(-1).gather(-1, batch["shift_labels"][..., None])[..., 0]
        assert row["loss"] == pytest.approx(by_loops(batch["input_ids"], batch["shift_labels"], losses), abs=1e-5)
    gap = {s: record["rows"][2 + s]["loss"]["other"] - record["rows"][s]["loss"]["other"] for s in (0, 1)}
    found = copying.differences(record)
    assert list(found) == [NAMES[1]] and found[NAMES[1]]["other"].by_seed == pytest.approx(gap)

    for weights in out.glob("runs/*-seed0/model.safetensors"):  # measured before, not kept
        weights.unlink()
    again, printed = run(copying, *options)
    assert again["rows"] == record["rows"]
    assert f"| `{NAMES[1]}` |" in printed and "where they cannot" in printed
    assert "is of other text, models or training" in refused(copying, "--sequences", "4")
    assert "--sequences must be at least 1, found 0" in refused(copying, "--sequences", "0")
    (out.parent / "record.json").write_text(json.dumps(again | {"steps": again["steps"] + 1}))
    assert "is of other text, models or training" in refused(copying, *options)
    (out.parent / "record.json").write_text(json.dumps(again | {"name": "decode"}))
    assert "is no record of this benchmark" in refused(copying, *options)
    (out.parent / "record.json").unlink()
    for weights in out.glob("runs/*/model.safetensors"):
        weights.unlink()
    assert "holds no trained models" in refused(copying, *options)


@pytest.mark.exhaustive
def test_the_baseline_is_converted_with_equal_tokens(out, run, refused, cli, monkeypatch):
    """Seeds measured one after another have one rate; every number is that of the commands that it names."""

    def in_this_process(commands, at_once):
        lines = [[*map(str, command.arguments), "--out", str(command.out)] for command in commands if not command.done]
        assert [cli(*line)[0] for line in lines] == [0] * len(lines)

    in_processes = scratch_or_converted.run_commands
    monkeypatch.setattr(scratch_or_converted, "run_commands", in_this_process)
    monkeypatch.setattr(scratch_or_converted, "TOKENS", 200)  # of 128 a step: two steps less
    first, _ = run(scratch_or_converted, "--seeds", "0", "--share", "0.5", "--rates", "1e-3", "1e-2", "--jobs", "1")
    assert [row["seed"] for row in first["rows"]] == [0] and len(first["search"]) == 2
    record, printed = run(scratch_or_converted, "--share", "0.5", "--jobs", "1")
    assert record["search"] == first["search"] and record["rows"][0] == first["rows"][0]
    best = min(first["search"], key=lambda found: found["loss"])["learning_rate"]
    for row in record["rows"]:
        seed, finals = (
            row["seed"],
            {run.name: run.loss for run in load_comparison(out).finals if run.seed == row["seed"]},
        )
        assert row["baseline"] == finals[NAMES[0]] and row["skipv1"] == finals[NAMES[1]]
        source = read_json(out / "converted-0.5" / f"baseline-{seed}" / "record.json")
        uptrained = read_json(out / "converted-0.5" / f"uptrained-{seed}-{best:g}" / "record.json")
        assert (source["recipe"]["steps"], uptrained["recipe"]["steps"]) == (4, 2)
        assert row["tokens"] == 6 * 128 + 200 and row["source"] == source["evaluations"][-1]["loss"]
        control = read_json(out / "converted-0.5" / f"control-{seed}-{best:g}" / "record.json")
        assert [found["loss"] for found in control["evaluations"]] == [row["source"], row["control"]]
        assert control["recipe"] == uptrained["recipe"] and control["name"] != uptrained["name"]
        assert (row["converted"], row["uptrained"]) == tuple(found["loss"] for found in uptrained["evaluations"])
        assert source["batch_plan"]["evaluation_sequences"] == uptrained["batch_plan"]["evaluation_sequences"] == 8
    diverged = [record["rows"][0] | {"uptrained": None}, record["rows"][1]]
    assert "| – |" in scratch_or_converted.tables(record | {"rows": [diverged[0]]})
    alone = scratch_or_converted.tables(record | {"rows": diverged})
    assert f"{record['rows'][1]['uptrained'] - record['rows'][1]['skipv1']:+.4f}".replace("-", "−") in alone
    gap = statistics.mean(row["uptrained"] - row["skipv1"] for row in record["rows"])
    line = next(line for line in printed.splitlines() if "uptrained for the last 50%" in line)
    assert f"{gap:+.4f}".replace("-", "−") in line
    assert "has no other seed" in refused(scratch_or_converted)
    (out.parent / "record.json").write_text(json.dumps(first))
    for name in ("baseline-1", f"uptrained-1-{best:g}", f"control-1-{best:g}"):
        file = out / "converted-0.5" / name / "record.json"
        whole = read_json(file)
        file.write_text(json.dumps(whole | {"data": whole["data"] | {"sha256": "another"}}))
        found = refused(scratch_or_converted, "--share", "0.5")
        assert "the runs of seed 1 in" in found and "differ in text" in found
        file.write_text(json.dumps(whole))
    assert "of another comparison or share" in refused(scratch_or_converted, "--share", "0.75")
    assert "leaves no uptraining" in refused(scratch_or_converted, "--share", "0.2")
    monkeypatch.setattr(scratch_or_converted, "run_commands", in_processes)
    shutil.rmtree(out / "converted-0.5" / "baseline-0")
    (out.parent / "record.json").unlink()
    assert "baseline-0 failed; see" in refused(scratch_or_converted, "--data", "nowhere.txt", "--share", "0.5")


def rescaled(source, target, shift, *, parameters=1, tokens=1, **recipe):
    """A copy of a comparison with so many times the parameters and tokens, another recipe, and other losses."""
    shutil.copytree(source, target)
    for file in target.glob("runs/*/record.json"):
        record = read_json(file)
        record["parameters"]["total"] *= parameters
        record["tokens"] *= tokens
        record["recipe"] |= recipe
        record["final"]["validation_loss"] += shift.get((record["name"], record["seed"]), 0.0)
        file.write_text(json.dumps(record))
    return target


def reader(benchmark, tmp_path, monkeypatch, capsys):
    """Two functions that start a benchmark on comparisons: for its record and output, and for its error."""

    def run(*line):
        out = tmp_path / "record.json"
        monkeypatch.setattr(sys, "argv", [f"{benchmark.__name__}.py", *map(str, line), "--out", str(out)])
        harness.run(benchmark.command_line(), benchmark.measure, benchmark.tables)
        return read_json(out), capsys.readouterr().out

    def refused(*line):
        with pytest.raises(SystemExit) as end:
            run(*line)
        assert end.value.code == 2
        return capsys.readouterr().err

    return run, refused


def test_differences_of_several_scales(comparison, tmp_path, monkeypatch, capsys):
    """The slope is that of a line for each seed; comparisons that are no such series are refused in one line."""
    run, refused = reader(by_scale, tmp_path, monkeypatch, capsys)

    one = comparison[0]
    losses = {2: {(NAMES[1], 0): -0.03, (NAMES[1], 1): -0.05}, 8: {(NAMES[1], 0): 0.01, (NAMES[0], 1): 0.02}}
    double, eight = (
        rescaled(one, tmp_path / f"size-{times}", shift, parameters=times, tokens=times)
        for times, shift in losses.items()
    )
    for along, series in {
        "parameters": (eight, one, double),
        "tokens": (one, *(rescaled(one, tmp_path / f"length-{n}", shift, tokens=n) for n, shift in losses.items())),
    }.items():
        record, printed = run(*series, "--along", along)
        assert [scale[along] / record["scales"][0][along] for scale in record["scales"]] == [1, 2, 8]
        first = load_comparison(one).results[1].difference
        assert by_scale.differences(record, "skipv1")[0] == first
        # Least squares through 0, 1 and 3 doublings: the weights of the three points are −4, −1 and 5, over 14.
        slope, further = by_scale.lines(record, "skipv1")
        slopes = {0: (0.03 + 5 * 0.01) / 14, 1: (0.05 - 5 * 0.02) / 14}
        assert slope.by_seed == pytest.approx(slopes, abs=1e-12)
        # From the middle of the points, 4 / 3 doublings, to ten times the last.
        middle = {
            seed: own + added / 3 for (seed, own), added in zip(first.by_seed.items(), (-0.02, -0.07), strict=True)
        }
        ahead = 3 - 4 / 3 + math.log2(10)
        assert further.by_seed == pytest.approx(
            {seed: middle[seed] + ahead * slopes[seed] for seed in slopes}, abs=1e-12
        )
        assert f"per doubling of the {along}" in printed and f"{along}, predicted" in printed
        assert printed.splitlines()[-1].endswith(f"| {with_interval(slope)} | {with_interval(further)} |")

    assert "predicted" not in run(one, double)[1]
    assert "at least two" in refused(one)
    same = rescaled(one, tmp_path / "same", {})
    assert "equally many parameters" in refused(one, same)
    assert "equally many tokens" in refused(one, same, "--along", "tokens")
    assert "lengths of training of one baseline" in refused(one, double, "--along", "tokens")
    records = list(eight.glob("runs/*/record.json"))
    for file in records:
        file.write_text(json.dumps(read_json(file) | {"tokens": 1000}))
    assert "tokens per parameter differ: " in refused(one, eight)
    next(file for file in records if file.parent.name.endswith("seed1")).unlink()
    assert "seed 1, is missing" in refused(one, eight)


def test_what_a_mechanism_and_what_a_recipe_gives(comparison, tmp_path, monkeypatch, capsys):
    """Every pair is of the runs that it names; comparisons that are not of two recipes are refused in one line."""
    run, refused = reader(two_recipes, tmp_path, monkeypatch, capsys)

    one = comparison[0]
    shift = {(NAMES[0], 0): -0.1, (NAMES[0], 1): -0.1, (NAMES[1], 0): -0.04, (NAMES[1], 1): -0.06}
    deeper = rescaled(one, tmp_path / "deeper", shift, min_learning_rate=1e-5)
    record, printed = run(one, deeper)
    assert [list(recipe) for recipe in record["recipes"]] == [["min_learning_rate"]] * 2
    own = load_comparison(one).results[1].difference.by_seed
    for pair, added in {(0, 0): (0, 0), (1, 1): (0.06, 0.04), (1, 0): (-0.04, -0.06)}.items():
        found = two_recipes.difference(record, NAMES[1], *pair).by_seed
        assert found == pytest.approx({seed: own[seed] + added[seed] for seed in own}, abs=1e-12)
    baseline, skipv1 = printed.splitlines()[-2:]
    assert baseline == f"| `{NAMES[0]}` | – | – | **−0.1000 ± 0.0000** |"
    assert skipv1.count("±") == 3

    assert "two comparisons" in refused(one)
    assert "have one recipe" in refused(one, one)
    assert "differ in tokens" in refused(one, rescaled(one, tmp_path / "longer", {}, tokens=2))
    for file in deeper.glob("runs/*/record.json"):
        file.write_text(json.dumps(read_json(file) | {"seed": read_json(file)["seed"] + 2}))
    (deeper / "compare.json").write_text(json.dumps(read_json(deeper / "compare.json") | {"seeds": [2, 3]}))
    assert "no finished seed in common" in refused(one, deeper)


def test_claims_are_tested_once_and_corrected_for_their_number(comparison, tmp_path, monkeypatch, capsys):
    """Holm's correction is that of its definition; what is missing is refused in one line."""
    run, refused = reader(claims, tmp_path, monkeypatch, capsys)
    draw = random.Random(0)
    for _ in range(50):
        values = [draw.random() ** 3 for _ in range(draw.randrange(1, 8))]
        # p of rank k, times those that are left, and at least that of every smaller p.
        ordered = sorted(values)
        steps = [min(1.0, (len(values) - k) * p) for k, p in enumerate(ordered)]
        expected = [max(steps[: ordered.index(p) + 1]) for p in values]
        assert claims.holm(values) == pytest.approx(expected, abs=1e-15)
    assert [claims.verdict(mean, p) for mean, p in ((-1, 0.04), (1, 0.04), (-1, 0.05))] == [
        "**confirmed**",
        "**contradicted**",
        "open",
    ]
    one = comparison[0]
    monkeypatch.setattr(claims, "CLAIMS", [claims.Claim("It is lower", one.name, NAMES[1], "queries")])
    record, printed = run(one.parent)
    expected = load_comparison(one).results[1].difference
    assert record["rows"][0]["differences"] == {str(seed): value for seed, value in expected.by_seed.items()}
    p = claims.p_value(record["rows"][0]["differences"])
    assert p == pytest.approx(2 / math.pi * math.atan(1 / abs(t_of(expected))), rel=1e-9)  # with two seeds
    assert f"| {p:.2g} | {p:.2g} | [queries](results-queries.md) |" in printed
    monkeypatch.setattr(claims, "CLAIMS", [claims.Claim("It is lower", one.name, "tiny+mqa", "queries")])
    assert "has no finished pair of tiny+mqa" in refused(one.parent)
    assert "name the directory" in refused()


def t_of(difference):
    """Student's t of two differences."""
    first, second = difference.by_seed.values()
    return (first + second) / (first - second)


def test_tokens_to_a_loss(comparison, tmp_path, monkeypatch, capsys):
    """Interpolated between the evaluations around the last crossing, and paired by seed."""
    run, refused = reader(time_to_loss, tmp_path, monkeypatch, capsys)
    target = tmp_path / "curves"
    shutil.copytree(comparison[0], target)
    for file in target.glob("runs/*/record.json"):
        record = read_json(file)
        later = record["name"] == NAMES[0]
        losses = (4.0, 3.5, 3.7, 3.1 if later else 2.9)
        record["evaluations"] = [
            {**record["evaluations"][-1], "step": 10 * (at + 1), "loss": loss} for at, loss in enumerate(losses)
        ]
        record["tokens"] = 40 * 16
        file.write_text(json.dumps(record))
    record, printed = run(target)
    taken = {(row["model"], row["seed"]): row["tokens"] for row in record["rows"]}
    for seed in (0, 1):
        # From 3.7 at step 30 to 3.1 or 2.9 at step 40, of 16 tokens each; below 3.6 at step 20 for a while only.
        assert taken[NAMES[0], seed] == pytest.approx(
            {"3.6": 16 * (30 + 1 / 6 * 10), "3.4": 560, "3.2": 16 * (30 + 5 / 6 * 10)}
        )
        assert (
            taken[NAMES[1], seed]["3.0"] == pytest.approx(16 * (30 + 7 / 8 * 10)) and "2.8" not in taken[NAMES[1], seed]
        )
    share = (30 + 3 / 8 * 10) / 35 - 1
    assert f"{share:+.1%} ({share:+.1%} to {share:+.1%}), fewer on 2 of 2 seeds".replace("-", "−") in printed
    assert "name the directory" in refused()
