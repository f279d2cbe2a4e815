"""Stable Cascade and Wuerstchen, which make small latents, and pictures of those."""

from collections.abc import Callable
from typing import Any

from support.tiny_tokenizers import clip_tokenizer

from .pictures import tensor
from .registry import OTHER, TEXT, add
from .text import clip_text, clip_text_projected
from .weights import network, parts, randomize, scheduler


def wuerstchen(name: str, **config: Any) -> Callable[[], Any]:
    """A function that makes a network of the modules of Wuerstchen."""
    import diffusers.pipelines.deprecated.wuerstchen as modules

    return lambda: randomize(getattr(modules, name)(**config))


TEXT_PARTS = {"text_encoder": clip_text_projected, "tokenizer": clip_tokenizer}
noise = scheduler("DDPMWuerstchenScheduler")
paella = wuerstchen("PaellaVQModel", bottleneck_blocks=1, num_vq_embeddings=8, embed_dim=8)


def vqgan(gain: float = 0.01) -> Any:
    """Paella's autoencoder, whose pictures are grey enough not to be clipped."""
    network = paella()
    network.out_block[0].weight.mul_(gain)
    network.out_block[0].bias.add_(0.5)
    return network


cascade_prior = network(
    "StableCascadeUNet",
    conditioning_dim=32,
    block_out_channels=(32, 32),
    num_attention_heads=(4, 4),
    down_num_layers_per_block=(1, 1),
    up_num_layers_per_block=(1, 1),
    down_blocks_repeat_mappers=(1, 1),
    up_blocks_repeat_mappers=(1, 1),
    block_types_per_layer=(
        ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
        ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
    ),
    switch_level=(False,),
    clip_image_in_channels=32,
    clip_text_in_channels=32,
    clip_text_pooled_in_channels=32,
    dropout=(0.1, 0.1),
)
cascade_decoder = network(
    "StableCascadeUNet",
    in_channels=4,
    out_channels=4,
    conditioning_dim=32,
    block_out_channels=(16, 32),
    num_attention_heads=(0, 4),
    down_num_layers_per_block=(1, 1),
    up_num_layers_per_block=(1, 1),
    down_blocks_repeat_mappers=(1, 1),
    up_blocks_repeat_mappers=(2, 2),
    block_types_per_layer=(
        ("SDCascadeResBlock", "SDCascadeTimestepBlock"),
        ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
    ),
    switch_level=None,
    clip_text_pooled_in_channels=32,
    effnet_in_channels=16,
    dropout=(0.1, 0.1),
)
NONE = {"feature_extractor": None, "image_encoder": None}
prior = parts(TEXT_PARTS, NONE, prior=cascade_prior, scheduler=noise)
decoder = parts(
    TEXT_PARTS, decoder=cascade_decoder, vqgan=vqgan, scheduler=noise, latent_dim_scale=4.0
)
combined = parts(
    decoder,
    prior_prior=cascade_prior,
    prior_text_encoder=clip_text_projected,
    prior_tokenizer=clip_tokenizer,
    prior_scheduler=noise,
    prior_feature_extractor=None,
    prior_image_encoder=None,
)
LARGE = {"height": 128, "width": 128}
STEPS = {"prior_num_inference_steps": 2}
add("StableCascadePriorPipeline", OTHER, prior, **LARGE)
add(
    "StableCascadeDecoderPipeline",
    OTHER,
    decoder,
    image_embeddings=lambda: tensor(1, 16, 4, 4),
    guidance_scale=2.0,
)
add("StableCascadeCombinedPipeline", TEXT, combined, decoder_guidance_scale=2.0, **STEPS, **LARGE)

W_TEXT = {"text_encoder": clip_text, "tokenizer": clip_tokenizer}
w_prior = wuerstchen("WuerstchenPrior", c_in=2, c=8, depth=2, c_cond=32, c_r=8, nhead=2)
w_decoder = wuerstchen(
    "WuerstchenDiffNeXt",
    c_cond=32,
    c_hidden=[32],
    nhead=[4],
    blocks=[2],
    level_config=["CTA"],
    clip_embd=32,
    inject_effnet=[False],
)
wuerstchen_decoder = parts(
    W_TEXT, decoder=w_decoder, vqgan=lambda: vqgan(0.001), scheduler=noise, latent_dim_scale=4.0
)
add("WuerstchenPriorPipeline", OTHER, parts(W_TEXT, prior=w_prior, scheduler=noise), **LARGE)
add(
    "WuerstchenDecoderPipeline",
    OTHER,
    wuerstchen_decoder,
    image_embeddings=lambda: tensor(1, 4, 4, 4),
    guidance_scale=2.0,
)
add(
    "WuerstchenCombinedPipeline",
    TEXT,
    parts(
        wuerstchen_decoder,
        prior_prior=w_prior,
        prior_text_encoder=clip_text,
        prior_tokenizer=clip_tokenizer,
        prior_scheduler=noise,
    ),
    decoder_guidance_scale=2.0,
    **STEPS,
    **LARGE,
)
