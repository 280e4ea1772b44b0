"""Models are evaluated zero-shot here."""
