"""Prose from docstrings, and mixtures of texts."""

import json
import re
from itertools import islice

import numpy as np
import pytest
from corpus import write_corpus

from leanqkv import LeanError
from leanqkv.checkpoints.tokenizer import Framing
from leanqkv.data import prose as prose_module
from leanqkv.data.corpus import open_corpus
from leanqkv.data.evaluation import _begun, evaluation_text, unseen_split
from leanqkv.data.mixture import PIECE, _spread, parse_mixture, token_counts
from leanqkv.data.prepare import prepare_data
from leanqkv.data.prose import docstrings, paragraphs_of, prose

DOCSTRING = """Return the sum of ``a`` and :func:`~numpy.b`, as everybody would expect it.

    The second paragraph of this text is dedented and
    reflowed into one line.

Parameters
----------
a : array_like
    Input array, which is described here in a number of plain words.

b : array_like
    Another one, which is described in as many plain words as the first.

Args:
    a: the first of the two numbers that are added to each other here.

Notes
-----
The heading and its rule are left out of this **paragraph** of notes.

.. note:: The name of a directive is left out of such a paragraph, too.

>>> print("what a doctest prints is no text that a person would write")
what a doctest prints is no text that a person would write

    result = [f(x, y) for x in range(10) if g(x) >= 3]; h(result, axis=0)

| a table | of several | columns that | a person | reads | in rows | only |

Too short to be kept.
"""


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LEANQKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


# --- prose ------------------------------------------------------------------------------------------------------------


def test_paragraphs_are_prose():
    assert list(paragraphs_of(DOCSTRING)) == [
        "Return the sum of a and numpy.b, as everybody would expect it.",
        "The second paragraph of this text is dedented and reflowed into one line.",
        "The heading and its rule are left out of this paragraph of notes.",
        "The name of a directive is left out of such a paragraph, too.",
    ]


def test_docstrings_are_parsed_and_not_imported(tmp_path):
    module = tmp_path / "module.py"
    code = '"""The module."""\nraise SystemExit\n'
    code += 'def f():\n  "f"\n  def g():\n    "g"\nclass A:\n  "A"\nB = "no docstring"\n'
    module.write_text(code)
    assert docstrings(module) == ["The module.", "f", "g", "A"]
    module.write_text("def broken(:")
    assert docstrings(module) == []
    module.write_bytes(b"\xff\xfe\x00")
    assert docstrings(module) == []


def test_a_paragraph_is_in_the_prose_once_and_the_text_is_cached(monkeypatch):
    first, second, third = (f"This is paragraph number {word} of the text, in plain words." for word in "ABC")
    sources = [[first, f"{second}\n\n{first}"], [second], [f"{third}\n\n{second}"]]
    monkeypatch.setattr(prose_module, "_sources", lambda: iter(sources))
    made = prose()
    documents = [json.loads(line)["text"] for line in made["file"].read_text().splitlines()]
    assert documents == [f"{first}\n\n{second}\n", f"{third}\n"]
    assert made["bytes"] == sum(map(len, documents))
    monkeypatch.setattr(prose_module, "_sources", lambda: pytest.fail("made twice"))
    assert prose() == made
    corpus = open_corpus("prose")
    assert list(corpus.documents()) == documents
    assert corpus.fingerprint == made["sha256"] and made["sha256"][:12] in corpus.description
    monkeypatch.setattr(prose_module, "version", lambda package: "another")
    with pytest.raises(pytest.fail.Exception, match="made twice"):
        prose()


def test_the_prose_of_this_python_begins_with_its_topics(monkeypatch):
    first = list(islice(prose_module._documents(), 150))
    assert first == list(islice(prose_module._documents(), 150))
    assert first[0].startswith("Assert statements are a convenient way") and sum(map(len, first)) > 300_000
    text = "".join(first)
    assert "\n>>>" not in text and "``" not in text
    words = text.lower().split()
    assert sum(word in ("the", "a", "of", "to", "is") for word in words) > 0.1 * len(words)
    # One document in twenty is held out, as of every corpus.
    monkeypatch.setattr(prose_module, "_documents", lambda: iter(first))
    data = prepare_data("prose", vocab_size=400)
    assert 0 < data.validation_tokens < 0.2 * data.train_tokens


