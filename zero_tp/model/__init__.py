"""The models' modules and their forward and backward."""
