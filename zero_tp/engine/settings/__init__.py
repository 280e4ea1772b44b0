"""Check DeepSpeed's config: types, defaults, and combinations that would train another model."""
