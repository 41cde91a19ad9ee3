"""Hostile input: whatever is wrong is refused in one line with exit code 2, before anything is written.

The cases are products of axes: values of options, texts, words, fields of configurations, and paths that are no
checkpoint, each with the commands that take it.
"""

import hashlib
import json
import math
import shutil
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import typer
from corpus import SHAPE, write_corpus
from safetensors.torch import load_file, save_file

from experiments.analysis.command import analysis
from experiments.analysis.record import Settings as AnalysisSettings
from experiments.demo.command import demo
from experiments.demo.phases import Settings as DemoSettings
from leanqkv import LeanError, LeanForCausalLM, preset
from leanqkv.cli import alone, app
from leanqkv.compare.suite import Comparison, Entry
from leanqkv.convert.targets import SkipV1Options
from leanqkv.data.tokenizer import train_tokenizer
from leanqkv.presets.recipes import recipe
from leanqkv.ranges import RANGES
from leanqkv.train.spec import RunSpec

MODEL = f"tiny{SHAPE}".replace("embeddings=32", "embeddings=64")
OUT = ("--out", "result")
DATA = ("--data", "corpus.txt")
# Every command with numbers among its options, as it would run; a bad value is added.
COMMANDS = {
    "train": ("train", MODEL, *DATA, "--precision", "fp32", *OUT),
    "uptrain": ("uptrain", "source", "--steps", "10", *DATA, "--precision", "fp32", *OUT),
    "compare": ("compare", MODEL, f"{MODEL}+skipv1", *DATA, "--precision", "fp32", *OUT),
    "convert": ("convert", "source", "--to", "skipv1", "--calibration", "corpus.txt", *OUT),
    "eliminate": ("eliminate", "source", "--remove", "query", *OUT),
    "verify": ("verify", "source", "source"),
    "generate": ("generate", "source", "--prompt", "the"),
    "serve": ("serve", "source"),
    "bench": ("bench", MODEL, "--context", "8", "--batch", "1", *OUT),
    "eval": ("eval", "source", *DATA),
    "experiments.analysis": ("experiments.analysis", "source", *DATA, *OUT),
    "experiments.demo": ("experiments.demo", *OUT),
}
GROUP = typer.main.get_command(app)
PARAMETERS = {name: GROUP.get_command(None, name).params for name in GROUP.commands}
PARAMETERS |= {f"experiments.{run.__name__}": typer.main.get_command(alone(run)).params for run in (analysis, demo)}


def takes(option: str) -> list[str]:
    """The commands that have this option."""
    return [name for name in COMMANDS if any(option in parameter.opts for parameter in PARAMETERS[name])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a text, and a small model with its tokenizer."""
    folder = tmp_path_factory.mktemp("hostile")
    text = write_corpus(folder / "corpus.txt").read_text()
    torch.manual_seed(0)
    LeanForCausalLM(preset(MODEL)).save_pretrained(folder / "source")
    train_tokenizer(iter([text]), 300).save_pretrained(folder / "source")
    return folder


@pytest.fixture(autouse=True)
def _environment(folder, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("LEANQKV_CACHE", str(folder.with_name("cache-of-hostile")))
    monkeypatch.setenv("LEANQKV_DEBUG", "0")
    monkeypatch.setattr("leanqkv.compare.comparison.available_cores", lambda: 1)
    monkeypatch.chdir(folder)


def state(folder: Path) -> dict[str, str]:
    """Every file, hidden ones too, with the hash of its content, and every folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def refused(cli, folder):
    """Runs a command line that must be refused; returns its one line."""

    def run(*arguments: str) -> str:
        before = state(folder)
        code, _, err = cli(*arguments)
        assert code == 2, err
        lines = [line for line in err.splitlines() if not line.startswith("Warning")]
        assert len(lines) == 1, err
        assert lines[0].startswith("error: ")
        assert "Traceback" not in err
        assert state(folder) == before, "the source was changed, or something was left"
        return lines[0]

    yield run
    shutil.rmtree("result", ignore_errors=True)  # of a command that was not refused: the next test starts anew


# --- numbers: every option that takes one, with everything that is none of its numbers --------------------------------

NUMBERS = [
    (command, parameter.opts[0], parameter.name)
    for command in COMMANDS
    for parameter in PARAMETERS[command]
    if parameter.name in RANGES and parameter.opts[0].startswith("--")
]


def wrong(name: str) -> list[str]:
    """Values outside of the range of an option."""
    allowed = RANGES[name]
    values = ["nan", "inf", "-inf", "many", "-1", "0x10", "1e999"]
    values += [str(2**70), str(2**64 - 1), "1.5"] if allowed.whole else []
    if allowed.high < math.inf:
        values.append(str(int(allowed.high) + 1 if allowed.whole else allowed.high * 1.01 + 1e-9))
    if not allowed.or_zero and not allowed.low <= 0:
        values.append("0")
    return values + (["1e-45"] if name == "temperature" else [])


@pytest.mark.parametrize("command, option, name", NUMBERS)
def test_numbers(refused, command, option, name):
    for value in wrong(name):
        assert option in refused(*COMMANDS[command], f"{option}={value}"), value


def test_every_number_of_the_command_line_has_a_range():
    for command, parameters in PARAMETERS.items():
        for parameter in parameters:
            annotation = getattr(parameter, "type_descriptor", None)
            kind = annotation.annotation if annotation is not None else parameter.type.name
            if kind in (int, float, "integer", "float"):
                assert parameter.name in RANGES, (command, parameter.name)


# --- settings of the Python API ---------------------------------------------------------------------------------------

BAD = (math.nan, math.inf, -1, "1", True, 2**70)
SPEC = {
    "name": "tiny",
    "config": {},
    "recipe": recipe("tiny"),
    "seed": 0,
    "context_length": 8,
    "precision": "fp32",
    "data_sha256": "",
}
SETTINGS = [
    (recipe, {"name": "tiny"}, ("steps", "batch_size", "learning_rate", "weight_decay", "warmup_steps", "beta1")),
    (RunSpec, SPEC, ("seed", "context_length", "evaluate_every", "evaluation_sequences", "distillation")),
    (Comparison, {"title": "", "groups": ((Entry("tiny"),),)}, ("evaluate_every", "micro_batch_size")),
    (SkipV1Options, {}, ("ratio", "sweeps", "ridge", "batch_size")),
    (AnalysisSettings, {"context_length": 32}, ("samples", "probe_steps", "probe_batch_size", "seed")),
    (DemoSettings, {"steps": 1}, ("steps", "batch_size", "learning_rate", "documents", "rounds")),
]


@pytest.mark.parametrize("make, given, names", SETTINGS, ids=lambda value: getattr(value, "__name__", ""))
def test_settings(make, given, names):
    for name, value in product(names, BAD):
        if not (value == 2**70 and RANGES[name].high == math.inf):
            with pytest.raises(LeanError, match=name) as error:
                make(**{**given, name: value})
            assert "\n" not in str(error.value)


def test_numbers_that_are_in_order_are_accepted():
    for name, allowed in RANGES.items():
        for value in (allowed.low, min(allowed.high, 10**6)):
            allowed.check(name, int(value) if allowed.whole else value)
    for suite_recipe in ({"learning_rate": 1e9}, {"steps": 1}, {"weight_decay": 0}):
        recipe("tiny", **suite_recipe)


# --- text: every file that is none, for every command that reads text -------------------------------------------------


def written(name: str, content: bytes):
    def write(folder: Path) -> str:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)
        return name

    write.__name__ = name
    return write


