"""The papers' architectures and sizes: `BASE+MECHANISM+MECHANISM` is how a model is named everywhere."""

from .names import preset

__all__ = ["preset"]
