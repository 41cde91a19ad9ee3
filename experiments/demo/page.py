"""The demo as a terminal table and as one page."""

from typing import Any

from rich.table import Table as TerminalTable

from leanqkv.compare.measure import LOSS
from leanqkv.compare.statistics import Band
from leanqkv.report import figures
from leanqkv.report.page import Code, Figure, Kind, Note, Page, Section, described, footer
from leanqkv.report.text import ABSENT, Table, signed

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
MODELS = (
    "A model trained this briefly makes little use of attention, so the conversion costs it almost nothing; it costs a "
    "well-trained model more. A model this small spends its decoding time on overhead: a smaller cache makes it no "
    "faster."
)
CERTIFICATE = (
    "Every row is against the original computed in float64. Rows “original” show the error of the dtype by itself."
)
# What each phase does, on a model of the reader's own.
COMMANDS = {
    "Train and compare": "`leanqkv compare small small+skipv1 --data book.txt --seeds 3 --out runs/mine`",
    "Shrink the KV cache": "`leanqkv convert hf/llama --to skipv1 --calibration book.txt --out hf/llama-skipv1`",
    "Remove weights exactly": "`leanqkv eliminate hf/llama --remove block-diagonal --out hf/llama-removed`",
    "Verify": "`leanqkv verify hf/llama hf/llama-removed --text book.txt`",
    "Score": "`leanqkv eval hf/llama-skipv1 --data book.txt`",
    "Decode": '`leanqkv generate hf/llama-skipv1 --prompt "Once upon a time"`',
}


def terminal(record: dict[str, Any]) -> TerminalTable:
    """Return the models in 80 columns."""
    return Table(SHORT_HEADERS, [row[:-1] for row in _rows(record)]).terminal(whole=SHORT_HEADERS)


def page(record: dict[str, Any]) -> Page:
    """Return the page of a record."""
    training, certificate = record["training"], record["elimination"]["certificate"]
    texts = record["decoding"]["models"]
    prompt = record["settings"]["prompt"]
    models, elimination, decoding = _takeaways(record)
    lead = (
        f"{' and '.join(training['models'])} were trained for {training['steps']:,} steps on the same "
        f"{training['tokens']:,} tokens. The trained baseline was then converted to a smaller KV cache, and, "
        "separately, weights were removed from it exactly."
    )
    certified = [
        [dtype, which, f"{values['max_abs']:.1e}", f"{values['relative']:.1e}", f"{values['agreement']:.1%}"]
        for dtype, pair in certificate["dtypes"].items()
        for which, values in pair.items()
        if (dtype, which) != ("fp64", "original")
    ]
    decoded = [Section(name, [Code(model["text"].rstrip(), bold=prompt)]) for name, model in texts.items()]
    return Page(
        "experiments.demo",
        "One small model, every tool",
        lead,
        [
            Section("Figures", _figures(record)),
            Section("The models", [models, Table(HEADERS, _rows(record), note=MODELS)]),
            Section("Weights removed exactly", [elimination, Table(CERTIFICATE_HEADERS, certified, note=CERTIFICATE)]),
            Section(
                "The same prompt, decoded",
                [decoding, *decoded, Note("The prompt is bold. All models draw with the same seed.")],
            ),
            Section("The same with your own model", [COMMANDS]),
            Section("How it was measured", [_facts(record)]),
        ],
        made=footer(record),
        status=SCALE,
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
            ABSENT if name == baseline else _difference(model, models[baseline]),
            f"{decoding[name]['tokens_per_second']['median']:,.0f}",
            f"{decoding[name]['cache_bytes']:,}",
        ]
        for name, model in models.items()
    ]


