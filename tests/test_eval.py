"""Evaluation on texts and tasks, against loops that give one token at a time its context."""

import json
import math
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from corpus import write_corpus
from local_tasks import QUESTIONS, write_tasks
from shapes import randomize, tiny
from text_losses import strided_losses
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from leanqkv import LeanError, LeanForCausalLM, progress
from leanqkv.checkpoints.open import load_model, open_causal_lm
from leanqkv.checkpoints.tokenizer import load_tokenizer
from leanqkv.data.evaluation import evaluation_text
from leanqkv.data.prepare import prepare_data
from leanqkv.data.tokenizer import END_OF_TEXT, train_tokenizer
from leanqkv.evaluate.strided import loss_figures, strided_windows

ROUNDING = 1e-12
VOCABULARY = 300
MULTI_BYTE = "naïve café – 日本語 🙂 the quick brown fox jumps over the lazy dog, " * 5


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """gpt and llama, of this library; stock, a LlamaForCausalLM; corpus.txt."""
    root = tmp_path_factory.mktemp("eval")
    text = write_corpus(root / "corpus.txt").read_text()
    tokenizer = train_tokenizer(iter([text]), VOCABULARY)
    for shape in ("gpt", "llama"):
        model = randomize(LeanForCausalLM(tiny(shape, vocab_size=VOCABULARY, max_position_embeddings=32)), std=0.1)
        model.save_pretrained(root / shape)
        tokenizer.save_pretrained(root / shape)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    stock = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=32))
    randomize(stock, std=0.1).save_pretrained(root / "stock")
    tokenizer.save_pretrained(root / "stock")
    return root


def model_of(checkpoints: Path, name: str, dtype: torch.dtype = torch.float64) -> LeanForCausalLM:
    return load_model(open_causal_lm(checkpoints / name), dtype)


@torch.no_grad()
def one_at_a_time(model, tokens: np.ndarray, context_length: int, stride: int) -> torch.Tensor:
    """The definition: a block of targets sees what precedes it, from where its last target has a full context."""
    losses = []
    last = len(tokens) - 1
    for target in range(1, len(tokens)):
        end = context_length
        while end < target:
            end += stride
        begin = max(0, min(end, last) - context_length)
        ids = torch.from_numpy(tokens[begin:target].astype(np.int64))[None]
        losses.append(-model(ids).logits[0, -1].log_softmax(-1)[int(tokens[target])])
    return torch.stack(losses)


# --- windows and losses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("length, context, stride", [(50, 16, 8), (50, 16, 5), (41, 8, 8), (33, 32, 1), (20, 32, 16)])
def test_every_token_has_the_context_that_the_definition_gives(checkpoints, name, length, context, stride):
    model = model_of(checkpoints, name)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, length).astype("uint16")
    expected = one_at_a_time(model, tokens, context, stride)
    for batch_size in (1, 3, 100):
        done = []
        losses = strided_losses(
            model,
            tokens,
            context_length=context,
            stride=stride,
            batch_size=batch_size,
            progress=lambda *at, done=done: done.append(at),
        )
        assert losses.dtype == torch.float64
        torch.testing.assert_close(losses, expected, rtol=0, atol=ROUNDING)
        assert done[-1] == (length - 1, length - 1)


@pytest.mark.parametrize("length", [2, 9, 10, 11, 100])
@pytest.mark.parametrize("context, stride", [(1, 1), (10, 1), (10, 3), (10, 10)])
def test_windows_score_every_token_but_the_first_once(length, context, stride):
    scored, size = [], min(context, length - 1)
    for start, count in strided_windows(length, context, stride):
        assert start >= 0 and start + size < length
        scored += range(start + size + 1 - count, start + size + 1)
    assert scored == list(range(1, length))


def test_a_text_of_one_window_has_the_plain_cross_entropy(checkpoints):
    model = model_of(checkpoints, "gpt")
    tokens = np.arange(33, dtype="uint16")
    ids = torch.arange(33)
    losses = strided_losses(model, tokens, context_length=32, stride=4)
    with torch.no_grad():
        plain = F.cross_entropy(model(ids[None, :-1]).logits[0], ids[1:]).item()
    assert losses.mean().item() == pytest.approx(plain, abs=ROUNDING)


def test_dropout_is_off_and_training_goes_on(checkpoints):
    model = LeanForCausalLM(tiny("gpt", hidden_dropout=0.5)).train()
    losses = [strided_losses(model, np.arange(20), context_length=8, stride=4) for _ in range(2)]
    assert torch.equal(*losses) and model.training


