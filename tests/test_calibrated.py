"""The calibrated conversion: every fit against least squares on the features themselves."""

import os
import subprocess
import sys
from itertools import pairwise, permutations, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from converting import BIASES, TOLERANCES, build, conversion_error, logits, source
from shapes import assert_near, tokens
from torch import Tensor

from leanqkv import LeanError
from leanqkv.convert.calibrated import Calibration, calibrated, choose
from leanqkv.convert.least_squares import LayerTerm, add_gram, fit_values
from leanqkv.convert.methods import convert
from leanqkv.convert.scratch import Stream, map_tensor
from leanqkv.convert.targets import SkipV1Options


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("biased", [False, True])
def test_least_squares(group: int, biased: bool) -> None:
    """From Gram matrices as from the features themselves; and more steps only ever lower what is missed."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    places, kept, wide, width, d, rows = 3, 2, 7, 3, 6, 200
    own = normal(rows, kept * group * wide)
    parts = [own, normal(rows, (places - kept) * group * width)] + ([torch.ones(rows, 1).double()] if biased else [])
    features, target, value = torch.cat(parts, dim=1), normal(rows, d), normal(kept, wide, width)
    size = float(target.square().sum())
    seen_columns = places * group * width + biased
    term = LayerTerm(features.T @ features, features.T @ target, size, normal(seen_columns, d), group, leading=0)
    _, (output,), error = fit_values([term], value, strength=1e-13, updates=0, tolerance=1e-4)
    seen = [own[:, i * wide : (i + 1) * wide] @ value[i // group] for i in range(kept * group)]
    seen = torch.cat([*seen, *parts[1:]], dim=1)
    expected = torch.linalg.lstsq(seen, target).solution
    assert len(output) == seen_columns
    assert_near(output, expected, 1e-9)
    assert error == pytest.approx(float((target - seen @ expected).square().sum()))
    history = [fit_values([term], value, 1e-13, updates, tolerance=1e-12)[2] for updates in (0, 1, 3, 7)]
    assert all(later < earlier for earlier, later in pairwise(history))


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("leading", [0, 4])
def test_the_fit_ends_where_error_and_pull_are_least(group: int, leading: int) -> None:
    """There the gradient vanishes: of the error, of the pull of W and of that of the values towards their starts."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    kept, wide, width, d, rows, strength = 2, 7, 3, 6, 200, 0.1
    features, target, value = (
        normal(rows, leading + kept * group * wide + 1),
        normal(rows, d),
        normal(kept, wide, width),
    )
    start = normal(leading + kept * group * width + 1, d)
    gram, cross = features.T @ features, features.T @ target
    term = LayerTerm(gram, cross, float(target.square().sum()), start, group, leading=leading)
    fitted, (output,), error = fit_values([term], value, strength, 300, 1e-15)
    assert error == pytest.approx(float((target - features @ term.expand(fitted, output)).square().sum()))

    def objective(values: Tensor, flat: Tensor) -> Tensor:
        seen = features @ term.expand(values, torch.eye(len(start), dtype=torch.float64))
        damping = strength * seen.square().sum() / len(start)
        return (target - seen @ flat).square().sum() + damping * (flat - start).square().sum()

    sizes = gram.diagonal()[leading:-1].view(kept, group, wide).sum(1).mean()
    first = term.fit_output(value, strength)[0]
    pull = strength * sizes * first.square().sum(1).mean()

    def slope(values: Tensor) -> Tensor:
        leaf = values.clone().requires_grad_()
        whole = objective(leaf, term.fit_output(values, strength)[0]) + pull * (leaf - value).square().sum()
        return torch.autograd.grad(whole, leaf)[0].abs().max()

    assert slope(fitted) < 1e-4 * slope(value)
    assert float((fit_values([term], value, 1e6, 30, 1e-9)[0] - value).abs().max()) < 1e-3


