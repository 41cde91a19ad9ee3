"""Training runs: what they write, how they go on after an interruption, what they refuse."""

import copy
import json
import math
import platform
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from corpus import SHAPE, spec
from damaging import damages, read_or_refuse
from filelock import FileLock
from harness import sequence_losses
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from leanqkv import LeanError, LeanForCausalLM, preset, recipe
from leanqkv.checkpoints.open import load_model, open_checkpoint
from leanqkv.commands.options import outcome
from leanqkv.data.batches import collate, make_batch_plan
from leanqkv.errors import TimeIsUpError
from leanqkv.evaluate.observe import logit_spreads
from leanqkv.files import write_json
from leanqkv.job import locked
from leanqkv.presets.recipes import recipe_differences
from leanqkv.train import trainer as trainer_module
from leanqkv.train.directory import begun_run, claim, clean
from leanqkv.train.micro_batch import Step
from leanqkv.train.optimizer import make_optimizer, make_schedule
from leanqkv.train.precision import choose_precision, parse_precision
from leanqkv.train.trainer import Watch, summarize
from leanqkv.train.training import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """An uninterrupted run: its directory and record."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    return out, train(spec(data), data, out, device="cpu")


def losses(record):
    return record["training"], record["evaluations"], record["final"]


def register_hook_on(kind, hook):
    """Call a hook after every forward pass of modules of a class."""

    def of_kind(module, args, kwargs, output):
        return hook(module, args, kwargs, output) if isinstance(module, kind) else None

    return torch.nn.modules.module.register_module_forward_hook(of_kind, with_kwargs=True)


class Killed(BaseException):
    """Stands for a kill: nothing in the training code catches it."""


def kill(made, data, out, at):
    """Train up to this step."""

    def progress(step, *_):
        if step == at:
            raise Killed

    with pytest.raises(Killed):
        train(made, data, out, device="cpu", progress=progress)


@pytest.mark.long_cases
@pytest.mark.parametrize("at", [4, 17, 29])
def test_a_killed_run_goes_on_bit_identically(data, finished, tmp_path, at):
    out, record = finished

    kill(spec(data), data, tmp_path / "run", at)
    assert not (tmp_path / "run" / "record.json").exists()
    first_step = []
    again = train(spec(data), data, tmp_path / "run", device="cpu", progress=lambda step, *_: first_step.append(step))
    assert first_step[0] == at // 10 * 10 + 1, "it did not go on from the last checkpoint"
    assert losses(again) == losses(record)
    for name, tensor in load_file(out / "model.safetensors").items():
        assert torch.equal(tensor, load_file(tmp_path / "run" / "model.safetensors")[name]), name


def test_a_checkpoint_between_two_log_entries_goes_on_bit_identically(data, tmp_path):
    odd = spec(data, evaluate_every=7, log_every=5)

    kill(odd, data, tmp_path / "run", 17)
    again = train(odd, data, tmp_path / "run", device="cpu")
    assert losses(again) == losses(train(odd, data, tmp_path / "whole", device="cpu"))
    assert again["tokens"] == 30 * 8 * 32


def test_a_run_whose_time_is_up_goes_on_bit_identically(data, finished, tmp_path):
    """It stops where the log has an entry, whether there is a validation or not."""
    _, record = finished
    for step in (5, 10, 15):
        with pytest.raises(TimeIsUpError, match=f"stopped at step {step} of 30") as caught:
            train(spec(data), data, tmp_path / "run", device="cpu", max_hours=1e-6)
        assert caught.value.exit_code == 75
        assert (tmp_path / "run" / f"checkpoint-{step}" / "complete").exists()
    assert not (tmp_path / "run" / "record.json").exists()
    again = train(spec(data), data, tmp_path / "run", device="cpu", max_hours=1000)
    assert losses(again) == losses(record)


def test_a_run_that_diverges_as_its_time_is_up_has_diverged(data, tmp_path):
    """Another start would diverge again, and again: it is not told to go on."""
    hopeless = spec(data, recipe=replace(spec(data).recipe, learning_rate=1e18, max_grad_norm=None, warmup_steps=0))
    record = train(hopeless, data, tmp_path / "run", device="cpu", max_hours=1e-6)
    assert record["diverged"]["step"] == 5 and (tmp_path / "run" / "record.json").exists()


def test_a_limit_shorter_than_two_intervals_is_kept(data, monkeypatch):
    """The first interval is measured, too."""
    clock = iter([0.1, 0.5, 0.9])
    monkeypatch.setattr(trainer_module, "_hours_of_this_process", lambda: next(clock))
    watch, state = Watch(spec(data), lambda *_: None, max_hours=1.2), SimpleNamespace(global_step=5, max_steps=30)
    control = SimpleNamespace()
    watch.on_train_begin(None, state, control)
    watch.on_step_end(None, state, control)
    assert watch.time_is_up and control.should_save  # another 0.4 hours, and the checkpoint, may end after 1.2


def test_a_tracker_gets_the_curves_and_changes_no_number(data, finished, tmp_path):
    _, record = finished
    found = train(spec(data), data, tmp_path / "run", device="cpu", report_to=["tensorboard"])
    assert losses(found) == losses(record)
    (file,) = (tmp_path / "run").rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(file)).Reload()
    curves = {name: accumulator.Scalars(name) for name in accumulator.Tags()["scalars"]}
    names = {"train/loss", "eval/loss", "train/learning_rate", "train/grad_norm", "train/tokens_per_second"}
    assert names <= curves.keys()
    shown = [(point.step, pytest.approx(point.value)) for point in curves["train/loss"]]
    assert [(entry["step"], entry["loss"]) for entry in record["training"]] == shown
    model = LeanForCausalLM.from_pretrained(tmp_path / "run").eval()
    plan = make_batch_plan(
        train_tokens=data.train_tokens,
        validation_tokens=data.validation_tokens,
        context_length=32,
        batch_size=8,
        steps=1,
        evaluation_sequences=1,
        seed=0,
    )
    spreads = logit_spreads(model, collate(data.validation(), plan.evaluation_starts, 32)["input_ids"])
    for layer, spread in enumerate(spreads):
        assert curves[f"train/logit_spread/layer_{layer}"][-1].value == pytest.approx(spread, rel=1e-5)


def test_a_tracker_that_is_not_installed_is_refused(data, tmp_path):
    with pytest.raises(
        LeanError, match=r"`report_to=nosuch`: no tracker of that name is installed; found: .*tensorboard"
    ):
        train(spec(data), data, tmp_path / "run", device="cpu", report_to=["nosuch"])
    assert not (tmp_path / "run").exists()


def test_a_loss_that_rises_is_reported():
    losses = [5.0, 4.0, 4.5, 3.0, 5.5, 2.0, 3.9]
    history = [{"step": 10 * i, "loss": loss} for i, loss in enumerate(losses)]
    assert summarize(SimpleNamespace(tokens=int, log_interval=10), history)["rise"] == {"step": 40, "nats": 2.5}
    assert summarize(SimpleNamespace(tokens=int, log_interval=10), history[:2])["rise"] is None


def test_the_first_loss_that_is_not_finite_is_named(data, tmp_path):
    """Between two entries of the log, in the second micro-batch of a step."""
    calls = []

    def poison(module, args, kwargs, output):
        calls.append(1)
        if module.training and len(calls) == 2 * 13:
            output.loss = output.loss * torch.nan
        return output

    hook = register_hook_on(LeanForCausalLM, poison)
    try:
        record = train(spec(data, evaluate_every=30, micro_batch_size=4), data, tmp_path / "run", device="cpu")
    finally:
        hook.remove()
    reason = "the loss is not finite, first in step 13, batch 12 of the plan"
    assert record["diverged"] == {"step": 15, "reason": reason}
    assert record["final"] is None and not (tmp_path / "run" / "model.safetensors").exists()


def test_a_half_written_checkpoint_is_not_picked_up(data, finished, tmp_path):
    kill(spec(data), data, tmp_path / "run", 25)
    checkpoint = tmp_path / "run" / "checkpoint-20"
    (checkpoint / "complete").unlink()
    (checkpoint / "model.safetensors").write_bytes(b"cut off")
    again = train(spec(data), data, tmp_path / "run", device="cpu")
    assert losses(again) == losses(finished[1])


@pytest.fixture(scope="module")
def stopped(data, tmp_path_factory):
    """A run killed behind its second checkpoint."""
    out = tmp_path_factory.mktemp("stopped") / "run"

    kill(spec(data), data, out, 21)
    return out


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "gone": lambda file: file.unlink(),
    "one bit": flip_a_bit,
    "cut off": lambda file: file.write_bytes(file.read_bytes()[:-20]),
    "empty": lambda file: file.write_bytes(b""),
    "another type": lambda file: torch.save([1], file),
}
# Every file that a run is continued from.
CONTINUED = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "config.json")


@pytest.mark.long_cases
@pytest.mark.parametrize("name", [*CONTINUED, "complete"])
def test_a_damaged_checkpoint_is_passed_over_or_refused(data, finished, stopped, tmp_path, name):
    """The one before gives the weights of the uninterrupted run; where there is none, nothing is trained."""
    for number, (kind, damage) in enumerate(DAMAGES.items()):
        if (name, kind) == ("complete", "gone"):  # one that was cut off
            continue
        run = shutil.copytree(stopped, tmp_path / str(number))
        shutil.rmtree(run / "checkpoint-10")
        damage(run / "checkpoint-20" / name)
        before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file.name != "run.json"}
        with pytest.raises(LeanError, match=r"checkpoint-20 cannot be gone on from: .*no earlier checkpoint") as caught:
            train(spec(data), data, run, device="cpu", progress=lambda *_: pytest.fail("trained"))
        assert "\n" not in str(caught.value)
        assert before == {file: file.read_bytes() for file in before}
    shutil.copytree(stopped / "checkpoint-10", run / "checkpoint-10")
    with pytest.warns(RuntimeWarning, match="checkpoint-20 is damaged .* goes on from checkpoint-10"):
        again = train(spec(data), data, run, device="cpu")
    assert losses(again) == losses(finished[1])
    assert (run / "model.safetensors").read_bytes() == (finished[0] / "model.safetensors").read_bytes()


def test_only_the_runs_own_checkpoints_are_taken_or_removed(data, finished, tmp_path):
    """Folders and links of its owner beside them stay as they are, whether their names look like a step or not."""
    run = tmp_path / "run"

    def add_own():
        shutil.copytree(run / "checkpoint-20", run / "checkpoint-20-backup")
        shutil.copytree(run / "checkpoint-20", tmp_path / "elsewhere")
        (run / "checkpoint-latest").symlink_to("checkpoint-20")
        (run / "checkpoint-99").symlink_to(tmp_path / "elsewhere")
        (run / "checkpoint-x").mkdir()
        (run / "checkpoint-x" / "complete").touch()
        (run / "checkpoint-77").write_text("notes")
        (run / "checkpoint-").mkdir()
        (run / "checkpoint-nowhere").symlink_to("nothing")

    kill(spec(data), data, run, 21)
    add_own()
    own = {path for path in run.glob("checkpoint-*") if path.name not in ("checkpoint-10", "checkpoint-20")}
    files = {path: path.read_bytes() for path in [*run.glob("checkpoint-*-backup/*"), *tmp_path.glob("elsewhere/*")]}
    assert losses(train(spec(data), data, run, device="cpu")) == losses(finished[1])
    assert set(run.glob("checkpoint-*")) == own
    assert files == {path: path.read_bytes() for path in files}


def test_a_checkpoint_without_hashes_cannot_be_checked(data, stopped, tmp_path):
    run = shutil.copytree(stopped, tmp_path / "run")
    for mark in run.glob("checkpoint-*/complete"):
        mark.write_bytes(b"")
    with pytest.raises(LeanError, match=r"cannot be gone on from: .*complete cannot be read"):
        train(spec(data), data, run, device="cpu")
    assert len(list(run.glob("checkpoint-*"))) == 2


def test_a_finished_run_is_not_trained_again(data, finished):
    out, record = finished
    again = train(spec(data), data, out, device="cpu", progress=lambda *_: pytest.fail("trained again"))
    assert again == json.loads(json.dumps(record))


@pytest.mark.long_cases
@pytest.mark.parametrize("file", ["record.json", "run.json"])
def test_a_run_whose_record_has_any_wrong_field_is_gone_on_with_or_refused(data, finished, tmp_path, file):
    """Whatever a repeated command reads of it: what was asked, the outcome, and what is left to be removed."""
    out = tmp_path / "run"
    out.mkdir()
    for name in {"run.json", file}:
        shutil.copy(finished[0] / name, out)
    refused = 0

    def repeat():
        begun_run(out)
        if (record := claim(out, spec(data))) is not None:
            clean(out, record)
            outcome(record)

    for at, damaged in damages(json.loads((out / file).read_text())):
        (out / file).write_text(json.dumps(damaged))
        refused += read_or_refuse(repeat, at)
    assert refused > 100


def test_the_same_spec_gives_the_same_losses_and_another_seed_others(data, finished, tmp_path):
    assert losses(train(spec(data), data, tmp_path / "a", device="cpu")) == losses(finished[1])
    assert losses(train(spec(data, seed=1), data, tmp_path / "b", device="cpu")) != losses(finished[1])


def test_accumulation_gives_the_gradient_of_the_whole_batch(data, tmp_path):
    whole, parts = (
        train(
            replace(spec(data, micro_batch_size=micro), config=preset(f"tiny{SHAPE}").as_overrides()),
            data,
            tmp_path / str(micro),
            device="cpu",
        )
        for micro in (None, 2)
    )
    # Sums of 8 float32 losses in another order: a few units in the last place, grown over 30 steps.
    for one, other in zip(whole["training"], parts["training"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_kept_checkpoints_are_the_model_at_every_evaluation(data, finished, tmp_path):
    out, record = finished
    kept = train(spec(data), data, tmp_path / "run", device="cpu", keep_checkpoints=True)
    assert losses(kept) == losses(record)
    checkpoints = {path.name: path for path in (tmp_path / "run").glob("checkpoint-*")}
    assert sorted(checkpoints) == ["checkpoint-10", "checkpoint-20", "checkpoint-30"]
    assert not list((tmp_path / "run").rglob("*.pt")) and not list((tmp_path / "run").rglob("*.pth"))
    last, first, end = (
        load_file(path / "model.safetensors")
        for path in (checkpoints["checkpoint-30"], checkpoints["checkpoint-10"], out)
    )
    assert all(torch.equal(last[name], end[name]) for name in end)
    assert any(not torch.equal(first[name], end[name]) for name in end)
    model = load_model(open_checkpoint(checkpoints["checkpoint-10"]))
    assert all(torch.equal(first[name], weight) for name, weight in model.state_dict().items() if name in first)
    # Where the time was up there was no evaluation.
    for _ in range(3):
        with pytest.raises(TimeIsUpError):
            train(spec(data), data, tmp_path / "often", device="cpu", keep_checkpoints=True, max_hours=1e-6)
    train(spec(data), data, tmp_path / "often", device="cpu", keep_checkpoints=True)
    assert {path.name for path in (tmp_path / "often").glob("checkpoint-*")} == checkpoints.keys()


def test_a_run_learns_and_its_directory_holds_what_the_record_says(data, finished):
    out, record = finished
    curve = [entry["loss"] for entry in record["evaluations"]]
    assert [entry["step"] for entry in record["evaluations"]] == [10, 20, 30]
    assert curve[0] > curve[1] > curve[2]
    assert not list(out.glob("checkpoint-*"))
    model = load_model(open_checkpoint(out))
    assert model.config.use_cache
    plan = make_batch_plan(
        train_tokens=data.train_tokens,
        validation_tokens=data.validation_tokens,
        context_length=32,
        batch_size=8,
        steps=30,
        evaluation_sequences=16,
        seed=0,
    )
    assert record["batch_plan"]["sha256"] == plan.sha256
    loss = sequence_losses(model, data.validation(), plan.evaluation_starts, 32, batch_size=8).mean().item()
    assert record["final"]["validation_loss"] == pytest.approx(loss, rel=1e-12)
    assert record["final"]["perplexity"] == math.exp(record["final"]["validation_loss"])
    assert record["tokens"] == 30 * 8 * 32
    assert record["parameters"]["total"] == sum(p.numel() for p in model.parameters())
    for key in ("config", "seed", "data", "versions", "git_commit", "hardware", "precision", "tokens_per_second"):
        assert key in record


def test_what_was_compiled_of_other_models_is_dropped(monkeypatch):
    """Dynamo keeps eight graphs of a function, of all models of a process; a ninth model would run as it is written."""
    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    monkeypatch.setattr(LeanForCausalLM, "compile", lambda self, **_: None)
    counts = []
    for name in ("tiny", "tiny", "tiny+skipv1", "tiny+skipv1", "tiny"):
        parse_precision("fp32+compile").apply(LeanForCausalLM(preset(f"{name}{SHAPE}")))
        counts.append(len(resets))
    assert [after - counts[0] for after in counts] == [0, 0, 1, 1, 2]


def test_sequence_losses_match_the_models_own_loss_and_leave_its_mode(data):
    torch.manual_seed(0)
    model = LeanForCausalLM(preset(f"tiny{SHAPE}+hidden_dropout=0.5")).train()
    means = sequence_losses(model, data.validation(), [0, 5, 9], 32, batch_size=2)
    assert model.training
    batch = collate(data.validation(), [5], 32)
    assert means[1].item() == pytest.approx(model.eval()(**batch).loss.item(), rel=1e-6)
    assert means.shape == (3,)


def test_a_diverging_run_stops_and_says_so(data, tmp_path):
    started = spec(data)
    bad = replace(started, recipe=replace(started.recipe, learning_rate=1e18, max_grad_norm=None, warmup_steps=0))
    record = train(bad, data, tmp_path / "run", device="cpu")
    assert record["diverged"]["step"] < 30
    assert record["final"] is None
    assert all(math.isfinite(entry["loss"]) for entry in record["training"])
    assert json.loads((tmp_path / "run" / "record.json").read_text())["diverged"] == record["diverged"]


def test_a_huge_but_finite_loss_is_recorded(data):
    history = [{"step": 5, "loss": 900.0}, {"step": 7, "eval_loss": 1000.0}]
    summary = summarize(spec(data), history)
    assert summary["final"]["validation_loss"] == 1000.0
    assert math.isfinite(summary["final"]["perplexity"])
    assert summary["tokens"] == 7 * 8 * 32


def test_another_run_in_out_is_refused_untouched(data, finished, tmp_path):
    out, _ = finished
    before = {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()}
    with pytest.raises(LeanError, match=r"holds another run \(seed: 0 there, 7 asked\)"):
        train(spec(data, seed=7), data, out, device="cpu")
    with pytest.raises(LeanError, match=r"holds another run \(name: "):
        train(spec(data, "+skipv1"), data, out, device="cpu")
    assert before == {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()}
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    with pytest.raises(LeanError, match="not empty and not a run"):
        train(spec(data), data, tmp_path / "full", device="cpu")
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["thesis.txt"]


def test_a_full_disk_is_one_line_and_loses_nothing(data, finished, tmp_path, monkeypatch):
    def full(self, path, *_, **__):
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(LeanForCausalLM, "save_pretrained", full)
        with pytest.raises(LeanError, match="the disk is full"):
            train(spec(data), data, tmp_path / "run", device="cpu")
    assert losses(train(spec(data), data, tmp_path / "run", device="cpu")) == losses(finished[1])


def test_two_processes_do_not_train_in_one_place(data, finished, tmp_path, monkeypatch):
    monkeypatch.setattr("leanqkv.job.PATIENCE", 0.1)
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"):  # as the other process holds it
        write_json(tmp_path / "run" / "run.json", spec(data).as_json())
        with pytest.raises(LeanError, match="another process is training"):
            train(spec(data), data, tmp_path / "run", device="cpu", progress=lambda *_: pytest.fail("trained"))
    assert losses(train(spec(data), data, tmp_path / "run", device="cpu")) == losses(finished[1])


def test_a_process_that_is_ending_is_waited_for(tmp_path):
    """As a worker is whose parent was killed."""
    ending = FileLock(tmp_path / ".lock", thread_local=False)
    ending.acquire()
    threading.Timer(0.2, ending.release).start()
    with locked(tmp_path, "training"):
        assert not ending.is_locked


def test_other_data_than_the_runs_is_refused(data, tmp_path):
    with pytest.raises(LeanError, match="other data"):
        train(spec(data, data_sha256="0" * 64), data, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_indivisible_batches_are_refused(data, tmp_path):
    with pytest.raises(LeanError, match="does not divide into micro-batches of 3"):
        train(spec(data, micro_batch_size=3), data, tmp_path / "run", device="cpu")


def test_weight_decay_acts_on_matrices_only():
    model = LeanForCausalLM(preset(f"tiny{SHAPE}", attention_bias=True))
    decayed, free = make_optimizer(model, recipe("tiny")).param_groups
    assert decayed["weight_decay"] == recipe("tiny").weight_decay
    assert free["weight_decay"] == 0
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in free["params"]} == {1}
    assert len(decayed["params"]) + len(free["params"]) == len(list(model.parameters()))


def test_muon_has_the_matrices_of_the_blocks():
    """And AdamW the rest, embeddings among them; a step is that of each by itself, and states come back."""
    chosen = recipe("tiny", optimizer="muon")
    torch.manual_seed(0)
    model = LeanForCausalLM(preset(f"tiny{SHAPE}+skipv1", attention_bias=True))
    optimizer = make_optimizer(model, chosen)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    muon, decayed, free = ({names[id(p)] for p in group["params"]} for group in optimizer.param_groups)
    assert muon == {name for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2}
    assert decayed | free == set(names.values()) - muon and "model.embed_tokens.weight" in decayed
    assert [group["weight_decay"] for group in optimizer.param_groups] == [chosen.weight_decay, chosen.weight_decay, 0]
    twin = copy.deepcopy(model)
    inner = {name: p for name, p in twin.named_parameters() if name in muon}
    alone = torch.optim.Muon(inner.values(), lr=chosen.learning_rate, weight_decay=chosen.weight_decay,
                             adjust_lr_fn="match_rms_adamw")  # fmt: skip
    for _ in range(2):
        for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            draw = torch.Generator().manual_seed(len(name))
            parameter.grad = other.grad = torch.randn(parameter.shape, generator=draw)
        optimizer.step()
        alone.step()
    assert all(torch.equal(model.get_parameter(name), parameter) for name, parameter in inner.items())
    again = make_optimizer(model, chosen)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = copy.deepcopy(model.state_dict())
    again.step()
    after = copy.deepcopy(model.state_dict())
    model.load_state_dict(before)
    optimizer.step()
    assert all(torch.equal(after[name], weight) for name, weight in model.state_dict().items())
    make_schedule(again, chosen)
    assert (
        len({group["lr"] for group in again.param_groups}) == 1 and again.param_groups[0]["lr"] < chosen.learning_rate
    )


def test_a_run_with_muon_goes_on_with_the_same_losses(data, tmp_path):
    chosen = spec(data)
    chosen = replace(chosen, recipe=replace(chosen.recipe, optimizer="muon"))
    whole = train(chosen, data, tmp_path / "whole", device="cpu")
    kill(chosen, data, tmp_path / "parts", 17)
    assert losses(train(chosen, data, tmp_path / "parts", device="cpu")) == losses(whole)
    assert whole["recipe"]["optimizer"] == "muon"
    assert "Muon and AdamW with a peak" in (tmp_path / "whole/README.md").read_text()
    plain = train(spec(data), data, tmp_path / "plain", device="cpu")
    assert "optimizer" not in plain["recipe"] and plain["training"] != whole["training"]


def test_optimizers_that_are_refused(data):
    with pytest.raises(LeanError, match="`optimizer` must be adamw or muon, found 'lion'"):
        recipe("tiny", optimizer="lion")
    muon = recipe("tiny", optimizer="muon")
    with pytest.raises(LeanError, match="`optimizer=muon` is for whole matrices: not with `shard`"):
        spec(data, recipe=muon, shard="fsdp")
    assert recipe_differences([[vars(recipe("tiny")), vars(muon)]]) == ["the optimizer (adamw, muon)"]


def test_schedule_warms_up_and_ends_at_the_minimum_or_partway():
    chosen = recipe("tiny", steps=100, warmup_steps=10)
    for schedule_steps, expected in ((None, chosen.min_learning_rate), (80, chosen.min_learning_rate), (200, None)):
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.AdamW([parameter], lr=chosen.learning_rate)
        schedule = make_schedule(optimizer, replace(chosen, schedule_steps=schedule_steps))
        rates = []
        for _ in range(101):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        assert rates[5] == pytest.approx(chosen.learning_rate / 2)
        assert max(rates) == rates[10] == pytest.approx(chosen.learning_rate)
        if expected is not None:
            assert rates[100] == pytest.approx(expected)
        else:  # a cosine of 200 steps, 10 of them warm-up, seen up to step 100
            cosine = (1 + math.cos(math.pi * 90 / 190)) / 2
            minimum = chosen.min_learning_rate
            assert rates[100] == pytest.approx(minimum + (chosen.learning_rate - minimum) * cosine)


def test_steps_scale_the_warmup_and_a_rate_its_minimum():
    paper = recipe("gpt2-124m")
    short = recipe("gpt2-124m", steps=600, learning_rate=1.2e-3)
    assert (paper.steps, paper.warmup_steps) == (60_000, 2_000)
    assert (short.warmup_steps, short.min_learning_rate) == (20, pytest.approx(1.2e-4))
    assert recipe("gpt2-124m+nonlinear-query").learning_rate == 3e-3
    first = recipe("gpt2-124m+identity-query:recipe=p1", steps=600)
    assert (first.warmup_steps, first.schedule_steps) == (12, 3600)


def test_the_identity_query_has_the_recipe_of_either_version_of_its_paper():
    for base in ("gpt2-124m", "tiny", "small"):
        assert recipe(f"{base}+identity-query").weight_decay == recipe(base).weight_decay == 0.1
        first = f"{base}+identity-query:layers=0,1,recipe=p1"
        assert recipe(first).weight_decay == recipe(f"{base}+nonlinear-query").weight_decay == 2**-5
        assert preset(first) == preset(f"{base}+identity-query:layers=0,1")


@pytest.mark.parametrize("text", ["fp32", "bf16", "bf16+compile", "fp32+eager", "bf16+compile+eager"])
def test_precision_reads_back_what_it_prints(text):
    assert parse_precision(str(parse_precision(text))) == parse_precision(text)
    assert str(parse_precision(text)).startswith(text.split("+")[0])


@pytest.mark.parametrize("text", ["fp16", "bf16+fast", "", "bf16+sdpa+eager", "bf16+sdpa+eager+compile"])
def test_unknown_precisions_are_refused(text):
    with pytest.raises(LeanError, match="is not known"):
        parse_precision(text)


def test_bf16_autocast_trains_and_keeps_float32_weights(data, tmp_path):
    record = train(spec(data, "+identity-query+skipv1", precision="bf16"), data, tmp_path / "run", device="cpu")
    assert record["evaluations"][-1]["loss"] < record["evaluations"][0]["loss"]
    assert {t.dtype for t in load_file(tmp_path / "run" / "model.safetensors").values()} == {torch.float32}


def test_the_fastest_precision_is_chosen_and_the_random_state_kept(monkeypatch):
    seconds = {"fp32+sdpa": (0, 2.0), "bf16+sdpa": (0, 1.0), "fp32+compile+sdpa": (90, 0.5), "bf16+sdpa+eager": (0, 9)}

    def timed(config, precision, *_):
        if str(precision) == "bf16+compile+sdpa":
            raise RuntimeError("no compiler")
        return seconds.get(str(precision), (0, 9.0))

    monkeypatch.setattr("leanqkv.train.precision.time_steps", timed)
    step = Step(preset(f"tiny{SHAPE}"), 2, 16, "cpu")
    assert str(choose_precision(step, None, 50)) == "bf16+sdpa", "compiling does not pay for 50 steps"
    assert str(choose_precision(step, None, 1000)) == "fp32+compile+sdpa"
    monkeypatch.undo()
    monkeypatch.setattr("leanqkv.train.precision.TIMED_STEPS", 1)
    monkeypatch.setattr("leanqkv.train.precision.Precision.apply", lambda *_: None)
    before = torch.get_rng_state()
    assert len(choose_precision(step, None, 10**6).timings) == 6
    assert torch.equal(torch.get_rng_state(), before)
    assert len(choose_precision(step, None, 1).timings) == 3, "a short run does not wait for compilers"


def test_a_precision_whose_gradients_are_no_numbers_is_no_choice(monkeypatch):
    """As torch.compile made some of a model in bfloat16 with eager attention."""

    def apply(precision, model):
        if precision.attention == "eager":
            next(model.parameters()).register_hook(lambda gradient: gradient * torch.nan)

    monkeypatch.setattr("leanqkv.train.precision.Precision.apply", apply)
    chosen = choose_precision(Step(preset(f"tiny{SHAPE}"), 2, 16, "cpu"), None, 1)
    assert set(chosen.timings) == {"fp32+sdpa", "bf16+sdpa"}


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
@pytest.mark.parametrize(("device", "kept"), [("cpu", True), ("cuda", False)])
def test_a_process_on_the_cpu_keeps_the_memory_that_it_frees(device, kept):
    code = f"""
