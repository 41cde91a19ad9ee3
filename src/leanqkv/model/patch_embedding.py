"""Images to tokens: square patches, each through one linear map, behind a class token.

Dosovitskiy et al. 2020, "An Image is Worth 16x16 Words", equation 1, https://arxiv.org/abs/2010.11929
"""

import torch
from torch import Tensor, nn


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
