"""Where tokens are, and which of them each query may see: rotary position embedding (RoPE), and masks.

Su et al. 2021, https://arxiv.org/abs/2104.09864
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

Rotation = tuple[Tensor, Tensor]  # cosines and sines, each [batch, positions, rotated dimensions]
# By the field of the configuration that has their parameters; behind HISTORY, those of a history, and behind BACK those
# that turn it back.
Rotations = dict[str, Rotation]
HISTORY, BACK = "history ", "back "


class RotaryEmbeddings(nn.ModuleDict):
    """The rotary embeddings that some layer of a plan has, by the field of the configuration with their parameters."""

    def __init__(self, config, plan):
        fields = dict.fromkeys(layer.rope for layer in plan.layers if layer.rope is not None)
        super().__init__({field: RotaryEmbedding(config, field) for field in fields})

    def forward(self, x: Tensor, position_ids: Tensor, history: Tensor | None = None) -> Rotations:
        """Cosines and sines of `position_ids`; with the positions of a `history`, those of it and what turns it back,
        too."""
        rotations = {field: embedding(x, position_ids) for field, embedding in self.items()}
        if history is not None:
            for field, rotation in self(x, history).items():
                rotations |= {f"{HISTORY}{field}": rotation, f"{BACK}{field}": turning_back(rotation)}
        return rotations


def rotation_of(layer, rotations: Rotations | None, what: str = "") -> Rotation | None:
    """That of a layer of the plan, of this call's positions, or HISTORY or BACK; None: there is none."""
    return None if layer.rope is None or rotations is None else rotations.get(f"{what}{layer.rope}")


