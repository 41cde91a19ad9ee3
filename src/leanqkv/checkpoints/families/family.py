"""A class of transformers as data: its configuration and its tensors in terms of ours, read in both directions.

The tables of the families are in the other files of this folder.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import RopeParameters
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...compat import quiet_transformers
from ...errors import LeanError
from ...model.config import LeanConfig
from ...model.registry import Mechanism, suggest
from ...model.shapes import parameter_shapes
from ..tensors import LazyTensors, Shape, StoredTensors, check_stored, read_tied

# Settings of every family that have the same name here and there.
COMMON = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    *("tie_word_embeddings", "initializer_range", "use_cache", "dtype"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
# What a config.json of any family must say where it says anything: otherwise it is another function.
ORDINARY = dict.fromkeys(("quantization_config", "per_layer_config", "transformers_weights")) | {"is_causal": True}
# Which setting gives a module its bias; no other module has one.
BIASES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj"), "attention_bias"),
    "o_proj": "attention_output_bias",
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp_bias"),
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm", "norm"), "norm_bias"),
}
# For a class with one setting of that name for both.
ATTENTION_BIASES = dict.fromkeys(("attention_bias", "attention_output_bias"), "attention_bias")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Settings that a checkpoint's function does not depend on: what a class has no place for is left out.
IN_TRAINING = {
    *("attention_dropout", "hidden_dropout", "embedding_dropout"),
    *("initializer_range", "scaled_residual_init", "use_cache"),
    *("router_aux_loss_coef", "output_router_logits"),
}
# Settings that say nothing more where the one they belong to already differs.
BELONGS_TO = {
    "rope_parameters": "position_embedding_type",
    **dict.fromkeys(("num_local_experts", "num_experts_per_tok", "norm_topk_prob"), "mlp_type"),
    "qk_rope_head_dim": "kv_lora_rank",
}
# What transformers and huggingface_hub raise for a configuration that cannot be.
INVALID = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, StrictDataclassError)


@dataclass(frozen=True)
class Packed:
    """One tensor of a family's checkpoint, made of one or more of ours, of the shapes `part_shapes`, stacked as rows.

    With `heads` parts of one shape take turns head by head, [heads, parts, head_dim] rows. `transposed`: theirs is
    [in, out]. `expert`: theirs is that one of the experts stacked in ours. No value is changed.
    """

    name: str
    parts: tuple[str, ...]
    part_shapes: tuple[Shape, ...]
    heads: int = 1
    transposed: bool = False
    expert: int | None = None

    @property
    def shape(self) -> Shape:
        """The shape of theirs."""
        shape = (sum(part[0] for part in self.part_shapes), *self.part_shapes[0][1:])
        return shape[::-1] if self.transposed else shape

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return theirs, of shape `shape`, made of the parts in order."""
        rows = tensors[0] if self.expert is None else tensors[0][self.expert]
        if self.heads > 1:
            rows = torch.stack([tensor.unflatten(0, (self.heads, -1)) for tensor in tensors], dim=1).flatten(0, 2)
        elif len(tensors) > 1:
            rows = torch.cat(list(tensors))
        return (rows.T if self.transposed else rows).contiguous()

    def unpack(self, tensor: Tensor, part: int) -> Tensor:
        """Return ours, the part with that index."""
        rows = tensor.T if self.transposed else tensor
        if self.heads > 1:
            return rows.unflatten(0, (self.heads, len(self.parts), -1))[:, part].flatten(0, 1).contiguous()
        return rows.split([shape[0] for shape in self.part_shapes])[part].contiguous()


