"""The pipeline as an object: its call and its methods.

Begin with `call`, the whole call; then `pipeline`, the object. The other files hold groups of
methods: loading and saving, those under diffusers' names, and what compiles, exports or moves.
"""
