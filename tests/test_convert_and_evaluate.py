"""A conversion with its evaluation, and the page and the model card made from it."""

import json
import math
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from corpus import write_corpus
from pages import Page
from pairing import VOCABULARY, model, text
from transformers import AutoModelForCausalLM

from leanqkv import LeanError, progress
from leanqkv.checkpoints.card import origin
from leanqkv.checkpoints.open import load_model, open_causal_lm
from leanqkv.commands import converting
from leanqkv.convert.conversion import Conversion
from leanqkv.data.evaluation import evaluation_text
from leanqkv.data.tokenizer import train_tokenizer
from leanqkv.evaluate import paired
from leanqkv.evaluate.paired import paired_scores, spread_windows
from leanqkv.report import conversion as report
from leanqkv.report.conversion import KIND


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A source with its tokenizer, corpus.txt, other.txt of its kind, code.txt of another."""
    place = tmp_path_factory.mktemp("paired")
    content = write_corpus(place / "corpus.txt").read_text()
    (place / "other.txt").write_text("\n".join(reversed(content.splitlines()[:200])))
    (place / "code.txt").write_text(Path(paired.__file__).read_text() * 2)
    tokenizer = train_tokenizer(iter([content]), VOCABULARY)
    for name, seed in (("source", 0), ("second", 1)):
        model(seed).float().save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
    return place


@pytest.fixture
def place(prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("LEANQKV_CACHE", str(prepared / "cache"))
    for entry in prepared.iterdir():
        if entry.name != "cache":
            (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.chdir(tmp_path)
    return tmp_path


CONVERT = ("convert", "source", "--to", "skipv1", "--tokens", "2000", "--out", "result")
FROM_CORPUS = (*CONVERT, "--calibration", "corpus.txt")


def test_eval_against(place, unwrapped):
    options = ("--data", "other.txt", "--stride", "8", "--precision", "fp32", "--device", "cpu")
    code, out, _ = unwrapped("eval", "second", "--against", "source", *options, "--out", "both.json")
    assert code == 0 and "same likeliest token" in out
    both = json.loads(Path("both.json").read_text())
    for name, which in (("source", "before"), ("second", "after")):
        assert unwrapped("eval", name, *options, "--out", f"{which}.json")[0] == 0
        one = json.loads(Path(f"{which}.json").read_text())
        assert both[which] == pytest.approx(one["figures"], rel=1e-5)
    assert both["figures"] == both["after"] and both["name"] == "second" and both["against"]["name"] == "source"
    assert both["loss_difference"]["mean"] == pytest.approx(both["after"]["loss"] - both["before"]["loss"])
    assert len({both["weights_sha256"], both["against"]["weights_sha256"]}) == 2


def test_one_command_converts_evaluates_and_reports(place, unwrapped):
    code, out, err = unwrapped(*FROM_CORPUS, "--evaluate", "other.txt", "--evaluate-tokens", "640")
    assert (code, err) == (0, "")
    assert "KL(source ‖ result)" in out and "layer 1: heads [" in out  # no terminal: a log
    result = Path("result")
    record = json.loads((result / "conversion.json").read_text())
    evaluation = record["evaluation"]
    # By hand: the same windows, with both models as they are stored.
    scored = evaluation_text("other.txt", tokenizer="source", vocab_size=VOCABULARY)
    before, after = (load_model(open_causal_lm(Path(name)), torch.float32) for name in ("source", "result"))
    windows = spread_windows(len(scored.tokens), 32, 20)
    [scores] = paired_scores(before, after, scored.tokens, windows, 32)
    assert evaluation["loss_difference"]["mean"] == pytest.approx((scores.after - scores.before).mean().item())
    assert evaluation["before"]["tokens"] == 640 and evaluation["windows"] == 20 and evaluation["context_length"] == 32
    bits = scores.before.sum().item() / math.log(2) / (scored.bytes * 640 / (len(scored.tokens) - 1))
    assert evaluation["before"]["bits_per_byte"] == pytest.approx(bits)
    assert evaluation["text"]["split"] == "whole" and record["base_model"] == "source"
    assert record["calibration"]["description"].startswith("corpus.txt")
    assert record["calibration"]["source_bits_per_byte"] == pytest.approx(
        evaluation["before"]["bits_per_byte"], rel=0.1
    )
    assert str(place) not in "".join(file.read_text() for file in (result / "conversion.json", result / "README.md"))
    _check_page(result, record)
    _check_card(result, evaluation)
    _check_made_again(result, unwrapped)


def _check_page(result, record):
    page = Page((result / "conversion.html").read_text())
    assert page.fetched == []
    shown = " ".join("".join(page.text).split())
    for part in (
        "squared error over its square, on the calibration text",
        "Kept: the heads",
        "corpus.txt",
        "other.txt",
        "refit_lent",
        record["command"][:40],
    ):
        assert part in shown
    for name in ("before", "after"):
        assert f"{record['evaluation'][name]['loss']:.4f}" in shown


def test_the_page_of_merged_values_says_what_its_columns_are(place, unwrapped):
    merging = ("--to", "merged-values", "--calibration", "corpus.txt", "--tokens", "2000", "--ratio", "0.25")
    assert unwrapped("convert", "source", *merging, "--layers", "1", "--out", "result")[0] == 0
    shown = " ".join("".join(Page(Path("result/conversion.html").read_text()).text).split())
    for part in ("1 pair of value heads is merged", "Merged: pairs of heads", "Ridge: ", "held out from the fit"):
        assert part in shown
    [[first, second]] = json.loads(Path("result/conversion.json").read_text())["layers"][1]["merged"]
    assert f"{first} with {second}" in shown and "0.25 of the value heads" in shown
    assert "Kept: " not in shown and "Sinks: " not in shown


def test_bytes_of_a_token_are_said_with_the_window_behind_which_they_end():
    record = {"parameters": [9, 8], "kv_bytes_per_token_bf16": [64, 48], "source": {"sliding_window": 512}}
    words = "per token until a window of 512 is full"
    assert f"takes 48 bytes {words} in bfloat16" in report.summary(record)
    assert report.result_table(record).rows[1][0] == "KV cache, bytes per token (bf16) until a window of 512 is full"
    record |= {"at_context": 4096, "kv_bytes_at_context_bf16": [2000, 1500]}
    assert "takes 1,500 bytes at 4,096 tokens in bfloat16" in report.summary(record)
    assert "until" not in report.summary(record | {"source": {}})


def test_the_page_of_latent_values_says_what_changed(place, unwrapped):
    command = ("convert", "source", "--calibration", "corpus.txt", "--tokens", "2000", "--evaluate", "other.txt")
    assert unwrapped(*command, "--cache", "75.5%", "--evaluate-tokens", "320", "--out", "result")[0] == 0
    record = json.loads(Path("result/conversion.json").read_text())
    keys, values = ([at[name] for at in record["layers"]] for name in ("key_rank", "rank"))
    columns = [f"{min(ranks)} to {max(ranks)}" if len(set(ranks)) > 1 else ranks[0] for ranks in (keys, values)]
    page, card = Page(Path("result/conversion.html").read_text()), Path("result/README.md").read_text()
    assert page.fetched == []
    shown = " ".join("".join(page.text).split())
    taken, whole = record["kv_bytes_per_token_bf16"][::-1]
    for words in (shown, " ".join(card.split())):
        for part in (
            f"The cache holds {columns[0]} columns of keys and {columns[1]} columns of values in each layer, of which",
            f"{taken:,} bytes per token in bfloat16, {taken / whole:.1%} of the source's {whole:,}",
            "at most 75.50% of the source's",
            "Queries, MLPs, norms and embeddings are the source's",
            "nothing was trained",
        ):
            assert part in words
    for part in ("Key rank: columns", "Rank: columns of", "Ridge: ", "held out from the fit", "converted to latents"):
        assert part in shown
    assert "Kept: " not in shown and "Merged: " not in shown and "of the value heads go" not in shown
    assert yaml.safe_load(card.split("---\n")[1])["tags"] == ["leanqkv", "kv-cache", "latents"]
    _check_made_again(Path("result"), unwrapped)


@pytest.mark.parametrize("ranks, words", [([8, 32, 24], "8 to 32 columns"), ([16, 16], "16 columns")])
def test_columns_of_the_layers_in_words(place, ranks, words):
    Path("result").mkdir()
    layers = [{"layer": i, "missed": 0.1, "ridge": None, "rank": rank} for i, rank in enumerate(ranks)]
    record = {"to": "latents", "parameters": [10, 9], "kv_bytes_per_token_bf16": [4, 3], "layers": layers}
    Path("result/conversion.json").write_text(json.dumps(record | {"cache": 0.75}))
    page = KIND.write(Path("result")).read_text()
    assert f"The cache holds {words} of values" in page and "at most 75% of the source" in page


def _check_card(result, evaluation):
    _, front, body = (result / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front) == {
        "base_model": "source",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["leanqkv", "kv-cache", "skipv1"],
    }
    assert "reads 2 of its 4 value heads from the first layer" in body
    assert f"| {evaluation['after']['loss']:.4f} |" in body and "## Limits" in body
    [code] = re.findall(r"```python\n(.*?)```", body, re.DOTALL)
    names: dict = {}
    exec(code, names)
    assert isinstance(names["model"], AutoModelForCausalLM.from_pretrained("result").__class__)
    assert len(names["tokenizer"]) <= VOCABULARY


def _check_made_again(result, unwrapped):
    """The page from conversion.json alone; a model card that its owner edited stays."""
    page, card = ((result / name).read_bytes() for name in ("conversion.html", "README.md"))
    (result / "conversion.html").unlink()
    (result / "README.md").write_text("mine")
    assert unwrapped("report", "result")[0] == 0
    assert (result / "conversion.html").read_bytes() == page and (result / "README.md").read_text() == "mine"
    (result / "README.md").unlink()
    KIND.write(result)
    assert (result / "README.md").read_bytes() == card


@pytest.mark.parametrize("to", [("skipv1", "--method", "mean-v"), ("nonlinear-query",)])
@pytest.mark.parametrize("evaluated", [True, False])
def test_every_conversion_has_a_page(place, unwrapped, to, evaluated):
    options = ("--evaluate", "other.txt", "--evaluate-tokens", "320") if evaluated else ()
    code, out, _ = unwrapped("convert", "source", "--to", *to, *options, "--out", "result")
    assert code == 0 and ("has not been measured" in out) != evaluated
    record = json.loads(Path("result/conversion.json").read_text())
    card = Path("result/README.md").read_text()
    assert ("evaluation" in record) == ("KL(source" in card) == evaluated
    assert evaluated or "has not been measured" in card
    Page(Path("result/conversion.html").read_text())
    if evaluated and to[0] == "nonlinear-query":
        # The function is the source's; float32 leaves its rounding.
        assert (
            "−0.0000" not in out
            and abs(record["evaluation"]["divergence"]["mean"]) < 1e-9
            and record["evaluation"]["agreement"]["mean"] == 1
        )


def test_a_record_with_other_entries_of_its_layers_still_makes_a_page(place):
    Path("result").mkdir()
    layers = [{"layer": i, "missed": 0.1, "missed_held_out": 0.2, "rank": 3, "odd": {"a": [1]}} for i in range(3)]
    record = {"to": "skipv1", "parameters": [10, 9], "kv_bytes_per_token_bf16": [4, 3], "layers": layers}
    Path("result/conversion.json").write_text(json.dumps(record))
    shown = KIND.write(Path("result")).read_text()
    assert "missed held out" in shown and "20.00%" in shown
    Path("result/conversion.json").write_text(json.dumps({"to": "skipv1", "parameters": [10]}))
    with pytest.raises(LeanError, match=r"conversion\.json is damaged"):
        KIND.write(Path("result"))


def test_the_validation_split_of_the_calibration_text(place, unwrapped):
    code, out, err = unwrapped(*CONVERT, "--calibration", "code.txt,corpus.txt:0.9", "--evaluate", "corpus.txt")
    record = json.loads(Path("result/conversion.json").read_text())
    assert code == 0 and record["evaluation"]["text"]["split"] == "validation"
    assert "corpus.txt, 0.1 MB, validation" in out and "warning" not in err
    assert [part["share"] for part in record["calibration"]["parts"]] == [pytest.approx(0.1), 0.9]


def test_texts_of_different_kinds_are_warned_of(place, unwrapped):
    code, _, err = unwrapped(*CONVERT, "--calibration", "code.txt", "--evaluate", "other.txt")
    assert code == 0 and err.count("warning") == 1
    assert re.search(
        r"takes the source [\d.]+ bits per byte, the evaluation text [\d.]+, more than a factor of 1.5", err
    )


def test_a_short_evaluation_text_makes_the_texts_no_slower_to_compare(place, unwrapped, monkeypatch):
    """As many calibration tokens are scored as of any other text, from all over them."""
    rows, losses = [], converting.window_losses

    def seen(model, tokens, starts, *rest, **how):
        rows.append(tokens.reshape(len(starts), -1) if len(tokens) % 32 == 0 else None)
        return losses(model, tokens, starts, *rest, **how)

    sample: list[np.ndarray] = []
    compare = converting.Comparison.compare_domains
    monkeypatch.setattr(
        converting.Comparison, "compare_domains", lambda self, *at: sample.append(at[0]) or compare(self, *at)
    )
    monkeypatch.setattr(converting, "window_losses", seen)
    monkeypatch.setattr(converting, "COMPARED_TOKENS", 320)
    Path("short.txt").write_text("the quick brown fox")
    assert unwrapped(*FROM_CORPUS, "--evaluate", "short.txt")[0] == 0
    assert rows[0].shape == (10, 32)
    assert (rows[0][0] == sample[0][0]).all() and (rows[0][-1] == sample[0][-1]).all()


def test_too_little_memory_is_refused_first(place, unwrapped, monkeypatch):
    monkeypatch.setattr("leanqkv.commands.converting.free_memory", lambda device: 1000)
    code, _, err = unwrapped(*FROM_CORPUS, "--evaluate", "other.txt")
    assert code == 2 and "--evaluate holds source and result in float32: 0.0 GB of memory" in err


def test_a_kill_during_the_evaluation_leaves_what_the_same_command_completes(place, unwrapped, monkeypatch):
    class Killed(BaseException):
        pass

    def kill(*_, **__):
        raise Killed

    command = (*FROM_CORPUS, "--evaluate", "other.txt", "--evaluate-tokens", "320")
    monkeypatch.setattr(paired, "paired_figures", kill)
    with pytest.raises(Killed):
        unwrapped(*command)
    assert not Path("result").exists() and Path(".result.partial/model.safetensors").exists()
    monkeypatch.undo()
    monkeypatch.chdir(place)
    monkeypatch.setattr("leanqkv.checkpoints.write._write_shard", lambda *_: pytest.fail("written again"))
    assert unwrapped(*command)[0] == 0
    files = {file.name for file in Path("result").iterdir()}
    assert {"conversion.json", "conversion.html", "README.md", "model.safetensors"} <= files
    assert not files & {"job.json", ".lock"} and not list(place.glob(".result*"))


@pytest.mark.parametrize("to", ["merged-values", "latents"])
def test_the_time_of_an_interrupted_calibration_counts(place, to):
    sample = text(6 * 32).astype(np.int64).reshape(6, 32)

    def kill(directory):
        raise KeyboardInterrupt

    convert = partial(Conversion(open_causal_lm(Path("source")), to).write, Path("result"))
    with pytest.raises(KeyboardInterrupt):
        convert(tokens=sample, evaluate=kill)
    state = Path(".result.calibration/state.json")
    content = json.loads(state.read_text())
    assert content["seconds"] > 0
    state.write_text(json.dumps(content | {"seconds": 1000.0}))
    assert 1000 < convert(tokens=sample)["seconds"] < 1500


@pytest.mark.parametrize(
    "change",
    [
        {"options": {"cache": 0.9}},
        {"options": {"layers": (0, 2)}},
        {"to": "merged-values"},
        {"backwards": True},
    ],
)
def test_an_interrupted_calibration_with_other_options_is_not_continued(place, change):
    """Its measurements or its fits are of something else."""
    sample = text(6 * 32).astype(np.int64).reshape(6, 32)

    def kill(directory):
        raise KeyboardInterrupt

    tokens = sample[::-1].copy() if change.get("backwards") else sample
    other = {"to": change.get("to", "latents"), "tokens": tokens, "options": change.get("options", {})}

    def convert(out: str, tokens: np.ndarray, to: str, options: dict, **how) -> None:
        Conversion(open_causal_lm(Path("source")), to, **options).write(Path(out), tokens, **how)

    with pytest.raises(KeyboardInterrupt):
        convert("result", sample, "latents", {}, evaluate=kill)
    for name in ("result", "expected"):
        convert(name, **other)
    layers = [json.loads(Path(name, "conversion.json").read_text())["layers"] for name in ("result", "expected")]
    assert layers[0] == layers[1]
    assert Path("result/model.safetensors").read_bytes() == Path("expected/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "directory, name",
    [("hub/models--owner--name/snapshots/0123abc", "owner/name"), ("models/llama", "llama")],
)
def test_the_base_model_has_its_name_on_the_hub(tmp_path, directory, name):
    assert origin(tmp_path / directory)["base_model"] == name


def test_the_record_names_the_device_of_the_calibration(tmp_path):
    made = converting.about_conversion(tmp_path / "source", tmp_path / "result", "mps")
    assert made["hardware"]["device"] == "mps"


def test_layers_are_printed_in_logs_or_when_asked_for(place, unwrapped, monkeypatch):
    monkeypatch.setattr(type(progress.console), "is_terminal", True)
    assert "layer 1: heads" not in unwrapped(*FROM_CORPUS)[1]
    assert "layer 1: heads" in unwrapped(*FROM_CORPUS, "--verbose", "--out", "verbose")[1]
