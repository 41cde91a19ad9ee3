"""`leanqkv frontier`: what its points say against the pieces they are made of, goes on after a stop, and its page."""

import json
import re
import shutil
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from corpus import write_corpus
from rich.console import Console
from scipy import stats
from shapes import randomize, tiny

from leanqkv import LeanForCausalLM
from leanqkv.cache_bits import PLAIN, VALID, CacheBits
from leanqkv.checkpoints.tokenizer import load_tokenizer
from leanqkv.data.evaluation import EvaluationText
from leanqkv.data.tokenizer import train_tokenizer
from leanqkv.evaluate.harness import load_tasks, task_scores
from leanqkv.evaluate.paired import spread_windows
from leanqkv.evaluate.states import cached_states
from leanqkv.frontier import measure
from leanqkv.frontier.measure import calibration_samples
from leanqkv.frontier.points import PRECISIONS as QUANTIZED
from leanqkv.frontier.points import candidates
from leanqkv.frontier.scoring import Scorer, decode_speeds
from leanqkv.model.cache_quantized import BLOCK
from leanqkv.report.frontier import KIND, best_within, read_points, recommendations

VOCABULARY = 300
SMOLLM2 = "results/frontier/smollm2/frontier.json"
PRECISIONS = (PLAIN, *QUANTIZED)


