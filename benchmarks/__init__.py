"""Measurements: makers of big checkpoints and the commands that time them."""
