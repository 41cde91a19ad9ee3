"""Two small models and a text to compare them on."""

import numpy as np
from shapes import randomize, tiny

from leanqkv import LeanForCausalLM

VOCABULARY = 300


def model(seed: int = 0, **fields) -> LeanForCausalLM:
    config = tiny("gpt", vocab_size=VOCABULARY, max_position_embeddings=32, **fields)
    return randomize(LeanForCausalLM(config), std=0.3, seed=seed).double().eval()


def text(tokens: int = 150) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCABULARY, tokens).astype("uint16")
