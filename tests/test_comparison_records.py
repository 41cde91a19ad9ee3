"""Reading the records of a comparison: what is left alone, and what is refused in one line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from comparison_record import build, edit, folders, record, save
from damaging import WRONG, damages, read_or_refuse

from leanqkv.compare.records import load_comparison
from leanqkv.errors import LeanError
from leanqkv.ranges import Range
from leanqkv.records import (
    BEGUN,
    CACHED,
    COMPARISON,
    FINISHED,
    RECORD,
    SHARDS_WRITTEN,
    Misfit,
    check_shape,
    read_record,
)
from leanqkv.report import comparison_page
from leanqkv.report.comparison import markdown, remarks


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
        ("compare.json", '{"title": "x"}', "compare.json: field 'groups' is missing"),
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
        {"hardware": {"device": "cpu", "cpu": "Another CPU", "instructions": "AVX2", "threads": 2}},
        {"hardware": {"device": "cpu", "cpu": "Example CPU @ 2.60GHz", "instructions": "AVX2", "threads": 1}},
        {"precision": {"choice": "bf16", "milliseconds_per_step": {}}},
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


# --- every field of every record, of every wrong type -----------------------------------------------------------------


def show(directory: Path) -> None:
    """All of a report but the figures."""
    comparison = load_comparison(directory)
    assert markdown(comparison) and isinstance(remarks(comparison), list)
    comparison_page._facts(comparison), comparison_page._recipes(comparison), comparison_page._runs(comparison)


@pytest.mark.long_cases
@pytest.mark.parametrize("file", ["compare.json", "runs/final-tiny-0-*/record.json", "runs/grid-*/record.json"])
def test_a_record_with_any_wrong_field_is_shown_or_refused(tmp_path: Path, file: str) -> None:
    names = ["tiny", "tiny+skipv1"]
    for run in sorted(build(tmp_path).glob("runs/*")):
        if not run.name.startswith(("final-tiny-0", "final-tiny+skipv1-0", "grid-tiny-2-0.001")):
            shutil.rmtree(run)
    edit(tmp_path / "compare.json", groups=[names], recipe={"steps": 600}, threads=2, scale="tiny")
    entries = {name: {"model": name, "recipe": {}, "row": ""} for name in names}
    edit(tmp_path / "compare.json", entries=entries, chosen_learning_rate=dict.fromkeys(names, 3e-3))
    path = next(tmp_path.glob(file))
    refused = 0
    for at, damaged in damages(json.loads(path.read_text())):
        path.write_text(json.dumps(damaged))
        refused += read_or_refuse(lambda: show(tmp_path), at)
    assert refused > 100


@pytest.mark.parametrize("shape", [FINISHED, RECORD, BEGUN, COMPARISON, CACHED["data"], SHARDS_WRITTEN])
def test_a_shape_refuses_whatever_a_file_holds(tmp_path: Path, shape: Any) -> None:
    for value in WRONG:
        (tmp_path / "file.json").write_text(json.dumps(value))
        if value != {}:
            assert read_or_refuse(lambda: read_record(tmp_path / "file.json", shape, "delete it"), ()), value


def test_shapes() -> None:
    fitting = [
        ((int,), None),
        ([str], []),
        ([str, ...], ["a"]),
        ([str, int], ["a", 1]),
        ({"a?": str, str: int}, {"b": 1}),
        ({"x", "y"}, "x"),
        (Range(1, 2), 1.5),
        (bool, True),
        (dict, {"a": 1}),
    ]
    for shape, value in fitting:
        check_shape(value, shape)
    for shape, value, message in [
        (int, True, "must be"),
        ([str, ...], [], "a list"),
        ([str, int], ["a"], "2 long"),
        ({"a": str}, {}, "field 'a' is missing"),
        ({"a": [{"b": str}]}, {"a": [{"b": "x"}, {"b": 1}]}, r"must be a text is not: a\[1\]\.b is 1"),
        ({"x", "y"}, "z", "x or y"),
        ({"x", "y"}, [], "x or y"),
        (Range(1, 2), 3, "a number from 1 to 2"),
        (Range(1, 2), 10**400, "a number from 1 to 2"),
    ]:
        with pytest.raises(Misfit, match=message):
            check_shape(value, shape)
