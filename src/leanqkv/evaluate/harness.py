"""Accuracy on downstream tasks, through EleutherAI's lm-eval."""

import io
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from ..checkpoints.tokenizer import check_ids, framing
from ..errors import LeanError, first_line
from ..model.causal_lm import LeanForCausalLM

# Names for several tasks. p3: Wu et al. 2025, appendix C.3, where `acc` is the figure in the tables.
TASK_SETS: Mapping[str, tuple[str, ...]] = {
    "p3": ("hellaswag", "arc_challenge", "arc_easy", "piqa", "winogrande", "openbookqa", "sciq", "boolq", "rte")
}
# lm-eval's default; it decides the examples before a question, in tasks with such examples.
FEW_SHOT_SEED = 1234


def load_tasks(names: Sequence[str], include_path: Path | None = None) -> dict[str, dict[str, Any]]:
    """Return lm-eval's tasks of these names with their data, as its TaskManager loads them: `tasks` and `groups`.

    Args:
        names: tasks, groups and tags of lm-eval, and sets of `TASK_SETS`.
        include_path: a folder of YAML files with further tasks, which go before those that lm-eval brings.

    Raises:
        LeanError: lm-eval is not installed; no such folder or task; data that cannot be loaded; a task that runs code
            or asks about images.
    """
    TaskManager = _lm_eval().tasks.TaskManager
    names = list(dict.fromkeys(task for name in names for task in TASK_SETS.get(name, (name,))))
    if include_path is not None and not include_path.is_dir():
        raise LeanError(f"there is no folder of tasks at {include_path}")
    try:
        manager = TaskManager(include_path=include_path, include_defaults=False)
        if set(names) - set(manager.all_tasks):  # lm-eval brings thousands of files, which take seconds to read
            manager = TaskManager(include_path=include_path)
    except Exception as error:  # YAML and lm-eval raise many kinds; each means that the folder cannot be read
        raise LeanError(f"the tasks in {include_path} cannot be read: {first_line(error)}") from None
    known = [*manager.all_tasks, *TASK_SETS]
    for name in names:
        if name not in known:
            near = " or ".join(map(repr, get_close_matches(name, known)))
            raise LeanError(
                f"there is no task {name!r}: {f'did you mean {near}?' if near else 'see `lm-eval ls tasks`'}"
            )
    loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}}
    for name in names:
        try:
            with _quiet():
                found = manager.load([name])
        except Exception as error:  # lm-eval and datasets raise many kinds
            raise LeanError(
                f"the task {name} cannot be loaded: {first_line(error)}; without a network, give `include_path` FOLDER "
                "with a task of that name that reads local files"
            ) from None
        loaded = {kind: entries | found[kind] for kind, entries in loaded.items()}
    for name, task in loaded["tasks"].items():
        for reason, attribute in (("runs code that a model wrote", "UNSAFE_CODE"), ("shows images", "MULTIMODAL")):
            if getattr(task, attribute, False):
                raise LeanError(f"the task {name} {reason}, which is not supported; leave it out")
    return loaded


def task_figures(
    model: LeanForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    tasks: Mapping[str, Mapping[str, Any]],
    *,
    limit: int | None = None,
    batch_size: int = 8,
    autocast_dtype: torch.dtype | None = None,
    progress: Callable[[int], None] = lambda sequences: None,
) -> dict[str, dict[str, Any]]:
    """Return each task's metrics, with the standard error over examples as `NAME_stderr`, and its settings.

    The settings are `examples` scored, `of` how many, `shots` and `version`. Groups of tasks have figures of their own,
    without `examples`.

    Args:
        tasks: of `load_tasks`.
        limit: examples of each task to score; None for all.
        autocast_dtype: of the arithmetic; None for that of the weights.
        progress: called with the number of sequences that the model has read.

    Raises:
        LeanError: logits that are NaN; a token that the model does not have, or that ends the question.
    """
    lm_eval = _lm_eval()
    if tokenizer("a")["input_ids"][-1] == framing(tokenizer).end:
        raise LeanError("the tokenizer ends each text, a question of a task too, with a token: tasks cannot be scored")
    sequences = 0

    def check(module: Any, inputs: Any, output: Any) -> None:
        nonlocal sequences
        if output.logits.isnan().any():  # of which lm-eval would take the first answer for the likeliest one
            raise LeanError("the model's logits are NaN, so its answers cannot be scored; check the weights")
        sequences += len(output.logits)
        progress(sequences)

    for task in tasks["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEW_SHOT_SEED)

    def check_inputs(module: Any, inputs: Any) -> None:
        check_ids(inputs[0], model.config.vocab_size, tokenizer, "a task's text")

    hooks = model.register_forward_hook(check), model.register_forward_pre_hook(check_inputs)
    try:
        with _quiet():
            lm = lm_eval.models.huggingface.HFLM(
                pretrained=model,
                tokenizer=tokenizer,
                backend="causal",
                batch_size=batch_size,
                mixed_precision_dtype=autocast_dtype,
                softmax_dtype=torch.promote_types(model.dtype, torch.float32),
            )
            results = lm_eval.evaluate(lm, dict(tasks), limit=limit, log_samples=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: _figures(name, results) for name in results["results"]}


def mean_accuracy(figures: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return the mean of the tasks' `acc`, each task with the same weight; None if a task has none."""
    accuracies = [values.get("acc") for values in figures.values() if values["examples"] is not None]
    return None if None in accuracies else sum(accuracies) / len(accuracies)  # type: ignore[arg-type]


def _figures(name: str, results: Mapping[str, Any]) -> dict[str, Any]:
    # A metric's name ends in the filter that the answers went through, "none" without one.
    metrics = {
        key.removesuffix(",none"): value
        for key, value in results["results"][name].items()
        if "," in key and isinstance(value, int | float)
    }
    counts = results["n-samples"].get(name, {})
    return {
        **metrics,
        "examples": counts.get("effective"),
        "of": counts.get("original"),
        "shots": results["n-shot"].get(name),
        "version": results["versions"].get(name),
    }


def _lm_eval() -> Any:
    try:
        import lm_eval
        import lm_eval.models.huggingface
        import lm_eval.tasks
    except ImportError as error:
        raise LeanError(
            f"`tasks` needs lm-eval, which is not installed ({error}): pip install 'leanqkv[eval]'"
        ) from None
    return lm_eval


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence lm-eval's remarks and, without a terminal, its and datasets' progress bars."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
