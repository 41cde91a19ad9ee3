"""Open a checkpoint, ours or one of transformers: its configuration, and its tensors under our names."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers.initialization import no_init_weights

from ..errors import LeanError
from ..model.causal_lm import LeanForCausalLM
from ..model.config import LeanConfig
from .families import FAMILIES, import_tensors
from .families.family import EMBEDDING, HEAD
from .load import MODELS, load_config, load_weights, read_config
from .tensors import LazyTensors, StoredTensors, check_stored, open_tensors, read_tied


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose weights are read when they are asked for.

    Attributes:
        tensors: exactly those of `config.plan.parameter_shapes`.
        stored: the tensors of its files, under the names that they have there.
        family: the model_type of the class of transformers that wrote it; None for one of ours.
    """

    directory: Path
    config: LeanConfig
    tensors: Mapping[str, Tensor]
    stored: StoredTensors
    family: str | None

    @property
    def architecture(self) -> str:
        """The name of the class that wrote it."""
        return MODELS[self.config.task].__name__ if self.family is None else FAMILIES[self.family].architecture


def open_checkpoint(directory: Path) -> Checkpoint:
    """Open a directory of ours, or one of a family of transformers. No weights are read yet.

    Raises:
        LeanError: no checkpoint, or one of a class that is not supported; a configuration that cannot be expressed
            here; weights that are missing, damaged, or not the configuration's.
    """
    hf = read_config(directory)
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


def _own_tensors(config: LeanConfig, stored: StoredTensors) -> LazyTensors:
    shapes = config.plan.parameter_shapes
    check_stored(stored, shapes, lambda name: bool(config.tie_word_embeddings) and name == HEAD)

    def read(name: str) -> Tensor:
        tied = name == EMBEDDING and config.tie_word_embeddings
        return read_tied(stored, name, HEAD) if tied else stored[name]

    return LazyTensors(shapes, read)
