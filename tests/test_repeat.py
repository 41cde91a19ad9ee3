"""Steps whose kernels are called again: the same numbers, bit by bit, and only where all that is computed is known."""

import gc
from weakref import ref

import pytest
import torch
from decoding import build
from product.mechanisms import CASES, Case
from torch import Tensor, nn

from leanqkv.inference.batch import Row, Scheduler
from leanqkv.inference.cache import allocate_cache, keep_rows, let_grow
from leanqkv.inference.decoder import Decoder
from leanqkv.inference.repeat import RepeatedLayers, Step
from leanqkv.inference.step import compiled_kernels

# Steps that cross the end of a block of 64 tokens, and of what a part of a head has.
PROMPT, STEPS, BATCH, ROOM = 118, 16, 3, 256
# Every step of these is made of the kernels of usual layers; of all others some operator of PyTorch's is a part.
REPEATED = {
    *("baseline", "biases and qk_norm", "borrowed-values", "borrowed-values:heads=…", "cla", "cla-v", "fusedkv-lite"),
    *("gqa", "gqa+skipv1", "identity-key", "identity-query", "identity-value", "latent-keys", "latent-values", "mqa"),
    *("nonlinear-query", "nonlinear-query:anchor=linear", "nonlinear-key", "nonlinear-key:anchor=linear+gqa"),
    *("nonlinear-value", "residual-query"),
    *("prefix", "shared blocks", "skipv0", "skipv1", "skipv1-yoco", "skipv2", "skipv3", "skipv4", "svformer"),
    *("values-from-keys", "yoco", "yoco-v"),
}

# And these, of which the first step lays the window out anew.
WINDOWS = {"sliding_window": STEPS - 2, "yoco:local=true": STEPS - 3}
# These too if there are no rotary positions, which heads that attention gives are turned back by.
WITHOUT_ROTATION = {"keys-as-values", "keys-as-values+skipv1"}

pytestmark = pytest.mark.skipif(not compiled_kernels(), reason="there is no compiler")


@pytest.fixture
def repeated(monkeypatch) -> list[Step]:
    """The steps that were run again, as often as they were."""
    found: list[Step] = []
    run = Step.run

    def counted(self: Step, *given):
        found.append(self)
        return run(self, *given)

    monkeypatch.setattr(Step, "run", counted)
    return found


def decode(
    decoder: Decoder, steps: int = STEPS, length: int = PROMPT, batch: int = BATCH, mask: Tensor | None = None
) -> Tensor:
    """The logits [steps, batch, vocab_size] of drawn tokens."""
    draw = torch.Generator().manual_seed(0)
    vocabulary = decoder.config.vocab_size
    prompt = torch.randint(1, vocabulary, (batch, length), generator=draw)
    first = decoder.prefill(prompt, mask, room=steps)
    tokens = torch.randint(1, vocabulary, (steps, batch), generator=draw)
    return torch.stack([first, *(decoder.step(one) for one in tokens)])


def as_written(decoder: Decoder) -> Decoder:
    """Let every step run as it is written."""
    layers = decoder.model.model._run_layers
    assert isinstance(layers, RepeatedLayers)
    decoder.model.model._run_layers = layers.plain
    return decoder