@dataclass(frozen=True)
class Family:
    """A class of transformers that a LeanConfig can describe."""

    model_type: str
    fixed: Mapping[str, Any]  # settings of ours that are the same in every model of the class
    settings: Mapping[str, str]  # settings, ours -> theirs, whose value is the same
    biases: Mapping[str, bool | str]  # those a model can have: always (True), or as that setting of theirs says
    prefix: str  # of the base model's tensors; a checkpoint of the base model alone does without
    modules: Mapping[str, str]  # their modules outside of the layers -> ours
    layer: str  # their name of layer `{}`
    layer_modules: Mapping[str, tuple[str, ...]]  # their modules in a layer -> ours, side by side in one of theirs
    head: str  # their name of our `lm_head`
    head_too: str | None = None  # another that files use
    ignorable: tuple[str, ...] = ()  # ends of the names of stored tensors that hold no weights
    ordinary: Mapping[str, Any] = field(default_factory=dict)  # values that its config.json must have, if any
    # Settings that need more than another name, from theirs to ours and back.
    read: Callable[[PreTrainedConfig], dict[str, Any]] = lambda stock: {}
    write: Callable[[LeanConfig], dict[str, Any]] = lambda config: {}
    partial_rope: bool | None = None  # None: no rotary positions; else whether it can rotate a part of each head
    interleaved: bool = False  # modules side by side take turns head by head
    transposed: bool = False  # the layers' matrices are [in, out]
    experts: Mapping[str, str] = field(default_factory=dict)  # their module of expert `{}` -> our tensor of all experts

    @property
    def architecture(self) -> str:
        """The name of the class."""
        return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.model_type]

    def lean_config(self, hf: Mapping[str, Any]) -> LeanConfig:
        """Return the configuration that is the same function as the config.json `hf`; the class's defaults fill gaps.

        Raises a LeanError for a class with a head other than a language model's, and for a value that is not valid, or
        that no LeanConfig can express; names it.
        """
        # Names that say nothing of a head are left to the tensors: old files have some that are in no version.
        for name in hf.get("architectures") or ():
            if re.search(r"For(?!CausalLM)[A-Z]|DoubleHeads", str(name)):
                raise LeanError(f"it is a {name}; only a {self.architecture} can be opened, a language model alone")
        for key, expected in {**ORDINARY, **self.ordinary}.items():
            if hf.get(key, expected) not in (expected, {}):  # an empty quantization_config is none
                raise LeanError(f"{key} {hf[key]!r} cannot be expressed here, only {expected!r}")
        try:
            with quiet_transformers():
                stock = CONFIG_MAPPING[self.model_type](**deepcopy(dict(hf)))
            return self._read(stock)
        except INVALID as error:
            raise LeanError(last_line(error)) from None

    def to_stock(self, config: LeanConfig) -> PreTrainedConfig:
        """Return the configuration of the class that is the same function; raise a LeanError that says why none is.

        Dropout that the class has no place for is left out: it acts in training alone.
        """
        if reasons := self.reasons(config):
            raise LeanError(f"{self.architecture} cannot hold this model: {'; '.join(reasons)}")
        return self._write(config)

    def reasons(self, config: LeanConfig) -> list[str]:
        """Return why the class cannot hold the model: every setting that its own configuration does not give back."""
        if config.task != "causal_lm":
            return [f"task is {config.task!r}, it is a causal_lm"]
        ours = _function(config)
        try:
            theirs = _function(self._read(self._write(config)))
        except (*INVALID, LeanError) as error:
            fixed = {name: value for name, value in self.fixed.items() if ours.get(name, value) != value}
            told = [f"{name} is {_show(ours[name])}, it has {value!r}" for name, value in fixed.items()]
            return [*told, last_line(error)]
        # A bias that the model does not have is one of zeros.
        zeros = {name for name in self.biases if theirs[name]}
        differ = {name for name, value in ours.items() if value != theirs[name] and name not in zeros}
        return [
            f"{name} is {_show(ours[name])}, it has {_show(theirs[name])}"
            for name in ours
            if name in differ and BELONGS_TO.get(name) not in differ
        ]

    def tensor_map(self, config: LeanConfig) -> list[Packed]:
        """Return every tensor of the class's checkpoint with ours that make it up, which may be biases of zeros."""
        shapes = parameter_shapes(config)
        modules = {self.prefix + theirs: [f"model.{ours}"] for theirs, ours in self.modules.items()}
        tensor_map = []
        for layer in range(config.num_hidden_layers):
            block = self.prefix + self.layer.format(layer)
            for theirs, parts in self.layer_modules.items():
                modules[f"{block}.{theirs}"] = [f"model.layers.{layer}.{part}" for part in parts]
            for theirs, part in self.experts.items():
                stacked = f"model.layers.{layer}.{part}"
                number, *shape = shapes[stacked]
                names = (f"{block}.{theirs.format(expert)}.weight" for expert in range(number))
                tensor_map += [Packed(name, (stacked,), (tuple(shape),), expert=i) for i, name in enumerate(names)]
        if HEAD in shapes:
            modules[self.head] = ["lm_head"]
        for theirs, ours in modules.items():
            weights = tuple(f"{name}.weight" for name in ours)
            part_shapes = tuple(shapes[name] for name in weights)
            heads = config.num_attention_heads if self.interleaved and len(ours) > 1 else 1
            transposed = self.transposed and ours[0].startswith("model.layers.") and len(part_shapes[0]) == 2
            tensor_map.append(Packed(f"{theirs}.weight", weights, part_shapes, heads, transposed))
            bias = BIASES.get(ours[0].rpartition(".")[2])
            if bias and self._has_bias(config, bias):
                biases = tuple(f"{name}.bias" for name in ours)
                tensor_map.append(Packed(f"{theirs}.bias", biases, tuple(shape[:1] for shape in part_shapes), heads))
        named = {part for packed in tensor_map for part in packed.parts}
        assert set(shapes) <= named, set(shapes) - named
        return tensor_map

    def zeros(self, config: LeanConfig) -> int:
        """Return how many tensors of ours the class has and the model has not: its biases of zeros."""
        parts = {part for packed in self.tensor_map(config) for part in packed.parts}
        return len(parts - set(parameter_shapes(config)))

    def stored_names(self, stored: Collection[str]) -> dict[str, str]:
        """Return their name -> the name in the file, where prefix and head may be written in another way."""
        missing = "" if any(name.startswith(self.prefix) for name in stored) else self.prefix
        head, heads = f"{self.head}.weight", {f"{name}.weight" for name in (self.head, self.head_too)}
        return {head if name in heads else missing + name: name for name in stored}

    def _has_bias(self, config: LeanConfig, bias: str) -> bool:
        """One setting of theirs may stand for several of ours."""
        setting = self.biases.get(bias, False)
        if isinstance(setting, bool):
            return setting
        return any(getattr(config, ours) for ours, theirs in self.biases.items() if theirs == setting)

    def _read(self, stock: PreTrainedConfig) -> LeanConfig:
        overrides = {name: getattr(stock, name) for name in COMMON} | dict(self.fixed)
        if self.fixed["position_embedding_type"] == "rope":  # such layers take one even if their class declares none
            overrides["head_dim"] = getattr(stock, "head_dim", None)
        overrides |= {ours: getattr(stock, theirs) for ours, theirs in self.settings.items()}
        if (activation := overrides["hidden_act"]) not in ACT2FN:
            known = suggest(str(activation), ACT2FN)
            raise LeanError(f"{self.settings['hidden_act']} {activation!r} is not known: {known}")
        for ours, setting in self.biases.items():
            overrides[ours] = setting if isinstance(setting, bool) else getattr(stock, setting)
        overrides |= self.read(stock)
        if self.partial_rope is not None:
            stock.standardize_rope_params()  # once more, as their rotary embedding does: fields beside these count too
            overrides["rope_parameters"] = read_rope(stock.rope_parameters, self.partial_rope)
        # Whole numbers and null may stand for a rate there.
        dropouts = [name for name in overrides if name.endswith("_dropout")]
        return LeanConfig(**overrides | {name: float(overrides[name] or 0) for name in dropouts})

    def _write(self, config: LeanConfig) -> PreTrainedConfig:
        values = {name: getattr(config, name) for name in COMMON}
        values |= {theirs: getattr(config, ours) for ours, theirs in self.settings.items()}
        for bias, setting in self.biases.items():
            if isinstance(setting, str):
                values[setting] = self._has_bias(config, bias)
        values |= deepcopy(self.write(config))
        if self.partial_rope is not None:
            values["rope_parameters"] = write_rope(config.rope_parameters, self.partial_rope)
        with quiet_transformers():
            return CONFIG_MAPPING[self.model_type](**values, architectures=[self.architecture])


