"""The memory of a step of training, and the micro-batch that fits."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import experiments.vision  # noqa: F401, models of images are trained here too
from leanqkv import LeanError, LeanForCausalLM, preset
from leanqkv.environment import free_memory
from leanqkv.memory import PeakMemory
from leanqkv.train.micro_batch import USABLE_SHARE, Step, choose_micro_batch, split_batch
from leanqkv.train.norm_removal import make_removable
from leanqkv.train.precision import parse_precision
from leanqkv.train.tasks import task_of
from leanqkv.train.trainer import checkpoint_activations, divergence

pytestmark = pytest.mark.slow


def counted_in_a_real_step(step, micro_batch_size):
    """The same as Step.bytes, of a step that is computed."""
    config, precision = step.config, step.precision
    model = task_of(config).model_class(config)
    model.set_attn_implementation(precision.attention)
    if step.removes_norms:
        make_removable(model)
    if step.gradient_checkpointing:
        checkpoint_activations(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    batch = task_of(config).random_batch(config, micro_batch_size, step.context_length, "cpu")
    with PeakMemory() as memory:
        with precision.autocast("cpu"):
            outputs = model(**batch)
            loss = outputs.loss
            if step.teacher is not None:
                with torch.no_grad():
                    expected = LeanForCausalLM(step.teacher)(input_ids=batch["input_ids"], use_cache=False).logits
                loss = loss + divergence(expected, outputs.logits)
        loss.backward()
    return 16 * model.num_parameters() + memory.peak


@pytest.mark.parametrize(
    ("name", "precision", "changes"),
    [
        ("tiny", "fp32", {}),
        ("tiny", "fp32+eager", {}),
        ("tiny", "bf16", {}),
        ("tiny", "fp32", {"gradient_checkpointing": True}),
        ("tiny", "fp32", {"removes_norms": True}),
        ("tiny", "fp32", {"teacher": preset("tiny+skipv1")}),
        ("tiny+num_hidden_groups=2", "fp32", {}),
        ("tiny+mlp_type=moe+num_local_experts=3", "fp32", {}),
        ("vit-digits", "fp32", {}),
    ],
)
def test_memory_counted_without_content_is_that_of_a_real_step(name, precision, changes):
    config = preset(name)
    step = Step(config, 8, config.max_position_embeddings, "cpu", parse_precision(precision), **changes)
    before = torch.get_rng_state()
    predicted = step.bytes(4)
    assert torch.equal(torch.get_rng_state(), before)
    # Without content some tensors are freed an operator later, and every expert gets as many tokens.
    assert predicted == pytest.approx(counted_in_a_real_step(step, 4), rel=0.1)


MEASURE = """
import re
from pathlib import Path
from leanqkv import preset
from leanqkv.train import precision
from leanqkv.train.micro_batch import Step
from leanqkv.train.precision import Precision, time_steps

precision.TIMED_STEPS = 1

def peak():  # of this process, in bytes; getrusage would begin at the peak of the process that started it
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1))

config = preset("small")
predicted, before = Step(config, 64, 256, "cpu", Precision()).bytes(32), peak()
time_steps(config, Precision(), 32, 256, "cpu")
print(predicted / (peak() - before))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells the peak of a process's memory there")
def test_predicted_memory_is_near_what_a_process_takes():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", MEASURE], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    # Memory that is kept for the next step has holes, a fifth of it on one machine: without them 0.93 to 1.02 there.
    # Measured on 11 models and settings on another: 0.87 to 1.16.
    assert USABLE_SHARE < float(run.stdout) < 1.25


def test_the_largest_micro_batch_that_fits_is_chosen():
    step = Step(preset("tiny+num_hidden_layers=2"), 12, 128, "cpu", parse_precision("fp32"))
    sizes = {size: step.bytes(size) for size in (2, 3, 6, 12)}
    for size, needed in sizes.items():
        chosen = choose_micro_batch([step], math.ceil(needed / USABLE_SHARE) + 1)
        assert (chosen.size, chosen.needed) == (size, needed)
    assert choose_micro_batch([step], 10**12).size == 12
    assert "(6 accumulation steps): " in str(choose_micro_batch([step], math.ceil(sizes[2] / USABLE_SHARE) + 1))
    hopeless = choose_micro_batch([step], 1000)
    assert hopeless.size == 1
    assert "may run out of memory" in str(hopeless)
    # One choice for models of several batch sizes: whole batches, or a divisor of all of them.
    other = replace(step, batch_size=8)
    assert choose_micro_batch([step, other], 10**12).size is None
    assert choose_micro_batch([step, other], math.ceil(sizes[6] / USABLE_SHARE)).size == 4
    wide = replace(step, config=preset("tiny+num_hidden_layers=2+intermediate_size=4096"))
    assert choose_micro_batch([step, wide], math.ceil(sizes[6] / USABLE_SHARE)).size < 6


@pytest.mark.exhaustive
def test_the_published_batch_of_gpt2_is_split():
    step = Step(preset("gpt2-124m"), 480, 1024, "cpu")
    assert step.bytes(480) > 500e9, "480 sequences of 1,024 tokens fit no machine"
    chosen = choose_micro_batch([step], 20_100_000_000)
    assert 480 % chosen.size == 0
    assert chosen.needed <= USABLE_SHARE * 20.1e9 < step.bytes(chosen.size + 5)


def test_each_of_several_processes_takes_its_part(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    step = Step(preset("tiny"), 12, 128, "cpu", parse_precision("fp32"))
    chosen = choose_micro_batch([step], 10**12)
    assert chosen.size == 6
    assert str(chosen).startswith("micro-batch 6 of 12 on 2 processes: ")
    with pytest.raises(LeanError, match="does not divide into micro-batches of 6 on 2 processes"):
        choose_micro_batch([replace(step, batch_size=13)], 10**12)
    assert split_batch(12, 12, 2) == (6, 1), "begun with whole batches on one process, continued on two"
    assert split_batch(12, 2, 2) == (2, 3)
    with pytest.raises(LeanError, match="micro-batches of 24"):
        split_batch(12, 24, 2)


def test_free_memory_is_shared_by_the_processes_of_a_machine(monkeypatch):
    alone = free_memory("cpu")
    assert alone > 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory("cpu") < alone / 2
