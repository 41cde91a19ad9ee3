"""Token ids to logits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .attention import attention
from .basic import Tensors, block_norm
from .connections import connected
from .feedforward import mixture, mlp
from .latent import latent_attention
from .memory import Memory


def attend(x: Tensor, tensors: Tensors, config: Any, layer: int, name: str, memory: Memory) -> Tensor:
    kind = attention if config.kv_lora_rank is None else latent_attention
    return kind(x, tensors, config, layer, f"{name}.self_attn", memory)


def feed(x: Tensor, tensors: Tensors, config: Any, name: str, memory: Memory) -> Tensor:
    if config.mlp_type == "moe":
        y, routed = mixture(x, tensors, config, f"{name}.mlp")
        memory.routed += routed
        return y
    y, memory.hidden = mlp(x, tensors, config, f"{name}.mlp")
    return y


def block(x: Any, tensors: Tensors, config: Any, layer: int, memory: Memory) -> Any:
    """Serial: Y = X + Attn(norm_1(X)), Z = Y + MLP(norm_2(Y)). Parallel: Z = X + Attn(norm_1(X)) + MLP(norm_2(X)),
    or one norm for both. X, or Y, is added only where the block has that skip. With G groups (ALBERT) every L / G
    layers in a row are one block, that of their group; in turns (TRM) every G-th layer is. Norms "after":
    Y = X + norm_3(Attn(X)), and norm_4 of the MLP; "both": all four. What is added to X, or Y, is multiplied by the
    residual multiplier. With hyper-connections X is a list of streams, and they stand in the place of the skips."""
    groups = config.num_hidden_groups or config.num_hidden_layers
    number = layer % groups if config.group_order == "turns" else layer * groups // config.num_hidden_layers
    name = f"model.layers.{number}"
    before, after = config.norm_placement != "after", config.norm_placement != "before"

    def attention_part(x: Tensor) -> Tensor:
        normed = block_norm(x, tensors, config, f"{name}.input_layernorm") if before else x
        y = attend(normed, tensors, config, layer, name, memory)
        y = block_norm(y, tensors, config, f"{name}.attention_output_layernorm") if after else y
        return config.residual_multiplier * y

    def mlp_part(y: Tensor) -> Tensor:
        norm = "input_layernorm" if config.block_type == "parallel_shared_norm" else "post_attention_layernorm"
        normed = block_norm(y, tensors, config, f"{name}.{norm}") if before else y
        z = feed(normed, tensors, config, name, memory)
        z = block_norm(z, tensors, config, f"{name}.mlp_output_layernorm") if after else z
        return config.residual_multiplier * z

    def joined(x: Any, part: Callable[[Tensor], Tensor], skip: bool, connection: str) -> Any:
        if isinstance(x, list):
            return connected(x, part, tensors, config, f"{name}.{connection}")
        return x + part(x) if skip else part(x)

    if config.block_type == "serial":
        y = joined(x, attention_part, config.attention_skip, "attention_connection")
        return joined(y, mlp_part, config.mlp_skip, "mlp_connection")
    return joined(x, lambda x: attention_part(x) + mlp_part(x), config.mlp_skip, "attention_connection")


def depth_average(outputs: list[Tensor], tensors: Tensors, layer: int, dilation: int = 1, period: int = 1) -> Tensor:
    """DenseFormer: after block i, counted from 1, where the period divides i, the sum over j = i, i - k, i - 2k, ...
    (not below 0) of alpha_j X_j; X_0 is the embedding, X_j the output of block j. Elsewhere X_i."""
    i = layer + 1
    if i % period:
        return outputs[i]
    depths = [j for j in range(i + 1) if (i - j) % dilation == 0]
    alphas = tensors[f"model.depth_averages.{layer}.weight"]
    return sum(alpha * outputs[j] for alpha, j in zip(alphas, depths, strict=True))


def layers(x: Tensor, tensors: Tensors, config: Any, prefix: list[int] | None = None) -> tuple[Tensor, Memory]:
    """Every block and the final norm over the embedded tokens of one sequence: [positions, hidden]"""
    memory, outputs = Memory(prefix), [x]
    if config.hyper_connections is not None:
        x = [x] * config.hyper_connections.get("streams", 4)
    for layer in range(config.num_hidden_layers):
        x = block(x, tensors, config, layer, memory)
        outputs.append(x)
        if config.depth_average is not None:
            x = depth_average(outputs, tensors, layer, **config.depth_average)
    if isinstance(x, list):
        x = sum(x) / len(x)
    return block_norm(x, tensors, config, "model.norm"), memory


def sequence(tensors: Tensors, config: Any, ids: list[int], prefix: list[int] | None = None) -> tuple[Tensor, Memory]:
    """One sequence through embedding, blocks, final norm and head: logits [positions, vocabulary]"""
    embedding = tensors["model.embed_tokens.weight"]
    x = torch.stack([config.embedding_multiplier * embedding[i] for i in ids])
    if config.position_embedding_type == "learned":
        x = x + torch.stack([tensors["model.embed_positions.weight"][p] for p in range(len(ids))])
    x, memory = layers(x, tensors, config, prefix)
    head = embedding if config.tie_word_embeddings else tensors["lm_head.weight"]
    return x @ head.T / config.logits_scaling, memory


def logits(tensors: Tensors, config: Any, ids: Tensor, prefix: Tensor | None = None) -> Tensor:
    """[batch, positions, vocabulary] for token ids and, with a prefix mask, 1 in the prefix: [batch, positions]"""
    prefixes = [None] * len(ids) if prefix is None else prefix.tolist()
    rows = zip(ids.tolist(), prefixes, strict=True)
    return torch.stack([sequence(tensors, config, row, row_prefix)[0] for row, row_prefix in rows])
