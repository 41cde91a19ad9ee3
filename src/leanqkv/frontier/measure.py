"""The frontier of one checkpoint, point by point: what is measured stays, and is not measured again."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from ..cache_bits import PLAIN, CacheBits
from ..checkpoints.open import Checkpoint, load_model, open_causal_lm
from ..checkpoints.tensors import finite
from ..checkpoints.write import source_hashes, write_model
from ..convert.activations import CPU
from ..convert.sweeps import Converted, Sweeps
from ..data.evaluation import EvaluationText
from ..data.token_files import tokens_hash
from ..environment import record_header, versions
from ..evaluate.harness import paired_answers
from ..evaluate.paired import spread_windows
from ..files import make_directory, remove, write_json
from ..job import Job, locked
from ..model.config import LeanConfig
from ..model.shapes import count_parameters
from ..records import NUMBER, read_record
from .points import Candidate
from .scoring import Questions, Scorer, decode_speeds

RECORD = "frontier.json"
MODEL = "model"  # the one that is being measured
SCORES = ("loss_difference", "divergence", "agreement")

# What is read of a point or a fit that an interrupted run has left.
TIMED, AGAIN = {"seconds": NUMBER}, "remove it and start again"


@dataclass(eq=False)
class Frontier:
    """Measures candidates, in every precision, from several samples of calibration tokens.

    Args:
        precisions: of the cache, the model's own first.
        samples: [samples, sequences, length], calibration tokens; candidates from the weights alone have one sample.
        contexts: tokens after which decoding is timed; none: it is not.
        at_context: tokens of the context at which bytes are counted; None: one that every window holds.
        questions: that every candidate of the first sample answers; None: there are none.
        out: keeps every point as a file, and the conversions that are under way.
    """

    source: Checkpoint
    candidates: Sequence[Candidate]
    precisions: Sequence[CacheBits]
    samples: np.ndarray
    texts: Sequence[EvaluationText]
    out: Path
    _: KW_ONLY
    evaluated_tokens: int
    length: int
    contexts: Sequence[int] = ()
    at_context: int | None = None
    questions: Questions | None = None
    device: torch.device = CPU
    progress: Callable[[int, int], None] = lambda done, total: None
    message: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        count = max(1, self.evaluated_tokens // self.length)
        self._windows = [spread_windows(len(text.tokens), self.length, count) for text in self.texts]
        # Not every frontier has these; one without them cannot go on with them, nor the other way round.
        asked = {"at_context": self.at_context, "questions": self.questions and self.questions.record()}
        self._more = {name: value for name, value in asked.items() if value is not None}
        self._job = {
            "source": source_hashes(self.source),
            "calibration": tokens_hash(self.samples),
            "texts": [text.record() for text in self.texts],
            "evaluated_tokens": self.evaluated_tokens,
            "length": self.length,
            "contexts": [*self.contexts],
            "device": str(self.device),
            "versions": versions(),
            **asked,
        }

    def run(self) -> dict[str, Any]:
        """Return the record; what an interrupted run has measured is read.

        Raises:
            LeanError: `out` holds something else.
        """
        job = Job(self.out, self._job)
        if not job.claim("frontier"):
            job.write()
        make_directory(self.out / "points")
        with locked(self.out, "measuring"):
            for number in range(len(self.samples)):
                self._measure_sample(number)
            remove(self.out / MODEL)
            return self._record()

    def _measure_sample(self, number: int) -> None:
        """Convert to every candidate that has a point to be measured, and measure these points."""
        missing = [one for one in self.candidates if (one.fitted or not number) and self._missing(one, number)]
        work = self.out / f"calibration{number}"
        if missing:
            make_directory(work)
            for candidate, converted in self._conversions(missing, number, work):
                self._measure(candidate, number, converted)
        remove(work)

    def _conversions(
        self, missing: Sequence[Candidate], number: int, work: Path
    ) -> Iterator[tuple[Candidate, Converted]]:
        """Yield the candidates with what becomes of the source."""
        stored = finite(self.source.tensors)
        fitted = [one for one in self.candidates if one.fitted]  # all: the job is the same when it goes on
        for one in missing:
            if not one.fitted:
                config, tensors, *_ = (self.source.config, stored) if one.make is None else one.make()
                yield one, Converted(config, tensors, [])
        if not (asked := [one for one in missing if one.fitted]):
            return
        sweeps = Sweeps(
            self.source.config,
            stored,
            self.samples[number],
            work,
            [one.make() for one in fitted if one.make is not None],
            device=self.device,
            job={**self._job, "candidates": [one.label for one in fitted]},
            progress=self.progress,
            message=lambda text: self.message(f"{work.name}, {text}"),
        )
        results = sweeps.run()
        write_json(self._fitting_file(number), {"seconds": sweeps.seconds})
        for one, result in zip(fitted, results, strict=True):
            if one in asked:
                yield one, result

    def _measure(self, candidate: Candidate, number: int, converted: Converted) -> None:
        """Write one file for every precision of a converted model, which is written and read again before."""
        directory = self.out / MODEL
        remove(directory)
        if candidate.make is None:
            model = self.scorer.source
        else:
            write_model(self.source, directory, converted.config, converted.tensors, torch.float32)
            model = load_model(open_causal_lm(directory), torch.float32).to(self.device)
        started = time.perf_counter()
        same = self.scorer.same_without_cache(model)
        missing = self._missing(candidate, number)
        self.message(f"sample {number + 1}, {candidate.label}, tokens scored")
        scores = self.scorer.compare(model, missing, self.progress)
        scoring = (time.perf_counter() - started) / len(missing)  # together, so that the source's are made once
        for precision, scored in zip(missing, scores, strict=True):
            started = time.perf_counter()
            point = {
                "kind": candidate.kind,
                "label": candidate.label,
                "sample": number,
                "key_bits": precision.key_bits,
                "value_bits": precision.value_bits,
                "bytes_per_token": self._bytes_per_token(precision, converted.config),
                "parameters": count_parameters(converted.config).total,
                "scores": [{name: score[name] for name in SCORES} for score in scored],
                "same_tokens_without_cache": same,
                "greedy_agreement": self.scorer.agreement(model, precision),
            }
            if not number:
                self.message(f"sample {number + 1}, {candidate.label} in {precision.name}, decoding")
                point |= self._speeds(model, precision)
                point["layers"] = converted.layers if not precision.quantized else []
            if self.questions is not None and not number:
                self.message(f"sample 1, {candidate.label} in {precision.name}, tasks")
                answered = self.questions.ask(model, precision)
                point |= {"tasks": answered.figures, "answers": answered.answers}
            point["seconds"] = scoring + time.perf_counter() - started
            write_json(self._file(candidate, precision, number), point)
        remove(directory)

    def _speeds(self, model: Any, precision: CacheBits) -> dict[str, Any]:
        """Return the tokens per second by context, and their share of the source's, which decodes in turns with it."""
        ways = [(self.scorer.source, PLAIN), (model, precision)]
        timed = {context: decode_speeds(ways, context) for context in self.contexts}
        return {
            "tokens_per_second": {context: median(speeds) for context, (_, speeds) in timed.items()},
            "of_source": {c: median(s / o for o, s in zip(*rounds, strict=True)) for c, rounds in timed.items()},
        }

    def _precisions_of(self, candidate: Candidate) -> Sequence[CacheBits]:
        """Those that a candidate is measured in: from the weights alone it loses too much to be worth quantizing."""
        return self.precisions if candidate.fitted or candidate.make is None else self.precisions[:1]

    def _missing(self, candidate: Candidate, number: int) -> list[CacheBits]:
        """The precisions in which a candidate of a sample is still to be measured."""
        return [one for one in self._precisions_of(candidate) if not self._file(candidate, one, number).exists()]

    @cached_property
    def scorer(self) -> Scorer:
        """The source and the texts, read when they are first needed."""
        windows = list(zip(self.texts, self._windows, strict=True))
        return Scorer(load_model(self.source, torch.float32).to(self.device), windows, self.length)

    def _file(self, candidate: Candidate, precision: CacheBits, number: int) -> Path:
        bits = f"{precision.key_bits}-{precision.value_bits}"
        return self.out / "points" / f"{candidate.name}-{bits}-{number}.json"

    def _fitting_file(self, number: int) -> Path:
        return self.out / "points" / f"fitting-{number}.json"

    def _bytes_per_token(self, precision: CacheBits, config: LeanConfig) -> float:
        if self.at_context is None:
            return precision.bytes_per_token(config.plan, torch.bfloat16)
        return precision.kv_bytes(config.plan, self.at_context, torch.bfloat16) / self.at_context

    def _record(self) -> dict[str, Any]:
        points = []
        for candidate in self.candidates:
            for precision in self._precisions_of(candidate):
                files = [self._file(candidate, precision, number) for number in range(len(self.samples))]
                points += [read_record(file, TIMED, AGAIN) for file in files if file.exists()]
        if self.questions is not None:
            first = points[0]["answers"]  # the source's
            for point in (one for one in points if "answers" in one):
                answers = point.pop("answers")
                point["paired"] = {task: paired_answers(first[task], found) for task, found in answers.items()}
        fitting = [self._fitting_file(number) for number in range(len(self.samples))]
        return {
            **record_header("frontier", self.source.directory.name, self.device.type),
            **self._more,
            "source": {
                "sha256": source_hashes(self.source),
                "parameters": count_parameters(self.source.config).total,
                "bytes_per_token": self._bytes_per_token(PLAIN, self.source.config),
            },
            "calibration": {
                "samples": len(self.samples),
                "tokens": int(self.samples[0].size),
                "seconds": [read_record(file, TIMED, AGAIN)["seconds"] for file in fitting if file.exists()],
            },
            "seconds": sum(point["seconds"] for point in points),
            "texts": self._job["texts"],
            "evaluated_tokens": min(sum(scored for _, scored in windows) for windows in self._windows),
            "context_length": self.length,
            "points": points,
        }


def calibration_samples(take: Callable[[int], np.ndarray], samples: int, sequences: int) -> np.ndarray:
    """Return [samples, sequences, length] tokens: samples lie between each other and have no token in common.

    take: returns that many sequences, evenly spread over a text.
    """
    spread = take(samples * sequences)
    return np.stack([spread[number::samples] for number in range(samples)])