ASKED = (
    *("frontier", "source", "--calibration", "calibration.txt", "--evaluate", "evaluation.txt", "--tokens", "1024"),
    *("--sequence-length", "128", "--evaluate-tokens", "256", "--contexts", "16", "--budgets", "84%,70%"),
    *("--kinds", "latents,separate-latents:80%,merged-values,skipv1,gqa"),
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A model with its tokenizer, two texts, and its frontier."""
    place = tmp_path_factory.mktemp("frontier")
    content = write_corpus(place / "calibration.txt").read_text()
    (place / "evaluation.txt").write_text("\n".join(reversed(content.splitlines()[:600])))
    config = tiny("llama", vocab_size=VOCABULARY, max_position_embeddings=256, hidden_size=32, num_hidden_layers=2)
    model = randomize(LeanForCausalLM(config), std=0.3)
    model.generation_config.repetition_penalty = 1.9  # which is no part of the likeliest tokens
    model.save_pretrained(place / "source")
    train_tokenizer(iter([content]), VOCABULARY).save_pretrained(place / "source")
    return place


@pytest.fixture
def place(prepared: Path, tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("LEANQKV_CACHE", str(prepared / "cache"))
    for entry in prepared.iterdir():
        if entry.name not in ("cache", "out"):
            (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def measured(place: Path, prepared: Path, unwrapped) -> Path:
    """A copy of the frontier, which is measured once."""
    if not (prepared / "out").exists():
        code, _, errors = unwrapped(*ASKED, "--out", str(prepared / "out"))
        assert code == 0, errors
    return Path(shutil.copytree(prepared / "out", place / "out"))


def test_the_points_are_all_there(measured: Path) -> None:
    record = json.loads((measured / "frontier.json").read_text())
    labels = ["source", "latents 84%", "latents 70%", "separate-latents 80%", "merged-values", "skipv1, mean-v"]
    labels += ["gqa, 50% of the heads", "gqa, 25% of the heads"]
    assert list(dict.fromkeys(point["label"] for point in record["points"])) == labels
    for label in labels:
        samples = 1 if label.startswith(("source", "skipv1", "gqa")) else 3
        found = [point for point in record["points"] if point["label"] == label]
        assert len(found) == samples * (1 if label.startswith(("skipv1", "gqa")) else len(PRECISIONS))
        assert sorted({point["sample"] for point in found}) == list(range(samples))
    source = [point for point in record["points"] if point["label"] == "source"]
    assert source[0]["scores"][0]["loss_difference"]["mean"] == 0 and source[0]["greedy_agreement"] == 1
    assert all(point["scores"][0]["divergence"]["mean"] > 0 for point in source[1:])  # they are read quantized
    assert all(point["same_tokens_without_cache"] for point in record["points"])
    for point in (one for one in record["points"] if not one["sample"]):
        assert point["tokens_per_second"]["16"] > 0 < point["of_source"]["16"]
    assert len(record["calibration"]["seconds"]) == 3 and min(record["calibration"]["seconds"]) > 0
    assert record["seconds"] == pytest.approx(sum(point["seconds"] for point in record["points"]))
    sizes = {point["label"]: point["bytes_per_token"] for point in record["points"] if point["key_bits"] == 16}
    for share in (84, 70):
        assert sizes[f"latents {share}%"] <= share / 100 * sizes["source"]
    assert not list(measured.glob("calibration*")) and not (measured / "model").exists()


def test_what_is_measured_is_not_measured_again(measured: Path, unwrapped) -> None:
    removed = measured / "points" / "latents-84-8-4-1.json"
    before = json.loads(removed.read_text())
    removed.unlink()
    (measured / "points" / "fitting-1.json").unlink()  # the second sample's fits are made anew
    times = {file.name: file.stat().st_mtime_ns for file in (measured / "points").iterdir()}
    assert unwrapped(*ASKED, "--out", "out")[0] == 0
    again = json.loads(removed.read_text())
    assert {**again, "seconds": 0} == {**before, "seconds": 0}
    assert {name: (measured / "points" / name).stat().st_mtime_ns for name in times} == times
    for other, named in (("--calibrations", "calibration"), ("--contexts", "contexts")):
        code, _, errors = unwrapped(*ASKED, other, "2", "--out", "out")
        assert code == 2 and f"holds another frontier ({named}: " in errors


def test_a_budget_at_a_length_is_another_frontier_than_one_without(place: Path, unwrapped) -> None:
    asked = (
        *ASKED,
        "--calibrations",
        "1",
        "--contexts",
        "0",
        "--kinds",
        "merged-values",
        "--cache-bits",
        "16",
        "--out",
    )
    at = ("--at-context", "128")
    for name, first, then in (("with", at, ()), ("without", (), at)):
        assert unwrapped(*asked, name, *first)[0] == 0
        code, _, errors = unwrapped(*asked, name, *then)
        assert code == 2 and f"{name} holds another frontier (at_context: " in errors
        assert unwrapped(*asked, name, *first)[0] == 0


def test_the_page(measured: Path) -> None:
    page = KIND.write(measured).read_text()
    speed = "speed of one sequence after 16 tokens, of the source&#x27;s"
    for words in ("For every budget", "latents 84%, 8/4 bits", "What every layer caches", "Time of the fits", speed):
        assert words in page
    assert page.count("<figure>") == 2
    record = json.loads((measured / "frontier.json").read_text())
    points = read_points(record)
    for share in (1.0, 0.84, 0.5, 0.3):
        best = best_within(points, share)
        within = [point for point in points if point.share <= share]
        assert (best is None) == (not within)
        assert best is None or best.loss == min(point.loss for point in within)
    sentences = list(recommendations(record))
    assert len(sentences) == 5 and all(sentence.startswith("At most") for sentence in sentences)


def test_the_page_is_made_again_from_the_record_alone(measured: Path, unwrapped, tmp_path: Path) -> None:
    (tmp_path / "frontier.json").write_text((measured / "frontier.json").read_text())
    code, out, errors = unwrapped("report", str(tmp_path))
    assert (code, errors) == (0, "") and "latents 84%, 8/4 bits" in out
    for name in ("frontier.html", "table.md"):
        assert (tmp_path / name).read_text() == (measured / name).read_text()


def test_what_loses_a_nat_is_not_recommended(measured: Path) -> None:
    record = json.loads((measured / "frontier.json").read_text())
    assert not any("gqa" in sentence for sentence in _worse(record, "gqa", 1.01))
    assert all("no point is that small and of use" in sentence for sentence in _worse(record, "", 1.01))


def test_what_loses_a_nat_is_not_drawn(measured: Path) -> None:
    record = json.loads((measured / "frontier.json").read_text())
    for nats, drawn in ((0.5, True), (1.01, False)):
        _worse(record, "gqa", nats)
        (measured / "frontier.json").write_text(json.dumps(record))
        page = KIND.write(measured).read_text()
        assert ("gqa, 16 bits" in page) == drawn and "gqa, 50% of the heads, 16 bits" in page


def _worse(record: dict, kind: str, nats: float) -> list[str]:
    """The recommendations where all points of a kind lose so much."""
    for point in record["points"]:
        for score in point["scores"] if kind in point["label"] else ():
            score["loss_difference"]["mean"] = nats
    return list(recommendations(record))


def test_a_point_is_the_mean_of_its_calibrations(measured: Path) -> None:
    """Its interval is Student's t over them; of one calibration it is the one over windows."""
    record = json.loads((measured / "frontier.json").read_text())
    points = {point.label: point for point in read_points(record)}
    found = [p for p in record["points"] if (p["label"], p["key_bits"]) == ("latents 84%", 16)]
    means = [point["scores"][0]["loss_difference"]["mean"] for point in found]
    width = stats.t.ppf(0.975, 2) * np.std(means, ddof=1) / 3**0.5
    point = points["latents 84%, 16 bits"]
    assert point.losses[0] == (pytest.approx(np.mean(means)), pytest.approx(width))
    assert point.share == found[0]["bytes_per_token"] / record["source"]["bytes_per_token"] <= 0.84
    [single] = [p for p in record["points"] if (p["label"], p["key_bits"]) == ("skipv1, mean-v", 16)]
    score = single["scores"][0]["loss_difference"]
    assert points["skipv1, mean-v, 16 bits"].losses[0] == (score["mean"], score["half_width"])
    assert points["source, 16 bits"].share == 1


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 100}], ids=str)
@torch.no_grad()
def test_states_read_the_quantized_cache_as_decoding_does(fields) -> None:
    """One token at a time gives what whole blocks give, in each row of a batch."""
    model = randomize(LeanForCausalLM(tiny("llama", max_position_embeddings=256, **fields)), std=0.3).eval()
    ids = torch.randint(model.config.vocab_size, (2, 2 * BLOCK + 5), generator=torch.Generator().manual_seed(0))
    precision = CacheBits(4, 4)
    states = cached_states(precision)
    found, cache = states(model, ids), precision.cache(model.config)
    expected = [
        model.model(input_ids=ids[:, at : at + 1], past_key_values=cache).last_hidden_state
        for at in range(ids.shape[1])
    ]
    torch.testing.assert_close(found, torch.cat(expected, 1), rtol=0, atol=1e-4)
    torch.testing.assert_close(found[1:], states(model, ids[1:]), rtol=0, atol=1e-4)
    whole = cached_states(PLAIN)(model, ids)
    assert (found[:, :BLOCK] - whole[:, :BLOCK]).abs().max() < 1e-4 < (found - whole).abs().max()


