"""What a comparison does after its runs: converted baselines that are uptrained, and downstream tasks."""

import json
import re
from dataclasses import replace

import pytest
import torch
from comparing import COMPARISON
from corpus import SHAPE
from harness import sequence_losses
from local_tasks import QUESTIONS, write_tasks

from leanqkv import LeanError
from leanqkv.checkpoints.open import load_model, open_checkpoint
from leanqkv.compare.comparison import run_comparison
from leanqkv.compare.records import load_comparison
from leanqkv.compare.suite import Entry
from leanqkv.compare.suites import SUITES
from leanqkv.compare.uptraining import check_uptrained
from leanqkv.convert.conversion import Conversion
from leanqkv.data.batches import batch_plan, collate
from leanqkv.evaluate.harness import load_tasks, task_scores
from leanqkv.report.comparison import markdown
from leanqkv.report.comparison_page import KIND

pytestmark = pytest.mark.slow

MODEL = f"tiny{SHAPE}+hidden_dropout=0.1+num_hidden_layers=4"
SCRATCH, SHORT, LONG = "skipv1", "skipv1, uptrained 10%", "skipv1, uptrained 50%"
RATES = {"learning_rate": 9e-4, "min_learning_rate": 9e-5}
UPTRAINED = replace(
    COMPARISON,
    groups=(
        (
            Entry(MODEL, "baseline"),
            Entry(f"{MODEL}+skipv1", SCRATCH),
            Entry(f"{MODEL}+skipv1", SHORT, RATES, uptrain=0.1),
            Entry(f"{MODEL}+skipv1", LONG, RATES, uptrain=0.5),
        ),
    ),
    recipe={"steps": 20, "batch_size": 4},
    learning_rates=None,
    evaluate_every=2,
)


@pytest.fixture(scope="module", autouse=True)
def _one_core():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leanqkv.compare.comparison.available_cores", lambda: 1)
        yield


def run(comparison, data, out, **options):
    run_comparison(comparison, data, out, device="cpu", jobs=1, precision="fp32", **options)
    return {path.parent.name: json.loads(path.read_text()) for path in out.glob("runs/*/record.json")}


