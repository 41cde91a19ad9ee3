"""Conversions to first-layer values and nonlinear queries, against their equations written as loops."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from converting import BIASES, build, logits, source, swapped_by_hand
from corpus import write_corpus
from shapes import assert_near, randomize, tiny, tokens
from torch import Tensor

from leanqkv import LeanError, LeanForCausalLM, cache_bytes
from leanqkv.checkpoints.open import open_checkpoint
from leanqkv.commands.convert import _read_layers, read_share
from leanqkv.convert import methods, nonlinear_query
from leanqkv.convert.conversion import Conversion
from leanqkv.convert.heads import ValueHeads, pools, target_config
from leanqkv.convert.methods import FUNCTIONS
from leanqkv.convert.targets import NonlinearQueryOptions, SkipV1Options
from leanqkv.model.shapes import parameter_shapes

ROUNDING = 1e-12


def draw(heads: int, group: int, width: int, d: int, seed: int = 0) -> ValueHeads:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return ValueHeads(normal(heads, width, d), normal(heads, width), normal(heads, group, d, width))


# --- the paper's five methods -----------------------------------------------------------------------------------------


def contribution(heads: ValueHeads, place: int, of: int, group: int) -> Tensor:
    """W_V W_O of the value at `place` through the columns of query head `group` of head `of`, and of its bias."""
    matrix = heads.value[place].T @ heads.output[of, group].T
    assert heads.value_bias is not None
    return torch.cat((matrix, heads.value_bias[place][None] @ heads.output[of, group].T))


@pytest.mark.parametrize("heads, num_own", [(4, 2), (4, 3), (4, 1), (6, 3), (5, 3)])
@pytest.mark.parametrize("group", [1, 2])
def test_means(heads: int, num_own: int, group: int) -> None:
    before = draw(heads, group, 3, 12)
    parts = pools(heads, num_own)
    assert sorted(head for part in parts for head in part) == list(range(heads)) and len(parts) == num_own
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for name in ("mean-v", "mean-vo"):
        converted = FUNCTIONS[name](before, num_own)
        assert converted.order == tuple(range(heads))
        for place, part in enumerate(parts):
            assert_near(converted.value[place], sum(before.value[h] for h in part) / len(part), ROUNDING)
            assert_near(converted.value_bias[place], sum(before.value_bias[h] for h in part) / len(part), ROUNDING)
            for query in range(group):
                columns = before.output[place, query]
                if name == "mean-vo":
                    columns = sum(before.output[h, query] for h in part) / len(part)
                assert_near(converted.output[place, query], columns, ROUNDING)
        rest = converted.output[num_own:]
        assert torch.equal(rest, before.output[num_own:] if name == "mean-v" else torch.zeros_like(rest))


def test_pools_are_two_by_two() -> None:
    assert pools(12, 6) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert pools(4, 3) == [[0, 1], [2], [3]]


@pytest.mark.parametrize("group", [1, 2])
def test_largest_stay(group: int) -> None:
    before = draw(4, group, 3, 12)
    before.value[1] *= 5
    before.value[2] *= 3
    before.output[3] *= 100
    converted = FUNCTIONS["top-v"](before, 2)
    assert converted.order == (0, 1, 2, 3)
    assert torch.equal(converted.value, before.value[[1, 2]]) and torch.equal(
        converted.value_bias, before.value_bias[[1, 2]]
    )
    assert torch.equal(converted.output, before.output)
    converted = FUNCTIONS["top-vo"](before, 2)
    assert converted.order == (1, 3, 0, 2)
    for place, head in enumerate((1, 3)):
        for query in range(group):
            assert torch.equal(contribution(converted, place, place, query), contribution(before, head, head, query))
    assert not converted.output[2:].any()


@pytest.mark.parametrize("group", [1, 2])
def test_svd_is_the_best_of_its_rank(group: int) -> None:
    before = draw(4, group, 3, 12)
    converted = FUNCTIONS["svd"](before, 2)
    whole = sum(contribution(before, h, h, q) for h in range(4) for q in range(group))
    reduced = sum(contribution(converted, h, h, q) for h in range(2) for q in range(group))
    sigma = torch.linalg.svdvals(whole[:-1])
    assert torch.linalg.matrix_rank(reduced[:-1]) == 6
    assert (whole - reduced)[:-1].square().sum().item() == pytest.approx(sigma[6:].square().sum().item())
    # The bias's share is the nearest that six directions can give.
    directions = torch.linalg.qr(reduced[:-1].T).Q[:, :6]
    assert_near(reduced[-1], directions @ (directions.T @ whole[-1]), 1e-8)
    assert not converted.output[2:].any()


@pytest.mark.parametrize("method", FUNCTIONS)
@pytest.mark.parametrize(
    "shape, mechanisms, fields",
    [("gpt", (), {}), ("gpt", (), BIASES), ("llama", ("gqa",), {}), ("llama", (), {"block_type": "parallel"})],
)
def test_a_converted_model_is_what_its_heads_say(shape: str, mechanisms: tuple, fields: dict, method: str) -> None:
    """The converted model against the source with values swapped by hand, through hooks."""
    config, tensors = source(shape, *mechanisms, **fields)
    new, converted, _ = methods.convert(config, tensors, SkipV1Options(method))
    assert {name: tuple(converted[name].shape) for name in converted} == parameter_shapes(new)
    ids = tokens(2, 9)
    assert_near(logits(new, converted, ids), swapped_by_hand(config, tensors, method, ids), ROUNDING)


# --- nonlinear query --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, BIASES, {"qk_norm": True}])
@pytest.mark.parametrize("shape", ["gpt", "llama"])
def test_a_nonlinear_query_starts_at_the_source(shape: str, fields: dict) -> None:
    config, tensors = source(shape, "gqa", **({k: v for k, v in fields.items() if k != "norm_bias"}))
    new, converted, _ = nonlinear_query.convert(config, tensors, NonlinearQueryOptions())
    ids = tokens(2, 12)
    assert_near(logits(new, converted, ids), logits(config, tensors, ids), ROUNDING)
    model = build(new, converted)
    model(input_ids=ids, labels=ids).loss.backward()
    assert model.model.layers[1].self_attn.q_proj.norm_out.weight.grad.abs().max() > 0


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEANQKV_CACHE", str(tmp_path / "cache"))
    return tmp_path


def save(name: str, *mechanisms: str, **fields) -> LeanForCausalLM:
    from leanqkv.data.tokenizer import train_tokenizer

    fields = {"vocab_size": 300} | fields
    model = randomize(LeanForCausalLM(tiny("gpt", *mechanisms, **fields)), std=0.2)
    model.save_pretrained(name)
    train_tokenizer(iter(["def function(argument): return argument\n"] * 50), 300).save_pretrained(name)
    return model.eval()


@pytest.mark.slow
def test_convert(place, unwrapped):
    save("source")
    write_corpus(Path("corpus.txt"))
    command = ("convert", "source", "--to", "skipv1", "--calibration", "corpus.txt", "--tokens", "2000")
    code, out, err = unwrapped(*command, "--sequence-length", "32")
    for flag in ("choose", "refit-lent", "refit-values"):
        assert unwrapped(*command, f"--no-{flag}", "--out", flag)[0] == 0
        settings = json.loads(Path(flag, "conversion.json").read_text())["settings"]
        assert [name for name in settings if settings[name] is False] == [flag.replace("-", "_")]
    code, out, err = unwrapped(*command, "--out", "less")
    assert (code, err) == (0, "")
    assert "layer 0: the values it lends are fitted to all layers" in out
    assert "layer 1: heads [" in out
    report = json.loads(Path("less/conversion.json").read_text())
    assert report["calibration_tokens"] == 62 * 32
    model, before = (LeanForCausalLM.from_pretrained(d).eval() for d in ("less", "source"))
    sizes = [cache_bytes(m(tokens(1, 10), use_cache=True).past_key_values) for m in (before, model)]
    assert sizes == [10 * b * 2 for b in report["kv_bytes_per_token_bf16"]]  # the cache is float32
    assert unwrapped("generate", "less", "--prompt", "def ", "--max-new-tokens", "4")[0] == 0
    assert unwrapped("convert", "source", "--to", "skipv1", "--method", "mean-v", "--out", "mean")[0] == 0
    assert unwrapped("convert", "source", "--to", "nonlinear-query", "--out", "nonlinear")[0] == 0
    assert unwrapped("verify", "source", "nonlinear")[0] == 0


@pytest.mark.slow
def test_convert_to_latents(place, unwrapped):
    """By default, with as many columns for each layer as --cache leaves room for; the rest of the text decides."""
    save("source")
    write_corpus(Path("corpus.txt"))
    command = ("convert", "source", "--calibration", "corpus.txt", "--tokens", "2000", "--sequence-length", "32")
    code, out, err = unwrapped(*command, "--cache", "84%", "--out", "less")
    assert (code, err) == (0, "")
    report = json.loads(Path("less/conversion.json").read_text())
    assert (report["to"], report["cache"], report["calibration_tokens"]) == ("latents", 0.84, 62 * 32)
    assert "method" not in report and "ratio" not in report
    assert [sorted(at) for at in report["layers"]] == [
        ["from_keys", "key_rank", "layer", "missed", "rank", "ridge"]
    ] * 3
    ranks, keys = ([at[name] for at in report["layers"]] for name in ("rank", "key_rank"))
    assert sum(ranks + keys) == 160 and all(rank in (8, 16, 24, 32) for rank in ranks + keys)  # 0.84 * 192 = 161.28
    for layer, pair in enumerate(zip(keys, ranks, strict=True)):
        beside = " beside the keys" if pair[1] < 32 else ""
        assert f"layer {layer}: keys cached in {pair[0]} columns, values in {pair[1]}{beside}; " in out
    before, after = report["kv_bytes_per_token_bf16"]
    assert (before, after) == (384, 2 * (96 + 64))
    model, old = (LeanForCausalLM.from_pretrained(d).eval() for d in ("less", "source"))
    sizes = [cache_bytes(m(tokens(1, 10), use_cache=True).past_key_values) for m in (old, model)]
    assert sizes == [10 * b * 2 for b in (before, after)]  # the cache is float32
    assert [layer.value_rank or 32 for layer in model.config.plan.layers] == ranks
    assert [layer.key_rank or 32 for layer in model.config.plan.layers] == keys
    assert unwrapped("generate", "less", "--prompt", "def ", "--max-new-tokens", "4")[0] == 0
    assert not list(place.glob(".less*"))
    # The same by default, and as a fraction.
    for name, options in (("default", ()), ("fraction", ("--cache", "0.84"))):
        assert unwrapped(*command, *options, "--out", name)[0] == 0
        again = json.loads(Path(name, "conversion.json").read_text())
        assert again["cache"] == 0.84 and again["layers"] == report["layers"]
        assert Path(name, "model.safetensors").read_bytes() == Path("less/model.safetensors").read_bytes()
    assert unwrapped(*command, "--cache", "95%", "--layers", "1", "--out", "one")[0] == 0
    layers = json.loads(Path("one/conversion.json").read_text())["layers"]
    assert [at["rank"] + at["key_rank"] for at in layers] == [64, 48, 64]


@pytest.mark.slow
def test_convert_and_frontier_count_bytes_at_a_context(place, unwrapped):
    """Layers with windows keep their windows alone: so do the result's cache, its report and the frontier's points."""
    save("source", sliding_window=9, window_layers=[0, 2])
    write_corpus(Path("corpus.txt"))
    texts = ("--calibration", "corpus.txt", "--tokens", "2000", "--sequence-length", "32")
    options = ("--cache", "75%", "--at-context", "24")
    code, _, err = unwrapped("convert", "source", *texts, *options, "--out", "less")
    assert (code, err) == (0, "")
    report = json.loads(Path("less/conversion.json").read_text())
    before, after = report["kv_bytes_at_context_bf16"]
    old, new = (LeanForCausalLM.from_pretrained(d).eval() for d in ("source", "less"))
    for model, size in ((old, before), (new, after)):
        cache = model(tokens(1, 24), use_cache=True).past_key_values
        assert size * 2 == cache_bytes(cache) and size == model.config.plan.kv_bytes(24, torch.bfloat16)
    assert 0.7 < after / before <= 0.75
    said = f"takes {after:,} bytes at 24 tokens in bfloat16, {after / before:.1%} of"
    assert said in Path("less/README.md").read_text()
    score = ("--evaluate", "corpus.txt", "--evaluate-tokens", "64", "--contexts", "0", "--calibrations", "1")
    kinds = ("--kinds", "latents:75%", "--cache-bits", "16", "--at-context", "24")
    code, _, err = unwrapped("frontier", "source", *texts, *score, *kinds, "--out", "frontier")
    assert (code, err) == (0, "")
    record = json.loads(Path("frontier/frontier.json").read_text())
    assert record["source"]["bytes_per_token"] == before / 24
    assert [point["bytes_per_token"] * 24 for point in record["points"]][1] == pytest.approx(after, rel=0.05)
    for command in ("convert", "frontier"):
        asked = (command, "source", *texts, *(score if command == "frontier" else ()), "--at-context", "99999")
        code, _, err = unwrapped(*asked, "--out", "never")
        assert code == 2 and "--at-context must be from 1 to" in err


@pytest.mark.slow
@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_every_command_reads_files_of_tokens(place, unwrapped, has_tokenizer):
    """In the checkpoint's own tokens, with what its tokenizer puts around a text, if it has one."""
    save("source")
    torch.randint(97, (8000,)).numpy().astype("uint16").tofile("tokens.bin")
    for file in [] if has_tokenizer else Path("source").glob("tokenizer*"):
        file.unlink()
    texts = ("--calibration", "tokens.bin", "--tokens", "2000", "--sequence-length", "32", "--evaluate", "tokens.bin")
    frontier = ("--kinds", "latents:75%", "--contexts", "0", "--calibrations", "1", "--evaluate-tokens", "64")
    uptraining = ("--data", "tokens.bin", "--steps", "2", "--batch-size", "2", "--context-length", "16")
    for command, *options in (
        ("eval", "source", "--data", "tokens.bin", "--context-length", "16"),
        ("convert", "source", "--cache", "75%", *texts, "--out", "less"),
        ("frontier", "source", *texts, *frontier, "--out", "frontier"),
        ("uptrain", "source", *uptraining, "--evaluation-sequences", "2", "--out", "more"),
    ):
        code, _, err = unwrapped(command, *options)
        assert (code, err) == (0, ""), command
    assert Path("more/tokenizer.json").exists() == has_tokenizer


