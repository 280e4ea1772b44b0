"""What crosses ranks inside a layer."""
