"""Save and resume runs."""
