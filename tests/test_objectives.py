"""Training and evaluation of encoders and of models with prefixes: targets, resumption, words, refusals."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from corpus import SHAPE, spec, write_corpus
from shapes import randomize, tiny
from transformers import AutoModelForMaskedLM, AutoTokenizer

from leanqkv import LeanError, LeanForCausalLM, LeanForMaskedLM, preset
from leanqkv.checkpoints.open import load_model, open_checkpoint
from leanqkv.compare.suites import SUITES, choose, load_suite
from leanqkv.data.objectives import MaskedTokens
from leanqkv.data.prepare import prepare_data
from leanqkv.data.tokenizer import train_tokenizer, with_mask_token
from leanqkv.evaluate.observe import logit_spread, observe
from leanqkv.train.tasks import MaskedTask, PrefixTask, prepare, task_of
from leanqkv.train.trainer import LeanTrainer
from leanqkv.train.training import train

FIELDS = {"masked": "+task=masked_lm", "prefix": "+mask_type=prefix"}
CLASSES = {"masked": LeanForMaskedLM, "prefix": LeanForCausalLM}
kinds = pytest.mark.parametrize("kind", FIELDS)


def run(data, kind, mechanisms="", **changes):
    """A run of corpus.py's model; an encoder has a number more, for the mask token."""
    made = spec(data, FIELDS[kind] + mechanisms, **changes)
    return replace(made, config=made.config | ({"vocab_size": 301} if kind == "masked" else {}))


def losses(record):
    return record["training"], record["evaluations"], record["final"]


class Killed(BaseException):
    pass


