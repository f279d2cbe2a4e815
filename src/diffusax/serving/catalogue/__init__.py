"""What a server can generate with, by names, and what of it is in memory.

Begin with `catalogue`. `entries` describes models, `residents` holds those that are loaded, and
`calls` turns what clients ask for into arguments of pipelines.
"""
