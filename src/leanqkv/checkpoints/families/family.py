"""A class of transformers as data: its configuration and its tensors in terms of ours, read in both directions.

The tables of the families are in gpt2.py, gpt_neox.py and llama.py.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from ...compat import quiet_transformers
from ...errors import LeanError
from ...model.config import LeanConfig
from ...model.registry import suggest
from ..tensors import LazyTensors, Shape, StoredTensors, check_stored, read_tied

# Settings of every family that have the same name here and there.
COMMON = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    *("tie_word_embeddings", "initializer_range", "use_cache", "dtype"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
# What a config.json of any family must say where it says anything: otherwise it is another function.
ORDINARY = {"quantization_config": None, "per_layer_config": None, "is_causal": True}
# Which setting gives a module its bias; no other module has one.
BIASES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attention_bias"),
    "o_proj": "attention_output_bias",
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp_bias"),
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm", "norm"), "norm_bias"),
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Settings that a checkpoint's function does not depend on: what a class has no place for is left out.
IN_TRAINING = {
    *("attention_dropout", "hidden_dropout", "embedding_dropout"),
    *("initializer_range", "scaled_residual_init", "use_cache", "router_aux_loss_coef"),
}
# Settings that say nothing more where the one they belong to already differs.
BELONGS_TO = {
    "rope_parameters": "position_embedding_type",
    **dict.fromkeys(("num_local_experts", "num_experts_per_tok"), "mlp_type"),
    "qk_rope_head_dim": "kv_lora_rank",
}
# What transformers and huggingface_hub raise for a configuration that cannot be.
INVALID = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, StrictDataclassError)


@dataclass(frozen=True)
class Packed:
    """One tensor of a family's checkpoint, made of one or more of ours, all of shape `part_shape`.

    They lie one below the other as rows; with `heads`, they take turns head by head, [heads, parts, head_dim] rows.
    `transposed`: theirs is [in, out].
    """

    name: str
    parts: tuple[str, ...]
    part_shape: Shape
    heads: int = 1
    transposed: bool = False

    @property
    def shape(self) -> Shape:
        """The shape of theirs."""
        shape = (len(self.parts) * self.part_shape[0], *self.part_shape[1:])
        return shape[::-1] if self.transposed else shape

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return theirs, of shape `shape`, made of the parts in order."""
        rows = tensors[0]
        if len(tensors) > 1:
            rows = torch.stack([tensor.unflatten(0, (self.heads, -1)) for tensor in tensors], dim=1).flatten(0, 2)
        return (rows.T if self.transposed else rows).contiguous()

    def unpack(self, tensor: Tensor, part: int) -> Tensor:
        """Return ours, of shape `part_shape`: the part with that index."""
        rows = tensor.T if self.transposed else tensor
        return rows.unflatten(0, (self.heads, len(self.parts), -1))[:, part].flatten(0, 1).contiguous()


