"""Conversions of finished checkpoints to first-layer values, and to nonlinear queries."""
