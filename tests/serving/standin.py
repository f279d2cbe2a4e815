"""A catalogue of one model, the embedded one, for tests of the engine."""

import dataclasses

import diffusax


class OneModel:
    """The embedded model, or any pipeline."""

    def __init__(self, pipe=None):
        self.pipe = pipe or diffusax.DiffusionPipeline.from_pretrained("emoji")
        self.acquired = self.released = 0

    def check(self, drawing):
        defaults = {"num_inference_steps": 8, "guidance_scale": 2.0, "sampler": "dpm++2m"}
        lacking = {k: v for k, v in defaults.items() if getattr(drawing, k) is None}
        return dataclasses.replace(drawing, **lacking)

    def acquire(self, drawing):
        self.acquired += 1
        names = "prompt", "negative_prompt", "num_inference_steps", "guidance_scale", "width"
        return self.pipe, {name: getattr(drawing, name) for name in (*names, "height")}

    def release(self, pipe):
        self.released += 1