def turning_back(rotation: Rotation) -> Rotation:
    """Return the inverse rotation, normalized by cos² + sin², which is not quite 1 after rounding and scaling."""
    cos, sin = (table.to(torch.promote_types(table.dtype, torch.float32)) for table in rotation)
    square = cos.square() + sin.square()
    return (cos / square).to(rotation[0].dtype), (-sin / square).to(rotation[0].dtype)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of the positions. The parameters in `field` select the variant, as in `transformers`."""

    def __init__(self, config, field: str = "rope_parameters"):
        super().__init__()
        # transformers' functions know one head_dim and one set of parameters.
        self.config: Any = PreTrainedConfig()
        sizes = {name: getattr(config, name) for name in ("hidden_size", "num_attention_heads")}
        sizes |= {"head_dim": config.rotary_head_dim, "max_position_embeddings": config.max_position_embeddings}
        self.config.__dict__ |= {**sizes, "rope_parameters": getattr(config, field)}
        self.rope_type = self.config.rope_parameters["rope_type"]
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        inv_freq, self.attention_scaling = self.frequencies()
        self.inv_freq: Tensor
        self.original_inv_freq: Tensor
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    def frequencies(self) -> tuple[Tensor, float]:
        """Inverse frequencies `theta^(-2i/n)`, i < n/2, for the n rotated dimensions of a head, and a factor on the
        result (1 except for scaled variants)."""
        if self.rope_type != "default":
            return ROPE_INIT_FUNCTIONS[self.rope_type](self.config, None)
        parameters = self.config.rope_parameters
        rotated = int(self.config.head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
        return 1.0 / parameters["rope_theta"] ** exponents, 1.0

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """`(cos, sin)` of shape [batch, positions, rotated dimensions] in the dtype of `x`; the first half of the sines
        is negated, as `rotate` needs it."""
        if self.rope_type == "dynamic":  # transformers would keep the frequencies of the longest sequence so far
            self.inv_freq, self.max_seq_len_cached = self.original_inv_freq, self.original_max_seq_len
        return self._tables(x, position_ids)

    @torch.no_grad()
    @dynamic_rope_update
    def _tables(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.float()
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return torch.cat((cos, cos), dim=-1).to(x.dtype), torch.cat((-sin, sin), dim=-1).to(x.dtype)


def check_history(config, past: int | Tensor, new: int) -> None:
    """Refuse to continue from `past` cached positions with other rotary frequencies: longrope has others for long
    sequences, "dynamic" for every length beyond the trained one.

    Raises:
        ValueError: the cached keys were turned by other frequencies.
    """
    if config.position_embedding_type != "rope" or (limit := config.cached_positions) is None:
        return
    ropes = [rope["rope_type"] for rope in (config.rope_parameters, config.window_rope_parameters) if rope]
    kind = "dynamic" if "dynamic" in ropes else "longrope"
    if past > 0 and limit < past + new and (kind == "dynamic" or past <= limit):
        raise ValueError(
            f"{kind} has other frequencies beyond {limit} positions, and {past} are cached already; generate fewer "
            "tokens, or with use_cache=False"
        )


def history_positions(position_ids: Tensor, attention_mask: Tensor | None, cache: Any, length: int) -> Tensor:
    """The rotary positions of a cache's tokens, [1 or batch, length], which no cache keeps.

    Tokens are counted on through the cache, or, as `generate` counts where prompts are padded, the real ones alone. In
    which of these ways all tokens so far were, is noted at the cache as `counted`.

    Args:
        position_ids: [1 or batch, positions], of the tokens behind those of the cache.
        attention_mask: [batch, past + positions], 1 for real tokens, or as transformers hands it out for all heads,
            [batch, 1, positions, length].

    Raises:
        ValueError: the tokens are counted in neither way; a RuntimeError where this is compiled.
    """
    past = cache.get_seq_length()
    slots = torch.arange(length, device=position_ids.device)[None]
    new = past + torch.arange(position_ids.shape[1], device=position_ids.device)
    by_slot = (position_ids == new).all()
    real = None if attention_mask is None else _real_tokens(attention_mask, length)
    if real is None:
        counted, by_mask = slots, by_slot
    else:
        counted = (real.cumsum(-1) - 1).clamp_min(0)
        by_mask = ((counted[:, new] == position_ids) | ~real[:, new]).all()
    # Slots still to come get the newest token's position, for "dynamic" and "longrope" go by the largest one.
    slots, counted = (positions.clamp(max=position_ids.max()) for positions in (slots, counted))
    needed = (
        "cached keys are turned when they are read, and so need position_ids that are counted on from the cache, or "
        "over the attention_mask's tokens"
    )
    if torch.compiler.is_compiling() or past > 0:
        earlier = getattr(cache, "counted", (True, True))
        by_slot, by_mask = by_slot & earlier[0], by_mask & earlier[1]
    if torch.compiler.is_compiling():
        torch._assert_async(by_slot | by_mask, needed)
        return torch.where(by_slot, slots, counted)
    cache.counted = by_slot, by_mask
    if by_slot or by_mask or length == position_ids.shape[1]:
        return slots if by_slot else counted
    raise ValueError(f"{needed}; found {position_ids[0, :4].tolist()} behind {int(past)} tokens")


def _real_tokens(mask: Tensor, length: int) -> Tensor:
    """Whether each of `length` tokens is a real one, [batch, length]; those still to come are."""
    if mask.dim() == 4:  # the last token attends to all real ones
        last = mask[:, 0, -1]
        real = last if last.dtype == torch.bool else last == 0
    else:
        real = mask.bool()
    return F.pad(real, (0, length - real.shape[-1]), value=True)


def rotate(heads: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the leading dimensions of each head, pairing dimension i with i + n/2 (the LLaMA and NeoX convention).

    heads: [batch, heads, positions, head_dim]; position_embeddings: what RotaryEmbedding gives, of n <= head_dim
    dimensions.
    """
    cos, sin = (table[:, None] for table in position_embeddings)
    n = cos.shape[-1]
    turned = heads if n == heads.shape[-1] else heads[..., :n]
    first, second = turned.chunk(2, dim=-1)
    rotated = torch.addcmul(turned * cos, torch.cat((second, first), dim=-1), sin)
    return rotated if turned is heads else torch.cat((rotated, heads[..., n:]), dim=-1)


