"""What each argument of a call means, for the docstrings of all calls and for the command line."""

DESCRIPTIONS = {
    "prompt": "What to draw, one text or a list; or `prompt_embeds`, n t d.",
    "prompt_2": "For the second text encoder, where it differs.",
    "prompt_3": "For the third text encoder, where it differs.",
    "image": "The picture or pictures to start from, edit or be steered by: paths, PIL images, or "
    "arrays in [0, 1].",
    "image_reference": "Further pictures to look at, in the size of the first: one or several for "
    "all pictures that are drawn, or one for each.",
    "mask_image": "White where to draw anew, black where to keep.",
    "control_image": "What the ControlNets see; a list with one entry for each of several.",
    "masked_image_latents": "b 4 h/8 w/8, in the place of what is encoded of the masked picture.",
    "height": "In pixels, as `width`: a multiple of the autoencoder's factor (8).",
    "max_area": "In pixels, of the picture to draw, whose shape is that of `height` and `width`.",
    "padding_mask_crop": "Draw only the masked part and as many pixels around it, at full size.",
    "strength": "How much of the noise to add, from 0 to 1, and so how much may change.",
    "num_inference_steps": "Of the sampler; `strength` leaves some of them out.",
    "timesteps": "Custom ones instead of steps, for samplers that take them; or `sigmas`.",
    "original_inference_steps": "Of the grid that a consistency model was distilled on.",
    "denoising_start": "The fraction of the run that was done before, by another model.",
    "denoising_end": "The fraction of the run to stop at, for another model to go on.",
    "guidance_scale": "Classifier-free guidance; 1 and less turns it off, of Z-Image's 0.",
    "true_cfg_scale": "Classifier-free guidance of FLUX.1, where a negative prompt is given; 1 and "
    "less turns it off.",
    "image_guidance_scale": "How closely to keep to the picture that is edited.",
    "guidance_rescale": "phi of Lin et al. 2024, section 3.4.",
    "guidance_start": "The fraction of the run from which on to guide, until `guidance_end`.",
    "guide": "A rule of guidance of one's own, a function (predictions k h w c, step) -> h w c; by "
    "default the weighted sum of classifier-free guidance.",
    "cfg_normalization": "The most that guidance may lengthen a prediction, as a multiple of its "
    "norm without guidance; True is 1, and False or 0 sets no limit.",
    "cfg_truncation": "The time from 0 (noise) to 1 (image) after which no guidance applies; 1 and "
    "None mean all.",
    "negative_prompt": "What to steer away from; or `negative_prompt_embeds`.",
    "num_images_per_prompt": "The pictures of a prompt stand together in the result.",
    "batch_size": "How many pictures to draw.",
    "eta": "DDIM's, from 0 (deterministic) to 1.",
    "use_clipped_model_output": "Let DDIM take the noise from the picture that it has clipped, as "
    "Glide does.",
    "generator": "A seed, a torch.Generator or a list of them, for PyTorch's numbers; a generator "
    "of the CPU goes on with every call.",
    "seed": "Of the run, or one per picture; None takes one from the system.",
    "noise": "'jax', or 'torch' for the numbers of torch.Generator().manual_seed(seed).",
    "latents": "The initial noise, images c h/8 w/8, instead of drawing it.",
    "controlnet_conditioning_scale": "What the ControlNets count for; a list for several.",
    "control_mode": "The kind of the ControlNet's picture, a number, for one that knows several; a "
    "list for several ControlNets.",
    "guess_mode": "Let the ControlNet's picture speak, with no or little of a prompt.",
    "control_guidance_start": "The fraction of the run from which on the ControlNets steer, until "
    "`control_guidance_end`.",
    "adapter_conditioning_scale": "What the T2I-Adapters count for; a list for several.",
    "adapter_conditioning_factor": "The fraction of the steps for which the T2I-Adapters steer.",
    "original_size": "SDXL's micro-conditioning, (height, width), with `crops_coords_top_left` and "
    "`target_size`; their `negative_` forms for the negative prompt.",
    "aesthetic_score": "The refiner's, from 0 to 10; `negative_aesthetic_score` likewise.",
    "clip_skip": "How many of the text encoder's last layers to leave out.",
    "output_type": "'pil', 'np' or 'jax' (b h w 3 in [0, 1]), 'pt' (b 3 h w), or 'latent' "
    "(b c h/8 w/8).",
    "callback_on_step_end": "Called as (pipe, step, timestep, tensors) after every step; it may "
    "return changed tensors, and False stops the run.",
    "adapters": "The names and weights of LoRAs that were loaded, `{'style': 0.8}`, or a list with "
    "one dictionary for each prompt; by default those of `set_adapters`.",
    "joint_attention_kwargs": "`{'scale': 0.5}` multiplies the weights of all LoRAs.",
    "attention_kwargs": "`{'scale': 0.5}` multiplies the weights of all LoRAs.",
    "cross_attention_kwargs": "`{'scale': 0.5}` multiplies the weights of all LoRAs, and "
    "`ip_adapter_masks` says where IP-Adapters count.",
    "negative_ip_adapter_image": "None, as `negative_ip_adapter_image_embeds`: there are no "
    "IP-Adapters for FLUX.1.",
    "ip_adapter_image": "The picture that the IP-Adapter sees; a list with one entry for each of "
    "several, where an entry may be a list of pictures; or `ip_adapter_image_embeds`, a list of "
    "arrays as `prepare_ip_adapter_image_embeds` returns it.",
    "max_sequence_length": "The most tokens of a prompt, with those of the chat around it; what is "
    "longer is cut off.",
    "text_encoder_out_layers": "Which hidden states of the language model are a prompt's "
    "embeddings, side by side; 0 is what the first layer reads.",
    "long_prompt": "Use all of a long prompt, in windows as long as the text encoder reads.",
    "prompt_weighting": "Read A1111's syntax: the weight of `(word:1.3)`, and texts that change "
    "from step to step or that AND joins.",
}
