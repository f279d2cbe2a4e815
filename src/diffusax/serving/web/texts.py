"""The texts with settings in PNGs."""

from typing import Any

from diffusax.parameters import parameters_text
from diffusax.serving.jobs import Job


def texts_of(job: Job, catalogue: Any) -> list[str]:
    d = job.drawing
    return [
        parameters_text(
            d.prompt,
            d.negative_prompt,
            {"Steps": d.num_inference_steps, "Sampler": d.sampler, "Seed": seed},
        )
        for seed in job.seeds
    ]


def parameters_of(picture: Any) -> str:
    """Returns the text with a picture's settings, or "" where it has none."""
    text = picture.info.get("parameters", "")
    return text if isinstance(text, str) else ""


def settings_of_text(text: str) -> dict[str, Any]:
    return {"prompt": text.split("\n")[0]} if text else {}
