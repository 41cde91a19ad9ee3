"""`leanqkv analyze`: what is inside trained models, side by side."""

from pathlib import Path
from typing import Annotated

import typer

from ..progress import progress_bar
from .options import ContextLength, Data, Device, MaxDocuments, TextField, console


def analyze(
    models: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Directories of causal language models.")],
    out: Annotated[Path, typer.Option(help="New directory for analysis.json, table.md and report.html.")],
    data: Data = None,
    samples: Annotated[
        int, typer.Option(min=2, help="Sequences of held-out text to look at; as many of repeated random tokens.")
    ] = 64,
    context_length: ContextLength = None,
    probe_steps: Annotated[int, typer.Option(min=0, help="0 for no probes; the paper takes 4000.")] = 500,
    probe_batch_size: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 2,
    probe_rates: Annotated[
        str, typer.Option(help="Learning rates between commas; every layer's probe gets its best one.")
    ] = "1e-4,2e-4,3e-4",
    text_field: TextField = "text",
    max_documents: MaxDocuments = None,
    device: Device = None,
) -> None:
    """Look inside models: linear probes, similarity of heads and tokens, what heads do, singular values.

    Models of one vocabulary and tokenizer, which see the same text: the part of --data that training holds out, and for
    the probes the rest of it. Those that differ in their seed alone are taken together. Nearly all of the time goes
    into the probes; --probe-steps 0 leaves them out. If the directory of a run still has its checkpoints, weights and
    attention logits are looked at in these, too.

    leanqkv analyze runs/baseline runs/skipv1 --out runs/analysis

    leanqkv analyze runs/baseline runs/skipv1 --data FILE --probe-steps 4000 --samples 256 --out runs/analysis
    """
    from ..analyze.record import RECORD, Settings, analyse, common_context, open_subjects, shared_tokenizer
    from ..data import prepare_data
    from ..data.prepare import nanogpt
    from ..environment import check_device, default_device
    from ..errors import LeanError
    from ..files import write_json
    from ..report.analysis import terminal, write_page

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise LeanError(f"{out} is not empty; nothing is ever written over, choose another --out")
    rates = _rates(probe_rates)
    where = check_device(device or default_device())
    subjects = open_subjects(models)
    settings = Settings(
        context_length=common_context(subjects, context_length),
        samples=samples,
        probe_steps=probe_steps,
        probe_batch_size=probe_batch_size,
        probe_rates=rates,
    )
    vocab_size = subjects[0].opened.config.vocab_size
    tokens_given = data is not None and nanogpt(Path(data), vocab_size) is not None
    with progress_bar("reading the data") as bar:
        text = prepare_data(
            data,
            vocab_size=vocab_size,
            tokenizer=None if tokens_given else str(shared_tokenizer(subjects)),
            text_field=text_field,
            max_documents=max_documents,
            progress=bar.describe,
        )
    console.print(f"data: {text.description}; {text.validation_tokens:,} tokens held out", highlight=False)
    with progress_bar("analysing") as progress:
        record = analyse(subjects, text, settings, where, progress)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / RECORD, record)
    page = write_page(out)
    console.print(terminal(record))
    console.print(f"report: {page}", highlight=False, soft_wrap=True)


def _rates(text: str) -> tuple[float, ...]:
    from ..errors import LeanError

    try:
        found = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        found = ()
    if not found or not all(0 < rate < 1 for rate in found):
        raise LeanError(f"--probe-rates is learning rates between 0 and 1 and between commas, found {text!r}")
    return found
