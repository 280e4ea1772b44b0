"""Build a model in DeepSpeed's engine and run its steps."""
