"""Tokenizer files that are damaged or odd: a text comes out, or one sentence with exit code 2, within seconds."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shapes import tiny

from leanqkv import LeanForCausalLM
from leanqkv.data.tokenizer import train_tokenizer

DEEP = "[" * 5000 + "]" * 5000
Files = dict[str, Any]


def changed(**changes: Any) -> Callable[[Files], None]:
    """Change parts of tokenizer.json."""
    return lambda files: files["tokenizer.json"].update(changes)


def model(**changes: Any) -> Callable[[Files], None]:
    return lambda files: files["tokenizer.json"]["model"].update(changes)


def said(**changes: Any) -> Callable[[Files], None]:
    """Change parts of tokenizer_config.json."""
    return lambda files: files["tokenizer_config.json"].update(changes)


def with_vocabulary(change: Callable[[dict[str, Any]], Any]) -> Callable[[Files], None]:
    def apply(files: Files) -> None:
        vocabulary = files["tokenizer.json"]["model"]["vocab"]
        files["tokenizer.json"]["model"]["vocab"] = change(vocabulary) or vocabulary

    return apply


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def token(number: Any, content: Any = "<x>") -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": True, **plain}


CASES: dict[str, Callable[[Files], Any]] = {
    "ids repeated": with_vocabulary(lambda words: dict.fromkeys(words, 5)),
    "one id twice": with_vocabulary(lambda words: words.update({"a": 6, "b": 6})),
    "ids with holes": with_vocabulary(lambda words: {word: 7 * number for word, number in words.items()}),
    "id beyond int32": with_vocabulary(lambda words: words.update({"a": 2**32 - 1})),
    "id beyond uint32": with_vocabulary(lambda words: words.update({"a": 10**30})),
    "negative id": with_vocabulary(lambda words: words.update({"a": -1})),
    "id is a text": with_vocabulary(lambda words: words.update({"a": "x"})),
    "empty vocabulary": with_vocabulary(lambda words: words.clear()),
    "vocabulary is a list": model(vocab=[]),
    "vocabulary is null": model(vocab=None),
    "merges of unknown words": model(merges=[["zzz", "yyy"]]),
    "merges of three": model(merges=[["a", "b", "c"]]),
    "merges are numbers": model(merges=[1, 2]),
    "unknown model": model(type="Evil"),
    "model is null": changed(model=None),
    "model is nested": changed(model=json.loads("[" * 400 + "]" * 400)),
    "dropout": model(dropout=1.0),
    "catastrophic regex": changed(pre_tokenizer=regex("(a|aa)+$|(x+x+)+y")),
    "regex that looks back": changed(pre_tokenizer=regex(r"(?<=(a+)+)b(?!(a*)*c)")),
    "regex that refers back": changed(pre_tokenizer=regex(r"(a*)*\1+b")),
    "broken regex": changed(pre_tokenizer=regex("(")),
    "huge regex": changed(pre_tokenizer=regex("((a{0,1000}){0,1000}){0,1000}b")),
    "regex of nothing": changed(pre_tokenizer=regex("")),
    "unknown pre-tokenizer": changed(pre_tokenizer={"type": "Evil"}),
    "normalizer without end": changed(normalizer={"type": "Replace", "pattern": {"String": ""}, "content": "aa"}),
    "normalizer empties all": changed(normalizer={"type": "Replace", "pattern": {"Regex": r"[\s\S]"}, "content": ""}),
    "added token beyond all": changed(added_tokens=[token(2**31)]),
    "added token of another id": changed(added_tokens=[token(0, "a")]),
    "added token without content": changed(added_tokens=[token(1, "")]),
    "added tokens are texts": changed(added_tokens=["<x>"]),
    "template of unknown tokens": changed(
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<no>", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    ),
    "truncation": changed(truncation={"max_length": 0, "strategy": "LongestFirst", "stride": 5, "direction": "Right"}),
    "padding": changed(
        padding={
            "strategy": {"Fixed": 10**9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "x",
        }
    ),
    "decoder unknown": changed(decoder={"type": "Evil"}),
    "tokenizer.json is a list": lambda files: files.update({"tokenizer.json": []}),
    "tokenizer.json is empty": lambda files: files.update({"tokenizer.json": ""}),
    "tokenizer.json is nested": lambda files: files.update({"tokenizer.json": DEEP}),
    "tokenizer.json is no text": lambda files: files.update({"tokenizer.json": b"\xff\xfe\x00"}),
    "tokenizer.json is truncated": lambda files: files.update(
        {"tokenizer.json": json.dumps(files["tokenizer.json"])[:500]}
    ),
    "config is a list": lambda files: files.update({"tokenizer_config.json": []}),
    "config is nested": lambda files: files.update({"tokenizer_config.json": DEEP}),
    "config is empty": lambda files: files.update({"tokenizer_config.json": ""}),
    "special map is a list": lambda files: files.update({"special_tokens_map.json": [1]}),
    "added tokens are a list": lambda files: files.update({"added_tokens.json": [1]}),
    "class is unknown": said(tokenizer_class="EvilTokenizer"),
    "class is a number": said(tokenizer_class=5),
    "class is a list": said(tokenizer_class=["x"]),
    "eos is a number": said(eos_token=5),
    "eos is unknown": said(eos_token="<never>"),
    "eos is a list": said(eos_token=["a"]),
    "eos is an object": said(eos_token={"a": 1}),
    "eos is empty": said(eos_token=""),
    "longest is a text": said(model_max_length="x"),
    "longest is negative": said(model_max_length=-5),
    "longest is NaN": said(model_max_length=float("nan")),
    "side is unknown": said(padding_side="up"),
    "template is a number": said(chat_template=5),
    "template is a list": said(chat_template=[1, {"name": "x"}]),
    "template is broken": said(chat_template="{% for %}"),
    "map is a number": said(auto_map={"AutoTokenizer": 5}),
    "decoder of added tokens": said(added_tokens_decoder={"x": 5}),
    "decoder of added ids": said(added_tokens_decoder={str(10**30): {"content": "x"}}),
    "extra is a number": said(extra_special_tokens=5),
    "additional are numbers": said(additional_special_tokens=[1, 2]),
    "spaces": said(add_prefix_space="x", clean_up_tokenization_spaces=[1]),
}
COMMANDS = {
    "generate": f"generate odd --prompt {'a' * 28}{'x' * 25}z --temperature 0 --max-new-tokens 2",
    "eval": "eval odd --data text.txt",
    "import": "import odd --out result",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers")
    torch.manual_seed(0)
    LeanForCausalLM(tiny("gpt", vocab_size=300, max_position_embeddings=128)).save_pretrained(folder / "source")
    train_tokenizer(iter(["def function(argument): return argument\n"] * 50), 300).save_pretrained(folder / "source")
    (folder / "text.txt").write_text(("a" * 40 + "x" * 40 + "z ") * 40)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_taken_or_refused(case, source, monkeypatch, cli):
    monkeypatch.chdir(source)
    monkeypatch.setenv("LEANQKV_CACHE", str(source / "cache"))
    shutil.rmtree("odd", ignore_errors=True)
    shutil.copytree("source", "odd")
    files = {name: json.loads(Path("odd", name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json")}
    CASES[case](files)
    for name, content in files.items():
        raw = content if isinstance(content, bytes | str) else json.dumps(content)
        Path("odd", name).write_bytes(raw if isinstance(raw, bytes) else raw.encode())
    for command, arguments in COMMANDS.items():
        shutil.rmtree("result", ignore_errors=True)
        start = time.process_time()
        code, _, err = cli(*arguments.split())
        assert code in (0, 2), (command, err)
        assert code == 0 or sum(line.startswith("error: ") for line in err.splitlines()) == 1, (command, err)
        assert time.process_time() - start < 10, command
