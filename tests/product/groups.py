"""All tools, in the groups that the documentation shows them in."""

from product import generation, rewriting, wrappers

GROUPS = {
    "Generation and caches": generation.TOOLS,
    "Adapters, quantizers and training": wrappers.TOOLS,
    "Conversion": rewriting.CONVERSION,
    "Elimination": rewriting.ELIMINATION,
    "Formats, teachers and reports": rewriting.OTHERS,
}
