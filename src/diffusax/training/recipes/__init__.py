"""The training recipes, one file per task."""
