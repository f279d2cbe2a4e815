"""Short programs as in diffusers' documentation; `d` is diffusers or diffusax.

Each leaves pictures (PIL, or arrays in [0, 1]) in `images`. The names in capitals are folders of
tiny checkpoints; `torch`, `load_image`, and the paths of pictures `INIT`, `MASK` and `CONTROL` are
there, too. `text` is where text encoders and tokenizers come from, transformers or diffusax.
"""

TEXT_TO_IMAGE = """
pipeline = d.DiffusionPipeline.from_pretrained(SD, torch_dtype=torch.float32, use_safetensors=True)
pipeline = pipeline.to("cpu")
pipeline.set_progress_bar_config(disable=True)
generator = torch.Generator("cpu").manual_seed(31)
image = pipeline("Astronaut in a jungle, cold color palette", generator=generator,
                 num_inference_steps=4, guidance_scale=3.5, height=64, width=64).images[0]
images = [image]
"""

SCHEDULERS = """
pipeline = d.StableDiffusionPipeline.from_pretrained(SD, safety_checker=None)
pipeline.set_progress_bar_config(disable=True)
prompt = ["portrait photo of an old warrior chief"] * 2
images = []
for make in (
    lambda: d.DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config,
                                                      use_karras_sigmas=True),
    lambda: d.LMSDiscreteScheduler.from_config(pipeline.scheduler.config),
    lambda: d.EulerDiscreteScheduler.from_pretrained(SD, subfolder="scheduler"),
    lambda: d.EulerAncestralDiscreteScheduler.from_config(pipeline.scheduler.config),
    lambda: d.UniPCMultistepScheduler.from_config(pipeline.scheduler.config),
    lambda: d.DDIMScheduler.from_config(pipeline.scheduler.config, timestep_spacing="trailing"),
):
    pipeline.scheduler = make()
    generator = [torch.Generator().manual_seed(i) for i in range(2)]
    images += pipeline(prompt, generator=generator, num_inference_steps=5).images
assert pipeline.scheduler.config.beta_start == 0.00085
"""

IMAGE_TO_IMAGE = """
pipeline = d.AutoPipelineForImage2Image.from_pretrained(
    SD, torch_dtype=torch.float32, variant=None, use_safetensors=True
)
pipeline.set_progress_bar_config(disable=True)
pipeline.enable_attention_slicing()
init_image = load_image(INIT).resize((64, 64))
prompt = "Astronaut in a jungle, cold color palette, muted colors, detailed, 8k"
image = pipeline(prompt, image=init_image, strength=0.8, guidance_scale=8.0,
                 negative_prompt="ugly, deformed", num_inference_steps=6,
                 generator=torch.manual_seed(0)).images[0]
images = [image]
"""

INPAINTING = """
pipeline = d.AutoPipelineForInpainting.from_pretrained(INPAINT, torch_dtype=torch.float32)
pipeline.set_progress_bar_config(disable=True)
init_image, mask_image = load_image(INIT).resize((64, 64)), load_image(MASK).resize((64, 64))
generator = torch.Generator("cpu").manual_seed(92)
mask_image = pipeline.mask_processor.blur(mask_image, blur_factor=3)
prompt = "concept art digital painting of an elven castle"
image = pipeline(prompt=prompt, image=init_image, mask_image=mask_image, generator=generator,
                 num_inference_steps=4).images[0]
images = [image]
"""

SHARED_COMPONENTS = """
text2img = d.AutoPipelineForText2Image.from_pretrained(SD)
text2img.set_progress_bar_config(disable=True)
img2img = d.AutoPipelineForImage2Image.from_pipe(text2img)
inpaint = d.StableDiffusionInpaintPipeline(**img2img.components, requires_safety_checker=False)
for pipe in (img2img, inpaint):
    pipe.set_progress_bar_config(disable=True)
first = text2img("a cat", generator=torch.manual_seed(1), num_inference_steps=4).images[0]
second = img2img("a dog", image=first, generator=torch.manual_seed(2), num_inference_steps=5,
                 strength=0.5).images[0]
mask = load_image(MASK).resize((64, 64)).convert("L")
third = inpaint("a fox", image=second, mask_image=mask, generator=torch.manual_seed(3),
                num_inference_steps=5, strength=0.7).images[0]
images = [first, second, third]
assert set(text2img.components) >= {"unet", "vae", "text_encoder", "tokenizer", "scheduler"}
"""

