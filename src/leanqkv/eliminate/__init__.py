"""Exact weight elimination: the same function from fewer weights, with a certificate."""

from .audit import findings, spectra, weight_table
from .certify import verify
from .elimination import Elimination, eliminate, eliminate_directory
from .transform import Request, parse_request, transform

__all__ = [
    "Elimination",
    "Request",
    "eliminate",
    "eliminate_directory",
    "findings",
    "parse_request",
    "spectra",
    "transform",
    "verify",
    "weight_table",
]
