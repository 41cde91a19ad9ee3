"""Both sweeps under every reduction: against explicit features, alone and together, interrupted, on a small disk."""

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from converting import BIASES, build, source
from reducing import EPS, KINDS, SMALL, Model, assert_same, fit_by_hand, normals, sample_of, sweep, sweeping
from safetensors.torch import load_file
from shapes import assert_near, tiny
from torch import Tensor

from leanqkv import LeanError
from leanqkv.convert import latents
from leanqkv.convert.activations import Layers, correction
from leanqkv.convert.latent_values import ValueGram
from leanqkv.convert.latents import Latents
from leanqkv.convert.merged_values import MergedValues, PairGrams
from leanqkv.convert.output_fit import Fit, token_weights
from leanqkv.convert.scratch import Stream
from leanqkv.convert.sweeps import HELD_OUT, Converted

ALONE = ("merged", "latents")

# --- the second sweep -------------------------------------------------------------------------------------------------

SWEEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt with biases": ("gpt", BIASES),
    "gqa, windows": ("llama", {"num_key_value_heads": 2, "sliding_window": 4, "window_layers": [1]}),
    "parallel": ("gpt", {"block_type": "parallel"}),
    "no attention skip": ("llama", {"attention_skip": False}),
    "norms before and after": ("llama", {"norm_placement": "both"}),
    "residual_multiplier": ("llama", {"residual_multiplier": 0.4}),
}


def through_layers(model: Model, ids: Tensor) -> tuple[dict[int, Tensor], dict[int, Tensor], dict[int, Tensor]]:
    """The stream before every layer and after the last, and what goes into and comes out of every W_O."""
    streams, inputs, outputs = {}, {}, {}
    reference = build(*model)
    for i, layer in enumerate(reference.model.layers):
        layer.register_forward_pre_hook(lambda m, x, i=i: streams.update({i: x[0]}))
        layer.register_forward_hook(lambda m, x, y, i=i: streams.update({i + 1: y[0]}))
        layer.self_attn.o_proj.register_forward_hook(lambda m, x, y, i=i: inputs.update({i: x[0]}))
        layer.self_attn.o_proj.register_forward_hook(lambda m, x, y, i=i: outputs.update({i: y}))
    reference(ids)
    return streams, inputs, outputs


@pytest.mark.parametrize("kind", ALONE)
@pytest.mark.parametrize("name", SWEEPS)
@torch.no_grad()
def test_the_second_sweep(name: str, kind: str, tmp_path: Path) -> None:
    """Its streams are those of both models, and W_O, its strength and what it misses are those of explicit features."""
    shape, fields = SWEEPS[name]
    model = source(shape, **SMALL | {"intermediate_size": 8} | fields)
    config, seen = model[0], {}
    sample = sample_of(config, 128, 10)

    def message(text: str) -> None:
        phase, _, layer, *_ = text.split()
        if phase == "fitting:" and int(layer) > 1:
            keep(int(layer) - 1)

    def keep(at: int) -> None:
        seen[at] = [sweeps._stream(of, at)[: len(sample)] for of in ("source", f"converted-{reduction.name}")]

    reduction = {"merged": MergedValues(*model), "latents": Latents(*model, 0.6, separate=True)}[kind]
    sweeps = sweeping(model, sample, tmp_path, [reduction], batch_size=7, message=message)
    (result,) = sweeps.run()
    last = config.num_hidden_layers
    keep(last)

    ids = torch.from_numpy(sample)
    before, _, attended = through_layers(model, ids)
    after, inputs, _ = through_layers((result.config, result.tensors), ids)
    assert set(seen) == set(range(1, last + 1))
    for layer, found in seen.items():
        for stream, expected in zip(found, (before, after), strict=True):
            assert_near(stream.double(), expected[layer], 1e3 * EPS, f"layer {layer}")

    held = torch.arange(len(sample)) % HELD_OUT == HELD_OUT - 1
    strengths = []
    for layer, at in enumerate(result.layers):
        wanted, features = attended[layer], inputs[layer]
        if config.attention_skip and config.norm_placement == "before":
            wanted = wanted + (before[layer] - after[layer]) / config.residual_multiplier
        if config.attention_output_bias:
            features = torch.cat((features, torch.ones_like(features[..., :1])), -1)
        weight = (before[layer].square().mean(-1, keepdim=True) + config.norm_eps).rsqrt()
        if config.norm_placement == "both":
            weight = weight * (attended[layer].square().mean(-1, keepdim=True) + config.norm_eps).rsqrt()
        parts = [
            ((features * weight)[rows].flatten(0, 1), (wanted * weight)[rows].flatten(0, 1)) for rows in (~held, held)
        ]
        output, strength, missed = fit_by_hand(parts, reduction.reduce(layer).output)
        assert at["layer"] == layer and at["missed"] == pytest.approx(missed, rel=1e-3, abs=EPS)
        if missed > EPS:
            assert at["ridge"] == strength
            strengths.append(strength)
            rows = output[: features.shape[-1] - config.attention_output_bias]
            assert_near(result.tensors[f"model.layers.{layer}.self_attn.o_proj.weight"].double(), rows.T, 1e-3)
            if config.attention_output_bias:
                bias = result.tensors[f"model.layers.{layer}.self_attn.o_proj.bias"].double()
                assert_near(bias, output[-1], 1e-3)
    assert set(strengths) - {None}


