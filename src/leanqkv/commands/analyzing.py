"""The analysis of `leanqkv analyze`."""

from collections.abc import Sequence
from pathlib import Path

from ..analyze.record import Settings, analyze_models
from ..analyze.subjects import common_context, open_subjects, shared_tokenizer
from ..data import TokenData, stored_tokens
from ..progress import progress_bar
from ..report.analysis import KIND
from .options import DataOptions, TextOptions, prepare
from .publishing import publish


def analyze_and_report(
    models: Sequence[Path],
    out: Path,
    text: TextOptions,
    context_length: int | None,
    sizes: tuple[int, int, int, tuple[float, ...]],
    device: str,
) -> None:
    """Analyze models on one text, and write record and page into `out`.

    Args:
        sizes: samples, steps, batch size and learning rates of the probes, as in `Settings`.
    """
    subjects = open_subjects(models)
    settings = Settings(common_context(subjects, context_length), *sizes)
    config = subjects[0].opened.config
    tokenized = text.data is not None and stored_tokens(Path(text.data), config.vocab_size) is not None
    tokenizer = None if tokenized else str(shared_tokenizer(subjects))
    data = prepare(DataOptions(**vars(text), tokenizer=tokenizer), [config])
    assert isinstance(data, TokenData)
    with progress_bar("analyzing") as bar:
        record = analyze_models(subjects, data, settings, device, bar.show)
    publish(KIND, out, record)
