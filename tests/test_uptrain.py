"""Training that starts from a checkpoint, with and without a teacher."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from corpus import SHAPE, spec, write_corpus
from harness import sequence_losses
from shapes import randomize

from leanqkv import LeanConfig, LeanError, LeanForCausalLM, preset
from leanqkv.checkpoints.tensors import weights_hash
from leanqkv.checkpoints.tokenizer import Framing
from leanqkv.convert.methods import convert
from leanqkv.convert.targets import SkipV1Options
from leanqkv.data.batches import IGNORED, batch_plan, collate, make_batch_plan
from leanqkv.data.prepare import prepare_data
from leanqkv.data.token_files import TokenData
from leanqkv.errors import TimeIsUpError
from leanqkv.train.training import train

pytestmark = pytest.mark.slow


@pytest.fixture
def source(tmp_path, data):
    """A checkpoint, and the specification of a run that goes on from it."""
    made = spec(data, log_every=1, evaluate_every=1)
    config = LeanConfig(**made.config | {"hidden_dropout": 0.0})
    model = randomize(LeanForCausalLM(config), std=0.1)
    model.save_pretrained(tmp_path / "source")
    recipe = replace(made.recipe, steps=2, learning_rate=1e-3, min_learning_rate=1e-3, warmup_steps=0)
    digest = weights_hash(tmp_path / "source")
    return (
        tmp_path / "source",
        model.eval(),
        replace(made, config=config.as_overrides(), recipe=recipe, initial_sha256=digest),
    )


def plan_of(batches: Path, data):
    """What the runs of `source` are trained and evaluated on."""
    sizes = {"train_tokens": data.train_tokens, "validation_tokens": data.validation_tokens, "evaluation_sequences": 16}
    return batch_plan(batches, context_length=32, batch_size=8, steps=2, seed=0, **sizes)


def test_it_starts_at_the_checkpoint(tmp_path, data, source):
    directory, model, made = source
    record = train(made, data, tmp_path / "out", initial=directory)
    first = record["evaluations"][0]
    plan = plan_of(tmp_path / "out" / "batches", data)
    expected = sequence_losses(model, data.validation(), plan.evaluation_starts, 32, 8).mean().item()
    assert first == {"step": 0, "loss": pytest.approx(expected, rel=1e-6)}
    assert [at["step"] for at in record["evaluations"]] == [0, 1, 2]
    assert record["evaluations"][2]["loss"] < first["loss"]
    assert json.loads((tmp_path / "out" / "record.json").read_text())["initial_sha256"] == made.initial_sha256


def test_going_on_evaluates_what_an_undisturbed_run_does(tmp_path, data, source):
    """The checkpoint it started from alone, not those that it goes on from."""
    directory, _, made = source
    made = replace(made, recipe=replace(made.recipe, steps=4), evaluate_every=4)
    whole = train(made, data, tmp_path / "whole", initial=directory)
    for _ in range(2):
        with pytest.raises(TimeIsUpError):
            train(made, data, tmp_path / "out", initial=directory, max_hours=1e-6)
    record = train(made, data, tmp_path / "out", initial=directory)
    assert record["evaluations"] == whole["evaluations"] and len(whole["evaluations"]) == 2


def expected_loss(model, teacher, data, batches: Path, share: float, temperature: float) -> float:
    """Of the first batch."""
    return mixed_loss(model, teacher, collate(data.train(), plan_of(batches, data).batch(0), 32), share, temperature)


@torch.no_grad()
def mixed_loss(model, teacher, batch, share: float, temperature: float = 1.0) -> float:
    """Cross-entropy and KL(teacher || model) at a temperature, written out."""
    logits, wanted_logits = (m(batch["input_ids"]).logits.double() for m in (model, teacher))
    predicted = logits.log_softmax(-1)
    soft, taught = (some.div(temperature).log_softmax(-1) for some in (logits, wanted_logits))
    total = 0.0
    for row, targets in enumerate(batch["shift_labels"]):
        for position, target in enumerate(targets):
            if target == IGNORED:
                continue
            wanted = taught[row, position]
            divergence = temperature**2 * (wanted.exp() * (wanted - soft[row, position])).sum()
            total += float(share * divergence - (1 - share) * predicted[row, position, target])
    return total / int((batch["shift_labels"] != IGNORED).sum())


@pytest.mark.long_cases
@pytest.mark.parametrize("share, temperature", [(0.25, 1.0), (1.0, 1.0), (0.25, 2.0), (1.0, 0.5)])
@pytest.mark.parametrize("micro", [None, 1])
@pytest.mark.parametrize("begins", [False, True])
def test_the_teachers_divergence_is_mixed_into_the_loss(
    tmp_path, data, source, share, temperature, micro, begins, monkeypatch
):
    """Also of sequences of different numbers of targets, whose tokenizer begins texts with a token."""
    directory, teacher, made = source
    if begins:
        often = int(np.bincount(np.asarray(data.train())).argmax())
        monkeypatch.setattr(TokenData, "around", Framing(begin=often, end=often + 1))
    config, tensors, _ = convert(teacher.config, dict(teacher.named_parameters()), SkipV1Options("mean-v"))
    student = LeanForCausalLM(config)
    state = {name: tensor.detach().float() for name, tensor in tensors.items()}
    student.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    student.eval().save_pretrained(tmp_path / "student")
    made = replace(
        made,
        config=config.as_overrides(),
        initial_sha256=weights_hash(tmp_path / "student"),
        teacher_sha256=weights_hash(directory),
        distillation=share,
        distillation_temperature=temperature,
        micro_batch_size=micro,
    )
    record = train(made, data, tmp_path / "out", initial=tmp_path / "student", teacher=directory)
    expected = expected_loss(student, teacher, data, tmp_path / "out" / "batches", share, temperature)
    assert record["training"][0]["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_only_what_differs_from_the_teacher_is_trained(tmp_path, data, source, checkpointing):
    directory, teacher, made = source
    student = LeanForCausalLM(teacher.config)
    student.load_state_dict(teacher.state_dict())
    changed = {"model.layers.1.self_attn.v_proj.weight", "model.layers.1.self_attn.o_proj.weight"}
    with torch.no_grad():
        for name in changed:
            student.get_parameter(name).mul_(1.5)
    student.save_pretrained(tmp_path / "student")
    made = replace(
        made,
        initial_sha256=weights_hash(tmp_path / "student"),
        teacher_sha256=weights_hash(directory),
        distillation=1.0,
        only_changed=True,
        gradient_checkpointing=checkpointing,
    )
    record = train(made, data, tmp_path / "out", initial=tmp_path / "student", teacher=directory)
    losses = [at["loss"] for at in record["training"]]
    assert losses[-1] < losses[0]
    trained = LeanForCausalLM.from_pretrained(tmp_path / "out")
    moved = {n for n, weight in trained.named_parameters() if not torch.equal(weight, student.get_parameter(n))}
    assert moved == changed


def test_a_model_like_its_teacher_has_nothing_to_train(tmp_path, data, source):
    directory, _, made = source
    made = replace(made, teacher_sha256=weights_hash(directory), distillation=1.0, only_changed=True)
    with pytest.raises(LeanError, match="the model has its teacher's weights; leave out `only_changed`"):
        train(made, data, tmp_path / "out", initial=directory, teacher=directory)


def test_other_weights_are_refused(tmp_path, data, source):
    directory, model, made = source
    randomize(model, std=0.2).save_pretrained(directory)
    with pytest.raises(LeanError, match="other weights than those in"):
        train(made, data, tmp_path / "out", initial=directory)
    with pytest.raises(LeanError, match="other weights"):
        train(made, data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


FEW = ("--steps", "1", "--batch-size", "4", "--precision", "fp32", "--evaluation-sequences", "4", "--device", "cpu")


@pytest.fixture
def trained(tmp_path, cli, monkeypatch):
    """A run in `run` of this folder, with its tokenizer, and the command that trains it on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEANQKV_CACHE", str(tmp_path / "cache"))
    given = ("--data", str(write_corpus(tmp_path / "corpus.txt")), *FEW)
    assert cli("train", f"tiny{SHAPE}", *given, "--out", "run")[0] == 0
    return lambda *options: cli("uptrain", "run", *given, *options, "--out", "out")


def test_the_command_with_a_teacher_of_another_mechanism(trained):
    """The teacher's dropout is off: the loss of the first step is that of its predictions."""
    config = preset(f"tiny+skipv1+mla{SHAPE}", hidden_dropout=0.5, attention_dropout=0.5)
    teacher = randomize(LeanForCausalLM(config), std=0.2).eval()
    teacher.save_pretrained("teacher")
    code, out, err = trained("--teacher", "teacher", "--distillation", "0.3", "--evaluate-every", "1")
    assert (code, err) == (0, ""), out
    record = json.loads(Path("out/record.json").read_text())
    data = prepare_data("corpus.txt", vocab_size=300, tokenizer="run")
    student = LeanForCausalLM.from_pretrained("run").eval()
    sizes = {name: getattr(data, name) for name in ("train_tokens", "validation_tokens")}
    batch = record["recipe"]["batch_size"]
    plan = make_batch_plan(**sizes, context_length=32, batch_size=batch, steps=1, evaluation_sequences=1, seed=0)
    starts = plan.batch(0)
    expected = mixed_loss(student, teacher, collate(data.train(), starts, 32), 0.3)
    assert record["training"][0]["loss"] == pytest.approx(expected, rel=1e-5)
