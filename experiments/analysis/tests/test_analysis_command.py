"""The command: its record against the functions, its tables and its page against the record, and bad input."""

import json
import re
import sys
from math import log10
from pathlib import Path

import numpy as np
import pytest
import torch
from corpus import prepare
from scipy import stats
from shapes import randomize, tiny

from experiments.analysis.__main__ import main
from experiments.analysis.figures import drawings
from experiments.analysis.heads import (
    copy_losses,
    induction_scores,
    matching_weights,
    previous_token_scores,
    repeated_tokens,
)
from experiments.analysis.measures import architectures
from experiments.analysis.page import tables
from experiments.analysis.record import Settings, analyze_models
from experiments.analysis.similarity import head_similarity, off_diagonal_mean, token_similarity
from experiments.analysis.subjects import open_subjects
from leanqkv import LeanForCausalLM
from leanqkv.checkpoints.open import load_model, open_causal_lm
from leanqkv.data.batches import collate, make_batch_plan
from leanqkv.data.prepare import prepare_data
from leanqkv.evaluate.observe import logit_spread, observe

pytestmark = pytest.mark.slow

FIELDS = {"vocab_size": 300, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 4}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Models with the corpus's tokenizer: two seeds as their runs started, one with a checkpoint, and another."""
    directory = tmp_path_factory.mktemp("analyze")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEANQKV_CACHE", str(directory / "cache"))
        patch.chdir(directory)
        data = prepare(directory)

        def save(name, *mechanisms, seed=0, change=None, tokenizer=True, **fields):
            torch.manual_seed(seed)
            model = LeanForCausalLM(tiny("gpt", *mechanisms, **{**FIELDS, **fields})).eval()
            if change:
                randomize(model, seed=seed)
            model.save_pretrained(name)
            if tokenizer:
                data.tokenizer.save_pretrained(name)

        for seed in (1, 2):
            for name, mechanisms in (("plain", ()), ("skip", ("skipv1",))):
                save(f"{name}{seed}", *mechanisms, seed=seed, change=name == "skip")
                run = {"name": f"tiny+{name}", "seed": seed, "initial_sha256": None}
                Path(f"{name}{seed}/record.json").write_text(json.dumps(run))
        save("skip1/checkpoint-7", "skipv1", seed=5, change=True, tokenizer=False)
        Path("skip1/checkpoint-7/complete").touch()
        save("skip1/checkpoint-9", "skipv1", tokenizer=False)  # cut off
        save("wide", vocab_size=301)
        yield directory


QUICK = ("--data", "corpus.txt", "--samples", "9", "--device", "cpu")


@pytest.fixture(scope="module")
def record(place):
    command = ("--probe-steps", "3", "--probe-rates", "1e-2,1e-3", "--out", "analysis")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["analysis", "plain1", "skip1", "plain2", "skip2", *QUICK, *command])
        with pytest.raises(SystemExit) as end:
            main()
    assert not end.value.code
    return json.loads(Path("analysis/analysis.json").read_text())


def test_the_record(place, record):
    assert str(place) not in json.dumps(record)
    assert record["settings"]["context_length"] == 64 and record["git_commit"] is not None
    assert (record["kind"], record["name"]) == ("analysis", "plain1, skip1, plain2, skip2")
    assert list(record["models"]) == ["plain1", "skip1", "plain2", "skip2"]
    for model in record["models"].values():
        assert len(model["probe"]["losses"]) == len(model["logit_spread"]) == len(model["spectra"]) == 4
        assert [s["layers"] for s in model["probe"]["slopes"]] == [[0, 1], [2, 3]]
        assert model["probe"]["losses"] == [min(row) for row in model["probe"]["grid"]]
        assert np.shape(model["similarity"]["tokens"][0]["map"]) == (8, 8)
        assert np.shape(model["heads"]["induction"]) == (4, 2)
    plain, skip = record["models"]["plain2"], record["models"]["skip1"]
    assert [at["step"] for at in plain["training"]] == [0]
    # Nothing was trained: the start that the seed gives is the model itself.
    assert plain["training"][0]["condition"] == [{n: m["condition"] for n, m in s.items()} for s in plain["spectra"]]
    assert plain["training"][0]["logit_spread"] == pytest.approx(plain["logit_spread"], rel=0.2)
    assert [at["step"] for at in skip["training"]] == [0, 7]
    assert skip["training"][1]["condition"] != skip["training"][0]["condition"]
    assert skip["heads"]["value_layers"][1:] == [[1, 0], [2, 0], [3, 0]]