def io_error(folder: Path) -> str:
    if not Path("/proc/self/mem").exists():
        pytest.skip("no file here whose reading is an input/output error")
    return "/proc/self/mem"


def missing(folder: Path) -> str:
    return "nowhere.txt"


def long_name(folder: Path) -> str:
    return "a" * 5000 + ".txt"


TEXTS = {
    "not-utf8": written("latin.txt", "caf\u00e9 ".encode("latin-1") * 99),
    "nul": written("nul.txt", b"abc\0def" * 99),
    "empty": written("empty.txt", b""),
    "missing": missing,
    "long-name": long_name,
    "io-error": io_error,
}
READERS = [
    *((command, "--data") for command in ("train", "uptrain", "compare", "eval", "experiments.analysis")),
    *(("convert", option) for option in ("--calibration", "--evaluate")),
    *((command, "--text") for command in ("eliminate", "verify")),
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("command, option", READERS)
def test_text(refused, folder, command, option, text):
    name = TEXTS[text](folder)
    line = refused(*COMMANDS[command], option, name)
    assert text == "long-name" or Path(name).name in line


# --- paths: everything that is no checkpoint, for every command that opens one ----------------------------------------


def empty_folder(folder: Path) -> str:
    Path("nothing").mkdir(exist_ok=True)
    return "nothing"


# More of them go here: a function puts the thing into the folder and returns its path.
PATHS = {
    "missing": lambda folder: "nowhere",
    "absolute": lambda folder: "/nope",
    "empty-name": lambda folder: "",
    "long-name": lambda folder: "a" * 5000,
    "text": lambda folder: "corpus.txt",
    "empty-folder": empty_folder,
    "no-json": written("cut/config.json", b'{"model_type": '),
    "no-object": written("list/config.json", b"[1]"),
    "no-kind": written("kindless/config.json", b"{}"),
}


@pytest.mark.parametrize("command", [command for command, words in COMMANDS.items() if "source" in words])
@pytest.mark.parametrize("path", PATHS)
def test_paths(refused, folder, command, path):
    name = PATHS[path](folder)
    name = str(Path(name).parent) if name.endswith(".json") else name
    refused(*(name if word == "source" else word for word in COMMANDS[command]))


# --- words: every option that takes one of several --------------------------------------------------------------------


# --- configurations: every field, in a model's name and in config.json ------------------------------------------------

FIELDS = [
    *((name, value) for name in ("hidden_size", "num_hidden_layers", "vocab_size") for value in (0, -1, 1.5, "wide")),
    *((name, math.nan) for name in ("norm_eps", "initializer_range", "hidden_dropout", "attention_dropout")),
    *((name, math.inf) for name in ("norm_eps", "initializer_range", "embedding_dropout")),
    *((name, -1) for name in ("norm_eps", "initializer_range", "hidden_dropout", "head_dim", "intermediate_size")),
    *((name, 10**12) for name in ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")),
    *((name, "nonsense") for name in ("norm_type", "hidden_act", "mlp_type", "task", "mask_type", "block_type")),
    *((name, True) for name in ("hidden_size", "num_attention_heads")),
    *((name, 3) for name in ("num_attention_heads", "num_key_value_heads", "num_hidden_groups")),
    ("qk_norm", 1),
    *(("nonsense", value) for value in (1, "x")),
]
NAMED = {
    "inspect": lambda name: ("inspect", name),
    "train": lambda name: ("train", name, *DATA, *OUT),
    "compare": lambda name: ("compare", MODEL, name, *DATA, *OUT),
    "bench": lambda name: ("bench", name, *OUT),
}
STORED = {
    "inspect": ("inspect", "edited"),
    "generate": ("generate", "edited", "--prompt", "a"),
    "eval": ("eval", "edited", *DATA),
    "convert": ("convert", "edited", "--to", "nonlinear-query", *OUT),
}


def of_yaml(value) -> str:
    return {"nan": ".nan", "inf": ".inf", "True": "true"}.get(str(value), str(value))


@pytest.mark.parametrize("command", NAMED)
@pytest.mark.parametrize("field, value", FIELDS)
def test_fields_of_a_name(refused, command, field, value):
    parts = [part for part in MODEL.split("+") if not part.startswith(f"{field}=")]
    assert field in refused(*NAMED[command]("+".join((*parts, f"{field}={of_yaml(value)}"))))


# Unknown keys of a file are notes of other tools, and kept.
@pytest.mark.parametrize("command", STORED)
@pytest.mark.parametrize("field, value", [case for case in FIELDS if case[0] != "nonsense"])
def test_fields_of_a_checkpoint(refused, folder, command, field, value):
    shutil.copytree("source", "edited")
    try:
        config = json.loads(Path("edited/config.json").read_text())
        Path("edited/config.json").write_text(json.dumps(config | {field: value}))
        assert field in refused(*STORED[command])
    finally:
        shutil.rmtree("edited")


# --- models whose weights or tokenizer are not theirs, and prompts that are no text -----------------------------------


@pytest.fixture
def edited(folder):
    """A copy of the model, for one test."""
    shutil.copytree("source", "edited")
    yield Path("edited")
    shutil.rmtree("edited")


def test_whole_numbers_as_weights(refused, edited):
    tensors = {name: (100 * tensor).to(torch.int32) for name, tensor in load_file(edited / "model.safetensors").items()}
    save_file(tensors, edited / "model.safetensors", metadata={"format": "pt"})
    for command in (STORED["generate"], STORED["eval"], STORED["convert"]):
        assert "int32" in refused(*command)


@pytest.mark.parametrize("zipped", [True, False])
def test_refused_pickles_are_one_line(refused, edited, zipped, recwarn):
    (edited / "model.safetensors").unlink()
    torch.save({"a": Path()}, edited / "pytorch_model.bin", pickle_protocol=4, _use_new_zipfile_serialization=zipped)
    for command in STORED.values():
        assert "pytorch_model.bin" in refused(*command)
    assert not [warning for warning in recwarn if "pickle" in str(warning.message)]


def test_tokenizer_of_another_vocabulary(refused, edited):
    words = [f"word{i:04}" for i in range(400)]
    larger = train_tokenizer(iter([" ".join(words * 9)]), 500)
    larger.save_pretrained(edited)
    assert len(larger) > 300
    Path("words").write_text(" ".join(words))
    model = STORED["eval"][1]
    for command in (("generate", model, "--prompt", "word0399"), ("eval", model, "--data", "words")):
        assert "and the model's vocabulary ends at 299; leave it out" in refused(*command)


def test_prompts_that_are_no_text(refused, cli, monkeypatch):
    assert "no UTF-8" in refused("generate", "source", "--prompt", "caf\udce9")
    with Path("prompts").open("wb") as file:
        file.write(b"the\ncaf\xe9\nquick\n")
    with Path("prompts").open(encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        code, _, err = cli("generate", "source", "--interactive", "--max-new-tokens", "2", "--device", "cpu")
    Path("prompts").unlink()
    assert code == 0
    assert err.count("new tokens") == 2, "the prompts around the bad one are answered"
    assert err.count("error:") == 1


def test_an_unforeseen_error_names_the_file_of_its_traceback(cli, monkeypatch, tmp_path):
    def fail(*_):
        raise TypeError("a defect")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("leanqkv.commands.listing.preset", fail)
    code, _, err = cli("presets")
    (file,) = tmp_path.glob("leanqkv-*.log")
    assert code == 1
    assert err.count("\n") == 1
    assert "TypeError: a defect" in err
    assert str(file) in err
    assert "Traceback" in file.read_text()
    code, _, err = cli("--debug", "presets")
    assert code == 1
    assert "Traceback" in err
