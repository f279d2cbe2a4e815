"""Why pipeline classes have no entry in the registry."""

from .catalogue import all_image_pipelines, all_pipelines, missing_pipelines
from .registry import REGISTRY, UNMET

THREE_D = "makes three-dimensional shapes, which it renders in loops of its own"
REASONS = {
    "BlipDiffusionControlNetPipeline": "no tiny Q-Former of BLIP-Diffusion is made here",
    "BlipDiffusionPipeline": "no tiny Q-Former of BLIP-Diffusion is made here",
    "FluxPriorReduxPipeline": "makes embeddings of prompts in one step, without a generator",
    "MusicLDMPipeline": (
        "fails in PyTorch: get_text_features of transformers 5 returns an output, not a tensor"
    ),
    "ShapEImg2ImgPipeline": THREE_D,
    "ShapEPipeline": THREE_D,
    "UniDiffuserPipeline": "no tiny text decoder of UniDiffuser is made here",
    "VersatileDiffusionDualGuidedPipeline": (
        "fails in PyTorch: DualTransformer2DModel takes no encoder_attention_mask, which the "
        "UNet's blocks of diffusers 0.42.1 pass"
    ),
}
NOT_PICTURES = "makes no pictures, and no tiny components are made here"


def without_entry() -> dict[str, str]:
    """Names of classes without an entry, and why."""
    pictures = all_image_pipelines()
    others = [n for n in all_pipelines() if n not in pictures and n not in REGISTRY]
    return {**missing_pipelines(), **dict.fromkeys(others, NOT_PICTURES), **UNMET, **REASONS}
