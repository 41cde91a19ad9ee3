"""Checks of what the papers state; the package does not depend on them."""
