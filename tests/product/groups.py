"""All tools, in the groups that the documentation shows them in."""

from product import generation, wrappers

GROUPS = {
    "Generation and caches": generation.TOOLS,
    "Adapters, quantizers and training": wrappers.TOOLS,
}