BASE_AND_REFINER = """
base = d.DiffusionPipeline.from_pretrained(XL, torch_dtype=torch.float32, use_safetensors=True)
refiner = d.DiffusionPipeline.from_pretrained(
    REFINER,
    text_encoder_2=base.text_encoder_2,
    vae=base.vae,
    torch_dtype=torch.float32,
    use_safetensors=True,
)
for pipe in (base, refiner):
    pipe.set_progress_bar_config(disable=True)
n_steps, high_noise_frac = 10, 0.8
prompt = "A majestic lion jumping from a big stone at night"
image = base(prompt=prompt, num_inference_steps=n_steps, denoising_end=high_noise_frac,
             output_type="latent", generator=torch.manual_seed(0)).images
image = refiner(prompt=prompt, num_inference_steps=n_steps, denoising_start=high_noise_frac,
                image=image, generator=torch.manual_seed(1)).images[0]
images = [image]
"""

CONTROLNET = """
controlnet = d.ControlNetModel.from_pretrained(CONTROLNET, torch_dtype=torch.float32,
                                               use_safetensors=True)
pipe = d.StableDiffusionControlNetPipeline.from_pretrained(
    SD, controlnet=controlnet, torch_dtype=torch.float32, safety_checker=None
)
pipe.scheduler = d.UniPCMultistepScheduler.from_config(pipe.scheduler.config)
pipe.set_progress_bar_config(disable=True)
canny_image = load_image(CONTROL).resize((64, 64))
output = pipe("the mona lisa", image=canny_image, num_inference_steps=5,
              controlnet_conditioning_scale=0.5, generator=torch.manual_seed(4))
multi = d.StableDiffusionControlNetPipeline.from_pretrained(
    SD, controlnet=[controlnet, controlnet], safety_checker=None
)
multi.set_progress_bar_config(disable=True)
both = multi("the mona lisa", image=[canny_image, canny_image], num_inference_steps=4,
             controlnet_conditioning_scale=[1.0, 0.8], generator=torch.manual_seed(4))
images = [output.images[0], both[0][0]]
"""

INSTRUCT = """
pipe = d.StableDiffusionInstructPix2PixPipeline.from_pretrained(
    INSTRUCT, torch_dtype=torch.float32, safety_checker=None
)
pipe.scheduler = d.EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)
pipe.set_progress_bar_config(disable=True)
image = load_image(INIT).resize((64, 64))
images = pipe("turn him into cyborg", image=image, num_inference_steps=6,
              image_guidance_scale=1, generator=torch.manual_seed(5)).images
"""

CALLBACKS = """
pipeline = d.StableDiffusionPipeline.from_pretrained(SD)
pipeline.set_progress_bar_config(disable=True)
seen = []

def callback_dynamic_cfg(pipe, step_index, timestep, callback_kwargs):
    seen.append((step_index, int(timestep), callback_kwargs["prompt_embeds"].shape[0]))
    if step_index == int(pipe.num_timesteps * 0.4):
        prompt_embeds = callback_kwargs["prompt_embeds"]
        pipe._guidance_scale = 0.0
        callback_kwargs["prompt_embeds"] = prompt_embeds.chunk(2)[-1]
    return callback_kwargs

dynamic = pipeline("a photo of an astronaut", generator=torch.manual_seed(1),
                   num_inference_steps=6, callback_on_step_end=callback_dynamic_cfg,
                   callback_on_step_end_tensor_inputs=["prompt_embeds"]).images[0]

def interrupt_callback(pipeline, i, t, callback_kwargs):
    seen.append((i, int(t), tuple(callback_kwargs["latents"].shape)))
    if i == 2:
        pipeline._interrupt = True
    return callback_kwargs

interrupted = pipeline("A photo of a cat", num_inference_steps=6,
                       generator=torch.manual_seed(2),
                       callback_on_step_end=interrupt_callback).images[0]

def shift(pipeline, i, t, callback_kwargs):
    callback_kwargs["latents"] = callback_kwargs["latents"] * 0.9
    return callback_kwargs

shifted = pipeline("A photo of a cat", num_inference_steps=5, generator=torch.manual_seed(2),
                   callback_on_step_end=shift).images[0]
images = [dynamic, interrupted, shifted]
numbers = [entry for entry in seen if len(entry) < 3 or entry[0] <= 2]
"""

