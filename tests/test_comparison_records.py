"""Reading the records of a comparison: what is left alone, and what is refused in one line."""

import json
import shutil
from pathlib import Path

import pytest
from comparison_record import build, edit, folders, record, save

from leanqkv.compare.records import load_comparison
from leanqkv.errors import LeanError
from leanqkv.report.comparison import markdown


def test_runs_of_one_model_with_several_recipes_are_refused(tmp_path: Path) -> None:
    """As two searches on two machines would leave them."""
    directory = build(tmp_path)
    [folder] = folders(directory, "tiny+mqa", 1)
    edit(
        folder / "record.json", recipe=json.loads((folder / "record.json").read_text())["recipe"] | {"learning_rate": 1}
    )
    with pytest.raises(LeanError, match=r"final-tiny\+mqa-1.* and final-tiny\+mqa-0.* differ in learning rate"):
        load_comparison(directory)


def test_runs_of_another_plan_are_left_alone(tmp_path: Path) -> None:
    directory = build(tmp_path)
    before = load_comparison(directory)
    save(directory, record("tiny", 7, 1.0))
    save(directory, record("tiny", 2, 1.0, "grid", 5e-2))
    assert markdown(load_comparison(directory)) == markdown(before)
    assert len(load_comparison(directory).runs) == len(before.runs)


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("compare.json", None, "no .*compare.json"),
        ("compare.json", "{", "compare.json cannot be read"),
        ("compare.json", '{"title": "x"}', "compare.json: field 'baseline' is missing"),
        ("runs/broken/record.json", "half a rec", "runs/broken/record.json cannot be read"),
        ("runs/broken/record.json", '{"record": 1}', "runs/broken/record.json: field 'final' is missing"),
        ("runs/broken/record.json", '{"record": 9}', "runs/broken/record.json cannot be read: record version 9"),
        ("runs/broken/record.json", "[]", "runs/broken/record.json does not hold a JSON object"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, file: str, content: str | None, complaint: str) -> None:
    directory = build(tmp_path, grid=False)
    (directory / file).parent.mkdir(exist_ok=True)
    if content is None:
        (directory / file).unlink()
    else:
        (directory / file).write_text(content)
    with pytest.raises(LeanError, match=complaint) as caught:
        load_comparison(directory)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("title", 5), ("suite", ["query"]), ("groups", None), ("notes", None), ("chosen_learning_rate", [])],
)
def test_a_field_of_the_plan_that_is_of_another_kind_is_named(tmp_path: Path, field: str, value: object) -> None:
    directory = build(tmp_path, grid=False)
    edit(directory / "compare.json", **{field: value})
    with pytest.raises(LeanError, match=r"compare\.json cannot be read: .*; remove it and run the comparison again"):
        load_comparison(directory)


@pytest.mark.parametrize(
    ("part", "field"), [("parameters", "total"), ("recipe", "steps"), ("kv_bytes_per_token", "bfloat16")]
)
def test_a_number_that_is_none_is_named(tmp_path: Path, part: str, field: str) -> None:
    directory = build(tmp_path, grid=False)
    run = record("tiny", 0, 3.9)
    run[part][field] = "many"
    with pytest.raises(LeanError, match=r"record\.json cannot be read: a field that must be a number is not"):
        load_comparison(save(directory, run).parents[2])


@pytest.mark.parametrize(
    "change",
    [
        {"hardware": {"device": "cpu", "cpu": "Another CPU", "threads": 2}},
        {"hardware": {"device": "cpu", "cpu": "Example CPU @ 2.60GHz", "threads": 1}},
        {"precision": {"choice": "bf16"}},
    ],
)
def test_a_pair_of_two_machines_or_precisions_is_refused(tmp_path, change):
    directory = build(tmp_path / "report")
    file = next(path for path in directory.glob("runs/final-tiny+skipv1-0-*/record.json"))
    edit(file, **change)
    with pytest.raises(LeanError, match=r"a pair is of one machine and precision\. Remove one of the two directories"):
        load_comparison(directory)
    # Of another seed there is another pair.
    for other in directory.glob("runs/final-*-0-*/record.json"):
        edit(other, **change)
    load_comparison(directory)


@pytest.mark.parametrize(("part", "field"), [("data", "sha256"), ("recipe", "batch_size"), ("batch_plan", "sha256")])
def test_a_record_without_a_needed_field_is_named(tmp_path: Path, part: str, field: str) -> None:
    directory = build(tmp_path, grid=False)
    run = record("tiny", 0, 3.9)
    del run[part][field]
    with pytest.raises(LeanError, match=rf"record\.json: field '{field}' is missing"):
        load_comparison(save(directory, run).parents[2])


def test_the_same_run_twice_is_an_error(tmp_path: Path) -> None:
    directory = build(tmp_path)
    shutil.copytree(folders(directory, "tiny", 0)[0], directory / "runs" / "again")
    with pytest.raises(LeanError, match=r"the same run as .*runs/again/record\.json"):
        load_comparison(directory)
