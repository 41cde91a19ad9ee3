"""Tools that make another checkpoint of one, train from one, or say what is in one."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from converting import CONVERSIONS, TOLERANCES, build, conversion_error
from shapes import tokens
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, TrainingArguments

from experiments.analysis.heads import repeated_tokens
from experiments.analysis.record import Settings, analyze_models
from experiments.analysis.subjects import open_subjects
from leanqkv import LeanError, LeanForCausalLM
from leanqkv.checkpoints.open import load_model, open_checkpoint
from leanqkv.checkpoints.stream import Stream
from leanqkv.commands.checkpoints import export_checkpoint, import_checkpoint
from leanqkv.commands.inspect import inspect
from leanqkv.commands.options import console
from leanqkv.data.batches import collate
from leanqkv.data.prepare import prepare_data
from leanqkv.data.token_files import TokenData
from leanqkv.eliminate import certify, eliminate_directory, parse_request, transform
from leanqkv.eliminate.projections import Removal, why_not
from leanqkv.model.shapes import count_parameters
from leanqkv.presets.recipes import Recipe
from leanqkv.train.precision import Precision
from leanqkv.train.spec import RunSpec
from leanqkv.train.tasks import TextTask, check_teacher
from leanqkv.train.trainer import LeanTrainer, Watch
from product.mechanisms import Case
from product.tools import FLOAT32, FLOAT64, Tool, relative_error

# --- what they share --------------------------------------------------------------------------------------------------


@contextmanager
def saved(model: LeanForCausalLM) -> Iterator[tuple[Path, Path]]:
    """The directory of a model, and a folder for what is made of it."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder) / "model")
        yield Path(folder) / "model", Path(folder)


