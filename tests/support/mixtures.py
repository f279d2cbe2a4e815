"""Calls at random for one running batch: tasks, samplers, steps, guidance and more."""

from hypothesis import strategies as st

from diffusax.samplers import SAMPLER_NAMES
from support.data_sets import smooth_picture

NAMES = tuple(n for n in SAMPLER_NAMES if not n.startswith(("edm", "flow")))
"""The samplers for networks that predict noise."""
ADAPTERS = ("style", "face")
"""The adapters of every pipeline."""
PROMPTS = ("a cat", "a dog, red", "two owls", "", "a very old boat on a lake in winter")


@st.composite
def calls(draw, tasks):
    """A task, a sampler's name and the arguments of a call."""
    task = draw(st.sampled_from(tasks))
    guidance = draw(st.sampled_from([1.0, 1.0, 2.0, 5.0, 7.5]))
    given = {
        "prompt": draw(st.sampled_from(PROMPTS)),
        "negative_prompt": draw(st.sampled_from([None, "blurry"])),
        "num_inference_steps": draw(st.integers(1, 12)),
        "guidance_scale": guidance,
        "seed": draw(st.integers(0, 99)),
        "output_type": "latent",
    }
    if draw(st.booleans()):
        start = draw(st.sampled_from([0.0, 0.3, 0.9]))
        given |= {"guidance_start": start, "guidance_end": draw(st.sampled_from([0.5, 1.0]))}
    if task in ("text", "xl") and draw(st.booleans()):
        given["guidance_rescale"] = 0.7
    if draw(st.booleans()):
        weight = st.sampled_from([0.0, 0.5, 1.0, -0.7])
        given["adapters"] = draw(st.dictionaries(st.sampled_from(ADAPTERS), weight))
    if task == "image":
        given |= {"image": smooth_picture(0), "strength": draw(st.sampled_from([0.4, 0.8, 1.0]))}
    if task == "inpaint":
        mask = smooth_picture(1).convert("L")
        strength = draw(st.sampled_from([0.6, 1.0]))
        given |= {"image": smooth_picture(0), "mask_image": mask, "strength": strength}
    if task == "control":
        scale = draw(st.sampled_from([0.5, 1.0]))
        given |= {"image": smooth_picture(2), "controlnet_conditioning_scale": scale}
        given |= {"guess_mode": draw(st.booleans()), "control_guidance_end": 0.7}
    if task == "instruct":
        scale = draw(st.sampled_from([1.0, 1.5]))
        given |= {"image": smooth_picture(0), "image_guidance_scale": scale}
        given["guidance_scale"] = max(guidance, 2.0)
    return task, draw(st.sampled_from(NAMES)), given
