"""Analyses: every quantity against its definition, in loops and float64."""

import json
import re
from math import log, log10, sqrt
from pathlib import Path

import numpy as np
import pytest
import torch
from corpus import prepare
from safetensors.torch import load_file, save_file
from scipy import stats
from shapes import assert_near, randomize, tiny, tokens
from torch.nn import functional as F

from leanqkv import LeanForCausalLM, LeanForImageClassification, LeanForMaskedLM, preset
from leanqkv.analyze.heads import (
    copy_losses,
    induction_scores,
    matching_weights,
    previous_token_scores,
    repeated_tokens,
    uniform_patterns,
    value_layers,
)
from leanqkv.analyze.observe import layer_outputs, observe
from leanqkv.analyze.probe import phases, probe_losses, slope_interval, train_probes
from leanqkv.analyze.similarity import bucketed, contributions, head_similarity, off_diagonal_mean, token_similarity
from leanqkv.analyze.weights import attention_spectra, initial_spreads, logit_spread
from leanqkv.report.analysis import architectures, tables
from leanqkv.report.analysis_figures import drawings

# Observing


def build(shape: str, *mechanisms: str, **fields) -> LeanForCausalLM:
    return randomize(LeanForCausalLM(tiny(shape, *mechanisms, **fields))).double().eval()


MODELS = [
    ("gpt", ()),
    ("gpt", ("skipv1", "nonlinear-query")),
    ("gpt", ("skipv1:injection=resformer", "identity-query")),
    ("gpt", ("denseformer", "residual-query")),
    ("gpt", ("mlp-query", "skipv0")),
    ("gpt", ("identity-query", "no-output")),
    ("llama", ("gqa:group_size=2", "skipv1")),
    ("llama", ("keys-as-values",)),
    ("llama", ("mla:rank=16,rope_dim=4", "skipv1")),
    ("llama", ("mla:rank=4,rope_dim=4",)),  # narrower than a head: attention in the absorbed form
    ("llama", ("yoco",)),
]


@pytest.mark.parametrize("shape, mechanisms", MODELS, ids=lambda value: "+".join(value) if value else "plain")
def test_what_is_observed_is_what_the_model_does(shape, mechanisms):
    """The heads' contributions add up to what attention puts out, and a layer's output is the next one's input."""
    model = build(shape, *mechanisms, num_hidden_layers=4)
    ids = tokens(2, 7)
    attended, inputs = [], []
    for block in model.model.layers:
        block.self_attn.register_forward_hook(lambda _m, _in, out: attended.append(out[0]))
        block.register_forward_pre_hook(lambda _m, args: inputs.append(args[0]))
    before = model(input_ids=ids).logits
    implementation = model.config._attn_implementation
    attended.clear()
    inputs.clear()
    seen = observe(model, ids)
    assert model.config._attn_implementation == implementation
    assert len(seen.layers) == len(seen.heads) == len(seen.patterns) == 4
    for i, block in enumerate(model.model.layers):
        parts = contributions(block.self_attn.o_proj, seen.heads[i])
        assert_near(parts.sum(2), attended[i], 1e-10, "contributions")
        assert seen.patterns[i].shape == (2, seen.heads[i].shape[2], 7, 7)
        assert_near(seen.patterns[i].sum(-1), torch.ones(()), 1e-10, "rows of the patterns")
        assert not seen.patterns[i].triu(1).any()
        if i and "denseformer" not in mechanisms:
            assert torch.equal(seen.layers[i - 1], inputs[i])
    for one, other in zip(layer_outputs(model, ids), seen.layers, strict=True):
        assert_near(one, other, 1e-10)
    assert_near(model(input_ids=ids).logits, before, 1e-12, "the model after observing")


def test_patterns_and_heads_by_hand():
    """A plain layer, written out."""
    model = build("gpt")
    seen = observe(model, tokens(1, 5))
    block = model.model.layers[1]
    x = block.input_layernorm(seen.layers[0])[0]
    q, k, v = (getattr(block.self_attn, f"{name}_proj").weight @ x.T for name in "qkv")
    for head in range(4):
        rows = slice(8 * head, 8 * head + 8)
        for t in range(5):
            scores = torch.stack([q[rows, t] @ k[rows, s] / sqrt(8) for s in range(t + 1)])
            weights = scores.exp() / scores.exp().sum()
            assert_near(seen.patterns[1][0, head, t, : t + 1], weights, 1e-10)
            assert_near(seen.heads[1][0, t, head], v[rows, : t + 1] @ weights, 1e-10)