def test_the_record_is_what_the_functions_find(place, record):
    """Averages over batches that are not equally large, against all sequences at once."""
    from transformers import AutoTokenizer

    assert len(AutoTokenizer.from_pretrained("skip1")) == 300
    data = prepare_data("corpus.txt", vocab_size=300, tokenizer="skip1")
    sizes = {"train_tokens": data.train_tokens, "validation_tokens": data.validation_tokens, "context_length": 64}
    plan = make_batch_plan(**sizes, batch_size=2, steps=3, evaluation_sequences=9, seed=0)
    assert plan.sha256 == record["batch_plan"]["sha256"]
    ids = collate(data.validation(), plan.evaluation_starts, 64)["input_ids"]
    model = load_model(open_causal_lm(Path("skip1")), torch.float32)
    seen, measured = observe(model, ids), record["models"]["skip1"]
    repeated = repeated_tokens(300, 9, 32, 0)
    copied = observe(model, repeated).patterns
    for i in range(4):
        heads, similarity = measured["heads"], measured["similarity"]
        assert similarity["heads"][i]["mean"] == pytest.approx(off_diagonal_mean(head_similarity(seen.heads[i])), 1e-3)
        tokens_alike = off_diagonal_mean(token_similarity(seen.layers[i]))
        assert similarity["tokens"][i]["mean"] == pytest.approx(tokens_alike, 1e-3)
        assert heads["previous_token"][i] == pytest.approx(previous_token_scores(seen.patterns[i]).tolist(), 1e-3)
        assert heads["induction"][i] == pytest.approx(induction_scores(copied[i]).tolist(), 1e-3)
        weight, queries = matching_weights(seen.patterns[i], ids)
        assert heads["matching"][i] == pytest.approx((weight / queries).tolist(), 1e-3)
        assert measured["logit_spread"][i] == pytest.approx(logit_spread(seen.patterns[i]), 1e-3)
    assert heads["copy_loss"]["second"] == pytest.approx(copy_losses(model, repeated)[1], 1e-4)


