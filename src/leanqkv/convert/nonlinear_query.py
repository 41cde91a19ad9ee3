"""A nonlinear query on a pretrained model, starting exactly at what it computes.

Karbevski 2026 (P2), section 4, "Extensions": the linear query as the anchor, `Q = (2 X W_Q + f(X)) / 2`. The half of
the definition is made up for by doubling the anchor, which rounds nothing, and f starts at zero by the weight of its
last norm.
https://github.com/MarkoKarbevski/beyond_query_linearity
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..checkpoints.tensors import LazyTensors
from ..errors import LeanError
from ..model.config import LeanConfig
from ..model.shapes import parameter_shapes
from ..model.transformer import normal
from ..presets.edit import set_mechanisms
from .heads import Made
from .targets import NonlinearQueryOptions


def convert(config: LeanConfig, tensors: Mapping[str, Tensor], options: NonlinearQueryOptions) -> Made:
    """Return the same function with a bottleneck beside every linear query, whose two matrices are drawn from the seed,
    and the entries of the report.

    Raises:
        LeanError: a query that is not linear already.
    """
    for layer in config.plan.layers:
        if layer.query.kind != "linear":
            raise LeanError(f"the query of layer {layer.layer} is {layer.query.kind!r}; only linear ones are converted")
    spec = {"type": "nonlinear", "anchor": "linear"}
    new = set_mechanisms(config, "query", dict.fromkeys(range(config.num_hidden_layers), spec))
    shapes = parameter_shapes(new)

    def compute(name: str) -> Tensor:
        match name.partition(".q_proj.")[2]:
            case "":
                return tensors[name]
            case "anchor.weight" | "anchor.bias":
                return 2 * tensors[name.replace("anchor.", "")]
            case "norm_in.weight":
                return torch.ones(shapes[name])
            case "norm_out.weight":
                return torch.zeros(shapes[name])
            case _:
                return normal(shapes[name], config.initializer_range, options.seed, name)

    return new, LazyTensors(shapes, compute), {"seed": options.seed}
