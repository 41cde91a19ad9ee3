"""Checks of what the papers state, beside the package: nothing in it depends on them."""
