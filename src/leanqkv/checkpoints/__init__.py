"""Checkpoints in and out."""

from .open import load_config, load_model

__all__ = ["load_config", "load_model"]
