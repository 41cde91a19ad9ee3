"""Open a checkpoint, ours or one of transformers: its configuration, and its tensors under our names."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from ..errors import LeanError, first_line
from ..files import read_json
from ..model.causal_lm import LeanForCausalLM
from ..model.config import LeanConfig
from ..model.image_classification import LeanForImageClassification
from ..model.masked_lm import LeanForMaskedLM
from .families import FAMILIES, NOT_THESE, import_tensors
from .families.family import EMBEDDING, HEAD
from .gguf import open_gguf
from .gguf_format import is_gguf
from .tensors import LazyTensors, StoredTensors, check_stored, count_nonfinite, finite, open_tensors, read_tied

MODELS: dict[str, Any] = {
    "causal_lm": LeanForCausalLM,
    "masked_lm": LeanForMaskedLM,
    "image_classification": LeanForImageClassification,
}
GENERATION, ADAPTER = "generation_config.json", "adapter_config.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose weights are read when they are asked for."""

    directory: Path  # or a GGUF file
    config: LeanConfig
    tensors: LazyTensors  # exactly those of `config.plan.parameter_shapes`
    stored: StoredTensors  # the tensors of its files, under the names that they have there
    family: str | None  # the model_type of the class of transformers that wrote it; None for one of ours

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest dtype that holds every stored weight."""
        return reduce(torch.promote_types, self.stored.dtypes.values())

    @property
    def architecture(self) -> str:
        """The name of the class that wrote it."""
        return MODELS[self.config.task].__name__ if self.family is None else FAMILIES[self.family].architecture


def open_checkpoint(directory: Path) -> Checkpoint:
    """Open a directory of ours, one of a family of transformers, or a GGUF file. No weights are read yet.

    Raises a LeanError for a class that is not supported, a configuration that cannot be expressed here, and weights
    that are missing, damaged, or not the configuration's.
    """
    gguf = open_gguf(directory) if is_gguf(directory) else None
    hf = _read_config(directory) if gguf is None else gguf.config()
    kind = hf.get("model_type")
    if kind == LeanConfig.model_type:
        config, stored = load_config(directory), open_tensors(directory)
        return Checkpoint(directory, config, _own_tensors(config, stored), stored, None)
    if kind not in FAMILIES:
        why = f" ({NOT_THESE[kind]})" if kind in NOT_THESE else ""
        raise LeanError(
            f"{directory} is a {kind!r} checkpoint{why}; only {', '.join([LeanConfig.model_type, *FAMILIES])} can be "
            "opened"
        )
    family = FAMILIES[kind]
    try:
        family.check_class(hf)
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
    """Return the model of a checkpoint, on the CPU, in evaluation mode.

    One tensor at a time is read from the files, so that no more memory is taken than the model's own and a tensor's.

    Args:
        dtype: of the parameters; None: as stored.

    Raises:
        LeanError: a weight is NaN or infinite, or beyond the range of `dtype`.
    """
    config = deepcopy(opened.config)
    config.dtype = dtype or opened.dtype
    with no_init_weights():
        model = MODELS[config.task](config)
    for parameter in model.parameters():  # the buffers, which are frequencies, stay in float32
        parameter.data = torch.empty_like(parameter, dtype=config.dtype)
    model.tie_weights()
    load_weights(model, opened.tensors)
    if (opened.directory / GENERATION).is_file() and model.can_generate():
        model.generation_config = _generation_config(opened.directory)
    return model.eval()


def _generation_config(directory: Path) -> GenerationConfig:
    read_json(directory / GENERATION)  # names a damaged file
    try:
        return GenerationConfig.from_pretrained(directory)
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise LeanError(f"{directory / GENERATION}: {first_line(error)}; correct or delete it") from None


def load_weights(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Fill `model` with the tensors that its plan names; a tied head follows its embedding.

    Raises:
        LeanError: a weight is NaN or infinite, or beyond the range of the model's dtype.
    """
    parameters, tensors = dict(model.named_parameters()), finite(tensors)
    with torch.no_grad():
        for name in model.config.plan.parameter_shapes:
            stored = tensors[name]
            dtype = parameters[name].copy_(stored).dtype
            if torch.finfo(dtype).max < torch.finfo(stored.dtype).max and count_nonfinite(parameters[name]):
                raise LeanError(f"{name} has values that {str(dtype).removeprefix('torch.')} cannot hold")


def load_config(directory: Path) -> LeanConfig:
    """Return the configuration of a checkpoint of ours; raise a LeanError if there is none."""
    kind = _read_config(directory).get("model_type")
    if kind != LeanConfig.model_type:
        raise LeanError(f"{directory} is a {kind!r} checkpoint; only {LeanConfig.model_type!r} ones can be opened")
    try:
        return LeanConfig.from_pretrained(directory)
    except StrictDataclassError as error:  # a value of the wrong type
        raise LeanError(f"{directory / 'config.json'}: {str(error).splitlines()[-1].strip()}") from None


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
    return config


def _own_tensors(config: LeanConfig, stored: StoredTensors) -> LazyTensors:
    shapes, tied = config.plan.parameter_shapes, bool(config.tie_word_embeddings)
    check_stored(stored, shapes, lambda name: tied and name == HEAD)

    def read(name: str) -> Tensor:
        return read_tied(stored, name, HEAD) if tied and name == EMBEDDING else stored[name]

    return LazyTensors(shapes, read)
