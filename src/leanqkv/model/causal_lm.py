"""Decoder-only language model: next-token logits, loss and generation."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple

from .cache import dynamic_cache
from .cache_quantized import LeanQuantizedCache
from .config import LeanConfig
from .position import static_masks
from .transformer import LeanHeadModel


class LeanForCausalLM(LeanHeadModel, GenerationMixin):
    """Decoder-only language model of any architecture a LeanConfig describes."""

    builds = "causal_lm"

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        prefix_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> MoeCausalLMOutputWithPast:
        """Logits [batch, positions, vocab_size] and, with targets, the mean cross-entropy in nats.

        Args:
            prefix_mask: see LeanModel; `generate` takes the prompt for the prefix where none is given.
            labels: [batch, positions], the input ids themselves, -100 where no loss is wanted; position i is scored
                against label i + 1. Already shifted targets go in as `shift_labels` instead.
            output_router_logits: with experts, give `router_logits` and `aux_loss`, the load-balancing loss, and add it
                with its weight to the loss; None: as the configuration says.
            logits_to_keep: only the last that many positions (0: all), or the positions a tensor names.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            prefix_mask=prefix_mask,
            use_cache=use_cache,
            output_router_logits=output_router_logits,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.logits(hidden_states[:, keep])
        loss, targets = None, kwargs.get("shift_labels")
        if labels is not None or targets is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            targets = labels[:, 1:] if targets is None else targets  # type: ignore[index]
        items = kwargs.get("num_items_in_batch")
        loss, aux_loss = self.add_balance(loss, outputs.router_logits, attention_mask, targets, items)
        return MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
        )

    def generate(
        self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As in transformers; a model with `mask_type` "prefix" takes the prompt for its prefix."""
        if self.config.mask_type == "prefix":
            self._set_prefix(inputs, generation_config, kwargs)
        self._make_cache(generation_config, kwargs)
        layers = self.config.num_hidden_layers
        try:
            return super().generate(inputs, generation_config, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.config.num_hidden_layers = layers  # transformers sets it for an early exit, and leaves it after errors

    @staticmethod
    def _set_prefix(inputs: Tensor | None, generation_config: GenerationConfig | None, kwargs: dict[str, Any]) -> None:
        prompts = (kwargs.get("inputs_embeds"), inputs, kwargs.get("input_ids"))
        prompt = next((given for given in prompts if given is not None), None)
        if kwargs.get("prefix_mask") is None and prompt is not None:
            mask = kwargs.get("attention_mask")
            every_token = torch.ones(prompt.shape[:2], dtype=torch.long, device=prompt.device)
            kwargs["prefix_mask"] = every_token if mask is None else mask
        if getattr(generation_config, "is_assistant", False) and (cache := kwargs.get("past_key_values")) is not None:
            # A draft reads the end of its prefix again, which sees all of it in any case.
            kwargs["prefix_mask"] = kwargs["prefix_mask"][:, : cache.get_seq_length()]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse `generate_batch`, whose cache has one shape for keys and values of all layers."""
        raise ValueError(
            "transformers' continuous batching cannot hold what the layers of this model cache; use `model.generate` "
            "with padding, `leanqkv serve`, or vLLM with the plugin leanqkv-vllm"
        )

    def create_masks_for_generate(
        self, config: LeanConfig, inputs_embeds: Tensor, attention_mask: Any, past_key_values: Cache, **kwargs: Any
    ) -> Any:
        """The `attention_mask` of a step with a static cache; transformers calls it before the compiled step."""
        given = inputs_embeds, attention_mask, past_key_values, kwargs.get("position_ids")
        return static_masks(config, self.model.plan, *given)

    def _make_cache(self, generation_config: GenerationConfig | None, kwargs: dict[str, Any]) -> None:
        """Put a cache into `kwargs` where transformers' own would not be for this model's layers: a quantized one, if
        `generate` is asked for that, and that of an early exit, whose layers are not those of a shallower model."""

        def asked(name: str) -> Any:
            configs = (getattr(config, name, None) for config in (generation_config, self.generation_config))
            return next((value for value in (kwargs.get(name), *configs) if value is not None), None)

        if kwargs.get("past_key_values") is not None:
            return
        if self.config.num_hidden_layers < len(self.model.plan.layers):
            cache: Cache = dynamic_cache(self.model.layers_to_run())
            cache.activate_past_recording()
        elif asked("cache_implementation") == "quantized":
            options = {name: value for name, value in (asked("cache_config") or {}).items() if name != "config"}
            cache = LeanQuantizedCache(options.pop("backend", "quanto"), self.config, **options)
        else:
            return
        kwargs |= {"past_key_values": cache, "cache_implementation": None, "cache_config": None}


# Trainer shifts labels by one token only for the classes named here (`label_smoothing_factor`).
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[LeanConfig.model_type] = LeanForCausalLM.__name__
