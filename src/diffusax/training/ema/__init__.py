"""Averages of the parameters: during a run, on disk, and computed after it."""