def import_tensors(family: Family, config: LeanConfig, stored: StoredTensors) -> LazyTensors:
    """Return the tensors of a family's checkpoint under our names: exactly `parameter_shapes(config)`.

    `config` is what `family.lean_config` makes of the checkpoint's config.json. Raises a LeanError for tensors that are
    missing, left over, or of another shape or dtype, and for a head that is not tied as config.json says.
    """
    tensor_map = family.tensor_map(config)
    names = family.stored_names(stored.keys())
    head = names.get(f"{family.head}.weight", "") if config.tie_word_embeddings else ""
    if [packed.name for packed in tensor_map if packed.name not in names] == [f"{family.head}.weight"]:
        raise LeanError(
            f"{stored.directory} has no language-model head: there is no tensor {family.head}.weight, and config.json "
            f"ties none to the embedding; save the {family.architecture}, not its base model"
        )
    check_stored(
        stored,
        {names.get(packed.name, packed.name): packed.shape for packed in tensor_map},
        lambda name: name == head or name.endswith(family.ignorable),
    )
    sources = defaultdict(list)
    for packed in tensor_map:
        for i, part in enumerate(packed.parts):
            sources[part].append((packed, i))

    def read(name: str) -> Tensor:
        packed, part = sources[name][0]
        if packed.expert is not None:
            return torch.stack([stored[names[expert.name]] for expert, _ in sources[name]])
        theirs = names[packed.name]
        tensor = read_tied(stored, theirs, head) if name == EMBEDDING else stored[theirs]
        return packed.unpack(tensor, part)

    return LazyTensors(parameter_shapes(config), read)