@pytest.mark.parametrize("kind", ALONE)
def test_layers_below_the_first_change_stay(kind: str, tmp_path: Path) -> None:
    """There is nothing to make up for."""
    model = source("gpt", **SMALL | BIASES)
    reductions = {"merged": MergedValues(*model, 0.5, (2,)), "latents": Latents(*model, 0.95, (2,), separate=True)}
    chosen = reductions[kind]
    (found,) = sweep(model, sample_of(model[0], 16), tmp_path, [chosen])
    assert chosen.first == 2
    for name in found.tensors:
        changed = name.startswith("model.layers.2.self_attn.") and any(part in name for part in ("k_", "v_", "o_proj"))
        assert changed or torch.equal(found.tensors[name], model[1][name].float())
    assert [at["ridge"] for at in found.layers[:2]] == [None, None]
    assert found.layers[1]["missed"] < EPS < found.layers[2]["missed"]


@pytest.mark.parametrize("kind", ALONE)
def test_sinks_are_reported(kind: str, tmp_path: Path) -> None:
    """Those of the held-out sequences, from which what is missed at them is measured."""
    config, tensors = source("llama", **SMALL)
    tensors["model.embed_tokens.weight"][5] *= 1e3
    sample = sample_of(config, 8)
    sample[sample == 5] = 6

    def layers(name: str) -> list[dict[str, Any]]:
        return sweep((config, tensors), sample, tmp_path / name, kind)[0].layers

    assert all("sink_tokens" not in at for at in layers("none"))
    sample[1, 0] = 5
    assert "sink_tokens" not in layers("fitted")[1]
    sample[3, 0] = sample[7, 4] = 5
    at = layers("held out")[1]
    assert at["sink_tokens"] == 2 and 0 < at["missed_sinks"] < 1.5


@pytest.mark.parametrize("kind, file", [("merged", "pairs-0"), ("latents", "best-latents-0")])
def test_a_zero_embedding_does_not_outweigh_all_others(kind: str, file: str, tmp_path: Path) -> None:
    config, tensors = source("llama", **SMALL, num_key_value_heads=2)
    sample = sample_of(config, 16)
    sample[sample == 5] = 6

    def costs(name: str) -> Tensor:
        sweep((config, tensors), sample, tmp_path / name, kind)
        stored = load_file(tmp_path / name / f"{file}.safetensors")
        return torch.cat([tensor.view(-1) for key, tensor in stored.items() if key.endswith(("cost", "gains"))])

    before = costs("without")
    tensors["model.embed_tokens.weight"][5] = 0
    sample[2, 3] = 5
    # One token of 192, whose stream is floored at 1e-3 where others have about 0.2.
    assert (costs("with") < 1e4 * before).all()


