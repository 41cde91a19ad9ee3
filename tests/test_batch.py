"""Answers that are generated together: each has the tokens that it has alone, whoever comes and goes."""

import pytest
import torch
from decoding import LENGTHS, NEW, build, names, run
from shapes import tokens
from variants import SCATTERED

from leanqkv.inference import Decoder, batch
from leanqkv.inference.batch import Batch, Row, Scheduler
from leanqkv.inference.decoder import logits_warpers

SHAPES = [{}, {"sliding_window": 4}, {"mask_type": "prefix"}, {"key_value": SCATTERED}]


def rows(decoder: Decoder) -> list[Row]:
    """Prompts and answers of several lengths; every second one is sampled, each with its own settings."""
    found = []
    for number, (length, new) in enumerate(zip(LENGTHS, NEW, strict=True)):
        row = Row(tokens(1, length, seed=number)[0], new)
        if number % 2:
            row.warpers = logits_warpers(0.5 + number / 4, None, 0.9 if number == 3 else None)
            row.generator = torch.Generator().manual_seed(number)
        found.append(row)
    return found


def alone(decoder: Decoder) -> list[list[int]]:
    return [run(Scheduler(decoder, 0), [row])[row] for row in rows(decoder)]


def check(model, every: int = 2) -> None:
    decoder = Decoder(model, chunk=4)
    expected = alone(decoder)
    for steps in (0, every):
        given = rows(decoder)
        found = run(Scheduler(decoder, 10**6), given, steps)
        assert [found[row] for row in given] == expected


@pytest.mark.parametrize("mechanisms", names(), ids="+".join)
def test_every_mechanism_gives_the_tokens_of_each_row_alone(mechanisms):
    check(build("llama", *mechanisms, num_hidden_layers=6 if "skipv4" in mechanisms else 4))


@pytest.mark.parametrize("shape", ["gpt", "llama"])
@pytest.mark.parametrize("fields", SHAPES, ids=str)
def test_every_mask_gives_the_tokens_of_each_row_alone(shape, fields):
    check(build(shape, **fields), every=3)


