"""Corpora, token files and the batch plan."""

import bz2
import gzip
import hashlib
import json
import lzma
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experiments.vision.task import image_plan, make_image_plan
from leanqkv import LeanError
from leanqkv.checkpoints.tokenizer import load_tokenizer
from leanqkv.data import prepare as prepare_module
from leanqkv.data.batches import batch_plan, check_plan, collate, make_batch_plan
from leanqkv.data.cache import cached_directory
from leanqkv.data.corpus import open_corpus
from leanqkv.data.prepare import prepare_data
from leanqkv.data.tokenizer import train_tokenizer

TEXT = [f"line {i}: the quick brown fox number {i * i} jumps over the lazy dog\n" for i in range(400)]
SIZES = {
    "train_tokens": 1000,
    "validation_tokens": 200,
    "context_length": 16,
    "batch_size": 4,
    "evaluation_sequences": 8,
}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LEANQKV_CACHE", str(tmp_path / "cache"))


def write_text(path):
    path.write_text("".join(TEXT))
    return path


def write_jsonl(path):
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXT))
    return path


def write_parquet(path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": TEXT}), path)
    return path


def zipped(write):
    def write_zipped(path):
        plain = write(path.with_suffix(".plain"))
        path.write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
        return path

    return write_zipped


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (write_text, "a.txt"),
        (zipped(write_text), "a.txt.gz"),
        (write_jsonl, "a.jsonl"),
        (write_jsonl, "a.json"),
        (zipped(write_jsonl), "c4.json.gz"),
        (write_parquet, "a.parquet"),
    ],
)
def test_every_format_yields_the_text(tmp_path, write, name):
    corpus = open_corpus(str(write(tmp_path / name)))
    assert "".join(corpus.documents()) == "".join(TEXT)


def test_folder_reads_all_text_files_in_order(tmp_path):
    (tmp_path / "d" / "sub").mkdir(parents=True)
    (tmp_path / "d" / "b.txt").write_text("second")
    (tmp_path / "d" / "a.md").write_text("first")
    (tmp_path / "d" / "sub" / "c.py").write_text("third")
    (tmp_path / "d" / "image.png").write_bytes(b"\x89PNG\x00")
    assert list(open_corpus(str(tmp_path / "d")).documents()) == ["first", "second", "third"]


def test_folder_reads_what_is_zipped_and_names_what_it_leaves_out(tmp_path):
    zipped(write_jsonl)(tmp_path / "a.jsonl.gz")
    zipped(write_text)(tmp_path / "b.txt.gz")
    for name in ("c.jsonl.zst", "d.jsonl.zst", "config.json", "table.csv.gz"):
        (tmp_path / name).write_bytes(b"{}")
    corpus = open_corpus(str(tmp_path))
    assert "".join(corpus.documents()) == "".join(TEXT) * 2
    assert "(2 files; not read: 1 .gz, 1 .json, 2 .zst)" in corpus.description


def test_long_files_come_in_pieces_that_add_up(tmp_path, monkeypatch):
    monkeypatch.setattr("leanqkv.data.corpus.PIECE_CHARACTERS", 100)
    pieces = list(open_corpus(str(write_text(tmp_path / "a.txt"))).documents())
    assert len(pieces) > 50
    assert all(piece.endswith("\n") for piece in pieces)
    assert "".join(pieces) == "".join(TEXT)


