"""Safetensors in and out."""
