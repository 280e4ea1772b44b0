"""Corpora: preparing, storing, sampling."""
