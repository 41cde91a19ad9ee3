"""Attention written with block Hadamard products."""
