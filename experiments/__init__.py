"""Run from a checkout: checks of what the papers state, and `make real`; the package does not depend on them."""
