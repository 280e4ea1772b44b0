"""Send a run's logged values to CSV files and to accelerate's trackers."""
