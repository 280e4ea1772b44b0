"""What a run logs also goes to CSV files and to accelerate's trackers."""
