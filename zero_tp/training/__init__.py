"""Building the engine and running the loop."""
