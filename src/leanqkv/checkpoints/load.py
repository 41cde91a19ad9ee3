"""Open a checkpoint directory of ours."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from ..compat import quiet_transformers
from ..errors import LeanError
from ..files import read_json
from ..model.causal_lm import LeanForCausalLM
from ..model.config import LeanConfig
from ..model.image_classification import LeanForImageClassification
from ..model.masked_lm import LeanForMaskedLM

MODELS: dict[str, Any] = {
    "causal_lm": LeanForCausalLM,
    "masked_lm": LeanForMaskedLM,
    "image_classification": LeanForImageClassification,
}


def read_config(directory: Path) -> dict[str, Any]:
    """Return the config.json of a checkpoint, ours or another; raise a LeanError if there is none."""
    if not (directory / "config.json").is_file():
        raise LeanError(f"{directory} is not a checkpoint: it has no config.json")
    return read_json(directory / "config.json")


def load_config(directory: Path) -> LeanConfig:
    """Return the configuration of a checkpoint of ours.

    Raises:
        LeanError: no checkpoint there, or one of another architecture.
    """
    kind = read_config(directory).get("model_type")
    if kind != LeanConfig.model_type:
        raise LeanError(f"{directory} is a {kind!r} checkpoint; only {LeanConfig.model_type!r} ones can be opened")
    try:
        return LeanConfig.from_pretrained(directory)
    except StrictDataclassError as error:  # a value of the wrong type
        raise LeanError(f"{directory / 'config.json'}: {str(error).splitlines()[-1].strip()}") from None


def load_model(directory: Path) -> PreTrainedModel:
    """Return the model in `directory`, on the CPU, in evaluation mode.

    Raises:
        LeanError: as `load_config`, and for weights that are missing, damaged, or not the configuration's.
    """
    config = load_config(directory)
    try:
        with quiet_transformers():
            model, info = MODELS[config.task].from_pretrained(directory, config=config, output_loading_info=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise LeanError(f"the weights in {directory} cannot be read: {str(error).splitlines()[0]}") from None
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(problem):
            name = sorted(map(str, info[problem]))[0]
            raise LeanError(
                f"the weights in {directory} do not fit its config.json: {problem.replace('_', ' ')}, {name}"
            )
    return model.eval()


def load_weights(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Fill `model` with the tensors that its plan names; a tied head follows its embedding."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in model.config.plan.parameter_shapes:
            parameters[name].copy_(tensors[name])
