"""What a run logs goes to TensorBoard, W&B, Comet, CSV and accelerate's trackers too: beside training."""