@pytest.fixture(scope="module")
def uptrained(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("uptraining") / "out"
    return out, run(UPTRAINED, data, out)


# --- uptraining -------------------------------------------------------------------------------------------------------


def of(records, name, seed=0):
    [record] = [one for one in records.values() if (one["name"], one["seed"]) == (name, seed)]
    return record


def test_an_uptrained_run_starts_at_the_loss_of_its_seeds_converted_baseline(uptrained, data, tmp_path):
    out, records = uptrained
    first = {}
    for seed in (0, 1):
        [source] = out.glob(f"runs/baseline-final-*-seed{seed}")
        Conversion(open_checkpoint(source), "skipv1", method="mean-v").write(tmp_path / f"converted{seed}")
        model = load_model(open_checkpoint(tmp_path / f"converted{seed}"), torch.float32)
        sizes = {"train_tokens": data.train_tokens, "validation_tokens": data.validation_tokens, "context_length": 32}
        plan = batch_plan(out / "batches", **sizes, batch_size=4, steps=2, evaluation_sequences=8, seed=seed)
        loss = sequence_losses(model, data.validation(), plan.evaluation_starts, 32, 4).mean().item()
        evaluations = [of(records, name, seed)["evaluations"] for name in (SHORT, LONG)]
        assert evaluations[0][0] == evaluations[1][0] and evaluations[0][0]["step"] == 0
        assert evaluations[0][0]["loss"] == pytest.approx(loss, rel=1e-6)
        copy = load_model(open_checkpoint(out / "converted" / source.name), torch.float32)
        tokens = collate(data.validation(), [0], 32)["input_ids"]
        assert torch.equal(model(tokens).logits, copy(tokens).logits)
        first[seed] = evaluations[0][0]["loss"]
    assert first[0] != first[1]


@pytest.mark.parametrize(
    ("base", "why"),
    [("encoder-tiny", "its task is 'masked_lm'"), ("tiny+mla", "MLA"), ("tiny", None)],
)
def test_a_baseline_that_cannot_be_converted_is_refused_before_anything_trains(base, why):
    groups = ((Entry(base), Entry(f"{base}+skipv1", SHORT, RATES, uptrain=0.1)),)
    comparison = replace(UPTRAINED, groups=groups)
    if why is None:
        check_uptrained(comparison)
    else:
        with pytest.raises(LeanError, match=f"^{re.escape(base)} cannot be converted and uptrained: .*{why}"):
            check_uptrained(comparison)


def test_an_uptrained_run_has_its_share_of_the_steps_and_no_dropout(uptrained):
    _, records = uptrained
    assert {name: of(records, name)["recipe"]["steps"] for name in (SCRATCH, SHORT, LONG)} == {
        SCRATCH: 20,
        SHORT: 2,
        LONG: 10,
    }
    assert of(records, LONG)["recipe"]["warmup_steps"] == 1
    assert of(records, SCRATCH)["config"]["hidden_dropout"] == 0.1
    assert "hidden_dropout" not in of(records, LONG)["config"]
    assert of(records, SCRATCH)["initial_sha256"] is None
    assert of(records, LONG)["initial_sha256"] == of(records, SHORT)["initial_sha256"] is not None
    assert of(records, SCRATCH)["kv_bytes_per_token"] == of(records, LONG)["kv_bytes_per_token"]


def test_uptraining_goes_on_and_starts_anew_from_another_baseline(uptrained, data):
    out, records = uptrained
    [lost] = out.glob(f"runs/{LONG.replace(', ', '-').replace('%', '-').replace(' ', '-')}-final-*-seed1")
    (lost / "record.json").unlink()
    kept = {path: path.stat().st_mtime_ns for path in out.glob("converted/*/model.safetensors")}
    again = run(UPTRAINED, data, out)
    assert len(kept) == 2 and kept == {path: path.stat().st_mtime_ns for path in kept}
    assert again[lost.name]["evaluations"] == records[lost.name]["evaluations"]
    report = json.loads((out / "converted" / next(iter(kept)).parent.name / "conversion.json").read_text())
    assert report["method"] == "mean-v" and len(report["source_sha256"]) == 64


def test_the_report_of_uptraining_has_its_table_and_its_figure(uptrained):
    out, records = uptrained
    text = markdown(load_comparison(out))
    difference = sum(
        of(records, LONG, seed)["final"]["validation_loss"] - of(records, SCRATCH, seed)["final"]["validation_loss"]
        for seed in (0, 1)
    )
    [row] = [line for line in text.splitlines() if line.startswith(f"| `{LONG}` | 50% |")]
    assert f"{difference / 2:+.4f}".replace("-", "−") in row.split("|")[-2]
    assert "not paired" not in text and "same number of tokens" not in text
    KIND.write(out)
    assert "uptraining, share of the steps of a whole run in percent" in (out / "report.html").read_text()


def test_uptraining_is_of_the_model_that_the_baseline_is_converted_to(data, tmp_path):
    other = replace(UPTRAINED, seeds=(0,), groups=((Entry(MODEL), Entry(f"{MODEL}+cla-v", uptrain=0.1)),))
    with pytest.raises(LeanError, match="cla-v cannot be uptrained: its baseline is converted to skipv1"):
        run(other, data, tmp_path / "out")
    with pytest.raises(LeanError, match="`lr_grid` does not search the rate of uptrained models"):
        replace(UPTRAINED, learning_rates=(1e-3, 2e-3))


# --- downstream tasks -------------------------------------------------------------------------------------------------

TASKS = ("hellaswag", "animals")


@pytest.fixture(scope="module")
def scored(data, tmp_path_factory):
    pytest.importorskip("lm_eval")
    place = tmp_path_factory.mktemp("tasks")
    folder = write_tasks(place / "tasks", *TASKS)
    groups = ((Entry(f"tiny{SHAPE}", "one", row="125M"), Entry(f"tiny+skipv1{SHAPE}", "two", row="125M skipv1")),)
    comparison = replace(COMPARISON, groups=groups, learning_rates=None, suite="downstream", scale="tiny", tasks=TASKS)
    run(comparison, data, place / "out", include_path=folder)
    return comparison, folder, place / "out"


def scores(out):
    return {file.parent: json.loads(file.read_text()) for file in sorted(out.glob("runs/*/tasks.json"))}


def test_every_run_is_scored_as_eval_scores_it(scored):
    from transformers import AutoTokenizer

    _, folder, out = scored
    found = scores(out)
    assert len(found) == 4
    for directory, record in found.items():
        model, tokenizer = (
            load_model(open_checkpoint(directory), torch.float32),
            AutoTokenizer.from_pretrained(directory),
        )
        figures = task_scores(model, tokenizer, load_tasks(TASKS, folder)).figures
        assert record["tasks"] == figures and figures["animals"]["examples"] == len(QUESTIONS)


def test_scored_runs_are_not_scored_again_but_for_other_examples(scored, data, tmp_path):
    comparison, folder, out = scored
    before = {file: file.stat().st_mtime_ns for file in out.glob("runs/*/tasks.json")}
    run(comparison, data, out, include_path=folder)
    assert before == {file: file.stat().st_mtime_ns for file in before}
    run(replace(comparison, limit=2), data, out, include_path=folder)
    assert all(record["tasks"]["animals"]["examples"] == 2 for record in scores(out).values())
    run(comparison, data, out, include_path=folder)
    assert all(record["tasks"]["animals"]["examples"] == 4 for record in scores(out).values())
    other = write_tasks(tmp_path / "tasks", *TASKS)  # of the same names
    questions = (other / "questions.jsonl").read_text().splitlines()
    (other / "questions.jsonl").write_text("\n".join(questions[:3]))
    run(comparison, data, out, include_path=other)
    assert all(record["tasks"]["animals"]["examples"] == 3 for record in scores(out).values())
    run(comparison, data, out, include_path=folder)
    assert all(record["tasks"]["animals"]["examples"] == 4 for record in scores(out).values())


def test_the_report_of_tasks_has_the_means_and_the_papers_numbers(scored):
    _, _, out = scored
    text, found = markdown(load_comparison(out)), scores(out)
    for name in ("one", "two"):
        records = [record["tasks"] for directory, record in found.items() if directory.name.startswith(name)]
        mean = 100 * sum(one[task]["acc"] for one in records for task in TASKS) / len(records) / len(TASKS)
        [row] = [line for line in text.splitlines() if line.startswith(f"| `{name}` |") and line.count("|") == 6]
        assert f" {mean:.1f} " in row
    assert "hellaswag accuracy, %" in text and "27.3" in text
    KIND.write(out)
    assert "mean accuracy, %" in (out / "report.html").read_text()


def test_the_report_has_the_tasks_of_all_scored_runs_and_no_groups(scored):
    """A later scoring that was stopped; groups of tasks are means of tasks that are there."""
    _, _, out = scored
    file = next(out.glob("runs/*/tasks.json"))
    before = file.read_text()
    record = json.loads(before)
    record["tasks"]["other"] = record["tasks"][TASKS[0]]
    whole = markdown(load_comparison(out))
    try:
        file.write_text(json.dumps(record))
        assert markdown(load_comparison(out)) == whole
        file.write_text(json.dumps({**record, "tasks": {TASKS[0]: record["tasks"][TASKS[0]]}}))
        fewer = markdown(load_comparison(out))
        file.write_text(json.dumps({**record, "limit": 3}))
        of_another_limit = markdown(load_comparison(out))
        file.unlink()
        assert of_another_limit == markdown(load_comparison(out)) != whole
    finally:
        file.write_text(before)
    kept = {one: one.read_text() for one in out.glob("runs/*/tasks.json")}
    try:
        for one, text in kept.items():
            of_run = json.loads(text)
            of_run["tasks"]["group"] = {"acc": 0.999, "examples": None}
            one.write_text(json.dumps(of_run))
        assert markdown(load_comparison(out)) == whole
    finally:
        for one, text in kept.items():
            one.write_text(text)
    assert TASKS[0] in fewer and f"| {TASKS[1]} |" not in fewer


def test_tasks_are_loaded_before_anything_is_trained(scored, data, tmp_path):
    comparison, folder, _ = scored
    for changed, include_path, words in (
        ({"tasks": ("animal",)}, folder, "there is no task 'animal'"),
        ({"tasks": (), "limit": 3}, None, "`limit` goes with `tasks`"),
        ({"tasks": ()}, folder, "`include_path` goes with `tasks`"),
    ):
        with pytest.raises(LeanError, match=words):
            run(replace(comparison, **changed), data, tmp_path / "out", include_path=include_path)
    encoder = replace(comparison, groups=((Entry(f"tiny{SHAPE}+task=masked_lm"), Entry(f"tiny{SHAPE}", "two")),))
    with pytest.raises(LeanError, match=r"`tasks` are for models that predict the next token, and .*masked_lm is not"):
        run(encoder, data, tmp_path / "out", include_path=folder)
    assert not (tmp_path / "out").exists()


def test_the_suites_score_the_tasks_of_their_tables():
    for name in ("downstream", "downstream-llama"):
        assert {scale.tasks for scale in SUITES[name].scales.values()} == {("p3",)}