EMBEDDINGS = """
pipeline = d.StableDiffusionPipeline.from_pretrained(SD, safety_checker=None)
pipeline.set_progress_bar_config(disable=True)
with torch.no_grad():
    prompt_embeds, negative_prompt_embeds = pipeline.encode_prompt(
        "a red cat playing with a ball", "cpu", 1, True, negative_prompt="blurry"
    )
one = pipeline(prompt_embeds=prompt_embeds, negative_prompt_embeds=negative_prompt_embeds,
               generator=torch.manual_seed(33), num_inference_steps=4).images[0]
with torch.no_grad():
    xl = d.StableDiffusionXLPipeline.from_pretrained(XL)
    xl.set_progress_bar_config(disable=True)
    (positive, negative, pooled, negative_pooled) = xl.encode_prompt("a cat", prompt_2="a house")
    two = xl(prompt_embeds=positive, negative_prompt_embeds=negative, pooled_prompt_embeds=pooled,
             negative_pooled_prompt_embeds=negative_pooled, num_inference_steps=3,
             generator=torch.manual_seed(3), output_type="np", return_dict=False)[0]
images = [one, two[0]]
"""

CONSISTENCY = """
unet = d.UNet2DConditionModel.from_pretrained(LCM, subfolder="unet", torch_dtype=torch.float32)
pipe = d.DiffusionPipeline.from_pretrained(LCM, unet=unet, torch_dtype=torch.float32)
pipe.scheduler = d.LCMScheduler.from_config(pipe.scheduler.config)
pipe.set_progress_bar_config(disable=True)
prompt = "Self-portrait oil painting, a beautiful cyborg with golden hair, 8k"
image = pipe(prompt=prompt, num_inference_steps=4, guidance_scale=8.0,
             generator=torch.manual_seed(0)).images[0]
merged = d.StableDiffusionPipeline.from_pretrained(SD)
merged.scheduler = d.LCMScheduler.from_config(merged.scheduler.config)
merged.set_progress_bar_config(disable=True)
other = merged(prompt, num_inference_steps=4, guidance_scale=1.0, generator=torch.manual_seed(0))
images = [image, other[0][0]]
"""

HALF_PRECISION = """
vae = d.AutoencoderKL.from_pretrained(XL, subfolder="vae", torch_dtype=torch.float32)
pipe = d.StableDiffusionXLPipeline.from_pretrained(
    XL_FP16, vae=vae, torch_dtype=torch.float32, variant="fp16", use_safetensors=True,
    low_cpu_mem_usage=False, add_watermarker=False
)
pipe.set_progress_bar_config(disable=True, leave=False)
pipe = pipe.to("cpu", torch.float32)
pipe.vae.enable_slicing()
pipe.vae.enable_tiling()
pipe.vae.disable_tiling()
pipe.vae.disable_slicing()
pipe.enable_attention_slicing()
pipe.unet.to(memory_format=torch.channels_last)
assert pipe.dtype is not None and pipe.device is not None
images = pipe("a cat", "a dog", num_inference_steps=3, generator=torch.manual_seed(1),
              original_size=(128, 128), target_size=(64, 64)).images
assert pipe.vae_scale_factor == 4
"""

