"""The measure that models are judged by: the loss of text, the accuracy of images."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..records import IMAGES, LOSS_NAMES, TEXT


def _token_counts(data: Mapping[str, Any]) -> str:
    counts = f"{data['train_tokens']:,} to train on, {data['validation_tokens']:,} to validate on"
    return counts + (f", {size:.3g} bytes of text per token" if (size := data["bytes_per_token"]) else "")


@dataclass(frozen=True)
class Measure:
    """The measure for one kind of data, and the words of a report about that data.

    Attributes:
        name: as in tables; `better` is "lower" or "higher", `unit` a sentence.
        final, evaluation: its key in a record's `final`, and in each of its `evaluations`.
        beside: the outcome that is listed beside the loss of every run: its key in `final`, name and format.
        data: the shape of a record's `data`.
        data_size: a term, and a function from these fields to its text.
        inputs: the name of a batch's parts.
    """

    name: str
    better: str
    unit: str
    final: str
    evaluation: str
    beside: tuple[str, str, str]
    data: Mapping[Any, Any]
    data_size: tuple[str, Callable[[Mapping[str, Any]], str]]
    inputs: str

    @property
    def is_loss(self) -> bool:
        return self.evaluation == "loss"


LOSS = Measure(
    name="validation loss",
    better="lower",
    unit="Validation loss is in nats per token",
    final="validation_loss",
    evaluation="loss",
    beside=("perplexity", "perplexity", ",.2f"),
    data=TEXT,
    data_size=("Tokens in the data", _token_counts),
    inputs="sequences",
)
# Of these tokens a model sees what follows, so that the exponential of their loss is not the perplexity of a text.
MASKED = replace(
    LOSS,
    name=LOSS_NAMES["masked_tokens"],
    unit="The loss is in nats per masked token, and no perplexity follows from it",
    beside=("masked_tokens", "masked tokens", ",.0f"),
)
PREFIX = replace(LOSS, name=LOSS_NAMES["tokens_after_prefix"], unit="The loss is in nats per token after a prefix")
ACCURACY = Measure(
    name="test accuracy",
    better="higher",
    unit="Test accuracy is the share of test images whose class is found",
    final="accuracy",
    evaluation="accuracy",
    beside=("accuracy", "test accuracy", ".4f"),
    data=IMAGES,
    data_size=("Images in the data", "{train_images:,} to train on, {test_images:,} to test on".format_map),
    inputs="images",
)


def measure_of(data: Mapping[str, Any], batch_plan: Mapping[str, Any]) -> Measure:
    """Return the measure that goes with a record's `data` and `batch_plan`."""
    if "train_images" in data:
        return ACCURACY
    return {"masked": MASKED, "prefix": PREFIX}.get(batch_plan.get("targets", {}).get("kind"), LOSS)