@pytest.mark.parametrize("seed", [3, 4])
def test_a_row_alone_has_the_tokens_of_generate(seed):
    decoder = Decoder(build("llama"))
    prompt = tokens(1, 9)
    row = Row(prompt[0], 12, logits_warpers(0.8, 20, 0.9), torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
    expected = decoder.generate(prompt, max_new_tokens=12, **options)[0, 9:].tolist()
    assert run(Scheduler(decoder, 0), [row])[row] == expected
    greedy = Row(prompt[0], 12)
    assert run(Scheduler(decoder, 0), [greedy])[greedy] == decoder.generate(prompt, max_new_tokens=12)[0, 9:].tolist()


def test_rows_are_decoded_in_one_batch_and_leave_it():
    """As few steps as the longest answer needs; a cache no longer than the rows that are left."""
    decoder = Decoder(build("llama"))
    scheduler, given = Scheduler(decoder, 10**6), rows(decoder)
    scheduler.waiting.extend(given)
    for step in range(1, max(NEW) + 1):
        assert scheduler.busy
        scheduler.advance()
        running = [row for row in given if not row.done]
        assert [row for batch in scheduler._batches for row in batch.rows] == running
        if running:
            (batch,) = scheduler._batches
            held = batch._decoder.cache.layers[0].keys
            assert held.shape[0] == len(running)
            assert held.shape[2] == max(len(row.prompt) for row in running) + step - 1
    assert not scheduler.busy


def test_a_cancelled_row_is_dropped_and_the_others_go_on():
    decoder = Decoder(build("llama"), chunk=4)
    expected, given = alone(decoder), rows(decoder)
    scheduler = Scheduler(decoder, 10**6)
    scheduler.waiting.extend(given)
    found = {row: [] for row in given}
    for step in range(40):
        given[2].cancelled |= step == 2
        given[5].cancelled |= step == 6
        for row, event in scheduler.advance():
            found[row].append(event)
    assert not scheduler.busy
    for number, row in enumerate(given):
        if row.cancelled:
            assert len(found[row]) < 10
        else:
            assert found[row] == [*expected[number], None]


def test_an_error_ends_its_own_row():
    decoder = Decoder(build("llama"))
    expected, given = alone(decoder), rows(decoder)
    given[1].warpers = logits_warpers(1e-44, None, None)  # The logits become infinite.
    scheduler = Scheduler(decoder, 10**6)
    scheduler.waiting.extend(given)
    found = {row: [] for row in given}
    while scheduler.busy:
        for row, event in scheduler.advance():
            found[row].append(event)
    assert isinstance(found[given[1]][0], RuntimeError)
    assert [found[row][:-1] for row in given[2:]] == expected[2:]


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("fields", SHAPES, ids=str)
@pytest.mark.parametrize("failing", range(len(NEW)))
def test_an_error_at_a_later_token_ends_its_own_row(failing, fields, bits):
    """Also of the longest row, by which the others are padded."""

    def fail():
        raise RuntimeError("scores that are not finite")

    decoder = Decoder(build("llama", **fields), cache_bits=bits)
    expected, given = alone(decoder), rows(decoder)
    given[failing].warpers = lambda before, scores: fail() if len(given[failing].tokens) > 1 else scores
    found = run(Scheduler(decoder, 10**6), given)
    others = [row for number, row in enumerate(given) if number != failing]
    assert [found[row] for row in others] == [expected[number] for number in range(len(NEW)) if number != failing]


@pytest.mark.parametrize("fails", ["join", "begin"])
def test_an_error_between_batches_ends_the_rows_it_is_of_and_no_others(fails, monkeypatch):
    """Such as missing memory, of which two caches that become one take most."""

    def fail(*given):
        raise RuntimeError("no memory")

    decoder = Decoder(build("llama"))
    first, alike, late = (Row(tokens(1, length)[0], new) for length, new in ((9, 12), (8, 3), (7, 12)))
    scheduler = Scheduler(decoder, 10**6)
    found = {row: [] for row in (first, alike, late)}
    scheduler.waiting.extend((first, alike))
    for step in range(20):
        if step == 3:
            scheduler.waiting.append(late)
            monkeypatch.setattr(*((batch, "join_rows") if fails == "join" else (Batch, "_read_prompts")), fail)
        for row, event in scheduler.advance():
            found[row].append(event)
    assert not scheduler.busy
    assert found[alike][-1] is None and len(found[alike]) == 4
    assert isinstance(found[late][-1], RuntimeError)
    ends = found[first][-1]
    assert isinstance(ends, RuntimeError) if fails == "join" else ends is None


def test_a_long_prompt_keeps_nobody_waiting():
    """A short one that comes later has its answer before the long one is read."""
    decoder = Decoder(build("llama"), chunk=1)
    decoder.config.max_position_embeddings = 10**5
    scheduler = Scheduler(decoder, 10**6)
    long, short = Row(tokens(1, 5000)[0], 1), Row(tokens(1, 1)[0], 5)
    scheduler.waiting.append(long)
    scheduler.advance()
    scheduler.waiting.append(short)
    for _ in range(12):
        scheduler.advance()
    assert short.done and not long.tokens


def test_memory_limits_how_many_are_worked_on():
    decoder = Decoder(build("llama"))
    scheduler, given = Scheduler(decoder, 60), rows(decoder)
    scheduler.waiting.extend(given)
    scheduler.advance()
    assert len(scheduler.waiting) == len(given) - 2  # 21 and 8 of the 60 tokens; the third one would have 37
    found = {row: len(row.tokens) for row in given}
    assert [count > 0 for count in found.values()] == [True, True, False, False, False, False]
    while scheduler.busy:
        scheduler.advance()
    assert all(row.done for row in given)


@pytest.mark.parametrize("mechanisms", [(), ("skipv1",), ("mla",), ("latent-keys",)], ids="+".join)
def test_scores_are_those_of_one_forward_pass(mechanisms):
    """Of the prompt, read in chunks, and of the answer, beside rows without scores; a prompt alone is read too."""
    model = build("llama", *mechanisms)
    decoder = Decoder(model, chunk=4)
    given = rows(decoder)
    for row in given[:4]:
        row.top, row.reads_scores = 3, True
    given[2].max_new_tokens = 0
    given[4].top = 2
    found = run(Scheduler(decoder, 10**6), given, every=1)
    assert found[given[2]] == []
    assert [len(row.scores) for row in given] == [9 + 12, 3 + 5, 17, 1 + 9, 1, 0]
    for row in given[:5]:
        text = torch.cat((row.prompt, torch.tensor(found[row], dtype=torch.long)))
        with torch.no_grad():
            expected = model(text[None]).logits[0].log_softmax(-1)[:-1]
        assert [score.token for score in row.scores] == text[len(text) - len(row.scores) :].tolist()
        scores = [score for score in row.scores if score.logprob is not None]
        assert len(scores) == len(row.scores) - row.reads_scores
        expected = expected[len(expected) - len(scores) :]
        chosen = expected.gather(-1, torch.tensor([[score.token] for score in scores], dtype=torch.long).view(-1, 1))
        assert [score.logprob for score in scores] == pytest.approx(chosen[:, 0].tolist(), abs=1e-4)
        best = [score.top[0][1] for score in scores]
        assert best == pytest.approx(expected.max(-1).values.tolist(), abs=1e-4)
        assert all(len(score.top) == row.top for score in scores)


@pytest.mark.parametrize(
    "mechanisms, bits, count, expected",
    [
        ((), None, 1, 512),
        ((), None, 16, 256),
        ((), "4", 16, 512),
        (("latent-keys",), None, 1, 4096),
        (("mla",), None, 16, 256),
        (("latent-values",), "4", 16, 4096),
    ],
)
def test_pieces_of_prompts_are_small_where_that_costs_nothing(mechanisms, bits, count, expected):
    """Others wait for a piece. Of quantized rows it is as large as alone."""
    decoder = Decoder(build("llama", *mechanisms), cache_bits=bits)
    assert Batch(decoder, [Row(tokens(1, 9)[0], 1) for _ in range(count)])._decoder.chunk == expected
    assert decoder.chunk is None