@pytest.mark.parametrize("name, near", [("corpsu.txt", "corpus.txt"), ("./corpsu.txt", None)])
def test_a_name_like_it_is_suggested(tmp_path, name, near):
    write_corpus(tmp_path / "corpus.txt")
    with pytest.raises(LeanError, match=f"Did you mean '{near}'" if near else "no data at"):
        open_corpus(name)


def test_a_built_in_name_is_suggested(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda *_: (_ for _ in ()).throw(OSError("unreachable")))
    with pytest.raises(LeanError, match=r"unreachable.*Did you mean 'prose'\?"):
        open_corpus("prse")


# --- mixtures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source, parts",
    [
        (None, [("stdlib", 1)]),
        ("a.txt", [("a.txt", 1)]),
        ("a.txt,b.txt", [("a.txt", 0.5), ("b.txt", 0.5)]),
        ("a.txt, b.txt:0.3", [("a.txt", 0.7), ("b.txt", 0.3)]),
        ("a.txt:.25,prose:0.5,owner/name:config", [("a.txt", 0.25), ("prose", 0.5), ("owner/name:config", 0.25)]),
        ("a:0.1,b:0.2,c:0.7", [("a", 0.1), ("b", 0.2), ("c", 0.7)]),
        ("x,y.txt", [("x,y.txt", 1)]),
        ("a.txt,b:0.5", [("a.txt", 0.5), ("b:0.5", 0.5)]),
    ],
)
def test_mixtures_are_parsed(tmp_path, source, parts):
    for literal in ("x,y.txt", "b:0.5"):
        (tmp_path / literal).write_text("a file of this very name goes before")
    assert [(part.source, pytest.approx(part.share)) for part in parse_mixture(source)] == parts


@pytest.mark.parametrize(
    "source, message",
    [
        ("a:0.5,b:0.6", "add up to 1.1; they must add up to 1"),
        ("a:0.5,b:0.2", "add up to 0.7; they must add up to 1"),
        ("a:0.5,b:0.5,c", "add up to 1; they must add up to less than 1"),
        ("a:1.5,b", "a share that is not between 0 and 1"),
        ("a:-0.5,b", "a share that is not between 0 and 1"),
        ("a:0,b", "a share that is not between 0 and 1"),
        ("a,", "has an empty name"),
        ("a,b,a:0.2", "has a twice"),
    ],
)
def test_bad_mixtures(source, message):
    with pytest.raises(LeanError, match=re.escape(message)):
        parse_mixture(source)


def test_the_largest_mixture_repeats_no_token():
    assert token_counts([1000, 90], [0.7, 0.3]) == [210, 90]
    assert token_counts([70, 900], [0.7, 0.3]) == [70, 30]


@pytest.mark.parametrize("count", [1, 5, PIECE, PIECE + 1, 3 * PIECE + 17, 50_000])
def test_pieces_are_spread_over_the_text(count):
    tokens = np.arange(50_000)
    taken = np.concatenate(list(_spread(tokens, count)))
    assert len(taken) == count and (np.diff(taken) > 0).all()
    if 3 * PIECE < count < 50_000:
        assert taken[-1] > 25_000


def write_texts(place):
    (place / "a.txt").write_text("alpha beta gamma delta\n" * 3000)
    (place / "b.txt").write_text("one two three four five\n" * 1000)


