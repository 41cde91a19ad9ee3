"""Token files of large corpora: several processes, shards, going on after a stop, tokenizers."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from corpus import content, document, forget

from leanqkv import LeanError
from leanqkv.data import corpus as corpus_module
from leanqkv.data import tokenizing
from leanqkv.data.batches import collate
from leanqkv.data.corpus import open_corpus
from leanqkv.data.evaluation import evaluation_text
from leanqkv.data.prepare import prepare_data
from leanqkv.data.token_files import TokenFiles


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Three files of 100 documents each, JSONL and Parquet."""
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setenv("LEANQKV_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    texts = [[document(100 * part + i) for i in range(100)] for part in range(3)]
    for name, part in (("a", texts[0]), ("c", texts[2])):
        Path(folder, f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts[1]}), folder / "b.parquet")
    return folder


@pytest.fixture
def whole(corpus):
    """One shard, as one process makes it, with the oracle: every document's tokens, one in twenty held out."""
    data = prepare_data(str(corpus), vocab_size=400)
    tokenizer, splits = data.tokenizer, [[], []]
    for number in range(300):
        ids = tokenizer(document(number), add_special_tokens=False)["input_ids"]
        splits[number % 20 == 19] += [*ids, tokenizer.eos_token_id]
    assert (np.asarray(data.train()).tolist(), np.asarray(data.validation()).tolist()) == tuple(splits)
    assert len(data.train_shards) == 1
    return data


@pytest.mark.slow
def test_several_processes_write_the_same_files(corpus, whole):
    expected = content(whole)
    forget(whole)
    found = prepare_data(str(corpus), vocab_size=400, workers=2)
    assert content(found) == expected
    assert found == whole


def test_shards_are_the_same_tokens(corpus, whole, monkeypatch):
    expected = content(whole)
    forget(whole)
    monkeypatch.setattr(tokenizing, "SHARD_TOKENS", 700)
    data = prepare_data(str(corpus), vocab_size=400)
    assert len(data.train_shards) > 5
    assert content(data) == expected
    assert (data.train_tokens, data.validation_tokens) == (len(expected[2]), len(expected[3]))
    starts = np.arange(0, data.train_tokens - 64, 17)
    batches = [collate(tokens, starts, 64) for tokens in (data.train(), np.array(expected[2]))]
    assert all((batches[0][name] == batches[1][name]).all() for name in batches[0])
    assert "train_shards" not in data.record()


def test_slices_across_arrays():
    parts = [np.arange(0, 5), np.arange(5, 5), np.arange(5, 6), np.arange(6, 20)]
    tokens = TokenFiles(parts)
    assert len(tokens) == 20
    for begin in range(21):
        for end in range(begin, 22):
            assert tokens[begin:end].tolist() == list(range(20))[begin:end]


FILES = ["a.jsonl", "b.parquet", "c.jsonl"]


class Stopped(BaseException):
    """As Ctrl-C, or the end of a process."""


@pytest.mark.parametrize("documents", [1, 60, 100, 101, 199, 260, 299])
def test_stopped_anywhere_it_goes_on(corpus, whole, monkeypatch, documents):
    """What is in complete shards is not tokenized again, nor are files read that lie before them."""
    expected = content(whole)
    forget(whole)
    monkeypatch.setattr(tokenizing, "SHARD_TOKENS", 700)
    write_shard, reached = tokenizing._write_shard, []

    def stop(encoded, train, validation, at):
        def stopping():
            for number, one in enumerate(encoded, at.documents):
                if number == documents:
                    raise Stopped
                yield one

        return write_shard(stopping(), train, validation, at)

    monkeypatch.setattr(tokenizing, "_write_shard", stop)
    with pytest.raises(Stopped):
        prepare_data(str(corpus), vocab_size=400)
    monkeypatch.setattr(tokenizing, "_write_shard", write_shard)
    encode, read, opened = tokenizing.encode, corpus_module._documents, []
    monkeypatch.setattr(
        corpus_module, "_documents", lambda file, *about: opened.append(file.name) or read(file, *about)
    )
    monkeypatch.setattr(tokenizing, "encode", lambda *a: reached.extend(a[-1]) or encode(*a))
    found = prepare_data(str(corpus), vocab_size=400)
    assert content(found) == expected
    assert reached[-1] == document(299)
    # A shard is less than 50 documents; before the first is complete the tokenizer is trained again.
    assert opened == {1: 2 * FILES, 199: FILES[1:], 260: FILES[2:], 299: FILES[2:]}.get(documents, opened)
    again = 300 - len(reached)
    assert again <= documents and (documents < 60 or again > documents - 50)
    assert not list(found.directory.parent.glob(".*"))


