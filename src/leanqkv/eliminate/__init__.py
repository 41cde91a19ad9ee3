"""Exact weight elimination: the same function from fewer weights, with a certificate."""

from .audit import findings, weight_table
from .certify import verify
from .elimination import eliminate, eliminate_directory
from .transform import parse_request, transform

__all__ = ["eliminate", "eliminate_directory", "findings", "parse_request", "transform", "verify", "weight_table"]
