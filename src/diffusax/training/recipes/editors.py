"""Which classes edit with a family's checkpoints, and how a checkpoint of texts begins to."""

from typing import Any

from diffusax.models.unet.derived import widen_network, widen_params
from diffusax.networks import Model
from diffusax.pipelines import DiffusionPipeline
from diffusax.pipelines.classes import (
    FluxKontextPipeline,
    Krea2EditPipeline,
    StableDiffusionInstructPix2PixPipeline,
    StableDiffusionXLInstructPix2PixPipeline,
    ZImageEditPipeline,
)
from diffusax.pipelines.families import Family

_INSTRUCT = (StableDiffusionInstructPix2PixPipeline, StableDiffusionXLInstructPix2PixPipeline)
_EDITORS = (*_INSTRUCT, FluxKontextPipeline, Krea2EditPipeline, ZImageEditPipeline)


def instruct_class(family: Family) -> Any:
    """Returns the class that edits with a family's checkpoints like InstructPix2Pix; None for none.

    A family that looks at images needs no class of its own for that.
    """
    return next((cls for cls in _INSTRUCT if cls.family is family), None)


def edit_class(family: Family) -> Any:
    """Returns the class that edits with a family's checkpoints; None where each class does."""
    return next((cls for cls in _EDITORS if cls.family is family), None)


def to_instruct_pix2pix(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """Makes an InstructPix2Pix pipeline to be trained (Brooks et al. 2023, section 3.2).

    Its denoiser also takes the latents of a second image, and gives them zero weight. It shares all
    other components with `pipe`.

    Raises:
        ValueError: the denoiser already takes something else besides the latents, or the family has
            no such pipelines.
    """
    if instruct_class(pipe.family) is None:
        raise ValueError(
            f"the pipeline is of {pipe.family.name}, which has no pipelines for edits; give one of "
            "Stable Diffusion"
        )
    c = pipe.parts
    name, latents, channels = c.denoiser.components[0], c.latents.channels, c.denoiser.in_channels
    check_channels("the pipeline", channels, latents, edits=True)
    unet = c.models[name]
    network = widen_network(unet.network, 2 * latents)
    widened = Model(network, widen_params(unet.params, 2 * latents))
    return instruct_class(pipe.family).from_pipe(pipe, **{name: widened})


def check_channels(name: str, channels: int, latents: int, *, edits: bool) -> None:
    """Raises ValueError where a denoiser's input channels do not suit text to image or edits."""
    fitting = (latents, 2 * latents) if edits else (latents,)
    if channels not in fitting:
        task = "InstructPix2Pix" if edits else "text to image"
        raise ValueError(
            f"{task} needs a denoiser with {' or '.join(map(str, fitting))} input channels; that "
            f"of {name} has {channels}"
        )