def test_tables_of_the_record(record):
    groups = architectures(record)
    assert [(one.name, list(one.models)) for one in groups] == [("tiny+plain", [1, 2]), ("tiny+skip", [1, 2])]
    made = tables(record)
    models = record["models"]
    plain, skip = ([models[f"{name}{seed}"]["logit_spread"][1] for seed in (1, 2)] for name in ("plain", "skip"))
    differences = np.subtract(skip, plain)
    reach = stats.t.ppf(0.975, 1) * stats.sem(differences)
    row = made["Spread of the attention logits, by layer"].rows[1]
    assert row[1] == f"{np.mean(plain):.3f} ± {np.std(plain, ddof=1):.3f}"
    assert row[3].strip("*") == f"{np.mean(differences):+.3f} ± {reach:.3f}".replace("-", "−")
    assert row[3].startswith("**") == (abs(np.mean(differences)) > reach)
    conditions = [log10(models[f"plain{seed}"]["spectra"][3]["o_proj"]["condition"]) for seed in (1, 2)]
    title = "log₁₀ of the condition number of o_proj, by layer"
    assert made[title].rows[3][1] == f"{np.mean(conditions):.2f} ± {np.std(conditions, ddof=1):.2f}"
    # Of the skip model heads 1 of layers 1 to 3 borrow; of the plain one they are compared.
    scores = {n: [models[f"{n}{seed}"]["heads"]["induction"] for seed in (1, 2)] for n in ("plain", "skip")}
    means = {(n, h): [np.mean([m[i][h] for i in (1, 2, 3)]) for m in scores[n]] for n in scores for h in (0, 1)}
    groups = made["Heads by where their values come from"].rows
    assert [row[1] for row in groups] == ["3"] * 4
    for row, key in zip(groups, (("plain", 1), ("plain", 0), ("skip", 1), ("skip", 0)), strict=True):
        assert row[4] == f"{np.mean(means[key]):.3f} ± {np.std(means[key], ddof=1):.3f}", row[0]
    rows = made["Differences between these heads"].rows
    for row, other in zip(rows, (("skip", 0), ("plain", 1)), strict=True):
        assert (
            row[3]
            .strip("*")
            .startswith(f"{np.mean(np.subtract(means['skip', 1], means[other])):+.3f}".replace("-", "−"))
        )
    steps = [row[0] for row in made["Over training"].rows if row[0].startswith("spread")]
    assert steps == [f"spread of the logits, {at}" for at in ("step 0", "step 7", "end")]


def test_the_page_is_made_from_the_record_alone(record, unwrapped):
    page = Path("analysis/report.html").read_text()
    # Probe, similarities, spread, over training (spread, four matrices), spectra, scores, maps.
    assert page.count("<figure>") == 1 + 3 + 1 + (1 + 4) + 4 + 3 + 2 * 3
    ends = {label: {**model, "training": model["training"][:1]} for label, model in record["models"].items()}
    undrawn = page.count("<figure>") - len(drawings({**record, "models": ends}))
    assert undrawn == 5, "nothing between start and end: nothing to draw"
    assert "http" not in re.sub(r"http://www\.w3\.org/\S+", "", page)  # it needs nothing else
    table = Path("analysis/table.md").read_text()
    Path("analysis/report.html").unlink()
    Path("analysis/table.md").unlink()
    code, out, err = unwrapped("experiments.analysis", "--out", "analysis")
    assert (code, err) == (0, "") and "highest induction score" in out
    assert (Path("analysis/report.html").read_text(), Path("analysis/table.md").read_text()) == (page, table)


def test_every_phase_moves_the_progress(place):
    data = prepare_data("corpus.txt", vocab_size=300, tokenizer="skip1")
    settings = Settings(context_length=16, samples=9, probe_steps=3, probe_rates=(1e-3,))
    reports = []
    analyze_models(open_subjects([Path("skip1")]), data, settings, "cpu", lambda *report: reports.append(report))
    parts, done, totals = zip(*reports, strict=True)
    assert set(totals) == {len(reports)} and list(done) == list(range(1, len(reports) + 1))
    counts = {part: parts.count(part) for part in dict.fromkeys(parts)}
    # Two batches of text, four layers, the start and one checkpoint, three steps, six kinds of query.
    assert counts == {
        "skip1: attention on text": 2,
        "skip1: attention on repeated tokens": 2,
        "skip1: weights": 4,
        "skip1: checkpoints": 2,
        "skip1: training the probes": 3,
        "skip1: loss of the probes": 2,
        "logits before training": 6,
    }


def test_one_model_and_no_probes(place, unwrapped):
    code, _, err = unwrapped("experiments.analysis", "wide", *QUICK, "--probe-steps", "0", "--out", "alone")
    assert (code, err) == (0, "")
    record = json.loads(Path("alone/analysis.json").read_text())
    assert record["models"]["wide"]["probe"] is None and record["models"]["wide"]["training"] == []
    made = tables(record)
    assert "Loss of the linear probe, by layer" not in made and "Differences between these heads" not in made
    assert [row[0] for row in made["Heads by where their values come from"].rows] == ["`wide`, all"]
