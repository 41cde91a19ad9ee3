"""The command line, as a person uses it."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from corpus import SHAPE, write_corpus

from leanqkv.cli import _as_options, app
from leanqkv.train.trainer import Watch

MODEL = f"tiny+skipv1{SHAPE}"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a corpus, and the environment to run in."""
    directory = tmp_path_factory.mktemp("cli")
    write_corpus(directory / "corpus.txt")
    return directory


@pytest.fixture(scope="module", autouse=True)
def _environment(place):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEANQKV_CACHE", str(place / "cache"))
        patch.setenv("COLUMNS", "100")
        patch.setattr("leanqkv.compare.comparison.available_cores", lambda: 1)  # one run at a time, on one thread
        patch.chdir(place)
        yield


TRAIN = ("train", MODEL, "--data", "corpus.txt", "--steps", "40", "--precision", "fp32", "--evaluate-every", "10")


@pytest.fixture
def trained(place, cli):
    """A run of TRAIN, made by the first test that asks for it."""
    code, out, err = cli(*TRAIN, "--out", "whole")
    assert (code, err) == (0, "")
    assert "validation loss" in out
    return place / "whole"


@pytest.mark.slow
def test_train_killed_outright_goes_on_bit_identically(place, cli, trained):
    command = [sys.executable, "-m", "leanqkv.cli", *TRAIN, "--out", "killed"]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not list(place.glob("killed/checkpoint-*/complete")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (place / "killed" / "record.json").exists(), "it was over before it could be killed"
    assert cli(*TRAIN, "--out", "killed")[0] == 0
    whole, killed = (json.loads((place / d / "record.json").read_text()) for d in ("whole", "killed"))
    assert killed["evaluations"] == whole["evaluations"]
    assert killed["training"] == whole["training"]
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (place / "killed" / file).read_bytes() == (trained / file).read_bytes()


@pytest.mark.slow
def test_ctrl_c_says_how_to_continue_and_the_run_does(place, cli, trained, monkeypatch):
    on_step_end = Watch.on_step_end

    def interrupt(watch, args, state, control, **kwargs):
        if state.global_step == 25:
            raise KeyboardInterrupt
        on_step_end(watch, args, state, control, **kwargs)

    monkeypatch.setattr(Watch, "on_step_end", interrupt)
    code, _, err = cli(*TRAIN, "--out", "stopped")
    assert (code, err) == (130, "stopped; run the same command again to continue\n")
    monkeypatch.undo()
    assert cli(*TRAIN, "--out", "stopped")[0] == 0
    assert (place / "stopped" / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()


def test_a_run_that_diverges_says_so(place, cli):
    steps = ("--batch-size", "4", "--learning-rate", "1e30", "--warmup-steps", "0")
    code, _, err = cli(*TRAIN, *steps, "--device", "cpu", "--out", "diverged")
    record = json.loads((place / "diverged" / "record.json").read_text())
    assert (code, err.count("\n")) == (2, 1)
    assert f"diverged at step {record['diverged']['step']}" in err


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_killed_comparison_leaves_no_process_behind(place):
    models = (f"tiny{SHAPE}", MODEL)
    options = ("--data", "corpus.txt", "--steps", "100000", "--precision", "fp32", "--jobs", "2", "--device", "cpu")
    command = [sys.executable, "-m", "leanqkv.cli", "compare", *models, *options, "--out", "orphans"]
    streams = {"stdout": subprocess.DEVNULL, "stderr": (place / "orphans.err").open("w")}
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **streams)
    deadline = time.monotonic() + 200
    while len(list(place.glob("orphans/runs/*/checkpoint-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=20)
    for worker in alive:
        worker.kill()
    assert not alive
    assert "leaked" not in (place / "orphans.err").read_text()


@pytest.mark.long_cases
@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.4, 1.0, 1.6])
def test_ctrl_c_while_the_libraries_load_is_quiet(seconds):
    command = [sys.executable, "-m", "leanqkv", "presets"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    err = process.communicate()[1]
    assert err == ""
    assert process.returncode in (130, 0), "0: it was over"


def test_generate_and_inspect_a_trained_model(cli, trained):
    arguments = ("generate", str(trained), "--prompt", "the quick", "--max-new-tokens", "8", "--seed", "3")
    code, out, err = cli(*arguments)
    assert code == 0, err
    assert out.startswith("the quick")
    assert len(out.strip()) > len("the quick")
    assert cli(*arguments)[1] == out, "the seed decides"
    code, out, _ = cli("inspect", "llama-350m+mla+skipv1")
    assert code == 0 and "1-23" in out and "7,936 bytes per token" in out and "128-255 of layer 0" in out
    code, out, _ = cli("inspect", "tiny+yoco:local=true+sliding_window=64+mlp_type=moe")
    assert code == 0 and "last 63 tokens" in " ".join(out.split()) and "num_local_experts 8" in out
    code, out, _ = cli("inspect", str(trained))
    assert code == 0
    record = json.loads((trained / "record.json").read_text())
    assert f"parameters: {record['parameters']['total']:,}" in out
    assert f"{record['kv_bytes_per_token']['bfloat16']:,} bytes per token, 87.5% of MHA" in out


@pytest.mark.slow
def test_compare_ends_with_the_table_and_the_page(place, cli):
    models = (f"tiny{SHAPE}", f"tiny+nonlinear-query{SHAPE}")
    arguments = ("compare", *models, "--data", str(place / "corpus.txt"), "--steps", "12", "--seeds", "2")
    code, out, err = cli(*arguments, "--precision", "fp32", "--evaluate-every", "6", "--out", "both")
    assert code == 0, err
    assert out.index("recipes: the models differ in the weight decay (0.03125, 0.1)") < out.index("difference to")
    assert "Recipes differ in the weight decay (0.03125, 0.1)." in " ".join(out.split())
    assert "report: both/report.html" in out
    assert (place / "both" / "report.html").stat().st_size > 10_000
    command = json.loads((place / "both" / "compare.json").read_text())["command"]
    assert command.startswith("leanqkv compare tiny+") and " --data corpus.txt " in command, "a place of this machine"
    (place / "both" / "report.html").unlink()
    assert cli("report", "both")[0] == 0
    assert (place / "both" / "report.html").exists()


def test_presets_name_their_papers(cli):
    code, out, _ = cli("presets")
    assert code == 0
    for text in ("gpt2-124m", "llama-3b", "tinyllama-1.1b", "skipv0", "P2 eq. 2-3", "source_layer=2"):
        assert text in out
    assert "heads=" not in out, "rows cannot be in a name"


def test_parameters_that_the_library_names_are_shown_as_options(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["leanqkv", "convert", "model", "--to", "gqa"])
    said = (
        "`source` is a `to=gqa`; `sequence_length` or `choose=False`, `device`, but neither `nothing` nor `two words`"
    )
    shown = "SOURCE is a --to gqa; --sequence-length or --no-choose, --device, but neither `nothing` nor `two words`"
    assert _as_options(said, app) == shown
