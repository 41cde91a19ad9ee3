"""The precision of a cache as an option: what it can be, and that every command keeps the cache that is asked for."""

import json
from typing import Any

import pytest
import torch
from decoding import build
from product.mechanisms import CASES
from product.mechanisms import Case as Model
from serving import save
from shapes import randomize, tiny, tokens
from starlette.testclient import TestClient
from torch import Tensor
from torch.nn import functional as F

from leanqkv import LeanError, LeanForCausalLM, cache_bytes
from leanqkv.cache_bits import PLAIN, CacheBits
from leanqkv.checkpoints.tokenizer import load_tokenizer
from leanqkv.data.evaluation import evaluation_text
from leanqkv.evaluate.states import obstacle
from leanqkv.evaluate.strided import strided_windows
from leanqkv.inference import Decoder
from leanqkv.inference.bench import measure
from leanqkv.inference.cache import token_bytes
from leanqkv.inference.history import History
from leanqkv.inference.text import TextStream, end_tokens
from leanqkv.model.cache_quantized import BITS, LeanQuantizedCache, quantized_bytes_per_token

CHUNK, NEW = 70, 45
LONG = {"max_position_embeddings": 512}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


# --- what is meant ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "bits", "written"),
    [
        (None, (16, 16), "16"),
        (16, (16, 16), "16"),
        ("16", (16, 16), "16"),
        ((16, 16), (16, 16), "16"),
        (4, (4, 4), "4"),
        ("8/8", (8, 8), "8"),
        ("8/4", (8, 4), "8/4"),
        ((2, 8), (2, 8), "2/8"),
        ([4, 2], (4, 2), "4/2"),
        (CacheBits(8, 2), (8, 2), "8/2"),
    ],
)
def test_one_meaning_of_every_form(given, bits, written):
    found = CacheBits.of(given)
    assert (found.key_bits, found.value_bits) == bits
    assert (str(found), found.name, found.quantized) == (written, f"{written} bits", bits != (16, 16))
    assert CacheBits.of(written) == found


@pytest.mark.parametrize(
    "given",
    [
        3,
        0,
        -4,
        "3",
        "",
        "/",
        "8/",
        "8/4/2",
        (8, 4, 2),
        (),
        "16/8",
        (8, 16),
        "8/16",
        "8 bits",
        "٤",
        8.0,
        True,
        (4, True),
    ],
)
def test_other_bits_are_refused_with_what_is_valid(given):
    with pytest.raises(LeanError) as error:
        CacheBits.of(given)
    assert str(error.value).startswith("`cache_bits` is 16, 8, 4, 2, or KEYS/VALUES of 8, 4 and 2, such as 8/4; found ")
    with pytest.raises(LeanError, match="`cache_bits` is 16"):
        Decoder(LeanForCausalLM(tiny("gpt")), cache_bits=given)


def test_lists_name_each_once():
    assert CacheBits.list_of("16, 8/4,4,4/4") == [PLAIN, CacheBits(8, 4), CacheBits(4, 4)]
    with pytest.raises(LeanError, match="found ''"):
        CacheBits.list_of("16,")


def test_every_precision_of_the_cache_is_an_option():
    for key_bits in BITS:
        for value_bits in BITS:
            assert CacheBits(key_bits, value_bits).quantized


# --- decoding ---------------------------------------------------------------------------------------------------------


def by_generate(model: LeanForCausalLM, bits: CacheBits, ids: Tensor) -> Tensor:
    """The tokens of `generate` with the same cache and chunks as those of a Decoder."""
    held = LeanQuantizedCache("kivi", model.config, key_bits=bits.key_bits, value_bits=bits.value_bits)
    chunk = CHUNK if model.config.mask_type != "prefix" else None
    options: dict[str, Any] = {"prefill_chunk_size": chunk, "eos_token_id": None, "pad_token_id": 0}
    options |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    return model.generate(ids, **options, past_key_values=held)


