"""Safetensors are written and read here."""
