"""The parallel layers: what crosses ranks inside a layer."""