def _takeaways(record: dict[str, Any]) -> tuple[str, str, str]:
    """Return one sentence each on the models, the elimination and the decoding."""
    settings, decoded = record["settings"], record["decoding"]["models"]
    baseline, variant, converted, _ = record["evaluation"]["models"].values()
    size, smaller = (model["kv_bytes_per_token_bf16"] for model in (baseline, converted))
    certificate = record["elimination"]["certificate"]
    before, after = certificate["parameters"]["before"], certificate["parameters"]["after"]
    held = [model["cache_bytes"] for model in decoded.values()]
    return (
        f"The conversion makes the KV cache {1 - smaller / size:.1%} smaller and changes the loss by "
        f"{_difference(converted, baseline)} nats without a training step. {settings['variant']}, trained from "
        f"scratch: {_difference(variant, baseline)} nats.",
        f"{before - after:,} of {before:,} weights are gone ({1 - after / before:.1%}). Before rounding to "
        f"{certificate['dtype']} the logits differ by {certificate['exact']['relative']:.0e} of the largest one.",
        f"For {decoded[settings['baseline']]['cache_tokens']} tokens in float32 the baseline's cache holds "
        f"{held[0]:,} bytes and that of the converted model {held[2]:,}.",
    )


def _difference(model: dict[str, Any], baseline: dict[str, Any]) -> str:
    return signed(round(model["loss"] - baseline["loss"], 4) + 0.0)  # + 0.0: no minus sign before a zero


def _figures(record: dict[str, Any]) -> list[Figure]:
    training, models = record["training"], record["evaluation"]["models"]
    curves = [
        figures.Series(name, style, [Band(at["step"], *3 * (at["loss"],)) for at in run["evaluations"]])
        for style, (name, run) in enumerate(training["models"].items())
    ]
    # The model without its redundant weights has the baseline's cache and loss: the two marks would be one.
    points = [
        figures.Series(name, style, [Band(model["kv_bytes_per_token_bf16"], *3 * (model["loss"],))])
        for style, (name, model) in enumerate(list(models.items())[:-1])
    ]
    return [
        Figure(
            figures.curves("loss", curves, LOSS, training["tokens_per_step"]),
            f"One run each, on the same batches.{figures.edge_note(curves)}",
            "Validation loss during training",
        ),
        Figure(
            figures.cache_scatter("cache", points),
            "Down and to the left is better. The dashed line is the baseline's loss; equal caches stand side by side.",
            "Validation loss and KV cache",
        ),
    ]


def _facts(record: dict[str, Any]) -> dict[str, str]:
    """Return how it was measured, by term."""
    settings, training, evaluation = (record[part] for part in ("settings", "training", "evaluation"))
    data, decoding = training["data"], record["decoding"]
    certificate, verification = record["elimination"]["certificate"], record["elimination"]["verification"]
    return {
        "Data": f"{data['description']}; its first {settings['documents']:,} documents, {data['train_tokens']:,} "
        "training tokens",
        "Training": f"{training['steps']:,} steps of {training['tokens_per_step']:,} tokens, peak learning rate "
        f"{settings['learning_rate']:g}, {training['precision']}",
        "Training speed": "; ".join(
            f"{name} {run['tokens_per_second']:,.0f} tokens/s" for name, run in training["models"].items()
        ),
        "Conversion": f"calibrated on {record['conversion']['calibration_tokens']:,} tokens of the training text",
        "Validation": f"{evaluation['sequences']:,} sequences of {evaluation['context_length']} held-out tokens, "
        "always the same",
        "Certificate": f"on held-out text, weights stored in {certificate['dtype']}; the worst condition number of a "
        f"matrix solved with is {max(certificate['conditions'].values()):.3g}",
        "Verification": "of the stored checkpoints on random tokens: logits in float64 differ by "
        f"{verification['fp64']['result']['relative']:.0e}",
        "Decoding": f"batch 1, {decoding['dtype']}: {decoding['prompt_tokens']} prompt tokens and "
        f"{settings['new_tokens']} new ones, sampled with one seed; median of {settings['rounds']} turns",
        "Hardware": described(record["hardware"]),
        "Versions": described(record["versions"]),
        "Git commit": record["git_commit"] or "not recorded",
    }


KIND = Kind("demo.json", "run the demo again in another directory", page, terminal)