def test_the_work_of_a_process_that_died_long_ago_is_taken_over(corpus, whole, monkeypatch):
    """Its folder is older than the process that goes on."""
    expected = content(whole)
    forget(whole)
    monkeypatch.setattr(tokenizing, "SHARD_TOKENS", 700)
    write_shard, encode, encoded = tokenizing._write_shard, tokenizing.encode, []

    def stop(documents, train, validation, at):
        if at.shard == 4:
            raise Stopped
        return write_shard(documents, train, validation, at)

    monkeypatch.setattr(tokenizing, "_write_shard", stop)
    with pytest.raises(Stopped):
        prepare_data(str(corpus), vocab_size=400)
    (left,) = whole.directory.parent.glob(".*.partial")
    os.utime(left, (0, 0))
    monkeypatch.setattr(tokenizing, "_write_shard", write_shard)
    monkeypatch.setattr(tokenizing, "encode", lambda *a: encoded.extend(a[-1]) or encode(*a))
    found = prepare_data(str(corpus), vocab_size=400)
    assert content(found) == expected and len(encoded) < 200
    assert not list(found.directory.parent.glob(".*"))


def test_a_shard_that_would_be_empty_is_none(corpus, whole, monkeypatch):
    """The last document is held out, and all before it fill whole shards."""
    expected = content(whole)
    forget(whole)
    total = len(expected[2])
    monkeypatch.setattr(tokenizing, "SHARD_TOKENS", total)
    data = prepare_data(str(corpus), vocab_size=400)
    assert content(data) == expected
    assert (data.train_tokens, data.validation_tokens) == (total, len(expected[3]))
    assert [file.name for file in data.directory.glob("train-*")] == ["train-00000.bin"]


def test_a_file_that_changes_while_it_is_read_is_refused(corpus, monkeypatch, tmp_path):
    encode, file = tokenizing.encode, corpus / "c.jsonl"

    def append(*arguments):
        with file.open("a") as stream:
            stream.write(json.dumps({"text": "more"}) + "\n")
        return encode(*arguments)

    monkeypatch.setattr(tokenizing, "encode", append)
    with pytest.raises(LeanError, match=r"c\.jsonl was changed while it was read"):
        prepare_data(str(corpus), vocab_size=400)
    assert list((tmp_path / "cache" / "data").iterdir()) == []


# --- tokenizers -------------------------------------------------------------------------------------------------------


@pytest.fixture
def variant(whole, tmp_path):
    """Saves the corpus's tokenizer after a change, and returns where."""

    def save(name, change):
        tokenizer = whole.tokenizer
        change(tokenizer)
        tokenizer.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return save


@pytest.mark.long_cases
@pytest.mark.parametrize("workers", [1, 2])
def test_texts_are_neither_cut_nor_padded(corpus, whole, variant, workers):
    """Though the tokenizer's file asks for it."""

    def change(tokenizer):
        tokenizer.backend_tokenizer.enable_truncation(4)
        tokenizer.backend_tokenizer.enable_padding(length=60)

    named = variant("cutting", change)
    settings = json.loads(Path(named, "tokenizer.json").read_text())
    assert settings["truncation"]["max_length"] == 4 and settings["padding"]
    data = prepare_data(str(corpus), vocab_size=400, tokenizer=named, workers=workers)
    assert content(data) == content(whole)


def test_what_looks_like_an_end_in_a_document_is_text(tmp_path, whole):
    (tmp_path / "ends.jsonl").write_text(
        "".join(json.dumps({"text": f"a <|endoftext|> {n}"}) + "\n" for n in range(40))
    )
    named = str(whole.directory / "tokenizer")
    data = prepare_data(str(tmp_path / "ends.jsonl"), vocab_size=400, tokenizer=named)
    tokens = np.concatenate([data.train(), data.validation()])
    assert (tokens == data.tokenizer.eos_token_id).sum() == 40
    assert data.tokenizer.decode(data.train()[:20].astype(int)).startswith("a <|endoftext|> 0<|endoftext|>a ")


def test_tokenizers_that_end_texts_differently_are_two(corpus, variant):
    """As those of a base model and of the chat model made from it: their tokenizer.json is one."""

    def add(tokenizer):
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})

    base, chat = variant("base", add), variant("chat", add)
    settings = json.loads(Path(chat, "tokenizer_config.json").read_text())
    Path(chat, "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|end|>"}))
    assert Path(base, "tokenizer.json").read_bytes() == Path(chat, "tokenizer.json").read_bytes()
    ends = [prepare_data(str(corpus), vocab_size=500, tokenizer=place) for place in (base, chat)]
    for data, end in zip(ends, ("<|endoftext|>", "<|end|>"), strict=True):
        assert data.tokenizer.eos_token == end == data.tokenizer.decode(data.train()[-1:])
    assert ends[0].sha256 != ends[1].sha256


