"""The phases of the demo. Each returns its part of the record; weights go to directories of their own."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from leanqkv.checkpoints.open import load_model, open_checkpoint
from leanqkv.compare.suite import Comparison, Entry
from leanqkv.convert.conversion import REPORT, Conversion, calibration_tokens
from leanqkv.data.batches import batch_plan, collate
from leanqkv.data.token_files import TokenData
from leanqkv.eliminate import eliminate_directory, parse_request, verify
from leanqkv.eliminate.elimination import CERTIFICATE
from leanqkv.environment import record_header
from leanqkv.errors import LeanError
from leanqkv.evaluate.loss import batch_losses
from leanqkv.inference import Decoder
from leanqkv.job import Job
from leanqkv.model.cache import cache_bytes
from leanqkv.model.shapes import count_parameters
from leanqkv.ranges import check_fields
from leanqkv.records import COUNT, NUMBER, POSITIVE, Shape, read_record
from leanqkv.records import RECORD as RUN_RECORD

RECORD = "demo.json"
AGAIN = "run the demo again in another `out`"
COMPARISON, CONVERTED, ELIMINATED = "comparison", "converted", "eliminated"
# No end-of-text token: every model generates the same number of tokens.
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 50, "eos_token_id": []}
Progress = Callable[[int, int], None]
# Of demo.json, and the parts that its phases add to it.
PHASES = ("training", "conversion", "elimination", "evaluation", "decoding")
DEMO: Shape = {
    "settings": dict,
    "training?": {"data": {"sha256": str}},
    "conversion?": {"kv_bytes_per_token_bf16": [POSITIVE, POSITIVE]},
    "elimination?": {
        "certificate": {"parameters": {"before": COUNT, "after": COUNT}, "exact": {"relative": NUMBER}},
    },
}


@dataclass(frozen=True)
class Settings:
    """The size of the demo: 400 steps and the defaults take one to two minutes on two CPU cores.

    Attributes:
        learning_rate: the same for both models; with few steps a lower one than the models' own learns faster.
        data: as `prepare_data` takes it; None for the source of the standard library.
        documents: of the data that are read, at most.
        evaluation_sequences: of the held-out text; all models are scored on the same ones.
        calibration_tokens: of the training text that the conversion reads.
        prompt: continued by `new_tokens` in each of `rounds`.

    Raises:
        LeanError: a number outside of its range.
    """

    steps: int
    baseline: str = "tiny"
    variant: str = "tiny+skipv1"
    batch_size: int = 4
    learning_rate: float = 2e-3
    evaluate_every: int = 50
    evaluation_sequences: int = 64
    data: str | None = None
    documents: int = 300
    calibration_tokens: int = 20_000
    prompt: str = "def __init__(self, name):\n    "
    new_tokens: int = 64
    rounds: int = 5

    def __post_init__(self) -> None:
        check_fields(self)

    def comparison(self) -> Comparison:
        """Both models on the same batches, with one seed."""
        return Comparison(
            title=f"{self.variant} against {self.baseline}",
            groups=((Entry(self.baseline), Entry(self.variant)),),
            seeds=(0,),
            recipe={"steps": self.steps, "batch_size": self.batch_size, "learning_rate": self.learning_rate},
            command=f"python -m experiments.demo --steps {self.steps}",
            evaluation_sequences=self.evaluation_sequences,
            evaluate_every=self.evaluate_every,
            notes=("Part of the demo: one seed, a few hundred steps.",),
        )


def claim(out: Path, settings: Settings, device: str) -> Job:
    """Return the demo in `out`, whose content is its record; begin one where there is none.

    Raises:
        LeanError: `out` holds something else, or a demo of other settings.
    """
    job = Job(out, {"settings": asdict(settings)}, RECORD)
    if not job.claim("demo", DEMO, "choose another `out`"):
        job.content = record_header("demo", settings.comparison().title, device) | job.spec
        job.write()
    return job


def check_data(record: dict[str, Any], data: TokenData) -> None:
    """Check that the models of `record` were trained on this data.

    Raises:
        LeanError: they were not, for example because Python, whose library is the data, has been updated since.
    """
    if "training" in record and record["training"]["data"]["sha256"] != data.sha256:
        raise LeanError(f"The demo was trained on other data than this ({data.description}). Choose another `out`.")


def run_directories(out: Path) -> dict[str, Path]:
    """Return the directories of the trained models by name."""
    files = sorted(out.glob(f"{COMPARISON}/runs/*/record.json"))
    return {read_record(file, RUN_RECORD, AGAIN)["name"]: file.parent for file in files}


def model_directories(out: Path, settings: Settings) -> dict[str, Path]:
    """Return the directories of all four models, by the name that the report gives them."""
    trained = run_directories(out)
    return {
        settings.baseline: trained[settings.baseline],
        settings.variant: trained[settings.variant],
        f"{settings.baseline}, converted": out / CONVERTED,
        f"{settings.baseline}, weights removed": out / ELIMINATED,
    }


def training_results(out: Path, settings: Settings, data: TokenData) -> dict[str, Any]:
    """Return the curves and the throughput of both runs.

    Raises:
        LeanError: a run diverged.
    """
    records = {name: read_record(run / "record.json", RUN_RECORD, AGAIN) for name, run in run_directories(out).items()}
    for name, record in records.items():
        if record["final"] is None:
            raise LeanError(f"{name} diverged, and the demo ends here. Delete {out} and run it with other `steps`.")
    baseline = records[settings.baseline]
    return {
        "models": {
            name: {
                "evaluations": records[name]["evaluations"],
                "tokens_per_second": records[name]["tokens_per_second"],
                "parameters": records[name]["parameters"]["total"],
            }
            for name in (settings.baseline, settings.variant)
        },
        "steps": baseline["recipe"]["steps"],
        "tokens": baseline["tokens"],
        "tokens_per_step": baseline["recipe"]["batch_size"] * baseline["context_length"],
        "precision": baseline["precision"]["choice"],
        "data": data.record(),
    }


def convert(out: Path, settings: Settings, data: TokenData, progress: Progress) -> dict[str, Any]:
    """Convert the baseline to first-layer values, calibrated, and return the conversion's report."""
    source = run_directories(out)[settings.baseline]
    if (out / CONVERTED / REPORT).exists():
        return read_record(out / CONVERTED / REPORT, DEMO["conversion?"], AGAIN)
    opened = open_checkpoint(source)
    length = opened.config.max_position_embeddings
    assert length is not None
    tokens = calibration_tokens(data, opened.config, settings.calibration_tokens, length)
    return Conversion(opened, "skipv1").write(out / CONVERTED, tokens, calibrating=progress)


