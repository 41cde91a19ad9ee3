"""Eliminations carried out on a model in memory or on a directory, with a certificate."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..checkpoints.disabled_norms import norms_disabled
from ..checkpoints.formats import write_model
from ..checkpoints.load import MODELS
from ..checkpoints.open import open_checkpoint
from ..checkpoints.tensors import finite, weights_hash
from ..checkpoints.write import Progress, check_free
from ..errors import LeanError
from ..files import write_json
from ..model.config import LeanConfig
from .certify import certificate, random_inputs
from .transform import MAX_CONDITION, Message, Request, no_message, parse_request, transform

CERTIFICATE = "certificate.json"


@dataclass(frozen=True)
class Elimination:
    """A model with fewer weights and the certificate that it computes the same."""

    model: PreTrainedModel
    certificate: dict[str, Any]


def eliminate(
    model: PreTrainedModel | str | Path,
    remove: str,
    layer: str | int | None = None,
    *,
    max_condition: float = MAX_CONDITION,
    dtype: torch.dtype = torch.float32,
    balance: bool = True,
    inputs: Mapping[str, Tensor] | None = None,
) -> Elimination:
    """Return the same function with fewer weights, solved in float64 and certified on its logits.

    Args:
        model: a model of ours, which is left as it is, or a directory of one of ours or of a supported class of
            transformers.
        remove, layer, max_condition, balance: as in `parse_request`.
        dtype: of the result's weights.
        inputs: of the certificate; by default random token ids from a fixed seed.

    Raises:
        LeanError: not possible exactly, too badly conditioned, or weights that are not finite; says why.
    """
    tensors: Mapping[str, Tensor]
    if isinstance(model, PreTrainedModel):
        if not isinstance(model.config, LeanConfig):
            raise LeanError(f"a {type(model).__name__} is not a model of leanqkv; save it and give its directory")
        state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        config = model.config
        tensors = {name: state[name] for name in config.plan.parameter_shapes}
    else:
        opened = open_checkpoint(Path(model))
        config, tensors = opened.config, opened.tensors
    request = parse_request(remove, layer, max_condition=max_condition, balance=balance)
    before = config, finite(tensors)
    result = transform(*before, request)
    stored = {name: tensor.to(dtype) for name, tensor in result.tensors.items()}
    eliminated = MODELS[config.task](result.config).to(dtype)
    tied = bool(config.tie_word_embeddings and result.config.tie_word_embeddings)
    eliminated.load_state_dict(stored, strict=not tied)
    after = result.config, stored
    report = certificate(before, result, after, request, dtype, inputs or random_inputs(config))
    return Elimination(eliminated.eval(), report)


def eliminate_directory(
    source: Path,
    out: Path,
    request: Request,
    *,
    dtype: torch.dtype = torch.float32,
    stock: bool = False,
    family: str | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    progress: Progress | None = None,
    message: Message = no_message,
) -> dict[str, Any]:
    """Eliminate from the checkpoint in `source` into `out`, tensor by tensor, and return the certificate.

    Args:
        dtype, inputs: as in `eliminate`.
        stock, family, progress: as in `convert_format`; in a stock class, what was eliminated is written out as
            identities.
        message: called with the name of each phase: solving, writing, certifying.

    Raises:
        LeanError: as `eliminate`; `out` is not empty; no class can hold the result; it is not the same function.
    """
    check_free(out)
    opened = open_checkpoint(source)
    before = opened.config, finite(opened.tensors)
    if stock and norms_disabled(opened.config):
        request = replace(request, keep_mean=True)  # the class will subtract the mean again
    result = transform(*before, request, message)
    report: dict[str, Any] = {}

    def certify(directory: Path) -> None:
        stored = open_checkpoint(directory)
        after = stored.config, stored.tensors
        report.update(
            certificate(before, result, after, request, dtype, inputs or random_inputs(opened.config), message)
        )
        report.update(weights_sha256=weights_hash(directory), source_sha256=weights_hash(source))
        write_json(directory / CERTIFICATE, report)

    message("writing")
    write_model(
        opened,
        out,
        result.config,
        result.tensors,
        dtype,
        stock=stock,
        family=family,
        settings=vars(request),
        finish=certify,
        progress=progress,
    )
    return report