import psutil, torch
from leanqkv.environment import keep_freed_memory
keep_freed_memory({device!r})
tensors = [torch.ones(2**23) for _ in range(4)]  # 32 MB each
before = psutil.Process().memory_info().rss
del tensors
print(before - psutil.Process().memory_info().rss < 2**23)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(kept), found.stderr


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot do without denormals")
def test_training_on_the_cpu_computes_without_denormals_and_leaves_the_process_as_it_was(data, tmp_path):
    seen = []
    train(spec(data), data, tmp_path / "run", device="cpu", progress=lambda *_: seen.append(float(_denormal() * 1)))
    assert set(seen) == {0.0}
    assert float(_denormal() * 1) > 0


def _denormal():
    return torch.tensor(1e-40)


def test_the_mark_of_a_checkpoint_is_written_after_its_files_are_on_the_disk(tmp_path, monkeypatch):
    from leanqkv.train import directory

    order = []
    monkeypatch.setattr(directory, "flush", lambda *paths: order.extend(path.name for path in paths))
    write = directory.write_json
    monkeypatch.setattr(directory, "write_json", lambda file, content: (order.append("written"), write(file, content)))
    checkpoint = tmp_path / "checkpoint-1"
    checkpoint.mkdir()
    for name in ("model.safetensors", "optimizer.pt"):
        (checkpoint / name).write_bytes(b"x")
    directory.complete(checkpoint, keep_earlier=True)
    assert order == ["model.safetensors", "optimizer.pt", "written", "complete", "checkpoint-1"]