@pytest.mark.parametrize("bits", [None, "8/4"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_repeated_steps_are_those_that_are_written(case: Case, bits: str | None, repeated):
    model = case.model(max_position_embeddings=ROOM).float()
    found, expected = decode(Decoder(model, cache_bits=bits)), decode(as_written(Decoder(model, cache_bits=bits)))
    assert found.equal(expected)
    # But for the first one, and those after the ends of blocks and parts; codes also at these ends.
    may = case.name in REPEATED or (case.shape == "gpt" and case.name in WITHOUT_ROTATION)
    count = STEPS - (2 if bits is None else 4) if may else 0
    assert len(repeated) == (WINDOWS.get(case.name, count) if bits is None else count)


@pytest.mark.parametrize("bits", [None, "8/4"])
@pytest.mark.parametrize("mechanism", ["gqa", "skipv1", "latent-keys", "values-from-keys"])
def test_rows_of_several_lengths(mechanism: str, bits: str | None, repeated):
    """Padded rows, and in a quantized cache rows that fill their blocks at different times. What turns keys back is
    then a table for every row, and longer in every step."""
    model = build("llama", mechanism, max_position_embeddings=ROOM)
    mask = torch.ones(BATCH, PROMPT, dtype=torch.long)
    mask[0, :60], mask[2, :5] = 0, 0
    found, expected = (
        decode(one, mask=mask) for one in (Decoder(model, cache_bits=bits), as_written(Decoder(model, cache_bits=bits)))
    )
    assert found.equal(expected)
    assert bool(repeated) == (mechanism != "values-from-keys")


@pytest.mark.parametrize("batch", [1, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_batches_and_dtypes(batch: int, dtype: torch.dtype, repeated):
    """More rows than the kernels take, and numbers that they do not, are computed as they are written."""
    model = build("llama", "skipv1").to(dtype)
    found, expected = (decode(one, length=20, batch=batch) for one in (Decoder(model), as_written(Decoder(model))))
    assert found.equal(expected)
    assert bool(repeated) == (batch == 1 and dtype == torch.bfloat16)


@torch.inference_mode()
def changed(decoder: Decoder, between: str) -> Tensor:
    """Logits of steps, some of them after a change of the cache or of the model."""
    prompt = torch.arange(1, 41).view(2, 20)
    found = [decoder.prefill(prompt, room=8 if between == "room" else 30)]
    token = torch.tensor([5, 6])
    let_grow(decoder.cache)
    for number in range(16):
        if number in (5, 10):
            if between == "rows":
                token = token[:1]
                keep_rows(decoder.cache, torch.tensor([0]), decoder.cache.get_seq_length())
            if between == "prompt":
                found.append(decoder.prefill(prompt + number, room=30))
            if between == "weights":
                decoder.model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
            if between == "crop":
                decoder.cache.crop(-2)
        found.append(decoder.step(token))
    return torch.cat(found)


CHANGES = [(between, bits) for between in ("rows", "room", "prompt", "weights") for bits in (None, "8")]


@pytest.mark.parametrize(("between", "bits"), [*CHANGES, ("crop", None)])  # a quantized cache cannot be cropped
def test_changes_between_steps_are_seen(between: str, bits: str | None, repeated):
    made = [Decoder(build("llama", "gqa"), cache_bits=bits) for _ in range(2)]
    assert changed(made[0], between).equal(changed(as_written(made[1]), between))
    assert len(repeated) >= 10


def test_caches_in_turns(repeated):
    """Batches that one decoder serves in turns have steps of their own."""
    model = build("llama", "skipv1")
    given = [Row(torch.tensor([1 + place, 2, 3, 4 + place]), 12) for place in range(3)]
    answers = []
    for decoder in (Decoder(model), as_written(Decoder(model))):
        schedulers = [Scheduler(decoder, max_tokens=100) for _ in given]
        rows = [Row(row.prompt, row.max_new_tokens) for row in given]
        for scheduler, row in zip(schedulers, rows, strict=True):
            scheduler.waiting.append(row)
        while any(scheduler.busy for scheduler in schedulers):
            for scheduler in schedulers:
                scheduler.advance()
        answers.append([row.tokens for row in rows])
    assert answers[0] == answers[1]
    assert len({id(step) for step in repeated}) >= 3


def test_what_is_hooked_runs_as_it_is_written(repeated):
    decoder = Decoder(build("llama"))
    seen: list[int] = []
    decoder.model.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    decode(decoder, length=20)
    assert len(seen) == STEPS + 1
    assert not repeated


def test_what_computes_beside_the_kernels_is_computed_again(repeated):
    """A layer whose output is scaled by an operator of PyTorch's, by a number that changes."""
    made = [Decoder(build("llama")) for _ in range(2)]
    for decoder in made:
        block: nn.Module = decoder.model.model.layers[1]
        forward, steps = block.forward, iter(range(1, 100))

        def scaled(*given, forward=forward, steps=steps, **named):
            stream, *rest = forward(*given, **named)
            return stream * next(steps), *rest

        block.forward = scaled  # type: ignore[method-assign]
    assert decode(made[0], length=20).equal(decode(as_written(made[1]), length=20))
    assert not repeated


def test_a_cache_that_is_dropped_leaves_nothing_behind():
    decoder = Decoder(build("llama"))
    decode(decoder, length=20)
    layers = decoder.model.model._run_layers
    held = ref(decoder.cache.layers[0])  # type: ignore[union-attr]
    assert len(layers.steps) == 1
    decoder.cache = None
    gc.collect()
    assert not layers.steps
    assert held() is None


def test_what_never_repeats_is_not_noted_for_ever(monkeypatch):
    """Of three caches three steps each; a model that repeats some goes on."""
    noted: list[Step] = []
    note = Step.note
    monkeypatch.setattr(Step, "note", lambda self, *given: (noted.append(self), note(self, *given))[1])
    never = Decoder(build("llama", "mla"))
    for _ in range(5):
        decode(never, steps=6, length=9)
    assert len(noted) == 9
    decode(Decoder(build("llama")), steps=6, length=9)
    assert len(noted) == 10


def test_more_rows_than_are_repeated_do_not_end_it_for_others(repeated):
    decoder, counts = Decoder(build("llama")), []
    for batch in (1, 33, 33, 33, 1):
        before = len(repeated)
        decode(decoder, steps=6, length=9, batch=batch)
        counts.append(len(repeated) - before)
    assert counts == [5, 0, 0, 0, 5]


@pytest.mark.parametrize("kind", ["longer", "short", "by head"])
@torch.inference_mode()
def test_a_mask_of_another_shape_is_no_step_like_the_last(kind: str, repeated):
    """It is computed as it is written, or refused as it is there."""
    found: list[Tensor | str] = []
    model, ids = build("llama"), torch.arange(1, 19).view(2, 9)
    for decoder in (Decoder(model), as_written(Decoder(model))):
        cache = allocate_cache(decoder.config, 64)
        decoder.model(ids, past_key_values=cache)
        for number in range(4):
            mask = torch.ones(2, 1, 1, 10 + number, dtype=torch.bool)
            mask[0, ..., :3] = False
            if number == 3 and kind == "longer":
                mask = torch.cat((mask, mask[..., -1:]), -1)
            if number == 3 and kind == "short":
                mask = mask[..., :5].clone()
            if number == 3 and kind == "by head":
                mask = mask.expand(2, 4, 1, -1).clone()
                mask[:, 1, :, :8] = False
            try:
                logits = decoder.model(ids[:, number, None], attention_mask=mask, past_key_values=cache).logits
            except RuntimeError as error:
                logits = str(error)
        found.append(logits)
    assert len(repeated) == 2
    assert found[0] == found[1] if isinstance(found[1], str) else found[0].equal(found[1])
    assert isinstance(found[1], str) == (kind != "by head")


def test_autocast_between_two_steps_is_seen(repeated):
    found = []
    for decoder in (Decoder(build("llama")), as_written(Decoder(build("llama")))):
        decoder.prefill(torch.arange(1, 10)[None], room=9)
        for _ in range(4):
            decoder.step(torch.tensor([3]))
        with torch.autocast("cpu", torch.bfloat16):
            found.append(decoder.step(torch.tensor([4])))
    assert len(repeated) == 3
    assert found[0].equal(found[1])


def test_parts_of_a_head_begin_where_they_would(repeated):
    """With more threads than heads: one part of 255 positions, two of 256."""
    model, threads = build("llama", "mqa", max_position_embeddings=300), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found, expected = (
            decode(one, steps=12, length=250, batch=1) for one in (Decoder(model), as_written(Decoder(model)))
        )
    finally:
        torch.set_num_threads(threads)
    assert found.equal(expected)
    assert repeated