def test_blocks_that_share_weights_are_observed_once_a_layer():
    model = build("gpt", num_hidden_layers=4, num_hidden_groups=2)
    seen = observe(model, tokens(2, 7))
    assert len(seen.layers) == len(seen.patterns) == len(seen.heads) == 4
    assert not torch.equal(seen.layers[0], seen.layers[1])


# Similarity


def cosine(a, b) -> float:
    return float(sum(x * y for x, y in zip(a, b, strict=True)) / sqrt(sum(x * x for x in a) * sum(y * y for y in b)))


def test_similarity_in_loops():
    draws = torch.randn(2, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = head_similarity(draws)
    for g in range(4):
        for h in range(4):
            values = [cosine(draws[b, t, g], draws[b, t, h]) for b in range(2) for t in range(3)]
            assert found[g, h].item() == pytest.approx(np.mean(values), abs=1e-12)
    states = draws[:, :, 0]
    found = token_similarity(states)
    for i in range(3):
        for j in range(3):
            expected = np.mean([cosine(states[b, i], states[b, j]) for b in range(2)])
            assert found[i, j].item() == pytest.approx(expected, abs=1e-12)
    pairs = [found[i, j].item() for i in range(3) for j in range(3) if i != j]
    assert off_diagonal_mean(found) == pytest.approx(np.mean(pairs))


def test_alike_is_one_and_orthogonal_is_zero():
    vector = torch.randn(2, 3, 1, 4)
    scale = torch.tensor([0.5, 1.0, 7.0])[:, None]
    assert_near(head_similarity(vector * scale), torch.ones(3, 3), 1e-6)
    orthogonal = torch.eye(4).expand(2, 3, 4, 4)
    assert torch.equal(head_similarity(orthogonal), torch.eye(4).double())
    assert off_diagonal_mean(head_similarity(orthogonal)) == 0
    assert off_diagonal_mean(torch.ones(1, 1)) == 1


def test_buckets_leave_tokens_alone_out():
    similarity = torch.rand(9, 9, dtype=torch.float64)
    found = bucketed(similarity, 3)
    for i in range(3):
        for j in range(3):
            pairs = [(a, b) for a in range(3 * i, 3 * i + 3) for b in range(3 * j, 3 * j + 3) if a != b]
            assert found[i, j].item() == pytest.approx(np.mean([similarity[a, b].item() for a, b in pairs]))
    with pytest.raises(ValueError, match="do not make 8 buckets"):
        bucketed(similarity, 8)


# Heads


def test_scores_in_loops():
    n = 6
    logits = torch.randn(2, 3, 2 * n, 2 * n, dtype=torch.float64)
    patterns = logits.masked_fill(torch.ones(2 * n, 2 * n).triu(1).bool(), -torch.inf).softmax(-1)
    for head in range(3):
        previous = [patterns[b, head, t, t - 1].item() for b in range(2) for t in range(1, 2 * n)]
        assert previous_token_scores(patterns)[head].item() == pytest.approx(np.mean(previous))
        copied = [patterns[b, head, n + i, i + 1].item() for b in range(2) for i in range(n)]
        assert induction_scores(patterns)[head].item() == pytest.approx(np.mean(copied))


def test_scores_of_heads_that_do_nothing_else_and_of_heads_at_chance():
    n = 5
    previous, induction = torch.zeros(2, 1, 1, 2 * n, 2 * n)
    for t in range(2 * n):
        previous[..., t, max(t - 1, 0)] = 1
        induction[..., t, t - n + 1 if t >= n else 0] = 1
    assert previous_token_scores(previous).item() == 1 and induction_scores(previous).item() == 0
    assert induction_scores(induction).item() == 1 and previous_token_scores(induction).item() < 0.2
    uniform = uniform_patterns(4)
    assert previous_token_scores(uniform).item() == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    assert induction_scores(uniform).item() == pytest.approx((1 / 3 + 1 / 4) / 2)


def test_matching_in_loops():
    ids = tokens(3, 12, vocab_size=4)
    patterns = torch.rand(3, 2, 12, 12, dtype=torch.float64)
    weight, queries = matching_weights(patterns, ids)
    expected, number = np.zeros(2), 0
    for b in range(3):
        for t in range(12):
            after = [s + 1 for s in range(t - 1) if ids[b, s] == ids[b, t]]
            number += bool(after)
            expected += [sum(patterns[b, h, t, s].item() for s in after) for h in range(2)]
    assert queries == number > 10
    assert weight.tolist() == pytest.approx(expected)
    # Of a text given twice the earlier occurrence is the one of the first copy.
    induction = torch.zeros(1, 1, 8, 8)
    for t in range(4, 8):
        induction[..., t, t - 3] = 1
    weight, queries = matching_weights(induction, torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8]]))
    assert weight.item() == queries == 4


