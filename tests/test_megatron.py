"""Token files that Megatron-LM wrote, and those of other programs, which are refused."""

import numpy as np
import pytest

from leanqkv import LeanError
from leanqkv.data.evaluation import evaluation_text
from leanqkv.data.prepare import prepare_data
from leanqkv.data.token_files import stored_tokens


def write_megatron(path, documents, dtype="uint16", code=8):
    """As Megatron-LM's IndexedDatasetBuilder writes them, field by field."""
    np.concatenate(documents).astype(dtype).tofile(path.with_suffix(".bin"))
    lengths = np.array([len(each) for each in documents], dtype=np.int32)
    with path.with_suffix(".idx").open("wb") as stream:
        stream.write(b"MMIDIDX\x00\x00")
        stream.write((1).to_bytes(8, "little"))
        stream.write(bytes([code]))
        stream.write(len(lengths).to_bytes(8, "little"))
        stream.write((len(lengths) + 1).to_bytes(8, "little"))
        stream.write(lengths.tobytes())
        pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)]) * np.dtype(dtype).itemsize
        stream.write(pointers.astype(np.int64).tobytes())
        stream.write(np.arange(len(lengths) + 1, dtype=np.int64).tobytes())


def megatron_documents(count=60, end=0, seed=0):
    random = np.random.default_rng(seed)
    return [np.append(random.integers(1, 97, random.integers(5, 40)), end) for _ in range(count)]


@pytest.mark.parametrize(("dtype", "code"), [("uint16", 8), ("int32", 4)])
@pytest.mark.parametrize("named", ["text.bin", "text.idx", "text"])
def test_megatrons_files_are_used_as_they_are(tmp_path, dtype, code, named):
    documents = megatron_documents()
    write_megatron(tmp_path / "text", documents, dtype, code)
    data = prepare_data(str(tmp_path / named), vocab_size=97)
    total = np.concatenate(documents)
    assert data.dtype == dtype
    assert np.array_equal(np.concatenate([data.train(), data.validation()]), total)
    # Whole documents are held out, as many as fit into a twentieth.
    starts = np.cumsum([0, *map(len, documents)])
    assert data.train_tokens == starts[starts >= len(total) - len(total) // 20][0]
    assert data.description == f"{named} (Megatron tokens)"
    assert data.tokenizer is None


def test_a_folder_of_megatrons_files_is_one_text(tmp_path):
    parts = [megatron_documents(seed=seed, end=seed) for seed in range(3)]
    for number, part in enumerate(parts):
        write_megatron(tmp_path / f"text_{number}", part)
    data = prepare_data(str(tmp_path), vocab_size=97)
    total = np.concatenate([each for part in parts for each in part])
    assert np.array_equal(np.concatenate([np.asarray(data.train()), np.asarray(data.validation())]), total)
    assert data.description.endswith("(Megatron tokens, no end token between documents)")
    assert [name for name, _, _ in data.train_shards] == ["text_0.bin", "text_1.bin", "text_2.bin"]


@pytest.mark.parametrize(("dtype", "code"), [("uint16", 8), ("int32", 4)])
def test_megatrons_files_may_be_the_two_splits(tmp_path, dtype, code):
    """They are called as nanoGPT's."""
    parts = [np.concatenate(megatron_documents(count, seed=count)) for count in (60, 7)]
    for name, part in zip(("train", "val"), parts, strict=True):
        write_megatron(tmp_path / name, [part], dtype, code)
    data = prepare_data(str(tmp_path), vocab_size=97)
    assert data.dtype == dtype and "Megatron" in data.description
    for found, part in zip((data.train(), data.validation()), parts, strict=True):
        assert np.array_equal(found, part)
    (tmp_path / "val.idx").unlink()
    with pytest.raises(LeanError, match=r"val\.bin has no index beside it"):
        prepare_data(str(tmp_path), vocab_size=97)
    (tmp_path / "val.bin").unlink()
    assert prepare_data(str(tmp_path), vocab_size=97).validation_tokens == len(parts[0]) // 20


def test_a_file_too_short_to_hold_tokens_out_can_be_evaluated_on(tmp_path):
    np.arange(19, dtype=np.uint16).tofile(tmp_path / "few.bin")
    text = evaluation_text(str(tmp_path / "few.bin"), tokenizer=tmp_path, vocab_size=97)
    assert text.tokens.tolist() == list(range(19))
    with pytest.raises(LeanError, match="is too short: 0 tokens found"):
        evaluation_text(str(tmp_path / "few.bin"), tokenizer=tmp_path, vocab_size=97, split="validation")


def test_of_one_long_document_the_end_is_held_out(tmp_path):
    write_megatron(tmp_path / "text", [np.arange(1000) % 97])
    data = prepare_data(str(tmp_path / "text.bin"), vocab_size=97)
    assert (data.train_tokens, data.validation_tokens) == (950, 50)


def damaged_index(tmp_path, change):
    write_megatron(tmp_path / "text", megatron_documents())
    file = tmp_path / "text.idx"
    file.write_bytes(change(file.read_bytes()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: b"x" + content[1:], "is no index of Megatron-LM's"),
        (lambda content: content[:20], "is no index of Megatron-LM's"),
        (lambda content: content[:9] + b"\2" + content[10:], "is no index of Megatron-LM's token files, version 1"),
        (lambda content: content[:17] + b"\7" + content[18:], r"tokens of type 7; those read are 8 \(uint16\)"),
        (lambda content: content[:-8], "text.idx is cut off"),
        (lambda content: content[:34] + b"\1\1\0\0" + content[38:], "bytes, its index text.idx describes"),
        (lambda content: content[:34] + b"\xff" * 4 + content[38:], "is damaged: its documents are not all sequences"),
        (lambda content: content[:-8] + (999).to_bytes(8, "little"), "is damaged: its documents are not all"),
        (lambda content: content[:-16] + b"\xff" * 8 + content[-8:], "is damaged: its documents are not all"),
        (lambda content: content[:-8] + (30).to_bytes(8, "little"), "is damaged: its documents are not all"),
    ],
)
def test_a_bad_index_is_named(tmp_path, change, message):
    damaged_index(tmp_path, change)
    with pytest.raises(LeanError, match=message):
        prepare_data(str(tmp_path / "text.bin"), vocab_size=97)


def test_tokens_of_another_vocabulary_or_program_are_refused(tmp_path):
    write_megatron(tmp_path / "text", megatron_documents())
    with pytest.raises(LeanError, match=r"text\.bin has token 96, the model's vocabulary ends at 89"):
        stored_tokens(tmp_path / "text.bin", 90)
    write_megatron(tmp_path / "signed", [np.array([5, -100, 7])], "int32", 4)
    with pytest.raises(LeanError, match=r"signed\.bin has token -100; a token is a number"):
        stored_tokens(tmp_path / "signed.bin", 90)
    for number, what in ((20240520, "a header: cut its first 1,024 bytes off"), (20240801, "tokens of 32 bits")):
        header = np.zeros(256, dtype=np.int32)
        header[:3] = number, 1, 50
        (tmp_path / "fineweb.bin").write_bytes(header.tobytes() + np.arange(50, dtype=np.uint16).tobytes())
        with pytest.raises(LeanError, match=rf"fineweb\.bin is a token file of llm\.c, with .*{what}"):
            stored_tokens(tmp_path / "fineweb.bin", 50257)
