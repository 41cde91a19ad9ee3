"""Embedding, blocks, final norm. The plan says how variants differ; no code here asks which variant it runs."""

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention import VLLM, Attention, KeyValues, OneCallAttention
from .cache import check_shapes, dynamic_cache
from .config import LeanConfig
from .layers import make_norm
from .layout import LayerPlan
from .mechanisms import ATTENTIONS, DEPTH, MLPS, TASKS
from .position import RotaryEmbedding, RotaryEmbeddings, Rotations, check_history, history_positions, make_masks
from .registry import ConfigError

# The matrices of a block that write the residual stream (`config.scaled_residual_init`).
RESIDUAL_OUTPUTS = ("o_proj.weight", "mlp.down_proj.weight", "mlp.experts.down_proj")


class LeanBlock(GradientCheckpointingLayer):
    """Serial: `Y = [X +] Attn(norm(X))`, `Z = [Y +] MLP(norm(Y))`. Parallel: `Z = [X +] Attn(norm(X)) + MLP(norm(X))`.

    P1 section 4 and P4 sections 1-2 name the shapes: skipless, attention skip alone, parallel. The skips are those in
    brackets; a parallel block has one. `residual_multiplier` scales what a skip is added to, or stands in its place.
    Hyper-connections take the place of the skips.
    Norms after a sublayer (`norm_placement`) act on its output: OLMo 2 (https://arxiv.org/abs/2501.00656) and, with
    those before it, Gemma 3 (https://arxiv.org/abs/2503.19786).
    """

    def __init__(self, config, layer: LayerPlan):
        super().__init__()
        self.config = config
        before, after = ({"both", place} for place in ("before", "after"))
        self.input_layernorm = self._norm(before)
        one_call = config._attn_implementation == VLLM
        self.self_attn = (OneCallAttention if one_call else ATTENTIONS[layer.attention])(config, layer)
        if config.block_type != "parallel_shared_norm":
            self.post_attention_layernorm = self._norm(before)
        self.attention_output_layernorm, self.mlp_output_layernorm = self._norm(after), self._norm(after)
        self.mlp = MLPS[config.mlp_type](config)
        connections, serial = layer.connections, config.block_type == "serial"
        place = layer.layer * (1 + serial)
        self.attention_connection = connections.build(config, place) if connections else None
        self.mlp_connection = connections.build(config, place + 1) if connections and serial else None
        self.dropout = nn.Dropout(config.hidden_dropout)

    def _norm(self, placements: set[str]) -> nn.Module:
        """A norm of the stream where the configuration places one."""
        config = self.config
        return make_norm(config, config.hidden_size) if config.norm_placement in placements else nn.Identity()

    def forward(
        self, hidden_states: Tensor, layer: LayerPlan, streams: Tensor | None = None, **kwargs
    ) -> tuple[Tensor, KeyValues, Any, Tensor | None]:
        """One layer; arguments as LeanAttention.forward.

        Returns:
            output [batch, positions, hidden_size], where there are several streams their mean; the layer's own keys
            and values (see LeanAttention); what the MLP hands out beside its output (see layers.py); the streams.
        """
        stream = hidden_states
        if layer.connections is not None:
            stream = layer.connections.spread(hidden_states) if streams is None else streams
        read, write = self._connected(stream, self.attention_connection, self.config.attention_skip)
        normed = self.input_layernorm(read)
        attended, _, key_values = self.self_attn(normed, layer, **kwargs)
        stream, mlp_aux = self.after_attention(attended, normed, read, write)
        if layer.connections is None:
            return stream, key_values, mlp_aux, None
        return stream.mean(-2), key_values, mlp_aux, stream

    def after_attention(self, attended: Tensor, normed: Tensor, read: Tensor, write: Callable) -> tuple[Tensor, Any]:
        """The stream behind the block, and what the MLP hands out; inference may replace this (inference/layer.py).

        Args:
            attended, normed: attention's output and input.
            read, write: what attention read of the stream, and a function from its output to the stream after it.
        """
        attended = self._scaled(self.attention_output_layernorm(attended))
        if self.config.block_type == "serial":
            read, write = self._connected(write(attended), self.mlp_connection, self.config.mlp_skip)
            output, mlp_aux = self.mlp(self.post_attention_layernorm(read))
            stream = write(self._scaled(self.mlp_output_layernorm(output)))
        else:
            if self.config.block_type == "parallel":
                normed = self.post_attention_layernorm(read)
            output, mlp_aux = self.mlp(normed)
            stream = write(attended + self._scaled(output))
        return stream, mlp_aux

    def _connected(self, stream: Tensor, connection: nn.Module | None, skip: bool) -> tuple[Tensor, Callable]:
        """What a sublayer reads of the stream, and a function from its output to the stream after it."""
        if connection is not None:
            return connection(stream)
        return stream, lambda output: stream + output if skip else output

    def _scaled(self, output: Tensor) -> Tensor:
        """Return the output of a sublayer, which is added to the residual stream."""
        output, factor = self.dropout(output), self.config.residual_multiplier
        return output if factor == 1 else output * factor


