"""`leanqkv plan-run`: counts against formulas, by hand, of shapes whose arithmetic is known."""

import pytest

import experiments.vision  # noqa: F401, models of images are trained here too
from leanqkv import preset
from leanqkv.model.shapes import count_parameters
from leanqkv.presets.recipes import recipe
from leanqkv.train.run_plan import ACCELERATORS, Accelerator, plan_run

COMMON = {"context_length": 128, "device": ACCELERATORS["a100"], "devices": 2, "utilization": 0.5}


def planned(name, **changes):
    return plan_run(preset(name), recipe(name), **{**COMMON, **changes})


@pytest.mark.parametrize("name", ["tiny", "tiny+skipv1", "tiny+gqa"])
def test_operations_are_those_of_the_matrices_and_of_attention(name):
    """6 for each weight of a matrix that a token meets, and 12 for each pair of positions and column of a head."""
    config = preset(name)
    plan = planned(name)
    counts = count_parameters(config)
    matrices = counts.total - config.vocab_size * config.hidden_size * (not config.tie_word_embeddings)
    matrices -= config.max_position_embeddings * config.hidden_size * (config.position_embedding_type == "learned")
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * 128
    # Vectors (norms, biases) are parameters and no products.
    assert plan.flops_per_token == pytest.approx(6 * matrices + attention, rel=0.01)


def test_numbers_that_follow_from_others():
    steps, batch = recipe("tiny").steps, recipe("tiny").batch_size
    plan = planned("tiny")
    assert plan.tokens == steps * batch * 128
    assert plan.flops == pytest.approx(plan.flops_per_token * plan.tokens)
    assert plan.seconds == pytest.approx(plan.flops / (2 * 312e12 * 0.5))
    assert plan.weights_bytes == 4 * plan.parameters and plan.checkpoint_bytes == 12 * plan.parameters
    assert plan.micro_batch_size * plan.accumulation_steps * 2 == batch
    assert plan.state_bytes == 20 * plan.parameters  # DDP has the gradients twice
    assert planned("tiny", devices=1).state_bytes == 16 * plan.parameters
    assert plan.kv_bytes == 128 * plan.kv_bytes_per_token
    assert plan.fits


@pytest.mark.exhaustive
def test_sharding_and_checkpointing_take_less():
    wide = "tiny+num_hidden_layers=24"
    plan = planned(wide)
    shared = planned(wide, shard="fsdp", devices=8)
    assert 2 * plan.parameters < shared.state_bytes < 0.5 * 16 * plan.parameters
    checkpointed = planned("tiny", gradient_checkpointing=True, micro_batch_size=4)
    kept = planned("tiny", micro_batch_size=4)
    assert checkpointed.activation_bytes < kept.activation_bytes
    config = preset("tiny")
    width, layers = config.hidden_size, config.num_hidden_layers
    # One more forward pass of the blocks, up to the MLP's last product, which no gradient needs.
    again = 2 * layers * (4 * width**2 + width * config.intermediate_size) + 4 * layers * width * 128
    assert checkpointed.flops_per_token - kept.flops_per_token == again


def test_a_small_device_has_small_micro_batches():
    roomy, tight = planned("tiny", device=Accelerator(1e12, 80e9)), planned("tiny", device=Accelerator(1e12, 60e6))
    assert tight.micro_batch_size < roomy.micro_batch_size and tight.accumulation_steps > 1
    assert not planned("tiny", device=Accelerator(1e12, 1e6)).fits


def test_the_command(cli):
    code, out, _ = cli("plan-run", "tiny", "tiny+skipv1", "--devices", "1")
    assert code == 0
    assert "weights, gradients, optimizer" in out and "tiny+skipv1" in out and "312 TFLOP/s" in out