def test_bits_per_byte():
    losses = torch.tensor([1.0, 2.0, 4.5], dtype=torch.float64)
    figures = loss_figures(losses, 10)
    assert figures == {
        "loss": 2.5,
        "perplexity": math.exp(2.5),
        "bits_per_byte": 7.5 / math.log(2) / 10,
        "tokens": 3,
    }
    assert loss_figures(losses, None)["bits_per_byte"] is None
    assert math.isfinite(loss_figures(losses * 1e6, 1)["perplexity"])


# --- texts ------------------------------------------------------------------------------------------------------------


def text_of(checkpoints: Path, source: Path, **options):
    return evaluation_text(str(source), tokenizer=checkpoints / "gpt", vocab_size=VOCABULARY, **options)


def write_documents(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def test_documents_have_an_end_of_text_between_them(checkpoints, tmp_path):
    tokenizer = load_tokenizer(checkpoints / "gpt")
    documents = ["the fox", "日本語 🙂", "a dog"]
    text = text_of(checkpoints, write_documents(tmp_path / "a.jsonl", documents))
    assert tokenizer.decode(text.tokens) == END_OF_TEXT.join(documents)
    assert (text.documents, text.bytes) == (3, sum(len(document.encode()) for document in documents))


@pytest.mark.parametrize("count", [1, 3, 45])
def test_the_validation_split_is_what_training_holds_out(checkpoints, tmp_path, monkeypatch, count):
    monkeypatch.setenv("LEANQKV_CACHE", str(tmp_path / "cache"))
    documents = [f"{i} {MULTI_BYTE}" for i in range(count)]
    source = write_documents(tmp_path / "a.jsonl", documents)
    trained = prepare_data(str(source), vocab_size=VOCABULARY, tokenizer=str(checkpoints / "gpt"))
    text = text_of(checkpoints, source, split="validation")
    assert np.array_equal(text.tokens, trained.validation()[:-1])
    decoded = load_tokenizer(checkpoints / "gpt").decode(text.tokens).replace(END_OF_TEXT, "")
    # A token may begin within a character, the bytes of which before it cannot be decoded.
    assert abs(text.bytes - len(decoded.replace("�", "").encode())) < 4
    assert (count == 45) == (text.documents == 2)


def test_tokens_without_text_have_no_bytes(checkpoints, tmp_path):
    np.arange(100, dtype="uint16").tofile(tmp_path / "train.bin")
    np.arange(50, dtype="uint16").tofile(tmp_path / "val.bin")
    whole, held_out = (
        evaluation_text(str(tmp_path), tokenizer=tmp_path, vocab_size=VOCABULARY, split=split)
        for split in ("whole", "validation")
    )
    assert (len(whole.tokens), len(held_out.tokens), whole.bytes) == (150, 50, None)


# --- the command on a text --------------------------------------------------------------------------------------------


def test_command_and_record(checkpoints, cli, tmp_path):
    source = tmp_path / "text.txt"
    source.write_text(MULTI_BYTE, encoding="utf-8")
    out = tmp_path / "record.json"
    code, shown, _ = cli("eval", str(checkpoints / "gpt"), "--data", str(source), "--out", str(out), "--stride", "10")
    record = json.loads(out.read_text())
    ids = load_tokenizer(checkpoints / "gpt")(MULTI_BYTE, add_special_tokens=False)["input_ids"]
    losses = one_at_a_time(model_of(checkpoints, "gpt"), np.array(ids), 32, 10)
    figures = record["figures"]
    assert code == 0 and figures["tokens"] == len(ids) - 1
    assert figures["loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]))
    bits = losses.sum().item() / math.log(2) / len(MULTI_BYTE.encode())
    assert len(MULTI_BYTE.encode()) > len(MULTI_BYTE) and figures["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert f"loss {figures['loss']:.4f} nats per token" in shown and f"{bits:.4f} bits per byte" in shown
    assert (record["context_length"], record["stride"], record["text"]["split"]) == (32, 10, "whole")
    assert len(record["weights_sha256"]) == len(record["text"]["text_sha256"]) == 64
    assert record["versions"]["torch"] == torch.__version__ and record["hardware"]["threads"] == 1
    assert record["name"] == "gpt" and not any(str(path) in out.read_text() for path in (tmp_path, checkpoints))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["record.json", "text.txt"]


def test_a_record_that_another_command_writes_meanwhile_stays_as_it_is(checkpoints, cli, tmp_path, monkeypatch):
    out = tmp_path / "record.json"

    def score(*_):
        out.write_text("another's")
        return {}

    monkeypatch.setattr("leanqkv.commands.scoring.score_text", score)
    arguments = (str(checkpoints / "gpt"), "--data", str(checkpoints / "corpus.txt"), "--out", str(out))
    code, _, error = cli("eval", *arguments)
    assert code == 2 and "record.json exists, and nothing is ever written over" in " ".join(error.split())
    assert out.read_text() == "another's"


def test_a_directory_of_transformers(checkpoints, cli, tmp_path):
    out = tmp_path / "record.json"
    arguments = ("--data", str(checkpoints / "corpus.txt"), "--split", "validation", "--out", str(out))
    assert cli("eval", str(checkpoints / "stock"), *arguments)[0] == 0
    model = LlamaForCausalLM.from_pretrained(checkpoints / "stock").double()
    text = evaluation_text(
        str(checkpoints / "corpus.txt"), tokenizer=checkpoints / "stock", vocab_size=VOCABULARY, split="validation"
    )
    losses = strided_losses(model, text.tokens, context_length=32, stride=16)
    assert json.loads(out.read_text())["figures"]["loss"] == pytest.approx(losses.mean().item(), rel=1e-5)


def test_bf16_is_near_and_the_text_hash_is_not_the_tokenizers(checkpoints, cli, monkeypatch, tmp_path):
    chosen = []
    monkeypatch.setattr(LeanForCausalLM, "set_attn_implementation", lambda model, name: chosen.append(name))
    source = tmp_path / "text.txt"
    source.write_text(MULTI_BYTE, encoding="utf-8")
    other = tmp_path / "other"
    model_of(checkpoints, "gpt", torch.float32).save_pretrained(other)
    train_tokenizer(iter(["x"]), 257).save_pretrained(other)
    records = []
    for directory, precision in ((checkpoints / "gpt", "fp32"), (checkpoints / "gpt", "bf16+eager"), (other, "fp32")):
        out = tmp_path / f"record{len(records)}.json"
        arguments = ("--data", str(source), "--precision", precision, "--out", str(out))
        assert cli("eval", str(directory), *arguments)[0] == 0
        records.append(json.loads(out.read_text()))
    loss, half = (record["figures"]["loss"] for record in records[:2])
    # The rounding of float32 is far below the first bound.
    assert 1e-5 < abs(half - loss) < 1e-2 * loss and chosen == ["sdpa", "eager", "sdpa"]
    assert len({record["text"]["text_sha256"] for record in records}) == 1
    assert len({record["text"]["tokens"] for record in records}) == 2


# --- tasks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def local_tasks(tmp_path):
    """A folder with the task `animals` of QUESTIONS."""
    return write_tasks(tmp_path / "tasks", "animals")


def log_likelihood(model, tokenizer, context: str, continuation: str) -> float:
    given, ids = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (context, f"{context} {continuation}")
    )
    assert ids[: len(given)] == given
    with torch.no_grad():
        scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(scores[i - 1, ids[i]].item() for i in range(len(given), len(ids)))


@pytest.mark.parametrize("name", ["gpt", "stock"])
def test_a_local_task_by_hand(checkpoints, cli, local_tasks, tmp_path, name):
    out = tmp_path / "record.json"
    arguments = ("--tasks", "animals", "--include-path", str(local_tasks), "--out", str(out))
    code, shown, _ = cli("eval", str(checkpoints / name), *arguments)
    assert code == 0 and "animals" in shown
    record = json.loads(out.read_text())
    figures = record["tasks"]["animals"]
    model, tokenizer = model_of(checkpoints, name), load_tokenizer(checkpoints / name)
    hits, hits_per_byte = [], []
    for question in QUESTIONS:
        choices = question["choices"]
        scores = [log_likelihood(model, tokenizer, question["question"], choice) for choice in choices]
        per_byte = [score / len(choice) for score, choice in zip(scores, choices, strict=True)]
        hits.append(int(np.argmax(scores) == question["answer"]))
        hits_per_byte.append(int(np.argmax(per_byte) == question["answer"]))
    assert (figures["acc"], figures["acc_norm"]) == (np.mean(hits), np.mean(hits_per_byte))
    assert figures["acc_stderr"] == pytest.approx(np.std(hits, ddof=1) / 2)
    assert (figures["examples"], figures["of"], figures["shots"], figures["version"]) == (4, 4, 0, 3.0)
    assert record["mean_acc"] == figures["acc"] and record["lm_eval"]
    assert str(tmp_path) not in out.read_text()
    out.unlink()
    assert cli("eval", str(checkpoints / name), *arguments, "--limit", "2", "--precision", "bf16")[0] == 0
    record = json.loads(out.read_text())
    assert (record["tasks"]["animals"]["examples"], record["tasks"]["animals"]["of"], record["limit"]) == (2, 4, 2)


# What lm-eval asks of a model -> the lines of such a task behind its texts, and the least and most it can score.
OTHER_TASKS = {
    "generate_until": (
        """doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {max_gen_toks: 3, until: ["\\n"], do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
        (0, 1),
    ),
    "loglikelihood_rolling": (  # of every text its log-likelihood and its words
        """doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
""",
        (1, math.inf),
    ),
}


@pytest.mark.parametrize("kind", OTHER_TASKS)
def test_a_task_that_is_no_choice(checkpoints, cli, local_tasks, tmp_path, kind):
    """Answers that are generated, and a metric that is no number for one question."""
    lines, (least, most) = OTHER_TASKS[kind]
    texts = (local_tasks / "animals.yaml").read_text().partition("doc_to_text")[0]
    texts = texts.replace(": animals", ": other").replace("multiple_choice", kind)
    (local_tasks / "other.yaml").write_text(texts + lines)
    out = tmp_path / "record.json"
    task = ("--tasks", "other", "--include-path", str(local_tasks), "--out", str(out))
    code, _, errors = cli("eval", str(checkpoints / "gpt"), *task)
    assert code == 0, errors
    figures = json.loads(out.read_text())["tasks"]["other"]
    assert least <= figures[lines.partition("metric: ")[2].partition(",")[0]] <= most


def test_filters_of_answers_are_metrics_of_their_own(checkpoints, local_tasks):
    from leanqkv.evaluate.harness import load_tasks, task_scores

    lines, _ = OTHER_TASKS["generate_until"]
    texts = (local_tasks / "animals.yaml").read_text().partition("doc_to_text")[0]
    texts = texts.replace(": animals", ": other").replace("multiple_choice", "generate_until")
    filters = ("filter_list:", *(f"  - {{name: {name}, filter: [{{function: take_first}}]}}" for name in ("a", "b")))
    (local_tasks / "other.yaml").write_text(texts + lines + "\n".join(filters))
    model, tokenizer = model_of(checkpoints, "gpt"), load_tokenizer(checkpoints / "gpt")
    scores = task_scores(model, tokenizer, load_tasks(["other"], local_tasks))
    assert {name: len(values) for name, values in scores.answers["other"].items()} == {
        "exact_match,a": len(QUESTIONS),
        "exact_match,b": len(QUESTIONS),
    }
    assert scores.answers["other"].keys() <= scores.figures["other"].keys()


def test_scoring_tasks_is_visible_in_a_log(checkpoints, cli, local_tasks, monkeypatch):
    """lm-eval's own remarks are silenced by replacing the standard error; the lines go to the real one."""
    monkeypatch.setattr("leanqkv.progress.LOG_SECONDS", 0.001)
    describe = progress.Bar.describe

    def slowly(bar, description):
        describe(bar, description)
        time.sleep(0.05)  # the thread that writes the lines may have to wait for a core

    monkeypatch.setattr(progress.Bar, "describe", slowly)
    code, _, err = cli("eval", str(checkpoints / "gpt"), "--tasks", "animals", "--include-path", str(local_tasks))
    assert code == 0 and re.search("scoring the tasks, [0-9]+ sequences done", err)


def test_log_likelihoods_by_hand(checkpoints, local_tasks):
    """The numbers themselves, in batches too; accuracies of four questions could agree by chance."""
    from leanqkv.evaluate.harness import load_tasks, task_scores

    model, tokenizer = model_of(checkpoints, "gpt"), load_tokenizer(checkpoints / "gpt")
    tasks = load_tasks(["animals"], local_tasks)
    task_scores(model, tokenizer, tasks, batch_size=5)
    expected = [
        log_likelihood(model, tokenizer, question["question"], choice)
        for question in QUESTIONS
        for choice in question["choices"]
    ]
    scores = [instance.resps[0][0] for instance in tasks["tasks"]["animals"].instances]
    assert scores == pytest.approx(expected, abs=1e-9) and len(set(scores)) == 12
    tasks = load_tasks(["animals"], local_tasks)
    task_scores(model.float(), tokenizer, tasks, autocast_dtype=torch.bfloat16)
    half = [instance.resps[0][0] for instance in tasks["tasks"]["animals"].instances]
    assert half != pytest.approx(expected, rel=1e-5) and half == pytest.approx(expected, rel=3e-2)


def test_the_nine_tasks_are_there_by_name():
    """Their files alone are read: lm-eval has fourteen thousand."""
    import lm_eval.tasks

    from leanqkv.evaluate.harness import TASK_SETS

    root = Path(lm_eval.tasks.__file__).parent
    folders = ("hellaswag", "arc", "piqa", "winogrande", "openbookqa", "sciq", "super_glue/boolq", "glue/rte")
    known = lm_eval.tasks.TaskManager(include_path=[str(root / name) for name in folders], include_defaults=False)
    assert len(TASK_SETS["p3"]) == 9 and set(TASK_SETS["p3"]) <= set(known.all_tasks)


@pytest.fixture
def without_defaults(monkeypatch):
    """lm-eval with no tasks of its own, which take seconds to list."""
    import lm_eval.tasks

    class Own(lm_eval.tasks.TaskManager):
        def __init__(self, include_path=None, include_defaults=True):
            super().__init__(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", Own)


# --- what a person can mend -------------------------------------------------------------------------------------------


def refused(cli, *arguments) -> str:
    code, out, err = cli("eval", *map(str, arguments))
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, (out, err)
    return err


def test_a_vocabulary_that_tasks_do_not_fit(checkpoints, cli, local_tasks, tmp_path):
    LeanForCausalLM(tiny("gpt")).save_pretrained(tmp_path / "small")
    load_tokenizer(checkpoints / "gpt").save_pretrained(tmp_path / "small")
    message = refused(cli, tmp_path / "small", "--tasks", "animals", "--include-path", local_tasks)
    assert "and the model's vocabulary ends at 96; leave it out" in message


def test_logits_that_are_nan(checkpoints, cli, local_tasks, tmp_path):
    model = model_of(checkpoints, "gpt", torch.float32)
    with torch.no_grad():  # finite, and beyond the range of float32 as soon as they are multiplied
        model.model.layers[1].mlp.down_proj.weight.fill_(torch.finfo(torch.float32).max)
    model.save_pretrained(tmp_path / "broken")
    load_tokenizer(checkpoints / "gpt").save_pretrained(tmp_path / "broken")
    out = tmp_path / "record.json"
    tasks = ("--tasks", "animals", "--include-path", local_tasks)
    assert "logits are NaN" in refused(cli, tmp_path / "broken", *tasks, "--out", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "tasks"]


def test_the_first_bad_token_is_named():
    class Model(torch.nn.Linear):
        def forward(self, input_ids, use_cache, logits_to_keep):
            logits = torch.zeros(*input_ids.shape, 9)
            logits[input_ids == 7] = math.inf
            return type("Output", (), {"logits": logits[:, -logits_to_keep:]})

    tokens = np.array([1, 2, 3, 4, 5, 6, 7, 8, 1, 2])
    with pytest.raises(LeanError, match="at token 8 of 10"):
        strided_losses(Model(1, 1), tokens, context_length=4, stride=2)


def test_tasks_that_are_not_there(checkpoints, cli, local_tasks, without_defaults):
    animals = (local_tasks / "animals.yaml").read_text()
    (local_tasks / "lost.yaml").write_text(animals.replace(": animals", ": lost").replace("questions.jsonl", "x"))
    (local_tasks / "code.yaml").write_text(animals.replace(": animals", ": code") + "unsafe_code: true\n")
    for tasks, message in (
        ("animal", "no task 'animal': did you mean 'animals'?"),
        ("animals,qqq", "no task 'qqq': see `lm-eval ls tasks`"),
        ("animals,lost", "the task lost cannot be loaded"),
        ("code", "the task code runs code that a model wrote"),
    ):
        assert message in refused(cli, checkpoints / "gpt", "--tasks", tasks, "--include-path", local_tasks)


def test_without_lm_eval(checkpoints, cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "pip install 'leanqkv[eval]'" in refused(cli, checkpoints / "gpt", "--tasks", "p3")
