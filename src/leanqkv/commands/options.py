"""Options that several commands take, and the work on them that these commands share."""

import inspect
import re
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer

from ..errors import LeanError
from ..files import check_apart, new_directory, write_json
from ..progress import console, progress_bar
from ..ranges import check_options
from ..records import loss_name

if TYPE_CHECKING:
    from ..checkpoints.open import Checkpoint
    from ..compare.launch import Cluster
    from ..data.evaluation import EvaluationText
    from ..model.config import LeanConfig
    from ..report.page import Kind
    from ..train.tasks import Data as PreparedData

TEXTS = ("data", "calibration", "evaluate")  # options that name texts
PROGRAM = "leanqkv"  # as records name the command that made them
NAME_HELP = "BASE+MECHANISM:option=value+field=value, for example tiny+skipv1:ratio=0.25 (see `leanqkv presets`)"

SOURCE = (
    "Checkpoint directory: of leanqkv, or GPT-2, GPT-NeoX, LLaMA, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, Gemma 3, "
    "Granite, OLMo 2, Phi-3 or SmolLM3; or a .gguf file"
)
DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16"}
# The help of options that several commands have; a docstring goes before it.
SHARED_HELP = {
    "out": "New directory, written completely or not at all. Rerun to resume.",
    "dtype": "Dtype of the stored weights: fp64, fp32 or bf16.",
    "text_field": "Field of JSONL, Parquet and datasets that holds the text.",
    "max_documents": "Read at most this many documents.",
    "batch_size": "Sequences per step, over all processes.",
    "micro_batch_size": "Sequences per forward pass of a process; gradients are accumulated. Default: what fits in "
    "memory.",
    "context_length": "Tokens per sequence. Default: all positions.",
    "precision": "auto (times the candidates), or fp32 or bf16 with +compile and +sdpa or +eager.",
    "device": "cpu, cuda or mps. Default: an accelerator if there is one.",
}


@dataclass(frozen=True)
class TextOptions:
    """The text that a command reads.

    Options:
        data: Text, JSONL or Parquet file or folder, nanoGPT's or Megatron's .bin, stdlib, prose (English, of
            docstrings), a Hugging Face dataset, or a mixture: NAME,NAME:0.3. Default: stdlib, the source of this
            Python's standard library.
        workers: Processes that tokenize a text on first use. One process uses several threads.
    """

    data: str | None = None
    text_field: str = "text"
    max_documents: int | None = None
    workers: int = 1


@dataclass(frozen=True)
class DataOptions(TextOptions):
    """The data of a run.

    Options:
        tokenizer: Directory or hub name; of files of tokens the one that made them. Default: a byte-level BPE trained
            on the data.
    """

    tokenizer: str | None = None


@dataclass(frozen=True)
class RecipeOptions:
    """What is to differ from the recipe of a model; None keeps the recipe's value.

    Options:
        steps: Optimizer steps. The warm-up scales with them.
        learning_rate: Peak learning rate. The minimum scales with it.
        min_learning_rate: Learning rate at the end of the cosine.
        weight_decay: Weight decay of matrices. Vectors have none.
        schedule_steps: Length of the cosine. A longer run stays at the minimum. Default: the steps.
        optimizer: adamw (default), or muon for the matrices of the blocks, at the same rate and decay.
    """

    steps: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    min_learning_rate: float | None = None
    weight_decay: float | None = None
    warmup_steps: int | None = None
    schedule_steps: int | None = None
    optimizer: str | None = None


@dataclass(frozen=True)
class RunOptions:
    """How a run is done.

    Options:
        out: Directory of the run. Rerun to resume.
        seed: Seed of the batch order and of new weights.
        evaluate_every: Steps between validations. Each one writes a checkpoint.
        evaluation_sequences: Validation sequences, the same each time. Default: 128.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, more time.
        shard: fsdp: split weights and optimizer over the processes of torchrun.
        report_to: tensorboard, wandb, trackio, mlflow or another tracker of transformers; may be repeated.
        max_hours: Stop before this many hours, with a checkpoint and exit code 75.
        keep_checkpoints: Keep the weights of every validation.
    """

    out: Path
    seed: int = 0
    micro_batch_size: int | None = None
    context_length: int | None = None
    precision: str = "auto"
    device: str | None = None
    evaluate_every: int = 50
    evaluation_sequences: int | None = None
    gradient_checkpointing: Annotated[bool, typer.Option()] = False
    shard: str | None = None
    report_to: list[str] | None = None
    max_hours: float | None = None
    keep_checkpoints: bool = False


@dataclass(frozen=True)
class TeacherOptions:
    """What is learned from another model's predictions.

    Options:
        teacher: Checkpoint whose predictions are distilled.
        distillation: With --teacher: share of KL(teacher || model) in the loss.
        distillation_temperature: With --teacher: divides the logits of both in the KL divergence.
        only_changed: With --teacher: train only the weights that differ from its own.
    """

    teacher: Path | None = None
    distillation: float = 0.5
    distillation_temperature: float = 1.0
    only_changed: bool = False

    def __post_init__(self) -> None:
        if self.teacher is None:
            check_left_out(self, "`teacher` DIR")