@pytest.mark.parametrize("tokenizer", [None, "named"])
def test_a_mixture_has_the_shares_in_tokens(tmp_path, tokenizer):
    write_texts(tmp_path)
    if tokenizer:
        prepare_data("a.txt", vocab_size=300).tokenizer.save_pretrained(tokenizer)
    data = prepare_data("a.txt:0.25,b.txt", vocab_size=300, tokenizer=tokenizer)
    chosen = data.tokenizer
    for split, counts in ((data.train(), data.train_tokens), (data.validation(), data.validation_tokens)):
        first = chosen.decode(split[: counts // 4 - 2].astype(int))
        rest = chosen.decode(split[counts // 4 + 2 :].astype(int))
        assert set(first.split()[1:-1]) <= {"alpha", "beta", "gamma", "delta"}
        assert set(rest.split()[1:-1]) <= {"one", "two", "three", "four", "five", "five<|endoftext|>"}
    whole = [prepare_data(name, vocab_size=300, tokenizer=str(data.directory / "tokenizer")) for name in ("b.txt",)]
    assert data.train_tokens == pytest.approx(whole[0].train_tokens / 0.75, abs=1)
    assert data.record()["parts"][1] == {
        "description": "b.txt, 0.0 MB",
        "sha256": whole[0].sha256,
        "share": 0.75,
        "tokens": whole[0].train_tokens + whole[0].validation_tokens,
    }
    assert data.description.startswith("25% a.txt, 0.1 MB + 75% b.txt")
    assert prepare_data("a.txt:0.25,b.txt:0.75", vocab_size=300, tokenizer=tokenizer) == data
    assert "parts" not in whole[0].record()


def test_mixtures_that_are_refused(tmp_path):
    write_texts(tmp_path)
    np.arange(100, dtype="uint16").tofile(tmp_path / "tokens.bin")
    with pytest.raises(LeanError, match=r"tokens.bin holds tokens, not text; a mixture is made of texts"):
        prepare_data("a.txt,tokens.bin", vocab_size=300)
    with pytest.raises(LeanError, match=r"no data at c.txt: there is no such file or folder. Did you mean '[ab].txt'"):
        prepare_data("a.txt,c.txt", vocab_size=300)
    (tmp_path / "tiny.txt").write_text("a")
    with pytest.raises(LeanError, match=r"the validation text of tiny.txt is too short to give its share"):
        prepare_data("a.txt,tiny.txt", vocab_size=300)
    with pytest.raises(LeanError, match="is a mixture, which is for training and calibration; score its texts"):
        evaluation_text("a.txt,b.txt", tokenizer="nowhere", vocab_size=300)


def test_train_takes_a_mixture(tmp_path, cli):
    from corpus import SHAPE

    write_texts(tmp_path)
    command = (
        "train",
        f"tiny{SHAPE}",
        "--data",
        "a.txt,b.txt:0.4",
        "--steps",
        "2",
        "--batch-size",
        "2",
        "--out",
        "run",
    )
    code, out, _ = cli(*command, "--precision", "fp32", "--evaluation-sequences", "2", "--device", "cpu")
    assert code == 0 and "60% a.txt" in out
    record = json.loads((tmp_path / "run/record.json").read_text())
    assert [part["share"] for part in record["data"]["parts"]] == [pytest.approx(0.6), 0.4]


# --- texts that calibration has not seen ------------------------------------------------------------------------------


def test_a_text_that_calibration_reads_is_told_by_its_documents(tmp_path):
    write_texts(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "c.txt").write_text((tmp_path / "a.txt").read_text())
    (tmp_path / "copy.txt").write_text((tmp_path / "b.txt").read_text())
    assert unseen_split("a.txt", None) == unseen_split("a.txt", "b.txt") == "whole"
    assert unseen_split("a.txt", "a.txt") == unseen_split("copy.txt", "a.txt,b.txt:0.2") == "validation"
    (tmp_path / "folder" / "d.txt").write_text("something else")
    with pytest.raises(LeanError, match=r"1 of the 1 documents of a.txt are in the calibration text folder too"):
        unseen_split("a.txt", "folder")
    np.arange(100, dtype="uint16").tofile(tmp_path / "tokens.bin")
    assert unseen_split("tokens.bin", "tokens.bin") == "validation"


def test_no_tokens_are_begun_as_some_are():
    around = Framing(begin=7, end=8)
    assert [*_begun(np.array([], dtype="uint16"), around)[:9]] == [7]
    assert [*_begun(np.array([7, 3]), around)[:9]] == [7, 3]


def test_token_files_that_calibration_reads_are_told_one_by_one(tmp_path):
    (tmp_path / "tokens").mkdir()
    for seed, name in enumerate(("train", "val")):
        np.random.default_rng(seed).integers(0, 100, 50).astype("uint16").tofile(tmp_path / "tokens" / f"{name}.bin")
    assert unseen_split("tokens", "tokens") == "validation"
    # Calibration reads the training file of a folder alone.
    assert unseen_split("tokens/val.bin", "tokens") == unseen_split("tokens/val.bin", "tokens/train.bin") == "whole"
    for source, calibration in (("tokens/train.bin", "tokens"), ("tokens", "tokens/train.bin")):
        with pytest.raises(LeanError, match="in the calibration text tokens"):
            unseen_split(source, calibration)