def export_tensors(family: Family, config: LeanConfig, tensors: Mapping[str, Tensor]) -> LazyTensors:
    """Return our tensors, as `parameter_shapes(config)` names them, under the family's names.

    Biases that the class has and the model has not are zeros. Raises a LeanError if the class cannot hold the model.
    """
    family.to_stock(config)
    shapes = parameter_shapes(config)
    tensor_map = {packed.name: packed for packed in family.tensor_map(config)}

    def make(name: str) -> Tensor:
        packed = tensor_map[name]
        # The last norm is the one small tensor that every such model has: zeros take its dtype.
        like = None if packed.parts[0] in shapes else tensors["model.norm.weight"]
        parts = zip(packed.parts, packed.part_shapes, strict=True)
        return packed.pack([tensors[part] if like is None else like.new_zeros(shape) for part, shape in parts])

    return LazyTensors({name: packed.shape for name, packed in tensor_map.items()}, make)


def read_rope(parameters: Any, partial: bool) -> dict[str, Any]:
    """Return rotary parameters of a class of transformers as ours; `partial`: it can rotate a part of each head."""
    if "rope_type" not in parameters:  # there are parameters for each kind of layer
        raise LeanError(f"rope_parameters {parameters} cannot be expressed here: there is no rope_type for all layers")
    # The class reads no other key.
    ours = {key: value for key, value in parameters.items() if key in RopeParameters.__annotations__}
    share = ours.pop("partial_rotary_factor", None)
    if share not in (None, 1.0):
        if not partial:
            raise LeanError(f"partial_rotary_factor {share!r} cannot be expressed here: the class rotates whole heads")
        ours["partial_rotary_factor"] = share
    return ours


def write_rope(parameters: dict[str, Any] | None, partial: bool) -> dict[str, Any] | None:
    """Return our rotary parameters as those of a class: the inverse of `read_rope`."""
    theirs = dict(parameters or {})
    share = theirs.pop("partial_rotary_factor", None)
    if partial:  # where it is left out, a class that can rotate a part has a default of its own
        theirs["partial_rotary_factor"] = 1.0 if share is None else share
    return theirs or None


def last_line(error: Exception) -> str:
    """Return the last line of another library's message, where validators say what is wrong."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


def _function(config: LeanConfig) -> dict[str, Any]:
    """The settings that decide the function, comparable: mechanisms, windows and rotary parameters layer by layer."""
    general = {setting.name for setting in fields(PreTrainedConfig)}
    ours = [setting.name for setting in fields(LeanConfig) if setting.name not in general | IN_TRAINING]
    settings = {name: getattr(config, name) for name in ours}
    for slot in ("query", "key", "value", "output"):
        settings[slot] = [getattr(layer, slot) for layer in config.plan.layers]
    layers = config.plan.layers
    if (gate := layers[0].output_gate) is not None:
        settings["output_gate"] = {"type": gate.kind, **asdict(gate)}
    for name in ("window_layers", "rope_layers", "window_rope_parameters"):
        del settings[name]
    settings["sliding_window"] = [layer.window for layer in layers]
    settings["rope_parameters"] = [layer.rope and write_rope(getattr(config, layer.rope), True) for layer in layers]
    if config.attention_multiplier is None:
        settings["attention_multiplier"] = config.head_dim**-0.5
    return settings


def _show(value: Any) -> str:
    """Mechanisms as their names, once each; what all layers have once; a mechanism's rows of heads as their number."""
    if isinstance(value, dict) and "heads" in value:
        return repr(value | {"heads": f"{len(value['heads'])} rows"})
    if not isinstance(value, list):
        return repr(value)
    if isinstance(value[0], Mechanism):
        return " and ".join(dict.fromkeys(repr(used.kind) for used in value))
    return repr(value[0] if all(one == value[0] for one in value) else value)