def test_every_precision_has_its_own_score() -> None:
    config = tiny("llama", max_position_embeddings=256)
    source, model = (randomize(LeanForCausalLM(config), std=0.3, seed=seed).eval() for seed in (0, 1))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 400).astype("uint16")
    text = EvaluationText("random numbers", "whole", tokens)
    scorer = Scorer(source, [(text, spread_windows(len(tokens), 192, 2))] * 2, 192)
    alone = [scorer.compare(model, [precision], lambda *_: None) for precision in PRECISIONS]
    together = scorer.compare(model, PRECISIONS, lambda *_: None)
    assert together == [one for [one] in alone] and together[0] != together[1] != together[2]


@pytest.mark.parametrize("mechanisms", [(), ("skipv1",), ("latent-keys", "latent-values"), ("keys-as-values",)])
def test_decoding_is_timed_behind_a_full_cache(monkeypatch, mechanisms: tuple[str, ...]) -> None:
    """Each step reads all that is said to be cached, in any precision and for any tensors of the plan; two models take
    turns in every round."""
    config, seen = tiny("llama", *mechanisms, max_position_embeddings=256), []
    model = randomize(LeanForCausalLM(config), std=0.3).eval()
    shallow = tiny("llama", max_position_embeddings=256, num_hidden_layers=1)
    source, layers = randomize(LeanForCausalLM(shallow)).eval(), (1, config.num_hidden_layers)
    forward = type(model.model).forward

    def recorded(self, **given):
        seen.append((len(self.layers), given["past_key_values"].get_seq_length()))
        return forward(self, **given)

    monkeypatch.setattr(type(model.model), "forward", recorded)
    for precision in PRECISIONS:
        seen.clear()
        both = decode_speeds([(source, PLAIN), (model, precision)], 130, new_tokens=2, rounds=3)
        assert [len(speeds) for speeds in both] == [3, 3] and min(map(min, both)) > 0
        assert seen == [(of, 130 + 2 * turn + step) for turn in range(4) for of in layers for step in range(2)]


