"""Zero-shot evaluation."""
