"""The benchmark that splits a difference by what can be copied, against loops and a comparison of tiny models."""

import random
import shutil
import sys
from collections import Counter

import copying
import harness
import pytest
import torch
from corpus import SHAPE, prepare

from leanqkv import LeanForCausalLM
from leanqkv.compare.comparison import run_comparison
from leanqkv.compare.suite import Comparison, Entry
from leanqkv.data import collate
from leanqkv.files import read_json

pytestmark = pytest.mark.slow
NAMES = (f"tiny{SHAPE}", f"tiny+skipv1{SHAPE}")


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
    means = {"copied": 0.0, "other": 0.0, "same pairs copied": 0.0, "same pairs not copied": 0.0}
    common = sum(times[pair] for pair in times if pair in other)
    for pair, copied, loss in where:
        means["copied" if copied else "other"] += loss / (times if copied else other).total()
        if pair in times and pair in other:
            kind, weight = ("same pairs copied", 1) if copied else ("same pairs not copied", times[pair] / other[pair])
            means[kind] += loss * weight / common
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


def test_losses_of_finished_models_are_split(tmp_path, monkeypatch, capsys):
    """Seeds measured one after another give the record of both; it is refused for other text or without models."""
    monkeypatch.setenv("LEANQKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("leanqkv.compare.comparison.available_cores", lambda: 1)
    data = prepare(tmp_path)
    comparison = Comparison(
        title="Two models",
        groups=(tuple(map(Entry, NAMES)),),
        seeds=(0, 1),
        recipe={"steps": 4, "batch_size": 4},
        command="leanqkv compare ...",
        evaluation_sequences=8,
        evaluate_every=4,
    )
    out, file = tmp_path / "out", tmp_path / "copying.json"
    run_comparison(comparison, data, out, precision="fp32", device="cpu", jobs=1)

    def measure(*options):
        text = ("--data", str(tmp_path / "corpus.txt"), "--sequences", "5")
        monkeypatch.setattr(sys, "argv", ["copying.py", str(out), "--out", str(file), *text, *options])
        harness.run(copying.command_line(), copying.measure, copying.tables)
        return read_json(file), capsys.readouterr().out

    record, _ = measure()
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
    again, printed = measure()
    assert again["rows"] == record["rows"]
    assert f"| `{NAMES[1]}` |" in printed and "same pairs: cannot" in printed
    for refused, options in (("is of other text", ("--sequences", "4")), ("holds no trained models", ())):
        with pytest.raises(SystemExit) as end:
            measure(*options)
        assert end.value.code == 2 and refused in capsys.readouterr().err
        shutil.rmtree(out / "runs")
        (out / "runs").mkdir()
    assert read_json(file)["rows"] == record["rows"]
