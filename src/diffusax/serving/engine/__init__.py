"""The thread that owns the device, and the jobs that share its batches.

Begin with `engine`, which takes jobs, and `schedule`, which runs them.
"""
