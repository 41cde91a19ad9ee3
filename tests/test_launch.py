"""Runs of a comparison as jobs: killed ones go on, and the records are those of one undisturbed command."""

import json
import os
import signal
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from comparing import COMPARISON, models
from corpus import SHAPE

from leanqkv import LeanError
from leanqkv.compare.comparison import run_comparison
from leanqkv.compare.launch import Cluster, InJob, Launcher
from leanqkv.compare.records import load_comparison
from leanqkv.data.corpus import open_corpus

pytest.importorskip("submitit")

SWEEP = replace(
    COMPARISON,
    groups=models(f"tiny{SHAPE}", f"tiny+skipv1{SHAPE}"),
    seeds=(0,),
    recipe={"steps": 60, "batch_size": 4},
    learning_rates=None,
    evaluate_every=6,
)
CHANGING = ("seconds", "tokens_per_second", "hardware", "git_commit", "command")


def outcomes(out):
    """Records by name, without what no two runs have in common, and the weights."""
    records = {}
    for file in out.glob("runs/*/record.json"):
        record = json.loads(file.read_text())
        for name in CHANGING:
            record.pop(name, None)
        training = [{key: value for key, value in row.items() if "second" not in key} for row in record["training"]]
        weights = (file.parent / "model.safetensors").read_bytes()
        records[file.parent.name] = (record | {"training": training}, weights)
    return records


