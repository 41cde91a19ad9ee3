"""The losses of the built model against theirs, over full and padded batches: values and every gradient."""

from typing import Any

import pytest
import torch
from shapes import assert_near, tiny, tokens

from .loss import load_balancing, loss
from .test_oracle import build, exact_angles

TOLERANCE = 1e-5  # losses are taken in float32, as in transformers
PREFIX = {"mask_type": "prefix"}
BIDIRECTIONAL = {"mask_type": "bidirectional", "task": "masked_lm"}
EXPERTS = {"mlp_type": "moe", "num_local_experts": 4, "num_experts_per_tok": 2}
WHAT: list[dict[str, Any]] = [
    {},
    PREFIX,
    BIDIRECTIONAL,
    EXPERTS | {"router_aux_loss_coef": 0.5},
    EXPERTS | {"router_aux_loss_coef": 0.0},
    EXPERTS | {"router_aux_loss_coef": 2.0, "num_experts_per_tok": 1, "num_hidden_groups": 1, "block_type": "parallel"},
]
ENCODER_OF_EXPERTS = EXPERTS | {"router_aux_loss_coef": 0.5} | BIDIRECTIONAL


def test_load_balancing_of_even_and_of_full_routing() -> None:
    """Even probabilities and even routing: E * E * (1 / E * 1 / E) = 1; all to one expert, with certainty: E."""
    even = [(torch.full((4,), 0.25, dtype=torch.float64), [e]) for e in range(4)]
    assert abs(load_balancing(even, 4).item() - 1) < 1e-15
    full = [(torch.tensor([0, 1, 0, 0], dtype=torch.float64), [1])] * 3
    assert abs(load_balancing(full, 4).item() - 4) < 1e-15


@pytest.mark.parametrize("lengths", [(5, 5), (5, 3)], ids=["full", "padded"])
@pytest.mark.parametrize(
    "overrides", [*WHAT, ENCODER_OF_EXPERTS], ids=lambda overrides: "+".join(f"{k}={v}" for k, v in overrides.items())
)
@pytest.mark.parametrize("shape", ["gpt", "llama"])
def test_loss_is_its_equation(
    shape: str, overrides: dict[str, Any], lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(shape, **overrides)
    model = build(config)
    if config.position_embedding_type == "rope":
        exact_angles(model, monkeypatch)
    ids, mask = tokens(2, 5), torch.ones(2, 5, dtype=torch.long)
    labels = tokens(2, 5, seed=1) if config.task == "masked_lm" else ids.clone()
    labels[0, 3] = -100
    for row, length in enumerate(lengths):
        ids[row, length:], labels[row, length:], mask[row, length:] = 0, -100, 0
    inputs: dict[str, Any] = {"input_ids": ids, "labels": labels, "output_router_logits": True}
    if lengths != (5, 5):
        inputs["attention_mask"] = mask
    prefixes = [None, None]
    if config.mask_type == "prefix":
        inputs["prefix_mask"] = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])
        prefixes = inputs["prefix_mask"].tolist()
    tensors = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    real_ids, real_labels = (
        [row[:length] for row, length in zip(x.tolist(), lengths, strict=True)] for x in (ids, labels)
    )
    expected = loss(tensors, config, real_ids, real_labels, prefixes)
    expected_gradients = torch.autograd.grad(expected, list(tensors.values()))
    floor = 1e-4 * max(gradient.abs().max().item() for gradient in expected_gradients)
    for backend in ("eager", "sdpa"):
        model.set_attn_implementation(backend)
        found = model(**inputs).loss
        assert_near(found, expected, TOLERANCE, f"{backend} loss")
        gradients = torch.autograd.grad(found, list(model.parameters()))
        for name, gradient, expected_gradient in zip(tensors, gradients, expected_gradients, strict=True):
            assert_near(gradient, expected_gradient, TOLERANCE, f"{backend} gradient of {name}", floor)
