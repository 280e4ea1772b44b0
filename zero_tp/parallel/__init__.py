"""The parallel layers say what crosses ranks inside a layer."""
