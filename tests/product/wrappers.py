"""Tools that wrap modules or replace them: adapters, quantizers, hooks, checkpointing, compilers."""

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from shapes import tokens
from torch import Tensor, nn
from two_processes import two_process_step

from leanqkv import LeanForCausalLM
from leanqkv.compat import quiet_transformers
from product.generation import NEW, PROMPT, generated, prompt
from product.mechanisms import PAD, Case
from product.tools import FLOAT32, FLOAT64, HANDED_OUT, Tool, full_pass, relative_error


def batch(case: Case) -> dict[str, Tensor]:
    """Two sequences to train on, one of them padded on the left."""
    ids = tokens(2, 10)
    ids[0, :3] = PAD
    mask = (ids != PAD).long()
    given = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if case.config().mask_type == "prefix":
        given["prefix_mask"] = mask * (torch.arange(10) < 5)
    return given


def loss(model: Any, given: dict[str, Tensor]) -> Tensor:
    """In the precision of the logits; the model's own loss is in float32."""
    labels = given["labels"][:, 1:]
    logits = model(**{name: tensor for name, tensor in given.items() if name != "labels"}).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())


def gradients(model: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    loss(model, given).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of all tensors, relative to the largest entry of any."""
    assert found.keys() == expected.keys() and found
    scale = max(tensor.abs().max() for tensor in expected.values())
    return float(max((found[name] - tensor).abs().max() for name, tensor in expected.items()) / scale)


# --- PEFT -------------------------------------------------------------------------------------------------------------


def adapted(case: Case) -> Any:
    """With random LoRA adapters on every linear layer but the head."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(target_modules="all-linear", r=3, lora_alpha=2, init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(case.model(), config).eval()


def lora_training(case: Case) -> float:
    """The slope of the loss along the adapters' gradient, against a central difference; none is left without one."""
    model, given, step = adapted(case), batch(case), 1e-5
    slopes = gradients(model, given)
    assert all("lora_" in name and slope.abs().max() > 0 for name, slope in slopes.items())
    assert len(slopes) == sum(p.requires_grad for p in model.parameters())
    norm = torch.stack([slope.norm() for slope in slopes.values()]).norm()
    losses = []
    with torch.no_grad():
        for sign in (1, -2):
            for name, p in model.named_parameters():
                if name in slopes:
                    p += sign * step * slopes[name] / norm
            losses.append(loss(model, given))
    return float(abs((losses[0] - losses[1]) / (2 * step) / norm - 1))


def lora_cached(case: Case) -> float:
    model, given = adapted(case), prompt()
    return relative_error(generated(model, **given), full_pass(model, given["input_ids"], NEW))


def lora_merged(case: Case) -> float:
    model, ids = adapted(case), tokens(2, PROMPT)
    with torch.no_grad():
        plain, expected = case.model()(ids).logits, model(ids).logits
        assert relative_error(expected, plain) > 0.01, "the adapters do nothing"
        return relative_error(model.merge_and_unload()(ids).logits, expected)


# --- quantizers -------------------------------------------------------------------------------------------------------


def quantized_weights(case: Case, quantization: Any, weight_of: Callable[[nn.Module], Tensor | None]) -> float:
    """Cached logits of a model with quantized weights, against full passes of one with the weights that they stand for.

    weight_of: the weight of a quantized module, None of others.
    """
    model = case.model(std=0.2).float()
    with tempfile.TemporaryDirectory() as directory, quiet_transformers():
        model.save_pretrained(directory)
        quantized = LeanForCausalLM.from_pretrained(directory, quantization_config=quantization)
    linear = {name for name, module in model.named_modules() if type(module) is nn.Linear} - {"lm_head"}
    seen = set()
    with torch.no_grad():
        for name, module in quantized.named_modules():
            if (weight := weight_of(module)) is not None:
                plain = model.get_submodule(name).weight
                assert 0 < (lost := relative_error(weight, plain)) < 0.2, (name, lost)
                plain.copy_(weight)
                seen.add(name)
    assert seen >= linear, f"not quantized: {linear - seen}"
    given = prompt()
    return relative_error(generated(quantized, **given), full_pass(model, given["input_ids"], NEW))


def quanto(case: Case) -> float:
    from optimum.quanto import QLinear
    from transformers import QuantoConfig

    return quantized_weights(
        case, QuantoConfig(weights="int8"), lambda m: m.weight.dequantize() if isinstance(m, QLinear) else None
    )


def torchao(case: Case) -> float:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    def weight_of(module: nn.Module) -> Tensor | None:
        is_quantized = isinstance(module, nn.Linear) and type(module.weight.data) is not Tensor
        return module.weight.dequantize() if is_quantized else None

    return quantized_weights(case, TorchAoConfig(Int8WeightOnlyConfig()), weight_of)


def dynamic_int8(case: Case) -> float:
    """The inputs of every linear layer are rounded too, per call: no equal computation exists, so how much is lost."""
    model, given = case.model(std=0.1).float(), prompt()
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    assert any(isinstance(module, torch.ao.nn.quantized.dynamic.Linear) for module in quantized.modules())
    found, expected = generated(quantized, **given), full_pass(model, given["input_ids"], NEW)
    return float((found[:, 0] - expected[:, 0]).square().mean().sqrt() / expected[:, 0].square().mean().sqrt())


# --- hooks, checkpointing, compilers ----------------------------------------------------------------------------------


def hooks(case: Case) -> float:
    """Hooks that change the output of every linear layer, with and without a cache."""
    model, given = case.model(), prompt()
    plain = full_pass(model, given["input_ids"], NEW)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, inputs, output: 1.1 * output)
    expected = full_pass(model, given["input_ids"], NEW)
    assert relative_error(expected, plain) > 0.01
    return relative_error(generated(model, **given), expected)


