"""The running batch: images of many calls in one program, which join and leave at any step.

Begin with `running_batch`. A call is a `request` of images (`image`); the `scheduler` lets them
join as a policy says, and `loop` and `run` compute steps of all images together.
"""
