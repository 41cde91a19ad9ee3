"""Several processes on one run, and signals to runs under way, as a person starts and stops them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from corpus import SHAPE, write_corpus
from shapes import tiny
from two_processes import two_process_step

from leanqkv import preset
from leanqkv.presets import MECHANISMS

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


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("gradient_checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_two_processes_do_with_other_blocks(name, gradient_checkpointing):
    assert two_process_step(tiny("llama", **OTHERS[name]), gradient_checkpointing) <= ROUNDING


def test_two_processes_do_on_images():
    assert two_process_step(preset("vit-tiny+skipv1", num_hidden_layers=2)) <= ROUNDING