def test_repeated_tokens_and_what_is_lost_on_them():
    ids = repeated_tokens(97, 3, 8, seed=0)
    assert ids.shape == (3, 16) and torch.equal(ids[:, :8], ids[:, 8:]) and ids.max() < 97
    assert torch.equal(ids, repeated_tokens(97, 3, 8, seed=0)) and len(set(ids[0, :8].tolist())) > 4
    model = build("gpt")
    log_probabilities = model(input_ids=ids).logits.log_softmax(-1)
    lost = [[-log_probabilities[b, t, ids[b, t + 1]].item() for t in range(15)] for b in range(3)]
    first, second = copy_losses(model, ids)
    assert first == pytest.approx(np.mean([row[:7] for row in lost]), rel=1e-6)
    assert second == pytest.approx(np.mean([row[8:] for row in lost]), rel=1e-6)


def test_where_values_come_from():
    def layers(*mechanisms, shape="gpt", **fields):
        return [value_layers(plan) for plan in tiny(shape, *mechanisms, **fields).plan.layers]

    assert layers("skipv1") == [(0, 0, 0, 0), (1, 1, 0, 0), (2, 2, 0, 0)]
    assert layers("skipv1:ratio=0.25") == [(0, 0, 0, 0), (1, 1, 1, 0), (2, 2, 2, 0)]
    assert layers("skipv1", "gqa:group_size=2") == layers("skipv1")
    assert layers("skipv1:injection=odd_even")[2] == (2, 2, 0, 0)
    assert layers("skipv0")[1] == (1, 1)
    assert layers("cla-v") == [(0, 0, 0, 0), (0, 0, 0, 0), (2, 2, 2, 2)]
    assert layers("mla:rank=8,rope_dim=4", "skipv1", shape="llama") == [None] * 3


# Probes


def batches(steps: int, layers: int = 2, width: int = 6, vocab_size: int = 5):
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        states = [torch.randn(8, width, dtype=torch.float64, generator=generator) for _ in range(layers)]
        yield states, torch.randint(vocab_size, (8,), generator=generator)


def test_probes_trained_together_are_those_trained_apart():
    rates, steps = (1e-3, 1e-2), 12
    together = train_probes(batches(steps), steps=steps, vocab_size=5, rates=rates)
    held_out, targets = next(batches(1))
    states = [layer.unflatten(0, (2, 4)) for layer in held_out]
    losses = probe_losses(together, states, targets.view(2, 4))
    assert losses.shape == (2, 2, 2)
    for layer in range(2):
        for place, rate in enumerate(rates):
            alone = (([states[layer]], targets) for states, targets in batches(steps))
            (((head,),)) = train_probes(alone, steps=steps, vocab_size=5, rates=(rate,))
            logits = head.logits(held_out[layer])
            lost = [-logits[t].log_softmax(-1)[targets[t]].item() for t in range(8)]
            assert losses[layer, place].tolist() == pytest.approx([np.mean(lost[:4]), np.mean(lost[4:])], rel=1e-9)
    assert losses.unique().numel() == losses.numel()


