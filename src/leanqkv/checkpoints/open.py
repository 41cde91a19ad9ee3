"""Open a checkpoint, ours or one of transformers: its configuration, and its tensors under our names."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from ..compat import quiet_transformers
from ..errors import LeanError
from ..files import read_json
from ..model.causal_lm import LeanForCausalLM
from ..model.config import LeanConfig
from ..model.image_classification import LeanForImageClassification
from ..model.masked_lm import LeanForMaskedLM
from .families import FAMILIES, import_tensors
from .families.family import EMBEDDING, HEAD
from .tensors import LazyTensors, StoredTensors, check_stored, open_tensors, read_tied

MODELS: dict[str, Any] = {
    "causal_lm": LeanForCausalLM,
    "masked_lm": LeanForMaskedLM,
    "image_classification": LeanForImageClassification,
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose weights are read when they are asked for."""

    directory: Path
    config: LeanConfig
    tensors: LazyTensors  # exactly those of `config.plan.parameter_shapes`
    stored: StoredTensors  # the tensors of its files, under the names that they have there
    family: str | None  # the model_type of the class of transformers that wrote it; None for one of ours

    @property
    def architecture(self) -> str:
        """The name of the class that wrote it."""
        return MODELS[self.config.task].__name__ if self.family is None else FAMILIES[self.family].architecture


def open_checkpoint(directory: Path) -> Checkpoint:
    """Open a directory of ours, or one of a family of transformers. No weights are read yet.

    Raises a LeanError for a class that is not supported, a configuration that cannot be expressed here, and weights
    that are missing, damaged, or not the configuration's.
    """
    hf = _read_config(directory)
    kind = hf.get("model_type")
    if kind == LeanConfig.model_type:
        config, stored = load_config(directory), open_tensors(directory)
        return Checkpoint(directory, config, _own_tensors(config, stored), stored, None)
    if kind not in FAMILIES:
        raise LeanError(
            f"{directory} is a {kind!r} checkpoint; only {', '.join([LeanConfig.model_type, *FAMILIES])} can be opened"
        )
    family = FAMILIES[kind]
    try:
        family.check_class(hf)
        config = family.lean_config(hf)
    except LeanError as error:
        raise LeanError(f"{directory / 'config.json'}: {error}") from None
    stored = open_tensors(directory)
    return Checkpoint(directory, config, import_tensors(family, config, stored, hf), stored, kind)


def open_causal_lm(directory: Path) -> Checkpoint:
    """Open a checkpoint as `open_checkpoint` does; raise a LeanError if it does not predict the next token."""
    opened = open_checkpoint(directory)
    if (task := opened.config.task) != "causal_lm":
        raise LeanError(f"{directory} holds a model for {task}, which does not predict the next token")
    return opened


def causal_lm(opened: Checkpoint) -> LeanForCausalLM:
    """Return the model of a checkpoint, in float32 whatever is stored, on the CPU, in evaluation mode."""
    with no_init_weights():
        model = LeanForCausalLM(opened.config)
    model.tie_weights()
    load_weights(model, opened.tensors)
    return model.eval()


def load_weights(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Fill `model` with the tensors that its plan names; a tied head follows its embedding."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in model.config.plan.parameter_shapes:
            parameters[name].copy_(tensors[name])


def load_config(directory: Path) -> LeanConfig:
    """Return the configuration of a checkpoint of ours; raise a LeanError if there is none."""
    kind = _read_config(directory).get("model_type")
    if kind != LeanConfig.model_type:
        raise LeanError(f"{directory} is a {kind!r} checkpoint; only {LeanConfig.model_type!r} ones can be opened")
    try:
        return LeanConfig.from_pretrained(directory)
    except StrictDataclassError as error:  # a value of the wrong type
        raise LeanError(f"{directory / 'config.json'}: {str(error).splitlines()[-1].strip()}") from None


def load_model(directory: Path) -> PreTrainedModel:
    """Return the model of a checkpoint of ours, on the CPU, in evaluation mode.

    Raises a LeanError as `load_config`, and for weights that are missing, damaged, or not the configuration's.
    """
    config = load_config(directory)
    if getattr(config, "quantization_config", None) is None:
        _own_tensors(config, open_tensors(directory))  # refuses what transformers reads without a word
    try:
        with quiet_transformers():
            model, info = MODELS[config.task].from_pretrained(directory, config=config, output_loading_info=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise LeanError(f"the weights in {directory} cannot be read: {str(error).splitlines()[0]}") from None
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, info.get(problem) or ())):
            raise LeanError(
                f"the weights in {directory} do not fit its config.json: {problem.replace('_', ' ')}, {names[0]}"
            )
    return model.eval()


def _read_config(directory: Path) -> dict[str, Any]:
    if not (directory / "config.json").is_file():
        raise LeanError(f"{directory} is not a checkpoint: it has no config.json")
    return read_json(directory / "config.json")


def _own_tensors(config: LeanConfig, stored: StoredTensors) -> LazyTensors:
    shapes, tied = config.plan.parameter_shapes, bool(config.tie_word_embeddings)
    check_stored(stored, shapes, lambda name: tied and name == HEAD)

    def read(name: str) -> Tensor:
        return read_tied(stored, name, HEAD) if tied and name == EMBEDDING else stored[name]

    return LazyTensors(shapes, read)