@dataclass(frozen=True)
class Family:
    """A class of transformers that a LeanConfig can describe."""

    # Its names in transformers.
    model_type: str
    architecture: str
    # Settings of ours that are the same in every model of the class.
    fixed: Mapping[str, Any]
    # Settings, ours -> theirs, whose value is the same.
    settings: Mapping[str, str]
    # Which biases a model has: always (true), never (false), or as that setting of theirs says.
    biases: Mapping[str, bool | str]
    # The prefix of the base model's tensors; a checkpoint of the base model alone does without.
    prefix: str
    # Their modules outside of the layers -> ours.
    modules: Mapping[str, str]
    # Their name of layer `{}`, and their modules in it -> ours, those side by side in one of theirs.
    layer: str
    layer_modules: Mapping[str, tuple[str, ...]]
    # Their name of our `lm_head`, and another that files use.
    head: str
    head_too: str | None = None
    # Ends of the names of stored tensors that hold no weights.
    ignorable: tuple[str, ...] = ()
    # Values that its config.json must have where it has any, beside ORDINARY.
    ordinary: Mapping[str, Any] = field(default_factory=dict)
    # Settings that need more than another name, from theirs to ours and back.
    read: Callable[[PreTrainedConfig], dict[str, Any]] = lambda stock: {}
    write: Callable[[LeanConfig], dict[str, Any]] = lambda config: {}
    # Rotary positions: None for a class without, else whether it can rotate a part of each head.
    partial_rope: bool | None = None
    # Modules side by side take turns head by head.
    interleaved: bool = False
    # The layers' matrices are [in, out].
    transposed: bool = False
    # From their config.json: our tensors that hold theirs divided by a number.
    divisors: Callable[[LeanConfig, Mapping[str, Any]], dict[str, int]] = lambda config, hf: {}

    def lean_config(self, hf: Mapping[str, Any]) -> LeanConfig:
        """Return the configuration that is the same function as the config.json `hf`.

        The class's own defaults fill the gaps of `hf`.

        Raises:
            LeanError: a value that is not valid, or that no LeanConfig can express; names key and value.
        """
        for key, expected in {**ORDINARY, **self.ordinary}.items():
            if hf.get(key, expected) != expected:
                raise LeanError(f"{key} {hf[key]!r} cannot be expressed here, only {expected!r}")
        try:
            with quiet_transformers():
                stock = CONFIG_MAPPING[self.model_type](**deepcopy(dict(hf)))
            return self._read(stock)
        except INVALID as error:
            raise LeanError(_one_line(error)) from None

    def to_stock(self, config: LeanConfig) -> PreTrainedConfig:
        """Return the configuration of the class that is the same function.

        Dropout that the class has no place for is left out: it acts in training alone.

        Raises:
            LeanError: the class cannot hold such a model; says why.
        """
        if reasons := self.reasons(config):
            raise LeanError(f"{self.architecture} cannot hold this model: {'; '.join(reasons)}")
        return self._write(config)

    def reasons(self, config: LeanConfig) -> list[str]:
        """Return why the class cannot hold the model; nothing where it can.

        Whatever does not come back from the class's own configuration as it was is a reason, so that no setting can be
        forgotten here.
        """
        if config.task != "causal_lm":
            return [f"task is {config.task!r}, it is a causal_lm"]
        try:
            returned = self._read(self._write(config))
        except (*INVALID, LeanError) as error:
            return [_one_line(error)]
        ours, theirs = _function(config), _function(returned)
        # A bias that the model does not have is one of zeros.
        zeros = {name for name in self.biases if theirs[name]}
        differ = {name for name, value in ours.items() if value != theirs[name] and name not in zeros}
        return [
            f"{name} is {_show(ours[name])}, it has {_show(theirs[name])}"
            for name in ours
            if name in differ and BELONGS_TO.get(name) not in differ
        ]

    def tensor_map(self, config: LeanConfig) -> list[Packed]:
        """Return every tensor of the class's checkpoint with those of ours that make it up.

        Those of ours that `config.plan.parameter_shapes` lacks are biases of zeros.
        """
        shapes = config.plan.parameter_shapes
        modules = [(self.prefix + theirs, [f"model.{ours}"], False) for theirs, ours in self.modules.items()]
        for layer in range(config.num_hidden_layers):
            block = self.prefix + self.layer.format(layer)
            for theirs, parts in self.layer_modules.items():
                names = [f"model.layers.{layer}.{part}" for part in parts]
                modules.append((f"{block}.{theirs}", names, self.transposed))
        if HEAD in shapes:
            modules.append((self.head, [HEAD.removesuffix(".weight")], False))
        tensor_map = [packed for module in modules for packed in self._pack(config, *module)]
        named = {part for packed in tensor_map for part in packed.parts}
        assert set(shapes) <= named, set(shapes) - named
        return tensor_map

    def zeros(self, config: LeanConfig) -> int:
        """Return how many tensors of ours the class has and the model has not: its biases of zeros."""
        parts = {part for packed in self.tensor_map(config) for part in packed.parts}
        return len(parts - set(config.plan.parameter_shapes))

    def stored_names(self, stored: Collection[str]) -> dict[str, str]:
        """Return their name -> the name in the file, where prefix and head may be written in another way."""
        prefixed = any(name.startswith(self.prefix) for name in stored)
        names = {}
        for name in stored:
            if name.removesuffix(".weight") in (self.head, self.head_too):
                names[f"{self.head}.weight"] = name
            else:
                names[name if prefixed else self.prefix + name] = name
        return names

    def _pack(self, config: LeanConfig, theirs: str, ours: Sequence[str], transposed: bool) -> Iterator[Packed]:
        weights = tuple(f"{name}.weight" for name in ours)
        shape = config.plan.parameter_shapes[weights[0]]
        heads = config.num_attention_heads if self.interleaved and len(ours) > 1 else 1
        yield Packed(f"{theirs}.weight", weights, shape, heads, transposed and len(shape) == 2)
        bias = BIASES.get(ours[0].rpartition(".")[2])
        if bias and self._has_bias(config, bias):
            yield Packed(f"{theirs}.bias", tuple(f"{name}.bias" for name in ours), shape[:1], heads)

    def _has_bias(self, config: LeanConfig, bias: str) -> bool:
        """Whether the class's model has it; one setting of theirs may stand for several of ours."""
        setting = self.biases[bias]
        if isinstance(setting, bool):
            return setting
        return any(getattr(config, ours) for ours, theirs in self.biases.items() if theirs == setting)

    def _read(self, stock: PreTrainedConfig) -> LeanConfig:
        overrides = {name: getattr(stock, name) for name in COMMON} | dict(self.fixed)
        for ours, theirs in self.settings.items():
            overrides[ours] = getattr(stock, theirs)
        if (activation := overrides["hidden_act"]) not in ACT2FN:
            known = suggest(str(activation), ACT2FN)
            raise LeanError(f"{self.settings['hidden_act']} {activation!r} is not known: {known}")
        for ours, setting in self.biases.items():
            overrides[ours] = setting if isinstance(setting, bool) else getattr(stock, setting)
        overrides |= self.read(stock)
        if self.partial_rope is not None:
            overrides["rope_parameters"] = _read_rope(stock, self.partial_rope)
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
            values["rope_parameters"] = _write_rope(config, self.partial_rope)
        with quiet_transformers():
            return CONFIG_MAPPING[self.model_type](**values, architectures=[self.architecture])


