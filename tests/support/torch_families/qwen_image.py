"""Qwen-Image and its variants."""

from support.processors import qwen2_processor
from support.tiny_tokenizers import qwen_tokenizer

from .areas import small_area
from .autoencoders import qwen_autoencoder
from .language_models import qwen2_5_vl
from .pictures import mask, picture
from .registry import IMAGE, INPAINT, TEXT, add
from .shared import REPAINT, START
from .stable_diffusion import SIZE
from .weights import network, parts, scheduler

QWEN = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 32,
    "axes_dims_rope": (8, 4, 4),
}
plain = parts(
    text_encoder=qwen2_5_vl,
    tokenizer=qwen_tokenizer,
    vae=qwen_autoencoder,
    scheduler=scheduler("FlowMatchEulerDiscreteScheduler", shift=3.0),
    transformer=network("QwenImageTransformer2DModel", guidance_embeds=False, **QWEN),
)
control = parts(plain, controlnet=network("QwenImageControlNetModel", **QWEN))
BOTH = {**SIZE, "true_cfg_scale": 3.0}
add("QwenImagePipeline", TEXT, plain, **BOTH)
add("QwenImageImg2ImgPipeline", IMAGE, plain, **START, **BOTH)
add("QwenImageInpaintPipeline", INPAINT, plain, **REPAINT, **BOTH)
add("QwenImageControlNetPipeline", TEXT, control, control_image=picture, **BOTH)

inpaint_control = parts(
    plain, controlnet=network("QwenImageControlNetModel", extra_condition_channels=4, **QWEN)
)
edit = parts(plain, processor=qwen2_processor)
PLUS = {"image": lambda: [picture(0), picture(1)]}
add(
    "QwenImageControlNetInpaintPipeline",
    INPAINT,
    inpaint_control,
    control_image=picture,
    control_mask=mask,
    **BOTH,
)
add("QwenImageEditPipeline", IMAGE, edit, prepare=small_area, image=picture, **BOTH)
add("QwenImageEditPlusPipeline", IMAGE, edit, prepare=small_area, **PLUS, **BOTH)
add("QwenImageEditInpaintPipeline", INPAINT, edit, prepare=small_area, **REPAINT, **BOTH)

layered = parts(
    edit,
    vae=lambda: qwen_autoencoder(8, input_channels=4),
    transformer=network(
        "QwenImageTransformer2DModel",
        use_additional_t_cond=True,
        use_layer3d_rope=True,
        **{**QWEN, "in_channels": 32, "out_channels": 8},
    ),
)
add(
    "QwenImageLayeredPipeline",
    IMAGE,
    layered,
    prepare=small_area,
    image=lambda: picture().convert("RGBA"),
    layers=2,
    true_cfg_scale=3.0,
)