def test_the_ratio_is_one_half_where_it_is_not_given(place, unwrapped):
    save("source")
    for name, options in (("default", ()), ("half", ("--ratio", "0.5")), ("quarter", ("--ratio", "0.25"))):
        assert unwrapped("convert", "source", "--to", "skipv1", "--method", "svd", *options, "--out", name)[0] == 0
    ratios = [json.loads(Path(n, "conversion.json").read_text())["ratio"] for n in ("default", "half", "quarter")]
    assert ratios == [0.5, 0.5, 0.25]
    weights = [Path(name, "model.safetensors").read_bytes() for name in ("default", "half", "quarter")]
    assert weights[0] == weights[1] != weights[2]


def test_heads_that_cannot_be_chosen_are_reported(place, unwrapped):
    save("source", "identity-query")
    write_corpus(Path("corpus.txt"))
    arguments = ("--to", "skipv1", "--calibration", "corpus.txt", "--tokens", "2000", "--out", "result")
    code, out, _ = unwrapped("convert", "source", *arguments)
    assert code == 0
    assert "layer 1: heads [0, 1] keep their values" in out and "their order fixed by query 'identity'" in out


def test_too_little_temporary_space(place, unwrapped, monkeypatch):
    save("source")
    write_corpus(Path("corpus.txt"))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10_000))
    arguments = ("--to", "skipv1", "--calibration", "corpus.txt", "--tokens", "2000", "--out", "result")
    code, _, err = unwrapped("convert", "source", *arguments)
    assert code == 2
    assert "calibration needs 0.9 MB in " in err and "save 0.2 MB by --no-refit-lent, or set TMPDIR" in err
    assert not Path("result").exists() and not list(place.glob(".result*"))