def test_the_first_step_of_a_probe_by_hand():
    """AdamW from zero: a step against the sign of the gradient, of the rate after one step of warm-up."""
    states, targets = next(batches(1))
    steps, seen = 20, []
    heads = train_probes(
        [(states, targets)] * 2, steps=steps, vocab_size=5, rates=(1e-2,), progress=lambda: seen.append(1)
    )
    normed = (states[0] - states[0].mean(1, keepdim=True)) / (
        states[0].var(1, unbiased=False, keepdim=True) + 1e-5
    ).sqrt()
    gradient = (torch.full((8, 5), 1 / 5, dtype=torch.float64) - F.one_hot(targets, 5)).T @ normed
    # The warm-up of two steps starts at zero, so the second step is the first that moves, with the same gradient.
    assert_near(heads[0][0].weight.detach(), -5e-3 * gradient.sign(), 1e-4)
    assert len(seen) == 2


def test_a_probe_finds_what_is_there():
    def separable():
        generator = torch.Generator().manual_seed(0)
        centres = 3 * torch.eye(8)
        while True:
            targets = torch.randint(8, (32,), generator=generator)
            yield [centres[targets] + 0.01 * torch.randn(32, 8, generator=generator), torch.randn(32, 8)], targets

    source = separable()
    heads = train_probes((next(source) for _ in range(150)), steps=150, vocab_size=8, rates=(0.1,))
    states, targets = next(source)
    found = probe_losses(heads, [layer[None] for layer in states], targets[None])[:, 0, 0]
    assert found[0] < 0.02
    assert found[1] > 0.9 * log(8), "noise tells nothing"


def test_slopes_and_phases():
    assert phases(12) == (range(7), range(7, 12))  # the paper's
    assert phases(6) == (range(3), range(3, 6)) and phases(4) == (range(2), range(2, 4))
    losses = np.random.default_rng(0).normal(size=(6, 9)) + np.arange(6)[:, None] * -0.3
    slope, half_width = slope_interval(losses, range(2, 6))
    each = [np.polyfit([2, 3, 4, 5], losses[2:, i], 1)[0] for i in range(9)]
    assert slope == pytest.approx(np.polyfit([2, 3, 4, 5], losses[2:].mean(1), 1)[0])
    low, high = stats.t.interval(0.95, 8, loc=np.mean(each), scale=stats.sem(each))
    assert (slope - half_width, slope + half_width) == pytest.approx((low, high))
    assert slope_interval(losses, range(2, 3)) is None and slope_interval(losses[:, :1], range(3)) is None


# Weights


def test_spectra_against_numpy():
    model = build("llama", "nonlinear-query", "gqa:group_size=2", "skipv1")
    found = attention_spectra(model.config, model.state_dict())
    assert set(found[0]) == {"q_proj.down_proj", "q_proj.up_proj", "k_proj", "v_proj", "o_proj"}
    for i, layer in enumerate(found):
        for name, kept in layer.items():
            weight = model.get_submodule(f"model.layers.{i}.self_attn.{name}").weight.detach().numpy()
            values = np.linalg.svd(weight, compute_uv=False)
            assert kept["shape"] == list(weight.shape)
            assert kept["condition"] == pytest.approx(np.linalg.cond(weight), rel=1e-9)
            assert kept["stable_rank"] == pytest.approx((weight**2).sum() / values[0] ** 2, rel=1e-9)
            assert len(kept["singular_values"]) == min(len(values), 17)
            assert kept["singular_values"][0] == pytest.approx(values[0])
            assert kept["singular_values"][-1] == pytest.approx(values[-1])
    singular = attention_spectra(model.config, {name: torch.ones_like(w) for name, w in model.state_dict().items()})
    assert singular[0]["o_proj"]["condition"] > 1e12


@pytest.mark.parametrize("window", [None, 3])
def test_logit_spread_in_loops(window):
    logits = torch.randn(2, 3, 6, 6, dtype=torch.float64) * 2 + 5 * torch.randn(2, 3, 6, 1, dtype=torch.float64)
    distance = torch.arange(6)[:, None] - torch.arange(6)
    hidden = (distance < 0) | (distance >= (window or 6))
    found = logit_spread(logits.masked_fill(hidden, -torch.inf).softmax(-1), window)
    rows = [
        [logits[b, h, t, s].item() for s in range(t + 1) if t - s < (window or 6)]
        for b in range(2)
        for h in range(3)
        for t in range(1, 6)
    ]
    assert found == pytest.approx(sqrt(np.mean([np.var(row) for row in rows])))


