"""Images to tokens: square patches, each through one linear map, behind a class token.

Dosovitskiy et al. 2020, "An Image is Worth 16x16 Words", equation 1, https://arxiv.org/abs/2010.11929
"""

import torch
from torch import Tensor, nn

from .layers import Text
from .registry import ConfigError

MOST_LABELS = 100_000  # transformers writes two tables of them, whatever the model


class PatchEmbedding(nn.Module):
    """`[class token; x_1 E + b; ...; x_N E + b]` for the N patches of an image, row by row from the upper left."""

    def __init__(self, config):
        super().__init__()
        self.expected = (config.num_channels, config.image_size, config.image_size)
        # A matrix of one row: matrices are drawn from a normal distribution, vectors would start at one.
        self.class_token = nn.Parameter(torch.empty(1, config.hidden_size))
        self.projection = nn.Conv2d(config.num_channels, config.hidden_size, config.patch_size, config.patch_size)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """[batch, num_channels, image_size, image_size] -> [batch, 1 + patches, hidden_size]"""
        if pixel_values.ndim != 4 or pixel_values.shape[1:] != self.expected:
            raise ValueError(
                f"pixel_values must be [batch, channels, height, width] with {list(self.expected)} after the batch, "
                f"found {list(pixel_values.shape)}"
            )
        if not pixel_values.is_floating_point():
            raise ValueError(f"pixel_values must be scaled to numbers around zero, found {pixel_values.dtype}")
        patches = self.projection(pixel_values.to(self.projection.weight.dtype)).flatten(2).transpose(1, 2)
        return torch.cat((self.class_token.to(patches.dtype).expand(len(patches), 1, -1), patches), dim=1)


class Images:
    """A square image in, its class out."""

    main_input_name = "pixel_values"
    embedding_name = "embed_patches"

    @staticmethod
    def check(config, num_labels: int | None) -> None:
        """Refuse fields without a meaning for images; fill in the channels, the positions and the labels."""
        for name in Text.defaults:
            if getattr(config, name) is not None:
                raise ConfigError(f"{name} has no meaning with task {config.task!r}: images have no vocabulary")
        for name in ("embedding_multiplier", "logits_scaling"):
            if getattr(config, name) != 1:
                raise ConfigError(f"{name} has no meaning with task {config.task!r}")
        if config.problem_type not in (None, "single_label_classification"):
            raise ConfigError(f"problem_type {config.problem_type!r}: an image has one label here, leave it out")
        if config.num_channels is None:
            config.num_channels = 3
        for name in ("image_size", "patch_size"):
            if getattr(config, name) is None:
                raise ConfigError(f"task {config.task!r} needs {name}")
        size, patch = config.image_size, config.patch_size
        if not size or not patch or size < 1 or patch < 1 or size % patch:
            raise ConfigError(f"patch_size ({patch}) must divide image_size ({size}), both at least 1")
        tokens = 1 + (size // patch) ** 2
        if config.max_position_embeddings not in (None, tokens):
            raise ConfigError(
                f"max_position_embeddings ({config.max_position_embeddings}) is decided by the image: a class token "
                f"and {tokens - 1} patches, {tokens}; leave it out"
            )
        config.max_position_embeddings = tokens
        named = None if config.id2label is None else len(config.id2label)
        labels = next((count for count in (num_labels, named) if count is not None), 2)
        if not isinstance(labels, int) or not 2 <= labels <= MOST_LABELS:
            raise ConfigError(f"num_labels must be a whole number from 2 to {MOST_LABELS:,}, found {labels!r}")
        if named not in (None, labels):
            raise ConfigError(f"num_labels ({labels}) is not the number of labels in id2label ({named})")
        config.num_labels = labels

    @staticmethod
    def make_embedding(config) -> nn.Module:
        return PatchEmbedding(config)

    @staticmethod
    def embed(embedding: nn.Module, input_ids, inputs_embeds, pixel_values, attention_mask) -> Tensor:
        """[batch, 1 + patches, hidden_size], of pixels [batch, num_channels, image_size, image_size]."""
        if pixel_values is None or any(given is not None for given in (input_ids, inputs_embeds, attention_mask)):
            raise ValueError(
                "a model of images takes pixel_values, and neither input_ids nor inputs_embeds nor an attention_mask: "
                "all images have the same tokens, none of them padding"
            )
        return embedding(pixel_values)