def test_fingerprint_follows_content(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    first = open_corpus(str(tmp_path / "a.txt")).fingerprint
    assert first == open_corpus(str(tmp_path / "a.txt")).fingerprint
    (tmp_path / "a.txt").write_text("two")
    assert first != open_corpus(str(tmp_path / "a.txt")).fingerprint


def test_standard_library_is_the_default():
    corpus = open_corpus(None)
    assert "standard library" in corpus.description
    assert any("def " in document for document, _ in zip(corpus.documents(), range(5), strict=False))


def test_tokens_decode_to_the_documents_and_one_in_twenty_is_held_out(tmp_path):
    data = prepare_data(str(write_jsonl(tmp_path / "a.jsonl")), vocab_size=400)
    tokenizer = data.tokenizer
    end = tokenizer.eos_token
    train, validation = (
        tokenizer.decode(split()[:].astype(int)).split(end)[:-1] for split in (data.train, data.validation)
    )
    assert validation == TEXT[19::20]
    assert train == [line for i, line in enumerate(TEXT) if i % 20 != 19]
    assert data.bytes_per_token == sum(map(len, TEXT)) / (data.train_tokens + data.validation_tokens)


def test_preparation_says_how_much_is_done(tmp_path):
    source, lines = write_jsonl(tmp_path / "a.jsonl"), []
    prepare_data(str(source), vocab_size=400, progress=lines.append)
    size = f"{sum(map(len, TEXT)) / 1e6:.1f} million characters"
    assert lines[:3] == ["reading the data", "training the tokenizer", "tokenizing"]
    assert lines[3].startswith("tokenizing, 256 documents") and lines[4:] == [
        f"tokenizing, 400 documents, {size}",
        "hashing the tokens",
    ]
    lines.clear()
    train_tokenizer(iter(["abc " * 2**18] * 3), 300, lines.append)
    assert lines == [f"training the tokenizer, {count} million characters read" for count in (1, 2, 3)]


def test_one_document_gives_up_its_tail(tmp_path):
    data = prepare_data(str(write_text(tmp_path / "a.txt")), vocab_size=400)
    whole = data.tokenizer.decode(np.concatenate([data.train(), data.validation()]).astype(int))
    assert whole == "".join(TEXT) + data.tokenizer.eos_token
    assert data.validation_tokens == (data.train_tokens + data.validation_tokens) // 20


def test_second_preparation_is_read_from_the_cache(tmp_path, monkeypatch):
    source = str(write_text(tmp_path / "a.txt"))
    first = prepare_data(source, vocab_size=400)
    monkeypatch.setattr(prepare_module, "write_tokens", lambda *_: pytest.fail("tokenized twice"))
    assert prepare_data(source, vocab_size=400) == first
    monkeypatch.undo()
    monkeypatch.setenv("LEANQKV_CACHE", str(tmp_path / "cache"))
    assert prepare_data(source, vocab_size=300).sha256 != first.sha256


def test_who_waits_for_another_process_reads_what_it_made(tmp_path):
    """It still waits for the lock of a directory that has got its name meanwhile."""
    started, waits, made = Event(), Event(), []

    def fill(directory):
        started.set()
        assert waits.wait(60)
        made.append(directory)
        return {"bytes": 3, "sha256": "a"}

    def other():
        waits.set()
        return cached_directory("prose", "content", fill)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cached_directory, "prose", "content", fill)
        assert started.wait(60)
        second = pool.submit(other)
        assert first.result(60) == second.result(60)
    assert len(made) == 1
    assert [one.name for one in (tmp_path / "cache" / "prose").iterdir()] == [first.result()["directory"].name]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_tokens_that_are_cut_off_are_refused(tmp_path, split):
    data = prepare_data(str(write_jsonl(tmp_path / "a.jsonl")), vocab_size=300)
    file = data.directory / {"train": "train-00000.bin", "validation": "validation.bin"}[split]
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(LeanError, match=f"{file.name} is cut off.*Delete the folder"):
        getattr(data, split)()


def test_interrupted_preparation_leaves_nothing(tmp_path, monkeypatch):
    source = str(write_text(tmp_path / "a.txt"))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare_module, "write_tokens", full)
    with pytest.raises(LeanError, match=r"the disk is full.*LEANQKV_CACHE"):
        prepare_data(source, vocab_size=400)
    assert list((tmp_path / "cache" / "data").iterdir()) == []


def test_nanogpt_files_are_used_as_they_are(tmp_path):
    tokens = np.arange(1000, dtype=np.uint16) % 97
    tokens.tofile(tmp_path / "train.bin")
    tokens[:100].tofile(tmp_path / "val.bin")
    folder = prepare_data(str(tmp_path), vocab_size=97)
    assert np.array_equal(folder.train(), tokens)
    assert np.array_equal(folder.validation(), tokens[:100])
    single = prepare_data(str(tmp_path / "train.bin"), vocab_size=97)
    assert np.array_equal(single.train(), tokens[:950])
    assert np.array_equal(single.validation(), tokens[950:])


def test_a_tokenizer_beside_token_files_is_theirs_if_it_has_their_tokens(tmp_path):
    """Any folder may be called so."""
    (np.arange(1000, dtype=np.uint16) % 280).tofile(tmp_path / "all.bin")
    (tmp_path / "tokenizer").mkdir()

    def tokenizer():
        return prepare_data(str(tmp_path / "all.bin"), vocab_size=300).tokenizer

    assert tokenizer() is None  # no tokenizer at all
    train_tokenizer(iter(TEXT), 270).save_pretrained(tmp_path / "tokenizer")
    assert tokenizer() is None
    train_tokenizer(iter(TEXT), 300).save_pretrained(tmp_path / "tokenizer")
    assert tokenizer() is not None


