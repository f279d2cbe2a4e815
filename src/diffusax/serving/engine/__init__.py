"""The thread that owns the device, and the jobs that share its batches.

Begin with `engine`, which takes jobs. `jobs` has them and their images, each of which is a request
to the scheduler of `diffusax.batch`.
"""
