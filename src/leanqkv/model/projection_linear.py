"""Linear projection `X W` (+ b): the standard query, key and value.

Vaswani et al. 2017, https://arxiv.org/abs/1706.03762
"""

from dataclasses import dataclass

from torch import nn

# Where a module keeps what is registered to run when it does.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class LinearProjection:
    """`X W`, from `hidden_size` to `num_heads * head_dim`, with a bias where `config.attention_bias` says so."""

    @dataclass(frozen=True)
    class Options:
        pass

    @staticmethod
    def build(config, num_heads: int, options: Options) -> nn.Linear:
        """Return a plain nn.Linear: quantizers and adapters recognize one by its exact type."""
        return nn.Linear(config.hidden_size, num_heads * config.head_dim, bias=config.attention_bias)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether calling `module` computes `x weight^T (+ bias)` and nothing else, so that its weight may be read instead.

    False for adapters and quantized layers, which are of other types.
    """
    return type(module) is nn.Linear and not is_rewritten(module)


def is_rewritten(module: nn.Module) -> bool:
    """Whether other code changes what calling `module` computes; True if that is unknown.

    By hooks, by a replaced `forward` (accelerate's offloading), or by parameters of another tensor type (quantized
    weights).
    """
    if "forward" in vars(module) or any(getattr(module, name, True) for name in HOOKS):
        return True
    return any(type(parameter) is not nn.Parameter for parameter in module.parameters(recurse=False))
