"""Mixtures of texts, `a.txt,prose:0.3`: each gives its share of the tokens."""

import math
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import LeanError
from ..files import hash_files
from .token_files import TokenData, Tokens

# A text that has more than its share gives pieces of this many tokens from all over it.
PIECE = 4096
SHARE = re.compile(r"(.+):(-?(?:\d+\.?\d*|\.\d+))")


@dataclass(frozen=True)
class Part:
    """One text of a mixture, and its share of the tokens."""

    source: str
    share: float


def parse_mixture(source: str | None) -> list[Part]:
    """Return the texts that `source` names, with their shares; one that is no mixture is one text with share 1.

    A mixture is names between commas, each with `:SHARE` if it has one; texts without a share divide the rest equally.
    An existing path takes precedence.

    Raises:
        LeanError: an empty name, a text twice, or shares that do not add up to 1.
    """
    if source is None or "," not in source or os.path.exists(source):  # noqa: PTH110, Path.exists raises
        return [Part(source or "stdlib", 1.0)]
    names, shares = zip(*map(_name_and_share, source.split(",")), strict=True)
    if "" in names:
        raise LeanError(f"the mixture {source!r} has an empty name; give NAME,NAME or NAME:SHARE,NAME:SHARE")
    if twice := [name for name in names if names.count(name) > 1]:
        raise LeanError(f"the mixture {source!r} has {twice[0]} twice; give it once, with its whole share")
    given, open_shares = math.fsum(filter(None, shares)), shares.count(None)
    if any(share is not None and not 0 < share < 1 for share in shares):
        raise LeanError(f"the mixture {source!r} has a share that is not between 0 and 1; leave out a text of share 0")
    if (open_shares and given > 1 - 1e-9) or (not open_shares and abs(given - 1) > 1e-9):
        wanted = "less than 1, since some texts have none" if open_shares else "1"
        raise LeanError(f"the shares of {source!r} add up to {given:g}; they must add up to {wanted}")
    return [
        Part(name, (1 - given) / open_shares if share is None else share)
        for name, share in zip(names, shares, strict=True)
    ]


def _name_and_share(text: str) -> tuple[str, float | None]:
    text = text.strip()
    match = None if os.path.exists(text) else SHARE.fullmatch(text)  # noqa: PTH110, as above
    return (text, None) if match is None else (match[1], float(match[2]))


def token_counts(available: Sequence[int], shares: Sequence[float]) -> list[int]:
    """Return how many tokens of each text make the largest mixture with these shares in which no token is repeated."""
    total = min(count / share for count, share in zip(available, shares, strict=True))
    return [min(count, round(total * share)) for count, share in zip(available, shares, strict=True)]


def write_mixture(directory: Path, parts: Sequence[Part], prepared: Sequence[TokenData]) -> dict[str, Any]:
    """Write train.bin and validation.bin of texts that have one tokenizer; return the fields of their TokenData.

    Raises:
        LeanError: a text is too short for its share.
    """
    shares = [part.share for part in parts]
    dtype, taken = np.dtype(prepared[0].dtype), {}
    for split in ("train", "validation"):
        available = [getattr(data, f"{split}_tokens") for data in prepared]
        taken[split] = token_counts(available, shares)
        if 0 in taken[split]:
            _, short = min((count / part.share, part.source) for count, part in zip(available, parts, strict=True))
            raise LeanError(f"the {split} text of {short} is too short to give its share to a mixture; give more text")
        with (directory / f"{split}.bin").open("wb") as stream:
            for data, count in zip(prepared, taken[split], strict=True):
                for piece in _spread(getattr(data, split)(), count):
                    stream.write(piece.astype(dtype).tobytes())
    shutil.copytree(prepared[0].directory / "tokenizer", directory / "tokenizer")
    counts = [sum(numbers) for numbers in zip(*taken.values(), strict=True)]
    size = sum(count * (data.bytes_per_token or 0) for count, data in zip(counts, prepared, strict=True))
    return {
        "description": " + ".join(f"{p.share:.0%} {d.description}" for p, d in zip(parts, prepared, strict=True)),
        "vocab_size": prepared[0].vocab_size,
        "dtype": dtype.name,
        **{f"{split}_shards": [(f"{split}.bin", 0, sum(counts))] for split, counts in taken.items()},
        "sha256": hash_files(directory / "train.bin", directory / "validation.bin"),
        "bytes_per_token": size / sum(counts),
        "parts": [
            {"description": data.description, "sha256": data.sha256, "share": part.share, "tokens": count}
            for part, data, count in zip(parts, prepared, counts, strict=True)
        ],
    }


def _spread(tokens: Tokens, count: int) -> Iterator[np.ndarray]:
    """Yield `count` of the tokens, in pieces that are evenly spread over them and do not overlap."""
    pieces = -(-count // PIECE)
    ends = [count * (i + 1) // pieces for i in range(pieces)]
    for begin, end in zip([0, *ends], ends, strict=False):
        # As far into the text as the piece is into what is taken.
        start = begin + (len(tokens) - count) * begin // count
        yield tokens[start : start + end - begin]
