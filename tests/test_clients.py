"""Clients of transformers' interfaces, with the package and with the code that travels with a checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shapes import assert_near, randomize, tiny, tokens
from transformers import Trainer, TrainingArguments
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from leanqkv import LeanForCausalLM

IDS = tokens(2, 9)
EXPERTS = {"mlp_type": "moe", "num_local_experts": 3, "router_aux_loss_coef": 0.5}


def build(*mechanisms: str, **fields: Any) -> Any:
    model = randomize(LeanForCausalLM(tiny("llama", *mechanisms, **fields)), std=0.2).eval()
    model.generation_config.pad_token_id = 0
    return model


def own(folder: Path) -> Any:
    return LeanForCausalLM.from_pretrained(folder)


def traveling(folder: Path) -> Any:
    """With the code in the folder alone: as in a process without the package."""
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.pop("leanqkv")
    cls = get_class_from_dynamic_module("causal_lm.LeanForCausalLM", folder)
    assert cls is not LeanForCausalLM
    return cls.from_pretrained(folder)


both = pytest.mark.parametrize("load", [own, traveling], ids=lambda load: load.__name__)


def saved(model: Any, folder: Path, load: Callable[[Path], Any]) -> Any:
    model.save_pretrained(folder)
    loaded = load(folder).eval()
    loaded.generation_config.pad_token_id = 0
    return loaded


def trainer(model: Any, folder: Path, **arguments: Any) -> Trainer:
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    given = TrainingArguments(str(folder / "run"), use_cpu=True, report_to="none", **arguments)
    return Trainer(model, given, train_dataset=rows, eval_dataset=rows)


# --- Trainer and TRL --------------------------------------------------------------------------------------------------


@both
def test_attributes_that_tools_set_on_a_configuration_are_kept(load, tmp_path: Path, caplog) -> None:
    model = build()
    model.config.output_router_logits = True
    setattr(model.config, f"note_of_{load.__name__}", [1, 2])
    loaded = saved(model, tmp_path, load)
    assert "is kept and changes nothing" in caplog.text
    assert loaded.config.output_router_logits is True
    assert getattr(loaded.config, f"note_of_{load.__name__}") == [1, 2]
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@both
def test_smoothed_labels_are_those_of_the_next_tokens(load, tmp_path: Path) -> None:
    """(1 - e) of the cross-entropy, e of its mean over all tokens of the vocabulary."""
    model = saved(build(), tmp_path, load)
    found = trainer(model, tmp_path, label_smoothing_factor=0.1).compute_loss(model, {"input_ids": IDS, "labels": IDS})
    logs = model(IDS).logits.log_softmax(-1)
    losses = [
        -0.9 * logs[row, place, IDS[row, place + 1]] - 0.1 * logs[row, place].mean()
        for row in range(2)
        for place in range(8)
    ]
    assert_near(found, torch.stack(losses).mean(), 1e-5)


@both
def test_experts_are_balanced_where_router_logits_are_asked_for(load, tmp_path: Path) -> None:
    """Without, `Trainer.predict` finds the logits behind the loss."""
    model = saved(build(**EXPERTS), tmp_path, load)
    plain = model(IDS, labels=IDS)
    assert list(plain) == ["loss", "logits", "past_key_values"]
    entropy = torch.nn.functional.cross_entropy(plain.logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    assert_near(plain.loss, entropy, 1e-5)
    predicted = trainer(model, tmp_path).predict(trainer(model, tmp_path).eval_dataset)
    assert_near(torch.from_numpy(predicted.predictions), plain.logits, 1e-5)

    model.config.output_router_logits = True  # as TRL does
    full = model(IDS, labels=IDS)
    assert list(full)[:3] == ["loss", "aux_loss", "logits"] and len(full.router_logits) == 3
    assert full.aux_loss >= 1
    assert_near(full.loss, entropy + 0.5 * full.aux_loss, 1e-5)
    assert_near(model(IDS).aux_loss, full.aux_loss, 1e-6)
    assert model(IDS, labels=IDS, output_router_logits=False).loss == plain.loss
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    model.generate(IDS, attention_mask=mask, max_new_tokens=3)
