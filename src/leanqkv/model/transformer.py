"""Embedding -> blocks -> head. What sets variants apart is in the plan; nothing here asks which one it is."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention import KeyValues, LeanAttention
from .block import LeanBlock
from .config import LeanConfig
from .initial import normal
from .norm import make_norm
from .position import RotaryEmbedding

# The matrices of a block that write the residual stream (`config.scaled_residual_init`).
RESIDUAL_OUTPUTS = ("o_proj.weight", "mlp.down_proj.weight")


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
        "attentions": OutputRecorder(LeanAttention, index=1),
    }

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable = checkpoint, *args, **kwargs
    ) -> None:
        lenders = {s.layer for layer in self.config.plan.layers for s in layer.borrowed}
        if enable and lenders and getattr(gradient_checkpointing_func, "keywords", {}).get("use_reentrant"):
            raise ValueError(
                "use_reentrant=True would lose the gradient of heads that later layers borrow; use use_reentrant=False"
            )
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Fills one module's own tensors: vectors with ones (biases zeros), matrices from N(0, initializer_range^2)."""
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
        for tensor_name, parameter in own:
            name = f"{module._qualified_name}.{tensor_name}"
            if parameter.ndim == 1:
                (init.zeros_ if tensor_name == "bias" else init.ones_)(parameter)
            elif not getattr(parameter, "_is_hf_initialized", False) and parameter.device.type != "meta":
                std = self.config.initializer_range
                if self.config.scaled_residual_init and name.endswith(RESIDUAL_OUTPUTS):
                    std /= (2 * self.config.num_hidden_layers) ** 0.5
                init.copy_(parameter, normal(tuple(parameter.shape), std, self._initial_seed, name))


class LeanModel(LeanPreTrainedModel):
    """Token ids to final hidden states."""

    def __init__(self, config: LeanConfig):
        super().__init__(config)
        # One number from torch's global generator, so that torch.manual_seed decides. Taken before any module is
        # made, for torch's own constructors draw from it too, as often as there are weights; on the CPU even while a
        # checkpoint is loaded on the meta device.
        self._initial_seed = int(torch.randint(2**62, (), device="cpu"))
        plan = config.plan
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.position_embedding_type == "learned"
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(LeanBlock(config, layer) for layer in plan.layers)
        self.norm = make_norm(config, config.hidden_size)
        self.rotary_emb = RotaryEmbedding(config) if config.position_embedding_type == "rope" else None
        # Layers whose keys or values a later layer borrows: only theirs are carried along.
        self.lenders = {source.layer for layer in plan.layers for source in layer.borrowed}
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
        use_cache: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Runs the blocks.

        Args:
            input_ids: [batch, positions], or `inputs_embeds` [batch, positions, hidden_size] in its place.
            attention_mask: [batch, past + positions], 1 for real tokens and 0 for padding.
            position_ids: [batch, positions]; counted on from the cache where left out.
            past_key_values: a transformers Cache made from this model's configuration.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, not both and not neither")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            past = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )

        hidden_states = inputs_embeds
        if self.embed_positions is not None:
            hidden_states = hidden_states + self.embed_positions(position_ids)
        hidden_states = self.dropout(hidden_states)
        position_embeddings = self.rotary_emb(hidden_states, position_ids) if self.rotary_emb is not None else None
        borrowed: dict[int, KeyValues] = {}
        for index, layer in enumerate(self.layers):
            hidden_states, key_values = layer(
                hidden_states,
                attention_mask=mask,
                position_embeddings=position_embeddings,
                borrowed=borrowed,
                past_key_values=past_key_values,
                **kwargs,
            )
            if index in self.lenders:
                borrowed = {**borrowed, index: key_values}
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)


class LeanForCausalLM(LeanPreTrainedModel, GenerationMixin):
    """Decoder-only language model of any architecture a LeanConfig describes."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LeanConfig):
        super().__init__(config)
        self.model = LeanModel(config)
        self._initial_seed = self.model._initial_seed
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Logits [batch, positions, vocab_size] and, with targets, the mean cross-entropy in nats.

        Args:
            labels: [batch, positions], the input ids themselves, -100 where no loss is wanted; position i is scored
                against label i + 1. Already shifted targets go in as `shift_labels` instead.
            logits_to_keep: only the last that many positions (0: all), or the positions a tensor names.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden_states[:, keep])
        loss = None
        if labels is not None or kwargs.get("shift_labels") is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


# The model's code travels with every checkpoint it saves.
LeanConfig.register_for_auto_class()
LeanModel.register_for_auto_class("AutoModel")
LeanForCausalLM.register_for_auto_class("AutoModelForCausalLM")
