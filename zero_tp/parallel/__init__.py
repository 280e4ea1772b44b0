"""Tensor and sequence parallel layers, and the collectives in them."""