def workers():
    """Processes of jobs of this one that train."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if "submitit.core._submit" in process.cmdline() and not process.children():
                found.append(process)
    return found


@pytest.fixture
def local(monkeypatch):
    monkeypatch.setattr("leanqkv.compare.comparison.available_cores", lambda: 1)
    monkeypatch.setattr("leanqkv.compare.launch.SECONDS", 0.05)
    threads = torch.get_num_threads()
    yield Cluster("local", hours=1)
    torch.set_num_threads(threads)  # a job, which knows of no fixture, may have chosen more


@pytest.mark.exhaustive
@pytest.mark.slow
def test_killed_jobs_go_on_and_the_records_are_the_same(data, tmp_path, local):
    run_comparison(SWEEP, data, tmp_path / "undisturbed", precision="fp32", device="cpu", jobs=1)
    killed, messages = [], []

    def on_update(update):
        if update.record is None and 6 <= update.step < 60 and len(killed) < 2 and update.job.out not in killed:
            for process in workers():
                process.kill()
            killed.append(update.job.out)

    options = {"precision": "fp32", "device": "cpu", "jobs": 2, "cluster": local}
    run_comparison(SWEEP, data, tmp_path / "jobs", on_update=on_update, on_message=messages.append, **options)
    assert len(killed) == 2
    died = [message for message in messages if "died; another one goes on from step" in message]
    assert len(died) >= 2 and not all(message.endswith(" 0") for message in died)
    assert outcomes(tmp_path / "jobs") == outcomes(tmp_path / "undisturbed")
    assert len(outcomes(tmp_path / "jobs")) == 2
    # Finished runs are not submitted again.
    before = sorted((tmp_path / "jobs/jobs").iterdir())
    run_comparison(SWEEP, data, tmp_path / "jobs", **options)
    assert sorted((tmp_path / "jobs/jobs").iterdir()) == before


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_job_outlives_the_command_and_is_waited_for(data, tmp_path, local):
    class Ended(BaseException):
        pass

    def end(update):
        raise Ended if update.step else None

    one = replace(SWEEP, groups=models(f"tiny{SHAPE}"), recipe={"steps": 200, "batch_size": 4})
    options = {"precision": "fp32", "device": "cpu", "jobs": 1, "cluster": local}
    with pytest.raises(BaseException) as caught:
        run_comparison(one, data, tmp_path / "out", on_update=lambda u: end(u) if u.step else None, **options)
    assert caught.type is Ended
    submitted = len(list((tmp_path / "out/jobs").glob("*_submitted.pkl")))
    assert not list((tmp_path / "out").glob("runs/*/record.json"))
    assert "no finished run yet" in report(tmp_path / "out")
    run_comparison(one, data, tmp_path / "out", **options)
    assert len(list((tmp_path / "out").glob("runs/*/record.json"))) == 1
    assert len(list((tmp_path / "out/jobs").glob("*_submitted.pkl"))) == submitted


def report(out):
    from leanqkv.report.comparison import remarks

    return " ".join(remarks(load_comparison(out)))


@pytest.mark.slow
def test_a_job_that_dies_again_and_again_is_given_up(data, tmp_path, local, monkeypatch):
    def on_update(update):
        for process in workers():
            process.kill()

    with pytest.raises(LeanError, match=r"died 3 times at step 0; .* says why"):
        run_comparison(
            replace(SWEEP, groups=models(f"tiny{SHAPE}")),
            data,
            tmp_path / "out",
            precision="fp32",
            device="cpu",
            jobs=1,
            cluster=local,
            on_update=on_update,
        )


@pytest.mark.slow
def test_an_error_in_a_job_is_its_own_line(tmp_path, local):
    with pytest.raises(LeanError, match=r"^the name of the data is empty; give a file, a folder or a dataset$"):
        Launcher(local, tmp_path).wait_for(open_corpus, "")


def test_a_job_that_has_to_make_room_is_submitted_again():
    again = InJob(len, "abc").checkpoint()
    assert again.function() == (3, None)


def rank_and_count():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def die_in_the_second():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


@pytest.mark.slow
def test_the_processes_of_a_job_answer_as_one():
    assert InJob(rank_and_count, processes=2)() == ((0, 2), None)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_processes_of_a_job_refuse_as_one_and_end_together():
    assert InJob(open_corpus, "", processes=2)()[1].startswith("the name of the data is empty")
    with pytest.raises(SystemExit):
        InJob(die_in_the_second, processes=2)()


def child(process):
    """Whether it is one of the processes that a job starts for a run."""
    with suppress(psutil.Error):
        return "spawn_main" in " ".join(process.cmdline()) and len(process.parents()) > 2
    return False


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("shard", [None, "fsdp"])
def test_jobs_of_two_processes_give_the_losses_of_one(data, tmp_path, local, shard):
    one = replace(SWEEP, groups=models(f"tiny+skipv1{SHAPE}"), micro_batch_size=2)
    killed, messages = [], []

    def on_update(update):
        if 6 <= update.step < 60 and not killed:
            job = next(process for process in psutil.Process().children() if "_local" in " ".join(process.cmdline()))
            killed.append([process for process in job.children(recursive=True) if child(process)][-1])
            killed[0].kill()

    run_comparison(one, data, tmp_path / "one", precision="fp32", device="cpu", jobs=1)
    options = {"precision": "fp32", "device": "cpu", "cluster": replace(local, gpus=2)}
    two = replace(one, shard=shard)
    run_comparison(two, data, tmp_path / "two", on_update=on_update, on_message=messages.append, **options)
    assert killed and any("died; another one goes on from step" in message for message in messages)
    [(found, _)], [(wanted, _)] = (outcomes(tmp_path / name).values() for name in ("two", "one"))
    for a, b in zip(found["training"] + found["evaluations"], wanted["training"] + wanted["evaluations"], strict=True):
        assert a["step"] == b["step"] and a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    assert found["shard"] == shard
    assert json.loads(next((tmp_path / "two/runs").glob("*/record.json")).read_text())["hardware"]["processes"] == 2


def test_without_submitit_its_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LeanError, match=r"pip install 'leanqkv\[cluster\]'"):
        Cluster()


def test_of_an_earlier_start_only_jobs_that_go_on_are_waited_for(monkeypatch, tmp_path):
    """A job that has failed is not held against its run for ever."""
    import submitit

    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(submitit, "SlurmJob", lambda folder, job_id: SimpleNamespace(done=lambda: job_id == "1"))
    launcher = Launcher(Cluster("slurm"), tmp_path)
    names = ("ended", "under-way", "new")
    jobs = [SimpleNamespace(out=tmp_path / "runs" / name) for name in names]
    launcher.folder.mkdir(exist_ok=True)
    (launcher.folder / "started.json").write_text(json.dumps({"ended": "1", "under-way": "2"}))
    assert [out.name for out in launcher._earlier(jobs)] == ["under-way"]


def test_jobs_of_other_runs_that_wait_are_not_forgotten(monkeypatch, tmp_path):
    """Those of the final runs, while a search for a model that was added is on."""
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    launcher = Launcher(Cluster("slurm"), tmp_path)
    launcher.folder.mkdir(exist_ok=True)
    for number, name in enumerate(("final", "grid")):
        launcher._store({tmp_path / "runs" / name: SimpleNamespace(job_id=str(number))})
    assert json.loads((launcher.folder / "started.json").read_text()) == {"final": "0", "grid": "1"}


def test_what_slurm_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    cluster = Cluster("slurm", 23.5, 8, 16, 64, {"partition": "gpu", "account": "lab"})
    launcher = Launcher(cluster, tmp_path / "sweep")
    assert launcher.processes == 8 and Launcher(Cluster("slurm"), tmp_path).processes is None
    assert Launcher(Cluster("slurm"), tmp_path, "fsdp").processes == 1
    executor = launcher.executor._executor
    lines = executor._make_submission_file_text("command", "1").splitlines()
    for wanted in (
        "--gpus-per-node=8",
        "--ntasks-per-node=1",
        "--cpus-per-task=16",
        "--mem=64GB",
        "--time=1410",
        "--partition=gpu",
        "--account=lab",
        "--job-name=leanqkv-sweep",
    ):
        assert f"#SBATCH {wanted}" in lines
