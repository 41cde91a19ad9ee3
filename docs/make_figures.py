"""Draw the documentation's figures from the records under `results/` and from the plan, into `docs/figures/`.

    python docs/make_figures.py
    python docs/make_figures.py --only uptraining

Every figure is an SVG that follows the reader's light or dark mode and stays legible at the width of a phone. Its
`<desc>` names the records that it was drawn from, with their hash, so that `tests/test_docs.py` can tell an old figure.
"""

import argparse
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drawing import analysis, conversion, elimination, memory, sharing, training
from drawing.svg import FIGURES, RESULTS


@dataclass(frozen=True)
class Figure:
    """A figure: the records it is drawn from, relative to `results/`, and what draws it as SVG."""

    sources: tuple[str, ...]
    draw: Callable[[], str]


# A comparison -> the setting of its models, on Python source.
COPIED = {
    "eighth-length": "1.07M, an eighth",
    "quarter-length": "1.07M, a quarter",
    "half-length": "1.07M, a half",
    "tiny-deep-decay": "1.07M, the whole",
    "half-tiny-4e-3": "0.56M, the whole",
}
# What a line is called -> the record it is of, and the model in it.
LENGTHS = {
    "skipv1": ("by-length.json", "skipv1"),
    "nonlinear-query": ("by-length-one-decay.json", "nonlinear-query"),
    "nonlinear-query, weight decay 2⁻⁵": ("by-length.json", "nonlinear-query"),
}
COMPARISONS = {
    "one-decay": ("Trained to the end, 4 seeds", "difference in validation loss, nats"),
    "tiny-deep-decay": ("The papers' weight decay, 4 seeds", "difference in validation loss, nats"),
    "kv-sharing": ("Sharing values, 3 seeds", "difference in validation loss, nats"),
    "skip-ratio-gpt2": ("Shares of value heads, 3 seeds", "difference in validation loss, nats"),
    "skip-ratio": ("Shares of value heads, LLaMA, 3 seeds", "difference in validation loss, nats"),
    "llama-sizes": ("SkipV1 at three sizes, 3 seeds", "difference in validation loss, nats"),
    "skip-layer": ("Which layer's values, 3 seeds", "difference in validation loss, nats"),
    "injection": ("Which heads are borrowed, 3 seeds", "difference in validation loss, nats"),
    "gqa-mla": ("With grouped queries and with a latent, 3 seeds", "difference in validation loss, nats"),
    "tinyllama": ("With four query heads to a value head, 3 seeds", "difference in validation loss, nats"),
    "kv-both": ("Sharing keys too, 3 seeds", "difference in validation loss, nats"),
    "small-h100": ("5.84M parameters, 57M tokens", "difference in validation loss, nats"),
    "extensions": ("Extensions, 3 seeds", "difference in validation loss, nats"),
    "query": ("Queries, 3 seeds", "difference in validation loss, nats"),
    "quickstart": ("Quickstart, 3 seeds", "difference in validation loss, nats"),
    "vision": ("Images, 3 seeds", "difference in test accuracy"),
}


def _files(directory: str) -> tuple[str, ...]:
    """The records of a comparison."""
    runs = sorted(path.parent.name for path in (RESULTS / directory).glob("runs/*/record.json"))
    return (f"{directory}/compare.json", *(f"{directory}/runs/{run}/record.json" for run in runs))


def _comparison(directory: str, words: Sequence[str]) -> Figure:
    return Figure(_files(directory), lambda: training.differences(directory, *words))


_CONVERSION, _EXACT = ("conversion/stdlib.json", "conversion/torch-headers.json"), ("exact/gpt2-small.json",)
ALL: dict[str, Figure] = {
    "skipv1": Figure((), sharing.shared_values),
    "cache-sizes": Figure((), memory.cache_sizes),
    "conversion-methods": Figure(_CONVERSION, conversion.conversion_methods),
    "uptraining": Figure(_CONVERSION[:1], conversion.uptraining),
    "redundant-weights": Figure(_EXACT, elimination.redundant_weights),
    "elimination-precision": Figure(_EXACT, elimination.elimination_precision),
    "published-bytes": Figure(("kv-bytes.json",), memory.published_bytes),
    "sequences-at-once": Figure(("vllm/serving.json",), memory.sequences_at_once),
    "decoding": Figure(("decode/transformers.json",), memory.decoding),
    "cache-by-context": Figure(("bench/gpt2-124m/bench.json",), memory.cache_by_context),
    "frontier": Figure(("frontier/smollm2/frontier.json",), memory.frontier),
    "frontier-speed": Figure(("frontier/smollm2/frontier.json",), memory.frontier_speed),
    "quantized-cache": Figure(("quantized-cache.json",), memory.quantized_cache),
    "probes": Figure(("analysis/probes/analysis.json",), analysis.probes),
    "head-scores": Figure(("analysis/analysis.json",), analysis.head_scores),
    "by-length": Figure(
        tuple(dict.fromkeys(file for file, _ in LENGTHS.values())), lambda: training.by_length(LENGTHS)
    ),
    "copied": Figure(
        tuple(f"{name}/copying.json" for name in COPIED),
        lambda: training.copied("skipv1", {f"{name}/copying.json": setting for name, setting in COPIED.items()}),
    ),
    "query-sweep": Figure(
        _files("query-sweep"),
        lambda: training.rates_and_decays("query-sweep", "Nonlinear query, three seeds, 0.82M tokens"),
    ),
    "stability": Figure(
        _files("stability"), lambda: training.recipes("stability", "Recipes: mean and range of three seeds", 6.7)
    ),
    **{name: _comparison(name, words) for name, words in COMPARISONS.items()},
}


def signature(figure: Figure) -> str:
    """What a figure was drawn from: its records and the hash of their contents."""
    if not figure.sources:
        return "Drawn from the plan."
    digest = hashlib.sha256()
    for source in figure.sources:
        digest.update((RESULTS / source).read_bytes())
    shown = ", ".join(f"results/{source}" for source in figure.sources if "/runs/" not in source)
    return f"Drawn from {shown}; sha256 {digest.hexdigest()}."


def make(name: str) -> str:
    """One figure as SVG."""
    figure = ALL[name]
    return figure.draw().replace("</title>\n", f"</title>\n<desc>{signature(figure)}</desc>\n", 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=ALL, help="draw this figure alone")
    arguments = parser.parse_args()
    FIGURES.mkdir(exist_ok=True)
    for name in [arguments.only] if arguments.only else ALL:
        (FIGURES / f"{name}.svg").write_text(make(name))


if __name__ == "__main__":
    main()
