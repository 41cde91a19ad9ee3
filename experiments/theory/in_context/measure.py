"""What is measured of the in-context regression.

Wu et al. 2025, section 4 and appendix A. https://github.com/Zhoutong-Wu/SkipV1Former
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy import stats

from ..check import Parts, Progress
from ..report import Record
from . import statement as regression
from .statement import Task
from .training import Recipe, errors, train

Case = tuple[int, int, float]  # d, n, sigma
Report = Callable[[int, int], None]  # how much of a part is done, and how much there is


@dataclass(frozen=True)
class Settings:
    """What is computed. The record carries it; `quick()` is the smallest that still fills every part."""

    seed: int = 0
    starts: int = 6
    optimiser_steps: int = 600
    by_rows: tuple[Case, ...] = ((2, 4, 0.5), (3, 6, 0.5), (4, 8, 0.5))
    grid: tuple[Case, ...] = (
        (1, 4, 0.5),
        (2, 4, 0.5),
        (4, 8, 0.5),
        (8, 16, 0.5),
        (4, 2, 0.5),
        (4, 32, 0.5),
        (4, 8, 0.0),
        (4, 8, 1.0),
    )
    samples: int = 100_000
    scale: float = 30.0  # of A and B, where attention is near its infimum
    approach: Case = (4, 8, 0.5)
    scales: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0)
    curves: tuple[tuple[int, float], ...] = ((1, 0.5), (2, 0.5), (4, 0.5), (8, 0.5), (4, 1.0))
    curve_examples: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    priors: tuple[tuple[Case, tuple[float, ...]], ...] = (
        ((2, 4, 0.5), (0.0, 1.0, 2.0, 4.0, 8.0)),
        ((3, 6, 0.5), (0.0, 2.0, 4.0)),
    )
    reversed_optimised: tuple[tuple[Case, tuple[float, ...]], ...] = (
        ((2, 4, 0.5), (1.0, 2.0, 4.0, 8.0)),
        ((3, 6, 0.5), (4.0, 8.0)),
    )
    reversed_bounds: tuple[Case, ...] = ((8, 16, 0.5), (64, 128, 0.5))
    last_step: tuple[tuple[int, float], ...] = ((2, 0.1), (2, 1.0), (4, 1.0), (8, 1.0))  # d = n, sigma
    last_step_samples: int = 20_000
    any_copy: tuple[Case, ...] = ((1, 4, 0.5), (2, 4, 0.5), (3, 6, 0.5))
    any_copy_starts: int = 40
    any_copy_steps: int = 1500
    training: tuple[tuple[Case, float, bool], ...] = (  # case, prior, whether the first layer reads positions
        ((2, 4, 0.5), 0.0, True),
        ((2, 4, 1.0), 0.0, True),
        ((2, 8, 0.5), 0.0, True),
        ((3, 6, 0.5), 0.0, True),
        ((2, 4, 0.5), 2.0, True),
        ((2, 4, 0.5), 0.0, False),
        ((2, 4, 0.5), 2.0, False),
    )
    recipe: Recipe = field(default_factory=Recipe)

    @classmethod
    def quick(cls) -> "Settings":
        """Return settings of seconds instead of minutes, to try the command; their trained losses mean nothing."""
        case = (2, 4, 0.5)
        return cls(
            starts=2,
            optimiser_steps=100,
            by_rows=(case,),
            grid=((1, 4, 0.5), case),
            samples=2000,
            approach=case,
            priors=((case, (0.0, 2.0)),),
            reversed_optimised=((case, (2.0, 8.0)),),
            last_step=((2, 1.0),),
            last_step_samples=1000,
            any_copy=((1, 4, 0.5),),
            any_copy_starts=2,
            any_copy_steps=100,
            training=((case, 0.0, True), (case, 0.0, False)),
            recipe=Recipe(
                steps=20, batch_size=16, warmup_steps=5, seeds=2, choosing_sequences=500, evaluation_sequences=1000
            ),
        )


def measured(record: Record) -> Mapping[str, Any]:
    """Return what the parts measured; records older than the common header have them at the top."""
    return record.get("measured", record)


def parts(settings: Settings, progress: Progress) -> Parts:
    functions = {
        "by_rows": by_rows,
        "grid": grid,
        "approach": approach,
        "curves": curves,
        "priors": priors,
        "reversed": reversed_gaps,
        "last_step": last_step,
        "any_copy": any_copy,
        "training": training,
    }
    return {
        name: partial(_one_thread, function, settings, partial(progress, name.replace("_", " ")))
        for name, function in functions.items()
    }


def _one_thread(function: Callable[[Settings, Report], Any], settings: Settings, report: Report) -> Any:
    """Tensors this small only lose by more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function(settings, report)
    finally:
        torch.set_num_threads(threads)


def _name(task: Task) -> dict[str, Any]:
    return {"d": task.d, "n": task.n, "sigma": task.sigma}


