"""Norms removed while a model is trained on, one after another: each one's standard deviation becomes a constant.

Heimersheim 2024, "You can remove GPT2's LayerNorm by fine-tuning", https://arxiv.org/abs/2409.13710; Baroni et al.
2025, "Transformers Don't Need LayerNorm at Inference Time", https://arxiv.org/abs/2507.02559. A removed norm is
`(x - mean) / s * weight + bias` with `s` the mean standard deviation of the batch before; RMSNorm has its root mean
square in place of it. That is linear: after the last one, `fold_norms` leaves a model without norms.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ..checkpoints.disabled_norms import CONSTANT, fold_norms, why_not_folded
from ..checkpoints.open import load_weights
from ..eliminate.certify import DTYPES, EXACT, check_rounding, difference, logits, random_inputs
from ..eliminate.transform import Transformed
from ..errors import LeanError
from ..model.config import LeanConfig
from ..model.shapes import parameter_shapes
from .processes import first_decides
from .spec import RunSpec
from .tasks import task_of

# Step of the first removal, and steps from one to the next, of MLPs' norms and of attention's: Baroni et al.'s for
# GPT-2. They remove attention's norm for queries and keys (2 steps each) and then for values (3); here it goes at once.
START, GAPS = 20, {"post_attention": 2, "input": 5}
# The last norm goes in this share of a run at the latest, and the gaps are as many times longer as fit in before.
SHARE = 0.5
Schedule = list[tuple[int, str]]


def removal_schedule(config: LeanConfig, steps: int) -> Schedule:
    """Return after which steps of a run which norms go: those of the MLPs from the first block to the last, those of
    attention, and the last one.

    Raises:
        LeanError: norms that cannot be folded into the weights; a run that is too short.
    """
    if reason := why_not_folded(config):
        raise LeanError(f"`remove_norms`: the norms of this model stay: {reason}")
    names = [name.removesuffix(".weight") for name in parameter_shapes(config) if name.endswith("layernorm.weight")]
    found, at = [], START
    for kind, gap in GAPS.items():
        for name in names:
            if name.endswith(f".{kind}_layernorm"):
                found.append((at, name))
                at += gap
    stretch = int(SHARE * steps / at)
    if not stretch:
        needed = -int(-at // SHARE)
        raise LeanError(f"`remove_norms`: {len(found) + 1} norms go in {needed:,} steps or more, found `steps={steps}`")
    return [(stretch * step, name) for step, name in [*found, (at, "model.norm")]]


def check_removal(shard: str | None, keep_checkpoints: bool) -> None:
    """Raise a LeanError for options of a run that norms cannot be removed with."""
    if shard is not None:
        raise LeanError("`remove_norms` and `shard` do not go together: a sharded model is not folded; leave one out")
    if keep_checkpoints:
        raise LeanError(
            "`remove_norms` and `keep_checkpoints` do not go together: before the last norm is gone, the checkpoints "
            "are no models that can be loaded; leave one out"
        )


class RemovableNorm(nn.Module):
    """A LayerNorm or RMSNorm with its parameters, and numbers that checkpoints keep.

    Attributes:
        constant: what the input is divided by in place of its standard deviation; 0: nothing yet.
        observed: [2], of the calls in the last training step, over micro-batches and layers that share a block: the sum
            of their mean standard deviations, and their number.
    """

    constant: Tensor
    observed: Tensor

    def __init__(self, norm: Any):
        super().__init__()
        self.weight, self.bias = norm.weight, getattr(norm, "bias", None)
        self.eps, self.centers = norm.eps, isinstance(norm, nn.LayerNorm)
        self.register_buffer(CONSTANT, torch.zeros((), device=norm.weight.device))
        self.register_buffer("observed", torch.zeros(2, device=norm.weight.device))

    def mean_deviation(self) -> float:
        """Return the mean standard deviation in the last training step."""
        total, calls = self.observed.tolist()
        return total / calls

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.centers:
            y = y - y.mean(-1, keepdim=True)
        deviation = (y.square().mean(-1, keepdim=True) + self.eps).sqrt()
        if self.training:
            mean = deviation.detach().mean()
            self.observed.add_(torch.stack((mean, torch.ones_like(mean))))
        # Which of the two it is depends on a tensor: a compiled model is not compiled again.
        y = y / torch.where(self.constant > 0, self.constant, deviation) * self.weight
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def make_removable(model: nn.Module) -> None:
    """Put a RemovableNorm, which computes the same, in place of every norm of the stream."""
    for name, norm in list(model.named_modules()):
        if (name.endswith("layernorm") or name == "model.norm") and not isinstance(norm, nn.Identity):
            model.set_submodule(name, RemovableNorm(norm))


class NormRemoval(TrainerCallback):
    """Remove norms as `RunSpec.norm_schedule` says, and evaluate before each kind of them goes."""

    def __init__(self, schedule: Schedule):
        self.schedule, self.evaluated = schedule, dict(stages(schedule)).values()

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        for step, name in self.schedule:
            norm = model.get_submodule(name)
            if step == state.global_step:
                # The processes have seen other sequences; a checkpoint keeps what the first has seen.
                norm.constant.fill_(first_decides(norm.mean_deviation))
            norm.observed.zero_()

    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate |= state.global_step in self.evaluated


def stages(schedule: Schedule) -> Iterator[tuple[str, int]]:
    """Yield which norms are gone, in words, and the step after which the next kind begins to go."""
    gone = "none"
    for kind, words in (("post_attention", "MLP"), ("input", "MLP and attention"), ("model.norm", "all")):
        if steps := [step for step, name in schedule if kind in name]:
            yield gone, steps[0]
            gone = words


def remove_norms(config: LeanConfig, state: Mapping[str, Tensor]) -> tuple[Any, dict[str, dict[str, float]]]:
    """Return the norm-free model that computes what a model with removed norms does, in float32, and how well.

    Args:
        config: with norms, as the model was built.
        state: its state, on the CPU.

    Raises:
        LeanError: the result computes something else.
    """
    removable = task_of(config).model_class(config)
    make_removable(removable)
    removable.load_state_dict(state)
    for parameter in removable.parameters():  # but no buffer: rotary frequencies stay in float32
        parameter.data = parameter.data.double()
    inputs = random_inputs(config)
    with torch.no_grad():
        reference = removable.eval()(**inputs).logits.flatten(0, -2)
    new, folded = fold_norms(config, state, lambda norm: state[f"{norm}.{CONSTANT}"].item())
    exact = difference(logits(new, folded, inputs, torch.float64), reference)
    if not exact["relative"] <= EXACT:
        raise LeanError(f"the model without norms is another function: its logits differ by {exact['relative']:.1e}")
    model = task_of(new).model_class(new)
    load_weights(model, folded)
    stored = {name: weight.detach() for name, weight in model.named_parameters()}
    results = {name: logits(new, stored, inputs, DTYPES[name]) for name in ("fp64", "fp32")}
    rounding = check_rounding(results, reference, Transformed(new, stored), torch.float32)
    return model, {"exact": exact, "rounding": rounding}


def summarize_removal(
    spec: RunSpec, state: Mapping[str, Tensor], evaluations: list[dict[str, Any]], checked: dict[str, Any]
) -> dict[str, Any]:
    """Return a record's entry: each norm with its step and constant, the loss before each kind went and at the end."""
    losses = {entry["step"]: entry["loss"] for entry in evaluations}
    schedule = spec.norm_schedule or []
    ends = [*stages(schedule), ("all", spec.recipe.steps)]
    return {
        "removed": [{"step": s, "norm": n, "constant": state[f"{n}.{CONSTANT}"].item()} for s, n in schedule],
        "stages": [{"removed": gone, "step": step, "loss": losses[step]} for gone, step in ends],
        **checked,
    }
