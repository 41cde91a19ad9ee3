"""One training run: micro-batch, precision, optimizer and schedule, checkpoints, the run's record."""
