"""The modules of FLUX.1, FLUX.2 and FLUX.3 in Black Forest Labs' code.

Upstream: diffusers loaders/single_file_utils.py, convert_flux_transformer_checkpoint_to_diffusers,
convert_flux2_transformer_checkpoint_to_diffusers and
convert_flux3_transformer_checkpoint_to_diffusers; for XLabs' LoRAs
loaders/lora_conversion_utils.py, _convert_xlabs_flux_lora_to_diffusers.
"""

from diffusax.checkpoints.original.layout import Original, Table

_IMAGE_QKV = tuple(f"transformer_blocks.*.attn.to_{name}" for name in "qkv")
_TEXT_QKV = tuple(f"transformer_blocks.*.attn.add_{name}_proj" for name in "qkv")
_SINGLE_QKV = tuple(f"single_transformer_blocks.*.attn.to_{name}" for name in "qkv")
_BOTH: Table = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
    "final_layer.linear": "proj_out",
    "double_blocks.*.img_attn.qkv": _IMAGE_QKV,
    "double_blocks.*.img_attn.norm.query_norm": "transformer_blocks.*.attn.norm_q",
    "double_blocks.*.img_attn.norm.key_norm": "transformer_blocks.*.attn.norm_k",
    "double_blocks.*.img_attn.proj": "transformer_blocks.*.attn.to_out.0",
    "double_blocks.*.txt_attn.qkv": _TEXT_QKV,
    "double_blocks.*.txt_attn.norm.query_norm": "transformer_blocks.*.attn.norm_added_q",
    "double_blocks.*.txt_attn.norm.key_norm": "transformer_blocks.*.attn.norm_added_k",
    "double_blocks.*.txt_attn.proj": "transformer_blocks.*.attn.to_add_out",
    "single_blocks.*.norm.query_norm": "single_transformer_blocks.*.attn.norm_q",
    "single_blocks.*.norm.key_norm": "single_transformer_blocks.*.attn.norm_k",
}
"""What FLUX.1 and FLUX.2 have in common."""
# The original code reads the shift of the last norm before its scale.
_SWAPPED = ("final_layer.adaLN_modulation.1",)
_SCALES = ("query_norm", "key_norm")

FLUX = Original(
    known_by=(
        *("img_in.weight", "vector_in.in_layer.weight", "final_layer.linear.weight"),
        "double_blocks.0.img_mod.lin.weight",
    ),
    known_by_in_diffusers=(
        *("x_embedder.weight", "time_text_embed.text_embedder.linear_1.weight"),
        *("norm_out.linear.weight", "single_transformer_blocks.0.proj_mlp.weight"),
    ),
    modules={
        **_BOTH,
        "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
        "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
        "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
        "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
        "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
        "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
        "double_blocks.*.img_mod.lin": "transformer_blocks.*.norm1.linear",
        "double_blocks.*.img_mlp.0": "transformer_blocks.*.ff.net.0.proj",
        "double_blocks.*.img_mlp.2": "transformer_blocks.*.ff.net.2",
        "double_blocks.*.txt_mod.lin": "transformer_blocks.*.norm1_context.linear",
        "double_blocks.*.txt_mlp.0": "transformer_blocks.*.ff_context.net.0.proj",
        "double_blocks.*.txt_mlp.2": "transformer_blocks.*.ff_context.net.2",
        "single_blocks.*.modulation.lin": "single_transformer_blocks.*.norm.linear",
        "single_blocks.*.linear1": (*_SINGLE_QKV, "single_transformer_blocks.*.proj_mlp"),
        "single_blocks.*.linear2": "single_transformer_blocks.*.proj_out",
    },
    swapped=_SWAPPED,
    scales=_SCALES,
    adapters={
        "double_blocks.*.processor.qkv_lora1": _IMAGE_QKV,
        "double_blocks.*.processor.proj_lora1": "transformer_blocks.*.attn.to_out.0",
        "double_blocks.*.processor.qkv_lora2": _TEXT_QKV,
        "double_blocks.*.processor.proj_lora2": "transformer_blocks.*.attn.to_add_out",
        "single_blocks.*.processor.qkv_lora": _SINGLE_QKV,
        "single_blocks.*.processor.proj_lora": "single_transformer_blocks.*.proj_out",
    },
)
FLUX2 = Original(
    known_by=("double_stream_modulation_img.lin.weight", "final_layer.linear.weight"),
    known_by_in_diffusers=("double_stream_modulation_img.linear.weight", "norm_out.linear.weight"),
    modules={
        **_BOTH,
        "time_in.in_layer": "time_guidance_embed.timestep_embedder.linear_1",
        "time_in.out_layer": "time_guidance_embed.timestep_embedder.linear_2",
        "guidance_in.in_layer": "time_guidance_embed.guidance_embedder.linear_1",
        "guidance_in.out_layer": "time_guidance_embed.guidance_embedder.linear_2",
        "double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
        "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
        "single_stream_modulation.lin": "single_stream_modulation.linear",
        "double_blocks.*.img_mlp.0": "transformer_blocks.*.ff.linear_in",
        "double_blocks.*.img_mlp.2": "transformer_blocks.*.ff.linear_out",
        "double_blocks.*.txt_mlp.0": "transformer_blocks.*.ff_context.linear_in",
        "double_blocks.*.txt_mlp.2": "transformer_blocks.*.ff_context.linear_out",
        "single_blocks.*.linear1": "single_transformer_blocks.*.attn.to_qkv_mlp_proj",
        "single_blocks.*.linear2": "single_transformer_blocks.*.attn.to_out",
    },
    swapped=_SWAPPED,
    scales=_SCALES,
)
_BLOCKS = {
    "content_mode_blocks.*.*": "mode_blocks.*.*",
    "txt_mode_blocks.*": "txt_mode_blocks.*",
    "single_blocks.*": "single_transformer_blocks.*",
}
"""The blocks of FLUX.3, which are all alike."""
_OF_BLOCK = {
    **{f"{name}_proj": f"attn.to_{name}" for name in "qkv"},
    "attn_out": "attn.to_out.0",
    "norm.query_norm": "attn.norm_q",
    "norm.key_norm": "attn.norm_k",
    "mlp_in": "ff.linear_in",
    "mlp_out": "ff.linear_out",
}
FLUX3 = Original(
    known_by=("early_stream_modulations.image.lin.weight", "final_layer.image.linear.weight"),
    known_by_in_diffusers=(
        "early_stream_modulations.image.linear.weight",
        "norm_out.linear.weight",
    ),
    modules={
        "emb_in.*": "x_embedders.*",
        "txt_in": "context_embedder",
        "time_in.in_layer": "timestep_embedder.linear_1",
        "time_in.out_layer": "timestep_embedder.linear_2",
        "ref_time_in.in_layer": "target_timestep_embedder.linear_1",
        "ref_time_in.out_layer": "target_timestep_embedder.linear_2",
        "early_stream_modulations.*.lin": "early_stream_modulations.*.linear",
        "single_stream_modulations.*.lin": "single_stream_modulations.*.linear",
        "final_layer.image.adaLN_modulation.1": "norm_out.linear",
        "final_layer.image.linear": "proj_out",
        **{
            f"{theirs}.{name}": f"{ours}.{path}"
            for theirs, ours in _BLOCKS.items()
            for name, path in _OF_BLOCK.items()
        },
    },
    swapped=("final_layer.image.adaLN_modulation.1",),
    scales=_SCALES,
    leftovers=("repa_projectors.",),
)
