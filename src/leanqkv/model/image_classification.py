"""Vision transformer: an image's class from its patches (ViT; Dosovitskiy et al. 2020, arXiv 2010.11929).

P3 appendix C.6 trains one on CIFAR-10 and CIFAR-100, with and without first-layer values.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils.generic import can_return_tuple

from .config import LeanConfig
from .transformer import LeanHeadModel


class LeanForImageClassification(LeanHeadModel):
    """Patches and a class token that all see each other; a linear head reads the class off the class token."""

    builds = "image_classification"
    _tied_weights_keys = None
    main_input_name = "pixel_values"
    input_modalities = "image"
    _input_embed_layer = "embed_patches"

    def make_head(self, config: LeanConfig) -> None:
        assert config.num_labels is not None
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    @can_return_tuple
    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs) -> ImageClassifierOutput:
        """Logits [batch, num_labels] and, with labels, the mean cross-entropy in nats; with experts and
        `output_router_logits`, the weighted load-balancing loss is added to it.

        Args:
            pixel_values: [batch, num_channels, image_size, image_size]; `leanqkv train` scales them to -1 ... 1.
            labels: [batch], the class of each image.
        """
        outputs = self.model(pixel_values=pixel_values, use_cache=False, **kwargs)
        logits = self.classifier(outputs.last_hidden_state[:, 0])
        loss: Tensor | None = None
        if labels is not None:
            loss = F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)
            loss, _ = self.add_balance(loss, outputs.router_logits, None, labels, None)
            if loss is not None and (items := kwargs.get("num_items_in_batch")) is not None:
                loss = loss * len(labels) / items  # a micro-batch's part of the mean over the whole batch
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