def latent_score_scale(config) -> float:
    """DeepSeek's factor on MLA's scores: `(0.1 mscale_all_dim ln(factor) + 1)^2` where rotary positions are scaled.

    YaRN's temperature (Peng et al. 2023, https://arxiv.org/abs/2309.00071, section 3.4) for the whole head, of which
    rotary positions reach only the rotary part under MLA. https://huggingface.co/deepseek-ai/DeepSeek-V3
    """
    parameters = config.rope_parameters or {}
    weight = parameters.get("mscale_all_dim")
    if parameters.get("rope_type", "default") == "default" or not weight:
        return 1.0
    return (0.1 * weight * math.log(max(parameters["factor"], 1.0)) + 1.0) ** 2


def make_masks(
    config,
    plan: Any,
    inputs_embeds: Tensor,
    attention_mask: Tensor | dict[int | None, Any] | None,
    prefix_mask: Tensor | None,
    past_key_values: Cache | None,
    position_ids: Tensor | None,
) -> dict[int | None, Any]:
    """A mask for every window that some layer of the plan attends within (None: no window).

    attention_mask, prefix_mask: [batch, past + positions], 1 for tokens that are there or belong to the prefix; or, in
    place of both, the masks themselves: [batch, 1, positions, key positions] for all windows, or one for each.
    position_ids: None unless the caller gave some: only those can be of packed sequences, and where values cannot be
    read, as in a compiled graph, transformers would make a mask of any.
    """
    if isinstance(attention_mask, dict):
        return attention_mask
    if getattr(past_key_values, "drops_tokens", False) and attention_mask is not None and not attention_mask.all():
        raise ValueError(
            "a cache that drops tokens does not know which of the rest are padding; give one prompt a call"
        )
    both_ways = attention_mask is None and (config.bidirectional or prefix_mask is not None)
    if both_ways and position_ids is not None and not torch.compiler.is_compiling() and (position_ids.diff() < 0).any():
        raise ValueError("packed sequences would see each other in both directions; give each a row of its own")
    given: dict[str, Any] = {
        "config": config,
        "inputs_embeds": inputs_embeds,
        "attention_mask": attention_mask,
        "past_key_values": past_key_values,
    }
    if config.bidirectional:
        return {None: create_bidirectional_mask(**given)}
    given["position_ids"] = position_ids
    if prefix_mask is not None:
        given["or_mask_function"] = _in_prefix(prefix_mask, inputs_embeds, attention_mask, past_key_values)
    makers = {True: create_sliding_window_causal_mask, False: create_causal_mask}
    return {window: makers[window is not None](**given) for window in {layer.window for layer in plan.layers}}


def static_masks(
    config, plan: Any, inputs_embeds: Tensor, attention_mask: Tensor | None, past_key_values: Cache, position_ids: Any
) -> Any:
    """An `attention_mask` for a static cache that is as long at every step, so that one compiled step serves all."""
    if config.mask_type == "prefix":
        length, _ = past_key_values.get_mask_sizes(inputs_embeds.shape[1], 0)
        return None if attention_mask is None else F.pad(attention_mask, (0, length - attention_mask.shape[1]), value=1)
    if config._attn_implementation not in ("eager", "sdpa"):
        return attention_mask
    masks = make_masks(config, plan, inputs_embeds, attention_mask, None, past_key_values, position_ids)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _in_prefix(prefix_mask: Tensor, inputs_embeds: Tensor, attention_mask: Tensor | None, past_key_values):
    """A prefix token is seen by every token: by those of the prefix in both directions, by later ones anyway."""
    past = past_key_values.get_seq_length() if past_key_values is not None else 0
    length = past_key_values.get_mask_sizes(inputs_embeds.shape[1], 0)[0] if past_key_values is not None else 0
    length = max(length, inputs_embeds.shape[1], 0 if attention_mask is None else attention_mask.shape[1])
    if not torch.compiler.is_compiling() and past > 0 and bool(prefix_mask[:, past:].any()):
        raise ValueError("a prefix attends to itself in both directions, so it must be given in one piece")
    prefix = F.pad(prefix_mask.bool(), (0, max(0, length - prefix_mask.shape[1])))
    return lambda batch, head, query, key: prefix[batch, key]
