"""A server: jobs that share running batches, and the catalogue of models that they name.

`drawings` is what clients ask for, `catalogue` finds and loads models, `engine` owns the device,
and `web` speaks HTTP.
"""
