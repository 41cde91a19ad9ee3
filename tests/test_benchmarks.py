"""The benchmarks' command line and record; their tables are compared with the documentation in test_docs.py."""

import json
import runpy
import sys
from datetime import datetime
from pathlib import Path

import harness
import pytest

from leanqkv.environment import command_line

ROOT = Path(__file__).parent.parent
HEADER = ("record", "kind", "name", "command", "time", "git_commit", "hardware", "versions")
# Not yet on the harness: their records open differently.
ALONE = ("calibration_time", "conversion")
BENCHMARKS = sorted({file.stem for file in (ROOT / "benchmarks").glob("*.py")} - {"harness", *ALONE})


def run(monkeypatch, *arguments: str, measure=lambda options: {"rows": [1, options.rounds]}) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/example.py", *arguments])
    parser = harness.command_line("An example.")
    parser.add_argument("--rounds", type=int, default=3)
    harness.run(parser, measure, lambda record: f"rows: {record['rows']}")


def test_a_benchmark_prints_its_tables_and_writes_a_record(monkeypatch, tmp_path, capsys):
    file = tmp_path / "new" / "record.json"
    run(monkeypatch, "--rounds", "5", "--out", str(file))
    assert capsys.readouterr().out == "rows: [1, 5]\n"
    record = json.loads(file.read_text())
    assert tuple(record) == (*HEADER, "rows")
    assert (record["kind"], record["name"]) == ("benchmark", "example")
    assert datetime.fromisoformat(record["time"]).tzinfo is not None
    assert str(tmp_path) not in json.dumps(record), "a directory of this machine"
    monkeypatch.setattr(harness, "record_header", lambda *_: pytest.fail("measured again"))
    run(monkeypatch, "--tables", str(file))
    assert capsys.readouterr().out == "rows: [1, 5]\n"


def test_bad_input_is_one_line_and_exit_code_2(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, "--tables", str(tmp_path / "nowhere.json"))
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: there is no") and error.count("\n") == 1


def test_a_recorded_command_names_no_directory_of_the_machine(monkeypatch):
    words = ["/usr/bin/python3", "benchmarks/example.py", "--out=/home/me/runs/new record/", "/data/text.txt", "runs/x"]
    monkeypatch.setattr(sys, "orig_argv", words)
    assert command_line() == "python3 benchmarks/example.py '--out=new record' text.txt runs/x"
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "/usr/bin/leanqkv", "analyze", "runs/x"])
    monkeypatch.setattr(sys, "argv", ["/usr/bin/leanqkv"])
    assert command_line() == "leanqkv analyze runs/x"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_the_common_options(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"), run_name="__main__")
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "--out FILE" in shown and "--tables FILE" in shown


def test_spreads():
    assert harness.spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert harness.spread_text({"median": 1.5, "min": 1.0, "max": 2.25}) == "1.50 (1.00–2.25)"