def tensors_of(model: LeanForCausalLM) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@torch.no_grad()
def logits(model: Any, length: int = 9) -> Tensor:
    """Of a model with prefixes, the first half is one."""
    ids = tokens(2, length)
    given = {}
    if getattr(model.config, "mask_type", None) == "prefix":
        given["prefix_mask"] = (torch.arange(length) < length // 2).long().expand(2, -1)
    return model(input_ids=ids, **given).logits


def largest(case: Case, attempts: Iterable[Callable[[], float]]) -> float:
    """The largest number. Each attempt that is refused must name the mechanism; if all are, the first refusal is
    raised."""
    numbers, refusals = [], []
    for attempt in attempts:
        try:
            numbers.append(attempt())
        except (LeanError, ValueError) as refusal:
            assert any(word in str(refusal) for word in case.words), refusal
            refusals.append(refusal)
    if not numbers:
        raise refusals[0]
    return max(numbers)


# --- convert ----------------------------------------------------------------------------------------------------------


def converted(case: Case, conversion: str) -> float:
    model = case.model(std=0.2)
    return conversion_error(model.config, tensors_of(model), conversion)


# --- eliminate --------------------------------------------------------------------------------------------------------

# What the papers' theorems ask for; the baseline loses any projection of all layers, or with skips of one.
SKIPLESS: Mapping[str, Any] = {"norm_type": "none", "attention_skip": False, "mlp_skip": False}
SKIPS: Mapping[str, Any] = {"norm_type": "none"}
DISABLED: Mapping[str, Any] = {"norm_type": "layernorm", "norm_eps": 1e12}
# Without norms a matrix keeps the length of what it multiplies.
LENGTH = 32**-0.5


def loss_of(model: LeanForCausalLM, remove: str, layers: Iterable[int] | None) -> float:
    """Over the worst condition number of what was solved with, which magnifies rounding."""
    request = parse_request(remove, None if layers is None else ",".join(map(str, layers)))
    result = transform(model.config, tensors_of(model), request)
    assert count_parameters(result.config) != count_parameters(model.config)
    found = logits(build(result.config, result.tensors))
    return relative_error(found, logits(model)) / max([1.0, *result.conditions.values()])


def projection(case: Case, slot: str) -> float:
    """Of all layers without skips, of those that can lose it where not all can, and of the last of them with skips;
    hyper-connections always have those."""
    skips = case.model(std=LENGTH, **SKIPS)
    attempts = [(skips, removable(skips, slot)[-1:])]
    if skips.config.hyper_connections is None:
        skipless = case.model(std=LENGTH, **SKIPLESS)
        every, possible = list(range(skipless.config.num_hidden_layers)), removable(skipless, slot)
        attempts = [(skipless, every), *([(skipless, possible)] if possible != every else []), *attempts]
    return largest(case, (partial(loss_of, model, slot, layers) for model, layers in attempts if layers))


def removable(model: LeanForCausalLM, slot: str) -> list[int]:
    """The layers of which any one alone can lose it."""
    stream = Stream(model.config)
    return [i for i in range(model.config.num_hidden_layers) if why_not(Removal(slot, i), stream) is None]


def single_head(case: Case) -> float:
    shape = {"num_attention_heads": 1, "position_embedding_type": "learned"}
    return loss_of(case.model(std=LENGTH, **shape), "single-head", None)


def disabled_norms(case: Case) -> float:
    model = case.model(std=LENGTH, **DISABLED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm.weight" in name or "layernorm.weight" in name:
                parameter *= 1e6
    return loss_of(model, "query", (2,))


def block_diagonal(case: Case) -> float:
    """As the command does it, from one directory into another."""
    model = case.model()
    with saved(model) as (source, folder):
        request, certified = parse_request("block-diagonal"), {"input_ids": tokens(1, 4)}
        report = eliminate_directory(source, folder / "less", request, dtype=torch.float64, inputs=certified)
        found = logits(load_model(open_checkpoint(folder / "less")))
    return relative_error(found, logits(model)) / max(report["conditions"].values())


# --- checkpoints ------------------------------------------------------------------------------------------------------


def exported(case: Case, shape: str) -> float:
    """Into the plainest class that holds the model, and back; parallel blocks, of which GPT-NeoX is, have rotary
    positions."""
    rotary = {"position_embedding_type": "rope"} if case.config().block_type == "parallel" else {}
    model = case._replace(shape=shape).model(**rotary)
    with saved(model) as (source, folder), console.capture():
        export_checkpoint(source, folder / "stock")
        # The default for experts knows no float64.
        options = {"dtype": torch.float64, "experts_implementation": "eager"}
        stock = AutoModelForCausalLM.from_pretrained(folder / "stock", **options)
        import_checkpoint(folder / "stock", folder / "back")
        back = load_model(open_checkpoint(folder / "back"))
    return max(relative_error(logits(found), logits(model)) for found in (stock.eval(), back))


def rounded(case: Case) -> float:
    """Every tensor stored in bfloat16, computed in float64."""
    model = case.model()
    with saved(model) as (source, folder), console.capture():
        import_checkpoint(source, folder / "bf16", dtype="bf16")
        found = load_model(open_checkpoint(folder / "bf16"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    assert found.dtype == torch.bfloat16
    return relative_error(logits(found.double()), logits(model))


def verified(case: Case) -> float:
    """`verify` reads one module's weights at a time."""
    model = case.model()
    with saved(model) as (source, _):
        opened = open_checkpoint(source)
        inputs = certify.random_inputs(opened.config)
        found = certify.logits(opened.config, opened.tensors, inputs, torch.float64)
    with torch.no_grad():
        return relative_error(found, model(**inputs).logits.flatten(0, -2))


# --- training from a teacher ------------------------------------------------------------------------------------------

SHARE = 0.3


@cache
def trainer() -> LeanTrainer:
    """Accumulates two micro-batches; what it trains is given to `training_step`."""
    spec = RunSpec(
        name="tiny",
        config={},
        recipe=Recipe(1, 4, 1e-3, 1e-3, 0.0, 0),
        seed=0,
        context_length=8,
        precision="fp32",
        data_sha256="",
        distillation=SHARE,
    )
    task: Any = SimpleNamespace(
        plan=SimpleNamespace(train_starts=np.zeros(4)), collate=None, finish=partial(TextTask.finish, None)
    )
    plain = Case("", "gpt", (), {})
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, use_cpu=True, gradient_accumulation_steps=2, report_to="none")
        watch = Watch(spec, lambda *_: None)
        made = LeanTrainer(spec, task, Precision(), plain.model().float(), arguments, watch, plain.model())
    made.current_gradient_accumulation_steps = 2
    return made


def distilled(student: LeanForCausalLM, teacher: LeanForCausalLM) -> float:
    """Loss and gradients of a batch in two pieces against sums over tokens."""
    check_teacher("the model", student.config, "given", teacher.config, 8)  # as `train` does
    training = trainer()
    training.teacher = teacher.eval()
    batch = collate(np.tile(tokens(1, 40)[0].numpy(), 2), [0, 5, 11, 30], 8)
    pieces = [{name: tensor[rows] for name, tensor in batch.items()} for rows in (slice(0, 2), slice(2, 4))]

    torch.manual_seed(0)
    student.zero_grad()
    found = sum(training.training_step(student, dict(piece)) for piece in pieces)
    gradients = {name: parameter.grad.clone() for name, parameter in student.named_parameters()}
    torch.manual_seed(0)
    student.zero_grad()
    expected = sum(loss_by_hand(student, teacher, **piece) for piece in pieces) / len(pieces)
    expected.backward()
    errors = [relative_error(found, expected.detach())]
    size = max(parameter.grad.abs().max() for parameter in student.parameters())
    errors += [float((gradients[name] - p.grad).abs().max() / size) for name, p in student.named_parameters()]
    return max(errors)


def loss_by_hand(student: Any, teacher: Any, input_ids: Tensor, shift_labels: Tensor) -> Tensor:
    """(1 - share) of the cross-entropy and a load-balancing loss, share of the divergence; means over tokens."""
    outputs, total = student.train()(input_ids, output_router_logits=True), 0.0
    with torch.no_grad():
        taught = teacher(input_ids).logits.log_softmax(-1)
    predicted = outputs.logits.log_softmax(-1)
    for row, targets in enumerate(shift_labels):
        for place, target in enumerate(targets):
            wanted, likelihoods = taught[row, place], predicted[row, place]
            divergence = sum(p.exp() * (p - q) for p, q in zip(wanted, likelihoods, strict=True))
            total = total + SHARE * divergence - (1 - SHARE) * likelihoods[target]
    loss = total / shift_labels.numel()
    if outputs.router_logits is None:
        return loss
    config, router = student.config, torch.cat(outputs.router_logits).softmax(-1)
    balance = 0.0
    for expert in range(config.num_local_experts):
        chosen = (router.topk(config.num_experts_per_tok).indices == expert).any(-1).double().mean()
        balance = balance + config.num_local_experts * chosen * router[:, expert].mean()
    return loss + (1 - SHARE) * config.router_aux_loss_coef * balance


DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2, "embedding_dropout": 0.2}


def learns(case: Case) -> float:
    return distilled(case.model(**DROPOUT), Case("", case.shape, (), {}).model(**DROPOUT))


def teaches(case: Case) -> float:
    return distilled(Case("", case.shape, (), {}).model(**DROPOUT), case.model(**DROPOUT))


# --- what is in a checkpoint ------------------------------------------------------------------------------------------


def inspected(case: Case) -> float:
    """How many parameters and bytes the two lines are off, of a model that is counted."""
    model = case.model()
    with saved(model) as (source, _), console.capture() as captured:
        inspect(str(source))
    printed = " ".join(captured.get().split())
    numbers = [re.search(words, printed) for words in (r"parameters: ([\d,]+)", r"bfloat16: ([\d,]+) bytes per token")]
    parameters, size = (int(number[1].replace(",", "")) for number in numbers if number)
    cache = DynamicCache(config=model.config)
    ids = tokens(1, 2)
    with torch.no_grad():
        model.bfloat16()(ids, past_key_values=cache)
    held = [tensor for layer in cache.layers if layer.is_initialized for tensor in (layer.keys, layer.values)]
    counted = sum(parameter.numel() for parameter in model.parameters())
    return abs(parameters - counted) + abs(size - sum(tensor.nbytes for tensor in held) / ids.numel())


@cache
def corpus() -> TokenData:
    folder = TemporaryDirectory()
    for number, name in enumerate(("train", "val")):
        tokens(1, 200, seed=number)[0].numpy().astype("uint16").tofile(Path(folder.name) / f"{name}.bin")
    data = prepare_data(folder.name, vocab_size=97)
    _FOLDERS.append(folder)
    return data


_FOLDERS: list[TemporaryDirectory] = []
# Records are rounded to five digits.
FIVE_DIGITS = 1e-4


def analyzed(case: Case) -> float:
    """Condition numbers, attention and copying as the record has them, against sums over the model's own outputs."""
    model = case.model(std=0.15)
    with saved(model) as (source, _):
        record = analyze_models(open_subjects([source]), corpus(), Settings(16, samples=2, probe_steps=0), "cpu")
    found = record["models"]["model"]
    model.set_attn_implementation("eager")
    repeated = repeated_tokens(97, 2, 8, 0)
    with torch.no_grad():
        outputs = model(repeated, output_attentions=True)
    pairs = []
    for half, name in enumerate(("first", "second")):
        likelihoods = outputs.logits.log_softmax(-1)
        losses = [
            -likelihoods[row, place - 1, repeated[row, place]]
            for row in range(len(repeated))
            for place in range(8 * half + 1, 8 * half + 8)
        ]
        pairs.append((found["heads"]["copy_loss"][name], sum(losses) / len(losses)))
    for layer, patterns in enumerate(outputs.attentions):
        for head, score in enumerate(found["heads"]["induction"][layer]):
            weights = [patterns[row, head, 8 + i, i + 1] for row in range(len(repeated)) for i in range(8)]
            pairs.append((score, sum(weights) / len(weights)))
    for layer, matrices in enumerate(found["spectra"]):
        attention = f"model.layers.{model.config.plan.layers[layer].block}.self_attn"
        for name, matrix in matrices.items():
            weight = tensors_of(model)[f"{attention}.{name}" + ".weight" * (not name.endswith("weight"))]
            pairs.append((matrix["condition"], torch.linalg.cond(weight)))
    return max(abs(one - float(other)) / max(abs(float(other)), 0.01) for one, other in pairs)


LOGITS = "logits against the original's"
IDLE = "logits, of a source whose replaced heads add nothing"
CONVERTED = dict.fromkeys(CONVERSIONS, "logits against values swapped in by hand") | {
    "nonlinear-query": LOGITS,
    "top-vo": IDLE,
    "calibrated": f"{IDLE}; the share missed",
}
CLASSES = "logits of transformers' class, and ours"
DISTILLED = "loss and gradients against sums over tokens"
CONVERSION = [
    Tool(
        f"`convert --{'to' if name == 'nonlinear-query' else 'method'} {name}`",
        partial(converted, conversion=name),
        TOLERANCES[name],
        number,
    )
    for name, number in CONVERTED.items()
]
ELIMINATION = [
    *(
        Tool(f"`eliminate --remove {slot}`", partial(projection, slot=slot), FLOAT64, f"{LOGITS}, without norms")
        for slot in ("query", "key", "value", "output")
    ),
    Tool("`eliminate --remove single-head`", single_head, FLOAT64, f"{LOGITS}, with one head"),
    Tool("`eliminate --remove block-diagonal`", block_diagonal, FLOAT64, LOGITS),
    Tool("`eliminate` with norms switched off", disabled_norms, 1e-10, LOGITS),
]
OTHERS = [
    Tool("`export` and `import`, LayerNorm", partial(exported, shape="gpt"), FLOAT64, CLASSES),
    Tool("`export` and `import`, RMSNorm", partial(exported, shape="llama"), FLOAT32, f"{CLASSES}, norms in float32"),
    Tool("`import --dtype bf16`", rounded, FLOAT64, "logits against weights rounded by hand"),
    Tool("`verify`", verified, FLOAT64, "logits of weights read on demand"),
    Tool("`uptrain --teacher`, as the model", learns, FLOAT32, DISTILLED),
    Tool("`uptrain --teacher`, as the teacher", teaches, FLOAT32, DISTILLED),
    Tool("`inspect`", inspected, 0.0, "parameters and KV bytes, counted"),
    Tool("`analyze`", analyzed, FIVE_DIGITS, "attention scores, losses and condition numbers, by loops"),
]
