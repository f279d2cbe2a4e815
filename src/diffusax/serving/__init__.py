"""A server: jobs that share running batches, and the catalogue of models that they name."""
