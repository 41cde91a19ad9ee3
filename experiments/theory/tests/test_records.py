"""The appendices' checks as commands: their records, tables, figures and document."""

import json
import re
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from checking import SMALL, failures
from typer.testing import CliRunner

from experiments.theory import command
from experiments.theory.check import CHECKS, load_check, passed
from experiments.theory.command import app
from experiments.theory.layer_norm import statement as norms
from experiments.theory.layer_norm.measure import trained_layer
from experiments.theory.layer_norm.trained import norm_inputs
from leanqkv.cli import run
from leanqkv.data.tokenizer import train_tokenizer
from leanqkv.errors import LeanError
from leanqkv.files import RECORD_FORMAT
from leanqkv.model.causal_lm import LeanForCausalLM
from leanqkv.presets import preset

ROOT = Path(__file__).parent.parent.parent.parent
RESULTS = ROOT / "results" / "theory"
DOCUMENT = (ROOT / "docs" / "theory.md").read_text()
PAPERS = (ROOT / "docs" / "papers.md").read_text()
P1 = tuple(name for name in CHECKS if name != "in-context")  # the checks of Karbevski & Mijoski 2025


def section(name: str) -> str:
    """Of the document: from the heading above the check's command to the next heading of its level."""
    sections = [part for part in DOCUMENT.split("\n## ") if f"python -m experiments.theory {name} --out" in part]
    assert len(sections) == 1, name
    return sections[0]


def invoke(*arguments: str):
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.slow
def test_the_check_passes(name):
    assert failures(name) == ""


@pytest.mark.parametrize("name", CHECKS)
def test_the_committed_record_passes_and_its_tables_are_in_the_document(name):
    check = load_check(name)
    record = check.load(RESULTS / name / "record.json")
    tables = check.tables(record)
    assert (RESULTS / name / "table.md").read_text() == tables
    for table in tables.split("\n\n"):
        assert table.strip() in section(name), table.splitlines()[0]
    numbers = [line for line in section(name).splitlines() if line.startswith("| ---:")]
    assert len(numbers) == len(tables.split("\n\n")), "a table of numbers that is not from the record"
    findings = check.findings(record)
    assert passed(findings)
    if name in P1:  # the record of the in-context regression is older than outcomes
        assert record["outcome"] == {"passed": True, "findings": [asdict(finding) for finding in findings]}
    assert "/" not in "".join(record["settings"].get("models", ())), "a path of the machine that made it"
    settings = replace(
        check.settings(), **{key: record["settings"][key] for key in ("models",) if name == "layer-norm"}
    )
    assert record["settings"] == json.loads(json.dumps(asdict(settings)))
    assert sum(file.stat().st_size for file in (RESULTS / name).iterdir()) < 200_000


@pytest.mark.parametrize("name", CHECKS)
def test_the_document_takes_its_numbers_from_the_record(name):
    """Every decimal outside the tables is in a table or a finding, or is the paper's or a setting's."""
    record = load_check(name).load(RESULTS / name / "record.json")
    known = (RESULTS / name / "table.md").read_text()
    if name in P1:
        known += json.dumps(record["outcome"], ensure_ascii=False)
    prose = "\n".join(line for line in section(name).splitlines() if not line.startswith("|"))
    given = {"initial-spread": ("1.8", "0.02", "2.2"), "basis-transfer": ("0.009", "0.01", "0.002")}.get(name, ())
    for number in re.findall(r"\d+\.\d+", prose):
        assert number in known or number in given, f"{number} is in no table"


def test_the_table_of_papers_has_the_records_numbers():
    rows = {
        name: line for name in P1 for line in PAPERS.splitlines() if f"`python -m experiments.theory {name}`" in line
    }
    assert set(rows) == set(P1)
    entries = load_check("basis-transfer").load(RESULTS / "basis-transfer" / "record.json")["measured"]["transfers"]
    for key in ("mlp_error", "linear_error"):
        low, high = (100 * pick(entry[key] for entry in entries) for pick in (min, max))
        assert f"{low:.1f}–{high:.1f} %" in rows["basis-transfer"]
    entries = load_check("initial-spread").load(RESULTS / "initial-spread" / "record.json")["measured"]["by_mechanism"]
    first, *deeper = next(entry["ratio"] for entry in entries if entry["query"] == "identity")
    assert f"{first:.2f} in the first layer, {min(deeper):.2f}–{max(deeper):.2f} deeper" in rows["initial-spread"]


@pytest.mark.parametrize("name", CHECKS)
def test_a_redrawn_record_gives_the_same_files(name, tmp_path):
    shutil.copytree(RESULTS / name, tmp_path / name)
    for file in ("table.md", "figure.png"):
        (tmp_path / name / file).unlink(missing_ok=True)
    result = invoke(name, "--redraw", "--out", str(tmp_path / name))
    assert result.exit_code == 0
    assert "pass" in result.output
    assert "FAIL" not in result.output
    committed = {file.name for file in (RESULTS / name).iterdir()}
    assert {file.name for file in (tmp_path / name).iterdir()} == committed | {"report.html"}
    assert (tmp_path / name / "table.md").read_text() == (RESULTS / name / "table.md").read_text()


