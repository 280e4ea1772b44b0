"""Make corpora of token ids from texts."""
