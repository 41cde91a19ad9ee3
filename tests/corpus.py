"""Small corpora, and a run on one of them, for the tests of data and training."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from leanqkv import preset, recipe
from leanqkv.data.prepare import prepare_data
from leanqkv.data.token_files import TokenData
from leanqkv.train.spec import RunSpec

SHAPE = (
    "+hidden_size=32+intermediate_size=64+num_hidden_layers=2+num_attention_heads=2+vocab_size=300"
    "+max_position_embeddings=32"
)
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "mix")


def write_corpus(path: Path) -> Path:
    """Sentences with some structure to learn, the same each time."""
    words = ["the", "a", "quick", "slow", "brown", "red", "fox", "dog", "jumps", "runs", "over", "lazy", "happy", "cat"]
    lines = (" ".join(words[(i * k + k * k) % len(words)] for k in range(3, 12)) for i in range(3000))
    path.write_text("\n".join(lines))
    return path


def prepare(directory: Path) -> TokenData:
    return prepare_data(str(write_corpus(directory / "corpus.txt")), vocab_size=300)


def spec(data: TokenData, mechanisms: str = "", seed: int = 0, **changes) -> RunSpec:
    """30 steps of a model with two layers of width 32; dropout on, so that the random state matters."""
    name = f"tiny{mechanisms}{SHAPE}+hidden_dropout=0.1"
    return replace(
        RunSpec(
            name=name,
            config=preset(name).as_overrides(),
            recipe=recipe(name, steps=30, batch_size=8),
            seed=seed,
            context_length=32,
            precision="fp32",
            data_sha256=data.sha256,
            evaluation_sequences=16,
            evaluate_every=10,
            log_every=5,
        ),
        **changes,
    )


def document(number):
    """A text by its number, the same each time."""
    random = np.random.default_rng(number)
    return " ".join(random.choice(WORDS, 5 + number % 40)) + f" {number * number}\n"


def content(data):
    """All that decides the numbers of a run."""
    return data.sha256, data.bytes_per_token, np.asarray(data.train()).tolist(), np.asarray(data.validation()).tolist()


def forget(data):
    """Remove tokenized data."""
    shutil.rmtree(data.directory)
