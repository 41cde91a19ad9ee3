"""Open a checkpoint, ours or one of transformers: its configuration, and its tensors under our names."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from ..errors import LeanError, first_line
from ..files import read_json
from ..model.causal_lm import LeanForCausalLM
from ..model.config import LeanConfig
from ..model.image_classification import LeanForImageClassification
from ..model.images import MOST_LABELS
from ..model.masked_lm import LeanForMaskedLM
from ..model.shapes import parameter_shapes
from ..ranges import Range
from .disabled_norms import CONSTANT
from .families import FAMILIES, NOT_THESE, import_tensors
from .families.family import EMBEDDING, HEAD, INVALID, last_line
from .gguf import GgufCheckpoint
from .gguf_format import is_gguf
from .tensors import LazyTensors, StoredTensors, check_stored, count_nonfinite, finite, open_tensors, read_tied

MODELS: dict[str, Any] = {
    model.builds: model for model in (LeanForCausalLM, LeanForMaskedLM, LeanForImageClassification)
}
DEFAULTS = GenerationConfig._get_default_generation_params()
SWITCHES = {name for name, value in DEFAULTS.items() if isinstance(value, bool)} - {"early_stopping"}  # or "never"
# The numbers that settings of generation can be, by the type of their default.
KINDS = {
    int: Range(0, 2**31 - 1, whole=True, words="a whole number from 0"),
    float: Range(0, words="a number from 0, finite"),
}
SETTINGS = {name: KINDS.get(type(value)) for name, value in DEFAULTS.items()}
SETTINGS |= {
    **dict.fromkeys(("max_new_tokens", "min_new_tokens"), KINDS[int]),
    **dict.fromkeys(("top_p", "min_p", "typical_p"), Range(0, 1, words="a number from 0 to 1")),
    "max_time": KINDS[float],
    "length_penalty": Range(-inf, words="a number, finite"),
}
GENERATION, ADAPTER = "generation_config.json", "adapter_config.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose weights are read when they are asked for."""

    directory: Path  # or a GGUF file
    config: LeanConfig
    tensors: LazyTensors  # exactly those of `parameter_shapes(config)`
    stored: StoredTensors  # the tensors of its files, under the names that they have there
    family: str | None  # the model_type of the class of transformers that wrote it; None for one of ours

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest dtype that holds every stored weight."""
        ignorable = FAMILIES[self.family].ignorable if self.family else ()
        weights = (dtype for name, dtype in self.stored.dtypes.items() if not name.endswith(ignorable))
        return reduce(torch.promote_types, weights)

    @property
    def architecture(self) -> str:
        """The name of the class that wrote it."""
        return MODELS[self.config.task].__name__ if self.family is None else FAMILIES[self.family].architecture


def open_checkpoint(directory: Path) -> Checkpoint:
    """Open a directory of ours, one of a family of transformers, or a GGUF file. No weights are read yet.

    Raises a LeanError for a class that is not supported, a configuration that cannot be expressed here, and weights
    that are missing, damaged, or not the configuration's.
    """
    gguf = GgufCheckpoint.open(directory) if is_gguf(directory) else None
    hf = _read_config(directory) if gguf is None else gguf.config()
    kind = hf.get("model_type")
    if kind == LeanConfig.model_type:
        try:
            config = LeanConfig.from_pretrained(directory)
        except INVALID as error:
            raise LeanError(f"{directory / 'config.json'}: {last_line(error)}") from None
        stored = open_tensors(directory)
        return Checkpoint(directory, config, _own_tensors(config, stored), stored, None)
    if kind not in FAMILIES:
        why = f" ({NOT_THESE[kind]})" if kind in NOT_THESE else ""
        raise LeanError(
            f"{directory} is a {kind!r} checkpoint{why}; only {', '.join([LeanConfig.model_type, *FAMILIES])} can be "
            "opened"
        )
    family = FAMILIES[kind]
    try:
        config = family.lean_config(hf)
    except LeanError as error:
        raise LeanError(f"{directory if gguf else directory / 'config.json'}: {error}") from None
    stored = open_tensors(directory) if gguf is None else gguf.tensors(family.tensor_map(config), hf)
    return Checkpoint(directory, config, import_tensors(family, config, stored), stored, kind)


def open_causal_lm(directory: Path) -> Checkpoint:
    """Open a checkpoint as `open_checkpoint` does; raise a LeanError if it does not predict the next token."""
    opened = open_checkpoint(directory)
    if (task := opened.config.task) != "causal_lm":
        raise LeanError(f"{directory} holds a model for {task}, which does not predict the next token")
    return opened


def load_model(opened: Checkpoint, dtype: torch.dtype | None = None) -> Any:
    """Return the model of a checkpoint as `make_model` does, with its settings of generation.

    Args:
        dtype: of the parameters; None: as stored.
    """
    model = make_model(opened.config, opened.tensors, dtype or opened.dtype)
    if model.can_generate() and (settings := read_generation_config(opened.directory)) is not None:
        model.generation_config = settings
    return model


def make_model(config: LeanConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """Return the model of a configuration with these weights in `dtype`, on the CPU, in evaluation mode.

    One tensor at a time is read, so that no more memory is taken than the model's own and a tensor's.

    Raises:
        LeanError: a weight is NaN or infinite, or beyond the range of `dtype`.
    """
    config = deepcopy(config)
    config.dtype = dtype
    with no_init_weights():
        model = MODELS[config.task](config)
    for parameter in model.parameters():  # the buffers, which are frequencies, stay in float32
        parameter.data = torch.empty_like(parameter, dtype=dtype)
    model.tie_weights()
    load_weights(model, tensors)
    return model.eval()


def read_generation_config(directory: Path) -> GenerationConfig | None:
    """Return the settings of generation in a directory, if it has any; raise a LeanError that names a wrong one."""
    if not (directory / GENERATION).is_file():
        return None
    for name, value in read_json(directory / GENERATION).items():
        if expected := _wrong_setting(name, value):
            found = f"{name} must be {expected}, found {value!r}"
            raise LeanError(f"{directory / GENERATION}: {found}; correct or delete it")
    try:
        return GenerationConfig.from_pretrained(directory)
    except (*INVALID, OSError) as error:
        raise LeanError(f"{directory / GENERATION}: {first_line(error)}; correct or delete it") from None


def _wrong_setting(name: str, value: Any) -> str | None:
    """Return what a value of generation_config.json must be, if it is not: transformers takes any."""
    if value is None:
        return None
    if name.endswith("_token_id"):  # -1 stands for none; one that the model never writes is no harm
        several = name in ("eos_token_id", "forced_eos_token_id") and isinstance(value, list)
        ids = value if several else [value]
        whole = all(type(one) is int and -1 <= one < 2**31 for one in ids)
        return None if whole else "a token's id" + (", or a list of them" if name == "eos_token_id" else "")
    if name in SWITCHES:
        return None if isinstance(value, bool) else "true or false"
    allowed = SETTINGS.get(name)
    return None if allowed is None or value in allowed else str(allowed)


def load_weights(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Fill `model` with the tensors that its plan names; a tied head follows its embedding.

    Raises:
        LeanError: a weight is NaN or infinite, or beyond the range of the model's dtype.
    """
    parameters, tensors = dict(model.named_parameters()), finite(tensors)
    with torch.no_grad():
        for name in parameter_shapes(model.config):  # type: ignore[arg-type]
            stored = tensors[name]
            dtype = parameters[name].copy_(stored).dtype
            if torch.finfo(dtype).max < torch.finfo(stored.dtype).max and count_nonfinite(parameters[name]):
                raise LeanError(f"{name} has values that {str(dtype).removeprefix('torch.')} cannot hold")


