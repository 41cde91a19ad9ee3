"""The command line."""

import errno
import math
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .convert.command import convert
from .eliminate import command as checkpoints
from .theory.command import app as theory_app

if TYPE_CHECKING:
    from .data import ImageData, TokenData
    from .model.config import LeanConfig
    from .train import Precision

app = typer.Typer(
    help="Transformers with fewer attention weights and a smaller KV cache.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(theory_app, name="theory")
app.command()(checkpoints.eliminate)
app.command()(checkpoints.verify)
app.command("import")(checkpoints.import_checkpoint)
app.command("export")(checkpoints.export_checkpoint)
app.command()(convert)
# Of several processes the first one speaks.
console = Console(quiet=os.environ.get("RANK", "0") != "0")
errors = Console(stderr=True)

NAME_HELP = "BASE+MECHANISM:option=value+field=value, for example tiny+skipv1:ratio=0.25 (see `leanqkv presets`)"

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
ScheduleSteps = Annotated[int | None, typer.Option(min=1, help="Length of the cosine. Default: the steps.")]
PrecisionOption = Annotated[
    str, typer.Option(help="auto (times the candidates), or fp32 or bf16 with +compile and +sdpa or +eager.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, mps. Default: what there is.")]
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


def _recipe_overrides(**given: Any) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _prepare(
    source: str | None,
    configs: "Sequence[LeanConfig]",
    tokenizer: str | None,
    text_field: str,
    max_documents: int | None,
) -> "TokenData | ImageData":
    """Text or images, as the models read."""
    from .data import ImageData, prepare_data, prepare_images
    from .errors import LeanError
    from .train.work import reads_images

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
    with console.status("reading the data") as status:

        def progress(stage: str, done: int) -> None:
            status.update(f"{stage}, {done:,} {'images' if images else 'documents'}" if done else stage)

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


def _evaluation_size(data: "TokenData | ImageData", text: int) -> int:
    """How much is evaluated unless asked for otherwise."""
    from .data import ImageData

    return data.test_images if isinstance(data, ImageData) else text


@app.command()
def presets() -> None:
    """List the base sizes and the mechanisms, each with its source."""
    import torch

    from .presets import BASES, MECHANISMS, preset

    table = Table(title="Bases", title_justify="left")
    for column in ("name", "parameters", "KV B/token (bf16)", "source"):
        table.add_column(column, justify="right" if column[0] in "pK" else "left")
    for name, base in BASES.items():
        plan = preset(name).plan
        parameters = f"{plan.count_parameters().total / 1e6:,.1f} M"
        table.add_row(name, parameters, f"{plan.kv_bytes_per_token(torch.bfloat16):,}", base.source)
    console.print(table)
    for source, note in {base.source: base.note for base in BASES.values() if base.note}.items():
        console.print(f"{source}: {note}", highlight=False)
    console.print()
    table = Table(title="Mechanisms", title_justify="left")
    for column in ("name", "what it does", "options", "source"):
        table.add_column(column, overflow="fold")
    for name, mechanism in MECHANISMS.items():
        table.add_row(name, mechanism.summary, _options(mechanism), mechanism.source)
    console.print(table)
    console.print("A model is BASE+MECHANISM+…, with options as in tiny+skipv1:ratio=0.25+identity-query:layers=0,3;")
    console.print("any configuration field as in tiny+intermediate_size=576.", highlight=False)


def _options(mechanism: Any) -> str:
    from .model.depth_average import DEFAULTS
    from .model.registry import KEY_VALUES, KEYS, OUTPUTS, QUERIES, VALUES

    if "type" not in mechanism.spec:
        options = DEFAULTS if mechanism.slot == "depth_average" else mechanism.spec
        return ", ".join(f"{name}={'by width' if value is None else value}" for name, value in options.items())
    tables: dict[str, Any] = {
        "query": QUERIES,
        "key": KEYS,
        "value": VALUES,
        "output": OUTPUTS,
        "key_value": KEY_VALUES,
    }
    cls = tables[mechanism.slot][mechanism.spec["type"]]
    options = [f"{f.name}={mechanism.spec.get(f.name, f.default)}" for f in fields(cls.Options)]
    return ", ".join(options + (["layers=all"] if mechanism.slot != "key_value" else []))


@app.command()
def inspect(
    source: Annotated[str, typer.Argument(help=f"{NAME_HELP}; or a checkpoint directory, ours or of transformers")],
    spectra: Annotated[bool, typer.Option(help="Condition numbers of a checkpoint's projections, too.")] = True,
) -> None:
    """Show parameters, KV bytes, the plan of every layer, and what could be eliminated exactly, or why not.

    leanqkv inspect gpt2-124m+skipv1

    leanqkv inspect hf/pythia-160m
    """
    from .checkpoints.open import open_checkpoint
    from .inspection import layer_table, summary
    from .presets import preset

    config: Any
    if Path(source).exists():
        opened = open_checkpoint(Path(source))
        config, tensors = opened.config, opened.tensors if spectra else None
    else:
        config, tensors = preset(source), None
    console.print(layer_table(config, source))
    for line in summary(config):
        console.print(line)
    checkpoints.print_audit(config, tensors, source)


@app.command()
def train(
    name: Annotated[str, typer.Argument(help=NAME_HELP)],
    out: Annotated[Path, typer.Option(help="Directory of the run; goes on where an earlier start of it left off.")],
    data: Data = None,
    steps: Steps = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the initial weights and the order of the batches.")] = 0,
    batch_size: BatchSize = None,
    micro_batch_size: MicroBatchSize = None,
    context_length: ContextLength = None,
    learning_rate: LearningRate = None,
    min_learning_rate: MinLearningRate = None,
    weight_decay: WeightDecay = None,
    warmup_steps: WarmupSteps = None,
    schedule_steps: ScheduleSteps = None,
    precision: PrecisionOption = "auto",
    device: Device = None,
    tokenizer: Tokenizer = None,
    text_field: TextField = "text",
    max_documents: MaxDocuments = None,
    evaluate_every: EvaluateEvery = 50,
    evaluation_sequences: EvaluationSequences = None,
    gradient_checkpointing: Annotated[bool, typer.Option(help="Less memory for more time.")] = False,
) -> None:
    """Train one model; the same command goes on after an interruption, with the same losses.

    Without options the published recipe of the model applies. Several processes: `torchrun -m leanqkv.cli train …`.

    leanqkv train small+skipv1 --steps 600 --out runs/skipv1

    leanqkv train vit-tiny+skipv1 --data cifar10 --out runs/cifar10
    """
    from .presets import preset, recipe
    from .progress import training_display
    from .train import RunSpec
    from .train import train as run
    from .train.environment import check_device, default_device
    from .train.run import check_out
    from .train.work import check_fit, check_trainable

    config = preset(name)
    check_trainable(name, config)
    check_out(out)
    overrides = _recipe_overrides(
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        min_learning_rate=min_learning_rate,
        weight_decay=weight_decay,
        warmup_steps=warmup_steps,
        schedule_steps=schedule_steps,
    )
    chosen = recipe(name, **overrides)
    context = context_length or config.max_position_embeddings
    prepared = _prepare(data, [config], tokenizer, text_field, max_documents)
    check_fit(name, config, prepared, context)
    arithmetic = _precision(
        precision, out, config, chosen, micro_batch_size, context, check_device(device or default_device())
    )
    spec = RunSpec(
        name=name,
        config=config.as_overrides(),
        recipe=chosen,
        seed=seed,
        context_length=context,
        precision=str(arithmetic),
        precision_timings=arithmetic.timings,
        data_sha256=prepared.sha256,
        micro_batch_size=micro_batch_size,
        evaluation_sequences=evaluation_sequences or _evaluation_size(prepared, TEXT_EVALUATION),
        evaluate_every=evaluate_every,
        gradient_checkpointing=gradient_checkpointing,
    )
    with training_display(console) as display:
        display.start(chosen.steps)

        def progress(step: int, total: int, loss: float | None, rate: float | None) -> None:
            display.update(name, step, total, loss, rate)

        record = run(spec, prepared, out, device=device, progress=progress)
        display.finish(name, chosen.steps, _outcome(record))
    contents = [name for name in ("model.safetensors", "tokenizer.json", "record.json") if (out / name).exists()]
    console.print(f"{out}: {', '.join(contents)}", highlight=False)


def _precision(
    asked: str, out: Path, config: Any, recipe: Any, micro: int | None, context: int, device: str
) -> "Precision":
    """The precision asked for; with "auto" that of the run in `out`, or the fastest one on this machine."""
    from .files import read_json
    from .train import choose_precision, parse_precision
    from .train.run import SPEC

    if asked == "auto" and (out / SPEC).exists():
        found = read_json(out / SPEC)
        earlier = parse_precision(found["precision"])
        assert earlier is not None
        return replace(earlier, timings=found["precision_timings"])
    with console.status("timing precisions") as status:
        chosen = parse_precision(asked) or choose_precision(
            config,
            batch_size=micro or recipe.batch_size,
            context_length=context,
            steps=recipe.steps,
            device=device,
            progress=status.update,
        )
    console.print(f"precision: {chosen}", highlight=False)
    return chosen


def _outcome(record: dict[str, Any]) -> str:
    if record["diverged"]:
        return f"diverged at step {record['diverged']['step']}"
    rate = f", {record['tokens_per_second']:,.0f} tokens/s" if record["tokens_per_second"] else ""
    final = record["final"]
    accuracy = f"test accuracy {final['accuracy']:.4f}, " if "accuracy" in final else ""
    return f"{accuracy}validation loss {final['validation_loss']:.4f}{rate}"


def _list_suites(asked: bool) -> None:
    if not asked:
        return
    from .compare.suites import SUITES

    for name, suite in SUITES.items():
        cost = suite.scales["tiny"].runs
        console.print(
            f"{name:16}{cost:4} runs at tiny  {suite.title} ({suite.source})", highlight=False, soft_wrap=True
        )
    raise typer.Exit


@app.command()
def compare(
    out: Annotated[Path, typer.Option(help="Directory of the comparison; goes on where an earlier start left off.")],
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"A suite, or models, the baseline first: {NAME_HELP}", show_default=False),
    ] = None,
    suite: Annotated[str | None, typer.Option(help="The same as its name alone.", show_default=False)] = None,
    scale: Annotated[
        str | None, typer.Option(help="Of a suite: tiny (the default), small or paper.", show_default=False)
    ] = None,
    _list: Annotated[
        bool, typer.Option("--list", is_eager=True, callback=_list_suites, help="List the suites, and stop.")
    ] = False,
    data: Data = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Paired seeds. Default: the suite's, else 3.")] = None,
    steps: Steps = None,
    lr_grid: Annotated[
        str | None,
        typer.Option(help="1e-3,2e-3,3e-3: search every model's learning rate on a seed of its own, report its best."),
    ] = None,
    batch_size: BatchSize = None,
    micro_batch_size: MicroBatchSize = None,
    context_length: ContextLength = None,
    learning_rate: LearningRate = None,
    weight_decay: WeightDecay = None,
    warmup_steps: WarmupSteps = None,
    precision: PrecisionOption = "auto",
    device: Device = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time. Default: one a core for small models on a CPU, else 1.")
    ] = None,
    tokenizer: Tokenizer = None,
    text_field: TextField = "text",
    max_documents: MaxDocuments = None,
    evaluate_every: Annotated[int | None, typer.Option(min=1)] = None,
    evaluation_sequences: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Train several models on the same batches and seeds, and report paired differences.

    leanqkv compare quickstart --out runs/quickstart

    leanqkv compare --suite kv-sharing --scale small --seeds 3 --out runs/kv-sharing

    leanqkv compare vit-digits vit-digits+skipv1 --data digits --out runs/images

    leanqkv compare small small+skipv1 small+nonlinear-query --seeds 3 --steps 600 --out runs/mine
    """
    from .compare.records import load_comparison
    from .compare.report import terminal_report, write_report
    from .compare.run import Comparison, Job, Update, run_comparison
    from .compare.suites import choose
    from .errors import LeanError
    from .presets import preset
    from .progress import training_display

    if lr_grid is not None and learning_rate is not None:
        raise LeanError("--lr-grid and --learning-rate clash: the grid decides the learning rate; use one of them")
    suite, scale, title, setup = choose(names or [], suite, scale)
    overrides = _recipe_overrides(
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        warmup_steps=warmup_steps,
    )
    comparison = Comparison(
        title=title,
        suite=suite,
        scale=scale,
        groups=setup.groups,
        seeds=tuple(range(seeds or setup.seeds)),
        recipe=overrides,
        notes=setup.notes,
        learning_rates=_grid(lr_grid),
        context_length=context_length,
        evaluation_sequences=evaluation_sequences or setup.evaluation_sequences,
        evaluate_every=evaluate_every or setup.evaluate_every,
        micro_batch_size=micro_batch_size,
        command=shlex.join(["leanqkv", *sys.argv[1:]]),
    )
    if data is None:
        data, tokenizer = setup.data, tokenizer or setup.tokenizer
    configs = [preset(entry.model) for entry in setup.entries]
    prepared = _prepare(data, configs, tokenizer, text_field, max_documents)
    if evaluation_sequences is None:
        evaluated = _evaluation_size(prepared, setup.evaluation_sequences)
        comparison = replace(comparison, evaluation_sequences=evaluated)

    def label(job: Job) -> str:
        role = f" lr {job.spec.recipe.learning_rate:g}" if job.spec.role == "grid" else ""
        return f"{job.spec.name}{role} seed {job.spec.seed}"

    with training_display(console) as display:

        def on_jobs(todo: Any) -> None:
            display.start(sum(job.spec.recipe.steps for job in todo))

        def on_update(update: Update) -> None:
            job = update.job
            if update.record is not None:
                display.finish(label(job), job.spec.recipe.steps, _outcome(update.record))
            else:
                total = job.spec.recipe.steps
                display.update(label(job), update.step, total, update.loss, update.tokens_per_second)

        run_comparison(
            comparison,
            prepared,
            out,
            precision=precision,
            device=device,
            jobs=jobs,
            on_message=lambda text: console.print(text, highlight=False),
            on_jobs=on_jobs,
            on_update=on_update,
        )
    page = write_report(out)
    console.print(terminal_report(load_comparison(out)))
    console.print(f"report: {page}", highlight=False, soft_wrap=True)


def _grid(text: str | None) -> tuple[float, ...] | None:
    from .errors import LeanError

    if text is None:
        return None
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise LeanError(f"--lr-grid takes learning rates between commas, 1e-3,2e-3; found {text!r}") from None
    if any(not 0 < rate < math.inf for rate in rates) or len({*rates}) < len(rates):
        raise LeanError(f"--lr-grid takes positive learning rates, each once, found {text!r}")
    return rates


@app.command()
def report(directory: Annotated[Path, typer.Argument(help="Directory of a comparison.")]) -> None:
    """Make the table and report.html again, from the records alone."""
    from .compare.records import load_comparison
    from .compare.report import terminal_report, write_report

    page = write_report(directory)
    console.print(terminal_report(load_comparison(directory)))
    console.print(f"report: {page}", highlight=False, soft_wrap=True)


@app.command()
def generate(
    directory: Annotated[Path, typer.Argument(help="Directory of a trained model.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among that many likeliest tokens.")] = 50,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Device = None,
) -> None:
    """Continue a prompt with a trained model.

    leanqkv generate runs/skipv1 --prompt "def " --max-new-tokens 64
    """
    import torch
    from transformers import TextStreamer

    from .checkpoints import load_config, load_model
    from .data.tokenizer import load_tokenizer
    from .errors import LeanError
    from .train.environment import check_device, default_device

    if (task := load_config(directory).task) != "causal_lm":
        raise LeanError(f"{directory} holds a model for {task}, which does not continue text")
    model: Any = load_model(directory).to(check_device(device or default_device()))  # type: ignore[arg-type]
    tokenizer = load_tokenizer(directory)
    # As in training, where documents are followed by an end-of-text token and preceded by none.
    inputs = tokenizer(prompt or tokenizer.eos_token, return_tensors="pt", add_special_tokens=False).to(model.device)
    length = inputs["input_ids"].shape[1]
    room = model.config.max_position_embeddings - length
    if model.config.position_embedding_type == "learned" and max_new_tokens > room:
        raise LeanError(
            f"the prompt takes {length} of the model's {model.config.max_position_embeddings} positions: "
            f"--max-new-tokens can be {room} at most, found {max_new_tokens}"
        )
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k} if temperature else {"do_sample": False}
    print(prompt, end="")
    model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **sampling,
    )


def main() -> None:
    """Runs the command line; what a person can mend is one line and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from .errors import LeanError

    try:
        app()
    except (LeanError, ValueError) as error:
        from .model.registry import ConfigError

        if not isinstance(error, LeanError | ConfigError):
            raise
        _fail(str(error))
    except OSError as error:
        reasons = {errno.ENOSPC: "the disk is full", errno.EACCES: "permission denied", errno.EROFS: "read-only"}
        if error.errno not in reasons:
            raise
        where = f": {error.filename}" if error.filename else ""
        _fail(f"{reasons[error.errno]}{where}; what was complete is kept, the same command goes on from there")
    except KeyboardInterrupt:
        errors.print("\nstopped; the same command goes on from the last checkpoint", highlight=False)
        sys.exit(130)


def _fail(message: str) -> None:
    errors.print(f"[bold red]error:[/] {_escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(2)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(" ".join(text.split()))


if __name__ == "__main__":
    main()
