"""`leanqkv frontier`: how small the KV cache of a checkpoint can get, and what that costs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..convert.targets import BUDGETED, SMALLER, SWEPT, listed
from ..environment import check_device, command_line
from ..errors import LeanError
from ..files import write_json
from ..job import check_out
from ..progress import continued_when_repeated, progress_bar
from .convert import read_share
from .options import SOURCE, console

TOKENS, EVALUATED_TOKENS, SAMPLES = 12_288, 4096, 3


def frontier(
    source: Annotated[Path, typer.Argument(help=SOURCE)],
    out: Annotated[Path, typer.Option(help="Directory of the measurements; goes on where an earlier start left off.")],
    evaluate: Annotated[
        list[str],
        typer.Option(help="Text to score, as --data of train takes it, no mixture; may be given several times."),
    ],
    calibration: Annotated[str, typer.Option(help="Text to calibrate on, as --data of train takes it.")] = "prose",
    tokens: Annotated[int, typer.Option(help="Calibration tokens of each sample.")] = TOKENS,
    calibrations: Annotated[
        int, typer.Option(help="Calibrations on other parts of the text, for the intervals.")
    ] = SAMPLES,
    sequence_length: Annotated[
        int | None, typer.Option(help="Of the sequences to calibrate and score. Default: 512, or all positions.")
    ] = None,
    evaluate_tokens: Annotated[int, typer.Option(help="Tokens to score of every text.")] = EVALUATED_TOKENS,
    budgets: Annotated[
        str, typer.Option(help="Shares of the source's cache that latents are fitted to.")
    ] = "84%,75%,50%",
    kinds: Annotated[
        str,
        typer.Option(
            help=f"Kinds of reduction: {listed(SWEPT)}; "
            f"{listed([kind for kind in SMALLER if kind not in SWEPT])} from weights alone. "
            "KIND:SHARE:... for budgets of its own."
        ),
    ] = "latents,separate-latents:84%,skipv1,gqa",
    contexts: Annotated[str, typer.Option(help="Tokens after which decoding is timed; 0 leaves it out.")] = "512,4096",
    device: Annotated[str | None, typer.Option(help="cpu, cuda or mps. Default: cpu.")] = None,
) -> None:
    """Measure bytes of KV cache per token against loss, for every kind of reduction and precision of the cache.

    leanqkv frontier model.gguf --calibration prose --evaluate prose --evaluate book.txt --out runs/frontier

    leanqkv frontier hf/llama --budgets 84%,75% --calibrations 1 --evaluate book.txt --out runs/frontier
    """
    check_out(out, "frontier", source)
    shares = [read_share(part, "--budgets") for part in budgets.split(",")]
    decoded = _contexts(contexts)
    import torch

    from ..checkpoints.open import open_causal_lm
    from ..convert.conversion import check_sequence_length
    from ..frontier import PRECISIONS, candidates
    from ..frontier.measure import RECORD, Frontier
    from ..model.cache_quantized import BLOCK
    from ..report.frontier import KIND, recommendations
    from ..report.page import NO_PAGE

    opened = open_causal_lm(source)
    length = sequence_length or min(512, opened.config.max_position_embeddings or 512)
    check_sequence_length(opened.config, length)
    found, refused = candidates(opened.config, opened.tensors, _kinds(kinds, shares))
    precisions = list(PRECISIONS)
    if any(layer.window is not None for layer in opened.config.plan.layers):
        precisions = precisions[:1]
        refused["8 and 4 bits"] = "some layers keep a sliding window, and no quantized cache does"
    elif length < 2 * BLOCK:
        precisions = precisions[:1]
        refused["8 and 4 bits"] = f"a cache is quantized by blocks of {BLOCK} tokens, and a sequence has {length}"
    chosen_device = torch.device("cpu" if device is None else check_device(device))
    texts = _texts(source, opened.config.vocab_size, evaluate, calibration)
    taken = _samples(opened, calibration, calibrations, tokens, length)
    limit = opened.config.cached_positions
    timed = [context for context in decoded if limit is None or context + 64 <= limit]
    with continued_when_repeated(), progress_bar("reading") as bar:
        measured = Frontier(
            opened,
            found,
            precisions,
            taken,
            texts,
            out,
            evaluated_tokens=evaluate_tokens,
            length=length,
            contexts=timed,
            device=chosen_device,
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


def _kinds(text: str, shares: list[float]) -> dict[str, list[float]]:
    """Return the kinds of a list like "latents,separate-latents:84%", with the budgets of each."""
    from ..model.registry import suggest

    kinds = {}
    for part in text.split(","):
        kind, *own = part.strip().split(":")
        if kind not in SMALLER:
            raise LeanError(f"--kinds: there is no kind {kind!r}: {suggest(kind, SMALLER)}")
        if own and kind not in BUDGETED:
            raise LeanError(f"--kinds: {kind} takes no budget; {listed(BUDGETED)} do")
        kinds[kind] = [read_share(share, f"the budget of {kind} in --kinds") for share in own] or shares
    return kinds


def _contexts(text: str) -> list[int]:
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise LeanError(f"--contexts is a list like 512,4096, or 0, found {text[:80]!r}")
    return [int(part) for part in text.split(",") if int(part)]


def _texts(source: Path, vocab_size: int, names: list[str], calibration: str) -> list[Any]:
    """Return the texts to score; of those that are calibrated on, the part that the calibration never sees."""
    from ..data import evaluation_text, unseen_split

    texts = []
    with progress_bar("reading the evaluation text") as bar:
        for name in names:
            split = unseen_split(name, calibration)
            texts.append(
                evaluation_text(name, tokenizer=source, vocab_size=vocab_size, split=split, progress=bar.describe)
            )
    return texts


def _samples(opened: Any, calibration: str, samples: int, tokens: int, length: int) -> Any:
    from ..convert.conversion import calibration_tokens
    from ..data import prepare_data
    from ..frontier.measure import calibration_samples

    size, tokenizer = opened.config.vocab_size, str(opened.directory)
    with progress_bar("reading the calibration text") as bar:
        data = prepare_data(calibration, vocab_size=size, tokenizer=tokenizer, progress=bar.describe)
    return calibration_samples(
        lambda count: calibration_tokens(data, opened.config, count * length, length), samples, max(1, tokens // length)
    )