def test_initial_spread_of_every_query():
    """Appendix B of Karbevski & Mijoski 2025: 1.8 at GPT-2's width, here as `1 / (initializer_range sqrt(d))`."""
    config = preset("gpt2-124m", num_hidden_layers=2, vocab_size=500)
    state = torch.get_rng_state()
    found = initial_spreads(config, tokens(2, 48, vocab_size=500), seed=0)
    assert torch.equal(state, torch.get_rng_state())
    assert set(found) == {"linear", "identity, scale 1", "identity, scale ½", "nonlinear", "residual", "from_mlp"}
    assert found["identity, scale 1"][0] / found["linear"][0] == pytest.approx(1 / (0.02 * sqrt(768)), abs=0.1)
    assert found["identity, scale ½"][0] / found["identity, scale 1"][0] == pytest.approx(0.5, rel=1e-3)
    assert found["from_mlp"][0] == pytest.approx(found["linear"][0])  # nothing below the first layer
    assert "identity, scale 1" not in initial_spreads(tiny("gpt", head_dim=4), tokens(1, 8), seed=0)


# The command

FIELDS = {"vocab_size": 300, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 4}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Models with the corpus's tokenizer: two seeds as their runs started, one with a checkpoint, and others."""
    directory = tmp_path_factory.mktemp("analyze")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEANQKV_CACHE", str(directory / "cache"))
        patch.chdir(directory)
        data = prepare(directory)

        def save(name, *mechanisms, seed=0, change=None, tokenizer=True, **fields):
            torch.manual_seed(seed)
            model = LeanForCausalLM(tiny("gpt", *mechanisms, **{**FIELDS, **fields})).eval()
            if change:
                randomize(model, seed=seed)
            model.save_pretrained(name)
            if tokenizer:
                data.tokenizer().save_pretrained(name)

        for seed in (1, 2):
            for name, mechanisms in (("plain", ()), ("skip", ("skipv1",))):
                save(f"{name}{seed}", *mechanisms, seed=seed, change=name == "skip")
                run = {"name": f"tiny+{name}", "seed": seed, "initial_sha256": None}
                Path(f"{name}{seed}/record.json").write_text(json.dumps(run))
        save("skip1/checkpoint-7", "skipv1", seed=5, change=True, tokenizer=False)
        Path("skip1/checkpoint-7/complete").touch()
        save("skip1/checkpoint-9", "skipv1", tokenizer=False)  # cut off
        save("wide", vocab_size=301)
        save("mute", tokenizer=False)
        save("prefix", mask_type="prefix")
        save("other")
        tokenizer = json.loads(Path("other/tokenizer.json").read_text())
        tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
        Path("other/tokenizer.json").write_text(json.dumps(tokenizer))
        Path("full").mkdir()
        Path("full/file").touch()
        LeanForMaskedLM(tiny("gpt", **FIELDS, task="masked_lm")).save_pretrained("masked")
        LeanForImageClassification(preset("vit-digits")).save_pretrained("images")
        save("nan")
        weights = load_file("nan/model.safetensors")
        weights["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.nan
        save_file(weights, "nan/model.safetensors", metadata={"format": "pt"})
        yield directory


QUICK = ("--data", "corpus.txt", "--samples", "9", "--device", "cpu")


@pytest.fixture(scope="module")
def record(place):
    import sys

    from leanqkv.cli import main

    command = ("--probe-steps", "3", "--probe-rates", "1e-2,1e-3", "--out", "found")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["leanqkv", "analyze", "plain1", "skip1", "plain2", "skip2", *QUICK, *command])
        with pytest.raises(SystemExit) as end:
            main()
    assert not end.value.code
    return json.loads(Path("found/analysis.json").read_text())


