"""One table per Hugging Face model_type."""
