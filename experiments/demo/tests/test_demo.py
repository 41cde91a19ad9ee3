"""The demo: every phase on a model that takes seconds, its page, and what it does when killed or misused."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from corpus import SHAPE, write_corpus

from experiments.demo import phases
from leanqkv import count_parameters, kv_bytes_per_token, preset, progress
from leanqkv.checkpoints.open import open_checkpoint
from leanqkv.eliminate import verify

pytestmark = pytest.mark.slow
BASELINE, VARIANT = f"tiny{SHAPE}", f"tiny+skipv1{SHAPE}"


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """A directory to work in; the demo there is of two layers, 12 steps and a small corpus."""
    directory = tmp_path_factory.mktemp("demo")
    write_corpus(directory / "corpus.txt")
    small = partial(
        phases.Settings,
        baseline=BASELINE,
        variant=VARIANT,
        evaluate_every=6,
        evaluation_sequences=8,
        data="corpus.txt",
        calibration_tokens=640,
        prompt="the quick",
        new_tokens=8,
        rounds=2,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "Settings", small)
        patch.setattr("leanqkv.compare.comparison.available_cores", lambda: 1)  # one run at a time, on one thread
        patch.setenv("LEANQKV_CACHE", str(directory / "cache"))
        patch.setattr(progress.console, "width", 260)  # the names are long
        patch.chdir(directory)
        yield directory


DEMO = ("experiments.demo", "--steps", "12", "--device", "cpu", "--out")


@pytest.fixture
def whole(place, cli):
    """A complete demo, made by the first test that asks for it, and its record."""
    if not (place / "whole").exists():
        code, out, err = cli(*DEMO, "whole")
        assert (code, err) == (0, "")
        assert re.findall(r"^\d/5", out, flags=re.MULTILINE) == ["1/5", "2/5", "3/5", "4/5", "5/5"]
        assert "one seed" in out and "no conclusion" in out
        assert out.endswith("report: whole/report.html\n")
    return place / "whole", read("whole")


def read(directory):
    return json.loads((Path(directory) / "demo.json").read_text())


def run_record(file):
    return json.loads(file.read_text())


def without_times(record):
    """The record but for what differs from run to run."""
    record = json.loads(json.dumps(record))
    for part in ("training", "decoding"):
        for model in record[part]["models"].values():
            del model["tokens_per_second"]
    del record["conversion"]["seconds"], record["time"], record["command"]
    return record


def test_the_record(whole):
    out, record = whole
    removed, converted = f"{BASELINE}, weights removed", f"{BASELINE}, converted"
    models = {
        BASELINE: preset(BASELINE),
        VARIANT: preset(VARIANT),
        converted: open_checkpoint(out / "converted").config,
        removed: open_checkpoint(out / "eliminated").config,
    }
    evaluated, decoded = (record[part]["models"] for part in ("evaluation", "decoding"))
    assert list(evaluated) == list(decoded) == list(models)
    for name, config in models.items():
        assert evaluated[name]["parameters"] == count_parameters(config).total
        assert evaluated[name]["kv_bytes_per_token_bf16"] == kv_bytes_per_token(config)
        tokens = record["decoding"]["prompt_tokens"] + record["settings"]["new_tokens"] - 1
        assert decoded[name]["cache_tokens"] == tokens
        assert decoded[name]["cache_bytes"] == tokens * kv_bytes_per_token(config, torch.float32)
        assert decoded[name]["tokens_per_second"]["min"] > 0
    directories = {run_record(file)["name"]: file.parent for file in out.glob("comparison/runs/*/record.json")}
    runs = {name: run_record(directory / "record.json") for name, directory in directories.items()}
    for name, run in runs.items():
        assert evaluated[name]["loss"] == pytest.approx(run["final"]["validation_loss"], rel=1e-6)
        assert record["training"]["models"][name]["evaluations"] == run["evaluations"]
    assert runs[BASELINE]["batch_plan"]["sha256"] == runs[VARIANT]["batch_plan"]["sha256"]
    assert evaluated[removed]["loss"] == pytest.approx(evaluated[BASELINE]["loss"], rel=1e-5)
    assert evaluated[converted]["loss"] != evaluated[BASELINE]["loss"]
    assert verify(directories[BASELINE], out / "eliminated")["fp64"]["result"]["relative"] < 1e-5
    assert record["elimination"]["verification"]["fp64"]["result"]["relative"] < 1e-5


def test_the_page_is_made_from_the_record_alone(whole, tmp_path, cli):
    out, record = whole
    (tmp_path / "demo.json").write_text((out / "demo.json").read_text())
    code, text, err = cli(*DEMO, str(tmp_path))
    assert (code, err) == (0, "")
    page = (tmp_path / "report.html").read_text()
    assert page == (out / "report.html").read_text()
    assert page.index("<svg") < page.index("<table"), "figures first"
    assert page.count('class="wide"') == 2
    for model in record["evaluation"]["models"].values():
        for shown in (f"{model['parameters']:,}", f"{model['kv_bytes_per_token_bf16']:,}", f"{model['loss']:.4f}"):
            assert shown in page
            assert shown in text
    assert "no conclusion about architectures" in page
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page), "the page needs nothing from elsewhere"


@pytest.mark.exhaustive
def test_killed_in_any_phase_it_goes_on(whole, place, cli, monkeypatch):
    for phase in ("convert", "eliminate", "evaluate", "decode"):
        with monkeypatch.context() as patch:
            patch.setattr(phases, phase, lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
            assert cli(*DEMO, "killed")[0] == 130
    trained = {file: file.stat().st_mtime_ns for file in place.glob("killed/comparison/runs/*/model.safetensors")}
    assert len(trained) == 2
    code, out, _ = cli(*DEMO, "killed")
    assert code == 0
    assert "validation loss" not in out.split("2/5")[0], "trained again"
    assert all(file.stat().st_mtime_ns == time for file, time in trained.items())
    assert without_times(read("killed")) == without_times(whole[1])


def test_weights_that_are_complete_are_not_made_again(whole, place, cli):
    """Killed after a conversion was in place and before the record had it."""
    shutil.copytree(place / "whole", place / "late")
    record = read("late")
    for phase in ("conversion", "elimination", "evaluation", "decoding"):
        del record[phase]
    (place / "late" / "demo.json").write_text(json.dumps(record))
    assert cli(*DEMO, "late")[0] == 0
    assert without_times(read("late")) == without_times(whole[1])


def test_a_complete_demo_is_only_drawn_again(whole, cli):
    out, record = whole
    page = (out / "report.html").read_text()
    (out / "report.html").unlink()
    code, text, _ = cli(*DEMO, "whole")
    assert code == 0
    assert "1/5" not in text
    assert read("whole") == record
    assert (out / "report.html").read_text() == page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("experiments.demo", "--steps", "13", "--out", "whole"),
            "holds another demo (settings.steps: 12 there, 13 asked)",
        ),
        ((*DEMO, "damaged"), "damaged/demo.json is damaged"),
        (("report", "damaged"), "python -m experiments.demo --out damaged draws it again"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(whole, place, cli, arguments, message):
    (place / "damaged").mkdir(exist_ok=True)
    (place / "damaged" / "demo.json").write_text(json.dumps(whole[1] | {"evaluation": {}}))
    code, _, err = cli(*arguments)
    assert code == 2
    assert err.startswith("error: ") and message in err
    assert err.count("\n") == 1, "more than one line"


def test_other_data_than_it_was_trained_on_is_refused(whole, place, cli):
    """The corpus may change between two starts: an update of Python changes the standard library."""
    shutil.copytree(place / "whole", place / "moved")
    record = read("moved")
    del record["decoding"]
    record["training"]["data"]["sha256"] = "0" * 64
    (place / "moved" / "demo.json").write_text(json.dumps(record))
    code, _, err = cli(*DEMO, "moved")
    assert code == 2
    assert "was trained on other data" in err
