"""The papers' architectures and sizes: `BASE+MECHANISM+MECHANISM` is how a model is named everywhere."""

from .catalog import BASES, MECHANISMS, Base, MechanismPreset
from .names import ModelName, parse_name, preset
from .recipes import TUNED, Recipe, recipe, recipe_differences

__all__ = [
    "BASES",
    "MECHANISMS",
    "TUNED",
    "Base",
    "MechanismPreset",
    "ModelName",
    "Recipe",
    "parse_name",
    "preset",
    "recipe",
    "recipe_differences",
]