SAVE_AND_LOAD = """
pipe = d.StableDiffusionPipeline.from_pretrained(SD, safety_checker=None)
pipe.set_progress_bar_config(disable=True)
pipe.scheduler = d.HeunDiscreteScheduler.from_config(pipe.scheduler.config)
pipe.save_pretrained(SAVED)
again = d.DiffusionPipeline.from_pretrained(SAVED)
again.set_progress_bar_config(disable=True)
pipe.unet.save_pretrained(SAVED + "-unet")
again.unet = d.UNet2DConditionModel.from_pretrained(SAVED + "-unet")
again.vae = d.AutoencoderKL.from_pretrained(OTHER, subfolder="vae")
images = again("a cat", num_inference_steps=3, generator=torch.manual_seed(1)).images
assert type(again.scheduler).__name__ == "HeunDiscreteScheduler"
"""

DECONSTRUCTED = """
from PIL import Image
from tqdm.auto import tqdm

vae = d.AutoencoderKL.from_pretrained(SD, subfolder="vae", use_safetensors=True)
tokenizer = text.CLIPTokenizer.from_pretrained(SD, subfolder="tokenizer")
text_encoder = text.CLIPTextModel.from_pretrained(
    SD, subfolder="text_encoder", use_safetensors=True
)
unet = d.UNet2DConditionModel.from_pretrained(SD, subfolder="unet", use_safetensors=True)
scheduler = d.UniPCMultistepScheduler.from_pretrained(SD, subfolder="scheduler")

torch_device = "cpu"
vae.to(torch_device)
text_encoder.to(torch_device)
unet.to(torch_device)

prompt = ["a photograph of an astronaut riding a horse"]
height = 128
width = 128
num_inference_steps = 4
guidance_scale = 7.5
generator = torch.manual_seed(0)
batch_size = len(prompt)

text_input = tokenizer(
    prompt, padding="max_length", max_length=tokenizer.model_max_length, truncation=True,
    return_tensors="pt"
)
with torch.no_grad():
    text_embeddings = text_encoder(text_input.input_ids.to(torch_device))[0]

max_length = text_input.input_ids.shape[-1]
uncond_input = tokenizer([""] * batch_size, padding="max_length", max_length=max_length,
                         return_tensors="pt")
uncond_embeddings = text_encoder(uncond_input.input_ids.to(torch_device))[0]
text_embeddings = torch.cat([uncond_embeddings, text_embeddings])

latents = torch.randn(
    (batch_size, unet.config.in_channels, height // 8, width // 8),
    generator=generator,
    device=torch_device,
)
latents = latents * scheduler.init_noise_sigma

scheduler.set_timesteps(num_inference_steps)
for t in tqdm(scheduler.timesteps, disable=True):
    latent_model_input = torch.cat([latents] * 2)
    latent_model_input = scheduler.scale_model_input(latent_model_input, timestep=t)
    with torch.no_grad():
        noise_pred = unet(latent_model_input, t, encoder_hidden_states=text_embeddings).sample
    noise_pred_uncond, noise_pred_text = noise_pred.chunk(2)
    noise_pred = noise_pred_uncond + guidance_scale * (noise_pred_text - noise_pred_uncond)
    latents = scheduler.step(noise_pred, t, latents).prev_sample

latents = 1 / 0.18215 * latents
with torch.no_grad():
    image = vae.decode(latents).sample
image = (image / 2 + 0.5).clamp(0, 1).squeeze()
exact = image.numpy()
image = (image.permute(1, 2, 0) * 255).to(torch.uint8).cpu().numpy()
images = [Image.fromarray(image), exact]
"""

ENCODED_BY_HAND = """
pipe = d.StableDiffusionPipeline.from_pretrained(SD, safety_checker=None)
processor = pipe.image_processor
pixels = processor.preprocess(load_image(INIT), height=64, width=64)
with torch.no_grad():
    posterior = pipe.vae.encode(pixels).latent_dist
    latents = posterior.sample(torch.Generator().manual_seed(3)) * pipe.vae.config.scaling_factor
    decoded = pipe.vae.decode(latents / pipe.vae.config.scaling_factor, return_dict=False)[0]
    exact = pipe.vae.decode(posterior.mode()).sample
images = [*processor.postprocess(decoded), *processor.postprocess(exact, output_type="np")]
numbers = pixels.shape == (1, 3, 64, 64), len(pipe.tokenizer("a cat").input_ids)
"""

