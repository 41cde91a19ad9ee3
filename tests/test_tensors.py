"""Weights are read one tensor at a time, from every layout that transformers writes; what is damaged is named."""

import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from leanqkv import LeanError
from leanqkv.checkpoints.tensors import CHUNK_ELEMENTS, LazyTensors, count_nonfinite, finite, open_tensors, read_tied

TENSORS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "b": torch.arange(4, dtype=torch.bfloat16),
    "c": torch.tensor([True, False]),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
}
SHARDS = {"a.weight": 1, "b": 1, "c": 2, "scalar": 2}


def write(directory: Path, layout: str, tensors: dict[str, Tensor] = TENSORS) -> Path:
    """Weights as `layout`: "safetensors" or "bin", each plain or "sharded ..."; "legacy bin" as before PyTorch 1.6."""
    directory.mkdir(exist_ok=True)
    suffix = layout.split()[-1]
    stem, save = ("model", save_file) if suffix == "safetensors" else ("pytorch_model", torch.save)
    if layout == "legacy bin":
        torch.save(tensors, directory / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    elif not layout.startswith("sharded"):
        save(tensors, directory / f"{stem}.{suffix}")
    else:
        shards = {name: f"{stem}-0000{SHARDS.get(name, 1)}-of-00002.{suffix}" for name in tensors}
        for shard in set(shards.values()):
            save({name: tensor for name, tensor in tensors.items() if shards[name] == shard}, directory / shard)
        index = {"metadata": {}, "weight_map": shards}
        (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return directory


LAYOUTS = ("safetensors", "sharded safetensors", "bin", "sharded bin", "legacy bin")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_tensors(layout, tmp_path):
    stored = open_tensors(write(tmp_path, layout))
    assert set(stored) == set(TENSORS) and len(stored) == len(TENSORS)
    for name, tensor in TENSORS.items():
        assert stored.shapes[name] == tensor.shape
        assert stored.dtypes[name] == tensor.dtype == stored[name].dtype
        assert torch.equal(stored[name], tensor)
        assert stored.file(name).is_file()
    assert "a" not in stored
    with pytest.raises(KeyError):
        stored["a"]


def test_safetensors_come_before_pickles(tmp_path):
    write(tmp_path, "bin", {"old": torch.ones(1)})
    write(tmp_path, "sharded bin", {"older": torch.ones(1)})
    assert set(open_tensors(tmp_path)) == {"old"}
    write(tmp_path, "sharded safetensors", {"new": torch.ones(1)})
    assert set(open_tensors(tmp_path)) == {"new"}


@pytest.mark.parametrize("layout", ["safetensors", "sharded safetensors", "bin", "sharded bin"])
def test_a_file_is_mapped_only_while_a_tensor_of_it_is_held(layout, tmp_path):
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        pytest.skip("only Linux lists the mapped files of a process, in /proc/self/maps")
    stored = open_tensors(write(tmp_path, layout))
    assert str(tmp_path) not in maps.read_text()
    tensor = stored["a.weight"]
    assert maps.read_text().count(str(tmp_path)) == 1
    del tensor
    for name in stored:
        stored[name].sum()
    assert str(tmp_path) not in maps.read_text()


@pytest.mark.parametrize("layout", ["safetensors", "sharded safetensors", "bin", "sharded bin", "legacy bin"])
@pytest.mark.parametrize("damage", ["cut short", "cut at once", "garbage", "empty"])
def test_damaged_files_are_named(layout, damage, tmp_path):
    write(tmp_path, layout)
    file = sorted(tmp_path.glob(f"*.{layout.split()[-1]}"))[0]
    content = file.read_bytes()
    damaged = {"cut short": content[:-9], "cut at once": content[:6], "garbage": b"garbage" * 99, "empty": b""}[damage]
    file.write_bytes(damaged)
    assert_refused(tmp_path, file.name, "cannot be read")


@pytest.mark.parametrize("seed", range(40))
def test_random_bytes_are_refused_in_one_line(seed, tmp_path):
    generator = torch.Generator().manual_seed(seed)
    noise = bytes(torch.randint(256, (200,), generator=generator).tolist())
    head = [b"", b"PK\x03\x04", b"\x80\x02", b"\x80\x02}q\x00"][seed % 4]
    (tmp_path / "pytorch_model.bin").write_bytes(head + noise)
    assert_refused(tmp_path, "pytorch_model.bin")
    (tmp_path / "model.safetensors").write_bytes((len(noise) // 2).to_bytes(8, "little") + noise)
    assert_refused(tmp_path, "model.safetensors", "cannot be read")


def test_no_weights(tmp_path):
    assert_refused(tmp_path, str(tmp_path), "model.safetensors", "pytorch_model.bin.index.json")
    assert_refused(tmp_path / "nowhere", "nowhere")


@pytest.mark.parametrize("layout", ["sharded safetensors", "sharded bin"])
def test_an_index_and_its_shards_must_agree(layout, tmp_path):
    write(tmp_path, layout)
    (index,) = tmp_path.glob("*.index.json")
    content = json.loads(index.read_text())
    shard = content["weight_map"]["scalar"]
    index.write_text(json.dumps(content | {"weight_map": content["weight_map"] | {"d": shard}}))
    assert_refused(tmp_path, shard, "does not hold d", index.name)
    index.write_text(json.dumps(content))
    (tmp_path / shard).unlink()
    assert_refused(tmp_path, shard, "missing", index.name)
    for broken in ({}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}):
        index.write_text(json.dumps(broken))
        assert_refused(tmp_path, index.name, "weight_map")
    index.write_text("{")
    assert_refused(tmp_path, index.name)


def test_pickles_of_anything_but_tensors_are_refused(tmp_path):
    file = tmp_path / "pytorch_model.bin"
    for legacy in (False, True):
        for content, needles in (
            ({"a": Fraction(1, 2)}, ("more than tensors", "fractions.Fraction", "run code", "safetensors")),
            ({"model": {"a": torch.ones(1)}}, ("no state dict", "'model'", "dict")),
            ({"a": torch.ones(1), "step": 3}, ("no state dict", "'step'", "int")),
            ({0: torch.ones(1)}, ("no state dict", "0")),
            (torch.ones(1), ("no state dict", "Tensor")),
            ([torch.ones(1)], ("no state dict", "list")),
        ):
            torch.save(content, file, _use_new_zipfile_serialization=not legacy)
            assert_refused(tmp_path, file.name, *needles)


def test_a_file_that_goes_after_it_was_opened(tmp_path):
    for layout in ("safetensors", "bin"):
        stored = open_tensors(write(tmp_path, layout))
        stored.file("b").unlink()
        with pytest.raises(LeanError, match=f"{stored.file('b').name}.* b cannot be read"):
            stored["b"]


def assert_refused(directory: Path, *needles: str) -> None:
    with pytest.raises(LeanError) as caught:
        open_tensors(directory)
    message = str(caught.value)
    assert "\n" not in message
    for needle in needles:
        assert needle in message


def test_lazy_tensors_are_computed_each_time_and_in_order():
    computed = []

    def compute(name: str) -> Tensor:
        computed.append(name)
        return torch.zeros(3 if name == "wrong" else 2)

    tensors = LazyTensors({"b": (2,), "a": (2,), "wrong": (2,)}, compute)
    assert list(tensors) == ["b", "a", "wrong"] and len(tensors) == 3 and "a" in tensors and "c" not in tensors
    assert not computed
    assert tensors["a"] is not tensors["a"]
    assert computed == ["a", "a"]
    with pytest.raises(AssertionError, match=r"wrong.*\(2,\).*\(3,\)"):
        tensors["wrong"]
    with pytest.raises(KeyError):
        tensors["c"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_that_are_not_finite_are_counted(dtype):
    tensor = torch.randn(40, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert count_nonfinite(tensor) == 0
    # Finite, with a sum that is not.
    assert count_nonfinite(torch.full((2, 8), torch.finfo(dtype).max, dtype=dtype)) == 0
    tensor[3, 4], tensor[39, 32], tensor[0, 0] = torch.nan, torch.inf, -torch.inf
    assert count_nonfinite(tensor) == 3
    assert count_nonfinite(tensor.T) == 3
    assert count_nonfinite(tensor[0, 0]) == 1
    assert count_nonfinite(tensor[:0]) == 0


def test_values_that_are_not_finite_are_looked_for_in_every_chunk():
    tensor = torch.zeros(5, CHUNK_ELEMENTS // 2)
    tensor[-1, -1] = torch.nan
    assert count_nonfinite(tensor) == 1
    assert count_nonfinite(tensor.view(-1)) == 1


def test_finite_names_the_tensor_when_it_is_read():
    tensors = finite({"good": torch.ones(2), "bad": torch.tensor([1.0, torch.inf, torch.nan])})
    assert list(tensors) == ["good", "bad"] and len(tensors) == 2 and "bad" in tensors
    assert torch.equal(tensors["good"], torch.ones(2))
    with pytest.raises(LeanError, match=re.escape("bad has 2 values that are NaN or infinite, of 3")):
        tensors["bad"]


def test_a_stored_head_must_be_the_embedding_it_is_tied_to(tmp_path):
    embedding = torch.randn(5, 4)
    for head in (embedding, embedding.clone()):
        stored = open_tensors(write(tmp_path, "bin", {"e": embedding, "h": head}))
        assert torch.equal(read_tied(stored, "e", "h"), embedding)
        assert torch.equal(read_tied(stored, "e", "none"), embedding)
    for head in (embedding + 1, embedding[:4], embedding.double() * (1 + 1e-15)):
        stored = open_tensors(write(tmp_path, "bin", {"e": embedding, "h": head}))
        with pytest.raises(LeanError, match=r"pytorch_model\.bin: h is not e.*tie_word_embeddings"):
            read_tied(stored, "e", "h")


KEPT_BY_THE_ALLOCATOR = """
import sys
if len(sys.argv) > 1:
    from leanqkv.environment import give_back_freed_memory
    give_back_freed_memory()
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) // 1024
size = 2**24
bytearray(size)  # once freed, a block of this size comes from the heap
start, blocks, small = resident(), [], []
for _ in range(20):
    blocks.append(bytearray(b"1") * size)
    small.append(bytearray(2**12))
del blocks
print(resident() - start)
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="resident memory is read from /proc/self/status, which only Linux has",
)
def test_freed_memory_is_given_back():
    """Twenty blocks of 16 MiB, each with a small one behind it that stays."""
    before, after = (
        int(subprocess.run([sys.executable, "-c", KEPT_BY_THE_ALLOCATOR, *given], stdout=subprocess.PIPE).stdout)
        for given in ([], ["gives back"])
    )
    if before > 100:  # glibc; other allocators may give back by themselves
        assert after < 30


FLOAT8 = [dtype for name, dtype in vars(torch).items() if name.startswith("float8_")]


@pytest.mark.parametrize("layout", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_is_read_as_bfloat16(dtype, layout, tmp_path):
    """Every value of every kind, NaN too."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    stored = open_tensors(write(tmp_path, layout, {"a": every, "b": torch.ones(2)}))
    assert stored.dtypes == {"a": torch.bfloat16, "b": torch.float32} and stored["a"].dtype == torch.bfloat16
    assert torch.equal(stored["a"].double().nan_to_num(7), every.double().nan_to_num(7))


ODD = {
    "sparse_coo": lambda weight: weight.to_sparse(),
    "sparse_csr": lambda weight: weight.to_sparse_csr(),
    "meta": lambda weight: weight.to("meta"),
    "nested": lambda weight: torch.nested.nested_tensor([weight[:1], weight[1:]]),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_plain_data_are_refused_by_name(kind, tmp_path):
    write(tmp_path, "bin", {**TENSORS, "a.weight": ODD[kind](TENSORS["a.weight"])})
    with pytest.raises(LeanError, match=rf"pytorch_model.bin: a.weight is a {kind} tensor; save dense ones"):
        open_tensors(tmp_path)


@pytest.mark.parametrize(
    "wrap",
    [
        "module.{}",
        "_orig_mod.{}",
        "module._orig_mod.{}",
        "_orig_mod.module.{}",
        "model._orig_mod.{}",
        "a._fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.{}",
    ],
)
def test_names_that_wrappers_changed_are_the_plain_models(wrap, tmp_path):
    plain = wrap.replace("module.{}", "{}") if wrap.startswith("module") else wrap
    for wrapper in ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        plain = plain.replace(wrapper, "")
    plain = plain.removeprefix("module.")
    stored = open_tensors(write(tmp_path, "safetensors", {wrap.format(name): TENSORS[name] for name in TENSORS}))
    assert set(stored) == {plain.format(name) for name in TENSORS}
    for name, tensor in TENSORS.items():
        assert torch.equal(stored[plain.format(name)], tensor)
        assert stored.file(plain.format(name)).name == "model.safetensors"


def test_a_module_of_that_name_stays_and_a_tensor_under_two_names_is_refused(tmp_path):
    names = {"module.a": torch.ones(2), "b": torch.ones(2)}
    assert set(open_tensors(write(tmp_path / "plain", "safetensors", names))) == set(names)
    names = {"_orig_mod.b": torch.ones(2), "b": torch.ones(2)}
    with pytest.raises(LeanError, match=r"hold one tensor twice: (_orig_mod.b and b|b and _orig_mod.b)"):
        open_tensors(write(tmp_path / "twice", "safetensors", names))
