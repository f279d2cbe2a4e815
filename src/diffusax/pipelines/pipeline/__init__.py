"""The pipeline as an object: its components and its methods."""
