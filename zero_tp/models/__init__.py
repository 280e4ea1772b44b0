"""The models say what is computed."""
