"""Settings for every test; set before transformers is imported."""

import os
import tempfile

# Checkpoints carry their code, and loading it copies it under HF_HOME: a fresh folder, never the person's own.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="leanqkv-tests-")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["COLUMNS"] = "160"  # tables are as wide wherever the tests run

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The small corpus of corpus.py, tokenized."""
    from corpus import prepare

    directory = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEANQKV_CACHE", str(directory / "cache"))
        yield prepare(directory)
