"""Side-by-side measurements; their dated results are in results/."""