def test_numbers_of_tokens_may_have_gaps(corpus, variant):
    def renumber(name, number):
        place = variant(name, lambda tokenizer: None)
        settings = json.loads(Path(place, "tokenizer.json").read_text())
        assert "Q" in settings["model"]["vocab"]
        settings["model"]["vocab"]["Q"] = number
        Path(place, "tokenizer.json").write_text(json.dumps(settings))
        return place

    place = renumber("gap", 500)
    # A token that does not occur is no reason to refuse a text; one that does is named where it is.
    assert prepare_data(str(corpus), vocab_size=400, tokenizer=place).vocab_size == 400
    (corpus / "last.txt").write_text("Questions")
    with pytest.raises(LeanError, match=r"document \d+ of the text has token 500, 'Q', and the model"):
        prepare_data(str(corpus), vocab_size=400, tokenizer=place)
    assert prepare_data(str(corpus), vocab_size=501, tokenizer=place).vocab_size == 501
    assert prepare_data(str(corpus), vocab_size=10**6, tokenizer=renumber("wide", 70_000)).dtype == "uint32"


def test_a_vocabulary_below_that_of_bytes_is_refused(corpus):
    with pytest.raises(LeanError, match="has at least 257 tokens, the model only 100; set vocab_size"):
        prepare_data(str(corpus), vocab_size=100)


def test_nothing_is_left_of_data_that_cannot_be_read(corpus, monkeypatch, tmp_path):
    monkeypatch.setattr(tokenizing, "SHARD_TOKENS", 700)
    with (corpus / "c.jsonl").open("a") as stream:
        stream.write("{}\n")
    with pytest.raises(LeanError, match="line 101 has no text in field 'text'"):
        prepare_data(str(corpus), vocab_size=400)
    assert list((tmp_path / "cache" / "data").iterdir()) == []


def test_no_more_than_so_many_tokens_are_held_out(corpus, whole, monkeypatch):
    for module in ("tokenizing", "token_files"):
        monkeypatch.setattr(f"leanqkv.data.{module}.VALIDATION_TOKENS", 120)
    forget(whole)
    data = prepare_data(str(corpus), vocab_size=400)
    documents = data.tokenizer.decode(np.asarray(data.validation()).astype(int)).split(data.tokenizer.eos_token)
    assert documents[:-1] == [document(19 + 20 * i) for i in range(len(documents) - 1)]
    assert 120 <= data.validation_tokens < 120 + 80
    assert data.train_tokens + data.validation_tokens == whole.train_tokens + whole.validation_tokens
    # The same documents are the validation text of an evaluation.
    text = evaluation_text(str(corpus), tokenizer=data.directory / "tokenizer", vocab_size=400, split="validation")
    assert np.array_equal(text.tokens, np.asarray(data.validation())[:-1])


def test_a_worker_that_is_killed_is_one_line(corpus, monkeypatch, tmp_path):
    class Pool(tokenizing.ProcessPoolExecutor):
        def submit(self, *args):
            from concurrent.futures.process import BrokenProcessPool

            raise BrokenProcessPool

    monkeypatch.setattr(tokenizing, "ProcessPoolExecutor", Pool)
    with pytest.raises(LeanError, match="one of the 2 processes that tokenize was killed"):
        prepare_data(str(corpus), vocab_size=400, workers=2)


# --- large files ------------------------------------------------------------------------------------------------------


def test_the_hash_of_a_large_file_is_kept_until_it_changes(corpus, monkeypatch):
    monkeypatch.setattr("leanqkv.data.cache.REMEMBERED_BYTES", 10)
    read = []
    from leanqkv.data import corpus as module

    hash_files = module.hash_files
    monkeypatch.setattr(module, "hash_files", lambda *files: read.extend(files) or hash_files(*files))
    first = open_corpus(str(corpus)).fingerprint
    assert len(read) == 3
    assert open_corpus(str(corpus)).fingerprint == first and len(read) == 3
    text = (corpus / "a.jsonl").read_text()
    (corpus / "a.jsonl").write_text(text.replace("quick", "quiet"))
    assert open_corpus(str(corpus)).fingerprint != first and len(read) == 4
    monkeypatch.setattr("leanqkv.data.cache.REMEMBERED_BYTES", 2**26)
    (corpus / "a.jsonl").write_text(text)
    assert open_corpus(str(corpus)).fingerprint == first and len(read) == 7


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_makes_what_training_finds(corpus, unwrapped, tmp_path, monkeypatch):
    shape = "tiny+num_hidden_layers=1+hidden_size=32+intermediate_size=32+num_attention_heads=2+vocab_size=400"
    shape += "+max_position_embeddings=16"
    code, out, err = unwrapped("tokenize", shape, "--data", str(corpus))
    assert code == 0, err
    assert "data: corpus (3 files)" in out and f"files: {tmp_path}/cache/data/" in out
    monkeypatch.setattr(tokenizing, "encode", lambda *_: pytest.fail("tokenized twice"))
    steps = ("--steps", "2", "--device", "cpu", "--precision", "fp32", "--out", str(tmp_path / "run"))
    code, _, err = unwrapped("train", shape, "--data", str(corpus), *steps)
    assert code == 0, err
