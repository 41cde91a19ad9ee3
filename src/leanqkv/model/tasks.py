"""What a model reads and answers, by `config.task`: its embedding, its head, and the fields that belong to it alone.

Text in, tokens out, or an image in, its class out. Nothing else in this folder asks which of the two it is.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .patch_embedding import PatchEmbedding
from .registry import ConfigError

MOST_LABELS = 100_000  # transformers writes two tables of them, whatever the model


class ScaledEmbedding(nn.Embedding):
    """Embeddings times a number, rounded to their dtype first, as in Gemma 3: 34 for sqrt(1152) in bfloat16."""

    def __init__(self, rows: int, width: int, multiplier: float):
        super().__init__(rows, width)
        self.multiplier = multiplier

    @property
    def embed_scale(self) -> Tensor:
        """A tensor of one number; PEFT looks for it under this name."""
        return torch.tensor(self.multiplier, dtype=self.weight.dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * self.embed_scale


class Text:
    """Token ids in, a distribution over the vocabulary out."""

    main_input_name = "input_ids"
    embedding_name = "embed_tokens"
    # Its fields with their defaults; None where there is none.
    defaults: dict[str, Any] = {
        "vocab_size": 50304,
        "tie_word_embeddings": True,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }

    @classmethod
    def check(cls, config, num_labels: int | None) -> None:
        """Refuse fields without a meaning for text and fill in the defaults of its own."""
        for name in Images.fields:
            if getattr(config, name) is not None:
                raise ConfigError(f"{name} needs task 'image_classification', found {config.task!r}")
        if num_labels not in (None, 2):  # 2 is what transformers says of every model
            raise ConfigError(
                f"num_labels needs task 'image_classification', found {config.task!r}; no head here classifies text: "
                "put one of your own on the hidden states of AutoModel"
            )
        for name, default in cls.defaults.items():
            if getattr(config, name) is None:
                setattr(config, name, default)
        if config.max_position_embeddings is None:
            config.max_position_embeddings = 1024

    @staticmethod
    def make_embedding(config) -> nn.Module:
        size = config.vocab_size, config.hidden_size
        scaled = config.embedding_multiplier != 1
        return ScaledEmbedding(*size, config.embedding_multiplier) if scaled else nn.Embedding(*size)

    @staticmethod
    def embed(
        embedding: nn.Module,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        pixel_values: Tensor | None,
        attention_mask: Tensor | None,
    ) -> Tensor:
        """[batch, positions, hidden_size], of token ids or of embeddings that are given."""
        if pixel_values is not None:
            raise ValueError("pixel_values need a model of images; this one reads input_ids")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, not both and not neither")
        return embedding(input_ids) if inputs_embeds is None else inputs_embeds

    @staticmethod
    def make_head(config) -> dict[str, nn.Module]:
        """By name; none where the head is tied to the embedding."""
        tied = config.tie_word_embeddings
        return {} if tied else {"lm_head": nn.Linear(config.hidden_size, config.vocab_size, bias=False)}


class Images:
    """A square image in, its class out."""

    main_input_name = "pixel_values"
    embedding_name = "embed_patches"
    fields = ("image_size", "patch_size", "num_channels")

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
    def embed(
        embedding: nn.Module,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        pixel_values: Tensor | None,
        attention_mask: Tensor | None,
    ) -> Tensor:
        """[batch, 1 + patches, hidden_size], of pixels [batch, num_channels, image_size, image_size]."""
        if pixel_values is None or any(given is not None for given in (input_ids, inputs_embeds, attention_mask)):
            raise ValueError(
                "a model of images takes pixel_values, and neither input_ids nor inputs_embeds nor an attention_mask: "
                "all images have the same tokens, none of them padding"
            )
        return embedding(pixel_values)

    @staticmethod
    def make_head(config) -> dict[str, nn.Module]:
        return {"classifier": nn.Linear(config.hidden_size, len(config.id2label))}


TASKS: dict[str, Any] = {"causal_lm": Text, "masked_lm": Text, "image_classification": Images}
