"""Runs a plan to images.

`programs` has the compiled programs (encode, denoise, decode), `sample` runs a plan's rows,
`images` decodes latents to what a call asked for, and `callbacks` shows the steps to callers.
"""
