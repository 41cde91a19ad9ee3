"""What `leanqkv frontier` does."""

from pathlib import Path

import numpy as np
import torch

from ..cache_bits import PLAIN, CacheBits
from ..checkpoints.open import Checkpoint, open_causal_lm
from ..convert.conversion import calibration_tokens, check_sequence_length
from ..convert.latents import check_context
from ..data.evaluation import EvaluationText, evaluation_text, unseen_split
from ..data.prepare import prepare_data
from ..environment import command_line
from ..errors import LeanError
from ..evaluate.states import obstacle
from ..files import write_json
from ..frontier.measure import RECORD, Frontier, calibration_samples
from ..frontier.points import PRECISIONS, candidates
from ..progress import console, continued_when_repeated, progress_bar
from ..report.frontier import KIND, recommendations
from ..report.page import NO_PAGE
from .texts import FrontierTexts


def measure_frontier(
    source: Path,
    out: Path,
    texts: FrontierTexts,
    kinds: dict[str, list[float]],
    contexts: list[int],
    precisions: list[CacheBits] | None,
    device: str,
    at_context: int | None,
) -> None:
    """Measure every kind of reduction of the checkpoint `source` at its budgets, write the record, and show it.

    Args:
        contexts: tokens after which decoding is timed.
        precisions: of the cache, beside the model's own; None: those of PRECISIONS, where the source can have them.
        at_context: tokens of the context at which bytes are counted, and budgets are shares.

    Raises:
        LeanError: the source, a precision or the texts cannot be used, or `out` holds something else.
    """
    opened = open_causal_lm(source)
    length = texts.sequence_length or min(512, opened.config.max_position_embeddings or 512)
    check_sequence_length(opened.config, length)
    check_context(opened.config, at_context)
    found, refused = candidates(opened.config, opened.tensors, kinds, at_context)
    measurable = [PLAIN]
    for bits in PRECISIONS if precisions is None else precisions:
        if (reason := obstacle(bits, opened.config, length)) is None:
            measurable += [bits] if bits.quantized else []
        elif precisions is None:
            refused[bits.name] = reason
        else:
            raise LeanError(f"`cache_bits={bits}`: {reason}")
    scored, taken = _scored(opened, texts), _samples(opened, texts, length)
    limit = opened.config.cached_positions
    timed = [context for context in contexts if limit is None or context + 64 <= limit]
    with continued_when_repeated(), progress_bar("reading") as bar:
        measured = Frontier(
            opened,
            found,
            measurable,
            taken,
            scored,
            out,
            evaluated_tokens=texts.evaluate_tokens,
            length=length,
            contexts=timed,
            at_context=at_context,
            device=torch.device(device),
            progress=bar,
            message=bar.describe,
        )
        record = {**measured.run(), "refused": refused, "command": command_line()}
    write_json(out / RECORD, record)
    page = KIND.write(out)
    console.print(KIND.terminal(record))
    for line in recommendations(record):
        console.print(line, highlight=False)
    console.print(f"{page or NO_PAGE}, {out / RECORD}", highlight=False, soft_wrap=True)


def _scored(opened: Checkpoint, texts: FrontierTexts) -> list[EvaluationText]:
    """Return the texts to score; of those that are calibrated on, the part that the calibration never sees."""
    size, found = opened.config.vocab_size, []
    with progress_bar("reading the evaluation text") as bar:
        for name in texts.evaluate:
            split = unseen_split(name, texts.calibration)
            tokenizer = opened.directory
            found.append(
                evaluation_text(name, tokenizer=tokenizer, vocab_size=size, split=split, progress=bar.describe)
            )
    return found


def _samples(opened: Checkpoint, texts: FrontierTexts, length: int) -> np.ndarray:
    size, tokenizer = opened.config.vocab_size, str(opened.directory)
    with progress_bar("reading the calibration text") as bar:
        data = prepare_data(texts.calibration, vocab_size=size, tokenizer=tokenizer, progress=bar.describe)
    return calibration_samples(
        lambda count: calibration_tokens(data, opened.config, count * length, length),
        texts.calibrations,
        max(1, texts.tokens // length),
    )
