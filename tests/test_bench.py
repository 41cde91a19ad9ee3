"""Inference benchmarks: what they measure is what they say."""

import json
import re
import sys
from itertools import count
from pathlib import Path

import pytest
import torch
from shapes import randomize, tiny

from leanqkv import LeanError, LeanForCausalLM
from leanqkv.files import new_directory
from leanqkv.inference import Decoder
from leanqkv.inference.bench import measure
from leanqkv.memory import PeakMemory
from leanqkv.model.cache import cache_bytes
from leanqkv.model.cache_quantized import BLOCK


def build(*mechanisms: str, **fields) -> LeanForCausalLM:
    return randomize(LeanForCausalLM(tiny("llama", *mechanisms, max_position_embeddings=64, **fields))).eval()


def test_storages_are_counted_once_and_whole():
    with PeakMemory() as memory:
        base = torch.zeros(10, 100)
        other = torch.zeros(7, dtype=torch.bfloat16)
        views = base[3:], base.T
        assert memory.now == memory.peak == 4000 + 14
    assert len(views) == 2 and len(other) == 7


def weight_bytes(model: LeanForCausalLM) -> int:
    """Parameters in float32, tied ones once, and buffers."""
    tied = sum(parameter.numel() for parameter in model.parameters()) * 4
    return tied + sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())


def test_the_peak_is_the_most_that_is_held_at_one_time():
    before = torch.zeros(5000)
    with PeakMemory() as memory:
        before.add_(1)  # was there, and is no one's
        assert memory.now == 0
        one = torch.zeros(1000)
        view = one.view(10, 100)[2:]
        two = one + 1
        assert memory.now == memory.peak == 8000
        del two
        three = torch.zeros(100)
        del one
        assert memory.now == 4400  # the view keeps the storage
        del view
        assert memory.now == 400
    assert memory.peak == 8000
    assert three.numel() == 100


@pytest.mark.slow
def test_rows():
    models = {name: build(*name.split("+")[1:], num_hidden_layers=4) for name in ("a", "a+skipv1", "a+mla")}
    models["window"] = build(sliding_window=8)
    seen = []
    rows = measure(models, (6, 20), (1, 3), new_tokens=4, rounds=2, progress=lambda *at: seen.append(at))
    assert [(row["batch"], row["context"], row["model"]) for row in rows] == [
        (batch, context, name) for batch in (1, 3) for context in (6, 20) for name in models
    ]
    assert [at[1] for at in seen] == list(range(16)) and {at[2] for at in seen} == {16}
    for row in rows:
        assert row["cache"] == row["cache_formula"] > 0
        assert row["weights"] == weight_bytes(models[row["model"]])
        for times in (row["prefill"], row["decode"]):
            assert len(times["rounds"]) == 2 and min(times["rounds"]) > 0
            assert times["min"] <= times["median"] <= times["max"]
    # More sequences and more tokens need more; SkipV1's cache is smaller.
    by = {(row["model"], row["batch"], row["context"]): row for row in rows}
    for name in models:
        largest, middle, least = (by[name, *size]["activations"] for size in ((3, 20), (1, 20), (1, 6)))
        assert largest > middle > least > 0
    assert by["a+skipv1", 1, 20]["cache"] < by["a", 1, 20]["cache"]


def test_a_window_holds_no_more_than_its_tokens_after_any_chunk():
    """But where the last chunk is one token, as in a step: then there is room for a block of tokens more."""
    model = build(sliding_window=8)
    decoder, plan = Decoder(model, chunk=8), model.config.plan
    for length in range(1, 30):
        decoder.prefill(torch.zeros(1, length, dtype=torch.long), room=0)
        room = (7 + BLOCK) * plan.kv_bytes(1, torch.float32)
        expected = room if length > 8 and length % 8 == 1 else plan.kv_bytes(length, torch.float32)
        assert cache_bytes(decoder.cache) == expected


def test_times_are_per_hundred_tokens_and_over_the_batch(monkeypatch):
    """By a clock that goes on one second whenever it is read: before the prompt, after it, after the last token."""
    seconds = count()
    monkeypatch.setattr(sys.modules["leanqkv.inference.bench"], "_now", lambda device: float(next(seconds)))
    (row,) = measure({"a": build()}, (20,), (3,), new_tokens=5, rounds=2)
    assert row["prefill"]["rounds"] == [5_000.0, 5_000.0]  # ms: 1 s for 20 tokens of a sequence
    assert row["decode"]["rounds"] == [15.0, 15.0]


def test_more_tokens_than_positions():
    model = randomize(LeanForCausalLM(tiny("gpt", max_position_embeddings=16)))
    with pytest.raises(ValueError, match="do not fit the model's 16 positions"):
        measure({"a": model}, (14,), (1,), new_tokens=4, rounds=1)


TINY = "tiny+vocab_size=200+hidden_size=32+intermediate_size=48+num_hidden_layers=2"


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch, unwrapped):
    monkeypatch.chdir(tmp_path)
    build("skipv1").save_pretrained("model")
    command = ("--context", "8,16", "--batch", "1,2", "--new-tokens", "3", "--rounds", "2")
    code, _, err = unwrapped("bench", TINY, "model", *command, "--dtype", "fp32", "--out", "out")
    assert (code, err) == (0, "")
    record = json.loads(Path("out/bench.json").read_text())
    assert [(row["model"], row["batch"], row["context"]) for row in record["rows"]][:2] == [
        (TINY, 1, 8),
        ("model", 1, 8),
    ]
    assert len(record["rows"]) == 8 and record["dtype"] == "fp32"
    page = Path("out/report.html").read_text()
    assert page.count("<figure>") == 3 + 2 * 2
    assert "http" not in re.sub(r"http://www\.w3\.org/\S+", "", page)  # it needs nothing else
    Path("out/report.html").unlink()
    again = unwrapped("report", "out")
    assert again[0] == 0 and Path("out/report.html").read_text() == page
    assert Path("out/table.md").read_text().count("\n") == 10


def test_a_place_that_another_command_fills_meanwhile_stays_as_it_is(tmp_path):
    out = tmp_path / "out"
    written_over = pytest.raises(LeanError, match="out exists and is not empty; nothing is ever written over")
    with written_over, new_directory(out) as partial:
        (partial / "record.json").touch()
        out.mkdir()
        (out / "other").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["other"]
