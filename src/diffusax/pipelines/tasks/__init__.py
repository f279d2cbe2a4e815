"""Tasks, which turn the arguments of a call into a plan.

Begin with `prepare`, which runs a task; `start`, which finds what follows from the call and the
components alone; and `tasks`, which has text to image and image to image. Other tasks change the
plan in files of their own.
"""
