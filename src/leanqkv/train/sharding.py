"""Sharded training: FSDP2 around each block, by the arguments of transformers' Trainer."""

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import PreTrainedModel

from .processes import is_first
from .tasks import task_of


def sharding_arguments() -> dict[str, Any]:
    """Return Trainer's arguments: a unit is a block, and each process writes its own part of a checkpoint."""
    config = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LeanBlock"],
        "reshard_after_forward": True,
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    return {"fsdp": True, "fsdp_config": config}


def whole_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return a sharded model with all of its weights, on the CPU; all processes call this, and the first gets them."""
    config: Any = model.config
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    with torch.device("meta"):
        whole = task_of(config).model_class(config)
    if is_first():
        whole.load_state_dict(weights, strict=False, assign=True)
        whole.tie_weights()
        if missing := [name for name, weight in whole.named_parameters() if weight.is_meta]:
            raise RuntimeError(f"the processes have no weight {missing[0]}")
    return whole