def batches(made, data, out, monkeypatch, steps=3):
    """What a model is given in its first steps, and in the evaluation of the last."""
    seen, given = [], LeanTrainer.compute_loss

    def watched(self, model, inputs, *args, **kwargs):
        seen.append({name: tensor.clone() for name, tensor in inputs.items() if isinstance(tensor, torch.Tensor)})
        return given(self, model, inputs, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(LeanTrainer, "compute_loss", watched)
        recipe = replace(made.recipe, steps=steps, warmup_steps=0)
        return seen, train(replace(made, recipe=recipe), data, out, device="cpu")


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.long_cases
@pytest.mark.slow
@kinds
def test_a_killed_run_goes_on_bit_identically(data, tmp_path, kind):
    def kill(step, *_):
        if step == 17:
            raise Killed

    whole = train(run(data, kind), data, tmp_path / "whole", device="cpu")
    with pytest.raises(Killed):
        train(run(data, kind), data, tmp_path / "run", device="cpu", progress=kill)
    again = train(run(data, kind), data, tmp_path / "run", device="cpu")
    assert losses(again) == losses(whole)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()


@pytest.mark.long_cases
@pytest.mark.slow
@kinds
def test_micro_batches_weigh_targets_alike(data, tmp_path, kind):
    """Sequences have different numbers of targets: a mean of means would be another loss."""
    whole, parts = (
        train(
            replace(made := run(data, kind, micro_batch_size=micro), config=made.config | {"hidden_dropout": 0.0}),
            data,
            tmp_path / str(micro),
            device="cpu",
        )
        for micro in (None, 1)
    )
    for one, other in zip(whole["training"], parts["training"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


@pytest.mark.long_cases
@pytest.mark.slow
@kinds
def test_all_variants_see_the_same_targets(data, tmp_path, kind, monkeypatch):
    first, record = batches(run(data, kind), data, tmp_path / "a", monkeypatch)
    other, again = batches(run(data, kind, "+skipv1+nonlinear-query"), data, tmp_path / "b", monkeypatch)
    assert record["batch_plan"] == again["batch_plan"]
    assert [one.keys() for one in first] == [one.keys() for one in other]
    assert all(torch.equal(one[name], two[name]) for one, two in zip(first, other, strict=True) for name in one)
    seeded, differs = batches(run(data, kind, seed=1), data, tmp_path / "c", monkeypatch)
    assert differs["batch_plan"]["sha256"] != record["batch_plan"]["sha256"]
    assert not torch.equal(seeded[0]["input_ids"], first[0]["input_ids"])
    # The same sequence has other targets the next time.
    task = task_of(preset(f"tiny{FIELDS[kind]}"))(run(data, kind), data, tmp_path / "batches")
    task.plan = replace(task.plan, train_starts=[5] * 240)
    several = task.collate(range(8))
    name = "labels" if kind == "masked" else "prefix_mask"
    assert len({tuple(row) for row in several[name].tolist()}) > 4
    assert torch.equal(task.collate([6, 2])[name], several[name][[6, 2]])


@kinds
def test_evaluations_have_the_same_targets_for_every_seed(data, tmp_path, kind):
    torch.manual_seed(0)
    made = run(data, kind)
    model = CLASSES[kind](tiny("gpt", vocab_size=301, **{k: made.config[k] for k in ("task", "mask_type")})).eval()
    figures = [
        task_of(model.config)(run(data, kind, seed=seed), data, tmp_path).evaluate(model, size, torch.no_grad)
        for seed, size in ((0, 3), (0, 16), (5, 7))
    ]
    assert figures[0]["loss"] == pytest.approx(figures[1]["loss"], rel=1e-6)
    assert figures[0]["loss"] == pytest.approx(figures[2]["loss"], rel=1e-6)
    (counted,) = figures[0].keys() - {"loss"}
    assert len({one[counted] for one in figures}) == 1


def test_plans_of_other_targets_are_other_plans(data, tmp_path):
    plans = [
        task_of(preset("tiny"))(spec(data), data, tmp_path).plan,
        MaskedTask(run(data, "masked"), data, tmp_path).plan,
        PrefixTask(run(data, "prefix"), data, tmp_path).plan,
    ]
    assert len({plan.sha256 for plan in plans}) == 3
    assert len({tuple(plan.train_starts[:40]) for plan in plans}) == 1
    assert [plan.record().get("targets", {}).get("kind") for plan in plans] == [None, "masked", "prefix"]
    assert len(list(tmp_path.glob("*.json"))) == 3


@pytest.mark.slow
def test_records_and_files_say_what_the_loss_is_of(data, tmp_path):
    encoder = train(run(data, "masked"), data, tmp_path / "masked", device="cpu")
    assert encoder["final"].keys() == {"validation_loss", "masked_tokens"}, "no perplexity"
    assert encoder["final"]["masked_tokens"] == 16 * 5  # 15% of 32
    prefix = train(run(data, "prefix"), data, tmp_path / "prefix", device="cpu")
    assert prefix["final"]["perplexity"] == math.exp(prefix["final"]["validation_loss"])
    assert 16 < prefix["final"]["tokens_after_prefix"] < 16 * 32
    card = (tmp_path / "masked" / "README.md").read_text()
    assert "validation loss of masked tokens, nats" in card and "KV cache" not in card and "fill-mask" in card
    assert "validation loss after the prefix, nats" in (tmp_path / "prefix" / "README.md").read_text()
    # It fills in a mask with transformers' own classes.
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "masked")
    assert (tokenizer.mask_token, tokenizer.mask_token_id) == ("[MASK]", 300)
    ids = tokenizer("the quick [MASK] fox", return_tensors="pt")["input_ids"]
    assert (ids == 300).sum() == 1
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "masked").eval()
    assert model(ids).logits.shape == (*ids.shape, 301)


def test_the_spread_of_an_encoder_is_over_all_positions():
    torch.manual_seed(0)
    model = randomize(LeanForMaskedLM(tiny("gpt", task="masked_lm"))).eval()
    (pattern, *_) = observe(model, torch.arange(12)[None]).patterns
    logits = pattern.double().log()
    assert logit_spread(pattern, bidirectional=True) == pytest.approx(
        logits.var(-1, correction=0).mean().sqrt().item(), rel=1e-6
    )


# --- the mask token ---------------------------------------------------------------------------------------------------


def test_a_tokenizer_keeps_its_mask_token_or_gets_one():
    tokenizer = train_tokenizer(iter(["some text"]), 260)
    added = with_mask_token(tokenizer, 300)
    size = max(tokenizer.get_vocab().values()) + 1
    assert (added.mask_token, added.mask_token_id) == ("[MASK]", size) and tokenizer.mask_token_id is None
    assert with_mask_token(added, 300) is added
    with pytest.raises(LeanError, match=rf"no mask token, .*vocabulary of {size} has no number left.*{size + 1}"):
        with_mask_token(tokenizer, size)
    with pytest.raises(LeanError, match=f"mask token is number {size}, the model's vocabulary ends at {size - 1}"):
        with_mask_token(added, size)
    for vocabulary in (size, size + 1):  # of the tokenizer without the mask, and with it
        masks = MaskedTokens.of(added, vocabulary)
        assert (masks.mask, masks.vocabulary) == (size, size) and masks.special == (0, size)


def test_a_tokenizer_made_for_an_encoder_leaves_a_number_free(tmp_path, monkeypatch):
    monkeypatch.setenv("LEANQKV_CACHE", str(tmp_path / "cache"))
    text = str(write_corpus(tmp_path / "corpus.txt"))
    encoder, decoder = (preset(f"tiny{fields}{SHAPE}") for fields in (FIELDS["masked"], ""))
    data = prepare([encoder], text, lambda doing: None)
    assert data.vocab_size == 299 and prepare([decoder], text, lambda doing: None).vocab_size == 300
    MaskedTask.check_data("the model", encoder, data, 32)
    (tmp_path / "other.txt").write_text("\n".join(reversed((tmp_path / "corpus.txt").read_text().splitlines())))
    assert prepare([encoder], f"{text},{tmp_path / 'other.txt'}:0.3", lambda doing: None).vocab_size == 299


def test_tokens_without_a_tokenizer_are_refused(tmp_path):
    np.arange(2000, dtype=np.uint16).astype("<u2").tofile(tmp_path / "tokens.bin")
    data = prepare_data(str(tmp_path / "tokens.bin"), vocab_size=2048)
    with pytest.raises(LeanError, match="has no tokenizer that says which token is the mask"):
        MaskedTask.check_data("encoder-tiny", preset("encoder-tiny"), data, 32)


# --- evaluation -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("objectives")
    text = write_corpus(root / "corpus.txt").read_text()[:4000]
    (root / "corpus.txt").write_text(text)
    tokenizer = with_mask_token(train_tokenizer(iter([text]), 299), 300)
    for number, name in enumerate(("masked", "masked-2", "prefix", "prefix-2", "causal")):
        torch.manual_seed(number)
        fields = {"masked": {"task": "masked_lm"}, "prefix": {"mask_type": "prefix"}}.get(name[:6], {})
        kind = LeanForMaskedLM if name[:6] == "masked" else LeanForCausalLM
        model = randomize(kind(tiny("gpt", vocab_size=300, max_position_embeddings=32, **fields)), std=0.1)
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


def scored(cli, root, *arguments):
    out = root / f"{len(list(root.iterdir()))}.json"
    code, text, error = cli(
        "eval", *arguments, "--data", str(root / "corpus.txt"), "--device", "cpu", "--out", str(out)
    )
    assert code == 0, error
    return json.loads(out.read_text()), " ".join(text.split())


@torch.no_grad()
def test_eval_of_an_encoder_is_the_loss_of_its_masked_tokens(checkpoints, cli):
    record, text = scored(cli, checkpoints, str(checkpoints / "masked"), "--batch-size", "3")
    model = load_model(open_checkpoint(checkpoints / "masked"))
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "masked")
    ids = np.array([*tokenizer((checkpoints / "corpus.txt").read_text())["input_ids"]])
    masks, count = MaskedTokens.of(tokenizer, 300), (len(ids) - 1) // 32
    found = []
    for number, start in enumerate(np.linspace(0, len(ids) - 33, count).astype(int)):
        window = ids[start : start + 32]
        seen, labels = masks.hide(window, masks.draw((0, 3, number), 32))
        logits = model(torch.tensor(seen)[None]).logits[0].log_softmax(-1)
        found += [-logits[at, one].item() for at, one in enumerate(labels) if one != -100]
    assert record["figures"] == {"loss": pytest.approx(np.mean(found), rel=1e-5), "masked_tokens": len(found)}
    assert record["targets"]["words"].startswith("15% of the tokens") and "stride" not in record
    assert "loss of masked tokens" in text and "perplexity" not in text
    both, text = scored(cli, checkpoints, str(checkpoints / "masked-2"), "--against", str(checkpoints / "masked"))
    assert both["before"] == record["figures"] and both["figures"].keys() == {"loss", "masked_tokens"}
    assert both["after"]["loss"] == pytest.approx(
        scored(cli, checkpoints, str(checkpoints / "masked-2"))[0]["figures"]["loss"], rel=1e-6
    )
    assert f"On {len(found)} masked tokens" in text and "perplexity" not in text and "KV cache" not in text


