"""Damaged checkpoints and bad places x commands: one line, exit code 2, sources untouched, nothing left behind."""

import errno
import json
import math
import os
from pathlib import Path

import pytest
import torch
from corpus import SHAPE, write_corpus
from refusing import refused
from safetensors.torch import load_file, save_file
from shapes import assert_near, randomize, tiny

from leanqkv import LeanForCausalLM
from leanqkv.data.tokenizer import train_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty directory with a model in it, in which the command runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEANQKV_CACHE", str(tmp_path / "cache"))
    model = randomize(LeanForCausalLM(tiny("gpt", vocab_size=300)), std=0.2)
    model.save_pretrained("source", max_shard_size="20KB")
    train_tokenizer(iter(["def function(argument): return argument\n"] * 50), 300).save_pretrained("source")
    write_corpus(tmp_path / "corpus.txt")
    return tmp_path


# --- damaged directories ----------------------------------------------------------------------------------------------

INDEX = Path("source/model.safetensors.index.json")


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def remap(change) -> None:
    mapped = json.loads(INDEX.read_text())["weight_map"]
    edit(INDEX, weight_map={name: change(shard) for name, shard in mapped.items()})


def changed_tensor(change, name: str = "model.layers.0.self_attn.q_proj.weight") -> None:
    shard = json.loads(INDEX.read_text())["weight_map"][name]
    tensors = load_file(f"source/{shard}")
    tensors[name] = change(tensors[name])
    save_file(tensors, f"source/{shard}", metadata={"format": "pt"})


