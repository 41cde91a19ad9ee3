"""A comparison of tiny models."""

from corpus import SHAPE

from leanqkv.compare.suite import Comparison, Entry


def models(*names):
    """One group, the first its baseline."""
    return (tuple(map(Entry, names)),)


NAMES = tuple(f"tiny{mechanism}{SHAPE}" for mechanism in ("", "+identity-query", "+skipv1"))
COMPARISON = Comparison(
    title="Two models",
    groups=models(*NAMES[:2]),
    seeds=(0, 1),
    recipe={"steps": 6, "batch_size": 4},
    command="leanqkv compare ...",
    learning_rates=(1e-3, 3e-3),
    evaluation_sequences=8,
    evaluate_every=3,
)
