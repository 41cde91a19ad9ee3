"""Eliminations and their certificates, for `leanqkv eliminate` and `verify`."""

from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ..checkpoints.open import open_checkpoint
from ..checkpoints.tokenizer import check_ids, framing, load_tokenizer
from ..data.corpus import read_pieces
from ..eliminate import eliminate_directory, verify
from ..eliminate.transform import Request
from ..environment import give_back_freed_memory
from ..errors import LeanError
from ..progress import console, continued_when_repeated, progress_bar


def eliminate_and_certify(source: Path, out: Path, request: Request, text: Path | None, **form: Any) -> None:
    """Eliminate as `eliminate_directory` does, with `form` among its options, and print the certificate."""
    inputs = _inputs(source, text)
    give_back_freed_memory()
    with continued_when_repeated(), progress_bar("reading", in_bytes=True) as bar:
        report = eliminate_directory(source, out, request, **form, inputs=inputs, progress=bar, message=bar.start)
    _print_certificate(report)
    console.print(f"{out}: certificate.json")


def verify_and_report(source: Path, other: Path, text: Path | None, tolerance: float) -> bool:
    """Print how far the logits of two checkpoints differ; return whether that is within the tolerance in float64."""
    give_back_freed_memory()
    with progress_bar("reading") as bar:
        report = verify(source, other, _inputs(source, text), bar.start)
    console.print(_difference_table(report))
    relative = report["fp64"]["result"]["relative"]
    same = relative <= tolerance
    differ = f"not the same function: in float64 the logits differ by {relative:.1e}"
    console.print(f"the same function, up to {relative:.1e}" if same else differ)
    return same


def _print_certificate(report: dict[str, Any]) -> None:
    before, after = report["parameters"]["before"], report["parameters"]["after"]
    lines = [f"{before:,} -> {after:,} parameters ({after / before - 1:+.1%})"]
    if after > before:
        lines.append("more than before: the head was tied to the embedding and no longer can be")
    if report["conditions"]:
        name, worst = max(report["conditions"].items(), key=lambda item: item[1])
        lines.append(f"worst condition number: {worst:.3g}, {name}")
    if report["exact"]:
        lines.append(f"before rounding to {report['dtype']}: logits differ by {report['exact']['relative']:.1e}")
    else:
        distance, explained = report["rounding"].values()
        lines.append(
            f"stored in {report['dtype']}: logits lie {distance:.1e} off; rounding explains up to {explained:.1e}"
        )
    if "disabled_norms" in report:
        relative = report["disabled_norms"]["relative"]
        lines.append(
            f"the norms that the epsilon disables: the original differs by {relative:.1e} from the function without "
            "norms, which is the one reproduced"
        )
    console.print("\n".join(lines))
    console.print(_difference_table(report["dtypes"]))


def _difference_table(report: dict[str, Any]) -> Table:
    table = Table(title="Logits against the original's in float64", title_justify="left")
    for column in ("computed in", "", "max |Δ|", "relative", "KL, nats", "same next token"):
        table.add_column(column, justify="left" if column in ("computed in", "") else "right")
    for dtype, pair in report.items():
        for which, values in pair.items():
            if dtype == "fp64" and which == "original":
                continue
            agreement = f"{values['agreement']:.1%}"
            table.add_row(dtype, which, *(f"{values[name]:.2e}" for name in ("max_abs", "relative", "kl")), agreement)
    return table


def _inputs(source: Path, text: Path | None) -> dict[str, Tensor] | None:
    """Return the beginning of `text` as two sequences of up to 64 of the model's tokens, or None without a text."""
    if text is None:
        return None
    config, beginning = open_checkpoint(source).config, next(read_pieces(text), "")
    tokenizer = load_tokenizer(source)
    around = framing(tokenizer)
    ids = around.frame(tokenizer(beginning, add_special_tokens=False)["input_ids"])[:-1]
    check_ids(ids, config.vocab_size, tokenizer, str(text))
    length = min(64, config.max_position_embeddings, len(ids) // 2)
    if length < 1:
        raise LeanError(f"{text} is too short: it is {len(ids)} tokens")
    sequences = torch.tensor(ids[: 2 * length]).view(2, length)
    if around.begin is not None:
        sequences[:, 0] = around.begin
    return {"input_ids": sequences}