def eliminate(out: Path, settings: Settings, data: TokenData, message: Callable[[str], None]) -> dict[str, Any]:
    """Remove the identity blocks of the baseline, and return the certificate and an independent check.

    The certificate compares logits on held-out text, `verification` those of the stored checkpoints on random tokens.
    """
    source = run_directories(out)[settings.baseline]
    if (out / ELIMINATED / CERTIFICATE).exists():
        certificate = read_record(out / ELIMINATED / CERTIFICATE, DEMO["elimination?"]["certificate"], AGAIN)
    else:
        length = min(64, open_checkpoint(source).config.max_position_embeddings or 64)
        inputs = {"input_ids": collate(data.validation(), [0, length], length)["input_ids"]}
        request = parse_request("block-diagonal")
        certificate = eliminate_directory(source, out / ELIMINATED, request, inputs=inputs, message=message)
    message("verifying")
    return {"certificate": certificate, "verification": verify(source, out / ELIMINATED)}


def evaluate(out: Path, settings: Settings, data: TokenData, device: str, progress: Progress) -> dict[str, Any]:
    """Return size and loss of all four models, on the held-out sequences that training was validated on."""
    directories = model_directories(out, settings)
    context = open_checkpoint(directories[settings.baseline]).config.max_position_embeddings
    assert context is not None
    plan = batch_plan(
        out / COMPARISON / "batches",
        seed=0,
        steps=settings.steps,
        batch_size=settings.batch_size,
        context_length=context,
        train_tokens=data.train_tokens,
        validation_tokens=data.validation_tokens,
        evaluation_sequences=settings.evaluation_sequences,
    )
    models: dict[str, Any] = {}
    for name, directory in directories.items():
        model = _load(directory, device)
        starts = (plan.evaluation_starts[at : at + 8] for at in range(0, len(plan.evaluation_starts), 8))
        losses, _ = batch_losses(model, (collate(data.validation(), some, context) for some in starts))
        models[name] = {
            "parameters": count_parameters(model.config).total,
            "kv_bytes_per_token_bf16": model.config.plan.kv_bytes_per_token(torch.bfloat16),
            "loss": losses.mean().item(),
        }
        progress(len(models), len(directories))
    return {"models": models, "sequences": len(plan.evaluation_starts), "context_length": context}


def decode(out: Path, settings: Settings, data: TokenData, device: str, progress: Progress) -> dict[str, Any]:
    """Continue one prompt with every model, in turns, and return texts, throughput and the bytes their caches hold."""
    directories = model_directories(out, settings)
    tokenizer = data.tokenizer
    assert tokenizer is not None
    prompt = tokenizer(settings.prompt, return_tensors="pt")["input_ids"].to(device)
    decoders = {name: Decoder(_load(directory, device)) for name, directory in directories.items()}
    rates: dict[str, list[float]] = {name: [] for name in decoders}
    models: dict[str, Any] = {}
    for number in range(settings.rounds + 1):  # the first one warms up
        for place, (name, decoder) in enumerate(decoders.items()):
            progress(number * len(decoders) + place, (settings.rounds + 1) * len(decoders))
            torch.manual_seed(0)
            started = time.perf_counter()
            output = decoder.generate(prompt, max_new_tokens=settings.new_tokens, **SAMPLING)
            rates[name].append(settings.new_tokens / (time.perf_counter() - started))
            assert decoder.cache is not None
            models[name] = {
                "text": tokenizer.decode(output[0, prompt.shape[1] :]),
                "cache_bytes": cache_bytes(decoder.cache),
                "cache_tokens": output.shape[1] - 1,
            }
    for name, (_, *speeds) in rates.items():
        models[name]["tokens_per_second"] = {"median": median(speeds), "min": min(speeds), "max": max(speeds)}
    return {"prompt_tokens": prompt.shape[1], "dtype": "float32", "models": models}


def _load(directory: Path, device: str) -> Any:
    return load_model(open_checkpoint(directory)).to(device)
