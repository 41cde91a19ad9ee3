"""In-context regression (Wu et al. 2025, Theorem 2): exact losses, constructions, the record and its document."""

import itertools
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from experiments.theory import in_context_regression as regression
from experiments.theory.check import RECORD
from experiments.theory.command import app
from experiments.theory.in_context_check import CHECK
from experiments.theory.in_context_record import KIND, Settings
from experiments.theory.in_context_regression import FLOAT, Task, Weights
from experiments.theory.in_context_report import markdown_tables
from experiments.theory.in_context_training import Recipe, errors, forward, initial, train
from leanqkv.errors import LeanError

ROOT = Path(__file__).parent.parent.parent.parent
RESULTS = ROOT / "results" / "theory" / "in-context"
DOCUMENT = (ROOT / "docs" / "theory.md").read_text().partition("\n## In-context regression")[2].partition("\n## ")[0]
ATTENTION, FIRST_VALUE = False, True


def random_weights(task: Task, rows: int, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=FLOAT)

    d = task.d
    return Weights(normal(rows, d), normal(d - rows, d), normal(2, d, rows), normal(2, d, d))


# Moments


@pytest.mark.parametrize("task", [Task(1, 3, 0.6, 0.7), Task(2, 1, 0.6, 0.7)], ids=str)
def test_moments_are_those_of_a_sum_over_every_quadrature_point(task):
    """Three Gauss-Hermite points a variable integrate degree five exactly; no variable has more than four here."""
    d, n = task.d, task.n
    points, weights = np.polynomial.hermite_e.hermegauss(3)
    weights = weights / weights.sum()
    moments = np.zeros((2 * d,) * 4)
    with_target = np.zeros((2 * d, 2 * d, d, d))
    target = 0.0
    for indices in itertools.product(range(3), repeat=d * d + 2 * d * n):
        values, weight = points[list(indices)], weights[list(indices)].prod()
        w = task.prior * np.eye(d) + values[: d * d].reshape(d, d)
        x, noise = values[d * d :].reshape(2, d, n)
        z = np.concatenate([x, w @ x + task.sigma * noise])
        c = z @ z.T
        moments += weight * np.multiply.outer(c, c)
        with_target += weight * np.multiply.outer(c, w)
        target += weight * (w**2).sum()
    exact = regression.second_moments(task)
    np.testing.assert_allclose(exact[0], moments, atol=1e-9)
    np.testing.assert_allclose(exact[1], with_target, atol=1e-9)
    assert exact[2] == pytest.approx(target)