def _optimised(optimum: regression.Optimum) -> dict[str, Any]:
    """`agree`: how many starts ended within a thousandth of the best."""
    return {
        "loss": optimum.loss,
        "starts": len(optimum.losses),
        "agree": sum(loss < optimum.loss + 1e-3 for loss in optimum.losses),
        "largest_entry": optimum.size,
    }


def by_rows(settings: Settings, report: Report) -> list[dict[str, Any]]:
    """Return the closed form and the optimizer's loss at W_0 = 0, by the number of rows of A."""
    jobs = [(Task(*case), rows) for case in settings.by_rows for rows in range(case[0] + 1)]
    entries = []
    for done, (task, rows) in enumerate(jobs):
        report(done, len(jobs))
        entry = _name(task) | {"rows": rows}
        for key, skip in (("attention", False), ("first_value", True)):
            best = regression.optimise(
                task, rows, skip, starts=settings.starts, seed=settings.seed, steps=settings.optimiser_steps
            )
            entry[key] = {"theory": regression.closed_form_loss(task, rows, skip), **_optimised(best)}
        entries.append(entry)
    return entries


def grid(settings: Settings, report: Report) -> list[dict[str, Any]]:
    """Return the gap at W_0 = 0 over shapes and noise: exact, sampled, and the proof's constant."""
    entries = []
    for done, case in enumerate(settings.grid):
        report(done, len(settings.grid))
        task = Task(*case)
        half = task.d // 2
        attention = regression.attention_near_optimum(task, half, settings.scale)
        first_value = regression.first_value_optimum(task, task.d)
        losses = regression.sampled_losses(
            task, [(attention, False), (first_value, True)], settings.samples, settings.seed
        )
        gaps = losses[0] - losses[1]
        constant = regression.proof_constant(task, task.d - 1, settings.samples, settings.seed + 1)
        entries.append(
            _name(task)
            | {
                "attention_rows": half,
                "attention_infimum": regression.closed_form_loss(task, half, False),
                "attention_exact": regression.exact_loss(task, attention, False),
                "first_value_minimum": regression.closed_form_loss(task, task.d, True),
                "first_value_exact": regression.exact_loss(task, first_value, True),
                "gap": regression.closed_form_gap(task),
                "sampled_gap": float(gaps.mean()),
                "sampled_half_width": regression.half_width(gaps),
                "proof_constant": float(constant.mean()),
                "proof_half_width": regression.half_width(constant),
            }
        )
    return entries


def approach(settings: Settings, report: Report) -> list[dict[str, Any]]:
    """Return how attention's loss tends to its infimum as A and B grow."""
    task = Task(*settings.approach)
    half = task.d // 2
    infimum = regression.closed_form_loss(task, half, False)
    entries = []
    for scale in settings.scales:
        weights = regression.attention_near_optimum(task, half, scale)
        entries.append(
            _name(task)
            | {"rows": half, "scale": scale, "excess": regression.exact_loss(task, weights, False) - infimum}
        )
    return entries


def curves(settings: Settings, report: Report) -> list[dict[str, Any]]:
    """Return the exact gap against the number of examples."""
    return [
        {
            "d": d,
            "sigma": sigma,
            "n": list(settings.curve_examples),
            "gap": [regression.closed_form_gap(Task(d, n, sigma)) for n in settings.curve_examples],
        }
        for d, sigma in settings.curves
    ]


def priors(settings: Settings, report: Report) -> list[dict[str, Any]]:
    """Return the optimized losses for W_0 = w I, each model with its best number of rows."""
    jobs = [Task(*case, prior) for case, priors in settings.priors for prior in priors]
    entries = []
    for done, task in enumerate(jobs):
        report(done, len(jobs))
        entry = _name(task) | {"prior": task.prior, "in_hypothesis": task.in_hypothesis}
        for key, skip in (("attention", False), ("first_value", True)):
            by_rows = [
                regression.optimise(
                    task, rows, skip, starts=settings.starts, seed=settings.seed, steps=settings.optimiser_steps
                )
                for rows in range(task.d + 1)
            ]
            rows = min(range(task.d + 1), key=lambda rows: by_rows[rows].loss)
            entry[key] = {"rows": rows, **_optimised(by_rows[rows])}
        entry["gap"] = entry["attention"]["loss"] - entry["first_value"]["loss"]
        # The proof has attention at a = d never below the loss of predicting zero; a head on X X^T alone is.
        entry["proof_bound_at_full_rows"] = task.zero_loss
        entry["attention_at_full_rows"] = task.zero_loss - task.d * task.prior**2 * task.n / (task.n + task.d + 1)
        entries.append(entry)
    return entries