@pytest.mark.parametrize("name", ["layer-norm", "skip-absorption", "hadamard", "in-context"])
def test_the_quick_command_passes_and_leaves_a_record(name, tmp_path):
    check, out = load_check(name), tmp_path / "out"
    result = invoke(name, "--quick", "--out", str(out))
    assert result.exit_code == 0, result.output
    figure = {"figure.png"} if check.draw else set()
    assert {file.name for file in out.iterdir()} == {"record.json", "report.html", "table.md"} | figure
    record = check.load(out / "record.json")
    assert (record["kind"], record["name"]) == ("theory", name)
    assert record["versions"]["torch"] == torch.__version__
    assert record["settings"] == json.loads(json.dumps(asdict(check.settings.quick())))
    assert record["outcome"]["passed"]
    assert record["statement"] in result.output
    written = (out / "table.md").read_text()
    (out / "table.md").unlink()
    assert invoke(name, "--redraw", "--out", str(out)).exit_code == 0
    assert (out / "table.md").read_text() == written


def test_all_of_them_one_after_the_other(tmp_path, monkeypatch):
    """Two for all: each into its own directory, and one failure is the outcome."""
    monkeypatch.setattr(command, "CHECKS", ("hadamard", "skip-absorption"))
    assert invoke("all", "--quick", "--out", str(tmp_path)).exit_code == 0
    for name in ("hadamard", "skip-absorption"):
        assert load_check(name).load(tmp_path / name / "record.json")["outcome"]["passed"]
    file = tmp_path / "hadamard" / "record.json"
    record = json.loads(file.read_text())
    record["measured"]["cases"][0]["by_heads"] = 0.1
    file.write_text(json.dumps(record))
    result = invoke("all", "--redraw", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "skip-absorption: " in result.output
    page = (tmp_path / "report.html").read_text()
    assert "1 of 2 checks pass" in page and page.count("<strong>FAIL</strong>") == 1


@pytest.mark.slow
def test_the_page_has_every_check_with_its_figure_and_tables(tmp_path):
    shutil.copytree(RESULTS, tmp_path / "all")
    assert invoke("all", "--redraw", "--out", str(tmp_path / "all")).exit_code == 0
    page = (tmp_path / "all" / "report.html").read_text()
    assert page.count("<section") == len(CHECKS) and f"{len(CHECKS)} of {len(CHECKS)} checks pass" in page
    checks = [load_check(name) for name in CHECKS]
    assert page.count("data:image/png;base64,") == sum(check.draw is not None for check in checks)
    written = [check.tables(check.load(RESULTS / check.name / "record.json")) for check in checks]
    assert page.count("<table>") == sum(len(tables.split("\n\n")) for tables in written)
    assert not re.findall('http|src="(?!data:)', page)  # it needs nothing else


@pytest.mark.parametrize("name", [name for name in CHECKS if load_check(name).draw])
def test_the_figure_is_drawn_from_the_record_alone(name, tmp_path):
    check = load_check(name)
    check.write(json.loads(json.dumps(check.load(RESULTS / name / "record.json"))), tmp_path)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["figure.png", "table.md"]


def test_a_check_that_fails_says_so_and_has_exit_code_one(tmp_path):
    shutil.copytree(RESULTS / "hadamard", tmp_path / "out")
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    record["measured"]["cases"][0]["by_heads"] = 0.1
    (tmp_path / "out" / "record.json").write_text(json.dumps(record))
    result = invoke("hadamard", "--redraw", "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "FAIL" in result.output


@pytest.mark.parametrize("name", CHECKS)
def test_the_command_says_what_is_wrong(name, tmp_path):
    def fails(*arguments: str) -> str:
        result = invoke(name, *arguments)
        assert isinstance(result.exception, LeanError)
        assert "\n" not in str(result.exception)
        return str(result.exception)

    (tmp_path / "file").write_text("")
    assert "is a file" in fails("--quick", "--out", str(tmp_path / "file"))
    assert "there is no" in fails("--redraw", "--out", str(tmp_path))
    assert "clash" in fails("--quick", "--redraw", "--out", str(tmp_path))
    (tmp_path / "record.json").write_text(json.dumps({"record": RECORD_FORMAT, "kind": "another"}))
    assert f"theory/{name}" in fails("--quick", "--out", str(tmp_path))
    assert json.loads((tmp_path / "record.json").read_text())["kind"] == "another"
    assert "clash" in fails("--paper", "--quick", "--out", str(tmp_path))
    assert "clash" in fails("--paper", "--redraw", "--out", str(tmp_path))
    assert "clash" in fails("--model", "somewhere", "--redraw", "--out", str(tmp_path))
    if name != "basis-transfer":
        assert "--paper is for basis-transfer" in fails("--paper", "--out", str(tmp_path))
    if name != "layer-norm":
        assert "--model is for layer-norm" in fails("--model", "somewhere", "--out", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hadamar", "--out", "x"), "there is no check 'hadamar'; choose all or one of initial-spread"),
        (("hadamard", "--redraw", "--out", "x"), "there is no x/record.json"),
    ],
)
def test_bad_input_of_the_command_line_is_one_line_and_exit_code_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["theory", *arguments])
    with pytest.raises(SystemExit) as end:
        run(app)
    output = capsys.readouterr()
    assert (end.value.code, output.out) == (2, "")
    assert output.err.startswith(f"error: {message}") and output.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


