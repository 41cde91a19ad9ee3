"""Checkpoints in and out."""

from .open import load_config, load_model, open_checkpoint

__all__ = ["load_config", "load_model", "open_checkpoint"]