def reversed_gaps(settings: Settings, report: Report) -> list[dict[str, Any]]:
    """Return the gap at A = -I / w, where the first value does worse: bounds and optimized losses."""
    jobs = [(Task(*case, prior), True) for case, priors in settings.reversed_optimised for prior in priors]
    jobs += [(Task(*case, 4 * case[0] ** 0.5), False) for case in settings.reversed_bounds]
    entries = []
    for done, (task, optimised) in enumerate(jobs):
        report(done, len(jobs))
        entry = _name(task) | {
            "prior": task.prior,
            "in_hypothesis": task.in_hypothesis,
            "smallest_prior": task.smallest_prior,
            "reversed_above": regression.reversal_prior(task),
            "first_value_exact": regression.reversed_first_value_loss(task),
            "attention_at_most": regression.split_attention_loss(task),
            "gap_at_most": regression.reversal_bound(task),
        }
        if optimised:
            copy = regression.reversing_copy(task), torch.zeros(0, task.d, dtype=regression.FLOAT)
            for key, skip in (("attention", False), ("first_value", True)):
                entry[key] = _optimised(
                    regression.optimise(
                        task,
                        task.d,
                        skip,
                        copy=copy,
                        starts=2 * settings.starts,
                        seed=settings.seed,
                        steps=settings.optimiser_steps,
                    )
                )
            entry["gap"] = entry["attention"]["loss"] - entry["first_value_exact"]
        entries.append(entry)
    return entries


def last_step(settings: Settings, report: Report) -> list[dict[str, Any]]:
    """Return the mean of the term that the proof's last step needs to be positive."""
    entries = []
    for d, sigma in settings.last_step:
        task = Task(d, d, sigma, 1.05 * Task(d, d, sigma).smallest_prior)
        values = regression.last_step(task, settings.last_step_samples, settings.seed)
        entries.append(
            _name(task)
            | {"prior": task.prior, "mean": float(values.mean()), "half_width": regression.half_width(values)}
        )
    return entries


def any_copy(settings: Settings, report: Report) -> list[dict[str, Any]]:
    """Return the optimized losses without Assumption 1."""
    entries = []
    for done, case in enumerate(settings.any_copy):
        report(done, len(settings.any_copy))
        task = Task(*case)
        entry = _name(task) | {
            "assumption_infimum": regression.closed_form_loss(task, task.d // 2, False),
            "first_value_minimum": regression.closed_form_loss(task, task.d, True),
        }
        for key, skip in (("attention", False), ("first_value", True)):
            entry[key] = _optimised(
                regression.optimise_any_copy(
                    task, skip, starts=settings.any_copy_starts, seed=settings.seed, steps=settings.any_copy_steps
                )
            )
        entry["gap"] = entry["attention"]["loss"] - entry["first_value"]["loss"]
        entries.append(entry)
    return entries


def training(settings: Settings, report: Report) -> list[dict[str, Any]]:
    """Return the losses of both models trained freely, by seed, and their gaps."""
    recipe, entries = settings.recipe, []
    total = 2 * recipe.steps * len(settings.training)
    for index, (case, prior, reads_positions) in enumerate(settings.training):
        task = Task(*case, prior)
        reported, chosen = [], []
        for half, skip in enumerate((False, True)):
            before = (2 * index + half) * recipe.steps
            parameters = train(task, skip, reads_positions, recipe, partial(_advance, report, before, total))
            choosing = errors(task, parameters, skip, recipe.choosing_sequences, seed=10_000 + settings.seed)
            chosen.append(int(choosing.mean(1).argmin()))
            reported.append(errors(task, parameters, skip, recipe.evaluation_sequences, seed=20_000 + settings.seed))
        by_seed = (reported[0] - reported[1]).mean(1)
        best = reported[0][chosen[0]] - reported[1][chosen[1]]
        entries.append(
            _name(task)
            | {
                "prior": prior,
                "in_hypothesis": task.in_hypothesis,
                "reads_positions": reads_positions,
                "zero_loss": task.zero_loss,
                "assumption_infimum": None if prior else regression.closed_form_loss(task, task.d // 2, False),
                "first_value_minimum": None if prior else regression.closed_form_loss(task, task.d, True),
                "attention": reported[0].mean(1).tolist(),
                "first_value": reported[1].mean(1).tolist(),
                "best_half_width": [
                    regression.half_width(one[seed]) for one, seed in zip(reported, chosen, strict=True)
                ],
                "gap_by_seed": by_seed.tolist(),
                "gap": float(by_seed.mean()),
                "gap_half_width": _student(by_seed.tolist()),
                "best_seeds": chosen,
                "gap_of_best": float(best.mean()),
                "gap_of_best_half_width": regression.half_width(best),
            }
        )
    return entries


def _advance(report: Report, before: int, total: int, step: int) -> None:
    report(before + step, total)


def _student(values: Sequence[float]) -> float:
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5
    return float(stats.t.ppf(0.975, len(values) - 1)) * error
