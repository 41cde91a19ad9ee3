"""benchmarks/peers.py without a clone: columns, ranks, pairs of windows, refusals and tables."""

import subprocess
from types import SimpleNamespace

import numpy as np
import peer_losses
import peer_processes
import peers
import pytest
import torch
from scipy import stats
from shapes import randomize, tiny, tokens

from leanqkv import LeanForCausalLM
from leanqkv.data.evaluation import EvaluationText
from leanqkv.errors import LeanError
from leanqkv.evaluate.paired import paired_scores, spread_windows
from leanqkv.files import write_json

SOURCE = {"layers": 3, "heads": 2, "head_dim": 64, "columns": 256}


@pytest.mark.parametrize(
    ("share", "source", "parts", "columns"),
    [
        (0.84, 384, 1, 322),
        (0.75, 384, 1, 288),
        (0.28, 384, 1, 107),
        (0.28, 384, 30, 3225),
        (0.07, 100, 1, 7),
        (0.29, 100, 1, 29),
    ],
)
def test_columns_are_the_most_within_the_share(share, source, parts, columns):
    assert peer_losses.columns_for(share, source, parts) == columns
    assert columns <= share * source * parts + 1e-6 < columns + 1


def test_a_joint_rank_and_the_kept_keys_fill_the_columns():
    for columns in range(90, 385):
        rank = peer_losses.joint_rank(columns, 96, 3)
        assert (rank == 0 and columns < 99) or 96 + 3 * rank <= columns < 96 + 3 * (rank + 1)


def test_palu_takes_up_to_four_heads_together():
    assert [peer_losses.group_of(heads) for heads in (1, 2, 3, 4, 5, 6, 8, 9, 32)] == [1, 2, 3, 4, 1, 3, 4, 3, 4]


def test_palu_gets_the_most_ranks_within_the_share():
    """As its own code, of equal ranks, which are rounded to the nearest."""
    asked, whole = [], 13 * SOURCE["columns"]

    def rank_search(model, tokenizer, args):
        asked.append(args.param_ratio_target)
        rank = max(1, round(128 * args.param_ratio_target))
        ranks = {f"{name}.{layer}": [rank] for layer in range(13) for name in ("k_proj", "v_proj")}
        return ranks, 26 * rank, whole

    search, job = SimpleNamespace(rank_search=rank_search), SimpleNamespace(source={**SOURCE, "layers": 13})
    # The last one is of 54 columns, whose share of all is rounded.
    for share in (1.0, 0.84, 0.75, 0.5, 0.28, 0.01, 54 / whole):
        ranks, args = peer_processes.palu_ranks(search, SimpleNamespace(), "uniform", share, job)
        assert ranks["k_proj.0"] == [int(128 * share)] and args.search_method == "uniform"
        assert args.param_ratio_target <= share
    assert all(float(whole * ratio).is_integer() for ratio in asked)
    with pytest.raises(LeanError, match=r"no ranks for 0.1% of the cache"):
        peer_processes.palu_ranks(search, SimpleNamespace(), "uniform", 0.001, job)


def test_losses_are_paired_window_by_window():
    before, after = [[2.0, 3.0, 4.0], [1.0, 1.0]], [[2.5, 3.25, 4.75], [1.0, 1.0]]
    first, second = peer_losses.lost(after, before)
    differences = np.array([0.5, 0.25, 0.75])
    width = stats.t.ppf(0.975, 2) * differences.std(ddof=1) / 3**0.5
    assert first == {"mean": pytest.approx(0.5), "half_width": pytest.approx(width)}
    assert second == {"mean": 0, "half_width": 0}


def test_rows_are_compared_with_latents_of_their_share_and_calibration():
    rows = [
        {"method": method, "calibration_tokens": amount, "share": share, "losses": [[loss, loss + 1]]}
        for method, amount, share, loss in (
            (peer_losses.OURS, 10, 0.5, 1.5),
            (peer_losses.OURS, 20, 0.5, 1.25),
            ("other", 20, 0.5, 1.75),
            ("other", 10, 0.5, 2.5),
            ("other", 10, 1.0, 1.0),
            ("other", 40, 0.5, 2.0),
        )
    ]
    found = peer_losses.compared(rows, [[1.0, 2.0]])
    assert [row["lost"][0]["mean"] for row in found] == [0.5, 0.25, 0.75, 1.5, 0, 1.0]
    beyond = [row["beyond"][0]["mean"] if "beyond" in row else None for row in found]
    assert beyond == [None, None, 0.5, 1.0, None, 0.75]  # the last beside latents of 20 tokens


@torch.no_grad()
def test_losses_of_windows_are_those_of_the_package():
    model = randomize(LeanForCausalLM(tiny("llama")), std=0.3).eval()
    stream = tokens(1, 101)[0].numpy()
    text = EvaluationText("text", "whole", stream)
    found = peer_losses.losses_of(model, peer_losses.windows_of([text, text], 20, 4))
    (scores,) = paired_scores(model, model, stream, spread_windows(len(stream), 20, 4), 20)
    expected = [scores.before[scores.window == number].mean().item() for number in range(4)]
    assert found[0] == pytest.approx(expected, rel=1e-5) and found[0] == found[1]