NOISE_ALONE_BY_HAND = """
scheduler = d.DDPMScheduler.from_pretrained(NOISE_ALONE)
model = d.UNet2DModel.from_pretrained(NOISE_ALONE, use_safetensors=True).to("cpu")
scheduler.set_timesteps(6)
sample_size = model.config.sample_size
torch.manual_seed(4)
noise = torch.randn((1, 3, sample_size, sample_size), device="cpu")
input = noise
for t in scheduler.timesteps:
    with torch.no_grad():
        noisy_residual = model(input, t).sample
    previous_noisy_sample = scheduler.step(noisy_residual, t, input).prev_sample
    input = previous_noisy_sample
image = (input / 2 + 0.5).clamp(0, 1).squeeze()
exact = image.permute(1, 2, 0).numpy()
image = (image.permute(1, 2, 0) * 255).round().to(torch.uint8).cpu().numpy()
whole = d.DDPMPipeline.from_pretrained(NOISE_ALONE, use_safetensors=True)
whole.set_progress_bar_config(disable=True)
images = [exact, image]
images += whole(num_inference_steps=5, generator=torch.Generator().manual_seed(2)).images
"""

IMAGE_TO_IMAGE_BY_HAND = """
pipe = d.StableDiffusionPipeline.from_pretrained(SD, safety_checker=None)
vae, unet, processor = pipe.vae, pipe.unet, pipe.image_processor
scheduler = d.EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)
generator = torch.Generator().manual_seed(7)
num_inference_steps, strength, guidance_scale = 8, 0.6, 5.0

tokens = pipe.tokenizer(["", "a red fox"], padding="max_length",
                        max_length=pipe.tokenizer.model_max_length, truncation=True,
                        return_tensors="pt")
with torch.no_grad():
    text_embeddings = pipe.text_encoder(tokens.input_ids)[0]
    pixels = processor.preprocess(load_image(INIT), height=64, width=64)
    clean = vae.encode(pixels).latent_dist.sample(generator) * vae.config.scaling_factor

scheduler.set_timesteps(num_inference_steps)
start = num_inference_steps - int(num_inference_steps * strength)
timesteps = scheduler.timesteps[start:]
scheduler.set_begin_index(start)
noise = torch.randn(clean.shape, generator=generator)
latents = scheduler.add_noise(clean, noise, timesteps[:1])
for t in timesteps:
    both = scheduler.scale_model_input(torch.cat([latents] * 2), t)
    with torch.no_grad():
        unprompted, prompted = unet(both, t, text_embeddings, return_dict=False)[0].chunk(2)
    guided = unprompted + guidance_scale * (prompted - unprompted)
    latents = scheduler.step(guided, t, latents, generator=generator, return_dict=False)[0]
with torch.no_grad():
    image = vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0]
images = processor.postprocess(image, output_type="np")
"""

SCHEDULERS_BY_HAND = """
unet = d.UNet2DConditionModel.from_pretrained(SD, subfolder="unet")
config = d.DDIMScheduler.from_pretrained(SD, subfolder="scheduler").config
generator = torch.Generator().manual_seed(2)
context = torch.randn(1, 5, unet.config.cross_attention_dim, generator=generator)
images = []
for make, steps, options in (
    (d.HeunDiscreteScheduler, 3, {}),
    (d.PNDMScheduler, 4, {}),
    (d.DPMSolverMultistepScheduler, 5, {"use_karras_sigmas": True}),
    (d.DDPMScheduler, 3, {}),
):
    scheduler = make.from_config(config, **options)
    scheduler.set_timesteps(steps)
    sample = torch.randn(1, unet.config.in_channels, 16, 16, generator=generator)
    sample = sample * scheduler.init_noise_sigma
    for t in scheduler.timesteps:
        with torch.no_grad():
            predicted = unet(scheduler.scale_model_input(sample, t), t, context).sample
        extra = {"generator": generator} if make is d.DDPMScheduler else {}
        sample = scheduler.step(predicted, t, sample, **extra).prev_sample
    images.append(sample)
"""

PROGRAMS = {
    name.lower(): text for name, text in dict(globals()).items() if name.isupper() and len(name) > 3
}
