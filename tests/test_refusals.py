"""Refused command lines: exit code 2, one line with the words in refusals/, and nothing written or changed.

A table is a mapping of a command to what follows it and a part of its answer. Models in it are made when they are
first named: `gpt+mqa` and the like by that name, the others by MADE.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import lm_eval.tasks
import pytest
import torch
import yaml
from corpus import write_corpus
from safetensors.torch import load_file, save_file
from shapes import SHAPES, randomize
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel, PreTrainedModel

import experiments.vision  # noqa: F401, there are models of images too
from leanqkv import LeanForCausalLM, LeanForImageClassification, LeanForMaskedLM, preset
from leanqkv.checkpoints.tokenizer import load_tokenizer
from leanqkv.data.tokenizer import train_tokenizer

TABLES = sorted((Path(__file__).parent / "refusals").glob("*.yaml"))
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
QUERY = "model.layers.1.self_attn.q_proj.weight"
FILES = {
    "short.txt": b"too short",
    "tiny.txt": b"a",
    "empty.txt": b"",
    "latin.txt": "café ".encode("latin-1") * 99,
    "lines.jsonl": b'{"text": "fine"}\n{"text": \n',
    "file": b"",
    "tokens.bin": bytes(8000),
    "full/file": b"mine",
    "notes/precious.txt": b"kept",
    "cut/config.json": b'{"model_type": ',
    "wrong/config.json": b'{"model_type": "leanqkv", "hidden_size": "wide"}',
    "bert/config.json": b'{"model_type": "bert"}',
    "weightless/config.json": b'{"model_type": "gpt2"}',
    "begun/demo.json": b'{"record": 1, "settings": {}}',
    "tasks/code.yaml": b"task: code\ndataset_path: json\nunsafe_code: true\n",
}


def named(name: str) -> PreTrainedModel:
    """The model of a name that begins with a shape of shapes.py."""
    shape, _, rest = name.partition("+")
    given = dict(part.split("=", 1) for part in rest.split("+") if "=" in part and ":" not in part)
    fields = {key: value for key, value in ({**SHAPES[shape], "vocab_size": 300}).items() if key not in given}
    config = preset("+".join(filter(None, ("tiny", rest))), **fields)
    return (LeanForMaskedLM if config.task == "masked_lm" else LeanForCausalLM)(config)


def llama(kind: type[PreTrainedModel] = LlamaForCausalLM) -> PreTrainedModel:
    return kind(LlamaConfig(**SIZES, vocab_size=300, max_position_embeddings=64, num_key_value_heads=2))


def changed(tensor: str, change: Callable[[torch.Tensor], object]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        save(named("gpt+norm_type=none+norm_eps=1e-5"), path)
        tensors = load_file(path / "model.safetensors")
        change(tensors[tensor][4])
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    return make


def truncated(path: Path) -> None:
    save(llama(), path)
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(5000)


def sharded(path: Path) -> None:
    randomize(llama()).save_pretrained(path, max_shard_size="20KB")
    next(path.glob("model-00002*")).unlink()


def other_merges(path: Path) -> None:
    save(named("gpt"), path)
    content = json.loads((path / "tokenizer.json").read_text())
    content["model"]["merges"].pop()
    (path / "tokenizer.json").write_text(json.dumps(content))


def overflowing(path: Path) -> None:
    """Finite weights, beyond the range of float32 as soon as they are multiplied."""
    model = named("gpt")
    model.model.layers[1].mlp.down_proj.weight.data.fill_(torch.finfo(torch.float32).max)
    model.save_pretrained(path)
    load_tokenizer(Path("gpt")).save_pretrained(path)


def infinite_head(path: Path) -> None:
    model = randomize(named("llama"))
    model.lm_head.weight.data = model.lm_head.weight.sign() * 1e38
    save(model, path, std=None)


def folder_of_texts(path: Path) -> None:
    path.mkdir()
    (path / "a.txt").write_bytes(Path("corpus.txt").read_bytes())
    (path / "b.txt").write_bytes(Path("other.txt").read_bytes())


MADE: dict[str, Callable[[Path], object]] = {
    "stock": lambda path: save(llama(), path),
    "headless": lambda path: save(llama(LlamaModel), path),
    "classifier": lambda path: save(llama(LlamaForSequenceClassification), path),
    "images": lambda path: save(LeanForImageClassification(preset("vit-digits")), path),
    "mute": lambda path: named("gpt").save_pretrained(path),
    "truncated": truncated,
    "sharded": sharded,
    "other": other_merges,
    "foreign": lambda path: save(named("gpt"), path, text="another text, with other merges"),
    "overflowing": overflowing,
    "infinite": infinite_head,
    "nan": changed("model.layers.2.self_attn.q_proj.weight", lambda row: row.fill_(torch.nan)),
    "singular": changed(QUERY, lambda row: row.zero_()),
    "ill": changed(QUERY, lambda row: row.mul_(1e-12)),
    "texts": folder_of_texts,
}


def save(model: PreTrainedModel, path: Path, std: float | None = 32**-0.5, text: str = "") -> None:
    """Write a model with a tokenizer of 300 tokens trained on `text`, or on corpus.txt."""
    (model if std is None else randomize(model, std=std)).save_pretrained(path)
    train_tokenizer(iter([text or Path("corpus.txt").read_text()]), 300).save_pretrained(path)


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with texts, in which the commands run."""
    directory = tmp_path_factory.mktemp("refusals")
    content = write_corpus(directory / "corpus.txt").read_text()
    (directory / "other.txt").write_text("\n".join(reversed(content.splitlines()[:600])))
    for name, data in FILES.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(data)
    (directory / "nothing").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEANQKV_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("LEANQKV_DEBUG", "0")
        patch.setattr("leanqkv.compare.comparison.available_cores", lambda: 1)
        patch.chdir(directory)
        yield directory


def make(name: str) -> None:
    """Write the model of this name, if it is one that is not there yet."""
    name = name.partition("/")[0]
    if Path(name).exists():
        return
    if name in MADE:
        MADE[name](Path(name))
    elif re.fullmatch(r"(gpt|llama)(\+\S*)?", name):
        save(named(name), Path(name))


def state(place: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of every file and folder."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in place.rglob("*")}


def refusal(cli: Callable, place: Path, line: str) -> str:
    """The words of a refusal, or how the answer is none."""
    words = shlex.split(line)
    for word in words[1:]:
        make(word)
    before = state(place)
    code, _, err = cli(*words)
    lines = [line for line in err.splitlines() if not line.lower().startswith("warning")]
    if code != 2 or len(lines) != 1 or not lines[0].startswith("error: "):
        return f"NOT REFUSED IN ONE LINE: exit code {code}, {err}"
    return lines[0] if state(place) == before else f"SOMETHING WAS WRITTEN: {set(state(place)) ^ set(before)}"


@pytest.fixture
def one_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's thousands of files are read once, and not for every name that it does not have."""
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", cache(lm_eval.tasks.TaskManager))


@pytest.mark.usefixtures("one_index")
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_refused_in_these_words(place: Path, cli: Callable, table: Path) -> None:
    wrong = {}
    for command, rows in yaml.safe_load(table.read_text()).items():
        for rest, words in rows.items():
            found = refusal(cli, place, line := f"{command} {rest}".rstrip())
            if any(part not in found for part in (words if isinstance(words, list) else [words])):
                wrong[line] = (words, found)
    said = (f"{line}\n  expected: {words}\n  found: {found}" for line, (words, found) in wrong.items())
    assert not wrong, "\n".join(said)
