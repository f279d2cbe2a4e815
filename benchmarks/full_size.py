"""Full-size networks, as differences from the defaults of their configs."""

SD1 = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
SD2 = {
    "sample_size": 64,
    "cross_attention_dim": 1024,
    "attention_head_dim": (5, 10, 20, 20),
    "use_linear_projection": True,
}
SDXL = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
VIT_L = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
VIT_H = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
    "hidden_act": "gelu",
}
BIG_G = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
    "hidden_act": "gelu",
}
QWEN3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
# Qwen3-VL's config.json, of which text_config is Qwen3's but for the positions.
QWEN3_VL_4B = {
    "text_config": {**QWEN3_4B, "max_position_embeddings": 262144, "rope_theta": 5e6},
    "vision_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "depth": 24,
        "out_hidden_size": 2560,
        "deepstack_visual_indexes": (5, 11, 17),
    },
    "tie_word_embeddings": True,
}
QWEN3_VL_8B = {
    "text_config": {
        **QWEN3_VL_4B["text_config"],
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
    "vision_config": {"out_hidden_size": 4096},
}
QWEN2_5_VL_7B = {
    "text_config": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "vision_config": {"hidden_size": 1280, "depth": 32, "out_hidden_size": 3584},
}
T5_XXL = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
Z_IMAGE = {"axes_lens": (1536, 512, 512)}
FLUX_DEV = {"guidance_embeds": True}
KLEIN_4B = {
    "num_layers": 5,
    "num_single_layers": 20,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "guidance_embeds": False,
}
VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
}
KL16 = {
    **VAE,
    "latent_channels": 16,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
# umt5-xxl's config.json: T5's of that size but for the vocabulary.
UMT5_XXL = {**T5_XXL, "vocab_size": 256384}
WAN_1_3B = {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960}
WAN_5B = {
    "num_layers": 30,
    "num_attention_heads": 24,
    "ffn_dim": 14336,
    "in_channels": 48,
    "out_channels": 48,
}
# The statistics of latents, which are no matter of shapes, stand for 48 channels' own.
WAN_2_2_VAE = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "is_residual": True,
    "scale_factor_spatial": 16,
    "latents_mean": (0.0,) * 48,
    "latents_std": (1.0,) * 48,
}
