"""Options that several commands take, and what they do with them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..progress import console, progress_bar

if TYPE_CHECKING:
    from ..data import ImageData, TokenData
    from ..model.config import LeanConfig
    from ..train import Precision

NAME_HELP = "BASE+MECHANISM:option=value+field=value, for example tiny+skipv1:ratio=0.25 (see `leanqkv presets`)"

SOURCE = "Checkpoint directory: of leanqkv, or GPT-2, GPT-NeoX, LLaMA, Mistral, Qwen2 or Qwen3"
Out = Annotated[
    Path, typer.Option(help="New directory; written whole or not at all. Killed and started again it goes on.")
]
Dtype = Annotated[str, typer.Option(help="Of the stored weights: fp64, fp32 or bf16.")]
Data = Annotated[
    str | None,
    typer.Option(
        help="Text, JSONL or Parquet file or folder, nanoGPT .bin, or Hugging Face dataset name. "
        "Default: the source of this Python's standard library. For a model of images: digits (the default), cifar10, "
        "cifar100, or a folder or dataset of images with class labels.",
        show_default=False,
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(help="Directory or hub name. Default: a byte-level BPE trained on the data.", show_default=False),
]
TextField = Annotated[str, typer.Option(help="Field of JSONL, Parquet and datasets that holds the text.")]
MaxDocuments = Annotated[int | None, typer.Option(min=1, help="Read no more documents than that.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Optimizer steps; the warm-up scales along.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Sequences or images per step, over all processes.")]
MicroBatchSize = Annotated[int | None, typer.Option(min=1, help="So many at a time; the rest is accumulated.")]
ContextLength = Annotated[int | None, typer.Option(min=1, help="Tokens per sequence. Default: all positions.")]
LearningRate = Annotated[float | None, typer.Option(help="Peak; the minimum scales along.")]
MinLearningRate = Annotated[float | None, typer.Option(help="End of the cosine.")]
WeightDecay = Annotated[float | None, typer.Option(min=0, help="On matrices only.")]
WarmupSteps = Annotated[int | None, typer.Option(min=0)]
ScheduleSteps = Annotated[
    int | None, typer.Option(min=1, help="Length of the cosine; a longer run stays at its minimum. Default: the steps.")
]
PrecisionOption = Annotated[
    str, typer.Option(help="auto (times the candidates), or fp32 or bf16 with +compile and +sdpa or +eager.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, mps. Default: what there is.")]
KeepCheckpoints = Annotated[
    bool, typer.Option("--keep-checkpoints", help="Keep the weights of every validation, for `leanqkv analyze`.")
]
EvaluateEvery = Annotated[int, typer.Option(min=1, help="Steps between validations, which are checkpoints too.")]
EvaluationSequences = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Validation sequences, the same each time. Default: 128; of images the whole test split.",
        show_default=False,
    ),
]
TEXT_EVALUATION = 128


def recipe_overrides(**given: Any) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def prepare(
    source: str | None,
    configs: "Sequence[LeanConfig]",
    tokenizer: str | None,
    text_field: str,
    max_documents: int | None,
) -> "TokenData | ImageData":
    """Text or images, as the models read."""
    from ..data import ImageData, prepare_data, prepare_images
    from ..errors import LeanError
    from ..train.tasks import reads_images

    images = reads_images(configs[0])
    if any(reads_images(config) != images for config in configs):
        raise LeanError("models of text and models of images cannot be compared with each other")
    for option, given in (
        ("--tokenizer", tokenizer is not None),
        ("--text-field", text_field != "text"),
        ("--max-documents", max_documents is not None),
    ):
        if images and given:
            raise LeanError(f"{option} is about text; a model of images does not read any")
    with progress_bar("reading the data") as bar:

        def progress(stage: str, done: int) -> None:
            bar.describe(f"{stage}, {done:,} {'images' if images else 'documents'}" if done else stage)

        data: TokenData | ImageData
        if images:
            data = prepare_images(source, progress=progress)
        else:
            data = prepare_data(
                source,
                vocab_size=min(config.vocab_size for config in configs),
                tokenizer=tokenizer,
                text_field=text_field,
                max_documents=max_documents,
                progress=progress,
            )
    if isinstance(data, ImageData):
        sizes = f"{data.train_images:,} training and {data.test_images:,} test images"
    else:
        sizes = f"{data.train_tokens:,} training and {data.validation_tokens:,} validation tokens"
    console.print(f"data: {data.description}; {sizes}", highlight=False)
    return data


def evaluation_size(data: "TokenData | ImageData", text: int) -> int:
    """How much is evaluated unless asked for otherwise."""
    from ..data import ImageData

    return data.test_images if isinstance(data, ImageData) else text


def precision_for(
    asked: str, out: Path, config: Any, recipe: Any, micro: int | None, context: int, device: str
) -> "Precision":
    """The precision asked for; with "auto" that of the run in `out`, or the fastest one on this machine."""
    from ..files import read_json
    from ..train import choose_precision, parse_precision
    from ..train.directory import SPEC

    if asked == "auto" and (out / SPEC).exists():
        found = read_json(out / SPEC)
        earlier = parse_precision(found["precision"])
        assert earlier is not None
        return replace(earlier, timings=found["precision_timings"])
    with progress_bar("timing precisions") as bar:
        chosen = parse_precision(asked) or choose_precision(
            config,
            batch_size=micro or recipe.batch_size,
            context_length=context,
            steps=recipe.steps,
            device=device,
            progress=bar.describe,
        )
    console.print(f"precision: {chosen}", highlight=False)
    return chosen


def outcome(record: dict[str, Any]) -> str:
    if record["diverged"]:
        return f"diverged at step {record['diverged']['step']}"
    rate = f", {record['tokens_per_second']:,.0f} tokens/s" if record["tokens_per_second"] else ""
    final = record["final"]
    accuracy = f"test accuracy {final['accuracy']:.4f}, " if "accuracy" in final else ""
    return f"{accuracy}validation loss {final['validation_loss']:.4f}{rate}"


def as_dtype(name: str | None) -> Any:
    from ..eliminate.certify import DTYPES
    from ..errors import LeanError

    if name is None:
        return None
    if name not in DTYPES:
        raise LeanError(f"--dtype is one of {', '.join(DTYPES)}, found {name!r}")
    return DTYPES[name]
