"""Pixels to the logits of an image's classes."""

from typing import Any

import torch
from torch import Tensor

from .basic import Tensors
from .model import layers


def patch(image: Tensor, weight: Tensor, bias: Tensor, row: int, column: int, size: int) -> Tensor:
    """E x + b for the patch whose upper left pixel is (row * size, column * size), x its pixels in all channels"""
    total = bias
    for channel in range(len(image)):
        for i in range(size):
            for j in range(size):
                total = total + weight[:, channel, i, j] * image[channel, row * size + i, column * size + j]
    return total


def classify(tensors: Tensors, config: Any, image: Tensor) -> Tensor:
    """[class token; patches row by row] + positions, through the blocks; W x + b of the class token: [classes]"""
    weight, bias = (tensors[f"model.embed_patches.projection.{name}"] for name in ("weight", "bias"))
    size = config.patch_size
    places = range(config.image_size // size)
    tokens = [tensors["model.embed_patches.class_token"][0]]
    tokens += [patch(image, weight, bias, row, column, size) for row in places for column in places]
    x = torch.stack(tokens)
    if config.position_embedding_type == "learned":
        x = x + torch.stack([tensors["model.embed_positions.weight"][p] for p in range(len(tokens))])
    x, _ = layers(x, tensors, config)
    return tensors["classifier.weight"] @ x[0] + tensors["classifier.bias"]