@pytest.mark.parametrize(
    "fields, factor",
    [
        ({}, 1.0),
        ({"residual_multiplier": 0.5}, 2.0),
        ({"attention_skip": False}, 0.0),
        ({"norm_placement": "after"}, 0.0),
    ],
)
def test_what_brings_a_stream_back(fields: dict, factor: float) -> None:
    first, second = normals()(2, 3, 4, 5)
    found = correction(tiny("llama", **fields), first, second)
    assert torch.equal(torch.as_tensor(found) + torch.zeros(3, 4, 5), factor * (first - second))


def test_float64_is_on_the_cpu_alone(monkeypatch) -> None:
    """Apple's GPUs have none; a CPU cannot tell, but that a tensor was moved before it became one in float64."""
    moved, cpu, double, normal = [], Tensor.cpu, Tensor.double, normals()
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: moved.append(cpu(tensor)) or moved[-1])

    def checked(tensor: Tensor) -> Tensor:
        assert any(tensor is other for other in moved)
        return double(tensor)

    patterns, stream = normal(1, 4, 5, 5).float(), normal(1, 5, 6).float()
    pairs, gram, fit = PairGrams(2, 3), ValueGram(6, normal(6)), Fit()
    recorder = SimpleNamespace(values=patterns[:, :2, :, :3], patterns=patterns)
    monkeypatch.setattr(Tensor, "double", checked)
    for sums in (pairs, gram):
        sums.add(recorder, token_weights(stream, 1e-5)[0])
    fit.add(stream[0], stream[0])
    found = (pairs.alone, pairs.cross, gram.total, fit.gram, fit.cross)
    assert fit.target > 0 and all(sums.any() and sums.dtype == torch.float64 for sums in found)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALONE)
def test_too_few_sequences_are_refused(kind: str, tmp_path: Path) -> None:
    model = source("gpt", **SMALL)
    with pytest.raises(LeanError, match=r"one of 4 sequences is held out .* make 3\. Use more `tokens`"):
        sweep(model, sample_of(model[0], 3), tmp_path, kind)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["latents", "all at once"])
def test_too_few_tokens_for_the_width_of_the_values(kind: str, tmp_path: Path) -> None:
    """Four for each of 24 columns; merged values ask for no such number."""
    model = source("gpt", **SMALL)
    with pytest.raises(LeanError, match=r"^95 calibration tokens are too few .* needs 96\. Use more `tokens`$"):
        sweeping(model, sample_of(model[0], 5, 19), tmp_path, kind)
    assert not list(tmp_path.iterdir())
    sweep(model, sample_of(model[0], 8, 12), tmp_path, kind)
    sweeping(model, sample_of(model[0], 5, 19), tmp_path / "merged", "merged")


def test_reductions_of_the_same_name_are_refused(tmp_path: Path) -> None:
    """They would read each other's files."""
    model = source("gpt", **SMALL)
    both = [Latents(*model, 0.9), Latents(*model, 0.9, (1, 2))]
    with pytest.raises(LeanError, match="the same files, latents-90; leave one"):
        sweeping(model, sample_of(model[0], 8), tmp_path, both)
    assert not list(tmp_path.iterdir())
    assert Latents(*model, 0.9).name != Latents(*model, 0.9000001).name


# --- interrupted and started again ------------------------------------------------------------------------------------

# 12 columns of values, which is no multiple of 8: latents of any rank.
LITTLE = {"hidden_size": 12, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3, "vocab_size": 11}
JOB = {"tokens": "a", "ratio": 0.5, "layers": (0, 1)}
Little = tuple[Model, np.ndarray]


class Stop(Exception):
    pass


@pytest.fixture(scope="module")
def little() -> Little:
    model = source("gpt", **LITTLE)
    return model, sample_of(model[0], 8, 6)


@pytest.fixture(scope="module")
def wholes(little: Little, tmp_path_factory) -> dict[str, list[Converted]]:
    """What every kind comes to without interruption."""
    made = {kind: sweep(*little, tmp_path_factory.mktemp("whole"), kind) for kind in KINDS}
    return {kind: [Converted(x.config, dict(x.tensors), x.layers) for x in found] for kind, found in made.items()}  # type: ignore[arg-type]


