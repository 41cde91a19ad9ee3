"""Checkpoints whose weights are odd x the commands that read them: right, or refused in one line with exit code 2."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from corpus import write_corpus
from safetensors.torch import load_file, save_file
from shapes import randomize
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from leanqkv.data.tokenizer import train_tokenizer

Tensors = dict[str, Tensor]
QUERY = "model.layers.0.self_attn.q_proj.weight"
READERS = {
    "inspect": "inspect odd",
    "import": "import odd --out result",
    "export": "export odd --out result",
    "generate": "generate odd --prompt the --max-new-tokens 2",
    "eval": "eval odd --data corpus.txt",
    "convert": "convert odd --to skipv1 --method mean-v --out result",
    "eliminate": "eliminate odd --remove block-diagonal --out result",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a bfloat16 model of transformers, its tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("odd")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 300}
    config = LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=64)
    randomize(LlamaForCausalLM(config), std=0.2).bfloat16().save_pretrained(folder / "source")
    text = write_corpus(folder / "long.txt").read_text()[:6000]
    (folder / "corpus.txt").write_text(text)
    train_tokenizer(iter([text]), 300).save_pretrained(folder / "source")
    return folder


@pytest.fixture
def odd(folder, monkeypatch):
    """Make the checkpoint `odd` of the source with other tensors, pickled or not."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("LEANQKV_CACHE", str(folder / "cache"))
    for name in ("odd", "result"):
        shutil.rmtree(name, ignore_errors=True)

    def make(change: Callable[[Tensors], Tensors], pickled: bool = False) -> Path:
        shutil.copytree("source", "odd")
        tensors = change(load_file("source/model.safetensors"))
        if pickled:
            Path("odd/model.safetensors").unlink()
            torch.save(tensors, "odd/pytorch_model.bin")
        else:
            save_file(tensors, "odd/model.safetensors", metadata={"format": "pt"})
        return Path("odd")

    return make


def matrices(change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: change(t) if t.ndim > 1 else t for n, t in tensors.items()}


def test_float8_weights_are_those_of_their_bfloat16(odd, cli):
    float8 = torch.float8_e4m3fn
    odd(matrices(lambda weight: weight.to(float8)))
    for reader, arguments in READERS.items():
        shutil.rmtree("result", ignore_errors=True)
        code, _, err = cli(*arguments.split())
        assert code == 0, (reader, err)
    shutil.rmtree("result")
    assert cli(*READERS["export"].split())[0] == 0
    for name, tensor in load_file("result/model.safetensors").items():
        assert torch.equal(tensor, load_file("odd/model.safetensors")[name].bfloat16()), name
        assert tensor.dtype == torch.bfloat16


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["sparse_coo", "meta", "complex64", "adapter"])
def test_refused(kind, reader, odd, cli):
    changes = {"sparse_coo": Tensor.to_sparse, "meta": lambda t: t.to("meta"), "complex64": lambda t: t.cfloat()}
    if kind == "adapter":
        (odd(dict) / "adapter_config.json").write_text("{}")
    else:
        odd(lambda tensors: tensors | {QUERY: changes[kind](tensors[QUERY])}, pickled=True)
    code, _, err = cli(*READERS[reader].split())
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (code, len(lines)) == (2, 1), err
    assert "PEFT adapter" in err if kind == "adapter" else (QUERY in err and kind in err)
    assert not Path("result").exists()


@pytest.mark.parametrize("value", [{}, None])
def test_an_empty_quantization_config_is_none(value, odd, cli):
    config = odd(dict) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": value}))
    assert cli(*READERS["import"].split())[0] == 0
    assert "quantization_config" not in json.loads(Path("result/config.json").read_text())
