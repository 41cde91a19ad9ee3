"""Several processes on one run, and signals to runs under way, as a person starts and stops them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from corpus import SHAPE, write_corpus
from safetensors.torch import load_file
from shapes import tiny
from two_processes import two_process_step

import leanqkv.workers
from leanqkv import preset
from leanqkv.compare.comparison import slug
from leanqkv.presets.catalog import MECHANISMS
from leanqkv.train.directory import complete
from leanqkv.train.micro_batch import USABLE_SHARE, Step
from leanqkv.train.precision import parse_precision

pytestmark = pytest.mark.slow

MODEL = f"tiny+skipv1{SHAPE}"
OTHERS = {
    "experts": {"mlp_type": "moe", "num_local_experts": 3},
    "shared blocks": {"num_hidden_groups": 1},
    "parallel": {"block_type": "parallel"},
}
# Sums of some thousand terms, in another order.
ROUNDING = 1000 * torch.finfo(torch.float64).eps


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("gradient_checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_two_processes_give_the_gradient_of_one_with_accumulation(name, gradient_checkpointing):
    assert two_process_step(tiny("gpt", name, num_hidden_layers=5), gradient_checkpointing) <= ROUNDING


@pytest.mark.parametrize("name", MECHANISMS)
def test_two_processes_with_halves_of_the_weights(name):
    assert two_process_step(tiny("gpt", name, num_hidden_layers=5), shard=True) <= ROUNDING


@pytest.mark.parametrize("name", [*OTHERS, "skipv1", "denseformer", "skipkv1"])
def test_two_processes_with_halves_of_the_weights_and_checkpoints(name):
    fields = {**OTHERS.get(name, {}), "tie_word_embeddings": name != "skipv1"}
    config = tiny("llama", *([] if name in OTHERS else [name]), **fields)
    for gradient_checkpointing in (False, True):
        assert two_process_step(config, gradient_checkpointing, shard=True) <= ROUNDING


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("gradient_checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_two_processes_do_with_other_blocks(name, gradient_checkpointing):
    assert two_process_step(tiny("llama", **OTHERS[name]), gradient_checkpointing) <= ROUNDING


@pytest.mark.parametrize("shard", [False, True], ids=["whole", "halves"])
def test_two_processes_do_on_images(shard):
    assert two_process_step(preset("vit-tiny+skipv1", num_hidden_layers=2), shard=shard) <= ROUNDING


# --- the command line -------------------------------------------------------------------------------------------------

STOPPED = "stopped; run the same command again to continue"
TRAIN = ("--data", "corpus.txt", "--steps", "200", "--evaluate-every", "10", "--device", "cpu", "--precision", "fp32")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a corpus, in which all that follows runs."""
    directory = tmp_path_factory.mktemp("processes")
    write_corpus(directory / "corpus.txt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEANQKV_CACHE", str(directory / "cache"))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("COLUMNS", "200")
        patch.setattr("leanqkv.compare.comparison.available_cores", lambda: 1)
        patch.chdir(directory)
        yield directory


def read(directory):
    return json.loads(Path(directory, "record.json").read_text())


def curves(directory):
    record = read(directory)
    return record["training"], record["evaluations"], record["final"]


def torchrun(*arguments):
    return torchrun_with(2, *arguments)


def torchrun_with(processes, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", "leanqkv"]
    # Without a compiler to wait for.
    environment = os.environ | {"CXX": "no-compiler", "TORCHINDUCTOR_CACHE_DIR": str(Path("inductor").resolve())}
    run = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=300)
    return run.returncode, run.stdout, run.stderr


@pytest.mark.exhaustive
def test_the_first_process_chooses_for_both_and_alone_speaks(place, cli):
    model, options = f"tiny{SHAPE}", ("--data", "corpus.txt", "--steps", "20", "--evaluate-every", "5")
    code, out, err = torchrun("train", model, *options, "--device", "cpu", "--out", "two")
    assert code == 0, err
    for line in (
        "data: corpus.txt",
        "micro-batch 4 of 8 on 2 processes: ",
        "precision: ",
        "validation loss",
        "two: model",
    ):
        assert out.count(line) == 1, line
    two = read("two")
    assert two["hardware"]["processes"] == 2
    assert two["micro_batch_size"] == 4
    assert two["precision"]["choice"] in two["precision"]["milliseconds_per_step"]
    same = ("--precision", two["precision"]["choice"], "--micro-batch-size", "4", "--device", "cpu")
    assert cli("train", model, *options, *same, "--out", "one")[0] == 0
    if "compile" in two["precision"]["choice"]:  # DDP has the model compiled in other pieces, which round differently
        assert curves("one")[1][-1]["loss"] == pytest.approx(curves("two")[1][-1]["loss"], rel=1e-5)
        return
    assert curves("one")[1:] == curves("two")[1:]
    assert Path("one/model.safetensors").read_bytes() == Path("two/model.safetensors").read_bytes()


