"""What a server can generate with, by names, and what of it is in memory.

Begin with `catalogue`. `entries` describe models, `residents` hold those that are loaded, and
`calls` turn what clients ask for into arguments of pipelines.
"""
