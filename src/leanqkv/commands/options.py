"""Options that several commands take, and the work on them that these commands share."""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import LeanError
from ..files import check_apart
from ..progress import console, progress_bar
from ..ranges import check_options

if TYPE_CHECKING:
    from ..compare.launch import Cluster
    from ..model.config import LeanConfig
    from ..train.tasks import Data as PreparedData

TEXTS = ("data", "calibration", "evaluate")  # options that name texts
PROGRAM = "leanqkv"  # as records name the command that made them
NAME_HELP = "BASE+MECHANISM:option=value+field=value, for example tiny+skipv1:ratio=0.25 (see `leanqkv presets`)"

SOURCE = (
    "Checkpoint directory: of leanqkv, or GPT-2, GPT-NeoX, LLaMA, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, Gemma 3, "
    "Granite, OLMo 2, Phi-3 or SmolLM3; or a .gguf file"
)
DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16"}
Out = Annotated[
    Path, typer.Option(help="New directory; written whole or not at all. Killed and started again it goes on.")
]
Dtype = Annotated[str, typer.Option(help="Of the stored weights: fp64, fp32 or bf16.")]
Data = Annotated[
    str | None,
    typer.Option(
        help="Text, JSONL or Parquet file or folder, nanoGPT's or Megatron's .bin, stdlib, prose (English, of "
        "docstrings), a Hugging Face dataset, or a mixture: NAME,NAME:0.3. Default: stdlib, the source of this "
        "Python's standard library.",
        show_default=False,
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(help="Directory or hub name. Default: a byte-level BPE trained on the data.", show_default=False),
]
TextField = Annotated[str, typer.Option(help="Field of JSONL, Parquet and datasets that holds the text.")]
MaxDocuments = Annotated[int | None, typer.Option(help="Read no more documents than that.")]
Workers = Annotated[int, typer.Option(help="Processes that tokenize a text on first use. One uses some cores, too.")]
Steps = Annotated[int | None, typer.Option(help="Optimizer steps; the warm-up scales along.")]
BatchSize = Annotated[int | None, typer.Option(help="Sequences per step, over all processes.")]
MicroBatchSize = Annotated[
    int | None,
    typer.Option(
        help="Sequences a process takes at a time; the rest is accumulated. Default: what fits in memory.",
        show_default=False,
    ),
]
ContextLength = Annotated[int | None, typer.Option(help="Tokens per sequence. Default: all positions.")]
LearningRate = Annotated[float | None, typer.Option(help="Peak; the minimum scales along.")]
WeightDecay = Annotated[float | None, typer.Option(help="On matrices only.")]
WarmupSteps = Annotated[int | None, typer.Option()]
PrecisionOption = Annotated[
    str, typer.Option(help="auto (times the candidates), or fp32 or bf16 with +compile and +sdpa or +eager.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or mps. Default: an accelerator if there is one.")]


@dataclass(frozen=True)
class TextOptions:
    """The text that a command reads."""

    data: Data = None
    text_field: TextField = "text"
    max_documents: MaxDocuments = None
    workers: Workers = 1


@dataclass(frozen=True)
class DataOptions(TextOptions):
    """The data of a run."""

    tokenizer: Tokenizer = None


@dataclass(frozen=True)
class RecipeOptions:
    """What is to differ from the recipe of a model; None keeps the recipe's value."""

    steps: Steps = None
    batch_size: BatchSize = None
    learning_rate: LearningRate = None
    min_learning_rate: Annotated[float | None, typer.Option(help="End of the cosine.")] = None
    weight_decay: WeightDecay = None
    warmup_steps: WarmupSteps = None
    schedule_steps: Annotated[
        int | None,
        typer.Option(help="Length of the cosine; a longer run stays at its minimum. Default: the steps."),
    ] = None


@dataclass(frozen=True)
class RunOptions:
    """How a run is done."""

    out: Annotated[Path, typer.Option(help="Directory of the run; goes on where an earlier start of it left off.")]
    seed: Annotated[int, typer.Option(help="Of the order of the batches, and of new weights.")] = 0
    micro_batch_size: MicroBatchSize = None
    context_length: ContextLength = None
    precision: PrecisionOption = "auto"
    device: Device = None
    evaluate_every: Annotated[int, typer.Option(help="Steps between validations, which are checkpoints too.")] = 50
    evaluation_sequences: Annotated[
        int | None,
        typer.Option(
            help="Validation sequences, the same each time. Default: 128.",
            show_default=False,
        ),
    ] = None
    gradient_checkpointing: Annotated[bool, typer.Option(help="Less memory for more time.")] = False
    shard: Annotated[
        str | None,
        typer.Option(help="fsdp: split weights and optimizer over the processes of torchrun.", show_default=False),
    ] = None
    report_to: Annotated[
        list[str] | None,
        typer.Option(
            help="tensorboard, wandb, trackio, mlflow or another tracker of transformers; may be repeated.",
            show_default=False,
        ),
    ] = None
    max_hours: Annotated[
        float | None,
        typer.Option(
            help="Stop before this command has run so long, with a checkpoint and exit code 75.", show_default=False
        ),
    ] = None
    keep_checkpoints: Annotated[
        bool, typer.Option("--keep-checkpoints", help="Keep the weights of every validation, for `leanqkv analyze`.")
    ] = False


@dataclass(frozen=True)
class TeacherOptions:
    """What is learned from another model's predictions."""

    teacher: Annotated[
        Path | None, typer.Option(help="Checkpoint whose predictions are matched as well.", show_default=False)
    ] = None
    distillation: Annotated[float, typer.Option(help="With --teacher: share of KL(teacher || model) in the loss.")] = (
        0.5
    )
    distillation_temperature: Annotated[
        float, typer.Option(help="With --teacher: divides the logits of both in the KL divergence.")
    ] = 1.0
    only_changed: Annotated[
        bool, typer.Option("--only-changed", help="With --teacher: train only the weights that differ from its own.")
    ] = False

    def __post_init__(self) -> None:
        if self.teacher is None:
            check_left_out(self, "`teacher` DIR")


@dataclass(frozen=True)
class ClusterOptions:
    """Where the runs of a comparison are trained."""

    launcher: Annotated[
        str, typer.Option(help="local: by this command. submitit: each run is a job of a cluster, in the same --out.")
    ] = "local"
    cluster: Annotated[
        str, typer.Option(help="With submitit: slurm, or local for processes that outlive this command.")
    ] = "slurm"
    partition: Annotated[str | None, typer.Option(help="Of SLURM.", show_default=False)] = None
    gpus_per_run: Annotated[int, typer.Option(help="Of SLURM.")] = 1
    cpus_per_run: Annotated[int, typer.Option(help="Of SLURM.")] = 8
    memory_per_run: Annotated[float | None, typer.Option(help="Of SLURM, in GB.", show_default=False)] = None
    hours_per_run: Annotated[
        float, typer.Option(help="With submitit: the time limit of a job; a run that needs more goes on in another.")
    ] = 24
    slurm: Annotated[
        list[str] | None,
        typer.Option(help="Another parameter, such as account=lab; may be repeated.", show_default=False),
    ] = None

    def __post_init__(self) -> None:
        if self.launcher not in ("local", "submitit"):
            raise LeanError(f"`launcher` is local or submitit, found {self.launcher!r}")
        if self.launcher == "local":
            check_left_out(self, "`launcher=submitit`")
        for parameter in self.slurm or ():
            if not re.fullmatch(r"[A-Za-z_-]+=.+", parameter):
                raise LeanError(f"`slurm` takes NAME=VALUE, such as account=lab; found {parameter!r}")

    def chosen(self) -> "Cluster | None":
        """Return the cluster, or None for this command's own processes."""
        from ..compare.launch import Cluster

        if self.launcher == "local":
            return None
        options = dict(parameter.split("=", 1) for parameter in self.slurm or ())
        options |= {"partition": self.partition} if self.partition else {}
        sizes = (self.hours_per_run, self.gpus_per_run, self.cpus_per_run, self.memory_per_run)
        return Cluster(self.cluster, *sizes, options)


def check_left_out(options: Any, leader: str) -> None:
    """Refuse options of a group that were given without `leader`, which they go with."""
    for field in fields(options):
        if getattr(options, field.name) != field.default:
            raise LeanError(f"`{field.name}` goes with {leader}; leave it out")


def option_groups(command: Callable[..., Any]) -> Callable[..., None]:
    """Return a function for Typer that checks every number and the place of results, and then calls the command.

    Of a parameter that is a dataclass of options every field is an option of the command line. Options without a
    default come first.
    """
    signature = inspect.signature(command)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if is_dataclass(parameter.annotation)
    }
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        parameters += inspect.signature(groups[name]).parameters.values() if name in groups else [parameter]
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    parameters.sort(key=lambda parameter: parameter.default is not inspect.Parameter.empty)

    @wraps(command)
    def run(**values: Any) -> None:
        check_options(values)
        if isinstance(values.get("out"), Path):
            given = [values.get(name) or [] for name in TEXTS]
            texts = chain.from_iterable([text] if isinstance(text, str) else text for text in given)
            check_apart(values["out"], *texts)
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    # Typer reads both.
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def recipe_overrides(**options: Any) -> dict[str, Any]:
    """Return the options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def prepare(options: DataOptions, configs: "Sequence[LeanConfig]") -> "PreparedData":
    """Return the data that all these models can be trained on, and print its sizes."""
    from ..train.tasks import prepare

    text = {field.name: getattr(options, field.name) for field in fields(options) if field.name != "data"}
    with progress_bar("reading the data") as bar:
        data = prepare(configs, options.data, bar.describe, **text)
    console.print(f"data: {data.description}; {data.sizes()}", highlight=False)
    return data


def outcome(record: dict[str, Any]) -> str:
    """Return the result of a run, for the terminal."""
    if record["diverged"]:
        return f"diverged at step {record['diverged']['step']}"
    rate = f", {record['tokens_per_second']:,.0f} tokens/s" if record["tokens_per_second"] else ""
    final = record["final"]
    accuracy = f"test accuracy {final['accuracy']:.4f}, " if "accuracy" in final else ""
    return f"{accuracy}validation loss {final['validation_loss']:.4f}{rate}"


def as_dtype(name: str | None) -> Any:
    """Return the torch dtype of `dtype`, or None."""
    if name not in (None, *DTYPES):
        raise LeanError(f"`dtype` is one of {', '.join(DTYPES)}, found {name!r}")
    import torch

    return name and getattr(torch, DTYPES[name])
