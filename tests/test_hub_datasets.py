"""Corpora of the hub, on local copies of their layouts: file by file, by commit, through a broken connection."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from corpus import content, document, forget

from leanqkv import LeanError
from leanqkv.data import tokenizing
from leanqkv.data.corpus import open_corpus
from leanqkv.data.prepare import prepare_data


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Local copies of the hub's layouts, loaded by the library itself."""
    import datasets
    import huggingface_hub
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setenv("LEANQKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    calls, load = [], datasets.load_dataset

    def write(folder, pattern, files, **columns):
        place = tmp_path / "hub" / folder / Path(pattern).parent
        place.mkdir(parents=True, exist_ok=True)
        for number in range(files):
            texts = [document(100 * number + i) for i in range(100)]
            table = pyarrow.table({"text": texts} | {name: [value] * 100 for name, value in columns.items()})
            pyarrow.parquet.write_table(table, place / Path(pattern).name.format(number, files))

    write("HuggingFaceFW/fineweb-edu", "sample/10BT/{:03}_00000.parquet", 3, id="<urn>", score=3.5)
    (tmp_path / "hub/HuggingFaceFW/fineweb-edu/README.md").write_text(
        "---\nconfigs:\n- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: sample/10BT/*\n---\n"
    )
    write("Skylion007/openwebtext", "plain_text/train-{:05}-of-{:05}.parquet", 2)

    def from_disk(name, *args, revision, **options):
        assert revision == "4" * 40
        calls.append((name, *args))
        return load(str(tmp_path / "hub" / name), *args, **options)

    monkeypatch.setattr(datasets, "load_dataset", from_disk)
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda name: SimpleNamespace(sha="4" * 40))
    return calls


@pytest.mark.parametrize(
    ("name", "repository", "files"),
    [
        ("fineweb-edu:sample-10BT", ("HuggingFaceFW/fineweb-edu", "sample-10BT"), 3),
        ("openwebtext", ("Skylion007/openwebtext", None), 2),
    ],
)
def test_named_corpora_are_streamed_file_by_file(hub, name, repository, files, monkeypatch):
    corpus = open_corpus(name)
    assert hub == [repository]
    assert len(corpus.parts) == files
    assert [list(part()) for part in corpus.parts] == [
        [document(100 * n + i) for i in range(100)] for n in range(files)
    ]
    monkeypatch.setattr(tokenizing, "SHARD_TOKENS", 700)
    data = prepare_data(name, vocab_size=400)
    expected = sum(len(data.tokenizer(text)["input_ids"]) + 1 for text in corpus.documents())
    assert data.train_tokens + data.validation_tokens == expected


def test_a_hub_dataset_is_its_commit(hub, monkeypatch):
    import huggingface_hub

    first = open_corpus("openwebtext")
    assert first.fingerprint == open_corpus("openwebtext").fingerprint and "revision 444444444444" in first.description
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda name: SimpleNamespace(sha="5" * 40))
    import datasets

    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, revision, **o: load(*a, revision="4" * 40, **o))
    assert open_corpus("openwebtext").fingerprint != first.fingerprint


def test_a_connection_that_breaks_costs_no_work(hub, monkeypatch):
    """It is one line, and the same command goes on behind the last complete shard."""
    import datasets

    monkeypatch.setattr(tokenizing, "SHARD_TOKENS", 700)
    through, encode, encoded = datasets.IterableDataset.__iter__, tokenizing.encode, []
    monkeypatch.setattr(tokenizing, "encode", lambda *a: encoded.extend(a[-1]) or encode(*a))

    def breaking(stream):
        for number, record in enumerate(through(stream)):
            if number == 90 and breaks:
                raise ConnectionError("Server Disconnected")
            yield record

    monkeypatch.setattr(datasets.IterableDataset, "__iter__", breaking)
    breaks = False
    expected = prepare_data("openwebtext", vocab_size=400)
    tokens = content(expected)
    named = str(expected.directory / "tokenizer")
    again = prepare_data("openwebtext", vocab_size=400, tokenizer=named)
    assert content(again) == tokens
    forget(again)
    breaks = True
    # Each document is a batch of its own, so that complete shards lie behind the break.
    monkeypatch.setattr(tokenizing, "_batches", lambda documents: ([document] for document in documents))
    with pytest.raises(LeanError, match=r"openwebtext could not be read further: Server Disconnected\. The same"):
        prepare_data("openwebtext", vocab_size=400, tokenizer=named)
    breaks, encoded[:] = False, []
    found = prepare_data("openwebtext", vocab_size=400, tokenizer=named)
    assert content(found) == tokens and len(encoded) < 150


def test_rows_without_text_are_none_wherever_they_lie(hub, tmp_path):
    """Of Parquet files, of JSONL and of a hub dataset."""
    import pyarrow
    import pyarrow.parquet

    texts = ["one", None, "", "two"]
    table = pyarrow.table({"text": texts})
    for place in ("hub/Skylion007/openwebtext/plain_text/train-00000-of-00002.parquet", "here.parquet"):
        pyarrow.parquet.write_table(table, tmp_path / place)
    (tmp_path / "here.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "", "two")))
    assert list(open_corpus("openwebtext").parts[0]()) == ["one", "two"]
    for name in ("here.parquet", "here.jsonl"):
        assert list(open_corpus(str(tmp_path / name)).documents()) == ["one", "two"]
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "here.parquet")
    with pytest.raises(LeanError, match="has several columns 'text'"):
        list(open_corpus(str(tmp_path / "here.parquet")).documents())


def test_a_corpus_that_is_a_script_is_refused(hub):
    with pytest.raises(LeanError, match="Give slimpajama"):
        open_corpus("redpajama")
    assert not hub
