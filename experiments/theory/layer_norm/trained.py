"""Weights and activations of a trained checkpoint, in float64."""

from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from leanqkv.checkpoints.open import load_model, open_causal_lm
from leanqkv.checkpoints.tokenizer import load_tokenizer
from leanqkv.data.corpus import open_corpus
from leanqkv.errors import LeanError
from leanqkv.model.shapes import parameter_shapes

FLOAT = torch.float64
EVERY = 40  # one document in this many of the standard library's source, for variety


class NormInput(NamedTuple):
    """What enters a layer's first norm and what follows it.

    stream: [tokens, d]; theta: `W_Q` as it acts on columns, [d, d]; weight: of the norm, [d].
    """

    stream: Tensor
    theta: Tensor
    weight: Tensor


def norm_inputs(directory: Path, tokens: int, context: int) -> tuple[str, float, list[NormInput]]:
    """Return the kind of norm, its epsilon and per layer the `NormInput`, on the standard library's source.

    Raises:
        LeanError: no such checkpoint, no tokenizer; a model without a linear, square W_Q in every layer, or whose norm
            is neither LayerNorm nor RMSNorm.
    """
    opened = open_causal_lm(directory)
    config, shapes = opened.config, parameter_shapes(opened.config)
    d = config.hidden_size
    if config.norm_type not in ("layernorm", "rmsnorm"):
        raise LeanError(f"{directory} has the norm {config.norm_type!r}; layernorm or rmsnorm is needed")
    if config.norm_placement == "after":
        raise LeanError(f"{directory} has norm_placement 'after'; norms before the sublayers are needed")
    for layer in range(config.num_hidden_layers):
        shape = shapes.get(f"model.layers.{layer}.self_attn.q_proj.weight")
        if shape is None or tuple(shape) != (d, d):
            raise LeanError(f"layer {layer} of {directory} has no square W_Q, the change of basis that is checked")
    tokenizer = load_tokenizer(directory)
    ids: list[int] = []
    for document in islice(open_corpus(None).documents(), 0, None, EVERY):
        ids += tokenizer.encode(document, add_special_tokens=False)
        if len(ids) >= tokens:
            break
    model = load_model(opened, torch.float32)
    model.to(FLOAT)
    streams: list[Tensor] = []
    for block in model.model.layers:
        block.input_layernorm.register_forward_pre_hook(lambda _module, inputs: streams.append(inputs[0]))
    context = min(context, config.max_position_embeddings)
    with torch.no_grad():
        model(input_ids=torch.tensor(ids[:tokens]).unfold(0, context, context), use_cache=False)
    return (
        config.norm_type,
        config.norm_eps,
        [
            NormInput(
                stream.flatten(0, 1),
                block.self_attn.q_proj.weight.detach(),
                block.input_layernorm.weight.detach(),
            )
            for stream, block in zip(streams, model.model.layers, strict=True)
        ],
    )
