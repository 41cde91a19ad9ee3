"""`leanqkv frontier`: how small the KV cache of a checkpoint can get, and what that costs."""

from pathlib import Path
from typing import Annotated

import typer

from ..cache_bits import CacheBits
from ..convert.targets import BUDGETED, SMALLER, SWEPT
from ..environment import check_device
from ..errors import LeanError, listed
from ..job import check_out
from .convert import read_share
from .options import SOURCE, check_left_out
from .texts import FrontierTexts, TaskScoring


def frontier(
    source: Annotated[Path, typer.Argument(help=SOURCE)],
    out: Path,
    texts: FrontierTexts,
    tasks: TaskScoring,
    budgets: str = "84%,75%,50%",
    kinds: Annotated[
        str,
        typer.Option(
            help=f"Kinds of reduction: {listed(SWEPT)}; "
            f"{listed([kind for kind in SMALLER if kind not in SWEPT])} from weights alone. "
            "KIND:SHARE:... for budgets of its own."
        ),
    ] = "unrotated-latents,latents:84%,separate-latents:84%,skipv1,gqa",
    at_context: int | None = None,
    contexts: str = "512,4096",
    cache_bits: str | None = None,
    device: str | None = None,
) -> None:
    """Measure bytes of KV cache per token against loss, for every kind of reduction and precision of the cache.

    leanqkv frontier model.gguf --calibration prose --evaluate prose --evaluate book.txt --out runs/frontier

    leanqkv frontier hf/llama --budgets 84%,75% --calibrations 1 --evaluate book.txt --out runs/frontier

    leanqkv frontier hf/llama --cache-bits 8,4,2 --evaluate book.txt --out runs/bits

    leanqkv frontier hf/llama --tasks needle:book.txt,recall --sequence-length 4096 --evaluate book.txt --out runs/long

    Options:
        out: Directory of the measurements. Rerun to resume.
        budgets: Shares of the source's cache that latents are fitted to.
        at_context: Count bytes at a context of so many tokens, where layers with a sliding window keep the window's
            tokens alone. Default: a context that every window holds.
        contexts: Context lengths at which decoding is timed. 0: none.
        cache_bits: Precisions of the cache to measure beside 16 bits: 8, 4, 2 or KEYS/VALUES, between commas. Default:
            8/4,4, where the model can have them.
        device: cpu, cuda or mps. Default: cpu.
    """
    if tasks.tasks is None:
        check_left_out(tasks, "`tasks`")
    check_out(out, "frontier", source)
    shares = [read_share(part, "--budgets") for part in budgets.split(",")]
    decoded, precisions = _contexts(contexts), None if cache_bits is None else CacheBits.list_of(cache_bits)
    from .reducing import measure_frontier

    budgeted = _kinds(kinds, shares)
    where = "cpu" if device is None else check_device(device)
    measure_frontier(source, out, texts, tasks, budgeted, decoded, precisions, where, at_context)


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