@torch.no_grad()
def test_eval_of_a_model_with_prefixes_gives_each_window_its_context_as_one(checkpoints, cli):
    """Every token is predicted once, from all before it, which see each other; so this is a perplexity."""
    record, _ = scored(cli, checkpoints, str(checkpoints / "prefix"), "--stride", "8")
    model = load_model(open_checkpoint(checkpoints / "prefix"))
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "prefix")
    ids = torch.tensor(tokenizer((checkpoints / "corpus.txt").read_text())["input_ids"])
    found, done = [], 0
    while done < len(ids) - 1:
        end = min(max(done + 8, 32), len(ids) - 1)
        start = max(end - 32, 0)
        prefix = torch.arange(32) <= done - start
        logits = model(ids[None, start:end], prefix_mask=prefix[None].long()).logits[0].log_softmax(-1)
        found += [-logits[at - 1 - start, ids[at]].item() for at in range(done + 1, end + 1)]
        done = end
    assert record["figures"]["loss"] == pytest.approx(np.mean(found), rel=1e-5)
    assert record["figures"]["tokens"] == len(ids) - 1
    assert record["figures"]["perplexity"] == pytest.approx(math.exp(np.mean(found)), rel=1e-5)
    both, _ = scored(
        cli, checkpoints, str(checkpoints / "prefix-2"), "--stride", "8", "--against", str(checkpoints / "prefix")
    )
    assert both["before"]["loss"] == pytest.approx(record["figures"]["loss"], rel=1e-6)
    causal, _ = scored(
        cli, checkpoints, str(checkpoints / "causal"), "--stride", "8", "--against", str(checkpoints / "prefix")
    )
    assert causal["before"]["loss"] == pytest.approx(record["figures"]["loss"], rel=1e-6)