class LeanPreTrainedModel(PreTrainedModel):
    config: LeanConfig
    config_class = LeanConfig
    _initial_seed: int
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LeanBlock"]
    _skip_keys_device_placement = ["past_key_values", "borrowed"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {
        "hidden_states": OutputRecorder(LeanBlock, index=0),
        "attentions": OutputRecorder(Attention, index=1),
    }

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable = checkpoint, *args, **kwargs
    ) -> None:
        reentrant = getattr(gradient_checkpointing_func, "keywords", {}).get("use_reentrant")
        if enable and reentrant and (passed := self.config.plan.passed_beside_hidden_states):
            raise ValueError(
                f"use_reentrant=True loses the gradient of what a block returns beside its output, here {passed}; use "
                "use_reentrant=False"
            )
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Fill a module's own tensors: with its `initial_values` if it has any; otherwise vectors with ones, biases
        with zeros, and matrices from N(0, initializer_range^2), or with the module's own `initial_std`."""
        if isinstance(module, RotaryEmbedding):
            frequencies, _ = module.frequencies()
            init.copy_(module.inv_freq, frequencies)
            init.copy_(module.original_inv_freq, frequencies)
        own = list(module.named_parameters(recurse=False))
        if not own:
            return
        if not hasattr(module, "_qualified_name"):
            for name, child in self.named_modules():
                child._qualified_name = name
        given: dict[str, Any] = getattr(module, "initial_values", dict)()
        for tensor_name, parameter in own:
            name = f"{module._qualified_name}.{tensor_name}"
            if isinstance(value := given.get(tensor_name), Tensor):
                init.copy_(parameter, value)
            elif value is not None:
                init.constant_(parameter, value)
            elif parameter.ndim == 1:
                (init.zeros_ if tensor_name == "bias" else init.ones_)(parameter)
            elif not getattr(parameter, "_is_hf_initialized", False) and parameter.device.type != "meta":
                std = getattr(module, "initial_std", self.config.initializer_range)
                if self.config.scaled_residual_init and name.endswith(RESIDUAL_OUTPUTS):
                    std /= (2 * self.config.num_hidden_layers) ** 0.5
                init.copy_(parameter, normal(tuple(parameter.shape), std, self._initial_seed, name))

    def add_balance(
        self, loss: Tensor | None, router_logits: Any, attention_mask: Any, targets: Tensor | None, items: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the loss with the weighted load-balancing loss of experts, and that loss; without logits of routers,
        the loss and None.

        Args:
            targets: -100 where none is scored.
            items: targets of the whole batch, where this one is a part of it: the cross-entropy of micro-batches is
                their sum over `items`, and the load-balancing loss is averaged over them likewise.
        """
        if router_logits is None:
            return loss, None
        balance = MLPS[self.config.mlp_type].balance_loss(self.config, router_logits, attention_mask)
        if loss is not None:
            assert targets is not None and self.config.router_aux_loss_coef is not None
            share = 1.0 if items is None else (targets != -100).sum() / items
            loss = loss + self.config.router_aux_loss_coef * share * balance
        return loss, balance


class LeanModel(LeanPreTrainedModel):
    """Token ids, or the pixels of an image, to final hidden states."""

    def __init__(self, config: LeanConfig):
        super().__init__(config)
        # One number from torch's global generator, so that torch.manual_seed decides. Taken before any module is
        # made, for torch's own constructors draw from it too, as often as there are weights; on the CPU even while a
        # checkpoint is loaded on the meta device.
        self._initial_seed = int(torch.randint(2**62, (), device="cpu"))
        _tell_peft(config.model_type)
        self.plan = plan = config.plan
        self.task = TASKS[config.task]
        self.main_input_name, self._input_embed_layer = self.task.main_input_name, self.task.embedding_name
        setattr(self, self.task.embedding_name, self.task.make_embedding(config))  # embed_tokens or embed_patches
        learned = config.position_embedding_type == "learned"
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(LeanBlock(config, layer) for layer in plan.blocks)
        self.depth_averages = nn.ModuleDict(
            {str(layer.layer): DEPTH["average"].build(layer.averaged) for layer in plan.layers if layer.averaged}
        )
        self.norm = make_norm(config, config.hidden_size)
        self.rotary_emb = RotaryEmbeddings(config, plan) if config.position_embedding_type == "rope" else None
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        prefix_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        **kwargs,
    ) -> MoeModelOutputWithPast:
        """Final hidden states [batch, positions, hidden_size].

        Args:
            input_ids: [batch, positions], or `inputs_embeds` [batch, positions, hidden_size] in its place, as
                `get_input_embeddings()` makes them: `embedding_multiplier` is in them already.
            pixel_values: [batch, num_channels, image_size, image_size], of a model of images in place of both.
            attention_mask: [batch, past + positions], 1 for real tokens and 0 for padding; or masks, see `make_masks`.
            position_ids: [batch, positions]; counted on from the cache where left out.
            past_key_values: a transformers Cache made from this model's configuration.
            prefix_mask: [batch, positions], with `mask_type` "prefix": 1 for the tokens that see each other.
            output_router_logits: with experts, give `router_logits`; None: as the configuration says.
        """
        inputs_embeds = self.task.embed(
            self.get_input_embeddings(), input_ids, inputs_embeds, pixel_values, attention_mask
        )
        if prefix_mask is not None and self.config.mask_type != "prefix":
            raise ValueError(f"prefix_mask needs a model with mask_type 'prefix', found {self.config.mask_type!r}")
        if use_cache and past_key_values is None and not self.config.bidirectional:
            past_key_values = dynamic_cache(self.layers_to_run())
        if past_key_values is not None and not torch.compiler.is_compiling():
            check_shapes(self.plan.layers, past_key_values)
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        check_history(self.config, past, inputs_embeds.shape[1])
        masks = make_masks(
            self.config, self.plan, inputs_embeds, attention_mask, prefix_mask, past_key_values, position_ids
        )
        if position_ids is None:
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past)[None]

        hidden_states = inputs_embeds
        if self.embed_positions is not None:
            hidden_states = hidden_states + self.embed_positions(position_ids)
        hidden_states = self.dropout(hidden_states)
        position_embeddings = None
        if self.rotary_emb is not None:
            history = self._history(position_ids, attention_mask, past_key_values)
            position_embeddings = self.rotary_emb(hidden_states, position_ids, history)
        hidden_states, router_logits = self._run_layers(
            hidden_states, masks, position_embeddings, past_key_values, **kwargs
        )
        if output_router_logits is None:
            output_router_logits = getattr(self.config, "output_router_logits", False)
        return MoeModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states),
            past_key_values=past_key_values,
            router_logits=router_logits if output_router_logits else None,
        )

    def _history(self, position_ids: Tensor, attention_mask: Any, past_key_values: Cache | None) -> Tensor | None:
        """The positions of the cache's tokens, [1 or batch, tokens], where cached keys are turned."""
        if self.plan.turns_keys_in is None or past_key_values is None:
            return None
        length, _ = past_key_values.get_mask_sizes(position_ids.shape[1], self.plan.turns_keys_in)
        if isinstance(attention_mask, dict):
            attention_mask = attention_mask[None]  # a layer that turns keys has no window
        positions = history_positions(position_ids, attention_mask, past_key_values, length)
        return None if length == position_ids.shape[1] else positions

    def layers_to_run(self) -> tuple[LayerPlan, ...]:
        """The layers of the plan; the first `config.num_hidden_layers` of them for an early exit.

        Raises:
            ValueError: blocks were added or removed after the model was built.
        """
        wanted, found = self.config.num_hidden_layers, len(self.layers)
        layers, blocks = self.plan.layers, self.plan.layers[-1].block + 1
        if found == blocks and 1 <= wanted <= len(layers):
            return layers[:wanted]
        raise ValueError(
            f"the model was built of {blocks} blocks for {len(layers)} layers and now has {found} for {wanted}; what "
            "its layers share was planned when it was built, so build another one from a LeanConfig with the "
            "num_hidden_layers that you want, and copy the weights into it"
        )

    def _run_layers(
        self,
        hidden_states: Tensor,
        masks: dict[int | None, Any],
        position_embeddings: Rotations | None,
        past_key_values: Cache | None,
        **kwargs,
    ) -> tuple[Tensor, Any]:
        """The stream [batch, positions, hidden_size] after the last layer, and the router logits of every layer with
        experts. Keys and values that a later layer borrows are carried along in `borrowed`."""
        lenders = self.plan.lenders
        borrowed: dict[int, KeyValues] = {}
        mlp_hidden = streams = None
        outputs, router_logits = [hidden_states], []
        for layer in self.layers_to_run():
            hidden_states, key_values, mlp_aux, streams = self.layers[layer.block](
                hidden_states,
                layer,
                streams,
                attention_mask=masks[layer.window],
                position_embeddings=position_embeddings,
                borrowed=borrowed,
                past_key_values=past_key_values,
                mlp_hidden=mlp_hidden,
                **kwargs,
            )
            if layer.layer in lenders:
                borrowed = {**borrowed, layer.layer: key_values}
            mlp_hidden = mlp_aux if layer.lends_mlp_hidden else None
            if self.plan.routes:
                router_logits.append(mlp_aux)
            if self.depth_averages:
                outputs.append(hidden_states)
                if layer.averaged:
                    hidden_states = self.depth_averages[str(layer.layer)](outputs)
        return hidden_states, tuple(router_logits) or None


def normal(shape: tuple[int, ...], std: float | Tensor, seed: int, name: str) -> Tensor:
    """Draw a new tensor from N(0, std^2), float32 on the CPU, filled row by row from the stream of (`seed`, `name`).

    Two variants built from one seed share the draw of every tensor they both have, and a tensor with fewer rows (value
    heads, MLP neurons) gets the leading rows of the wider one: comparisons start from the same point.
    """
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")
    # One value after another, so that a shorter tensor is a prefix of a longer one; torch's generators are not.
    draws = np.random.Generator(np.random.PCG64(key)).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(draws).mul_(std)


def _tell_peft(model_type: str) -> None:
    """Register what adapters without `target_modules` act on, where PEFT is in use."""
    if (known := sys.modules.get("peft.utils.constants")) is not None:
        known.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.setdefault(model_type, "all-linear")
        keys_and_values = ["k_proj", "v_proj", "kv_down_proj"]  # the last of them with MLA alone
        known.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING.setdefault(model_type, [*keys_and_values, "down_proj"])
        known.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING.setdefault(model_type, ["down_proj"])


class LeanHeadModel(LeanPreTrainedModel):
    """A body with a head for `builds`, the task that the configuration must have: for text, a map to the vocabulary."""

    builds: str
    _tied_weights_keys: Any = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LeanConfig):
        if config.task != self.builds:
            name = type(self).__name__
            raise ConfigError(
                f"{name} builds models of task {self.builds!r}, found {config.task!r} in the configuration"
            )
        super().__init__(config)
        self.model = LeanModel(config)
        self._initial_seed = self.model._initial_seed
        # Which tokens an expert gets is known only when it runs.
        self._can_compile_fullgraph = config.mlp_type != "moe"
        self.make_head(config)
        self.post_init()

    def make_head(self, config: LeanConfig) -> None:
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Logits [..., vocab_size] of final hidden states [..., hidden_size]."""
        logits, divisor = self.lm_head(hidden_states), self.config.logits_scaling
        return logits if divisor == 1 else logits / divisor