def assert_all_same(found: list[Converted], expected: list[Converted]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_same(one.tensors, dict(other.tensors))
        assert one.config.to_dict() == other.config.to_dict() and one.layers == other.layers


def stop_at(call: int) -> Callable[[Any], None]:
    calls = iter(range(call))

    def count(*_: Any) -> None:
        if next(calls, None) is None:
            raise Stop

    return count


def stop_at_layer(seen: list[str], layer: int) -> Callable[[str], None]:
    """A message that stops the sweeps as that layer begins, both sweeps counted through."""

    def message(text: str) -> None:
        seen.append(text)
        if len(seen) > layer:
            raise Stop

    return message


def stopping(run: Callable, call: int) -> Callable:
    """`Layers.run`, which stops at that call."""
    stop = stop_at(call)

    def stopped(self: Layers, *arguments: Any) -> Tensor:
        stop()
        return run(self, *arguments)

    return stopped


def test_reductions_together_are_those_alone(wholes) -> None:
    """The source is run once for all of them; none changes another."""
    assert_all_same(wholes["all at once"][:1], wholes["latents"])
    assert_all_same(wholes["all at once"][1:2], wholes["merged"])


def test_the_source_is_run_once_for_all(little: Little, tmp_path: Path, monkeypatch) -> None:
    """Of the first sweep nothing is repeated, the sums that two shares read neither (those of latents beside keys, and
    of separate ones); in the second, every reduction passes its own stream on."""
    runs: list[int] = []
    sums: list[int] = []
    monkeypatch.setattr(ValueGram, "add", lambda *at, add=ValueGram.add: sums.append(1) or add(*at))
    monkeypatch.setattr(Layers, "run", lambda self, *at, run=Layers.run: runs.append(at[1]) or run(self, *at))
    for kind, expected in (("merged", 18), ("all at once", 6 + 6 + 4 * 6)):
        runs.clear()
        sweep(*little, tmp_path / kind, kind)
        assert len(runs) == expected
    assert len(sums) == 12
    assert {file.name for file in (tmp_path / kind).glob("*s-0.safetensors")} == {
        "pairs-0.safetensors",
        "best-latents-0.safetensors",
        "best-separate-latents-0.safetensors",
    }


def test_latents_choose_by_a_part_of_the_tokens(tmp_path: Path, monkeypatch) -> None:
    """With tokens enough, by every fourth batch up to the last, with its own sums; merged values choose by all."""
    monkeypatch.setattr(latents, "CHOOSING_TOKENS", 48)
    model, runs = source("gpt", **LITTLE), []
    sample = sample_of(model[0], 32, 6)  # 192 tokens in batches of 4 sequences, four times the 48 of the width
    monkeypatch.setattr(Layers, "run", lambda self, *at, run=Layers.run: runs.append(at[1]) or run(self, *at))
    sweep(model, sample, tmp_path / "all", "latents")
    assert len(runs) == 3 * (2 + 8 + 8)
    runs.clear()
    found = sweep(model, sample, tmp_path / "both", [Latents(*model, 0.8), MergedValues(*model)])
    assert len(runs) == 3 * (8 + 8 + 2 * 8)
    few = np.concatenate((sample[12:16], sample[28:]))
    sweep(model, few, tmp_path / "few", "latents")
    sweep(model, sample, tmp_path / "merged", "merged")
    for layer in range(3):
        for name, place in (("best-latents", "few"), ("best-latents", "all"), ("pairs", "merged")):
            one, other = (load_file(tmp_path / at / f"{name}-{layer}.safetensors") for at in ("both", place))
            assert_same(one, other)
    first: list[str] = []
    with pytest.raises(Stop):
        sweep(model, sample, tmp_path / "stopped", "latents", job=JOB, message=stop_at_layer(first, 2))
    again = sweep(model, sample, tmp_path / "stopped", "latents", job=JOB)
    assert_all_same(again, found[:1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", range(6))
def test_an_interrupted_layer_is_started_again(little: Little, wholes, tmp_path: Path, layer: int, kind: str) -> None:
    """The one whose message came last; those before it are not run again."""
    first, second = [], []
    with pytest.raises(Stop):
        sweep(*little, tmp_path, kind, job=JOB, message=stop_at_layer(first, layer))
    assert_all_same(sweep(*little, tmp_path, kind, job=JOB, message=second.append), wholes[kind])
    assert first[:-1] + second == [f"{phase}: layer {i} of 3" for phase in ("choosing", "fitting") for i in (1, 2, 3)]
    assert first[-1] == second[0]


@pytest.mark.long_cases
@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_anywhere(little: Little, wholes, tmp_path: Path, monkeypatch, kind: str) -> None:
    """At every pass of a batch through a block: of the source once in either sweep, of each reduction's in the second.

    One place more, and it comes to its end.
    """
    passes = 3 * 2 * (2 + len(wholes[kind]))
    for call in range(passes):
        with monkeypatch.context() as patch, pytest.raises(Stop):
            patch.setattr(Layers, "run", stopping(Layers.run, call))
            sweep(*little, tmp_path / str(call), kind, job=JOB)
        assert_all_same(sweep(*little, tmp_path / str(call), kind, job=JOB), wholes[kind])
    monkeypatch.setattr(Layers, "run", stopping(Layers.run, passes))
    sweep(*little, tmp_path / "end", kind, job=JOB)


@pytest.mark.parametrize("kind", ALONE)
@pytest.mark.parametrize("where", [1, 2, 7, 11])
def test_another_job_does_not_use_the_files(little: Little, wholes, tmp_path: Path, monkeypatch, where, kind) -> None:
    """Nor does this one use what another has written over."""
    model, sample = little
    other = sample_of(model[0], 8, 6, seed=9)
    with pytest.raises(Stop):
        sweep(model, sample, tmp_path, kind, job=JOB, message=stop_at_layer([], 4))
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Layers, "run", stopping(Layers.run, where))
        sweep(model, other, tmp_path, kind, job=JOB | {"tokens": "b"})
    assert_all_same(sweep(model, sample, tmp_path, kind, job=JOB), wholes[kind])
    expected = sweep(model, other, tmp_path / "other", kind)
    assert_all_same(sweep(model, other, tmp_path, kind, job=JOB | {"tokens": "b"}), expected)
    # Without a job nothing is ever used.
    assert_all_same(sweep(model, sample, tmp_path, kind), wholes[kind])


def test_a_job_with_a_reduction_more_starts_anew(little: Little, wholes, tmp_path: Path) -> None:
    """Even where its caller gives it the same name: the files of the new reduction are not there."""
    with pytest.raises(Stop):
        sweep(*little, tmp_path, "latents", job=JOB, message=stop_at_layer([], 4))
    assert_all_same(sweep(*little, tmp_path, "all at once", job=JOB), wholes["all at once"])


def damaged(file: Path, how: str) -> None:
    content = file.read_bytes()
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes({"empty": b"", "half": content[: len(content) // 2], "all but one": content[:-1]}[how])


DAMAGED = {
    "merged": (
        *("state.json", "pairs-0.safetensors", "pairs-2.safetensors", "merged-0.safetensors", "merged-0.json"),
        *("source0", "converted-merged0"),
    ),
    "latents": (
        *(
            "state.json",
            "best-latents-0.safetensors",
            "best-latents-2.safetensors",
            "latents-80-0.safetensors",
            "latents-80-0.json",
        ),
        *("source0", "converted-latents-800"),
    ),
    "all at once": ("best-latents-1.safetensors", "merged-0.safetensors", "latents-90-1.json", "converted-latents-900"),
}


@pytest.mark.parametrize("how", ["gone", "empty", "half", "all but one"])
@pytest.mark.parametrize("kind, name", [(kind, name) for kind, names in DAMAGED.items() for name in names])
def test_damaged_files_are_not_trusted(little: Little, wholes, tmp_path: Path, kind: str, name: str, how: str) -> None:
    """What a machine that stopped may leave: the conversion starts anew."""
    with pytest.raises(Stop):
        sweep(*little, tmp_path, kind, job=JOB, message=stop_at_layer([], 5))
    damaged(tmp_path / name, how)
    again: list[str] = []
    assert_all_same(sweep(*little, tmp_path, kind, job=JOB, message=again.append), wholes[kind])
    # JSON is whole without the newline at its end.
    assert len(again) == (1 if name.endswith("json") and how == "all but one" else 6)


@pytest.mark.parametrize("done", [-1, 7, 2.5, "3", None, [1]])
def test_a_state_that_makes_no_sense(little: Little, wholes, tmp_path: Path, done: Any) -> None:
    sweep(*little, tmp_path, "merged", job=JOB)
    state = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps(state | {"done": done}))
    assert_all_same(sweep(*little, tmp_path, "merged", job=JOB), wholes["merged"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_job_is_read(little: Little, wholes, tmp_path: Path, monkeypatch, kind: str) -> None:
    sweep(*little, tmp_path, kind, job=JOB)
    monkeypatch.setattr(Layers, "run", stop_at(0))
    progress: list[tuple[int, int]] = []
    converted = sweep(*little, tmp_path, kind, job=JOB, progress=lambda *at: progress.append(at))
    assert_all_same(converted, wholes[kind])
    assert progress[0] == (0, 6) and progress[-1] == (6, 6) and progress == sorted(progress)


# --- memory and disk --------------------------------------------------------------------------------------------------


def bytes_written(directory: Path) -> int:
    """All but the headers of files and the reports."""
    streams = sum(file.stat().st_size for file in directory.iterdir() if not file.suffix)
    tensors = [load_file(file).values() for file in directory.glob("*.safetensors")]
    return streams + sum(tensor.nbytes for found in tensors for tensor in found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fields", [{}, BIASES, {"num_key_value_heads": 2}])
def test_space_is_asked_for(fields: dict, kind: str, tmp_path: Path, monkeypatch) -> None:
    """For what is written but for the headers of files, and little more; nothing is written without it."""
    model = source("gpt", **fields)
    sample = sample_of(model[0], 16, 32)
    sweep(model, sample, tmp_path / "written", kind)
    names = [one.name for one in KINDS[kind](model)]
    assert {file.name for file in (tmp_path / "written").iterdir() if not file.suffix} == {
        *("source0", "source1"),
        *(f"{of}-{name}{end}" for name in names for of, end in (("converted", 0), ("converted", 1), ("features", ""))),
    }
    written = bytes_written(tmp_path / "written")

    def start(free: float) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
            sweeping(model, sample, tmp_path / "little", kind)

    (tmp_path / "little").mkdir()
    with pytest.raises(LeanError, match=r"needs [\d.]+ MB in .* free\. Use fewer `tokens`, or choose an `out`"):
        start(written - 1)
    assert not list((tmp_path / "little").iterdir())
    start(1.25 * written)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "kind, name",
    [
        *(("merged", name) for name in ("source0", "converted-merged1", "features-merged")),
        *(("latents", name) for name in ("source1", "converted-latents-801", "features-latents-80")),
    ],
)
def test_a_full_disk_is_an_error(little: Little, tmp_path: Path, kind: str, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(LeanError, match=r"the disk is full: .*; choose an `out` on a larger disk"):
        sweep(*little, tmp_path, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_one_layer_is_in_memory(kind: str, tmp_path: Path, monkeypatch) -> None:
    """One block at a time, and of a stream on disk one batch."""
    model = source("llama", **SMALL, num_hidden_layers=5)
    blocks: list[weakref.ref] = []
    alive, most, files = [], [], set()

    def watched(self: Layers, layer: int, block=Layers.block) -> Any:
        made = block(self, layer)
        blocks.append(weakref.ref(made))
        return made

    def ran(self: Layers, *arguments: Any, run=Layers.run) -> Tensor:
        alive.append(sum(made() is not None for made in blocks))
        return run(self, *arguments)

    def read(self: Stream, rows: slice, get=Stream.__getitem__) -> Tensor:
        found = get(self, rows)
        most.append(len(found))
        files.add(self._file.name)
        return found

    monkeypatch.setattr(Layers, "block", watched)
    monkeypatch.setattr(Layers, "run", ran)
    monkeypatch.setattr(Stream, "__getitem__", read)
    reductions = KINDS[kind](model)
    sweep(model, sample_of(model[0], 16), tmp_path, reductions, batch_size=3)
    assert len(blocks) == 10 and set(alive) == {1} and max(most) == 3
    expected = {"source0", "source1"}
    for one in reductions:
        expected |= {f"converted-{one.name}0", f"converted-{one.name}1", f"features-{one.name}"}
    assert files == expected
