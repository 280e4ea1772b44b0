"""Read and write Hugging Face weights."""
