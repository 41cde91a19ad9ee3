"""The demo as a terminal table and as one page."""

from pathlib import Path
from typing import Any

from rich.table import Table as TerminalTable

from ..compare.measure import LOSS
from ..compare.statistics import Band
from ..demo.phases import PHASES, RECORD
from ..errors import LeanError
from ..files import write_text
from ..records import reading
from . import figures
from .html import TEMPLATES, render
from .text import ABSENT, Table, signed

SCALE = (
    "A toy run: two models of a million parameters, minutes of training, one seed. It shows what each tool does; it "
    "supports no conclusion about architectures."
)
HEADERS = (
    *("model", "parameters", "KV cache, bytes\nper token (bf16)", "validation loss,\nnats per token"),
    *("difference to\nthe baseline", "decoding,\ntokens/s", "KV cache\nheld, bytes"),
)
SHORT_HEADERS = ("model", "parameters", "KV bytes\nper token", "validation\nloss", "change", "decoding,\ntokens/s")
CERTIFICATE_HEADERS = ("computed in", "model", "largest difference\nof logits", "relative", "same next\ntoken")
# What each phase does, on a model of the reader's own.
COMMANDS = (
    ("Train and compare", "leanqkv compare small small+skipv1 --data book.txt --seeds 3 --out runs/mine"),
    ("Shrink the KV cache", "leanqkv convert hf/llama --to skipv1 --calibration book.txt --out hf/llama-skipv1"),
    ("Remove weights exactly", "leanqkv eliminate hf/llama --remove block-diagonal --out hf/llama-removed"),
    ("Verify", "leanqkv verify hf/llama hf/llama-removed --text book.txt"),
    ("Score", "leanqkv eval hf/llama-skipv1 --data book.txt"),
    ("Decode", 'leanqkv generate hf/llama-skipv1 --prompt "Once upon a time"'),
)


def terminal_table(record: dict[str, Any]) -> TerminalTable:
    """Return the models in 80 columns."""
    return Table(SHORT_HEADERS, [row[:-1] for row in _rows(record)]).terminal(whole=SHORT_HEADERS)


def write_page(directory: Path) -> Path:
    """Write `report.html` beside demo.json, from it alone, and return the page's path.

    Raises:
        LeanError: no such record there, a damaged one, or a demo that is not complete.
    """
    page = directory / "report.html"
    with reading(directory / RECORD, "run the demo again in another --out") as record:
        if missing := [phase for phase in PHASES if phase not in record]:
            raise LeanError(
                f"{directory} holds a demo without {missing[0]}. Go on with: leanqkv demo --out {directory}"
            )
        write_text(page, _html(record))
    return page


def _html(record: dict[str, Any]) -> str:
    models = (
        "A model trained this briefly makes little use of attention, so the conversion costs it almost nothing; it "
        "costs a well-trained model more. A model this small spends its decoding time on overhead: a smaller cache "
        "makes it no faster."
    )
    certificate = (
        "Every row is against the original computed in float64. Rows “original” show the error of the dtype by itself."
    )
    return render(
        TEMPLATES / "demo.html.j2",
        record=record,
        scale=SCALE,
        lead=_lead(record),
        figures=_figures(record),
        takeaways=_takeaways(record),
        tables={
            "models": Table(HEADERS, _rows(record), "The models", models),
            "elimination": Table(
                CERTIFICATE_HEADERS, _certificate_rows(record), "Weights removed exactly", certificate
            ),
        },
        lists={"The same with your own model": COMMANDS, "How it was measured": _facts(record)},
    )


def _rows(record: dict[str, Any]) -> list[list[str]]:
    """Return each model's cells, as HEADERS has them."""
    models, decoding = record["evaluation"]["models"], record["decoding"]["models"]
    baseline = record["settings"]["baseline"]
    return [
        [
            name,
            f"{model['parameters']:,}",
            f"{model['kv_bytes_per_token_bf16']:,}",
            f"{model['loss']:.4f}",
            ABSENT if name == baseline else _difference(model["loss"], models[baseline]["loss"]),
            f"{decoding[name]['tokens_per_second']['median']:,.0f}",
            f"{decoding[name]['cache_bytes']:,}",
        ]
        for name, model in models.items()
    ]


def _certificate_rows(record: dict[str, Any]) -> list[list[str]]:
    """Return what the certificate says, as CERTIFICATE_HEADERS has it."""
    return [
        [dtype, which, f"{values['max_abs']:.1e}", f"{values['relative']:.1e}", f"{values['agreement']:.1%}"]
        for dtype, pair in record["elimination"]["certificate"]["dtypes"].items()
        for which, values in pair.items()
        if (dtype, which) != ("fp64", "original")
    ]