def test_a_speed_is_a_share_of_the_sources_in_the_same_round(monkeypatch) -> None:
    monkeypatch.setattr(measure, "decode_speeds", lambda ways, context: [[8.0, 2.0, 4.0], [2.0, 1.0, 4.0]])
    one: Any = SimpleNamespace(scorer=SimpleNamespace(source=None), contexts=[512])
    assert measure.Frontier._speeds(one, None, PLAIN) == {"tokens_per_second": {512: 2}, "of_source": {512: 0.5}}


def test_samples_have_no_sequence_in_common() -> None:
    samples = calibration_samples(lambda count: np.arange(count * 4).reshape(count, 4), 3, 5)
    assert samples.shape == (3, 5, 4) and len(np.unique(samples)) == samples.size


@pytest.mark.parametrize("length", ["64", "127"])
def test_what_no_sequence_would_read_is_not_scored(place: Path, unwrapped, length: str) -> None:
    """Fewer tokens than two blocks would look as if quantizing cost nothing."""
    asked = (*ASKED, "--sequence-length", length, "--calibrations", "1", "--kinds", "merged-values", "--out", "short")
    assert unwrapped(*asked)[0] == 0
    record = json.loads((place / "short" / "frontier.json").read_text())
    assert {point["key_bits"] for point in record["points"]} == {16}
    words = f"blocks of 64 tokens, but a sequence has {length} tokens"
    for name in ("8/4 bits", "4 bits"):
        assert words in record["refused"][name]
    code, _, errors = unwrapped(*asked[:-1], "other", "--cache-bits", "8")
    assert code == 2 and f"error: --cache-bits 8: a quantized cache is read by {words}" in errors
    assert not (place / "other").exists()


def test_the_precisions_are_those_that_are_asked_for(place: Path, unwrapped) -> None:
    """Beside the model's own; what is asked for later is measured then."""
    asked = (*ASKED, "--calibrations", "1", "--kinds", "merged-values", "--out", "bits", "--cache-bits")
    for given, expected in (("2", {(16, 16), (2, 2)}), ("8/2,16,2", {(16, 16), (8, 2), (2, 2)})):
        assert unwrapped(*asked, given)[0] == 0
        record = json.loads((place / "bits" / "frontier.json").read_text())
        assert {(point["key_bits"], point["value_bits"]) for point in record["points"]} == expected
        assert record["refused"] == {}
    assert unwrapped(*asked, "2,3") == (2, "", f"error: --cache-bits is {VALID}; found '3'")


