"""Accuracy on downstream tasks, through EleutherAI's lm-eval."""

import hashlib
import io
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from ..cache_bits import PLAIN, CacheBits
from ..checkpoints.tokenizer import check_ids, framing
from ..errors import LeanError, first_line
from ..model.cache_quantized import BLOCK
from ..model.causal_lm import LeanForCausalLM
from .local_tasks import local_task
from .loss import scoring, target_scores
from .states import cached_states, obstacle

# Names for several tasks. p3: Wu et al. 2025, appendix C.3, where `acc` is the figure in the tables.
TASK_SETS: Mapping[str, tuple[str, ...]] = {
    "p3": ("hellaswag", "arc_challenge", "arc_easy", "piqa", "winogrande", "openbookqa", "sciq", "boolq", "rte")
}
# lm-eval's default; it decides the examples before a question, in tasks with such examples.
FEW_SHOT_SEED = 1234
# Tokens of requests that are read at a time, unless one request has more.
TOKENS_AT_A_TIME = 8192
# The end of a metric's name, which is the filter that the answers went through, where they go through none.
NO_FILTER = ",none"
NAN = "the model's logits are NaN, so its answers cannot be scored; check the weights"


def load_tasks(
    names: Sequence[str],
    include_path: Path | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    length: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Return lm-eval's tasks of these names with their data, as its TaskManager loads them: `tasks` and `groups`.

    Args:
        names: tasks, groups and tags of lm-eval, sets of `TASK_SETS`, and tasks made of local files (see `local_task`).
        include_path: a folder of YAML files with further tasks, which go before those that lm-eval brings.
        tokenizer, length: as `local_task` takes them.

    Raises:
        LeanError: lm-eval is not installed; no such folder or task; data that cannot be loaded; a task that runs code
            or asks about images.
    """
    lm_eval = _lm_eval()
    with _quiet():
        local = {name: task for name in names if (task := local_task(name, tokenizer, length)) is not None}
    loaded: dict[str, dict[str, Any]] = {"tasks": {task.config.task: task for task in local.values()}, "groups": {}}
    names = [one for name in names if name not in local for one in TASK_SETS.get(name, (name,))]
    if include_path is not None and not include_path.is_dir():
        raise LeanError(f"there is no folder of tasks at {include_path}")
    try:
        manager = lm_eval.tasks.TaskManager(include_path=include_path, include_defaults=False)
        if set(names) - set(manager.all_tasks):  # lm-eval brings thousands of files, which take seconds to read
            manager = lm_eval.tasks.TaskManager(include_path=include_path)
    except Exception as error:  # YAML and lm-eval raise many kinds; each means that the folder cannot be read
        raise LeanError(f"the tasks in {include_path} cannot be read: {first_line(error)}") from None
    known = [*manager.all_tasks, *TASK_SETS, "cloze:FILE", "needle:FILE"]
    for name in dict.fromkeys(names):
        if name not in known:
            near = " or ".join(map(repr, get_close_matches(name, known)))
            raise LeanError(
                f"there is no task {name!r}: {f'did you mean {near}?' if near else 'see `lm-eval ls tasks`'}"
            )
    for name in dict.fromkeys(names):
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


def tasks_hash(tasks: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the SHA-256 of the tasks' settings and questions: tasks of one name can differ in both."""
    digest = hashlib.sha256()
    for name, task in sorted(tasks["tasks"].items()):
        settings = {key: value for key, value in task.config.to_dict().items() if key != "dataset_kwargs"}
        digest.update(json.dumps([name, settings], sort_keys=True, default=lambda value: "").encode())
        for document in task.eval_docs:
            digest.update(json.dumps(document, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def check_cache(tasks: Mapping[str, Mapping[str, Any]], cache_bits: CacheBits) -> None:
    """Check that tasks can be scored through a cache of these bits.

    Raises:
        LeanError: one of them cannot; says why.
    """
    for name, task in tasks["tasks"].items():
        if cache_bits.quantized and task.OUTPUT_TYPE == "generate_until":
            raise LeanError(f"`cache_bits={cache_bits}`: the task {name} generates text; only likelihoods are scored")


@dataclass(frozen=True)
class TaskScores:
    """What a model makes of tasks.

    Attributes:
        figures: each task's metrics, with the standard error over questions as `NAME_stderr`, and its settings:
            `examples` scored, `of` how many, `shots` and `version`; of retrieval also `by_depth`. Groups of tasks have
            figures of their own, without `examples`.
        answers: the metrics of each question, of each task that is no group.
        cached: the share of the requests that read a quantized block of the cache; None without such a cache.
    """

    figures: dict[str, dict[str, Any]]
    answers: dict[str, dict[str, list[float]]]
    cached: float | None


def task_scores(
    model: LeanForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    tasks: Mapping[str, Mapping[str, Any]],
    *,
    limit: int | None = None,
    batch_size: int = 8,
    autocast_dtype: torch.dtype | None = None,
    cache_bits: CacheBits = PLAIN,
    progress: Callable[[int], None] = lambda sequences: None,
) -> TaskScores:
    """Score a model on tasks.

    Args:
        tasks: of `load_tasks`.
        limit: questions of each task to score; None for all.
        batch_size: requests at a time; fewer of long ones, of which TOKENS_AT_A_TIME are read.
        autocast_dtype: of the arithmetic; None for that of the weights.
        cache_bits: of the cache through which requests are read (see `cached_states`).
        progress: called with the number of sequences that the model has read.

    Raises:
        LeanError: logits that are NaN; a token that the model does not have, or that ends the question; a task that the
            cache cannot be used for.
    """
    lm_eval = _lm_eval()
    if tokenizer("a")["input_ids"][-1] == framing(tokenizer).end:
        raise LeanError("the tokenizer ends each text, a question of a task too, with a token: tasks cannot be scored")
    check_cache(tasks, cache_bits)
    for task in tasks["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEW_SHOT_SEED)
    given = {"pretrained": model, "tokenizer": tokenizer, "backend": "causal", "batch_size": batch_size}
    with _quiet():
        lm = lm_eval.models.huggingface.HFLM(**given, mixed_precision_dtype=autocast_dtype)
        scorer = Likelihoods(model, tokenizer, lm.max_length, batch_size, autocast_dtype, cache_bits, progress)
        lm._loglikelihood_tokens = scorer
        before = model.register_forward_pre_hook(scorer.check_ids, with_kwargs=True)
        with before, model.register_forward_hook(scorer.check_logits):
            results = lm_eval.evaluate(lm, dict(tasks), limit=limit)
    asked: dict[str, Any] = results["samples"]
    answers = {name: _answers(own) for name, own in asked.items()}
    figures = {name: _figures(name, results) | _by_depth(asked.get(name, ())) for name in results["results"]}
    return TaskScores(figures, answers, scorer.cached / max(scorer.read, 1) if cache_bits.quantized else None)


@dataclass(eq=False)
class Likelihoods:
    """Log-likelihoods of answers, in place of lm-eval's, which holds the logits of all tokens of a batch.

    Attributes:
        read: sequences that the model has read; cached: how many of them read a quantized block of the cache.
    """

    model: LeanForCausalLM
    tokenizer: PreTrainedTokenizerFast
    length: int
    batch_size: int
    autocast_dtype: torch.dtype | None
    cache_bits: CacheBits
    progress: Callable[[int], None]
    read: int = 0
    cached: int = 0

    def __call__(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool] | None]:
        """Return each answer's log-likelihood, and whether all its tokens are the likeliest ones.

        Args:
            requests: anything, the tokens of a question, and those of its answer.
        """
        rows: dict[tuple[int, ...], list[int]] = {}  # one-token answers to a question are read once
        for number, (_request, question, answer) in enumerate(requests):
            rows.setdefault(tuple((question + answer)[-self.length - 1 : -1]), []).append(number)
        order = sorted(rows, key=len, reverse=True)
        if order and (reason := obstacle(self.cache_bits, self.model.config, max(len(order[0]), 2 * BLOCK))):
            raise LeanError(f"`cache_bits={self.cache_bits}`: {reason}")
        found: list[tuple[float, bool] | None] = [None] * len(requests)
        with scoring(self.model) as device:
            while order:
                count = max(1, min(self.batch_size, TOKENS_AT_A_TIME // len(order[0])))
                batch, order = order[:count], order[count:]
                # Filled up on the right.
                ids = pad_sequence([torch.tensor(tokens, dtype=torch.long) for tokens in batch], batch_first=True)
                self.check_ids(self.model, (ids,))
                with torch.autocast(device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
                    hidden = cached_states(self.cache_bits)(self.model, ids.to(device))
                    for row, tokens in enumerate(batch):
                        for number in rows[tokens]:
                            found[number] = self._score(hidden[row, : len(tokens)], requests[number][2])
                self.read += len(batch)
                self.cached += sum(len(tokens) > BLOCK for tokens in batch)
                self.progress(self.read)
        return found

    def check_ids(self, _model: Any, inputs: Any, named: Any = None) -> None:
        """Check what a model reads; of tasks that generate text, as a hook of its calls."""
        ids = inputs[0] if inputs else named["input_ids"]
        check_ids(ids, self.model.config.vocab_size, self.tokenizer, "a task's text")

    def check_logits(self, _model: Any, _inputs: Any, output: Any) -> None:
        """Check what a model makes in a call, of which lm-eval would take the first token for the likeliest one."""
        if output.logits.isnan().any():
            raise LeanError(NAN)
        self.read += len(output.logits)
        self.progress(self.read)

    def _score(self, hidden: torch.Tensor, answer: list[int]) -> tuple[float, bool]:
        wanted = torch.tensor(answer, device=hidden.device)
        losses, likeliest = target_scores(self.model, hidden[-len(answer) :], wanted)
        if losses.isnan().any():
            raise LeanError(NAN)
        return -losses.sum().item(), bool(likeliest.all())


def _by_depth(questions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The means of the metrics of questions at each depth in their text, where they have one."""
    found: dict[str, dict[str, float]] = {}
    for depth in dict.fromkeys(one["doc"].get("depth") for one in questions):
        if depth is None:  # and the metrics may be no numbers, of which there is no mean
            return {}
        here = [one for one in questions if one["doc"].get("depth") == depth]
        means = {metric: sum(one[metric] for one in here) / len(here) for metric in here[0]["metrics"]}
        found[str(depth)] = {"questions": len(here), **means}
    return {"by_depth": found} if found else {}


def _answers(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the metrics of each question, those of several filters by the names that `_figures` has."""
    found: dict[str, list[float]] = {}
    for one in samples:
        for metric in one["metrics"]:
            found.setdefault(f"{metric},{one['filter']}".removesuffix(NO_FILTER), []).append(one[metric])
    return found


def paired_answers(before: Mapping[str, list[float]], after: Mapping[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Return what a second model changes of a task, question by question, for each metric that is a number.

    `difference`, the mean of after minus before, and its `stderr`. Where answers are right or wrong, also how many are
    `lost`, right before and wrong after, and `won`, and `p`, that of McNemar's exact test (1947,
    https://doi.org/10.1007/BF02295996): of so many changes, how likely is so uneven a split if both are as likely.
    """
    found = {}
    for metric in before:
        pairs = [*zip(before[metric], after[metric], strict=True)]
        if not all(isinstance(value, int | float) for pair in pairs for value in pair):
            continue
        first, second = (torch.tensor(values, dtype=torch.float64) for values in zip(*pairs, strict=True))
        change = second - first
        error = (change.std() / math.sqrt(len(change))).item() if len(change) > 1 else None
        found[metric] = {"difference": change.mean().item(), "stderr": error}
        if {*first.tolist(), *second.tolist()} <= {0.0, 1.0}:
            lost, won = int((change < 0).sum()), int((change > 0).sum())
            p = float(binomtest(lost, lost + won).pvalue) if lost + won else 1.0
            found[metric] |= {"lost": lost, "won": won, "p": p}
    return found


def mean_accuracy(figures: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return the mean of the tasks' `acc`, each task with the same weight; None if a task has none."""
    accuracies = [values.get("acc") for values in figures.values() if values["examples"] is not None]
    return None if None in accuracies else sum(accuracies) / len(accuracies)  # type: ignore[arg-type]


def _figures(name: str, results: Mapping[str, Any]) -> dict[str, Any]:
    metrics = {
        key.removesuffix(NO_FILTER): value
        for key, value in results["results"][name].items()
        if "," in key and isinstance(value, int | float)
    }
    counts = results["n-samples"].get(name, {})
    about = (results["configs"].get(name, {}).get("metadata") or {}).get("made_of")
    return {
        **metrics,
        "examples": counts.get("effective"),
        "of": counts.get("original"),
        "shots": results["n-shot"].get(name),
        "version": results["versions"].get(name),
        **({"made_of": about} if about else {}),
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
