"""Two checkpoints compared on their logits, in several dtypes, one module of weights in memory at a time."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.hooks import attach_align_device_hook
from torch import Tensor
from torch.nn import functional as F
from transformers.initialization import no_init_weights

from ..checkpoints.load import MODELS
from ..errors import LeanError
from ..model.config import LeanConfig

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
# Modules that use their submodules' weights without calling them.
WHOLE = ["LatentAttention"]


class Cast(Mapping[str, Tensor]):
    """Tensors in another dtype; a tied head under its own name as well."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype):
        self.tensors, self.dtype = tensors, dtype

    def __getitem__(self, name: str) -> Tensor:
        if name == "lm_head.weight" and name not in self.tensors:
            name = "model.embed_tokens.weight"
        return self.tensors[name].to(self.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@torch.no_grad()
def logits(
    config: LeanConfig, tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor], dtype: torch.dtype
) -> Tensor:
    """[tokens or images, outputs], float64, of a model computed in `dtype`; weights are read as they are needed."""
    with init_empty_weights(include_buffers=False), no_init_weights():
        model: Any = MODELS[config.task](config)
    for module in model.modules():  # but no buffer: rotary frequencies stay in float32, as when a checkpoint is loaded
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, torch.nn.Parameter(parameter.to(dtype), requires_grad=False))
    attach_align_device_hook(
        model, torch.device("cpu"), offload=True, weights_map=Cast(tensors, dtype), preload_module_classes=WHOLE
    )
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    found = model.eval()(**inputs)
    return found.logits.double().flatten(0, -2)


def random_inputs(config: LeanConfig, sequences: int = 2, length: int = 64, seed: int = 0) -> dict[str, Tensor]:
    """Token ids (or pixels) from a fixed seed: the same for every certificate of one shape."""
    generator = torch.Generator().manual_seed(seed)
    if config.task == "image_classification":
        shape = (8, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64)}  # type: ignore[arg-type]
    length = min(length, config.max_position_embeddings)
    return {"input_ids": torch.randint(config.vocab_size, (sequences, length), generator=generator)}


def difference(found: Tensor, reference: Tensor) -> dict[str, float]:
    """How far logits [tokens, outputs] lie from the reference: the largest difference, that over the largest reference,
    mean KL(reference || found) in nats, and the share of tokens with the same likeliest output.

    Raises:
        LeanError: a reference that nothing can be measured against.
    """
    for wrong, what in ((not reference.isfinite().all(), "not finite"), (not reference.any(), "all zero")):
        if wrong:
            raise LeanError(f"the original's own logits are {what}, so that nothing can be certified by them")
    worst = (found - reference).abs().max().item()
    divergence = F.kl_div(found.log_softmax(-1), reference.log_softmax(-1), log_target=True, reduction="batchmean")
    return {
        "max_abs": worst,
        "relative": worst / reference.abs().max().item(),
        "kl": max(divergence.item(), 0.0) if math.isfinite(divergence) else math.inf,
        "agreement": (found.argmax(-1) == reference.argmax(-1)).double().mean().item(),
    }


def compare(
    before: tuple[LeanConfig, Mapping[str, Tensor]],
    after: tuple[LeanConfig, Mapping[str, Tensor]],
    inputs: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype] = DTYPES,
) -> dict[str, dict[str, dict[str, float]]]:
    """Per dtype, how far both models lie from the first one in float64: `original`, which is what the dtype itself
    costs, and `result`.

    Raises:
        LeanError: models whose logits cannot be compared; says why.
    """
    one, other = (config.task for config, _ in (before, after))
    if one != other:
        raise LeanError(f"a model for {one} and one for {other} cannot be compared")
    reference = logits(*before, inputs, torch.float64)
    report = {}
    for name, dtype in dtypes.items():
        result = logits(*after, inputs, dtype)
        if result.shape != reference.shape:
            raise LeanError(f"they have {reference.shape[1]:,} and {result.shape[1]:,} outputs: not one function")
        original = reference if dtype == torch.float64 else logits(*before, inputs, dtype)
        report[name] = {"original": difference(original, reference), "result": difference(result, reference)}
    return report