@pytest.mark.exhaustive
def test_two_processes_remove_norms(place, cli):
    """At the same steps as one process, by the constants that the first has seen."""
    options = ("--data", "corpus.txt", "--batch-size", "8", "--device", "cpu", "--precision", "fp32")
    assert cli("train", f"tiny{SHAPE}", *options, "--steps", "20", "--out", "norms")[0] == 0
    removal = ("uptrain", "norms", *options, "--steps", "68", "--remove-norms", "--micro-batch-size", "4")
    code, out, err = torchrun(*removal, "--out", "free-two")
    assert code == 0, err
    assert out.count("norms removed: all, step 68") == 1
    assert cli(*removal, "--out", "free-one")[0] == 0
    one, two = (read(name)["norms"]["removed"] for name in ("free-one", "free-two"))
    assert [(entry["step"], entry["norm"]) for entry in one] == [(entry["step"], entry["norm"]) for entry in two]
    assert [entry["constant"] for entry in one] == pytest.approx([entry["constant"] for entry in two], rel=0.5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("field", ["task=masked_lm", "mask_type=prefix"])
def test_two_processes_weigh_targets_alike(place, cli, field):
    """Each has a part of a batch with another number of targets; and the tokenizer has a number for the mask."""
    model, options = f"tiny{SHAPE}+{field}", ("--data", "corpus.txt", "--steps", "8", "--evaluate-every", "4")
    options += ("--precision", "fp32", "--micro-batch-size", "2", "--device", "cpu")
    code, _, err = torchrun("train", model, *options, "--out", f"two-{field}")
    assert code == 0, err
    assert cli("train", model, *options, "--out", f"one-{field}")[0] == 0
    found, wanted = curves(f"two-{field}"), curves(f"one-{field}")
    for one, other in zip(found[0] + found[1], wanted[0] + wanted[1], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_an_error_of_the_first_process_is_told_once_and_ends_both(place):
    Path("full").mkdir()
    Path("full", "thesis.txt").write_text("precious")
    code, _, err = torchrun("train", MODEL, *TRAIN, "--out", "full")
    assert code != 0
    assert err.count("error: full is not empty and not a run") == 1
    assert [file.name for file in Path("full").iterdir()] == ["thesis.txt"]


def interrupted(arguments, ready):
    """Send Ctrl-C to a command and its processes, as a terminal does, once there is a file `ready`."""
    command = [sys.executable, "-m", "leanqkv", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 200
    while not list(Path().glob(ready)) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == STOPPED
    assert "Traceback" not in err


@pytest.mark.exhaustive
def test_ctrl_c_in_train_and_uptrain(place, cli):
    assert cli("train", MODEL, *TRAIN, "--out", "whole")[0] == 0
    interrupted(("train", MODEL, *TRAIN, "--out", "stopped"), "stopped/checkpoint-*/complete")
    assert not Path("stopped/record.json").exists()
    assert cli("train", MODEL, *TRAIN, "--out", "stopped")[0] == 0
    assert curves("stopped") == curves("whole")
    assert cli("uptrain", "whole", *TRAIN, "--out", "whole-on")[0] == 0
    interrupted(("uptrain", "whole", *TRAIN, "--out", "stopped-on"), "stopped-on/checkpoint-*/complete")
    assert not Path("stopped-on/record.json").exists()
    assert cli("uptrain", "whole", *TRAIN, "--out", "stopped-on")[0] == 0
    assert curves("stopped-on") == curves("whole-on")


@pytest.mark.parametrize(
    "command", [("convert", "--to", "skipv1", "--method", "mean-v"), ("eliminate", "--remove", "block-diagonal")]
)
def test_ctrl_c_while_a_checkpoint_is_written(place, cli, command, monkeypatch):
    name, *options = command
    model = f"tiny{SHAPE}"
    if not Path("source").exists():
        assert cli("train", model, *TRAIN, "--steps", "10", "--out", "source")[0] == 0

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    assert cli(name, "source", *options, "--out", f"{name}-whole")[0] == 0
    monkeypatch.setattr("leanqkv.checkpoints.write.copy_tokenizer", interrupt)
    code, _, err = cli(name, "source", *options, "--out", f"{name}-stopped")
    assert (code, err) == (130, STOPPED + "\n")
    (shard,) = Path(f".{name}-stopped.partial").glob("*.safetensors")
    written = shard.stat().st_mtime_ns, shard.stat().st_ino
    monkeypatch.undo()
    assert cli(name, "source", *options, "--out", f"{name}-stopped")[0] == 0
    (shard,) = Path(f"{name}-stopped").glob("*.safetensors")
    assert (shard.stat().st_mtime_ns, shard.stat().st_ino) == written, "it was written again"
    assert shard.read_bytes() == Path(f"{name}-whole", shard.name).read_bytes()


# --- the micro-batch --------------------------------------------------------------------------------------------------


def test_a_run_keeps_the_micro_batch_it_began_with(place, cli, monkeypatch):
    """Whatever memory is free when it goes on."""
    step = Step(preset(f"tiny{SHAPE}"), 8, 32, "cpu", parse_precision("fp32"))
    arguments = ("train", f"tiny{SHAPE}", *TRAIN, "--steps", "20")
    monkeypatch.setattr("leanqkv.commands.training.free_memory", lambda device: int(step.bytes(2) / USABLE_SHARE) + 1)
    with monkeypatch.context() as patch:
        patch.setattr("leanqkv.train.trainer.Watch.on_save", interrupt_after_saving)
        code, out, _ = cli(*arguments, "--out", "small")
        assert code == 130
    assert "micro-batch 2 of 8 (4 accumulation steps): " in out
    monkeypatch.setattr("leanqkv.commands.training.free_memory", lambda device: 10**12)
    code, out, err = cli(*arguments, "--out", "small")
    assert code == 0, err
    assert "micro-batch" not in out
    assert json.loads(Path("small/run.json").read_text())["micro_batch_size"] == 2
    assert cli(*arguments, "--micro-batch-size", "2", "--out", "asked")[0] == 0
    assert curves("small") == curves("asked")
    assert cli(*arguments, "--micro-batch-size", "4", "--out", "small")[0] == 2
    code, out, _ = cli(*arguments, "--out", "large")
    assert "micro-batch 8 of 8: " in out


def interrupt_after_saving(watch, args, state, control, **kwargs):
    complete(Path(args.output_dir, f"checkpoint-{state.global_step}"), keep_earlier=False)
    raise KeyboardInterrupt


def test_a_comparison_takes_one_micro_batch_for_all_models(place, cli, monkeypatch):
    wide = f"tiny{SHAPE}+intermediate_size=512"
    step = Step(preset(wide), 8, 32, "cpu", parse_precision("fp32"))
    arguments = ("compare", f"tiny{SHAPE}", wide, *TRAIN, "--steps", "10", "--seeds", "1", "--jobs", "1")
    monkeypatch.setattr("leanqkv.compare.comparison.free_memory", lambda device: int(step.bytes(4) / USABLE_SHARE) + 1)
    code, out, err = cli(*arguments, "--out", "alike")
    assert code == 0, err
    assert "micro-batch 4 of 8 (2 accumulation steps): " in out
    records = [json.loads(file.read_text()) for file in Path("alike/runs").glob("*/record.json")]
    assert [record["micro_batch_size"] for record in records] == [4, 4]
    monkeypatch.setattr("leanqkv.compare.comparison.free_memory", lambda device: 10**12)
    for file in Path("alike/runs").glob("*/record.json"):
        file.unlink()
    assert cli(*arguments, "--out", "alike")[0] == 0
    again = [json.loads(file.read_text()) for file in Path("alike/runs").glob("*/record.json")]
    assert [record["evaluations"] for record in again] == [record["evaluations"] for record in records]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread ends it, which waits for the interpreter")
def test_a_worker_ends_with_a_parent_that_is_killed_whatever_it_does(tmp_path):
    """Even where one call keeps all of its threads from running."""
    shutil.copy(leanqkv.workers.__file__, tmp_path / "module.py")  # alone, it is imported at once
    (tmp_path / "main.py").write_text(
        """
import multiprocessing, pathlib, re
from module import end_with_parent

def work():
    end_with_parent()
    pathlib.Path("ready").touch()
    re.match("(a+)+$", "a" * 60 + "b")

if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=work)
    worker.start()
    worker.join()
"""
    )
    parent = subprocess.Popen([sys.executable, "main.py"], cwd=tmp_path)
    deadline = time.monotonic() + 100
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    workers = [child for child in psutil.Process(parent.pid).children() if "spawn_main" in " ".join(child.cmdline())]
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(workers, timeout=20)
    for worker in alive:
        worker.kill()
    assert len(workers) == 1 and not alive


SHARDED = ("--data", "corpus.txt", "--steps", "40", "--evaluate-every", "4", "--precision", "fp32", "--shard", "fsdp")


def killed_after(step, processes, out, arguments):
    """Start a sharded run, and kill its last process with the checkpoint of that step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    run = subprocess.Popen(
        [*command, "-m", "leanqkv", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 200
    while not Path(out, f"checkpoint-{step}", "complete").exists() and time.monotonic() < deadline:
        assert run.poll() is None
        time.sleep(0.02)
    workers = psutil.Process(run.pid).children()
    workers[-1].kill()
    assert run.wait(60) != 0
    assert not any(worker.is_running() and worker.status() != "zombie" for worker in workers)


@pytest.mark.exhaustive
def test_a_sharded_run_goes_on_with_another_number_of_processes(place, cli):
    """One process, killed; two, of which one is killed; one again: the curve of a run that was never interrupted.

    Of the last checkpoint a process's part is damaged: the one before is taken.
    """
    arguments = ("train", MODEL, *SHARDED, "--micro-batch-size", "4", "--device", "cpu", "--out", "sharded")
    killed_after(4, 1, "sharded", arguments)
    killed_after(12, 2, "sharded", arguments)
    assert not Path("sharded/record.json").exists()
    whole = tuple(one for one in SHARDED if one not in ("--shard", "fsdp"))
    assert cli("train", MODEL, *whole, "--micro-batch-size", "4", "--device", "cpu", "--out", "one-process")[0] == 0
    part = max(Path("sharded").glob("checkpoint-*/optimizer_0/__1_0.distcp"), key=os.path.getmtime)
    part.write_bytes(part.read_bytes()[:-1] + b"\x7f")
    code, _, err = torchrun_with(1, *arguments)
    assert code == 0, err
    assert err.count(f"{part.parts[1]} is damaged and is removed (optimizer_0/__1_0.distcp is not as it was") == 1, err
    found, wanted = curves("sharded"), curves("one-process")
    for one, other in zip(found[0] + found[1], wanted[0] + wanted[1], strict=True):
        assert one["step"] == other["step"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    first, second = (load_file(Path(out, "model.safetensors")) for out in ("sharded", "one-process"))
    assert first.keys() == second.keys()
    # 40 steps of Adam, which divides small gradients by their own size.
    assert max((first[name] - second[name]).abs().max() for name in first) < 1e-4
    assert Path("sharded/config.json").read_bytes() == Path("one-process/config.json").read_bytes()


@pytest.mark.exhaustive
@pytest.mark.parametrize("shard", [(), ("--shard", "fsdp")], ids=["whole", "halves"])
def test_a_comparison_of_two_processes_goes_on_and_is_that_of_one(place, cli, shard):
    out = f"compared{len(shard)}"
    options = (*SHARDED[:-2], "--seeds", "1", "--learning-rate", "0.003", "--micro-batch-size", "4", "--device", "cpu")
    arguments = ("compare", f"tiny{SHAPE}", MODEL, *options)
    killed_after(12, 2, f"{out}/runs/{slug(MODEL)}-final-lr0.003-seed0", (*arguments, *shard, "--out", out))
    assert len(list(Path(out).glob("runs/*/record.json"))) == 1
    code, text, err = torchrun(*arguments, *shard, "--out", out)
    assert code == 0, err
    assert text.count(f"report: {out}/report.html") == 1
    if not Path("compared-alone").exists():
        assert cli(*arguments, "--jobs", "1", "--out", "compared-alone")[0] == 0
    records = sorted(Path("compared-alone").glob("runs/*/record.json"))
    assert len(records) == 2
    for file in records:
        found, wanted = curves(Path(out, "runs", file.parent.name)), curves(file.parent)
        for one, other in zip(found[0] + found[1], wanted[0] + wanted[1], strict=True):
            assert one["step"] == other["step"]
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    code, _, err = cli(*arguments, *(() if shard else ("--shard", "fsdp")), "--out", out)
    assert code == 2 and ("holds another comparison (shard:" if shard else "start it with torchrun") in err


def test_bad_shards(place, cli):
    code, _, err = cli("train", MODEL, *SHARDED, "--out", "alone")
    assert code == 2
    assert "start it with torchrun --nproc-per-node N -m leanqkv" in err
    assert not Path("alone").exists()