def test_the_tokenizer_of_token_files_may_be_elsewhere(tmp_path):
    (np.arange(1000, dtype=np.uint16) % 280).tofile(tmp_path / "all.bin")
    for size in (270, 300):
        train_tokenizer(iter(TEXT), size).save_pretrained(tmp_path / str(size))

    def prepared(tokenizer):
        return prepare_data(str(tmp_path / "all.bin"), vocab_size=300, tokenizer=str(tmp_path / tokenizer))

    assert prepared("300").tokenizer.get_vocab() == load_tokenizer(tmp_path / "300").get_vocab()
    assert prepared(".").tokenizer is None  # a checkpoint without a tokenizer
    with pytest.raises(LeanError, match=r"has token 279, the tokenizer .*270 ends at 269: another one has made"):
        prepared("270")
    with pytest.raises(LeanError, match="no tokenizer at"):
        prepared("nowhere")


def _numbers() -> bytes:
    import pyarrow
    import pyarrow.parquet

    stream = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), stream)
    return stream.getvalue().to_pybytes()


NUMBERS = _numbers()

# what is wrong -> (file or folder, its content, a part of the message)
BAD = {
    "missing": ("nowhere.txt", None, "no such file"),
    "empty": ("empty.txt", b"", "empty"),
    "empty documents": ("empty.jsonl", b"\n\n", "empty"),
    "UTF-16": (
        "wide.txt",
        "text\n".encode("utf-16"),
        r"is UTF-16 text, not UTF-8 text; save it as UTF-8 \(iconv",
    ),
    "UTF-16 records": ("wide.jsonl", '{"text": "a"}\n'.encode("utf-16"), "wide.jsonl is UTF-16 text"),
    "UTF-32": ("wide.txt", "text\n".encode("utf-32"), "is UTF-32 text"),
    "Zstandard": (
        "a.jsonl.zst",
        b"\x28\xb5\x2f\xfd\x04\x00\x41\0\0",
        r"is a Zstandard file.*unpack it first \(zstd",
    ),
    "a zip archive": ("a.zip", b"PK\x03\x04\x14\0\xff", "is a zip archive, not UTF-8 text; unpack it first"),
    "an unnamed gzip": ("a.txt", gzip.compress(b"text"), r"is a gzip file.*ending \.gz"),
    "a tar archive": ("a.tar", b"a.txt".ljust(257, b"\0") + b"ustar\0", "is a tar archive"),
    "cut off xz": ("cut.txt.xz", lzma.compress(b"text " * 100)[:-12], "cut.txt.xz is cut off or damaged"),
    "no xz": ("no.txt.xz", b"text of no archive", "no.txt.xz is cut off or damaged"),
    "no bzip2": ("no.txt.bz2", b"text", "no.txt.bz2 cannot be read"),
    "a string a line": ("words.jsonl", b'"a"\n', "line 1 is a str, not a record"),
    "a list a line": ("lists.jsonl", b'["a"]\n', "line 1 is a list, not a record"),
    "a list for text": ("parts.jsonl", b'{"text": ["a"]}\n', "field 'text' holds a list, not text"),
    "null alone": ("null.jsonl", b'{"text": null}\n', "empty"),
    "half a surrogate": ("half.jsonl", b'{"text": "fine"}\n{"text": "half \\ud800 of one"}\n', "line 2"),
    "nested lists": ("nested.jsonl", b'{"text": "fine"}\n' + b"[" * 200_000 + b"]" * 200_000 + b"\n", "line 2"),
    "a number of many digits": ("number.jsonl", b'{"text": "fine"}\n' + b"9" * 10_000 + b"\n", "number.jsonl"),
    "latin-1": ("latin.txt", b"caf\xe9 \xff", "not UTF-8 text: byte 0xe9"),
    "NUL bytes": ("garbage.txt", b"abc\0\0def", "NUL"),
    "no text files": ("folder", {"x.png": b"\x89PNG"}, "no text in"),
    "broken JSON": ("broken.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
    "JSON on several lines": ("whole.json", b'[\n{"text": "a"}\n]', "every line is to be a record"),
    "a table": ("a.csv", b"text\na\n", "is a table; write its text as JSONL"),
    "cut off gzip": ("cut.txt.gz", gzip.compress(b"text " * 100)[:-12], "cut.txt.gz is cut off or damaged"),
    "no gzip": ("no.txt.gz", b"text", "no.txt.gz cannot be read"),
    "only archives": ("folder", {"x.jsonl.zst": b"x"}, "no text in .*; not read: 1 .zst"),
    "wrong field": ("field.jsonl", b'{"body": "a"}\n', r"no text in field 'text' \(found: body\); give `text_field`"),
    "broken Parquet": ("a.parquet", b"not a parquet file", "not a Parquet file"),
    "numbers for text": ("numbers.parquet", NUMBERS, "holds int64, not text"),
    "cut off .bin": ("odd.bin", b"\0\0\0", "cut off: 3 bytes"),
    "empty .bin": ("empty.bin", b"", "empty"),
    "token beyond the vocabulary": ("large.bin", np.array([5, 500], "uint16").tobytes(), "token 500"),
    "no val.bin": ("folder", {"train.bin": b"\0\0"}, "no val.bin"),
    "32-bit tokens": ("wide.bin", np.arange(100, dtype="uint32").tobytes(), "seems to hold 32-bit tokens"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_data_is_named(tmp_path, kind):
    name, content, message = BAD[kind]
    source = tmp_path / name
    if isinstance(content, dict):
        source.mkdir()
        for file, data in content.items():
            (source / file).write_bytes(data)
    elif content is not None:
        source.write_bytes(content)
    with pytest.raises(LeanError, match=message) as caught:
        prepare_data(str(source), vocab_size=400)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*.bin"))


@pytest.mark.parametrize("pack", [None, gzip, lzma, bz2], ids=lambda pack: getattr(pack, "__name__", "plain"))
def test_texts_are_read_without_their_mark_and_null_is_no_text(tmp_path, pack):
    """A byte order mark says how a file is encoded, and is no part of its text."""
    ending = {None: "", gzip: ".gz", lzma: ".xz", bz2: ".bz2"}[pack]
    contents = {
        "a.txt": b"\xef\xbb\xbfone\r\ntwo\xef\xbb\xbf\n",
        "b.jsonl": b'\xef\xbb\xbf{"text": "three"}\r\n{"text": null}\n{"text": ""}\n\n{"text": "four\\r\\n"}',
    }
    for name, content in contents.items():
        (tmp_path / f"{name}{ending}").write_bytes(pack.compress(content) if pack else content)
    assert list(open_corpus(str(tmp_path)).documents()) == ["one\ntwo\ufeff\n", "three", "four\r\n"]


@pytest.fixture
def revision(monkeypatch):
    """What the hub says of a dataset; the first entry is the commit."""
    import huggingface_hub

    commits = ["4" * 40]
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda name: SimpleNamespace(sha=commits[0]))
    return commits


def test_datasets_are_streamed(monkeypatch, revision):
    import datasets

    stream = datasets.Dataset.from_dict({"text": TEXT}).to_iterable_dataset()
    calls = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: calls.append((args, kwargs)) or stream)
    corpus = open_corpus("someone/corpus:english")
    assert list(corpus.documents()) == TEXT
    assert calls == [(("someone/corpus", "english"), {"split": "train", "streaming": True, "revision": "4" * 40})]
    data = prepare_data("someone/corpus:english", vocab_size=400, max_documents=40)
    held_out = data.tokenizer.decode(data.validation()[:].astype(int))
    assert held_out.split(data.tokenizer.eos_token)[:-1] == TEXT[19:40:20]


def test_unreachable_dataset_is_one_line(tmp_path):
    with pytest.raises(
        LeanError, match="no such file or folder, and the dataset of that name cannot be loaded"
    ) as caught:
        prepare_data("surely/not-a-dataset", vocab_size=400)
    assert "\n" not in str(caught.value)


IMAGES = {"train_images": 100, "test_images": 40, "batch_size": 4, "evaluation_images": 30}
KEPT = {make_batch_plan: batch_plan, make_image_plan: image_plan}


def drawn_at_once(make, steps, seed, sizes):
    """All training starts in one draw, as NumPy makes them."""
    random = np.random.default_rng([seed, 0])
    if make is make_batch_plan:
        return random.integers(0, sizes["train_tokens"] - sizes["context_length"], steps * sizes["batch_size"])
    epochs = -(-steps * sizes["batch_size"] // sizes["train_images"])
    order = np.concatenate([random.permutation(sizes["train_images"]) for _ in range(epochs)])
    return order[: steps * sizes["batch_size"]]


@pytest.mark.parametrize(
    ("make", "sizes"), [(make_batch_plan, SIZES), (make_image_plan, IMAGES)], ids=["text", "images"]
)
def test_a_plan_is_one_draw_however_it_is_read(monkeypatch, make, sizes):
    monkeypatch.setattr("leanqkv.data.batches.BLOCK", 37)
    plan, whole = make(seed=3, steps=90, **sizes), drawn_at_once(make, 90, 3, sizes)
    assert plan.train_starts[:].tolist() == whole.tolist()
    assert [plan.train_starts[i] for i in range(359, -1, -7)] == whole[::-7].tolist()
    for step in (88, 0, 37, 36, 89):
        assert plan.batch(step).tolist() == whole[4 * step : 4 * step + 4].tolist()
    assert plan.train_starts[100:100].tolist() == []
    assert len(plan.train_starts) == 360 and plan.steps == 90
    digest = hashlib.sha256(whole.astype("<i8").tobytes() + plan.evaluation_starts.astype("<i8").tobytes())
    assert plan.sha256 == digest.hexdigest()
    with pytest.raises(IndexError):
        plan.train_starts[360]


@pytest.mark.parametrize(
    ("make", "sizes"), [(make_batch_plan, SIZES), (make_image_plan, IMAGES)], ids=["text", "images"]
)
def test_one_directory_holds_plans_for_several_sets_of_data(tmp_path, make, sizes):
    every = [sizes, *({**sizes, name: count // 2} for name, count in sizes.items() if name != "context_length")]
    for each in every:
        saved = KEPT[make](tmp_path, seed=3, steps=10, **each)
        assert saved.sha256 == make(seed=3, steps=10, **each).sha256, each
    assert len(list(tmp_path.iterdir())) == len(every)


@pytest.mark.parametrize(
    ("make", "sizes"), [(make_batch_plan, SIZES), (make_image_plan, IMAGES)], ids=["text", "images"]
)
def test_another_numpy_that_draws_other_batches_is_refused(tmp_path, make, sizes):
    KEPT[make](tmp_path, seed=3, steps=10, **sizes)
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps({"sha256": "0" * 64, "numpy": "1.2.3"}))
    with pytest.raises(LeanError, match=r"NumPy 1\.2\.3, and NumPy .* draws other batches"):
        KEPT[make](tmp_path, seed=3, steps=10, **sizes)


def test_the_plan_of_a_hundred_billion_tokens_takes_kilobytes(tmp_path):
    sizes = {"train_tokens": 10**11, "validation_tokens": 10**7, "context_length": 2048, "batch_size": 512}
    tracemalloc.start()
    plan = batch_plan(tmp_path, seed=0, steps=95_367, evaluation_sequences=128, **sizes)
    assert plan.batch(95_366).max() < 10**11
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    block = 8 * 2**18
    assert kept - block < 500_000
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 1000


def test_a_plan_that_takes_forever_is_refused():
    with pytest.raises(LeanError, match="a plan has 4,294,967,296 at most"):
        check_plan(steps=10**9, batch_size=512, evaluation_sequences=1, different=9)


def test_plan_depends_on_the_seed_for_training_alone_and_grows_at_the_end():
    first, other, longer = (make_batch_plan(seed=s, steps=n, **SIZES) for s, n in ((0, 10), (1, 10), (0, 20)))
    assert not np.array_equal(first.train_starts[:], other.train_starts[:])
    assert np.array_equal(first.evaluation_starts, other.evaluation_starts)
    assert np.array_equal(first.train_starts[:], longer.train_starts[:40])
    for plan in (first, other, longer):
        assert plan.train_starts[:].min() >= 0
        assert plan.train_starts[:].max() + 16 < 1000
        assert plan.evaluation_starts.max() + 16 < 200


@pytest.mark.parametrize("split", ["train", "val"])
def test_text_shorter_than_the_context_is_refused(tmp_path, split):
    for name in ("train", "val"):
        np.zeros(16 if name == split else 100, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    data = prepare_data(str(tmp_path), vocab_size=97)
    data.require(15)
    with pytest.raises(LeanError, match=r"too short: 16 tokens, one sequence needs 17"):
        data.require(16)


def test_collate_shifts_the_targets_by_one():
    batch = collate(np.arange(100, dtype=np.uint16), [0, 83], 16)
    assert torch.equal(batch["input_ids"][1], torch.arange(83, 99))
    assert torch.equal(batch["shift_labels"], batch["input_ids"] + 1)
    assert batch["input_ids"].dtype == torch.int64
