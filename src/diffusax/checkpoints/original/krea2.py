"""The modules of Krea 2 in Krea's code.

Upstream: diffusers loaders/single_file_utils.py, convert_krea2_transformer_checkpoint_to_diffusers,
and loaders/lora_conversion_utils.py, _convert_non_diffusers_krea2_lora_to_diffusers.
"""

from diffusax.checkpoints.original.layout import Original

_OF_BLOCKS = {
    "attn.wq": "attn.to_q",
    "attn.wk": "attn.to_k",
    "attn.wv": "attn.to_v",
    "attn.wo": "attn.to_out.0",
    "attn.gate": "attn.to_gate",
    "attn.qknorm.qnorm": "attn.norm_q",
    "attn.qknorm.knorm": "attn.norm_k",
    "mlp.gate": "ff.gate",
    "mlp.up": "ff.up",
    "mlp.down": "ff.down",
    "prenorm": "norm1",
    "postnorm": "norm2",
}
_BLOCKS = {"blocks.*": "transformer_blocks.*", "txtfusion.*.*": "text_fusion.*.*"}

KREA2 = Original(
    known_by=("txtfusion.projector.weight", "first.weight"),
    known_by_in_diffusers=("text_fusion.projector.weight", "img_in.weight"),
    modules={
        "first": "img_in",
        "tmlp.0": "time_embed.linear_1",
        "tmlp.2": "time_embed.linear_2",
        "tproj.1": "time_mod_proj",
        "txtmlp.0": "txt_in.norm",
        "txtmlp.1": "txt_in.linear_1",
        "txtmlp.3": "txt_in.linear_2",
        "txtfusion.projector": "text_fusion.projector",
        **{
            f"{theirs}.{name}": f"{ours}.{own}"
            for theirs, ours in _BLOCKS.items()
            for name, own in _OF_BLOCKS.items()
        },
        "blocks.*.mod": "transformer_blocks.*",
        "last.linear": "final_layer.linear",
        "last.norm": "final_layer.norm",
        "last.modulation": "final_layer",
    },
    scales=("qnorm", "knorm", "prenorm", "postnorm", "txtmlp.0", "last.norm"),
    tables={"lin": "scale_shift_table"},
    flat=("blocks.",),
)
