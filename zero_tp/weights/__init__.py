"""Hugging Face weights are read and written here."""
