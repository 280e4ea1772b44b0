"""Draw the logged values of runs, during or after training."""