def offloaded(case: Case) -> float:
    """accelerate brings every module's weights from memory for the time of its call."""
    from accelerate import cpu_offload

    model, given = case.model(), prompt()
    expected = full_pass(model, given["input_ids"], NEW)
    cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    return relative_error(generated(model, **given), expected)


def checkpointed(case: Case, use_reentrant: bool) -> float:
    plain, model = case.model().train(), case.model().train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    return largest_error(gradients(model, batch(case)), gradients(plain, batch(case)))


def reentrant(case: Case) -> float:
    return checkpointed(case, use_reentrant=True)


def non_reentrant(case: Case) -> float:
    return checkpointed(case, use_reentrant=False)


def compiled(case: Case) -> float:
    """Traced in one piece, experts in several, and run without Inductor, which takes seconds a model."""
    plain, model = case.model().train(), case.model().train()
    torch.compiler.reset()
    model.compile(backend="eager", fullgraph=model._can_compile_fullgraph)
    return largest_error(gradients(model, batch(case)), gradients(plain, batch(case)))


def two_processes(case: Case) -> float:
    return two_process_step(case.config())


AGAINST_ROUNDED = "cached logits against a model of the rounded weights"
TOOLS = [
    Tool("LoRA on `all-linear`, training", lora_training, 1e-6, "slope of the loss against differences", "peft"),
    Tool("LoRA, decoding", lora_cached, HANDED_OUT, "cached logits against full passes", "peft"),
    Tool("LoRA, `merge_and_unload`", lora_merged, FLOAT64, "logits against the adapters'", "peft"),
    Tool("int8 weights (quanto)", quanto, FLOAT32, AGAINST_ROUNDED, "optimum.quanto"),
    Tool("int8 weights (torchao)", torchao, FLOAT32, AGAINST_ROUNDED, "torchao"),
    Tool("dynamic int8 (torch.ao)", dynamic_int8, 0.1, "RMS error of logits"),
    Tool("forward hooks", hooks, HANDED_OUT, "cached logits against full passes"),
    Tool("CPU offload (accelerate)", offloaded, HANDED_OUT, "cached logits against full passes"),
    Tool("checkpointing, non-reentrant", non_reentrant, FLOAT64, "gradients against none"),
    Tool("checkpointing, reentrant", reentrant, FLOAT64, "gradients against none"),
    Tool("DDP, two processes", two_processes, FLOAT64, "gradients against one process"),
    Tool("`torch.compile`", compiled, FLOAT64, "gradients against eager"),
]
