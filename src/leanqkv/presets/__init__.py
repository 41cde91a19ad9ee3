"""The papers' architectures and sizes as data: `BASE+MECHANISM+MECHANISM` is how a model is named everywhere.

P1: Karbevski & Mijoski 2025, arXiv 2510.23912. P2: Karbevski 2026, nonlinear queries. P3: Wu et al. 2025, SkipV1Former.
Where a paper leaves a value open, the note says that it is ours.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import yaml
from huggingface_hub.errors import StrictDataclassError

from ..errors import LeanError
from ..model.config import LeanConfig
from ..model.registry import suggest


@dataclass(frozen=True)
class Recipe:
    """How a model is trained. Counts are optimizer steps and whole batches of sequences, over all processes."""

    steps: int
    batch_size: int
    learning_rate: float
    min_learning_rate: float
    weight_decay: float
    warmup_steps: int
    schedule_steps: int | None = None  # length of the cosine, then the minimum; None: `steps`
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float | None = 1.0


@dataclass(frozen=True)
class Base:
    """A size: configuration fields, the recipe it is trained with, where both come from, and what in them is ours."""

    config: Mapping[str, Any]
    recipe: Recipe
    source: str
    note: str = ""


@dataclass(frozen=True)
class MechanismPreset:
    """A mechanism: the configuration field it sets, the recipe fields that change with it per base, its source.

    `slot` "query", "key", "value" and "output" add one entry to that list; "key_value" and "depth_average" set it;
    "heads" sets the number of key/value heads, "latent" the two widths of MLA.
    """

    slot: str
    spec: Mapping[str, Any]
    summary: str
    source: str
    recipes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def _gpt(hidden_size: int, heads: int, layers: int, **other: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "vocab_size": 50304,
        "max_position_embeddings": 1024,
    } | other


def _llama(hidden_size: int, intermediate_size: int, heads: int, layers: int, **other: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "vocab_size": 32000,
        "max_position_embeddings": 1024,
        "position_embedding_type": "rope",
        "norm_type": "rmsnorm",
        "norm_eps": 1e-6,
        "mlp_type": "gated",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "scaled_residual_init": False,
    } | other


def _vit(image_size: int, patch_size: int, hidden_size: int, heads: int, layers: int, **other: Any) -> dict[str, Any]:
    return {
        "task": "image_classification",
        "image_size": image_size,
        "patch_size": patch_size,
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_labels": 10,
        "norm_eps": 1e-6,
        "scaled_residual_init": False,
        **dict.fromkeys(("norm_bias", "attention_bias", "attention_output_bias", "mlp_bias"), True),
    } | other


_NANOGPT = Recipe(60_000, 480, 6e-4, 6e-5, 0.1, 2_000)
_P3_DROPOUT = {"attention_dropout": 0.2, "hidden_dropout": 0.2, "embedding_dropout": 0.2}
_P3_GPT2 = ("P3 Table 3", "vocabulary, gradient clipping at 1.0 and where dropout acts are ours, as in nanoGPT")
_P3_LLAMA = ("P3 Table 4", "vocabulary 32000, RMSNorm eps 1e-6 and the untied head are ours")
_TINYLLAMA = (
    "P3 Table 6",
    "the paper gives sizes alone; the shapes are ours, TinyLlama's proportions with group-of-4 GQA, and so is the "
    "recipe, that of the LLaMA of like size",
)


def _p3_gpt2(learning_rate: float) -> Recipe:
    return Recipe(40_000, 120, learning_rate, learning_rate / 10, 0.1, 4_000)


def _p3_llama(steps: int, learning_rate: float, large: bool) -> Recipe:
    # "No weight decay and gradient clipping" up to 350M, both above.
    decay, clip = (0.1, 1.0) if large else (0.0, None)
    return Recipe(steps, 512, learning_rate, learning_rate / 10, decay, round(steps / 10), max_grad_norm=clip)


BASES: dict[str, Base] = {
    "tiny": Base(
        _gpt(128, 4, 4, vocab_size=2048, max_position_embeddings=128),
        Recipe(800, 8, 6e-3, 6e-4, 0.1, 80),
        "ours: the quickstart's size",
    ),
    "small": Base(
        _gpt(256, 4, 6, vocab_size=4096, max_position_embeddings=256),
        Recipe(600, 16, 2e-3, 2e-4, 0.1, 60),
        "ours: minutes on a CPU",
    ),
    "gpt2-124m": Base(
        _gpt(768, 12, 12),
        _NANOGPT,
        "P1, P2",
        "nanoGPT's GPT-2 shape; the steps are those of P2 and of the later version of P1, 60k",
    ),
    "gpt2-125m": Base(_gpt(768, 12, 12, **_P3_DROPOUT), _p3_gpt2(1e-3), *_P3_GPT2),
    "gpt2-200m": Base(_gpt(1024, 16, 12, **_P3_DROPOUT), _p3_gpt2(1e-3), *_P3_GPT2),
    "gpt2-355m": Base(_gpt(1024, 16, 24, **_P3_DROPOUT), _p3_gpt2(1e-3), *_P3_GPT2),
    "gpt2-550m": Base(_gpt(1200, 20, 28, **_P3_DROPOUT), _p3_gpt2(6e-4), *_P3_GPT2),
    "llama-60m": Base(_llama(512, 1376, 8, 8), _p3_llama(2_500, 2e-3, False), *_P3_LLAMA),
    "llama-130m": Base(_llama(768, 2048, 12, 12), _p3_llama(5_000, 2e-3, False), *_P3_LLAMA),
    "llama-350m": Base(_llama(1024, 2736, 16, 24), _p3_llama(15_000, 2e-3, False), *_P3_LLAMA),
    "llama-1b": Base(_llama(2048, 5461, 32, 24), _p3_llama(25_000, 1e-3, True), *_P3_LLAMA),
    "llama-3b": Base(_llama(2560, 6848, 32, 32), _p3_llama(30_000, 5e-4, True), *_P3_LLAMA),
    "tinyllama-125m": Base(
        _llama(768, 2112, 12, 12, num_key_value_heads=3), _p3_llama(5_000, 2e-3, False), *_TINYLLAMA
    ),
    "tinyllama-315m": Base(
        _llama(1024, 2816, 16, 22, num_key_value_heads=4), _p3_llama(15_000, 2e-3, False), *_TINYLLAMA
    ),
    "tinyllama-1.1b": Base(
        _llama(2048, 5632, 32, 22, num_key_value_heads=8), _p3_llama(25_000, 1e-3, True), *_TINYLLAMA
    ),
    "vit-digits": Base(
        _vit(8, 2, 64, 4, 4, num_channels=1),
        Recipe(600, 64, 1e-3, 1e-4, 0.1, 60, beta2=0.999, max_grad_norm=None),
        "ours: a minute on a CPU",
    ),
    "vit-tiny": Base(
        _vit(224, 16, 192, 3, 12),
        Recipe(15_000, 1024, 1e-3, 1e-4, 0.1, 1_500, beta2=0.999, max_grad_norm=None),
        "P3 appendix C.6",
        "images enlarged to 224 pixels in patches of 16, with which the stated 5.5M come out, are ours; so are ViT's "
        "biases, LayerNorm eps 1e-6 and no gradient clipping; CIFAR-100 needs num_labels=100",
    ),
}

_SKIP = "P3 section 6.5"
_BLOCK = "P1 Prop. 3.2"
_SKIPV1: dict[str, Any] = {"type": "first_layer_values"}
MECHANISMS: dict[str, MechanismPreset] = {
    "identity-query": MechanismPreset(
        "query",
        {"type": "identity"},
        "Q = X, attention scale halved",
        "P1 section 5",
        {base: {"weight_decay": 2**-5} for base in ("gpt2-124m", "tiny", "small")},
    ),
    "identity-key": MechanismPreset("key", {"type": "identity"}, "K = X, attention scale halved (MHA)", "P1 Remark 1"),
    "identity-value": MechanismPreset("value", {"type": "identity"}, "V = X (MHA)", "P1 Remark 1"),
    "nonlinear-query": MechanismPreset(
        "query",
        {"type": "nonlinear"},
        "Q = (X + f(X)) / 2 with a bottleneck MLP f",
        "P2 eq. 2-3, Table 1",
        {
            "gpt2-124m": {"learning_rate": 3e-3, "min_learning_rate": 3e-5, "weight_decay": 2**-5},
            "tiny": {"weight_decay": 2**-5},
            "small": {"weight_decay": 2**-5},
        },
    ),
    "residual-query": MechanismPreset("query", {"type": "residual"}, "Q = (X + X W_Q) / 2", "P2's public code"),
    "mlp-query": MechanismPreset(
        "query", {"type": "from_mlp"}, "Q = (X + hidden activations of the MLP below, times W') / 2", "P2 section 4"
    ),
    "keys-as-values": MechanismPreset(
        "value", {"type": "keys"}, "V = K: one projection, one cached tensor", "beyond the papers"
    ),
    "block-identity-key": MechanismPreset(
        "key",
        {"type": "block_identity"},
        "every key head begins as the same columns of the input",
        _BLOCK,
    ),
    "block-identity-value": MechanismPreset("value", {"type": "block_identity"}, "the same for value heads", _BLOCK),
    "no-output": MechanismPreset(
        "output",
        {"type": "identity"},
        "no output projection P; with identity-query, blocks without Q and P",
        "P4 Fig. 4",
    ),
    "skipv1": MechanismPreset(
        "key_value", _SKIPV1, "half of each later layer's value heads are the first layer's", "P3 section 3.2"
    ),
    "skipv2": MechanismPreset("key_value", _SKIPV1 | {"source_layer": 1}, "as skipv1, from layer 2", _SKIP),
    "skipv3": MechanismPreset("key_value", _SKIPV1 | {"source_layer": 2}, "as skipv1, from layer 3", _SKIP),
    "skipv4": MechanismPreset("key_value", _SKIPV1 | {"source_layer": 3}, "as skipv1, from layer 4", _SKIP),
    "skipv0": MechanismPreset("key_value", _SKIPV1 | {"inject": False}, "half the heads, none injected", _SKIP),
    "skipkv1": MechanismPreset(
        "key_value",
        _SKIPV1 | {"keys": True},
        "half of the key and value heads are the first layer's",
        "P3 appendix C.5",
    ),
    "skipv1-yoco": MechanismPreset(
        "key_value", _SKIPV1 | {"middle_keys": True}, "skipv1, and layer L/2's keys above it", "P3 appendix C.5"
    ),
    "svformer": MechanismPreset(
        "key_value", _SKIPV1 | {"ratio": 1.0}, "every layer uses the first layer's values", "Zhou et al. 2024; P3 B.2"
    ),
    "resformer": MechanismPreset(
        "key_value",
        {"type": "interpolated_values"},
        "V <- (V + V_1) / 2; mode=per_layer and per_token learn the share",
        "Zhou et al. 2024; P3 section 3.2",
    ),
    "denseformer": MechanismPreset(
        "depth_average", {}, "a weighted average over all earlier layers after each", "Pagliardini et al. 2024; P3 B.1"
    ),
    "yoco-v": MechanismPreset(
        "key_value", {"type": "shared_middle"}, "upper half: layer L/2's values", "Sun et al. 2024; P3 B.1"
    ),
    "yoco": MechanismPreset(
        "key_value",
        {"type": "shared_middle", "keys": True},
        "upper half: layer L/2's keys and values",
        "Sun et al. 2024",
    ),
    "cla-v": MechanismPreset(
        "key_value", {"type": "shared_adjacent"}, "every two layers share values", "Brandon et al. 2024; P3 B.1"
    ),
    "cla": MechanismPreset(
        "key_value",
        {"type": "shared_adjacent", "keys": True},
        "every two layers share keys and values",
        "Brandon et al. 2024",
    ),
    "fusedkv-lite": MechanismPreset(
        "key_value",
        {"type": "first_values_middle_keys"},
        "upper half: the first layer's values and layer L/2's keys",
        "Lin et al. 2025, arXiv 2512.03870",
    ),
    "gqa": MechanismPreset(
        "heads", {"group_size": 2}, "each key/value head serves group_size query heads", "Ainslie et al. 2023; P3 5.2"
    ),
    "mqa": MechanismPreset("heads", {}, "one key/value head for all query heads", "Shazeer 2019"),
    "mla": MechanismPreset(
        "latent",
        {"rank": None, "rope_dim": None},
        "keys and values from one cached latent; rank 4 heads wide, rope_dim half a head",
        "DeepSeek-AI 2024; P3 B.2",
    ),
}


@dataclass(frozen=True)
class ModelName:
    """A parsed `BASE+MECHANISM:option=value+field=value`."""

    base: str
    mechanisms: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]
    overrides: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        def show(value: Any) -> str:
            return ",".join(map(str, value)) if isinstance(value, list | tuple) else yaml_scalar(value)

        parts = [self.base]
        for mechanism, options in self.mechanisms:
            listed = ",".join(f"{name}={show(value)}" for name, value in options)
            parts.append(f"{mechanism}:{listed}" if listed else mechanism)
        return "+".join([*parts, *(f"{name}={show(value)}" for name, value in self.overrides)])


def yaml_scalar(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def parse_name(name: str) -> ModelName:
    """Reads `BASE+MECHANISM+...`; each part after the base is a mechanism or a configuration field, `field=value`.

    Raises:
        LeanError: an unknown base or mechanism (nearest names offered), or an option without a value.
    """
    base, *parts = name.split("+")
    if base not in BASES:
        raise LeanError(f"unknown base {base!r} in {name!r}: {suggest(base, BASES)}")
    mechanisms, overrides = [], []
    for part in parts:
        head, _, options = part.partition(":")
        if "=" in head:
            overrides.extend(_parse_options(part, name))
        elif head in MECHANISMS:
            mechanisms.append((head, tuple(_parse_options(options, name))))
        else:
            raise LeanError(f"unknown mechanism {head!r} in {name!r}: {suggest(head, MECHANISMS)}")
    return ModelName(base, tuple(mechanisms), tuple(overrides))


def _parse_options(text: str, name: str) -> list[tuple[str, Any]]:
    """`layers=0,3,rank=64` -> [("layers", [0, 3]), ("rank", 64)]: a part without `=` continues the value before it."""
    pairs: list[tuple[str, list[str]]] = []
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if equals:
            pairs.append((key.strip(), [value]))
        elif pairs:
            pairs[-1][1].append(part)
        else:
            raise LeanError(f"option {part!r} in {name!r} has no value; write option=value")
    try:
        return [
            (key, [yaml.safe_load(v) for v in values] if len(values) > 1 or key == "layers" else _scalar(values[0]))
            for key, values in pairs
        ]
    except yaml.YAMLError as error:
        raise LeanError(f"cannot read the options {text!r} in {name!r}: {error}") from None


def _scalar(text: str) -> Any:
    value = yaml.safe_load(text)
    if isinstance(value, str):
        try:
            return float(value)  # YAML reads 1e-3 as a word
        except ValueError:
            return value
    return value


def preset(base: str, *mechanisms: str, **overrides: Any) -> LeanConfig:
    """The configuration of a base size with mechanisms and overrides.

    `preset("gpt2-124m", "identity-query", num_hidden_layers=6)`; names may carry options, `skipv1:ratio=0.25`.

    Raises:
        LeanError: unknown names. ConfigError: a combination that cannot be built.
    """
    parsed = parse_name("+".join((base, *mechanisms)))
    config: dict[str, Any] = {**BASES[parsed.base].config, **dict(parsed.overrides), **overrides}
    chosen = {**dict(parsed.overrides), **overrides}
    seen: dict[str, str] = {}
    for name, given in parsed.mechanisms:
        mechanism, options = MECHANISMS[name], dict(given)
        slot, decides, fields_set = mechanism.slot, *_DECIDES.get(mechanism.slot, ("", ()))
        if slot in _LISTS:
            config[slot] = [*config.get(slot, ()), {**mechanism.spec, **options}]
            continue
        if slot in seen:
            raise LeanError(f"{seen[slot]} and {name} clash: both decide {decides}; use one of them")
        for field_name in fields_set:
            if field_name in chosen:
                raise LeanError(f"{name} and {field_name} clash: both decide {decides}; use one of them")
        seen[slot] = name
        if slot in ("heads", "latent"):
            if unknown := set(options) - set(mechanism.spec):
                valid = f": valid: {', '.join(mechanism.spec)}" if mechanism.spec else ""
                raise LeanError(f"{name} has no option {min(unknown)!r}{valid}")
            config |= (_grouped if slot == "heads" else _latent)(name, {**mechanism.spec, **options}, config)
        else:
            config[slot] = {**mechanism.spec, **options}
    floats = {field.name for field in fields(LeanConfig) if field.type is float}
    config = {key: float(value) if key in floats and type(value) is int else value for key, value in config.items()}
    try:
        return LeanConfig(**config)
    except StrictDataclassError as error:  # a value of the wrong type
        raise LeanError(f"{parsed}: {str(error).splitlines()[-1].strip()}") from None


_LISTS = ("query", "key", "value", "output")
# What a slot that only one mechanism can fill decides, in words and in configuration fields.
_DECIDES: dict[str, tuple[str, tuple[str, ...]]] = {
    "key_value": ("how heads are shared between layers", ("key_value",)),
    "heads": ("the key/value heads", ("num_key_value_heads",)),
    "latent": ("the latent's widths", ("kv_lora_rank", "qk_rope_head_dim")),
    "depth_average": ("the averages over depth", ("depth_average",)),
}


def _grouped(name: str, options: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    group = options.get("group_size", heads)
    if not isinstance(group, int) or group < 1 or heads % group:
        raise LeanError(f"{name}: group_size must divide the {heads} query heads, found {group!r}")
    return {"num_key_value_heads": heads // group}


def _latent(name: str, options: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek-V2's proportions, which are those of P3 too: a latent of 4 heads, a rotary key of half a head."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("position_embedding_type") == "rope"
    found = {"kv_lora_rank": options["rank"], "qk_rope_head_dim": options["rope_dim"]}
    defaults = {"kv_lora_rank": 4 * head_dim, "qk_rope_head_dim": head_dim // 2 if rope else 0}
    return {field_name: defaults[field_name] if value is None else value for field_name, value in found.items()}


def recipe(name: str, **overrides: Any) -> Recipe:
    """How the papers train `name`: the base's recipe, changed as its mechanisms ask for on that base, then overridden.

    For `tiny` the learning rates come from a committed sweep (`results/quickstart`), see `TUNED`. A different number of
    `steps` scales the warm-up, and a learning rate of one's own the minimum, unless these are given too.
    """
    parsed = parse_name(name)
    found = BASES[parsed.base].recipe
    for mechanism, _ in parsed.mechanisms:
        found = replace(found, **MECHANISMS[mechanism].recipes.get(parsed.base, {}))
    kinds = frozenset(mechanism for mechanism, _ in parsed.mechanisms)
    found = replace(found, **TUNED.get((parsed.base, kinds), {}))
    scaled: dict[str, Any] = {}
    if "steps" in overrides:
        scaled["warmup_steps"] = round(found.warmup_steps * overrides["steps"] / found.steps)
    if "learning_rate" in overrides:
        ratio = found.min_learning_rate / found.learning_rate
        scaled["min_learning_rate"] = overrides["learning_rate"] * ratio
    found = replace(found, **{**scaled, **overrides})
    for what, rate in (("learning rate", found.learning_rate), ("minimum learning rate", found.min_learning_rate)):
        if not 0 < rate < math.inf:
            raise LeanError(f"the {what} must be a positive number, found {rate}")
    return found


# (base, mechanisms) -> recipe fields that differ from what the lines above give: each model's best learning rate in the
# sweep of results/quickstart.
TUNED: dict[tuple[str, frozenset[str]], dict[str, Any]] = {
    ("tiny", frozenset({"skipv1"})): {"learning_rate": 4e-3, "min_learning_rate": 4e-4},
}
