"""Corpora are prepared, stored and sampled here."""
