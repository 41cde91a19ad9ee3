"""Comparisons: every architecture on the same batches, the learning-rate grid, going on, several processes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from comparing import COMPARISON, NAMES, models
from corpus import SHAPE

from leanqkv import LeanError
from leanqkv.compare.comparison import default_jobs, run_comparison, slug
from leanqkv.compare.jobs import PlannedRun
from leanqkv.compare.launch import Cluster
from leanqkv.compare.places import to_train_here
from leanqkv.compare.records import load_comparison
from leanqkv.compare.suite import Entry
from leanqkv.environment import same_place
from leanqkv.report.comparison_page import KIND

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _one_core():
    """Models this small are many times slower on two threads than on one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leanqkv.compare.comparison.available_cores", lambda: 1)
        yield


def run(comparison, data, out, **options):
    run_comparison(comparison, data, out, device="cpu", **{"jobs": 1, "precision": "fp32", **options})
    return {path.parent.name: json.loads(path.read_text()) for path in out.glob("runs/*/record.json")}


@pytest.fixture(scope="module")
def done(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("comparison") / "out"
    return out, run(COMPARISON, data, out)


def test_every_model_sees_the_same_batches(done):
    out, records = done
    finals = [record for record in records.values() if record["role"] == "final"]
    assert sorted((r["name"], r["seed"]) for r in finals) == sorted((name, s) for name in NAMES[:2] for s in (0, 1))
    plans = {seed: {r["batch_plan"]["sha256"] for r in finals if r["seed"] == seed} for seed in (0, 1)}
    assert all(len(plan) == 1 for plan in plans.values())
    assert plans[0] != plans[1]
    assert len(list(out.glob("batches/*.json"))) == 3, "a plan for each seed and for the grid's"
    assert not list(out.glob("runs/*/batches")), "the runs use the comparison's plan, not one of their own"


def test_the_grid_has_a_seed_of_its_own_and_its_best_rate_is_used(done):
    out, records = done
    grid = [record for record in records.values() if record["role"] == "grid"]
    assert len(grid) == 4
    assert {record["seed"] for record in grid} == {2}
    chosen = json.loads((out / "compare.json").read_text())["chosen_learning_rate"]
    for name in NAMES[:2]:
        tried = {r["recipe"]["learning_rate"]: r["final"]["validation_loss"] for r in grid if r["name"] == name}
        assert chosen[name] == min(tried, key=tried.get)
        finals = [r for r in records.values() if r["role"] == "final" and r["name"] == name]
        assert {r["recipe"]["learning_rate"] for r in finals} == {chosen[name]}
        assert all(r["recipe"]["min_learning_rate"] == pytest.approx(chosen[name] / 10) for r in finals)


def test_started_again_it_trains_nothing_that_is_done(data, done):
    out, records = done
    steps = []
    again = run(COMPARISON, data, out, on_update=lambda update: steps.append(update.record is None))
    assert not any(steps)
    assert again == records


@pytest.mark.long_cases
def test_it_goes_on_where_it_was_stopped(data, done, tmp_path):
    def stop(update):
        if update.record is not None and update.job.spec.role == "final":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(COMPARISON, data, tmp_path / "out", on_update=stop)
    assert 0 < len(list(tmp_path.glob("out/runs/*/record.json"))) < 8
    KIND.write(tmp_path / "out")  # what there is can be looked at
    assert losses(run(COMPARISON, data, tmp_path / "out")) == losses(done[1])


def test_a_later_start_adds_models_and_seeds(data, tmp_path):
    fewer = replace(COMPARISON, learning_rates=None, seeds=(1,), groups=models(*NAMES[:2]))
    begun = run(fewer, data, tmp_path)
    more = replace(fewer, title="More", seeds=(0, 1), groups=models(*NAMES))
    trained = {}
    grown = run(more, data, tmp_path, on_update=lambda update: trained.setdefault(update.job.out.name, update.record))
    assert len(grown) == 6
    assert begun.items() <= grown.items()
    assert set(list(trained)[:2]) == begun.keys(), "what is done is counted first"
    assert {name for name, first in trained.items() if first is None} == grown.keys() - begun.keys()
    comparison = load_comparison(tmp_path)
    assert (comparison.title, comparison.architectures, comparison.seeds) == ("More", list(NAMES), [0, 1])
    for other in (
        fewer,
        replace(more, groups=models(NAMES[1], NAMES[0], NAMES[2])),
        replace(more, seeds=(0, 1, 2), recipe={"steps": 13, "batch_size": 4}),
        replace(more, seeds=(0, 1, 2), groups=(*models(*NAMES[:2]), *models(NAMES[2]))),
    ):
        with pytest.raises(LeanError, match="holds another comparison"):
            run(other, data, tmp_path)
    assert load_comparison(tmp_path) == comparison


def test_a_start_that_is_refused_changes_nothing(data, tmp_path):
    """Neither the plan of a comparison that was to grow, nor what is there."""
    common = {"learning_rates": None, "seeds": (0,), "recipe": {"steps": 4}, "evaluate_every": 4}
    first, six = Entry(NAMES[0], recipe={"batch_size": 4}), Entry(NAMES[1], recipe={"batch_size": 6})
    fewer = replace(COMPARISON, **common, groups=((first,),))
    run(fewer, data, tmp_path)
    plan = (tmp_path / "compare.json").read_bytes()
    more = replace(fewer, seeds=(0, 1), groups=((first, Entry(NAMES[2], recipe={"batch_size": 4})),))
    for grown, precision, message in (
        (more, "bf16", "was begun in fp32"),
        (
            replace(more, groups=((first, six),)),
            "fp32",
            "begun with micro-batches of 4, which the batch of .*, 6, is not",
        ),
    ):
        with pytest.raises(LeanError, match=message):
            run(grown, data, tmp_path, precision=precision)
        assert (tmp_path / "compare.json").read_bytes() == plan
    assert len(run(fewer, data, tmp_path)) == 1


def test_seeds_are_not_added_to_a_search(data, done):
    """One of them would be the seed of the search."""
    with pytest.raises(LeanError, match=r"holds another comparison .*grid"):
        run(replace(COMPARISON, seeds=(0, 1, 2)), data, done[0])


def losses(records):
    return {name: record["evaluations"] for name, record in records.items()}


@pytest.mark.exhaustive
def test_processes_side_by_side_give_the_same_losses(data, done, tmp_path):
    comparison = replace(COMPARISON, learning_rates=None, seeds=(0,), groups=models(*NAMES[:2]))
    alone = run(comparison, data, tmp_path / "alone")
    assert losses(run(comparison, data, tmp_path / "beside", jobs=2)) == losses(alone)


def test_a_failure_in_a_process_reaches_the_person(data, tmp_path):
    comparison = replace(COMPARISON, learning_rates=None, seeds=(0,), micro_batch_size=3)
    with pytest.raises(LeanError, match="does not divide"):
        run(comparison, data, tmp_path / "out", jobs=2)


def test_another_comparison_in_out_is_refused(data, done, tmp_path):
    out, records = done
    with pytest.raises(LeanError, match=r"holds another comparison \(seeds: \[0, 1\] there, \[0\] asked"):
        run(replace(COMPARISON, seeds=(0,)), data, out)
    with pytest.raises(LeanError, match="was begun in fp32"):
        run_comparison(COMPARISON, data, out, precision="bf16", device="cpu", jobs=1)
    assert losses(run(COMPARISON, data, out)) == losses(records)
    (tmp_path / "notes.txt").write_text("precious")
    with pytest.raises(LeanError, match="not empty and not a comparison"):
        run(COMPARISON, data, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_length": 64}, "longer than the 32 positions"),
        ({"groups": models("tiny", "tiny+skipv9")}, "unknown mechanism"),
        ({"groups": models(f"tiny{SHAPE}", f"tiny{SHAPE}+vocab_size=100")}, "the data has"),
        (
            {"learning_rates": (1e-4, 3e-3), "recipe": {"steps": 4, "batch_size": 4, "min_learning_rate": 5e-4}},
            "is above the peak",
        ),
        ({"learning_rates": (1e-3, 1.0000001e-3)}, "two runs would have one directory"),
        ({"groups": ((Entry(NAMES[0], "x" * 240),),)}, "a directory of 2.. characters cannot be made"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(data, tmp_path, changes, message):
    with pytest.raises(LeanError, match=message):
        run(replace(COMPARISON, **changes), data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_report_has_a_row_for_every_model(done):
    out, records = done
    page = KIND.write(out).read_text()
    comparison = load_comparison(out)
    for result in comparison.results:
        assert result.name in page
        finals = [
            r["final"]["validation_loss"] for r in records.values() if (r["name"], r["role"]) == (result.name, "final")
        ]
        assert result.mean_loss == pytest.approx(sum(finals) / len(finals))


def test_under_torchrun_there_is_one_run_at_a_time_and_no_cluster(data, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(LeanError, match="`jobs` is 2: the processes of torchrun train one run at a time"):
        run(COMPARISON, data, tmp_path / "out", jobs=2)
    with pytest.raises(LeanError, match="`launcher=submitit` starts the processes of each run"):
        run(COMPARISON, data, tmp_path / "out", cluster=Cluster("local"))
    assert not (tmp_path / "out").exists()


def test_a_batch_divides_among_the_processes_of_a_job_before_it_is_submitted(data, tmp_path):
    with pytest.raises(
        LeanError, match="a batch of 4 sequences does not divide into micro-batches of 1 on 3 processes"
    ):
        run(COMPARISON, data, tmp_path / "out", cluster=Cluster("local", gpus=3))
    with pytest.raises(LeanError, match="`shard` is 'zero'; give fsdp"):
        run(replace(COMPARISON, shard="zero"), data, tmp_path / "out", cluster=Cluster("local"))
    assert not (tmp_path / "out").exists()


def test_divergence_everywhere_on_the_grid_is_an_error(data, tmp_path):
    with pytest.raises(LeanError, match="diverged at every learning rate"):
        run(replace(COMPARISON, learning_rates=(1e18,), groups=models(*NAMES[:2])), data, tmp_path / "out")


def test_small_models_share_the_cores_and_large_ones_do_not(monkeypatch):
    monkeypatch.setattr("leanqkv.compare.comparison.available_cores", lambda: 8)
    assert default_jobs("cpu", 1_000_000) == 8
    assert default_jobs("cpu", 124_000_000) == 1
    assert default_jobs("cuda", 1_000_000) == 1


def test_a_run_has_no_more_threads_than_torch_was_given(data, tmp_path, monkeypatch):
    monkeypatch.setattr("leanqkv.compare.comparison.available_cores", lambda: 8)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as OMP_NUM_THREADS=1 does
    run(replace(COMPARISON, learning_rates=None, groups=models(*NAMES[:2]), seeds=(0,)), data, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["threads"] == 1 == torch.get_num_threads()
    torch.set_num_threads(before)


def test_slugs_are_file_names():
    assert slug("tiny+skipv1:ratio=0.25,layers=0,3") == "tiny+skipv1-ratio-0.25-layers-0-3"


def test_a_search_shortens_what_was_asked_for(data, tmp_path):
    """Its warm-up and its cosine are as much shorter as its runs."""
    recipe = {"steps": 8, "batch_size": 4, "schedule_steps": 8, "warmup_steps": 4}
    search = {"learning_rates": (1e-3,), "grid_steps": 2, "seeds": (0,), "evaluate_every": 8}
    records = run(replace(COMPARISON, **search, recipe=recipe, groups=models(NAMES[0])), data, tmp_path).values()
    found = {record["role"]: [record["recipe"][name] for name in ("steps", *recipe)[1:]] for record in records}
    assert found == {"final": [8, 4, 8, 4], "grid": [2, 4, 2, 1]}


def test_the_search_may_be_shorter(data, tmp_path):
    """Its schedule is as short, its runs are others' alone, and the report says how long they were."""
    shorter = replace(COMPARISON, groups=models(*NAMES[:2]), seeds=(0,), grid_steps=3)
    records = run(shorter, data, tmp_path / "out")
    for record in records.values():
        steps = 3 if record["role"] == "grid" else 6
        assert record["recipe"]["steps"] == steps and record["tokens"] == steps * 4 * 32
    plan = json.loads((tmp_path / "out/compare.json").read_text())
    assert plan["grid"] == {"seed": 1, "learning_rates": [1e-3, 3e-3], "steps": 3}
    page = KIND.write(tmp_path / "out").read_text()
    assert "after 3 steps" in page
    assert "is the least or the largest that was tried" in page
    assert "Rates were searched in runs of 3 steps" in page


ANOTHER = {"device": "cpu", "cpu": "Another CPU", "instructions": "AVX2", "threads": 1}


def read(file):
    return json.loads(file.read_text())


def elsewhere(patch):
    """This machine is another one, as far as a comparison and its runs see."""
    for module in ("compare.comparison", "train.directory", "environment"):
        patch.setattr(f"leanqkv.{module}.hardware", lambda device: ANOTHER)


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_seed_is_finished_on_the_machine_it_was_begun_on(data, done, tmp_path):
    out = Path(shutil.copytree(done[0], tmp_path / "out"))
    lost = next(out.glob("runs/*identity-query*-final-*-seed0"))
    shutil.rmtree(lost)
    said = []
    with pytest.MonkeyPatch.context() as patch:
        elsewhere(patch)
        run(COMPARISON, data, out, on_message=said.append)
        assert not lost.exists()
        assert len(said) == 1 and "seed 0 was begun on" in said[0] and "1 of its runs wait for that machine" in said[0]
        assert "remove runs/*-final-*-seed0" in said[0]
        assert [result.state(0) for result in load_comparison(out).results] == ["finished", "missing"]
        for other in out.glob("runs/*-final-*-seed0"):  # as it says
            shutil.rmtree(other)
        run(COMPARISON, data, out, on_message=said.append)
    assert len(said) == 1 and lost.exists()
    assert losses(run(COMPARISON, data, out)) == losses(done[1])


def test_another_machine_has_a_precision_of_its_own(data, done, tmp_path):
    """What was begun in one precision is finished in it; a seed that begins there has the other."""
    out = Path(shutil.copytree(done[0], tmp_path / "out"))
    for each in out.glob("runs/*-final-*-seed1"):
        shutil.rmtree(each)
    grid = next(out.glob("runs/*-grid-*"))  # begun and not finished
    grid.joinpath("record.json").unlink()
    with pytest.MonkeyPatch.context() as patch:
        elsewhere(patch)
        records = run(COMPARISON, data, out, precision="bf16")
    chosen = {name: record["precision"]["choice"] for name, record in records.items()}
    assert {kind for name, kind in chosen.items() if "seed1" in name} == {"bf16+sdpa"}
    assert {kind for name, kind in chosen.items() if "seed1" not in name} == {"fp32+sdpa"}
    assert grid.name in chosen
    places = json.loads((out / "compare.json").read_text())["places"]
    assert [record["choice"] for record in places.values()] == ["fp32+sdpa", "bf16+sdpa"]
    assert list(places)[1] == "Another CPU (AVX2) with 1 thread"
    load_comparison(out)
    with pytest.raises(LeanError, match="was begun in fp32"):
        run(COMPARISON, data, out, precision="bf16")  # here


def test_a_seed_has_the_precision_of_its_first_run(data, done, tmp_path):
    """Of one that was trained on, before one that was only asked for, before what is chosen for the machine."""
    out = Path(shutil.copytree(done[0], tmp_path / "out"))
    content = json.loads((out / "compare.json").read_text())
    place, chosen = next(iter(content["places"].items()))
    edit(out / "compare.json", places={place: chosen | {"choice": "bf16+sdpa"}})
    lost = next(out.glob("runs/*identity-query*-final-*-seed0"))
    shutil.rmtree(lost)
    records = run(COMPARISON, data, out, precision="auto")
    assert records[lost.name]["precision"]["choice"] == "fp32+sdpa"
    for directory in out.glob("runs/*-final-*-seed0"):  # asked for and never begun
        keep = read(directory / "run.json")
        keep.pop("hardware")
        shutil.rmtree(directory)
        if "identity-query" in directory.name:
            directory.mkdir()
            (directory / "run.json").write_text(json.dumps(keep))
    records = run(COMPARISON, data, out, precision="auto")
    assert {record["precision"]["choice"] for record in records.values()} == {"fp32+sdpa"}
    assert losses(records) == losses(done[1])


GPU = ANOTHER | {"device": "NVIDIA A100"}


@pytest.mark.parametrize("here", [GPU, GPU | {"device": "NVIDIA H100"}, None])
def test_a_cluster_leaves_seeds_of_a_machine_without_accelerator_to_it(done, here):
    """And goes on with those of its own, whichever of its machines they were begun on."""
    directories = sorted(done[0].glob("runs/*-final-*"))
    jobs = [PlannedRun(SimpleNamespace(seed=int(each.name[-1])), each) for each in directories]
    jobs.append(PlannedRun(SimpleNamespace(seed=0), done[0] / "runs/missing"))
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leanqkv.compare.places.replace", lambda spec, precision: spec)
        todo = to_train_here(jobs, here, True, said.append)
        assert len(jobs) - len(todo) == len(said) == (here is not None)
        patch.setattr("leanqkv.compare.places.begun_run", lambda out: {"hardware": GPU, "precision": "bf16+sdpa"})
        assert len(to_train_here(jobs, here, True, said.append)) == len(jobs)


def test_places_are_the_same_where_sums_round_alike():
    assert same_place(ANOTHER, ANOTHER | {"cores": 64}) and same_place(GPU, GPU | {"threads": 3})
    for change in ({"cpu": "A third CPU"}, {"instructions": "AVX512"}, {"threads": 2}, {"device": "mps"}):
        assert not same_place(ANOTHER, ANOTHER | change) and not same_place(ANOTHER | change, ANOTHER)
    assert not same_place(GPU, GPU | {"device": "NVIDIA H100"})
