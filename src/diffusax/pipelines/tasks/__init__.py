"""Tasks, which turn the arguments of a call into a plan.

Begin with `tasks`, which has text to image and image to image, and `setup`, which finds what
follows from the call and the components alone. Other tasks change the plan in files of their own.
"""
