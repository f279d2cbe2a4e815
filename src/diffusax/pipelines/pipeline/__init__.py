"""The pipeline as an object: its call and its methods.

Begin with `pipeline`: the call, loading and saving. The other files hold groups of methods under
diffusers' names, and what compiles, exports or moves a pipeline.
"""