# Trained checkpoints


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A saved `tiny` with weights as they start, two layers, and a tokenizer of its size."""
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    LeanForCausalLM(preset("tiny", vocab_size=300, num_hidden_layers=2)).save_pretrained(directory)
    train_tokenizer(iter(["def f(x):\n    return x\n"] * 20), 300).save_pretrained(directory)
    return directory


def test_what_enters_the_norms_is_the_stream(checkpoint):
    norm, eps, layers = norm_inputs(checkpoint, 64, 32)
    model = LeanForCausalLM.from_pretrained(checkpoint)
    assert (norm, eps, len(layers)) == ("layernorm", model.config.norm_eps, 2)
    assert layers[0].stream.shape == (64, 128)
    assert layers[1].theta.dtype == torch.float64
    torch.testing.assert_close(layers[1].theta, model.model.layers[1].self_attn.q_proj.weight.double())
    # W_Q L(x) from the stream is the query that the model computes.
    query = norms.layer_norm(layers[0].stream, eps) @ (layers[0].theta * layers[0].weight).T
    block = model.model.layers[0]
    with torch.no_grad():
        expected = block.self_attn.q_proj(block.input_layernorm(layers[0].stream.float()))
    torch.testing.assert_close(query.float(), expected, rtol=1e-4, atol=1e-5)
    measured = trained_layer(layers[1], norm, eps)
    assert max(measured["defect"], measured["other_norms"]) < 1e-10
    assert measured["linear_error"] is None, "64 tokens do not fit an affine map of width 128"


@pytest.mark.slow
def test_the_command_reads_a_checkpoint_and_names_it(checkpoint, tmp_path):
    result = invoke("layer-norm", "--quick", "--model", str(checkpoint), "--out", str(tmp_path))
    assert "Theorem C.2" in result.output
    text = (tmp_path / "record.json").read_text()
    assert len(json.loads(text)["measured"]["trained"]) == 2
    assert str(checkpoint.parent) not in text


def test_checkpoints_it_cannot_use_are_refused(checkpoint, tmp_path):
    def refused(directory: Path) -> str:
        result = invoke("layer-norm", "--quick", "--model", str(directory), "--out", str(tmp_path / "out"))
        assert isinstance(result.exception, LeanError)
        assert "\n" not in str(result.exception)
        assert not (tmp_path / "out" / "record.json").exists()
        return str(result.exception)

    assert "not a checkpoint" in refused(tmp_path)
    for name, message in (("identity-query", "no square W_Q"), ("norm_type=dyt", "layernorm or rmsnorm")):
        mechanism, _, value = name.partition("=")
        mechanisms, overrides = ((), {mechanism: value}) if value else ((mechanism,), {})
        config = preset("tiny", *mechanisms, vocab_size=300, num_hidden_layers=1, **overrides)
        directory = tmp_path / mechanism
        LeanForCausalLM(config).save_pretrained(directory)
        assert message in refused(directory)


# In-context regression


def test_the_in_context_record_bears_out_what_the_document_says():
    check = load_check("in-context")
    record = check.load(RESULTS / "in-context" / "record.json")
    assert len(check.tables(record).split("\n\n")) == 8
    for entry in record["by_rows"]:
        for key in ("attention", "first_value"):
            assert entry[key]["loss"] == pytest.approx(entry[key]["theory"], abs=1e-3)
    for entry in record["grid"]:
        assert entry["gap"] > 0
        assert abs(entry["sampled_gap"] - entry["gap"]) < 2 * entry["sampled_half_width"]
    assert all(entry["gap"] > 0 for entry in record["priors"])
    assert any(entry["in_hypothesis"] and entry["gap_at_most"] < 0 for entry in record["reversed"])
    for entry in record["reversed"]:
        if "gap" in entry:
            assert entry["attention"]["loss"] <= entry["attention_at_most"] + 1e-6
            assert entry["first_value"]["loss"] == pytest.approx(entry["first_value_exact"], abs=1e-3)
    positions = [entry for entry in record["training"] if entry["reads_positions"]]
    assert len(positions) == 5
    assert all(entry["gap_of_best"] > entry["gap_of_best_half_width"] for entry in positions)
    assert sum(entry["gap"] > entry["gap_half_width"] for entry in positions) == 3
    for entry in record["training"]:
        if entry["prior"] == 0:
            reached = entry["first_value_minimum"] if entry["reads_positions"] else entry["zero_loss"]
            best = entry["first_value"][entry["best_seeds"][1]]
            assert abs(best - reached) < 2 * entry["best_half_width"][1]
