"""Exact weight elimination: the same function from fewer weights, with a certificate."""

from .audit import findings, spectra, weight_table
from .elimination import Elimination, convert_format, eliminate, eliminate_directory, verify
from .transform import Request, parse_request, transform

__all__ = [
    "Elimination",
    "Request",
    "convert_format",
    "eliminate",
    "eliminate_directory",
    "findings",
    "parse_request",
    "spectra",
    "transform",
    "verify",
    "weight_table",
]
