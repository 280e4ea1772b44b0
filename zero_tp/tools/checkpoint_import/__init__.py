"""Checkpoints of other trainers become Hugging Face models and runs of zero_tp."""
