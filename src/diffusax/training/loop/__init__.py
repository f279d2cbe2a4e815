"""The loop of a run: steps, checkpoints, reports, signals and results."""