@pytest.mark.parametrize("rows", [1, 7, 20, 64])
def test_a_gram_matrix_is_added_up_in_parts(rows: int) -> None:
    features = torch.randn(30, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gram = torch.ones(50, 50, dtype=torch.float64)
    add_gram(gram, features, rows)
    assert_near(gram.triu(), (features.T @ features + 1).triu(), 1e-12)


def test_progress_is_reported() -> None:
    config, tensors = source("gpt")
    messages: list[str] = []
    passes: list[tuple[int, int]] = []
    sample = tokens(8, 16).numpy()
    calibrated(config, tensors, sample, progress=lambda *at: passes.append(at), message=messages.append)
    phases = ["embedding the text", *(f"choosing heads of layer {i} of 3" for i in (1, 2, 3))]
    phases += [f"fitting shared values to layer {i} of 3" for i in (1, 2, 3)]
    assert messages[:7] == phases and messages[-3:] == [f"refitting layer {i} of 3" for i in (1, 2, 3)]
    assert messages[7:-3] == [f"fitting shared values: iteration {i + 1}" for i in range(len(messages) - 10)]
    done, (total,) = [at for at, _ in passes], {of for _, of in passes}
    assert done[0] == 0 and done == sorted(set(done)) and done[-1] == total


@pytest.mark.exhaustive
@pytest.mark.slow
def test_more_freedom_loses_less() -> None:
    for shape, mechanisms, fields in (("gpt", (), {}), ("llama", ("gqa",), BIASES | {"norm_bias": False})):
        config, tensors = source(shape, *mechanisms, **fields)
        sample, ids = tokens(512, 24, seed=5).numpy(), tokens(16, 24, seed=3)
        reference = logits(config, tensors, ids)
        errors = []
        freedoms = ("choose", "refit_lent", "refit_values")
        for given in range(4):
            options = {freedom: place < given for place, freedom in enumerate(freedoms)}
            new, converted, report = calibrated(config, tensors, sample, SkipV1Options(**options))
            errors.append(float((logits(new, converted, ids) - reference).square().mean()))
            assert [layer["layer"] for layer in report["layers"]] == [*([0] if report["lent_values"] else []), 1, 2]
        mean = logits(*convert(config, tensors, SkipV1Options("mean-v"))[:2], ids)
        assert errors[0] < float((mean - reference).square().mean()) / 2
        assert errors[3] < errors[1] <= errors[0]


@pytest.mark.parametrize("options", [{}, {"choose": False}, {"refit_lent": False, "refit_values": False}], ids=str)
@pytest.mark.parametrize(
    "shape, mechanisms, fields",
    [
        ("gpt", (), {}),
        ("llama", ("gqa",), {"attention_bias": True, "attention_output_bias": True}),
        ("llama", (), {"block_type": "parallel"}),
        ("gpt", (), {"norm_type": "none", "attention_skip": False}),
    ],
)
def test_every_layer_is_fitted_to_the_stream_of_the_source(shape, mechanisms, fields, options) -> None:
    """W_O of every layer against least squares on what reaches it in the converted model itself: the target is what
    brings the stream back to the source's."""
    config, tensors = source(shape, *mechanisms, **fields)
    ids = tokens(64, 24, seed=5)
    new, converted, _ = calibrated(config, tensors, ids.numpy(), SkipV1Options(ridge=1e-6, **options))
    seen: list[dict[str, Tensor]] = []
    for model in (build(config, tensors), build(new, converted)):
        inputs: dict[str, Tensor] = {}
        for i, layer in enumerate(model.model.layers):
            layer.register_forward_pre_hook(lambda m, x, i=i, f=inputs: f.update({f"stream{i}": x[0]}))
            layer.self_attn.register_forward_hook(lambda m, x, y, i=i, f=inputs: f.update({f"attended{i}": y[0]}))
            layer.self_attn.o_proj.register_forward_pre_hook(lambda m, x, i=i, f=inputs: f.update({f"heads{i}": x[0]}))
        with torch.no_grad():
            model(ids)
        seen.append(inputs)
    before, after = seen
    layers = range(0 if options.get("refit_lent", True) else 1, config.num_hidden_layers)
    for i in layers:
        target = before[f"attended{i}"]
        if config.attention_skip:
            target = target + before[f"stream{i}"] - after[f"stream{i}"]
        heads, target = after[f"heads{i}"].flatten(0, 1), target.flatten(0, 1)
        weight = converted[f"model.layers.{i}.self_attn.o_proj.weight"].double().T
        if config.attention_output_bias:
            heads = torch.cat((heads, torch.ones_like(heads[:, :1])), dim=-1)
            weight = torch.cat((weight, converted[f"model.layers.{i}.self_attn.o_proj.bias"].double()[None]))
        least = (target - heads @ torch.linalg.lstsq(heads, target).solution).square().sum()
        rounding = torch.finfo(torch.float32).eps * target.square().sum()  # Gram matrices add up float32 products
        assert (target - heads @ weight).square().sum() <= least * (1 + 1e-4) + rounding


def test_a_strong_pull_leaves_the_weights_of_the_source() -> None:
    """W_O of the heads that take a first-layer value is pulled to zero, everything else to the source's weights."""
    config, tensors = source("gpt")
    _, converted, report = calibrated(config, tensors, tokens(8, 16).numpy(), SkipV1Options(ridge=1e8))
    for layer in range(config.num_hidden_layers):
        value, output = (f"model.layers.{layer}.self_attn.{module}.weight" for module in ("v_proj", "o_proj"))
        kept = report["layers"][layer]["kept"] if layer else range(config.num_key_value_heads)
        for place, head in enumerate(kept):
            own, before = slice(8 * place, 8 * place + 8), slice(8 * head, 8 * head + 8)
            assert_near(converted[value][own], tensors[value][before].float(), 1e-5)
            assert_near(converted[output][:, own], tensors[output][:, before].float(), 1e-5)
        assert not layer or converted[output][:, 8 * len(kept) :].abs().max() < 1e-5


def test_heads_that_do_nothing_are_the_ones_that_go() -> None:
    """Two heads of every layer have no W_O: replacing those, and only those, costs nothing."""
    config, tensors = source("gpt")
    idle = {1: (0, 2), 2: (1, 2)}
    for layer, heads in idle.items():
        for head in heads:
            tensors[f"model.layers.{layer}.self_attn.o_proj.weight"][:, 8 * head : 8 * head + 8] = 0
    sample, ids = tokens(64, 24, seed=5).numpy(), tokens(8, 24, seed=3)
    new, converted, report = calibrated(config, tensors, sample, SkipV1Options(ridge=1e-9, sweeps=1))
    for layer in report["layers"][1:]:
        assert layer["kept"] == [h for h in range(4) if h not in idle[layer["layer"]]]
        assert set(layer["paired"]) == set(idle[layer["layer"]])
        assert set(layer["paired"].values()) == {2, 3}
    assert_near(logits(new, converted, ids), logits(config, tensors, ids), 1e-4)  # activations are float32


def test_calibration_is_deterministic_and_leaves_the_source() -> None:
    config, tensors = source("llama", "gqa")
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    one, other = (calibrated(config, tensors, tokens(8, 16).numpy())[1] for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)
    same = [n for n in one if not n.endswith(("down_proj.weight", "down_proj.bias")) and "self_attn" not in n]
    assert all(torch.equal(one[n], tensors[n].float()) for n in same)


@pytest.mark.parametrize("ratio, kept", [(0.25, 3), (0.5, 2), (0.75, 1)])
def test_ratios(ratio: float, kept: int) -> None:
    config, tensors = source("gpt")
    new, _, report = calibrated(config, tensors, tokens(8, 16).numpy(), SkipV1Options(ratio=ratio))
    assert [len(layer["kept"]) for layer in report["layers"][1:]] == [kept, kept]
    assert new.plan.layers[1].computed_value_heads == kept


@pytest.mark.parametrize("mechanisms", [(), ("gqa",)], ids=str)
@pytest.mark.parametrize("layers", [(0,), (1,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("weight", ["v_proj", "o_proj"])
def test_attention_that_does_nothing(mechanisms, layers, weight) -> None:
    """As after pruning, or a start at zero: nothing to fit, and nothing to divide by."""
    config, tensors = source("llama", *mechanisms)
    for layer in layers:
        tensors[f"model.layers.{layer}.self_attn.{weight}.weight"].zero_()
    new, converted, report = calibrated(config, tensors, tokens(16, 24, seed=5).numpy())
    assert all(tensor.isfinite().all() for tensor in converted.values())
    if len(layers) == 3:
        assert all(layer["missed"] == 0 for layer in report["layers"])
        ids = tokens(8, 24, seed=3)
        assert_near(logits(new, converted, ids), logits(config, tensors, ids), 1e-5)  # its tensors are float32


def test_the_first_layer_hardly_pays_for_what_it_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors = source("llama")
    missed: dict[float, list[float]] = {}
    for weight in (1.0, 1000.0):
        monkeypatch.setattr("leanqkv.convert.calibrated.FIRST_LAYER_WEIGHT", weight)
        *_, report = calibrated(config, tensors, tokens(64, 24, seed=5).numpy())
        missed[weight] = [layer["missed"] for layer in report["layers"]]
    assert missed[1000.0][0] < missed[1.0][0] / 10
    assert missed[1000.0][1] < 1


@pytest.mark.parametrize("n, kept", [(4, 2), (4, 3), (5, 2)])
def test_the_cheapest_choice_is_found(n: int, kept: int) -> None:
    """Against every order of the heads."""
    costs = np.random.default_rng(n + kept).random((n, n - kept))
    order = choose(costs)
    assert sorted(order) == list(range(n)) and list(order[:kept]) == sorted(order[:kept])
    every = permutations(range(n), n - kept)
    cheapest = min(every, key=lambda last: sum(costs[head, lent] for lent, head in enumerate(last)))
    assert order[kept:] == cheapest


def features_of(kept: int, group: int, shared: int, width: int, wide: int, rows: int, generator) -> Tensor:
    columns = kept * group * width + shared * group * wide + 1
    features = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    features[:, -1] = 1
    return features


@pytest.mark.parametrize("group", [1, 2])
def test_shared_values_are_the_minimum_over_all_layers(group: int) -> None:
    """From features themselves: targets that some shared values explain are explained; else the gradient vanishes, and
    every turn lowers the error."""
    generator = torch.Generator().manual_seed(group)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    kept, shared, width, wide, d, rows = 1, 2, 3, 7, 12, 400
    hidden, layers = normal(shared, wide, width), []
    for weight in (1.0, 0.1, 3.0):
        features = features_of(kept, group, shared, width, wide, rows, generator)
        own = torch.eye(kept * group * width, dtype=torch.float64)
        into = torch.block_diag(own, *(v for v in hidden for _ in range(group)), torch.ones(1, 1).double())
        layers.append((features, into, normal(into.shape[1], d), weight))

    def terms(noise: float) -> list[LayerTerm]:
        terms = []
        for features, into, flat, weight in layers:
            target = features @ into @ flat + noise * normal(rows, d)
            prior = torch.cat((flat[:-1], torch.zeros(1, d, dtype=torch.float64)))
            gram, cross = features.T @ features, features.T @ target
            size = float(target.square().sum())
            terms.append(LayerTerm(gram, cross, size, prior, group, leading=kept * group * width, weight=weight))
        return terms

    def missed(of: list[LayerTerm], values: Tensor) -> Tensor:
        """With the best W_O, differentiable in the values."""
        total = torch.zeros((), dtype=torch.float64)
        for term in of:
            own = torch.eye(kept * group * width, dtype=torch.float64)
            into = torch.block_diag(own, *(v for v in values for _ in range(group)), torch.ones(1, 1).double())
            cross = into.T @ term.cross
            explained = (cross * torch.linalg.solve(into.T @ term.gram @ into, cross)).sum()
            total += term.weight * (term.target_square - explained)
        return total

    def fit(of: list[LayerTerm], strength: float, updates: int) -> Tensor:
        return fit_values(of, start, strength, updates, tolerance=1e-12)[0]

    start = hidden + 0.5 * normal(shared, wide, width)
    exact = terms(0.0)
    assert missed(exact, fit(exact, 1e-12, 200)) < 1e-3 * missed(exact, start)
    noisy = terms(3.0)
    history = [float(missed(noisy, fit(noisy, 1e-12, updates))) for updates in (1, 2, 4, 8)]
    assert (
        history[0] < float(missed(noisy, start))
        and all(b <= a for a, b in pairwise(history))
        and history[-1] < history[0]
    )

    def slope(values: Tensor) -> float:
        leaf = values.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(missed(noisy, leaf), leaf)
        return float(gradient.abs().max())

    assert slope(fit(noisy, 1e-12, 60)) < 0.05 * slope(start)
    steps = [float((fit(noisy, strength, 60) - start).norm()) for strength in (1e-12, 0.1, 1.0)]
    assert steps[2] < steps[1] < steps[0]


@pytest.mark.parametrize("shape, mechanisms", [("gpt", ()), ("llama", ("gqa",))])
def test_costs_are_what_a_fit_leaves(shape: str, mechanisms: tuple, tmp_path: Path) -> None:
    """Costs against least squares on the features themselves, made from the model's own patterns and values."""
    config, tensors = source(shape, *mechanisms)
    sample, costs = tokens(12, 16).numpy(), []
    with torch.no_grad():
        calibration = Calibration(config, tensors, sample, SkipV1Options(ridge=1e-10), tmp_path)
        for layer in range(3):
            costs.append(calibration.costs(layer))
            calibration.activations.advance_source(layer)
    model = build(config, tensors)
    model.set_attn_implementation("eager")
    inputs = {}
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_pre_hook(lambda m, x, i=i: inputs.update({i: x[0]}))
    with torch.no_grad():
        patterns = model(torch.from_numpy(sample), output_attentions=True).attentions
    n, width = config.num_key_value_heads, config.head_dim
    group = config.num_attention_heads // n

    def value(layer: int, head: int) -> Tensor:
        weight = tensors[f"model.layers.{layer}.self_attn.v_proj.weight"][head * width : (head + 1) * width]
        return inputs[layer] @ weight.T

    for layer, head, first in product(range(1, 3), range(n), range(n // 2, n)):
        mine = patterns[layer][:, head * group : (head + 1) * group]
        columns = slice(head * group * width, (head + 1) * group * width)
        flat = tensors[f"model.layers.{layer}.self_attn.o_proj.weight"][:, columns].T
        own, given = (
            (mine @ v[:, None]).transpose(1, 2).flatten(2).flatten(0, 1) for v in (value(layer, head), value(0, first))
        )
        target = own @ flat
        left = target - given @ torch.linalg.lstsq(given, target).solution
        assert costs[layer][head, first - n // 2] == pytest.approx(float(left.square().sum()), rel=1e-4)


def test_activations_that_are_not_finite_are_refused() -> None:
    config, tensors = source("gpt")
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1e30
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1e30
    with pytest.raises(LeanError, match="the activations after layer 1 are not finite"):
        calibrated(config, tensors, tokens(4, 8).numpy())


# --- disk and memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, BIASES])
def test_space_is_asked_for_before_anything_is_written(fields: dict, tmp_path: Path, monkeypatch) -> None:
    """For as many bytes as the fits write, and not for one less."""
    config, tensors = source("gpt", "gqa", **fields)
    sample = tokens(8, 16).numpy()

    def start(name: str, free: float) -> Calibration:
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
        (tmp_path / name).mkdir()
        return Calibration(config, tensors, sample, SkipV1Options(sweeps=1), tmp_path / name)

    with torch.no_grad():
        calibration = start("written", float("inf"))
        calibration.refit_layers(orders := calibration.choose_orders(), calibration.fit_shared_values(orders))
        written = sum(file.stat().st_size for file in (tmp_path / "written").iterdir())
        start("enough", written)
        with pytest.raises(LeanError, match=r"needs 0\.\d MB in .* 0\.\d MB free\. Use fewer .*set TMPDIR"):
            start("too_little", written - 1)
    assert not list((tmp_path / "too_little").iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").symlink_to("/dev/full")
    with pytest.raises(LeanError, match=r"the disk is full: .*; set TMPDIR"):
        Stream(tmp_path / "file", (4, 8))[:2] = torch.ones(2, 8)
    with pytest.raises(LeanError, match=r"the disk is full: .*; set TMPDIR"):
        map_tensor(tmp_path / "file", torch.ones(4))


def test_a_stream_is_an_array(tmp_path: Path) -> None:
    stream, expected = Stream(tmp_path / "file", (5, 3, 2)), torch.randn(5, 3, 2)
    for rows in (slice(0, 2), slice(2, 4), slice(4, 6)):
        stream[rows] = expected[rows]
    stream[slice(2, 4)] = expected[2:4] = torch.randn(2, 3, 2)
    assert torch.equal(stream[slice(1, 5)], expected[1:5]) and torch.equal(stream[slice(4, 6)], expected[4:])


PEAKS = """
from pathlib import Path
from converting import source
from shapes import tokens
from leanqkv.convert.calibrated import calibrated
from leanqkv.convert.targets import SkipV1Options
fields = {"hidden_size": 512, "num_attention_heads": 2, "head_dim": 4, "num_hidden_layers": 2, "intermediate_size": 8}
config, tensors = source("gpt", **fields)
for sequences in (128, 512):
    settings = SkipV1Options(sweeps=1, batch_size=32, choose=False, refit_values=False)
    calibrated(config, tensors, tokens(sequences, 32).numpy(), settings)
    print(next(line.split()[1] for line in Path("/proc/self/status").open() if line.startswith("VmHWM")))
"""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a child's memory alone is read from Linux's /proc")
def test_memory_does_not_grow_with_the_tokens() -> None:
    """With four times the tokens a stream grows by 25 MB, and the peak by less."""
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run([sys.executable, "-c", PEAKS], env=os.environ | paths, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    fewer, more = (int(kilobytes) * 1024 for kilobytes in process.stdout.split())
    assert more - fewer < (512 - 128) * 32 * 512 * 4


def test_fits_that_take_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors = source("gpt")
    monkeypatch.setattr("leanqkv.convert.calibrated.LARGEST_STEP", 0.0)
    _, _, report = calibrated(config, tensors, tokens(8, 16).numpy())
    assert not report["lent_values"] and [layer["layer"] for layer in report["layers"]] == [1, 2]
    alone = calibrated(config, tensors, tokens(8, 16).numpy(), SkipV1Options(refit_lent=False, refit_values=False))[2]
    assert report["layers"] == alone["layers"]


@pytest.mark.parametrize("conversion", ["calibrated", "top-vo"])
def test_heads_move_with_their_part_of_a_norm_over_all_heads(conversion: str) -> None:
    config, tensors = source("llama", qk_norm="width")
    assert conversion_error(config, tensors, conversion) < TOLERANCES[conversion]
