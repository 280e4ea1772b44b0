"""Make corpora of token files of other trainers, without text."""