def test_nodes_have_the_moments():
    task = Task(3, 5, 0.6, 0.7)
    c, w, _ = regression.nodes(task)
    moments, with_target, _ = regression.second_moments(task)
    torch.testing.assert_close(torch.einsum("sij,skl->ijkl", c, c), moments, rtol=1e-9, atol=1e-8)
    torch.testing.assert_close(torch.einsum("sij,spq->ijpq", c, w), with_target, rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize("skip", [ATTENTION, FIRST_VALUE])
@pytest.mark.parametrize("rows", range(4))
def test_the_short_form_is_the_network_token_by_token(rows, skip):
    task = Task(3, 4, 0.5, 0.3)
    weights = random_weights(task, rows)
    tokens, _ = regression.sample(task, 5, torch.Generator().manual_seed(1))
    pairs = torch.cat([tokens[..., 0:-1:2], tokens[..., 1::2]], 1)
    t = regression.predict(weights, pairs @ pairs.transpose(1, 2), skip)
    expected = (t @ tokens[..., -1:])[..., 0]
    torch.testing.assert_close(regression.forward(weights, tokens, skip), expected)


@pytest.mark.parametrize("skip", [ATTENTION, FIRST_VALUE])
def test_exact_losses_are_the_sampled_ones(skip):
    task = Task(2, 3, 0.5, 0.4)
    weights = random_weights(task, 1)
    weights = replace(weights, values=0.02 * weights.values)
    losses = regression.sampled_losses(task, [(weights, skip)], 40_000, seed=2)[0]
    assert abs(float(losses.mean()) - regression.exact_loss(task, weights, skip)) < 2 * regression.half_width(losses)


# The statement at W_0 = 0


@pytest.mark.parametrize("rows", range(5))
def test_constructions_reach_the_closed_forms(rows):
    task = Task(4, 6, 0.5)
    first_value = regression.first_value_optimum(task, rows)
    expected = regression.closed_form_loss(task, rows, FIRST_VALUE)
    assert regression.exact_loss(task, first_value, FIRST_VALUE) == pytest.approx(expected, abs=1e-9)
    attention = regression.attention_near_optimum(task, rows, scale=100)
    expected = regression.closed_form_loss(task, rows, ATTENTION)
    assert expected <= regression.exact_loss(task, attention, ATTENTION) + 1e-9
    assert regression.exact_loss(task, attention, ATTENTION) == pytest.approx(expected, abs=1e-6)


def test_the_optimum_is_one_step_of_gradient_descent():
    task = Task(3, 5, 0.5)
    tokens, _ = regression.sample(task, 4, torch.Generator().manual_seed(3))
    x, y, last = tokens[..., 0:-1:2], tokens[..., 1::2], tokens[..., -1:]
    step = 1 / (task.n + task.d + 1 + task.sigma**2)
    found = regression.forward(regression.first_value_optimum(task, 3), tokens, FIRST_VALUE)
    torch.testing.assert_close(found, (step * y @ x.transpose(1, 2) @ last)[..., 0])


@pytest.mark.parametrize("skip", [ATTENTION, FIRST_VALUE])
@pytest.mark.parametrize("rows", [1, 2])
def test_an_optimiser_finds_the_closed_form_and_nothing_below(rows, skip):
    task = Task(2, 4, 0.5)
    found = regression.optimise(task, rows, skip, starts=4)
    expected = regression.closed_form_loss(task, rows, skip)
    assert found.loss == pytest.approx(expected, abs=1e-4)
    assert min(found.losses) > expected - 1e-7
    assert regression.exact_loss(task, found.weights, skip) == pytest.approx(found.loss, abs=1e-4)


def test_the_closed_gap_is_the_least_over_rows_and_positive_everywhere():
    for d, n, sigma in itertools.product((1, 2, 3, 7), (1, 2, 20), (0.0, 1.0, 10.0)):
        task = Task(d, n, sigma)
        expected = (d * d - (d // 2) * (d - d // 2)) * n / (n + d + 1 + sigma**2)
        assert regression.closed_form_gap(task) == pytest.approx(expected)
        assert regression.closed_form_gap(task) > 0


def sampled_gap(task: Task, first_value: Weights, skip: bool) -> tuple[float, float]:
    attention = regression.attention_near_optimum(task, task.d // 2, 30)
    losses = regression.sampled_losses(task, [(attention, ATTENTION), (first_value, skip)], 20_000, seed=4)
    gaps = losses[0] - losses[1]
    return float(gaps.mean()), regression.half_width(gaps)


def test_the_sampled_gap_agrees_and_notices_what_is_broken():
    task = Task(2, 4, 0.5)
    optimum = regression.first_value_optimum(task, 2)
    gap = regression.closed_form_gap(task)
    mean, half_width = sampled_gap(task, optimum, FIRST_VALUE)
    assert abs(mean - gap) < 2 * half_width < gap
    turned = replace(optimum, values=optimum.values * torch.tensor([-1.0, 1.0], dtype=FLOAT)[:, None, None])
    for broken, skip in ((turned, FIRST_VALUE), (optimum, ATTENTION)):
        mean, half_width = sampled_gap(task, broken, skip)
        assert mean + half_width < 0, "broken, it is worse than attention"
        infimum = regression.closed_form_loss(task, task.d // 2, ATTENTION)
        assert infimum - regression.exact_loss(task, broken, skip) < 0


def test_without_the_first_layer_value_the_gap_is_gone(monkeypatch):
    whole = regression.attended
    monkeypatch.setattr(regression, "attended", lambda c, copy, first_layer_value: whole(c, copy, False))
    task = Task(2, 4, 0.5)
    best = min(regression.optimise(task, rows, FIRST_VALUE, starts=3).loss for rows in range(3))
    assert best == pytest.approx(regression.closed_form_loss(task, 1, ATTENTION), abs=1e-4)


# Where it does not hold


def test_with_no_rows_in_a_both_predict_zero():
    task = Task(3, 4, 0.5, 2.0)
    weights = random_weights(task, 0)
    tokens, _ = regression.sample(task, 3, torch.Generator().manual_seed(5))
    for skip in (ATTENTION, FIRST_VALUE):
        assert not regression.forward(weights, tokens, skip).any()
        assert regression.exact_loss(task, weights, skip) == pytest.approx(task.zero_loss)


@pytest.mark.parametrize("task", [Task(2, 4, 0.5, 6.0), Task(3, 6, 0.5, 8.0)], ids=str)
def test_at_one_a_the_first_value_is_worse_inside_the_hypothesis(task):
    assert task.in_hypothesis
    copy = regression.reversing_copy(task)
    attention = regression.split_attention(task, copy)
    found = regression.exact_loss(task, attention, ATTENTION)
    assert found == pytest.approx(regression.split_attention_loss(task), abs=1e-8)
    none = torch.zeros(0, task.d, dtype=FLOAT)
    first_value = regression.optimise(task, task.d, FIRST_VALUE, copy=(copy, none), starts=4)
    assert first_value.loss == pytest.approx(regression.reversed_first_value_loss(task), abs=1e-4)
    assert regression.reversal_bound(task) < 0
    assert regression.reversal_prior(task) < task.prior


def test_the_reversal_begins_where_it_is_said_to():
    task = Task(8, 16, 0.5)
    at = replace(task, prior=regression.reversal_prior(task))
    assert regression.reversal_bound(at) == pytest.approx(0, abs=1e-9)


def test_the_proofs_bound_at_full_rows_is_broken_by_a_prior():
    """One head on X X^T predicts W_0 x, which an argument from the symmetry of Y leaves out."""
    task = Task(2, 4, 0.5, 2.0)
    identity = torch.eye(2, dtype=FLOAT)
    values = torch.stack([task.prior / (task.n + task.d + 1) / 2 * identity, 0 * identity])
    weights = Weights(identity, torch.zeros(0, 2, dtype=FLOAT), identity.expand(2, 2, 2), values)
    at_most = task.zero_loss - task.d * task.prior**2 * task.n / (task.n + task.d + 1)
    assert regression.exact_loss(task, weights, ATTENTION) == pytest.approx(at_most)
    assert at_most < task.zero_loss


def test_the_proofs_constant_vanishes_with_few_examples():
    task = Task(4, 2, 0.5)
    assert float(regression.proof_constant(task, 3, 100, seed=0).max()) < 1e-12
    assert float(regression.proof_constant(task, 1, 100, seed=0).mean()) > 0.1
    assert regression.closed_form_gap(task) > 1


# Trained freely

SMALL = Recipe(steps=250, batch_size=64, warmup_steps=25, seeds=3, evaluation_sequences=4000)


@pytest.mark.parametrize("skip", [ATTENTION, FIRST_VALUE])
def test_from_tokens_alone_the_prediction_does_not_know_the_pairs(skip):
    """The printed equations: the same for Y and -Y and for any pairing, so at W_0 = 0 nothing beats predicting zero."""
    task = Task(2, 4, 0.5)
    tokens, _ = regression.sample(task, 6, torch.Generator().manual_seed(6))
    negated, shuffled = tokens.clone(), tokens.clone()
    negated[..., 1::2] *= -1
    shuffled[..., 1::2] = tokens[..., [3, 1, 7, 5]]
    parameters = initial(task, False, SMALL)
    found = forward(parameters, tokens[None], skip)
    torch.testing.assert_close(forward(parameters, negated[None], skip), found)
    torch.testing.assert_close(forward(parameters, shuffled[None], skip), found)
    parameters = initial(task, True, SMALL)
    assert not torch.allclose(forward(parameters, shuffled[None], skip), forward(parameters, tokens[None], skip))


def test_trained_with_positions_the_first_value_wins():
    task = Task(1, 4, 0.5)
    losses = {}
    for skip in (ATTENTION, FIRST_VALUE):
        parameters = train(task, skip, True, SMALL)
        losses[skip] = errors(task, parameters, skip, SMALL.evaluation_sequences, seed=7).mean(1)
        assert float(losses[skip].min()) > regression.closed_form_loss(task, 1, FIRST_VALUE) - 0.05
    assert float(losses[ATTENTION].min() - losses[FIRST_VALUE].min()) > 0.2


def test_training_is_paired():
    task = Task(1, 2, 0.5)
    short = replace(SMALL, steps=3, seeds=2)
    found = [errors(task, train(task, ATTENTION, True, short), ATTENTION, 50, seed=8) for _ in range(2)]
    assert torch.equal(*found)


# Record, document, command


def test_the_committed_table_is_that_of_the_committed_record_and_in_the_document():
    tables = markdown_tables(CHECK.load(RESULTS / "record.json"))
    assert (RESULTS / "table.md").read_text() == tables
    assert len(tables.split("\n\n")) == 8
    for table in tables.split("\n\n"):
        assert table.strip() in DOCUMENT, table.splitlines()[0]
    numbers = [line for line in DOCUMENT.splitlines() if line.startswith("| ---:")]
    assert len(numbers) == 8, "a table of numbers that is not from the record"


def test_the_document_takes_its_numbers_from_the_record():
    """Every decimal in the text outside the tables is one the tables have, or a setting's."""
    tables = (RESULTS / "table.md").read_text()
    prose = "\n".join(line for line in DOCUMENT.splitlines() if not line.startswith("|"))
    for number in re.findall(r"\d+\.\d+", prose):
        assert number in tables, f"{number} is in no table"


def test_the_committed_record_bears_out_what_the_document_says():
    record = CHECK.load(RESULTS / "record.json")
    for entry in record["by_rows"]:
        for key in ("attention", "first_value"):
            assert entry[key]["loss"] == pytest.approx(entry[key]["theory"], abs=1e-3)
    for entry in record["grid"]:
        assert entry["gap"] > 0
        assert abs(entry["sampled_gap"] - entry["gap"]) < 2 * entry["sampled_half_width"]
    assert all(entry["gap"] > 0 for entry in record["priors"])
    assert any(entry["in_hypothesis"] and entry["gap_at_most"] < 0 for entry in record["reversed"])
    for entry in record["reversed"]:
        if "gap" in entry:
            assert entry["attention"]["loss"] <= entry["attention_at_most"] + 1e-6
            assert entry["first_value"]["loss"] == pytest.approx(entry["first_value_exact"], abs=1e-3)
    positions = [entry for entry in record["training"] if entry["reads_positions"]]
    assert len(positions) == 5
    assert all(entry["gap_of_best"] > entry["gap_of_best_half_width"] for entry in positions)
    assert sum(entry["gap"] > entry["gap_half_width"] for entry in positions) == 3
    for entry in record["training"]:
        if entry["prior"] == 0:
            reached = entry["first_value_minimum"] if entry["reads_positions"] else entry["zero_loss"]
            best = entry["first_value"][entry["best_seeds"][1]]
            assert abs(best - reached) < 2 * entry["best_half_width"][1]
    assert record["settings"] == json.loads(json.dumps(asdict(Settings())))


def test_the_figure_is_drawn_from_the_record_alone(tmp_path):
    record = CHECK.load(RESULTS / "record.json")
    CHECK.write(json.loads(json.dumps(record)), tmp_path)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["figure.png", "table.md"]
    assert (RESULTS / "figure.png").stat().st_size < 200_000


def test_the_command_writes_a_record_and_draws_it_again(tmp_path):
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["in-context", "--quick", "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0
    assert sorted(file.name for file in out.iterdir()) == ["figure.png", "record.json", "report.html", "table.md"]
    record = CHECK.load(out / "record.json")
    assert record["versions"]["torch"] == torch.__version__
    assert record["settings"]["seed"] == 0
    first = (out / "table.md").read_text()
    (out / "table.md").unlink()
    assert CliRunner().invoke(app, ["in-context", "--redraw", "--out", str(out)]).exit_code == 0
    assert (out / "table.md").read_text() == first


def test_the_command_says_what_is_wrong(tmp_path):
    def fails(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["in-context", *arguments])
        assert isinstance(result.exception, LeanError)
        assert "\n" not in str(result.exception)
        return str(result.exception)

    (tmp_path / "file").write_text("")
    assert "is a file" in fails("--out", str(tmp_path / "file"))
    assert "there is no" in fails("--redraw", "--out", str(tmp_path))
    assert "clash" in fails("--quick", "--redraw", "--out", str(tmp_path))
    (tmp_path / "record.json").write_text(json.dumps({"record": RECORD, "kind": "another"}))
    assert KIND in fails("--quick", "--out", str(tmp_path))
    assert json.loads((tmp_path / "record.json").read_text())["kind"] == "another"
