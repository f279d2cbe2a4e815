"""What each argument of a call means, for the docstrings of all calls and for the command line."""

DESCRIPTIONS = {
    "prompt": "The text that says what to generate, or a list of texts. Its embeddings, n t d, can "
    "be given as `prompt_embeds` instead.",
    "prompt_embeds_mask": "Which tokens of `prompt_embeds` count, n t, for Krea 2, Qwen-Image "
    "and Qwen-Image 2.1; for those of negative prompts it is `negative_prompt_embeds_mask`.",
    "prompt_2": "The text for the second text encoder; by default the same.",
    "prompt_3": "The text for the third text encoder; by default the same.",
    "image": "The image or images to start from, to edit or to be guided by: paths, PIL images, or "
    "arrays with values in [0, 1].",
    "image_reference": "Further images that the model looks at, of the size of the first: one or "
    "several for all results, or one for each.",
    "last_image": "The image that a video ends with, for networks that were trained with one.",
    "image_embeds": "CLIP's last but one hidden states of the image, n i d, in the image's place.",
    "video": "The video to start from: its frames as a list of PIL images or paths, or as an array "
    "f h w 3 with values in [0, 1], or several of these, one for each prompt.",
    "mask_image": "The mask: white where the image is generated anew, black where it is kept.",
    "control_image": "The image that the ControlNet sees; for several ControlNets a list with one "
    "entry for each.",
    "masked_image_latents": "The latents of the masked image, b 4 h/8 w/8, instead of encoding it.",
    "height": "The height in pixels, like `width` a multiple of the autoencoder's factor (8).",
    "max_area": "The area of the result in pixels; its shape is that of `height` and `width`.",
    "padding_mask_crop": "Generates only the masked part and so many pixels around it, enlarged to "
    "the full size.",
    "strength": "How much the image may change, from 0 to 1: the part of the noise that is added.",
    "num_inference_steps": "The number of the sampler's steps; `strength` leaves some of them out.",
    "timesteps": "The timesteps instead of a number of steps, for samplers that take them; "
    "`sigmas` gives noise levels instead.",
    "original_inference_steps": "The number of steps on which a consistency model was distilled.",
    "denoising_start": "The fraction of the steps that another model has done before.",
    "denoising_end": "The fraction of the steps after which to stop, for another model to go on.",
    "guidance_scale": "The scale of classifier-free guidance, which is off at 1 and less (for "
    "Z-Image and Krea 2 at 0).",
    "guidance_scale_2": "The scale of the less noisy steps, which another transformer of Wan 2.2 "
    "predicts; by default the same.",
    "true_cfg_scale": "The scale of classifier-free guidance of FLUX.1, which needs a negative "
    "prompt and is off at 1 and less.",
    "output_resolution": "The square root of the area in pixels to which Qwen-Image 2.1 brings "
    "images to look at, and that of the result where height and width are left out.",
    "use_kv_cache": "Without effect: what does not change from step to step is always computed "
    "once.",
    "mask": "What is to change of each frame of `video`: one image for each frame, white where new "
    "pixels are generated; by default all.",
    "reference_images": "Images of things or persons that the video shows, one or a list; each is "
    "fitted into the frame on white.",
    "conditioning_scale": "How much `video`, `mask` and `reference_images` control the result, for "
    "all layers or a list with a number for each of the network's vace_layers.",
    "image_guidance_scale": "How closely the result keeps to the image that is edited.",
    "guidance_rescale": "How much guidance is rescaled against overexposure (Lin et al. 2024, "
    "section 3.4).",
    "guidance_start": "The fraction of the steps after which guidance begins; it ends at "
    "`guidance_end`.",
    "guide": "A guidance rule of your own, a function (predictions k h w c, step) -> h w c; by "
    "default the weighted sum of classifier-free guidance.",
    "hooks": "Functions (value, at) -> (value, kept) by regular expressions of names of layers: "
    "they read or change what passes through the network. What they keep is the result's `kept`.",
    "cfg_normalization": "The most that guidance may lengthen a prediction, as a multiple of its "
    "norm without guidance; True is 1, and False or 0 sets no limit.",
    "cfg_truncation": "The time from 0 (noise) to 1 (image) after which no guidance applies; 1 and "
    "None mean all.",
    "negative_prompt": "The text to steer away from. Its embeddings can be given as "
    "`negative_prompt_embeds` instead.",
    "num_images_per_prompt": "The number of images for each prompt, which stand together in the "
    "result.",
    "num_videos_per_prompt": "The number of videos for each prompt, which stand together in the "
    "result.",
    "num_frames": "The number of frames of a video, one more than a multiple of those of which the "
    "autoencoder makes one (4).",
    "batch_size": "The number of images.",
    "eta": "The noise in DDIM's steps, from 0 (deterministic) to 1 (as DDPM).",
    "use_clipped_model_output": "Computes the noise in DDIM's steps again from the clipped image, "
    "as GLIDE does.",
    "generator": "A torch.Generator, a seed or a list of them, from which PyTorch's random numbers "
    "come; a generator on the CPU continues from call to call. Or a key of `jax.random`, see "
    "`seed`.",
    "seed": "The seed of the call, or a list with one for each image; by default a random one. "
    "Also a key of `jax.random`, or one for each image: `jax.random.key(s)` stands for the seed s.",
    "noise": "The source of the random numbers: 'jax', or 'torch' for those of "
    "torch.Generator().manual_seed(seed).",
    "latents": "The noise to start from, one c h/8 w/8 for each image, instead of random numbers.",
    "controlnet_conditioning_scale": "The weight of the ControlNet; for several ControlNets a "
    "list.",
    "control_mode": "The number of the kind of image that the ControlNet sees, for one that knows "
    "several kinds; a list for several ControlNets.",
    "guess_mode": "Lets the ControlNet recognize the image with little or no help of a prompt.",
    "control_guidance_start": "The fraction of the steps after which the ControlNet applies; it "
    "ends at `control_guidance_end`.",
    "adapter_conditioning_scale": "The weight of the T2I-Adapter; a list for several T2I-Adapters.",
    "adapter_conditioning_factor": "The fraction of the steps for which the T2I-Adapter applies.",
    "original_size": "SDXL's micro-conditioning as (height, width), with `crops_coords_top_left` "
    "and `target_size`; the names that begin with `negative_` are for the negative prompt.",
    "aesthetic_score": "The aesthetic score that SDXL's refiner aims at, from 0 to 10; "
    "`negative_aesthetic_score` is the one that it avoids.",
    "clip_skip": "The number of the text encoder's last layers to leave out.",
    "output_type": "The form of the images: 'pil', 'np' or 'jax' (b h w 3 in [0, 1]), 'pt' "
    "(b 3 h w), or 'latent' (b c h/8 w/8).",
    "callback_on_step_end": "A function that is called with (pipe, step, timestep, tensors) after "
    "every step; it may return changed tensors, and False stops the call.",
    "adapters": "The weights of loaded LoRAs by name, such as `{'style': 0.8}`, or a list with one "
    "dictionary for each prompt; by default those of `set_adapters`.",
    "joint_attention_kwargs": "`{'scale': 0.5}` multiplies the weights of all LoRAs.",
    "attention_kwargs": "`{'scale': 0.5}` multiplies the weights of all LoRAs.",
    "cross_attention_kwargs": "`{'scale': 0.5}` multiplies the weights of all LoRAs, and "
    "`ip_adapter_masks` says where IP-Adapters apply.",
    "negative_ip_adapter_image": "Must be None, like `negative_ip_adapter_image_embeds`: diffusax "
    "has no IP-Adapters for FLUX.1.",
    "ip_adapter_image": "The image that the IP-Adapter sees; for several IP-Adapters a list, whose "
    "entries may be lists of images. Arrays from `prepare_ip_adapter_image_embeds` can be given as "
    "`ip_adapter_image_embeds` instead.",
    "max_sequence_length": "The most tokens of a prompt, including those of the chat template; a "
    "longer one is cut off.",
    "text_encoder_out_layers": "The hidden states of the language model that are joined to a "
    "prompt's embeddings; 0 is the input of the first layer.",
    "long_prompt": "Whether to read all of a long prompt, in windows as long as the text encoder "
    "reads.",
    "prompt_weighting": "Whether to read A1111's syntax: weights such as `(word:1.3)`, texts that "
    "change from step to step, and AND.",
}