def test_every_point_answers_the_same_questions(place: Path, unwrapped) -> None:
    """With its own weights and through its own cache; the source's answers are those that are lost and won."""
    pytest.importorskip("lm_eval")
    words = (place / "evaluation.txt").read_text().split()
    questions = [{"goal": " ".join(words[n : n + 60]), "sol1": words[n], "sol2": words[n + 1]} for n in range(30)]
    (place / "piqa").mkdir()
    (place / "piqa" / "valid.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    (place / "piqa" / "valid-labels.lst").write_text("0\n1\n" * 15)
    asked = (*ASKED, "--calibrations", "2", "--kinds", "merged-values", "--cache-bits", "2", "--tasks", "piqa:piqa")
    assert unwrapped(*asked, "--limit", "20", "--out", "asked")[0] == 0
    record = json.loads((place / "asked" / "frontier.json").read_text())
    first = [point for point in record["points"] if not point["sample"]]
    assert len(first) == 4 and not any("tasks" in point for point in record["points"] if point["sample"])
    model, tokenizer = LeanForCausalLM.from_pretrained("source").eval(), load_tokenizer(Path("source"))
    alone = [
        task_scores(model, tokenizer, load_tasks(["piqa:piqa"]), limit=20, cache_bits=bits).answers["piqa"]["acc"]
        for bits in (PLAIN, CacheBits(2, 2))
    ]
    pairs = list(zip(*alone, strict=True))
    for point, right in zip(first, alone, strict=False):
        assert point["label"] == "source" and point["tasks"]["piqa"]["acc"] == pytest.approx(np.mean(right))
    assert [first[0]["paired"]["piqa"]["acc"][name] for name in ("lost", "won")] == [0, 0]
    lost, won = pairs.count((1.0, 0.0)), pairs.count((0.0, 1.0))
    assert lost + won > 0  # the cache is read
    assert [first[1]["paired"]["piqa"]["acc"][name] for name in ("lost", "won")] == [lost, won]
    assert f"| {np.mean(alone[1]):.1%} (−{lost}, +{won}) |" in (place / "asked" / "table.md").read_text()
    removed = place / "asked" / "points" / "source-2-2-0.json"
    removed.unlink()
    assert unwrapped(*asked, "--limit", "20", "--out", "asked")[0] == 0
    again = json.loads((place / "asked" / "frontier.json").read_text())
    assert [one.get("paired") for one in again["points"]] == [one.get("paired") for one in record["points"]]
    code, _, errors = unwrapped(*asked, "--limit", "21", "--out", "asked")
    assert code == 2 and "holds another frontier (questions.limit: 20 there, 21 asked)" in errors


@pytest.mark.parametrize("fields, same", [({}, False), ({"qk_norm": True}, True), ({"sliding_window": 4}, True)])
def test_separate_latents_are_measured_where_they_are_others(fields: dict[str, Any], same: bool) -> None:
    """Values are made of keys neither with norms of these nor behind windows: both kinds are one there."""
    config = tiny("llama", **fields)
    found, refused = candidates(config, {}, {"latents": (0.84, 0.75), "separate-latents": (0.84, 0.7)})
    labels = [one.label for one in found]
    assert labels == ["source", "latents 84%", "latents 75%", *([] if same else ["separate-latents 84%"]), *labels[-1:]]
    assert labels[-1] == "separate-latents 70%"  # of which there are no latents to be the same as
    assert list(refused) == ["separate-latents 84%"] * same
    assert all("the same as latents 84%" in words for words in refused.values())
    found, refused = candidates(config, {}, {"latents": (0.84,), "unrotated-latents": (0.84, 0.7)})
    labels = [one.label for one in found]
    same = "sliding_window" in fields  # norms are behind what is cached
    assert labels == ["source", "latents 84%", *([] if same else ["unrotated-latents 84%"]), "unrotated-latents 70%"]
    assert ["before rotary positions: it is the same as latents 84%" in words for words in refused.values()] == [
        True
    ] * same
    alone, _ = candidates(config, {}, {"separate-latents": (0.84,)})
    assert [one.label for one in alone] == ["source", "separate-latents 84%"]


def test_kinds_that_cannot_be_built_are_left_out_with_the_reason():
    """First-layer values of layers whose windows differ."""
    config = tiny("llama", num_hidden_layers=3, sliding_window=5, window_layers=[0, 1])
    tensors = LeanForCausalLM(config).state_dict()
    found, refused = candidates(config, tensors, {"latents": [0.84], "skipv1": []})
    assert [one.kind for one in found] == ["source", "latents"]
    assert "another sliding window" in refused["skipv1, mean-v"]


def test_the_table_fits_a_terminal_of_80_columns():
    """No number and no header is broken within a word."""
    console = Console(width=80, file=StringIO())
    console.print(KIND.terminal(json.loads(Path(__file__).parents[1].joinpath(SMOLLM2).read_text())))
    shown = console.file.getvalue()
    assert "likeliest" in shown.split() and all(len(line) <= 80 for line in shown.splitlines())
    assert not re.search(r"(?m)^\s*[\d.]+%?\s*$", shown), "a number that is broken at the end of a line"
