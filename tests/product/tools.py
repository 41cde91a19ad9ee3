"""The other axis: a tool, and the outcome of a mechanism under it."""

import pkgutil
import re
from collections.abc import Callable
from tempfile import gettempdir
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanqkv import LeanError
from product.mechanisms import Case

# What rounding leaves after a few layers of large weights, summed in another order.
ROUNDING = {dtype: 1000 * torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32)}
FLOAT64, FLOAT32 = ROUNDING[torch.float64], ROUNDING[torch.float32]
# `generate` hands out logits in float32, whatever the model computes in.
HANDED_OUT = torch.finfo(torch.float32).eps


class Tool(NamedTuple):
    """Something that wraps, rewrites or bypasses the modules of a model.

    Attributes:
        name: as the table has it.
        check: gives the number that proves it right: an error relative to an independent computation.
        tolerance: the number is at most that.
        number: what it is, for the table.
        needs: a module, or a name in one, that not every installation has.
    """

    name: str
    check: Callable[[Case], float]
    tolerance: float
    number: str
    needs: str | None = None

    @property
    def missing(self) -> str | None:
        """Why the tool cannot be run here, or None."""
        try:
            if self.needs:
                pkgutil.resolve_name(self.needs)
        except (ImportError, AttributeError):
            return f"{self.needs} is not installed"
        return None


class Outcome(NamedTuple):
    """Either the number that proves a tool right, or the sentence that refuses."""

    number: float | None
    refusal: str | None


def outcome(tool: Tool, case: Case) -> Outcome:
    """Run a tool; any exception that is not for the person is an error of the test."""
    try:
        return Outcome(float(tool.check(case)), None)
    except (LeanError, ValueError) as error:
        refusal = re.sub(rf"{re.escape(gettempdir())}/\S*/", "", str(error))  # of a temporary directory
        return Outcome(None, re.sub(r"`(\w+)(?:=(\S+))?`", _option, refusal))


def _option(parameter: re.Match[str]) -> str:
    """Return a parameter that the library names as the option of the command line."""
    name, value = parameter[1].replace("_", "-"), parameter[2]
    return f"--{name} {value}" if value else f"--{name}"


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest expected entry."""
    assert found.shape == expected.shape
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


@torch.no_grad()
def full_pass(model: Any, ids: Tensor, length: int, **given: Any) -> Tensor:
    """Greedy continuations without a cache: logits [batch, length, vocab_size] of the new tokens, each from a pass over
    everything before it. Of a model with prefixes, `ids` are the prefix."""
    logits, prompt = [], ids.shape[1]
    for _ in range(length):
        if model.config.mask_type == "prefix":
            given["prefix_mask"] = (torch.arange(ids.shape[1]) < prompt).long().expand(len(ids), -1)
        logits.append(model(input_ids=ids, use_cache=False, **given).logits[:, -1])
        ids = torch.cat((ids, logits[-1].argmax(-1, keepdim=True)), dim=1)
    return torch.stack(logits, dim=1)