def by_decoder(model: LeanForCausalLM, bits: CacheBits, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    decoder = Decoder(model, chunk=CHUNK, cache_bits=str(bits))
    return decoder.generate(ids, mask, max_new_tokens=NEW, eos_token_id=[], pad_token_id=0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_of_every_mechanism_are_those_of_generate(case: Model):
    """Of two prompts of one length; and of three of which two are padded, each as of the prompt alone. In float64, in
    which codes leave no choice."""
    model, bits, ids = case.model(**LONG), CacheBits(4, 2), tokens(3, 150)
    assert torch.equal(by_decoder(model, bits, ids[:2]), by_generate(model, bits, ids[:2]))
    mask, starts = torch.ones(3, 150, dtype=torch.long), [45, 0, 84]
    for row, start in enumerate(starts):
        mask[row, :start] = 0
    found = by_decoder(model, bits, ids * mask, mask)
    for row, start in enumerate(starts):
        assert torch.equal(found[row : row + 1, start:], by_generate(model, bits, ids[row : row + 1, start:])), row


# MLA whose latent or rotary key another layer has.
SHARED_LATENTS = [
    Model(f"mla+{name}", "llama", ("mla", name), {"num_hidden_layers": 4})
    for name in ("skipv2", "svformer", "resformer", "yoco-v", "yoco", "cla-v", "cla")
]


@pytest.mark.parametrize("case", CASES + SHARED_LATENTS, ids=lambda case: case.name)
def test_every_mechanism_is_read_where_it_lies(case: Model, monkeypatch, needs_compiler):
    """No tensor of the cache is made whole in a step, of rows of different lengths; else nothing is gained."""
    made, whole = [], History.whole
    monkeypatch.setattr(History, "whole", lambda states: (made.append(states), whole(states))[1])
    ids, mask = tokens(2, 100), torch.ones(2, 100, dtype=torch.long)
    mask[0, :20] = 0
    for window in (None, 80):
        fields = {"sliding_window": window} if window else {}
        if window and (
            case.name == "prefix" or "values-from-keys" in case.mechanisms or "sliding_window" in case.fields
        ):
            continue
        model = case.model(**LONG, **fields).float()
        for bits in ("8", "8/4", "4", "2"):
            decoder = Decoder(model, cache_bits=bits)
            decoder.prefill(ids * mask, mask, room=1)
            decoder.step(ids[:, 0])
            assert not made, (window, bits)
    attention = model.model.layers[0].self_attn
    if up := getattr(attention, "k_up_proj", None) or getattr(attention, "v_up_proj", None):
        up.register_forward_hook(lambda *_: None)
        decoder = Decoder(model, cache_bits=4)
        decoder.prefill(ids, room=1)
        decoder.step(ids[:, 0])
        assert made, "a hooked projection is called, on all that is cached"


@pytest.mark.parametrize("case", CASES + SHARED_LATENTS, ids=lambda case: case.name)
def test_logits_of_every_mechanism_by_the_kernel(case: Model, needs_compiler):
    """Of single tokens over the end of a block, in float32, against the same history made whole: of one that was
    computed otherwise a rounding may decide which code an entry gets, which some mechanisms enlarge."""
    model, ids = case.model(**LONG).float(), tokens(2, 132)
    decoder, other = Decoder(model, cache_bits="8/4"), Decoder(model, cache_bits="8/4")
    prefix = {"prefix_mask": torch.ones(2, 126)} if model.config.mask_type == "prefix" else {}
    decoder.prefill(ids[:, :126], room=6)
    with torch.inference_mode():
        for place in range(126, 132):
            other.prefill(ids[:, :126], room=6)
            for before in range(126, place):
                other.step(ids[:, before])
            new = ids[:, place : place + 1]
            expected = model(new, past_key_values=other.cache, **prefix).logits[:, -1]
            found = decoder.step(new[:, 0])
            assert (found - expected).abs().max() <= 1e-4 * expected.abs().max(), place


@pytest.mark.parametrize("mechanisms", [(), ("gqa", "skipv1"), ("mla",), ("latent-keys", "latent-values")])
def test_tokens_in_float32(mechanisms):
    model = randomize(LeanForCausalLM(tiny("llama", *mechanisms, **LONG)), std=0.3).eval()
    ids = tokens(3, 150)
    found = by_decoder(model, CacheBits(4, 4), ids)
    assert torch.equal(found, by_generate(model, CacheBits(4, 4), ids))
    plain = Decoder(model).generate(ids, max_new_tokens=NEW, eos_token_id=[], pad_token_id=0)
    assert not torch.equal(found, plain), "nothing was rounded"


def test_the_cache_is_the_one_that_is_asked_for():
    model = randomize(LeanForCausalLM(tiny("llama", **LONG)), std=0.3).eval()
    plan = model.config.plan
    for given, bits in (((8, 4), (8, 4)), (2, (2, 2))):
        decoder = Decoder(model, cache_bits=given)
        decoder.prefill(tokens(2, 130), room=3)
        assert {(layer.key_bits, layer.value_bits) for layer in decoder.cache.layers} == {bits}
        expected = 2 * (128 * quantized_bytes_per_token(plan, *bits) + plan.kv_bytes(2, torch.float32))
        assert cache_bytes(decoder.cache) == token_bytes(decoder.cache) == expected
        assert 2 * decoder.cache_bits.kv_bytes(plan, 130, torch.float32) == expected
    for given in (None, 16, "16"):
        decoder = Decoder(model, cache_bits=given)
        decoder.prefill(tokens(2, 130), room=3)
        assert token_bytes(decoder.cache) == 2 * plan.kv_bytes(130, torch.float32)
        assert decoder.cache_bits.kv_bytes(plan, 130, torch.float32) == plan.kv_bytes(130, torch.float32)


@pytest.mark.parametrize("window", [4, 100, 150])
def test_the_bytes_of_windows(window):
    """Of every second layer, which keeps the pages that it sees."""
    model = randomize(
        LeanForCausalLM(tiny("llama", sliding_window=window, window_layers=[0, 2], **LONG)), std=0.3
    ).eval()
    bits, ids = CacheBits(4, 2), tokens(1, 260)
    cache = bits.cache(model.config)
    for at in range(0, 260, 5):
        with torch.no_grad():
            model(ids[:, at : at + 5], past_key_values=cache)
        assert cache_bytes(cache) == bits.kv_bytes(model.config.plan, at + 5, torch.float32), at


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cache-bits") / "model"
    save(directory, positions=512)
    (directory.parent / "text.txt").write_text("def function(argument):\n    return argument, function\n" * 30)
    return directory


def test_bench_measures_every_precision_in_turns(cli, directory, tmp_path):
    out = tmp_path / "out"
    sizes = ("--context", "130", "--batch", "2", "--new-tokens", "2", "--rounds", "2", "--dtype", "fp32")
    code, shown, errors = cli("bench", str(directory), *sizes, "--cache-bits", "16,8/4,2", "--out", str(out))
    assert (code, errors) == (0, "") and "8/4 bits" in shown
    record = json.loads((out / "bench.json").read_text())
    assert [row["cache_bits"] for row in record["rows"]] == ["16", "8/4", "2"]
    plan = LeanForCausalLM.from_pretrained(directory).config.plan
    for row, bits in zip(record["rows"], (None, (8, 4), (2, 2)), strict=True):
        newest = 2 * plan.kv_bytes(2, torch.float32)
        size = 2 * 130 * plan.kv_bytes_per_token(torch.float32)
        size = size if bits is None else 2 * 128 * quantized_bytes_per_token(plan, *bits) + newest
        assert row["cache"] == row["cache_formula"] == size
    sizes = record["models"][str(directory)]["quantized_bytes_per_token"]
    assert sizes == {"8/4": quantized_bytes_per_token(plan, 8, 4), "2": quantized_bytes_per_token(plan, 2, 2)}
    first, other = ([row[name]["rounds"] for name in ("prefill", "decode")] for row in record["rows"][:2])
    prefill = sorted(before / one for one, before in zip(other[0], first[0], strict=True))
    decode = sorted(one / before for one, before in zip(other[1], first[1], strict=True))
    spreads = [f"{sum(shares) / 2:.2f} ({shares[0]:.2f}–{shares[1]:.2f})" for shares in (prefill, decode)]
    lines = (out / "table.md").read_text().splitlines()[2:]
    assert lines[0].endswith("| 1.00 (1.00–1.00) | 1.00 (1.00–1.00) |")
    assert lines[1].startswith(f"| {directory}, 8/4 bits |")
    assert lines[1].endswith(f"| {spreads[0]} | {spreads[1]} |")
    assert f"{directory}, 2 bits" in (out / "report.html").read_text()


def test_precisions_take_turns_in_every_round(monkeypatch):
    model, order = build("llama"), []
    time = measure.__globals__["_time"]
    record = lambda decoder, *given: (order.append(str(decoder.cache_bits)), time(decoder, *given))[1]  # noqa: E731
    monkeypatch.setitem(measure.__globals__, "_time", record)
    measure({"a": model}, (8,), (1,), precisions=[CacheBits(4, 4), PLAIN], new_tokens=2, rounds=2)
    assert order == ["4", "16"] * 3  # once before anything is timed


def test_generate_prints_the_tokens_of_the_decoder(cli, directory):
    prompt = "def function(argument): " * 30
    options = ("--max-new-tokens", "40", "--temperature", "0", "--device", "cpu")
    code, shown, errors = cli("generate", str(directory), "--prompt", prompt, *options, "--cache-bits", "4/2")
    model, tokenizer = LeanForCausalLM.from_pretrained(directory), load_tokenizer(directory)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    decoder = Decoder(model, cache_bits=(4, 2))
    assert (code, shown) == (0, prompt + expected_text(decoder, tokenizer, ids[0].tolist(), 40) + "\n")
    assert ids.shape[1] > 128 and f"{cache_bytes(decoder.cache):,} allocated, in 4/2 bits" in errors


def expected_text(decoder: Decoder, tokenizer: Any, prompt: list[int], new: int) -> str:
    ends = end_tokens(decoder.generation_config, tokenizer)
    output = decoder.generate(torch.tensor([prompt]), max_new_tokens=new, eos_token_id=ends)[0, len(prompt) :].tolist()
    stream = TextStream(tokenizer, prompt)
    return "".join(stream.add(token) for token in output if token not in ends) + stream.finish()


def test_the_server_answers_as_the_decoder_alone(directory):
    """Requests of several lengths at once, which come and go."""
    from leanqkv.inference.serve import build_app

    model, tokenizer = LeanForCausalLM.from_pretrained(directory).eval(), load_tokenizer(directory)
    app, generator = build_app(model, tokenizer, "model", CacheBits(4, 2))
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (150, 60, 131, 3)]
    with TestClient(app) as client:
        body = {"model": "model", "prompt": prompts, "temperature": 0, "max_tokens": 80}
        choices = client.post("/v1/completions", json=body).json()["choices"]
    generator.close()
    decoder = Decoder(model, cache_bits=(4, 2))
    assert [choice["text"] for choice in choices] == [expected_text(decoder, tokenizer, p, 80) for p in prompts]


def test_the_server_says_its_bits_and_counts_them(monkeypatch, cli, directory):
    from leanqkv.inference import serve

    seen = {}

    def run(path, *, started, **given):
        seen.update(given)
        started(path.name, "http://127.0.0.1:8000/v1")

    monkeypatch.setattr(serve, "serve", run)
    code, shown, _ = cli("serve", str(directory), "--cache-bits", "8/4")
    assert (code, shown) == (0, "model: http://127.0.0.1:8000/v1, cache in 8/4 bits (Ctrl-C ends it)\n")
    assert seen["cache_bits"] == CacheBits(8, 4)
    model = LeanForCausalLM.from_pretrained(directory)
    monkeypatch.setattr(serve, "free_memory", lambda _: 8e9)
    for bits in (PLAIN, CacheBits(8, 4)):
        assert serve._cache_tokens(model, bits) == 1e9 // bits.bytes_per_token(model.config.plan, torch.float32)


@torch.no_grad()
def loss_by_tokens(model: LeanForCausalLM, ids: Tensor, context: int, stride: int, bits: CacheBits) -> Tensor:
    """The losses of windows that are read one token at a time through a cache of their own."""
    losses = []
    for start, scored in strided_windows(len(ids), context, stride):
        cache = bits.cache(model.config)
        window = ids[start : start + min(context, len(ids) - 1) + 1]
        logits = [model(token[None, None], past_key_values=cache).logits[0, 0] for token in window[:-1]]
        losses.append(F.cross_entropy(torch.stack(logits), window[1:], reduction="none")[-scored:])
    return torch.cat(losses)


def test_eval_reads_the_quantized_cache_as_decoding_does(cli, directory, tmp_path):
    text, out = str(directory.parent / "text.txt"), tmp_path / "record.json"
    options = ("--data", text, "--context-length", "150", "--stride", "100", "--batch-size", "2", "--device", "cpu")
    code, shown, errors = cli("eval", str(directory), *options, "--cache-bits", "4/2", "--out", str(out))
    assert code == 0, errors
    record, model = json.loads(out.read_text()), LeanForCausalLM.from_pretrained(directory).eval()
    data = evaluation_text(text, tokenizer=directory, vocab_size=model.config.vocab_size)
    ids = torch.from_numpy(data.tokens.astype("int64"))
    assert len(ids) > 300
    losses = loss_by_tokens(model, ids, 150, 100, CacheBits(4, 2))
    assert record["figures"]["loss"] == pytest.approx(float(losses.double().mean()), rel=1e-5)
    size = quantized_bytes_per_token(model.config.plan, 4, 2)
    bits = {"key_bits": 4, "value_bits": 2, "bytes_per_token": size, "tokens_read_together": 64}
    assert record["cache"] == bits and f"cache in 4/2 bits, {size:,.0f} bytes per token" in shown
    out.unlink()
    assert cli("eval", str(directory), *options, "--out", str(out))[0] == 0
    plain = json.loads(out.read_text())
    assert "cache" not in plain and abs(plain["figures"]["loss"] - record["figures"]["loss"]) > 1e-4
    out.unlink()
    against = ("--cache-bits", "4/2", "--against", str(directory), "--out", str(out))
    assert cli("eval", str(directory), *options, *against)[0] == 0
    both = json.loads(out.read_text())
    assert both["before"]["loss"] == pytest.approx(plain["figures"]["loss"], rel=1e-6)
    assert both["after"]["loss"] == pytest.approx(record["figures"]["loss"], rel=1e-6)
    assert both["cache"] == bits


@pytest.mark.parametrize(
    ("fields", "length", "words"),
    [
        ({}, 127, "but a sequence has 127 tokens; give sequences of 128 or more"),
        ({"mask_type": "prefix"}, 128, "but a model with prefixes reads them whole"),
        ({"rope_parameters": DYNAMIC}, 513, "but rotary frequencies change behind 512 positions"),
    ],
)
def test_what_no_block_could_read_is_refused(fields, length, words):
    config = tiny("llama", **LONG, **fields)
    found = obstacle(CacheBits(4, 4), config, length)
    assert found is not None and found.startswith(f"a quantized cache is read by blocks of 64 tokens, {words}")
    assert obstacle(PLAIN, config, length) is None is obstacle(CacheBits(4, 4), tiny("llama", **LONG), 128)
