"""Training: configuration, the loop, checkpoints, logs."""