def test_the_record(place, record):
    assert str(place) not in json.dumps(record)
    assert record["settings"]["context_length"] == 64 and record["git_commit"] is not None
    assert list(record["models"]) == ["plain1", "skip1", "plain2", "skip2"]
    for model in record["models"].values():
        assert len(model["probe"]["losses"]) == len(model["logit_spread"]) == len(model["spectra"]) == 4
        assert [s["layers"] for s in model["probe"]["slopes"]] == [[0, 1], [2, 3]]
        assert model["probe"]["losses"] == [min(row) for row in model["probe"]["grid"]]
        assert np.shape(model["similarity"]["tokens"][0]["map"]) == (8, 8)
        assert np.shape(model["heads"]["induction"]) == (4, 2)
    plain, skip = record["models"]["plain2"], record["models"]["skip1"]
    assert [at["step"] for at in plain["training"]] == [0]
    # Nothing was trained: the start that the seed gives is the model itself.
    assert plain["training"][0]["condition"] == [{n: m["condition"] for n, m in s.items()} for s in plain["spectra"]]
    assert plain["training"][0]["logit_spread"] == pytest.approx(plain["logit_spread"], rel=0.2)
    assert [at["step"] for at in skip["training"]] == [0, 7]
    assert skip["training"][1]["condition"] != skip["training"][0]["condition"]
    assert skip["heads"]["value_layers"][1:] == [[1, 0], [2, 0], [3, 0]]


def test_the_record_is_what_the_functions_find(place, record):
    """Averages over batches that are not equally large, against all sequences at once."""
    from transformers import AutoTokenizer

    from leanqkv.checkpoints.open import causal_lm, open_causal_lm
    from leanqkv.data import collate, make_batch_plan, prepare_data

    assert len(AutoTokenizer.from_pretrained("skip1")) == 300
    data = prepare_data("corpus.txt", vocab_size=300, tokenizer="skip1")
    sizes = {"train_tokens": data.train_tokens, "validation_tokens": data.validation_tokens, "context_length": 64}
    plan = make_batch_plan(**sizes, batch_size=2, steps=3, evaluation_sequences=9, seed=0)
    assert plan.sha256 == record["batch_plan"]["sha256"]
    ids = collate(data.validation(), plan.evaluation_starts, 64)["input_ids"]
    model = causal_lm(open_causal_lm(Path("skip1")))
    seen, found = observe(model, ids), record["models"]["skip1"]
    repeated = repeated_tokens(300, 9, 32, 0)
    copied = observe(model, repeated).patterns
    for i in range(4):
        heads, similarity = found["heads"], found["similarity"]
        assert similarity["heads"][i]["mean"] == pytest.approx(off_diagonal_mean(head_similarity(seen.heads[i])), 1e-3)
        tokens_alike = off_diagonal_mean(token_similarity(seen.layers[i]))
        assert similarity["tokens"][i]["mean"] == pytest.approx(tokens_alike, 1e-3)
        assert heads["previous_token"][i] == pytest.approx(previous_token_scores(seen.patterns[i]).tolist(), 1e-3)
        assert heads["induction"][i] == pytest.approx(induction_scores(copied[i]).tolist(), 1e-3)
        weight, queries = matching_weights(seen.patterns[i], ids)
        assert heads["matching"][i] == pytest.approx((weight / queries).tolist(), 1e-3)
        assert found["logit_spread"][i] == pytest.approx(logit_spread(seen.patterns[i]), 1e-3)
    assert heads["copy_loss"]["second"] == pytest.approx(copy_losses(model, repeated)[1], 1e-4)


def test_tables_of_the_record(record):
    found = architectures(record)
    assert [(one.name, list(one.models)) for one in found] == [("tiny+plain", [1, 2]), ("tiny+skip", [1, 2])]
    made = tables(record)
    models = record["models"]
    plain, skip = ([models[f"{name}{seed}"]["logit_spread"][1] for seed in (1, 2)] for name in ("plain", "skip"))
    differences = np.subtract(skip, plain)
    reach = stats.t.ppf(0.975, 1) * stats.sem(differences)
    row = made["Spread of the attention logits, by layer"].rows[1]
    assert row[1] == f"{np.mean(plain):.3f} ± {np.std(plain, ddof=1):.3f}"
    assert row[3].strip("*") == f"{np.mean(differences):+.3f} ± {reach:.3f}".replace("-", "−")
    assert row[3].startswith("**") == (abs(np.mean(differences)) > reach)
    conditions = [log10(models[f"plain{seed}"]["spectra"][3]["o_proj"]["condition"]) for seed in (1, 2)]
    title = "log₁₀ of the condition number of o_proj, by layer"
    assert made[title].rows[3][1] == f"{np.mean(conditions):.2f} ± {np.std(conditions, ddof=1):.2f}"
    # Of the skip model heads 1 of layers 1 to 3 borrow; of the plain one they are compared.
    scores = {n: [models[f"{n}{seed}"]["heads"]["induction"] for seed in (1, 2)] for n in ("plain", "skip")}
    means = {(n, h): [np.mean([m[i][h] for i in (1, 2, 3)]) for m in scores[n]] for n in scores for h in (0, 1)}
    groups = made["Heads by where their values come from"].rows
    assert [row[1] for row in groups] == ["3"] * 4
    for row, key in zip(groups, (("plain", 1), ("plain", 0), ("skip", 1), ("skip", 0)), strict=True):
        assert row[4] == f"{np.mean(means[key]):.3f} ± {np.std(means[key], ddof=1):.3f}", row[0]
    rows = made["Differences between these heads"].rows
    for row, other in zip(rows, (("skip", 0), ("plain", 1)), strict=True):
        assert (
            row[3]
            .strip("*")
            .startswith(f"{np.mean(np.subtract(means['skip', 1], means[other])):+.3f}".replace("-", "−"))
        )
    steps = [row[0] for row in made["Over training"].rows if row[0].startswith("spread")]
    assert steps == [f"spread of the logits, {at}" for at in ("step 0", "step 7", "end")]