@dataclass(frozen=True)
class ClusterOptions:
    """Where the runs of a comparison are trained.

    Options:
        launcher: local: by this command. submitit: each run is a job of a cluster, in the same --out.
        cluster: With submitit: slurm, or local for processes that outlive this command.
        partition: SLURM partition.
        gpus_per_run: GPUs of a job, each with a process that trains a part of the batch. With --device cpu: processes.
        cpus_per_run: CPUs of a SLURM job.
        memory_per_run: Memory of a SLURM job in GB.
        hours_per_run: With submitit: time limit of a job in hours. A longer run continues in another job.
        slurm: Another SLURM parameter, such as account=lab; may be repeated.
    """

    launcher: str = "local"
    cluster: str = "slurm"
    partition: str | None = None
    gpus_per_run: int = 1
    cpus_per_run: int = 8
    memory_per_run: float | None = None
    hours_per_run: float = 24
    slurm: list[str] | None = None

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


def changed(group: Any) -> dict[str, Any]:
    """Return the options of a group that differ from their defaults."""
    return {field.name: value for field in fields(group) if (value := getattr(group, field.name)) != field.default}


def check_left_out(group: Any, leader: str) -> None:
    """Refuse options of a group that were given without `leader`, which they go with."""
    for name in changed(group):
        raise LeanError(f"`{name}` goes with {leader}; leave it out")


def option_groups(command: Callable[..., Any]) -> Callable[..., None]:
    """Return a function for Typer that checks every number and the place of results, and then calls the command.

    A parameter is an option; its help stands in the section Options, the last one of the command's docstring, or in
    SHARED_HELP. Of a parameter that is a dataclass every field is an option, with its help in the docstring of the
    class. Options without a default come first.
    """
    signature, (text, helps) = inspect.signature(command), _documented(command)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if is_dataclass(parameter.annotation):
            groups[name] = parameter.annotation
            parameters += inspect.signature(groups[name]).parameters.values()
            helps |= {name: words for cls in groups[name].__mro__ for name, words in _documented(cls)[1].items()}
        else:
            parameters.append(parameter)
    helps = SHARED_HELP | helps
    parameters = [_as_option(parameter, helps.get(parameter.name)) for parameter in parameters]
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

    # Typer reads these.
    run.__doc__ = text
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _documented(owner: Any) -> tuple[str, dict[str, str]]:
    """Return the docstring of a function or class without its section Options, and that section by option."""
    text, _, section = (inspect.getdoc(owner) or "").partition("\n\nOptions:\n")
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return text, {name: " ".join(words.split()) for name, words in entries}


def _as_option(parameter: inspect.Parameter, words: str | None) -> inspect.Parameter:
    """Return a parameter as Typer takes it: an option with this help, or what its annotation says."""
    kind, *annotated = get_args(parameter.annotation) if get_origin(parameter.annotation) is Annotated else (None,)
    if annotated:
        info = copy(annotated[0])
    else:  # a switch that is off has no option that leaves it off
        kind, switch = parameter.annotation, parameter.default is False
        info = typer.Option(*([f"--{parameter.name.replace('_', '-')}"] if switch else []))
    info.help = info.help or words
    return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, info])


def prepare(options: DataOptions, configs: "Sequence[LeanConfig]") -> "PreparedData":
    """Return the data that all these models can be trained on, and print its sizes."""
    from ..train.tasks import prepare

    text = {field.name: getattr(options, field.name) for field in fields(options) if field.name != "data"}
    with progress_bar("reading the data") as bar:
        data = prepare(configs, options.data, bar.describe, **text)
    console.print(f"data: {data.description}; {data.sizes()}")
    return data


def read_text(source: "Checkpoint", name: str, split: str, **options: Any) -> "EvaluationText":
    """Return a text to score, in the tokens of a checkpoint; `options` are those of `evaluation_text`."""
    from ..data.evaluation import evaluation_text

    size, tokenizer = source.config.vocab_size, source.directory
    with progress_bar("reading the evaluation text") as bar:
        options |= {"split": split, "progress": bar.describe}
        return evaluation_text(name, tokenizer=tokenizer, vocab_size=size, **options)


def publish(kind: "Kind", out: Path, record: dict[str, Any]) -> None:
    """Print a record's table, and write the record and its page into `out`."""
    from ..report.page import written

    console.print(kind.terminal(record))
    with new_directory(out) as directory:
        write_json(directory / kind.file, record)
        page = kind.write(directory)
    console.print(written(page and out / page.name), soft_wrap=True)


def outcome(record: dict[str, Any]) -> str:
    """Return the result of a run, for the terminal."""
    if record["diverged"]:
        return f"diverged at step {record['diverged']['step']}"
    rate = f", {record['tokens_per_second']:,.0f} tokens/s" if record["tokens_per_second"] else ""
    final = record["final"]
    accuracy = f"test accuracy {final['accuracy']:.4f}, " if "accuracy" in final else ""
    return f"{accuracy}{loss_name(final)} {final['validation_loss']:.4f}{rate}"


def as_dtype(name: str | None) -> Any:
    """Return the torch dtype of `dtype`, or None."""
    if name not in (None, *DTYPES):
        raise LeanError(f"`dtype` is one of {', '.join(DTYPES)}, found {name!r}")
    import torch

    return name and getattr(torch, DTYPES[name])
