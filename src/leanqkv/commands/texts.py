"""Groups of options that a command and the module with its work share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..cache_bits import CacheBits
from ..errors import LeanError


@dataclass(frozen=True)
class ConversionTexts:
    """The texts of a conversion.

    Options:
        calibration: Text to calibrate on, as --data of train takes it.
        tokens: Calibration tokens. Default: 40 per unit of width, from 24576 to 131072, and four sequences.
        sequence_length: Length of calibration and evaluation sequences. Default: 512, or all positions.
        evaluate: Text to compare source and result on, as --data of train takes it; no mixture.
        evaluate_tokens: Tokens to compare on. Default: 16384, or the whole text.

    Raises:
        LeanError: tokens without their text.
    """

    calibration: str | None = None
    tokens: int | None = None
    sequence_length: int | None = None
    evaluate: str | None = None
    evaluate_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.calibration is None and self.tokens is not None:
            raise LeanError("`tokens` goes with `calibration=FILE`; leave it out")
        if self.evaluate is None and self.evaluate_tokens is not None:
            raise LeanError("`evaluate_tokens` goes with `evaluate=FILE`; leave it out")


@dataclass(frozen=True)
class FrontierTexts:
    """The texts of a frontier.

    Options:
        evaluate: Text to score, as --data of train takes it, no mixture; may be given several times.
        calibration: Text to calibrate on, as --data of train takes it.
        tokens: Calibration tokens of each sample.
        calibrations: Number of calibrations, on different parts of the text, for the intervals.
        sequence_length: Length of calibration and scoring sequences, and of questions of needle and recall. Default:
            512, or all positions.
        evaluate_tokens: Tokens to score in each text.
    """

    evaluate: list[str]
    calibration: str = "prose"
    tokens: int = 12_288
    calibrations: int = 3
    sequence_length: int | None = None
    evaluate_tokens: int = 4096


@dataclass(frozen=True)
class TextScoring:
    """The text to score, and how.

    Options:
        data: Text to score, as --data of train takes it.
        split: whole: all of --data. validation: the part of it that train holds out.
        stride: Tokens between the starts of two windows; fewer give each token more context. Default: half a window.
    """

    data: str | None = None
    split: str = "whole"
    stride: int | None = None
    text_field: str = "text"
    max_documents: int | None = None


@dataclass(frozen=True)
class TaskScoring:
    """The tasks to score, and how.

    Options:
        tasks: Tasks of lm-eval between commas, or p3 for the nine of Wu et al. 2025. From local files: piqa:FOLDER,
            cloze:TEXT, needle:TEXT and recall.
        limit: With --tasks: score at most this many examples per task.
        include_path: With --tasks: folder of YAML files with tasks of your own.
    """

    tasks: str | None = None
    limit: int | None = None
    include_path: Path | None = None


@dataclass(frozen=True)
class ScoringOptions:
    """How a text and tasks are scored.

    Options:
        context_length: Tokens per window, or of a question of needle and recall. Default: all positions.
        against: A second checkpoint, for example the source of a conversion: report the difference to it.
        cache_bits: Read every window or question through a cache of these bits, blocks of 64 tokens at a time: 8, 4, 2
            or KEYS/VALUES. --against keeps its own precision. 16: no cache.
        batch_size: Windows, or task requests, per batch. Default: 8, or those that have 8,192 tokens.
        precision: fp32 or bf16, with +sdpa or +eager.
    """

    context_length: int | None = None
    against: Path | None = None
    cache_bits: str = "16"
    batch_size: int | None = None
    precision: str = "fp32"
    device: str | None = None

    def __post_init__(self) -> None:
        CacheBits.of(self.cache_bits)


@dataclass(frozen=True)
class AnswerOptions:
    """How prompts are answered.

    Options:
        chat: Put each prompt into the model's chat template, as a user's message.
        temperature: Sampling temperature. 0: greedy.
        top_k: Sample from the k likeliest tokens.
        cache_bits: Bits of cached keys and values: 8, 4, 2 or KEYS/VALUES. 16: the model's own precision.
    """

    chat: bool = False
    max_new_tokens: int = 64
    temperature: float = 0.8
    top_k: int | None = 50
    cache_bits: str = "16"
    seed: int = 0
    device: str | None = None

    def __post_init__(self) -> None:
        CacheBits.of(self.cache_bits)


@dataclass(frozen=True)
class MachineOptions:
    """What a run is planned for.

    Options:
        accelerator: a100 or h100, of 80 GB each.
        flops: Peak of another device, in operations per second, as 150e12.
        memory: Memory of that device in GB.
    """

    accelerator: str = "a100"
    flops: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class PlanOptions:
    """How the run is done there.

    Options:
        devices: Number of devices.
        utilization: Share of the peak FLOPs that the run reaches.
        shard: fsdp: plan for `leanqkv train --shard fsdp`.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, more time.
    """

    devices: int = 8
    utilization: float = 0.4
    context_length: int | None = None
    micro_batch_size: int | None = None
    shard: str | None = None
    gradient_checkpointing: Annotated[bool, typer.Option()] = False