def import_tensors(family: Family, config: LeanConfig, stored: StoredTensors, hf: Mapping[str, Any]) -> LazyTensors:
    """Return the tensors of a family's checkpoint under our names: exactly `config.plan.parameter_shapes`.

    `hf` is the checkpoint's config.json, `config` the configuration that `family.lean_config` makes of it.

    Raises:
        LeanError: tensors missing, left over, of another shape or dtype; when the embedding is read, a head in the file
            that is not tied to it though the configuration says so.
    """
    tensor_map = family.tensor_map(config)
    names = family.stored_names(stored.keys())
    head = names.get(f"{family.head}.weight", "") if config.tie_word_embeddings else ""
    check_stored(
        stored,
        {names.get(packed.name, packed.name): packed.shape for packed in tensor_map},
        lambda name: name == head or name.endswith(family.ignorable),
    )
    sources = {part: (packed, i) for packed in tensor_map for i, part in enumerate(packed.parts)}
    divisors = family.divisors(config, hf)

    def read(name: str) -> Tensor:
        packed, part = sources[name]
        theirs = names[packed.name]
        tensor = read_tied(stored, theirs, head) if name == EMBEDDING else stored[theirs]
        ours = packed.unpack(tensor, part)
        return ours / divisors[name] if name in divisors else ours

    return LazyTensors(config.plan.parameter_shapes, read)


def export_tensors(family: Family, config: LeanConfig, tensors: Mapping[str, Tensor]) -> LazyTensors:
    """Return our tensors, as `config.plan.parameter_shapes` names them, under the family's names.

    Biases that the class has and the model has not are zeros.

    Raises:
        LeanError: the class cannot hold such a model; says why.
    """
    family.to_stock(config)
    shapes = config.plan.parameter_shapes
    tensor_map = {packed.name: packed for packed in family.tensor_map(config)}

    def make(name: str) -> Tensor:
        packed = tensor_map[name]
        # The last norm is the one small tensor that every such model has: zeros take its dtype.
        zeros = None if packed.parts[0] in shapes else tensors["model.norm.weight"].new_zeros(packed.part_shape)
        return packed.pack([tensors[part] if zeros is None else zeros for part in packed.parts])

    return LazyTensors({name: packed.shape for name, packed in tensor_map.items()}, make)


def _read_rope(stock: PreTrainedConfig, partial: bool) -> dict[str, Any]:
    """Our `rope_parameters`; `partial`: whether the class can rotate a part of each head."""
    parameters: Any = stock.rope_parameters
    kind, kinds = parameters.get("rope_type"), ("default", *ROPE_INIT_FUNCTIONS)
    if kind not in kinds:  # also where there are parameters for each kind of layer
        raise LeanError(f"rope_parameters {parameters}: rope_type {kind!r} is not known: {suggest(str(kind), kinds)}")
    # The class reads no other key.
    ours = {key: value for key, value in parameters.items() if key in RopeParameters.__annotations__}
    share = ours.pop("partial_rotary_factor", None)
    if share not in (None, 1.0):
        if not partial:
            raise LeanError(f"partial_rotary_factor {share!r} cannot be expressed here: the class rotates whole heads")
        ours["partial_rotary_factor"] = share
    return ours


def _write_rope(config: LeanConfig, partial: bool) -> dict[str, Any] | None:
    """The inverse of `_read_rope`."""
    theirs = dict(config.rope_parameters or {})
    share = theirs.pop("partial_rotary_factor", None)
    if partial:  # where it is left out, a class that can rotate a part has a default of its own
        theirs["partial_rotary_factor"] = 1.0 if share is None else share
    return theirs or None


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


def _function(config: LeanConfig) -> dict[str, Any]:
    """The settings that decide the function, comparable: mechanisms layer by layer, rotary parameters without gaps."""
    general = {setting.name for setting in fields(PreTrainedConfig)}
    ours = [setting.name for setting in fields(LeanConfig) if setting.name not in general | IN_TRAINING]
    settings = {name: getattr(config, name) for name in ours}
    for slot in ("query", "key", "value", "output"):
        settings[slot] = [getattr(layer, slot) for layer in config.plan.layers]
    if config.rope_parameters:
        settings["rope_parameters"] = _write_rope(config, partial=True)
    return settings


def _show(value: Any) -> str:
    """Mechanisms as their names, once each."""
    if isinstance(value, list):
        return " and ".join(dict.fromkeys(repr(used.kind) for used in value))
    return repr(value)
