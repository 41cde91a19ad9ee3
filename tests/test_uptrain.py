"""Training that starts from a checkpoint, with and without a teacher."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from corpus import spec
from shapes import randomize

from leanqkv import LeanConfig, LeanError, LeanForCausalLM
from leanqkv.checkpoints.tensors import weights_hash
from leanqkv.convert.methods import mean_v, with_first_layer_values
from leanqkv.data import batch_plan, collate
from leanqkv.evaluate import sequence_losses
from leanqkv.train import train

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


@torch.no_grad()
def expected_loss(model, teacher, data, batches: Path, share: float) -> float:
    """Of the first batch: cross-entropy and KL(teacher || model), written out."""
    plan = plan_of(batches, data)
    batch = collate(data.train(), plan.train_starts[0], 32)
    predicted, taught = (m(batch["input_ids"]).logits.double().log_softmax(-1) for m in (model, teacher))
    total = 0.0
    for row, targets in enumerate(batch["shift_labels"]):
        for position, target in enumerate(targets):
            likelihoods, wanted = predicted[row, position], taught[row, position]
            divergence = (wanted.exp() * (wanted - likelihoods)).sum()
            total += float(share * divergence - (1 - share) * likelihoods[target])
    return total / batch["shift_labels"].numel()


@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("micro", [None, 2])
def test_the_teachers_divergence_is_mixed_into_the_loss(tmp_path, data, source, share, micro):
    directory, teacher, made = source
    config, tensors = with_first_layer_values(teacher.config, dict(teacher.named_parameters()), mean_v, 0.5)
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
        micro_batch_size=micro,
    )
    record = train(made, data, tmp_path / "out", initial=tmp_path / "student", teacher=directory)
    expected = expected_loss(student, teacher, data, tmp_path / "out" / "batches", share)
    assert record["training"][0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_other_weights_are_refused(tmp_path, data, source):
    directory, model, made = source
    randomize(model, std=0.2).save_pretrained(directory)
    with pytest.raises(LeanError, match="other weights than those in"):
        train(made, data, tmp_path / "out", initial=directory)
    with pytest.raises(LeanError, match="other weights"):
        train(made, data, tmp_path / "out")
    assert not (tmp_path / "out").exists()