DAMAGES = {
    "type is a list": (lambda: edit(Path("source/config.json"), model_type=["x"]), "model_type is a name, found ['x']"),
    "config is a list": (lambda: Path("source/config.json").write_text("[]"), "does not hold a JSON object"),
    "config is nested": (lambda: Path("source/config.json").write_text("[" * 10**5), "config.json cannot be read"),
    "wrong map": (lambda: remap(lambda shard: "model-00001-of-00002.safetensors"), "is missing"),
    "map is a list": (lambda: edit(INDEX, weight_map=["x"]), "has no weight_map"),
    "shards swapped": (
        lambda: remap(lambda shard: sorted(path.name for path in Path("source").glob("*.safetensors"))[0]),
        "does not hold",
    ),
    "shard above": (lambda: remap(lambda shard: f"../source/{shard}"), "shards lie beside their index"),
    "shard elsewhere": (lambda: remap(lambda shard: str(Path("source", shard).resolve())), "shards lie beside"),
    "NaN": (lambda: changed_tensor(lambda weight: weight.fill_(math.nan)), "values that are NaN or infinite"),
    "shape": (lambda: changed_tensor(lambda weight: weight[:-1].clone()), "q_proj.weight in"),
    "integers": (lambda: changed_tensor(lambda weight: weight.int()), "only floating-point weights can be read"),
    "no weights": (INDEX.unlink, "has no weights"),
    "another class": (lambda: edit(Path("source/config.json"), model_type="bert"), "is a 'bert' checkpoint"),
}
TRAINING = "--data corpus.txt --precision fp32 --micro-batch-size 1 --device cpu --steps 1"
READERS = {
    "generate": "generate source --prompt a",
    "serve": "serve source --port 0",
    "eval": "eval source --data corpus.txt",
    "export": "export source --out result",
    "convert": "convert source --to skipv1 --method mean-v --out result",
    "eliminate": "eliminate source --remove block-diagonal --out result",
    "uptrain": f"uptrain source {TRAINING} --out result",
    "bench": "bench source --context 4 --new-tokens 1 --batch 1 --out result",
    "inspect": "inspect source",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_alike_by_all_that_read_one(folder, cli, damage):
    spoil, message = DAMAGES[damage]
    spoil()
    for command, arguments in READERS.items():
        if damage == "NaN" and command in ("eval", "uptrain"):
            continue  # they read the text first, and keep its tokens
        assert message in refused(cli, folder, arguments.split()), command


def test_weights_that_are_nan_are_refused_before_training_and_scoring(folder, cli):
    DAMAGES["NaN"][0]()
    for command in ("eval", "uptrain"):
        code, _, err = cli(*READERS[command].split())
        assert (code, len(err.splitlines())) == (2, 1)
        assert DAMAGES["NaN"][1] in err


def test_an_index_without_metadata_is_read(folder, cli):
    arguments = ("generate", "source", "--prompt", "a", "--temperature", "0", "--max-new-tokens", "4")
    written = cli(*arguments)[1]
    INDEX.write_text(json.dumps({"weight_map": json.loads(INDEX.read_text())["weight_map"]}))
    assert cli(*arguments)[:2] == (0, written)


# --- places -----------------------------------------------------------------------------------------------------------

PLACES = {
    "empty": ("", "the value after --out is empty"),
    "here": (".", "give it a name"),
    "above": ("..", "give it a name"),
    "under a file": ("corpus.txt/out", "corpus.txt is a file"),
    "far under a file": ("corpus.txt/a/b", "corpus.txt is a file"),
    "a file": ("corpus.txt", "is a file"),
    "a long name": ("x" * 300, "File name too long"),
    "a name that leaves no room": ("x" * 250, "File name too long"),
    "a long path": ("/".join(["x" * 99] * 50), "File name too long"),
    "a device": (os.devnull, "is a file"),
    "a loop": ("loop", "symbolic links"),
    "under a loop": ("loop/out", "symbolic links"),
    "a link to nothing": ("nothing", "is a link to nothing"),
    "in a source": ("source/out", "lies in source"),
    "in a source, by a link": ("link/out", "lies in source"),
}
WRITERS = {
    "train": f"train tiny{SHAPE} {TRAINING}",
    "uptrain": f"uptrain source {TRAINING}",
    "compare": f"compare tiny{SHAPE} tiny{SHAPE}+skipv1 --seeds 1 {TRAINING}",
    "convert": "convert source --to skipv1 --method mean-v",
    "eliminate": "eliminate source --remove block-diagonal",
    "export": "export source",
    "import": "import source",
    "bench": "bench source --context 4 --new-tokens 1 --batch 1",
    "analysis": "experiments.analysis source --data corpus.txt --probe-steps 0",
    "demo": "experiments.demo --steps 1",
}
READ_SOURCE = [name for name, command in WRITERS.items() if command.split()[1] == "source"]


@pytest.mark.parametrize("place", PLACES)
def test_a_place_that_cannot_be_written_is_refused(folder, cli, place):
    out, message = PLACES[place]
    Path("loop").symlink_to("loop")
    Path("nothing").symlink_to("nowhere")
    Path("link").symlink_to("source")
    for command in READ_SOURCE if message == "lies in source" else WRITERS:
        assert message in refused(cli, folder, [*WRITERS[command].split(), "--out", out]), command


def test_a_full_disk_while_the_token_cache_is_filled(folder, cli, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("leanqkv.data.prepare.write_tokens", full)
    Path("cache/data").mkdir(parents=True)
    assert "the disk is full" in refused(cli, folder, [*WRITERS["train"].split(), "--out", "out"])


# --- one loader -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", ["gpt", "llama"])
@torch.no_grad()
def test_a_model_is_the_one_that_from_pretrained_loads(tmp_path, shape, dtype):
    from leanqkv.checkpoints.open import load_model, open_checkpoint

    saved = randomize(LeanForCausalLM(tiny(shape, "skipv1")).to(dtype), std=0.2)
    saved.generation_config.eos_token_id = 7
    saved.save_pretrained(tmp_path)
    expected, model = LeanForCausalLM.from_pretrained(tmp_path).eval(), load_model(open_checkpoint(tmp_path))
    assert model.dtype == expected.dtype == dtype
    assert model.config.to_dict() == expected.config.to_dict() | {"_name_or_path": ""}
    assert model.config._attn_implementation == expected.config._attn_implementation
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    for (name, ours), (other, theirs) in zip(
        [*model.named_parameters(), *model.named_buffers()],
        [*expected.named_parameters(), *expected.named_buffers()],
        strict=True,
    ):
        assert name == other
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), name
    ids = torch.arange(10)[None] % 90
    # The products of equal weights are rounded as the weights are aligned in memory.
    assert_near(model(ids).logits, expected(ids).logits, 64 * torch.finfo(dtype).eps)
    assert not model.training


def test_generate_takes_directories_of_transformers(folder, cli):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, initializer_range=0.3)
    LlamaForCausalLM(config).bfloat16().save_pretrained("llama")
    train_tokenizer(iter(["def function(argument): return argument\n"] * 50), 300).save_pretrained("llama")
    assert cli("import", "llama", "--out", "ours")[0] == 0
    texts = [cli("generate", name, "--prompt", "def", "--temperature", "0")[:2] for name in ("llama", "ours")]
    assert texts[0] == texts[1]
    assert texts[0][0] == 0, cli("generate", "llama", "--prompt", "def")
