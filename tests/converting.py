"""Models as a configuration and float64 tensors, before and after a conversion, and what it must compute."""

from collections.abc import Mapping, Sequence

import torch
from shapes import randomize, tiny, tokens
from torch import Tensor

from leanqkv import LeanConfig, LeanForCausalLM
from leanqkv.convert import methods, nonlinear_query
from leanqkv.convert.calibrated import calibrated
from leanqkv.convert.heads import ValueHeads
from leanqkv.convert.methods import FUNCTIONS
from leanqkv.convert.targets import NonlinearQueryOptions, SkipV1Options
from leanqkv.model.shapes import parameter_shapes

CONVERSIONS = ("nonlinear-query", *FUNCTIONS, "calibrated")
# Of `conversion_error`: the calibrated method computes in float32 and solves least squares.
TOLERANCES = dict.fromkeys(CONVERSIONS, 1e-12) | {"calibrated": 1e3 * torch.finfo(torch.float32).eps}

BIASES = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True, "norm_bias": True}


def source(shape: str, *mechanisms: str, **fields) -> tuple[LeanConfig, dict[str, Tensor]]:
    config = tiny(shape, *mechanisms, **fields)
    model = randomize(LeanForCausalLM(config).double(), std=0.2)
    return config, {name: parameter.detach() for name, parameter in model.named_parameters()}


def build(config: LeanConfig, tensors) -> LeanForCausalLM:
    model = LeanForCausalLM(config).double()
    state = {name: tensors[name].double() for name in parameter_shapes(config)}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model.eval()


@torch.no_grad()
def logits(config: LeanConfig, tensors, ids: Tensor) -> Tensor:
    return build(config, tensors)(ids).logits


def with_idle_heads(
    config: LeanConfig, tensors: Mapping[str, Tensor], idle: Mapping[int, Sequence[int]]
) -> dict[str, Tensor]:
    """The same model with W_V, its bias and W_O zero for value heads `idle[layer]`: replacing them loses nothing."""
    result = {name: tensor.clone() for name, tensor in tensors.items()}
    width = config.head_dim
    columns = width * config.num_attention_heads // config.num_key_value_heads
    for layer, heads in idle.items():
        for head in heads:
            for name in ("v_proj.weight", "v_proj.bias"):
                if (value := result.get(f"model.layers.{layer}.self_attn.{name}")) is not None:
                    value[head * width : (head + 1) * width] = 0
            if (output := result.get(f"model.layers.{layer}.self_attn.o_proj.weight")) is not None:
                output[:, head * columns : (head + 1) * columns] = 0
    return result


def split_by_hand(config: LeanConfig, tensors: Mapping[str, Tensor], layer: int) -> ValueHeads:
    attention, n, width = f"model.layers.{layer}.self_attn", config.num_key_value_heads, config.head_dim
    group = config.num_attention_heads // n
    value = torch.stack([tensors[f"{attention}.v_proj.weight"][h * width : (h + 1) * width] for h in range(n)])
    bias = tensors.get(f"{attention}.v_proj.bias")
    columns = tensors[f"{attention}.o_proj.weight"].split(width, dim=1)
    output = torch.stack([torch.stack(columns[h * group : (h + 1) * group]) for h in range(n)])
    return ValueHeads(value, None if bias is None else bias.view(n, width), output)


