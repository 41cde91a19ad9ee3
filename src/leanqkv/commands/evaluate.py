"""`leanqkv eval`: the loss of a checkpoint on a text, or its accuracy on tasks."""

import re
from pathlib import Path
from typing import Annotated

import typer

from ..errors import LeanError
from ..files import check_new_file
from .options import SOURCE, check_left_out
from .texts import ScoringOptions, TaskScoring, TextScoring


def evaluate(
    source: Annotated[Path, typer.Argument(help=SOURCE)],
    text: TextScoring,
    tasks: TaskScoring,
    options: ScoringOptions,
    out: Path | None = None,
) -> None:
    """Score a checkpoint on every token of a text, or on downstream tasks.

    On a text: loss in nats per token, perplexity, and bits per byte, which compares models of different tokenizers.
    Every token except the first is predicted exactly once, with up to a full window before it. Documents are joined by
    end-of-text tokens, which are predicted, too.

    leanqkv eval runs/a --data book.txt

    leanqkv eval runs/a --data stdlib --split validation --out a.json

    leanqkv eval hf/skipv1 --against hf/llama --data book.txt

    leanqkv eval runs/a --data book.txt --cache-bits 4 --against runs/a

    leanqkv eval hf/llama --tasks p3

    leanqkv eval hf/smaller --against hf/llama --tasks piqa:data/piqa,cloze:book.txt,needle:book.txt,recall

    Options:
        out: New JSON file for the record: figures, hashes, hardware, versions.
    """
    if (text.data is None) == (tasks.tasks is None):
        raise LeanError("give a text to score with --data, or tasks with --tasks: one of the two")
    if tasks.tasks is None:
        check_left_out(tasks, "`tasks`")
    else:
        check_left_out(text, "`data`")
        if options.context_length is not None and not {"needle", "recall"} & set(re.split("[,: ]+", tasks.tasks)):
            raise LeanError("`context_length` goes with `data`, or with the tasks needle and recall; leave it out")
    if out is not None:
        check_new_file(out)
    from .scoring import score

    score(source, text, tasks, options, out)
