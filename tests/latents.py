"""Attention over a latent: its two forms are one function, and neither passes over what tools change."""

from typing import Any

import torch
from shapes import assert_near, tokens
from torch import Tensor, nn
from transformers import DynamicCache

from leanqkv import LeanForCausalLM


def results(model: LeanForCausalLM) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logits, those with a filled cache, attention weights if there are any, and gradients; a row is padded."""
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 3] = -100  # predicted at a padded position
    model.zero_grad()
    weighted = model.config._attn_implementation == "eager"
    output = model(input_ids=ids, attention_mask=mask, labels=labels, output_attentions=weighted)
    output.loss.backward()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        pieces = [
            model(input_ids=ids[:, a:b], attention_mask=mask[:, :b], past_key_values=cache).logits
            for a, b in ((0, 5), (5, 8), (8, 9))
        ]
    weights = [torch.stack(output.attentions)[:, 1].detach()] if weighted else []
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return [output.logits.detach()[1], torch.cat(pieces, dim=1)[1], *weights], gradients


def assert_same_results(found: tuple, expected: tuple) -> None:
    for one, other in zip(found[0], expected[0], strict=True):
        assert_near(one, other, 1e-11, floor=1e-12)
    floor = 1e-4 * max(gradient.abs().max().item() for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        assert_near(found[1][name], gradient, 1e-11, name, floor)


class Larger(nn.Module):
    """What adapter libraries put in a layer's place."""

    def __init__(self, base: Any):
        super().__init__()
        self.base, self.weight, self.out_features = base, base.weight, getattr(base, "out_features", None)

    def forward(self, latent: Tensor) -> Tensor:
        return 1.5 * self.base(latent)


CHANGES = ("adapter", "hook", "hook before", "forward", "parameter", "subclass")


def enlarge(attention: nn.Module, name: str, how: str) -> None:
    """Make the up-projection of this name give 1.5 times as much."""
    up = attention.get_submodule(name)
    forward = type(up).forward
    if how == "adapter":
        setattr(attention, name, Larger(up))
    elif how == "hook":
        up.register_forward_hook(lambda module, given, output: 1.5 * output)
    elif how == "hook before":
        up.register_forward_pre_hook(lambda module, given: (1.5 * given[0],))
    elif how == "forward":
        up.forward = lambda latent: 1.5 * forward(up, latent)
    elif how == "parameter":
        up.weight = type("Quantized", (nn.Parameter,), {})(1.5 * up.weight)
    else:
        up.__class__ = type("Rewritten", (type(up),), {"forward": lambda up, x: 1.5 * forward(up, x)})


@torch.no_grad()
def assert_enlarged(model: LeanForCausalLM, name: str, how: str) -> None:
    """The change acts, and in a decoding step as in a pass over everything."""
    ids = tokens(1, 12)
    plain = model(ids).logits[:, -1]
    for layer in model.model.layers:
        enlarge(layer.self_attn, name, how)
    whole = model(ids).logits[:, -1]
    step = model(ids[:, -1:], past_key_values=model(ids[:, :-1]).past_key_values).logits[:, -1]
    assert_near(step, whole, 1e-5)
    assert (whole - plain).abs().max() > 0.01
