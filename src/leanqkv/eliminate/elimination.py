"""Eliminations carried out on a model in memory or on a directory, with a certificate."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..checkpoints.card import CARD, card, origin
from ..checkpoints.disabled_norms import norms_disabled
from ..checkpoints.open import make_model, open_checkpoint, read_generation_config
from ..checkpoints.tensors import LazyTensors, finite, weights_hash
from ..checkpoints.tokenizer import has_tokenizer
from ..checkpoints.write import Progress, write_model
from ..errors import LeanError
from ..files import check_free, write_json, write_text
from ..model.config import LeanConfig
from ..model.shapes import parameter_shapes
from .certify import certificate
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

    Raises a LeanError where that is not possible exactly, too badly conditioned, or a weight is not finite.

    Args:
        model: a model of ours, which is left as it is, or the directory of a checkpoint that can be opened.
        remove, layer, max_condition, balance: as in `parse_request`.
        dtype: of the result's weights.
        inputs: of the certificate; by default random token ids from a fixed seed.
    """
    if isinstance(model, PreTrainedModel):
        if not isinstance(model.config, LeanConfig):
            raise LeanError(f"a {type(model).__name__} is not a model of leanqkv; save it and give its directory")
        config, generation = model.config, getattr(model, "generation_config", None)  # of one that generates
        tensors = LazyTensors(parameter_shapes(config), model.state_dict().__getitem__)
    else:
        opened = open_checkpoint(Path(model))
        config, tensors, generation = opened.config, opened.tensors, read_generation_config(opened.directory)
    request = parse_request(remove, layer, max_condition=max_condition, balance=balance)
    before = config, finite(tensors)
    result = transform(*before, request)
    stored = {name: tensor.to(dtype) for name, tensor in result.tensors.items()}
    report = certificate(before, result, (result.config, stored), request, dtype, inputs)
    eliminated = make_model(result.config, stored, dtype)
    if generation is not None:
        eliminated.generation_config = deepcopy(generation)
    return Elimination(eliminated, report)


def eliminate_directory(
    source: Path,
    out: Path,
    request: Request,
    *,
    dtype: torch.dtype = torch.float32,
    stock: bool = False,
    family: str | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    progress: Progress = lambda done, total: None,
    message: Message = no_message,
) -> dict[str, Any]:
    """Eliminate from the checkpoint in `source` into `out`, tensor by tensor, and return the certificate.

    Raises a LeanError as `eliminate`, where `out` is not empty, and where no class can hold the result.

    Args:
        dtype, inputs: as in `eliminate`.
        stock, family, progress: as in `write_model`; a stock class has identities for the eliminated weights.
        message: called with the name of each phase: solving, writing, certifying.
    """
    check_free(out, source)
    opened = open_checkpoint(source)
    before = opened.config, finite(opened.tensors)
    if stock and norms_disabled(opened.config):
        request = replace(request, keep_mean=True)  # the class will subtract the mean again
    result = transform(*before, request, message)
    report: dict[str, Any] = {}

    def certify(directory: Path) -> None:
        stored = open_checkpoint(directory)
        after = stored.config, stored.tensors
        report.update(certificate(before, result, after, request, dtype, inputs, message))
        report.update(weights_sha256=weights_hash(directory), source_sha256=weights_hash(source))
        write_json(directory / CERTIFICATE, report)
        write_text(directory / CARD, _card(directory, out.resolve().name, result.config.task, source, stock, report))

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


def _card(directory: Path, name: str, task: str, source: Path, stock: bool, report: Mapping[str, Any]) -> str:
    """Return the model card of a directory, which will have this name and whose certificate is `report`."""
    made_from, (before, after) = origin(source), report["parameters"].values()
    where = "all layers" if report["layers"] is None else f"layers {', '.join(map(str, report['layers']))}"
    return card(
        name,
        task,
        [],
        made_from,
        stock,
        f"{made_from['base_model']} with redundant weights removed by leanqkv; it computes the same function.",
        f"## Result\n\nRemoved from {where}: {', '.join(report['removed'])}. {before:,} parameters became {after:,}. "
        f"Stored in {report['dtype']}; certificate.json says how exactly the logits are the original's.",
        tokenizer=has_tokenizer(directory),
    )