def _read_config(directory: Path) -> dict[str, Any]:
    if (directory / ADAPTER).is_file():
        raise LeanError(
            f"{directory} holds a PEFT adapter ({ADAPTER}), not a whole model; merge it into its base model with "
            "PeftModel.merge_and_unload() and save that"
        )
    if not (directory / "config.json").is_file():
        files = sorted(directory.glob("*.gguf")) if directory.is_dir() else []
        advice = f"; give the file itself: {files[0]}" if files else ""
        raise LeanError(f"{directory} is not a checkpoint: it has no config.json{advice}")
    config = read_json(directory / "config.json")
    if not isinstance(kind := config.get("model_type"), str):
        raise LeanError(f"{directory / 'config.json'}: model_type is a name, found {kind!r}")
    if wrong := _wrong_in_general(config):
        raise LeanError(f"{directory / 'config.json'}: {wrong}")
    return config


def _wrong_in_general(config: Mapping[str, Any]) -> str | None:
    """Return what is wrong with values that transformers takes of any class before it checks them."""
    for name in ("dtype", "torch_dtype"):
        dtype = config.get(name)
        known = isinstance(dtype, str) and getattr(torch, dtype.removeprefix("torch."), None)
        if dtype not in (None, "auto") and not isinstance(known, torch.dtype):
            return f"{name} {dtype!r} is not known; say float32, bfloat16 or float16"
    if not isinstance(architectures := config.get("architectures"), list | None):
        return f"architectures must be a list of names or null, found {architectures!r}"
    labels, names = config.get("num_labels", 2), config.get("id2label")
    if type(labels) is not int or not 0 <= labels <= MOST_LABELS:
        return f"num_labels must be a whole number up to {MOST_LABELS:,}, found {labels!r}"
    if names is not None and not (isinstance(names, dict) and all(key.isdecimal() for key in names)):
        return f"id2label must give names to numbers, found {names!r}"
    if not isinstance(quantization := config.get("quantization_config"), dict | None):
        return f"quantization_config must be an object or null, found {quantization!r}"
    return None


def _own_tensors(config: LeanConfig, stored: StoredTensors) -> LazyTensors:
    shapes, tied = parameter_shapes(config), bool(config.tie_word_embeddings)
    if half := next((name for name in stored if name.endswith(f"norm.{CONSTANT}")), None):
        raise LeanError(f"its norms are being removed ({half}); let its run go on to the end")
    check_stored(stored, shapes, lambda name: tied and name == HEAD)

    def read(name: str) -> Tensor:
        return read_tied(stored, name, HEAD) if tied and name == EMBEDDING else stored[name]

    return LazyTensors(shapes, read)
