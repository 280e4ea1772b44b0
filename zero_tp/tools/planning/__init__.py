"""Plan what a run will need and what a device can do."""
