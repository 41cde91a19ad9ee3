"""Checks of what the papers prove: statement, check, figure, outcome."""