def test_the_page_is_made_from_the_record_alone(record, unwrapped):
    page = Path("found/report.html").read_text()
    # Probe, similarities, spread, over training (spread, four matrices), spectra, scores, maps.
    assert page.count("<figure>") == 1 + 3 + 1 + (1 + 4) + 4 + 3 + 2 * 3
    ends = [
        (one.name, [{**model, "training": model["training"][:1]} for model in one.models.values()])
        for one in architectures(record)
    ]
    assert len(drawings(record, ends)) == page.count("<figure>") - 5  # nothing between start and end: nothing to draw
    assert "http" not in re.sub(r"http://www\.w3\.org/\S+", "", page)  # it needs nothing else
    table = Path("found/table.md").read_text()
    Path("found/report.html").unlink()
    Path("found/table.md").unlink()
    code, out, err = unwrapped("report", "found")
    assert (code, err) == (0, "") and "highest induction score" in out
    assert (Path("found/report.html").read_text(), Path("found/table.md").read_text()) == (page, table)


def test_one_model_and_no_probes(place, unwrapped):
    code, _, err = unwrapped("analyze", "wide", *QUICK, "--probe-steps", "0", "--out", "alone")
    assert (code, err) == (0, "")
    record = json.loads(Path("alone/analysis.json").read_text())
    assert record["models"]["wide"]["probe"] is None and record["models"]["wide"]["training"] == []
    made = tables(record)
    assert "Loss of the linear probe, by layer" not in made and "Differences between these heads" not in made
    assert [row[0] for row in made["Heads by where their values come from"].rows] == ["`wide`, all"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere"], "there is no directory nowhere"),
        (["full"], "full is not a checkpoint"),
        (["masked"], "masked holds a model for masked_lm"),
        (["images"], "images holds a model for image_classification"),
        (["prefix"], "prefix holds a model that attends to prefixes"),
        (["plain1", "wide"], "wide one of 301"),
        (["plain1", "other"], "plain1 and other have different tokenizers"),
        (["plain1", "plain1"], "two of the directories are called plain1"),
        (["mute"], "no tokenizer at mute"),
        (["nan"], "nan: its outputs are not finite"),
        (["plain1", "--data", "nowhere.txt"], "no data at nowhere.txt"),
        (["plain1", "--data", "short.txt"], "text is too short"),
        (["plain1", "--context-length", "65"], "longer than the 64 positions of plain1"),
        (["plain1", "--context-length", "15"], "too short to analyse"),
        (["plain1", "--probe-rates", "1e-3,fast"], "--probe-rates is learning rates"),
        (["plain1", "--probe-rates", "0"], "--probe-rates is learning rates"),
        (["plain1", "--out", "full"], "full is not empty"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(place, cli, arguments, message):
    Path("short.txt").write_text("too short")
    given = [] if "--data" in arguments else ["--data", "corpus.txt"]
    out = [] if "--out" in arguments else ["--out", "x"]
    code, _, err = cli("analyze", *arguments, *given, *out, "--probe-steps", "0", "--samples", "2")
    assert code == 2 and message in err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert not Path("x").exists() and [file.name for file in Path("full").iterdir()] == ["file"]
