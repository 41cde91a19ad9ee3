"""Models as a configuration and float64 tensors, before and after a conversion."""

import torch
from shapes import randomize, tiny
from torch import Tensor

from leanqkv import LeanConfig, LeanForCausalLM

BIASES = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True, "norm_bias": True}


def source(shape: str, *mechanisms: str, **fields) -> tuple[LeanConfig, dict[str, Tensor]]:
    config = tiny(shape, *mechanisms, **fields)
    model = randomize(LeanForCausalLM(config).double(), std=0.2)
    return config, {name: parameter.detach() for name, parameter in model.named_parameters()}


def build(config: LeanConfig, tensors) -> LeanForCausalLM:
    model = LeanForCausalLM(config).double()
    state = {name: tensors[name].double() for name in config.plan.parameter_shapes}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model.eval()


@torch.no_grad()
def logits(config: LeanConfig, tensors, ids: Tensor) -> Tensor:
    return build(config, tensors)(ids).logits