@torch.no_grad()
def swapped_by_hand(config: LeanConfig, tensors: Mapping[str, Tensor], method: str, ids: Tensor) -> Tensor:
    """Logits of the source with the values of `method` swapped in through hooks, and W_O replaced.

    Heads that change places take the rows of linear queries and keys with them.
    """
    n, width = config.num_key_value_heads, config.head_dim
    num_own, model, first = n - n // 2, build(config, tensors), {}
    for i, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        if i == 0:
            attention.v_proj.register_forward_hook(lambda m, x, y: first.update(values=y))
            continue
        heads = FUNCTIONS[method](split_by_hand(config, tensors, i), num_own)

        def swap(module, inputs, output, heads=heads):
            own = torch.einsum("btd,hkd->bthk", inputs[0], heads.value)
            if heads.value_bias is not None:
                own = own + heads.value_bias
            return torch.cat((own.flatten(2), first["values"][..., num_own * width :]), dim=-1)

        attention.v_proj.register_forward_hook(swap)
        attention.o_proj.weight.copy_(heads.output.permute(2, 0, 1, 3).flatten(1))
        if heads.order != tuple(range(n)):
            for parameter in (*attention.q_proj.parameters(), *attention.k_proj.parameters()):
                parameter.copy_(parameter.detach().unflatten(0, (n, -1))[list(heads.order)].flatten(0, 1))
    return model(ids).logits


@torch.no_grad()
def missed_by_hand(before: LeanForCausalLM, after: LeanForCausalLM, ids: Tensor) -> list[float]:
    """The share of every layer's attention that the converted model misses, as the calibrated method reports it."""
    streams, attended = ({model: {} for model in (before, after)} for _ in range(2))
    for model in (before, after):
        for i, layer in enumerate(model.model.layers):
            layer.register_forward_pre_hook(lambda m, x, i=i, of=streams[model]: of.update({i: x[0]}))
            layer.self_attn.register_forward_hook(lambda m, x, y, i=i, of=attended[model]: of.update({i: y[0]}))
        model(ids)
    missed = []
    for i, target in attended[before].items():
        if before.config.attention_skip and before.config.norm_placement == "before":
            target = target + (streams[before][i] - streams[after][i]) / before.config.residual_multiplier
        missed.append(float((target - attended[after][i]).square().sum() / target.square().sum()))
    return missed


def conversion_error(config: LeanConfig, tensors: Mapping[str, Tensor], conversion: str) -> float:
    """How far the logits after `conversion` are from what they must be, over the largest; at most its TOLERANCES.

    A nonlinear query changes nothing. Top-vo and the calibrated method change nothing where the heads that they replace
    are idle; and where they are not, what the latter reports as missed is missed. The other methods are compared with
    values swapped by hand.

    Raises:
        LeanError: the source is refused.
    """
    ids, n, reports = tokens(2, 20, config.vocab_size), config.num_key_value_heads, []
    idle = {layer: range(n // 2) for layer in range(1, config.num_hidden_layers)}
    if conversion == "nonlinear-query":
        result = nonlinear_query.convert(config, tensors, NonlinearQueryOptions())[:2]
        expected = logits(config, tensors, ids)
    elif conversion == "calibrated":
        sample, settings = tokens(16, 24, config.vocab_size, seed=5).numpy(), SkipV1Options(ridge=1e-9, sweeps=1)
        new, converted, report = calibrated(config, tensors, sample, settings)
        missed = missed_by_hand(build(config, tensors), build(new, converted), torch.from_numpy(sample))
        reports = [(at["missed"], missed[at["layer"]]) for at in report["layers"]]
        # Where heads are tied to their places, the last ones are replaced.
        idle |= {at["layer"]: range(n - n // 2, n) for at in report["layers"] if "tied_by" in at}
        tensors = with_idle_heads(config, tensors, idle)
        result = calibrated(config, tensors, sample, settings)[:2]
        expected = logits(config, tensors, ids)
    elif conversion == "top-vo":
        tensors = with_idle_heads(config, tensors, idle)
        result = methods.convert(config, tensors, SkipV1Options(conversion))[:2]
        expected = logits(config, tensors, ids)
    else:
        result = methods.convert(config, tensors, SkipV1Options(conversion))[:2]
        expected = swapped_by_hand(config, tensors, conversion, ids)
    wrong = float((logits(*result, ids) - expected).abs().max() / expected.abs().max())
    return max([wrong, *(abs(reported - found) for reported, found in reports)])
