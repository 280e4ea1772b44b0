"""What runs have logged is drawn, while they go on or after."""
