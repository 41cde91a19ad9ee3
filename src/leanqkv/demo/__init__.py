"""The demo: every tool of the package on one small model, in a few minutes."""