def test_shares_of_the_cache() -> None:
    for text, share in (("84%", 0.84), ("0.84", 0.84), (" 66.7% ", 0.667), ("99.9999%", 0.999999), ("0.5%", 0.005)):
        assert read_share(text) == pytest.approx(share, rel=1e-15)
    for text in ("", "84 %", "1.0", "100.0%", "+5%", ".5", "9" * 5000, "5%\n5%"):
        with pytest.raises(LeanError, match="--cache is a share of the source's cache, such as 75%, found"):
            read_share(text)


def test_a_ratio_for_latents_is_refused_without_the_command_too(tmp_path) -> None:
    """Nothing that is asked for is left out silently."""
    save(str(tmp_path / "source"))
    convert = partial(Conversion, open_checkpoint(tmp_path / "source"), "latents")
    with pytest.raises(LeanError, match="`ratio` is for `to=merged-values`, skipv1 and gqa; say by `cache`"):
        convert(ratio=0.25)
    for share in (0.0, 1.0, float("nan")):
        with pytest.raises(LeanError, match="is out of reach"):
            convert(cache=share)


def test_lists_of_layers() -> None:
    assert _read_layers("5,2, 8-10") == (2, 5, 8, 9, 10)
    for text in ("", "1-", "-1", "3-2", "1,,2", "1.5", "9" * 5000):
        with pytest.raises(LeanError, match="--layers is a list like"):
            _read_layers(text)


def test_only_causal_models_are_converted() -> None:
    with pytest.raises(LeanError, match="its task is 'masked_lm'"):
        target_config(tiny("gpt", task="masked_lm"), 0.5)


def test_target() -> None:
    assert target_config(tiny("gpt"), 0.5).key_value == {"type": "first_layer_values", "ratio": 0.5}
