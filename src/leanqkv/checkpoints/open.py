"""Opening a checkpoint, ours or one of transformers: its configuration, and its tensors under our names."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers.initialization import no_init_weights

from ..errors import LeanError
from ..files import read_json
from ..model.causal_lm import LeanForCausalLM
from ..model.config import LeanConfig
from .families import FAMILIES, import_tensors
from .families.family import EMBEDDING, HEAD
from .load import load_config, load_weights
from .tensors import LazyTensors, check_stored, open_tensors, read_tied


@dataclass(frozen=True)
class Checkpoint:
    """`tensors` are exactly those of `config.plan.parameter_shapes`, each read when it is asked for. `family`: the
    model_type of the class of transformers that it was written by; None where it is one of ours."""

    directory: Path
    config: LeanConfig
    tensors: Mapping[str, Tensor]
    family: str | None


def open_checkpoint(directory: Path) -> Checkpoint:
    """Opens a directory of ours, or one of a family of transformers. No weights are read yet.

    Raises:
        LeanError: no checkpoint, or one of a class that is not supported; a configuration that cannot be expressed
            here; weights that are missing, damaged, or not the configuration's.
    """
    if not (directory / "config.json").is_file():
        raise LeanError(f"{directory} is not a checkpoint: it has no config.json")
    hf = read_json(directory / "config.json")
    kind = hf.get("model_type")
    if kind == LeanConfig.model_type:
        config = load_config(directory)
        return Checkpoint(directory, config, _own_tensors(directory, config), None)
    if kind not in FAMILIES:
        raise LeanError(
            f"{directory} is a {kind!r} checkpoint; only {', '.join([LeanConfig.model_type, *FAMILIES])} can be opened"
        )
    family = FAMILIES[kind]
    try:
        config = family.lean_config(hf)
    except LeanError as error:
        raise LeanError(f"{directory / 'config.json'}: {error}") from None
    return Checkpoint(directory, config, import_tensors(family, config, open_tensors(directory), hf), kind)


def open_causal_lm(directory: Path) -> Checkpoint:
    """Raises:
    LeanError: as `open_checkpoint`, and for a model of another task.
    """
    opened = open_checkpoint(directory)
    if (task := opened.config.task) != "causal_lm":
        raise LeanError(f"{directory} holds a model for {task}, which does not predict the next token")
    return opened


def causal_lm(opened: Checkpoint) -> LeanForCausalLM:
    """The model of a checkpoint, in float32 whatever is stored, on the CPU, in evaluation mode."""
    with no_init_weights():
        model = LeanForCausalLM(opened.config)
    model.tie_weights()
    load_weights(model, opened.tensors)
    return model.eval()


def _own_tensors(directory: Path, config: LeanConfig) -> LazyTensors:
    stored = open_tensors(directory)
    shapes = config.plan.parameter_shapes
    check_stored(stored, shapes, lambda name: bool(config.tie_word_embeddings) and name == HEAD)

    def read(name: str) -> Tensor:
        tied = name == EMBEDDING and config.tie_word_embeddings
        return read_tied(stored, name, HEAD) if tied else stored[name]

    return LazyTensors(shapes, read)