def _lead(record: dict[str, Any]) -> str:
    training = record["training"]
    return (
        f"{' and '.join(training['models'])} were trained for {training['steps']:,} steps on the same "
        f"{training['tokens']:,} tokens. The trained baseline was then converted to a smaller KV cache, and, "
        "separately, weights were removed from it exactly."
    )


def _takeaways(record: dict[str, Any]) -> dict[str, str]:
    """Return one sentence for each section."""
    settings, decoded = record["settings"], record["decoding"]["models"]
    baseline, variant, converted, _ = record["evaluation"]["models"].values()
    sizes = [model["kv_bytes_per_token_bf16"] for model in (baseline, converted)]
    gaps = [_difference(model["loss"], baseline["loss"]) for model in (converted, variant)]
    certificate = record["elimination"]["certificate"]
    before, after = certificate["parameters"]["before"], certificate["parameters"]["after"]
    held = [model["cache_bytes"] for model in decoded.values()]
    return {
        "models": (
            f"The conversion makes the KV cache {1 - sizes[1] / sizes[0]:.1%} smaller and changes the loss by "
            f"{gaps[0]} nats without a training step. {settings['variant']}, trained from scratch: {gaps[1]} nats."
        ),
        "elimination": (
            f"{before - after:,} of {before:,} weights are gone ({1 - after / before:.1%}). Before rounding to "
            f"{certificate['dtype']} the logits differ by {certificate['exact']['relative']:.0e} of the largest one."
        ),
        "decoding": (
            f"For {decoded[settings['baseline']]['cache_tokens']} tokens in float32 the baseline's cache holds "
            f"{held[0]:,} bytes and that of the converted model {held[2]:,}."
        ),
    }


def _difference(loss: float, baseline: float) -> str:
    return signed(round(loss - baseline, 4) + 0.0)  # + 0.0: no minus sign before a zero


def _figures(record: dict[str, Any]) -> list[tuple[str, str, figures.Drawing]]:
    """Return heading, caption and drawing of both figures."""
    training, models = record["training"], record["evaluation"]["models"]
    curves = [
        figures.Series(name, style, [Band(at["step"], at["loss"], at["loss"], at["loss"]) for at in run["evaluations"]])
        for style, (name, run) in enumerate(training["models"].items())
    ]
    # The model without its redundant weights has the baseline's cache and loss: the two marks would be one.
    points = [
        figures.Series(name, style, [Band(model["kv_bytes_per_token_bf16"], *3 * (model["loss"],))])
        for style, (name, model) in enumerate(list(models.items())[:-1])
    ]
    return [
        (
            "Validation loss during training",
            f"One run each, on the same batches.{figures.edge_note(curves)}",
            figures.curves(curves, LOSS, training["tokens_per_step"]),
        ),
        (
            "Validation loss and KV cache",
            "Down and to the left is better. The dashed line is the baseline's loss; equal caches stand side by side.",
            figures.cache_scatter(points),
        ),
    ]


def _facts(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Return how it was measured, term by term."""
    settings, training, evaluation = (record[part] for part in ("settings", "training", "evaluation"))
    data, runs = training["data"], training["models"]
    documents = f"its first {settings['documents']:,} documents"
    certificate, verification = record["elimination"]["certificate"], record["elimination"]["verification"]
    speeds = "; ".join(f"{name} {run['tokens_per_second']:,.0f} tokens/s" for name, run in runs.items())
    return [
        ("Data", f"{data['description']}; {documents}, {data['train_tokens']:,} training tokens"),
        (
            "Training",
            f"{training['steps']:,} steps of {training['tokens_per_step']:,} tokens, peak learning rate "
            f"{settings['learning_rate']:g}, {training['precision']}",
        ),
        ("Training speed", speeds),
        ("Conversion", f"calibrated on {record['conversion']['calibration_tokens']:,} tokens of the training text"),
        (
            "Validation",
            f"{evaluation['sequences']:,} sequences of {evaluation['context_length']} held-out tokens, always the same",
        ),
        (
            "Certificate",
            f"on held-out text, weights stored in {certificate['dtype']}; the worst condition number of a matrix "
            f"solved with is {max(certificate['conditions'].values()):.3g}",
        ),
        (
            "Verification",
            "of the stored checkpoints on random tokens: logits in float64 differ by "
            f"{verification['fp64']['result']['relative']:.0e}",
        ),
        (
            "Decoding",
            f"batch 1, {record['decoding']['dtype']}: {record['decoding']['prompt_tokens']} prompt tokens and "
            f"{settings['new_tokens']} new ones, sampled with one seed; median of {settings['rounds']} turns",
        ),
        ("Hardware", ", ".join(f"{key} {value}" for key, value in record["hardware"].items())),
        ("Versions", ", ".join(f"{key} {value}" for key, value in record["versions"].items())),
        ("Git commit", record["git_commit"] or "not recorded"),
    ]