# --- comparisons ------------------------------------------------------------------------------------------------------


def test_models_of_different_targets_are_not_compared():
    names = ("tiny", "encoder-tiny", "tiny+mask_type=prefix")
    for first, second in zip(names, (*names[1:], names[0]), strict=True):
        with pytest.raises(LeanError, match="cannot be compared: their losses are of different tokens"):
            prepare([preset(first), preset(second)], None, lambda doing: None)


@pytest.mark.parametrize("base", ["encoder-tiny", "tiny+task=masked_lm", "tiny+mask_type=prefix"])
def test_a_suite_is_built_on_another_base(base):
    own, moved = SUITES["query"].scales["tiny"], choose(["query"], None, None, base)
    assert len(moved.entries) == len(own.entries) and moved.base == base
    for one, other in zip(own.entries.values(), moved.entries.values(), strict=True):
        assert other.model == base + one.model.removeprefix("tiny")
        assert other.label == base + one.label.removeprefix("tiny")
        given, expected = preset(other.model).as_overrides(), preset(one.model).as_overrides()
        assert given | {"task": 0, "mask_type": 0} == expected | {"task": 0, "mask_type": 0}
        assert other.full_recipe({}) == one.full_recipe({})
    assert {task_of(config).__name__ for config in moved.configs.values()} == {
        "PrefixTask" if "prefix" in base else "MaskedTask"
    }


@pytest.mark.slow
def test_the_report_of_encoders_names_their_loss(tmp_path, cli, monkeypatch):
    monkeypatch.setenv("LEANQKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("leanqkv.compare.comparison.available_cores", lambda: 1)
    text, out = write_corpus(tmp_path / "corpus.txt"), tmp_path / "out"
    groups = f"[{{base: tiny{SHAPE}, entries: [{{row: a}}, {{row: b, add: +skipv1}}]}}]"
    published = "[{source: P9, setting: s, metric: validation loss, groups: [{a: '3.0', b: '2.9'}]}]"
    (tmp_path / "mine.yaml").write_text(
        f"title: t\nsource: ours\nscales: {{tiny: {{seeds: 2, groups: {groups}}}}}\npublished: {published}\n"
    )
    monkeypatch.setitem(SUITES, "mine", load_suite(tmp_path / "mine.yaml"))
    how = ["--data", str(text), "--steps", "2", "--batch-size", "2", "--jobs", "1", "--device", "cpu"]
    how += ["--precision", "fp32", "--evaluation-sequences", "4", "--context-length", "16", "--out", str(out)]
    code, shown, error = cli("compare", "mine", "--base", "encoder-tiny", *how)
    assert code == 0, error
    shown = " ".join(shown.split())
    assert "validation loss of masked tokens" in shown and "perplexity" not in shown
    assert "Published is the loss of the next token, here validation loss of masked tokens on encoder-tiny." in shown
    page = (out / "report.html").read_text()
    assert "no perplexity follows from it" in page and "15% of the tokens of each sequence" in page
    assert "perplexity</th>" not in page
    assert json.loads((out / "compare.json").read_text())["base"] == "encoder-tiny"
    assert cli("compare", "mine", "--base", "encoder-tiny", *how)[0] == 0, "it does not go on"
    assert "holds another comparison" in cli("compare", "mine", *how)[2]
