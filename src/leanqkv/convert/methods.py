"""Conversions to first-layer values from the weights alone: the five methods of Wu et al. 2025 (P3).

Section 5.1 and appendix B.1, https://github.com/Zhoutong-Wu/SkipV1Former. A method takes the heads of a layer beyond
the first and how many of them keep a value of their own: the first ones. The others take the first layer's values.
The paper leaves open what happens to queries, keys and columns of W_O; each docstring states our reading.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.tensors import LazyTensors
from ..errors import LeanError
from ..model.config import LeanConfig
from ..model.shapes import parameter_shapes
from .calibrated import calibrated, calibrated_target
from .heads import ConvertedHeads, ValueHeads, assemble_tensors, immovable, pools, split_heads, target_config
from .targets import CALIBRATED, METHODS, SkipV1Options

Method = Callable[[ValueHeads, int], ConvertedHeads]


def mean_v(heads: ValueHeads, num_own: int) -> ConvertedHeads:
    """Pool W_V: head j gets the mean of heads 2j and 2j + 1, everything else stays.

    The paper's own method: "a mean pool across every two head projections in layers beyond the first".
    """
    bias = None if heads.value_bias is None else pool(heads.value_bias, num_own)
    return ConvertedHeads(pool(heads.value, num_own), bias, heads.output, tuple(range(len(heads.value))))


def mean_vo(heads: ValueHeads, num_own: int) -> ConvertedHeads:
    """Pool W_V as `mean_v` and the columns of W_O alike; the columns for the first layer's values are zero."""
    output = torch.cat((pool(heads.output, num_own), torch.zeros_like(heads.output[num_own:])))
    return replace(mean_v(heads, num_own), output=output)


def top_v(heads: ValueHeads, num_own: int) -> ConvertedHeads:
    """Keep the W_V heads of largest norm, everything else stays.

    "Select the H' rows with the largest norm of head projections W_V to be the new head projections". The j-th of them
    moves to place j, with that place's queries, key and columns of W_O.
    """
    largest = _largest(heads.value.flatten(1).norm(dim=1), num_own)
    bias = None if heads.value_bias is None else heads.value_bias[largest]
    return ConvertedHeads(heads.value[largest], bias, heads.output, tuple(range(len(heads.value))))


def top_vo(heads: ValueHeads, num_own: int) -> ConvertedHeads:
    """Keep the heads whose W_V and W_O are largest, with their columns of W_O; the other columns are zero.

    "Select the H' head projections in W_V and the H' output columns in W_O with the highest norms". In the reading
    kindest to the method, both belong to one head, ranked by the product of its norms, with its own queries and key.
    """
    norms = heads.value.flatten(1).norm(dim=1) * heads.output.flatten(1).norm(dim=1)
    largest = _largest(norms, num_own)
    bias = None if heads.value_bias is None else heads.value_bias[largest]
    output = torch.cat((heads.output[largest], torch.zeros_like(heads.output[num_own:])))
    others = (head for head in range(len(norms)) if head not in largest)
    return ConvertedHeads(heads.value[largest], bias, output, (*largest, *others))


def svd(heads: ValueHeads, num_own: int) -> ConvertedHeads:
    """Replace W_V W_O by its best approximation of the rank of `num_own` heads; the other columns of W_O are zero.

    "Construct a best H'-rank approximation to the original W_O W_V using SVD". The product is that of the whole
    matrices: heads are added up and their patterns do not count. Both factors share the singular values evenly. A value
    bias, which attention passes on unchanged, becomes the one that W_O maps nearest to the same output.
    """
    _, width, _ = heads.value.shape
    group = heads.output.shape[1]
    product = torch.einsum("hkd,hgok->do", heads.value, heads.output)
    left, sigma, right = torch.linalg.svd(product)
    rank = num_own * width
    root = sigma[:rank].sqrt()
    value = (left[:, :rank] * root).T.unflatten(0, (num_own, width))
    columns = (root[:, None] * right[:rank]).unflatten(0, (num_own, width)) / group  # [num_own, width, d]
    output = torch.zeros_like(heads.output)
    output[:num_own] = columns.transpose(1, 2)[:, None]
    bias = None
    if heads.value_bias is not None:
        contribution = torch.einsum("hk,hgok->o", heads.value_bias, heads.output)[:, None]
        solution = torch.linalg.lstsq((columns * group).flatten(0, 1).T, contribution, driver="gelsd").solution
        bias = solution.view(num_own, width)
    return ConvertedHeads(value, bias, output, tuple(range(len(heads.value))))


FUNCTIONS: dict[str, Method] = dict(zip(METHODS, (mean_v, mean_vo, top_v, top_vo, svd), strict=True))


def convert(config: LeanConfig, tensors: Mapping[str, Tensor], options: SkipV1Options) -> Any:
    """Return configuration and lazy tensors with every layer beyond the first converted by the method, and the entries
    of the report; calibrated, the function that calibrates and returns these.

    Raises:
        LeanError: the source cannot be converted, or the method moves heads that are tied to their places.
    """
    if options.method == CALIBRATED:
        calibrated_target(config, options.ratio)
        return partial(calibrated, config, tensors, settings=options)
    target, method = target_config(config, options.ratio), options.method
    if config.output_gate is not None and method not in ("mean-v", "top-v"):
        raise LeanError(
            "its heads are gated before W_O (output_gate), and this method moves columns of W_O away from their gates. "
            "Use mean-v or top-v"
        )
    if method == "top-vo":  # the one that moves heads
        for layer in target.plan.layers[1:]:
            if tie := immovable(layer):
                raise LeanError(
                    f"top-vo moves heads to other places, but the {tie} of layer {layer.layer} ties them to theirs. "
                    "Use mean-v, mean-vo, top-v or svd"
                )

    def converted(layer: int) -> ConvertedHeads | None:
        if not layer:
            return None
        return FUNCTIONS[method](split_heads(config, tensors, layer), target.plan.layers[layer].computed_value_heads)

    report: dict[str, Any] = {"method": method, "ratio": options.ratio}
    if method.startswith("mean"):
        report["pools"] = pools(config.num_key_value_heads, target.plan.layers[-1].computed_value_heads)
    return target, LazyTensors(parameter_shapes(target), assemble_tensors(config, tensors, converted)), report


def pool(tensor: Tensor, num_own: int) -> Tensor:
    """Return the means over the pools of heads, the first dimension."""
    return torch.stack([tensor[heads].mean(0) for heads in pools(len(tensor), num_own)])


def _largest(norms: Tensor, count: int) -> list[int]:
    """The places of the largest, in ascending order."""
    return sorted(norms.topk(count).indices.tolist())
