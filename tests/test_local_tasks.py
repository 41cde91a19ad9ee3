"""Tasks made of local files: their questions, scores by hand, through caches too, and how two models differ."""

import json
import math
import random
import sys
from pathlib import Path

import pytest
import tasks as benchmark
import torch
from scipy.stats import binom
from shapes import randomize, tiny

from leanqkv import LeanError, LeanForCausalLM
from leanqkv.cache_bits import CacheBits
from leanqkv.checkpoints.tokenizer import load_tokenizer
from leanqkv.data.tokenizer import train_tokenizer
from leanqkv.evaluate import harness
from leanqkv.evaluate.harness import load_tasks, paired_answers, task_scores, tasks_hash
from leanqkv.model.cache_quantized import BLOCK

pytest.importorskip("lm_eval")
VOCABULARY, POSITIONS = 400, 512
WORDS = """
    the fox jumped over a lazy dog while many small birds were singing of summer rain and winter storms
"""


def prose(sentences: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    return " ".join(
        " ".join(draw.choices(WORDS.split(), k=draw.randint(5, 15))).capitalize() + "." for _ in range(sentences)
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A model with its tokenizer, book.txt, and questions in PIQA's format."""
    root = tmp_path_factory.mktemp("local")
    (root / "book.txt").write_text(prose(200))
    facts = "One of the special magic numbers for lazy-lemon is: 0123456789. What is the text? "
    train_tokenizer(iter([prose(50) + facts * 20]), VOCABULARY).save_pretrained(root / "model")
    config = tiny("llama", vocab_size=VOCABULARY, max_position_embeddings=POSITIONS)
    randomize(LeanForCausalLM(config), std=0.1).save_pretrained(root / "model")
    (root / "piqa").mkdir()
    questions = [{"goal": f"How {number}?", "sol1": "the fox", "sol2": f"a dog {number}"} for number in range(6)]
    (root / "piqa" / "valid.jsonl").write_text("\n".join(json.dumps(question) for question in questions) + "\n")
    (root / "piqa" / "valid-labels.lst").write_text("0\n1\n1\n0\n1\n0\n")
    return root


@pytest.fixture(scope="module")
def tokenizer(place: Path):
    return load_tokenizer(place / "model")


@pytest.fixture(scope="module")
def model(place: Path) -> LeanForCausalLM:
    return LeanForCausalLM.from_pretrained(place / "model", dtype=torch.float64).eval()


def documents(place: Path, tokenizer, name: str, length: int = POSITIONS) -> list[dict]:
    tasks = load_tasks([name.replace("FILE", str(place / "book.txt"))], None, tokenizer, length)["tasks"]
    [task] = tasks.values()
    return list(task.eval_docs)


@pytest.mark.parametrize("name", ["needle:FILE", "recall"])
@pytest.mark.parametrize("length", [300, POSITIONS])
def test_questions_of_retrieval(place, tokenizer, name, length) -> None:
    """They fill the context and no more, stand at every depth, and have one answer, which is in the text once."""
    found = documents(place, tokenizer, name, length)
    assert found == documents(place, tokenizer, name, length), "drawn from one seed"
    sizes = [len(tokenizer(f"{one['text']} {one['answer']}")["input_ids"]) for one in found]
    assert length - 60 < max(sizes) <= length and min(sizes) > length - 120
    assert len({one["answer"] for one in found}) == len(found) == 100
    for number, one in enumerate(found):
        context = one["text"].split("afterwards.\n")[1].rsplit("\nWhat", 1)[0]
        key = one["text"].rsplit("for ", 1)[1].split(" mentioned")[0]
        fact = f"One of the special magic numbers for {key} is: {one['answer']}."
        assert one["text"].count(one["answer"]) == 1 and context.count(fact) == 1
        place_of = context.index(fact) / max(1, len(context) - len(fact))
        assert one["depth"] == (0, 25, 50, 75, 100)[number % 5] and abs(place_of - one["depth"] / 100) < 0.26
        assert context.count("special magic number") == 1 or name == "recall"


def test_passages_end_before_a_word_that_has_occurred(place, tokenizer) -> None:
    found, text = documents(place, tokenizer, "cloze:FILE"), (place / "book.txt").read_text()
    assert len(found) > 20
    for one in found:
        assert f"{one['text']} {one['answer']}." in text and len(one["answer"]) >= 4
        *before, _ = one["text"].split(". ")
        words = ". ".join(before).replace(".", "").split()
        assert one["answer"] in words and len(words) >= 60
        assert one["text"][0].isupper(), "whole sentences"


def test_piqa_is_lm_evals_own(place, tokenizer) -> None:
    task = load_tasks([f"piqa:{place / 'piqa'}"])["tasks"]["piqa"]
    first = task.eval_docs[1]
    assert task.doc_to_text(first) == "Question: How 1?\nAnswer:" and task.doc_to_target(first) == 1
    assert task.doc_to_choice(first) == ["the fox", "a dog 1"] and len(task.eval_docs) == 6
    (place / "piqa" / "valid-labels.lst").write_text("0\n1\n")
    with pytest.raises(LeanError, match="not PIQA's format"):
        load_tasks([f"piqa:{place / 'piqa'}"])
    (place / "piqa" / "valid-labels.lst").write_text("0\n1\n1\n0\n1\n0\n")


@torch.no_grad()
@pytest.mark.parametrize("bits", ["16", "4"])
def test_scores_are_those_of_the_answers_tokens(place, tokenizer, model, bits) -> None:
    """By hand, question by question, from all logits, through the same cache."""
    names = [f"needle:{place / 'book.txt'}", f"cloze:{place / 'book.txt'}"]
    tasks = load_tasks(names, None, tokenizer, 5 * BLOCK)
    found = task_scores(model, tokenizer, tasks, batch_size=4, limit=6, cache_bits=CacheBits.of(bits))
    for name, task in tasks["tasks"].items():
        for number, one in enumerate(list(task.eval_docs)[:6]):
            ids = tokenizer(one["text"], return_tensors="pt")["input_ids"]
            whole = tokenizer(f"{one['text']} {one['answer']}", return_tensors="pt")["input_ids"]
            cache = {} if bits == "16" else {"past_key_values": CacheBits.of(bits).cache(model.config)}
            logits = [model(part, use_cache=bits != "16", **cache).logits[0] for part in whole[:, :-1].split(BLOCK, 1)]
            logits = model(whole[:, :-1], use_cache=False).logits[0] if bits == "16" else torch.cat(logits)
            scores, wanted = logits[ids.shape[1] - 1 :].log_softmax(-1), whole[0, ids.shape[1] :]
            loss = -scores.gather(1, wanted[:, None]).sum().item()
            assert found.answers[name]["loss"][number] == pytest.approx(loss, abs=1e-9)
            greedy = float((scores.argmax(-1) == wanted).all())
            assert found.answers[name]["acc"][number] == greedy
        assert found.figures[name]["loss"] == pytest.approx(sum(found.answers[name]["loss"]) / 6)
    assert found.cached == (None if bits == "16" else 1.0)
    by_depth = found.figures["needle:book"]["by_depth"]
    assert by_depth["0"]["questions"] == 2 and by_depth["25"]["loss"] == found.answers["needle:book"]["loss"][1]


def test_requests_are_read_a_few_at_a_time_and_once(place, tokenizer, model, monkeypatch) -> None:
    read = []

    def states(bits):
        def made(model, ids):
            read.append(ids.shape)
            return model.model.forward(input_ids=ids, use_cache=False).last_hidden_state

        return made

    monkeypatch.setattr(harness, "cached_states", states)
    monkeypatch.setattr(harness, "TOKENS_AT_A_TIME", 600)
    scorer = harness.Likelihoods(model, tokenizer, POSITIONS, 4, None, CacheBits(), lambda count: None)
    short, long = list(range(5, 15)), list(range(250))
    generated = model.generate(torch.tensor([short]), max_new_tokens=3, do_sample=False, pad_token_id=0)[
        0, 10:
    ].tolist()
    answers = [(long, [7, 8]), (short, [3]), (short, [4]), (long[:200], [1]), (short, generated)]
    requests = [(None, question, answer) for question, answer in answers]
    found = scorer(requests)
    assert read == [(2, 251), (2, 12)] and scorer.read == 4
    assert [likeliest for _, likeliest in found] == [False] * 4 + [True], "what greedy generation gives"
    for (_, question, answer), (score, _) in zip(requests, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([question + answer])).logits[0].log_softmax(-1)
        expected = sum(logits[len(question) - 1 + place, token].item() for place, token in enumerate(answer))
        assert score == pytest.approx(expected, abs=1e-9)


def test_the_command_compares_question_by_question(place, cli, tmp_path) -> None:
    """A cache of 2 bits against none: both models' figures, the change with its error, and McNemar's counts."""
    out, book = tmp_path / "record.json", place / "book.txt"
    arguments = ("--tasks", f"needle:{book},piqa:{place / 'piqa'}", "--context-length", "320", "--limit", "10")
    code, shown, _ = cli(
        "eval",
        str(place / "model"),
        *arguments,
        "--cache-bits",
        "2",
        "--against",
        str(place / "model"),
        "--out",
        str(out),
    )
    assert code == 0 and "needle:book" in shown and "lost" in shown and "by depth" in shown
    record = json.loads(out.read_text())
    pair = record["paired"]["needle:book"]["loss"]
    change = record["tasks"]["needle:book"]["loss"] - record["before"]["needle:book"]["loss"]
    assert pair["difference"] == pytest.approx(change) != 0 and pair["stderr"] > 0 and "p" not in pair
    assert record["paired"]["piqa"]["acc"] == {"difference": 0.0, "stderr": 0.0, "lost": 0, "won": 0, "p": 1.0}
    assert record["cache"]["requests_that_read_it"] == pytest.approx(10 / 22)  # no question of PIQA's is long enough
    assert record["against"]["name"] == "model" and len(record["tasks"]["piqa"]["made_of"]["questions_sha256"]) == 64
    assert not any(str(path) in out.read_text() for path in (place, tmp_path))


def test_mcnemars_exact_test() -> None:
    before = {"acc": [1.0] * 30 + [0.0] * 20, "text": ["a"] * 50, "loss": [0.1] * 50}
    after = {"acc": [0.0] * 9 + [1.0] * 21 + [1.0] * 2 + [0.0] * 18, "text": ["a"] * 50, "loss": [0.3, *[0.1] * 49]}
    found = paired_answers(before, after)
    assert found.keys() == {"acc", "loss"}
    acc = found["acc"]
    assert (acc["lost"], acc["won"], acc["difference"]) == (9, 2, pytest.approx(-7 / 50))
    changes = torch.tensor([-1.0] * 9 + [1.0] * 2 + [0.0] * 39)
    assert acc["stderr"] == pytest.approx(changes.std().item() / math.sqrt(50))
    assert acc["p"] == pytest.approx(2 * binom.cdf(2, 11, 0.5))
    assert found["loss"] == {"difference": pytest.approx(0.2 / 50), "stderr": pytest.approx(0.2 / 50)}
    assert paired_answers({"acc": [1.0]}, {"acc": [1.0]})["acc"] == {
        "difference": 0.0,
        "stderr": None,
        "lost": 0,
        "won": 0,
        "p": 1.0,
    }


def test_tasks_of_one_name_differ_by_their_questions(place, tokenizer) -> None:
    names = [f"cloze:{place / 'book.txt'}"]
    first = tasks_hash(load_tasks(names))
    assert first == tasks_hash(load_tasks(names))
    (place / "other").mkdir()
    (place / "other" / "book.txt").write_text(prose(200, seed=1))
    assert first != tasks_hash(load_tasks([f"cloze:{place / 'other' / 'book.txt'}"]))
    with pytest.raises(LeanError, match=r"takes 4,\d{3} tokens of text, and there are \d,\d{3}; give more text"):
        load_tasks([f"needle:{place / 'book.txt'}"], None, tokenizer, 5000)
    with pytest.raises(LeanError, match="needle has as many tokens as the model's context"):
        load_tasks([f"needle:{place / 'book.txt'}"])


def test_the_benchmark_goes_on_where_it_ended(place, tmp_path, monkeypatch, capsys):
    """benchmarks/tasks.py: what is scored is not scored again, and the record is that of a start without an end."""

    def run(out: Path, *changes: str) -> dict:
        sizes = ("--limit", "4", "--context", "128", "--tokens", "512", "--length", "64", "--calibration")
        given = (str(place / "model"), "--tasks", f"piqa:{place / 'piqa'}", *sizes, str(place / "book.txt"))
        options = ("--kinds", "latents", "--shares", "0.75", "--bits", "4", *changes, "--out", str(out))
        monkeypatch.setattr(sys, "argv", ["benchmarks/tasks.py", *given, *options])
        benchmark.main()
        return json.loads(out.read_text())

    expected, score, scored = run(tmp_path / "whole.json"), benchmark.task_scores, []

    def ends(*given, **options):
        scored.append(options["cache_bits"].name)
        if len(scored) == 3:
            raise KeyboardInterrupt
        return score(*given, **options)

    monkeypatch.setattr(benchmark, "task_scores", ends)
    out = tmp_path / "record.json"
    with pytest.raises(KeyboardInterrupt):
        run(out)
    assert not out.exists()
    assert run(out)["rows"] == expected["rows"]
    assert len(scored) == 4 and sorted(tmp_path.iterdir()) == [out, tmp_path / "whole.json"]
    # Other options begin anew.
    scored.clear()
    with pytest.raises(KeyboardInterrupt):
        run(out)
    run(out, "--limit", "3")
    assert len(scored) == 6
