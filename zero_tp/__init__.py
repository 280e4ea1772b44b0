"""Tensor and sequence parallel pretraining on DeepSpeed ZeRO, behind a Hugging Face compatible model."""