@torch.no_grad()
def test_cached_columns_are_counted_after_decoding():
    config = tiny("llama", "gqa", max_position_embeddings=64)
    model = randomize(LeanForCausalLM(config), std=0.3).eval()
    columns = peer_losses.decoded(model, tokens(1, 9))
    assert columns == 2 * config.num_key_value_heads * config.head_dim


def job() -> peer_processes.Job:
    found = object.__new__(peer_processes.Job)
    found.source, found.rows, found.checks, found.windows = SOURCE, [], [], {}
    return found


def test_a_peer_that_differs_where_nothing_is_left_out_is_refused():
    one = job()
    one.check("all columns", [2.0, 3.0], [2.0 + peer_processes.ROUNDING / 2, 3.0])
    assert one.checks == [{"what": "all columns", "difference": pytest.approx(peer_processes.ROUNDING / 2)}]
    for loss in (3.0 + 2 * peer_processes.ROUNDING, float("nan")):
        with pytest.raises(LeanError, match=r"^all columns: a window's loss differs by"):
            one.check("all columns", [2.0, loss], [2.0, 3.0])


def test_a_model_that_keeps_more_than_its_share_is_refused():
    with pytest.raises(LeanError, match=r"^other keeps 129.0 columns, more than 50% of the source's"):
        job().keep("other", 10, 0.5, 129, torch.nn.Module())


def test_a_clone_is_read_at_its_commit_or_refused(tmp_path):
    peer = peer_processes.PEERS["mha2mla"]
    with pytest.raises(LeanError, match=r"has no 'def main' in src/mha2mla/2_norm.py; give a clone of https://"):
        peers.commit_of(peer, tmp_path)
    for file, name in peer.needs:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(name)
    with pytest.raises(LeanError, match="is no clone"):
        peers.commit_of(peer, tmp_path)

    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", "-C", tmp_path, *who, *words], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init")
    git("add", ".")
    git("commit", "-m", "code")
    assert peers.commit_of(peer, tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / peer.needs[0][0]).write_text(f"{peer.needs[0][1]}  # changed")
    with pytest.raises(LeanError, match=r"differs from its commit in src/mha2mla/2_norm.py"):
        peers.commit_of(peer, tmp_path)
    (tmp_path / peer.needs[1][0]).write_text("")
    with pytest.raises(LeanError, match="has no 'class MHA2MLAModelArguments'"):
        peers.commit_of(peer, tmp_path)


def test_the_tables_name_what_is_kept_and_lost():
    lost = {"mean": 0.25, "half_width": 0.125}
    rows = [
        {"method": "other", "calibration_tokens": 10, "share": 0.5, "columns": 128, "lost": [lost], "beyond": [lost]},
        {"method": "all", "calibration_tokens": 10, "share": 1, "columns": 256, "lost": [lost], "cached": 1024.0},
    ]
    about = {"source": SOURCE, "length": 32, "losses": [[2.0, 3.0]]}
    record = {**about, "texts": [{"description": "book, a file", "windows": 2}], "rows": rows}
    found = peers.tables({**record, "checks": [{"what": "nothing left out", "difference": 1e-6}]})
    lines = found.splitlines()
    assert lines[0] == "Loss of the source, nats per token: 2.500 on book (2 windows of 32). Above it:"
    assert lines[2] == "Calibrated on 10 tokens:"
    both = [{**rows[0], "method": peer_losses.OURS}, {**rows[0], "calibration_tokens": 40}]
    more = peers.tables({**record, "checks": [], "rows": both})
    assert "Calibrated on 40 tokens, and latents on 10:" in more.splitlines()
    assert lines[4] == "| method | columns kept of 256 | book | beyond leanqkv latents |"
    assert lines[6] == "| all | 256 (100.0%) | +0.250 ± 0.125 |  |"
    assert lines[7] == "| other | 128 (50.0%) | +0.250 ± 0.125 | +0.250 ± 0.125 |"
    assert "| all | 256.0 | 1,024.0 |" in lines and "| nothing left out | 1.0e-06 |" in lines


def test_shares_are_read_from_one_word():
    assert peers.read_shares("84%,0.5") == [0.84, 0.5]
    with pytest.raises(peers.argparse.ArgumentTypeError, match="--shares is a share of the source's cache"):
        peers.read_shares("84%,all")


def test_a_peer_with_more_tokens_needs_its_clone():
    options = SimpleNamespace(model="model", also=[("palu", 5)], palu=None, transmla=None, mha2mla=None)
    with pytest.raises(LeanError, match="--also names palu, of which there is no clone; give --palu CLONE"):
        peers.measure(options)


def test_a_peer_with_more_tokens_is_read_from_one_word():
    assert peers.read_also("palu=524288") == ("palu", 524288)
    for text in ("palu", "palu=0", "palu=all", "other=5"):
        with pytest.raises(peers.argparse.ArgumentTypeError, match=f"^{text!r} is none of transmla=TOKENS"):
            peers.read_also(text)


def test_what_a_peer_gave_is_asked_for_once(tmp_path):
    place, asked = tmp_path / "palu.json", {"lengths": (12, 34), "expected": {"source": [0.1 + 0.2]}}
    assert peers.earlier(None, asked) is None and peers.earlier(place, asked) is None
    write_json(place, {"asked": asked, "rows": [1], "checks": []})
    assert peers.earlier(place, asked)["rows"] == [1]
    assert peers.earlier(place, {**asked, "lengths": (12, 35)}) is None
