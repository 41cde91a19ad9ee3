"""All tools, in the groups that the documentation shows them in."""

from product import generation, rewriting, wrappers

GROUPS = {
    "Generation and caches": generation.TOOLS,
    "Adapters, quantizers and training": wrappers.TOOLS,
    "Conversion, elimination and formats": rewriting.TOOLS,
}
