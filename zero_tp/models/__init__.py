"""The models: what is computed."""
