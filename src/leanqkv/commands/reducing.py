"""What `leanqkv frontier` does."""

from pathlib import Path

import torch

from ..cache_bits import PLAIN, CacheBits
from ..checkpoints.open import open_causal_lm
from ..convert.conversion import calibration_tokens, sequence_length
from ..convert.latents import check_context
from ..data.evaluation import unseen_split
from ..environment import command_line
from ..errors import LeanError
from ..evaluate.states import obstacle
from ..files import write_json
from ..frontier.measure import RECORD, Frontier, calibration_samples
from ..frontier.points import PRECISIONS, candidates
from ..frontier.scoring import Questions
from ..progress import console, continued_when_repeated, progress_bar
from ..report.frontier import KIND, recommendations
from ..report.page import NO_PAGE
from .converting import read_calibration
from .options import read_text
from .scoring import read_tasks
from .texts import FrontierTexts, TaskScoring


def measure_frontier(
    source: Path,
    out: Path,
    texts: FrontierTexts,
    tasks: TaskScoring,
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
    length = sequence_length(opened.config, texts.sequence_length)
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
    questions = None
    if tasks.tasks is not None:
        questions = Questions(*read_tasks(opened, tasks, length), tasks.limit, measurable)
    # Of texts that are calibrated on, the part that the calibration never sees.
    scored = [read_text(opened, name, unseen_split(name, texts.calibration)) for name in texts.evaluate]
    data = read_calibration(opened, texts.calibration)
    taken = calibration_samples(
        lambda count: calibration_tokens(data, opened.config, count * length, length),
        texts.calibrations,
        max(1, texts.tokens // length),
    )
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
            questions=questions,
            device=torch.device(device),
            progress=bar,
            message=bar.describe,
        )
        record = {**measured.run(), "refused": refused, "command": command_line()}
    write_json(out / RECORD, record)
    page = KIND.write(out)
    console.print(KIND.terminal(record))
    console.print("\n".join(recommendations(record)))
    console.print(f"{page or NO_PAGE}, {out / RECORD}", highlight=False, soft_wrap=True)
