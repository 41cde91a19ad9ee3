"""Bidirectional encoder with a masked-language-modelling head (BERT; Devlin et al. 2018, arXiv 1810.04805).

P1 section 6 and P4 name encoders among the models that their eliminations hold for.
"""

from torch import Tensor
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils.generic import can_return_tuple

from .transformer import LeanHeadModel


class LeanForMaskedLM(LeanHeadModel):
    """Every real token sees every other; the head predicts the token at each position itself."""

    builds = "masked_lm"

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs,
    ) -> MaskedLMOutput:
        """Logits [batch, positions, vocab_size] and, with labels, the mean cross-entropy in nats; with experts
        and `output_router_logits`, their weighted load-balancing loss is added to it.

        Args:
            attention_mask: [batch, positions], 1 for real tokens and 0 for padding.
            labels: [batch, positions], the true token where one was masked, -100 elsewhere.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            **kwargs,
        )
        logits = self.logits(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            items = kwargs.get("num_items_in_batch")
            loss, _ = self.add_balance(loss, outputs.router_logits, attention_mask, labels, items)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
