"""Build the engine and run the loop."""
