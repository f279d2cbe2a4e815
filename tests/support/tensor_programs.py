"""Short programs as in notebooks and guides for diffusers that go on in PyTorch with results.

They change embeddings, latents and callbacks' values in place, call methods of tensors, and read
schedulers' numbers as tensors; see tutorials.py for the names that are there.
"""

EMBEDDING_ARITHMETIC = """
pipe = d.StableDiffusionPipeline.from_pretrained(SD, safety_checker=None)
pipe.set_progress_bar_config(disable=True)
prompt_embeds, negative_embeds = pipe.encode_prompt("a red cat, a ball", "cpu", 1, True, "blurry")
other_embeds, _ = pipe.encode_prompt("a dog", device="cpu", num_images_per_prompt=1,
                                     do_classifier_free_guidance=False)
prompt_embeds[:, 2] *= 1.3
mixed = [torch.lerp(prompt_embeds, other_embeds, weight) for weight in (0.3, 0.8)]
mixed[1] = mixed[1] * (prompt_embeds.std() / mixed[1].std())
images = []
for embeds in mixed:
    images += pipe(prompt_embeds=embeds, negative_prompt_embeds=negative_embeds,
                   generator=torch.manual_seed(3), num_inference_steps=3).images
batch = torch.cat(mixed)
images += pipe(prompt_embeds=batch, negative_prompt_embeds=negative_embeds.repeat(2, 1, 1),
               generator=[torch.Generator().manual_seed(i) for i in range(2)],
               num_inference_steps=3).images
untouched, _ = pipe.encode_prompt("a red cat, a ball", "cpu", 1, False)
numbers = bool((untouched[:, 2] * 1.3 - prompt_embeds[:, 2]).abs().max() < 1e-5)
"""

EMBEDDING_ARITHMETIC_XL = """
pipe = d.StableDiffusionXLPipeline.from_pretrained(XL)
pipe.set_progress_bar_config(disable=True)
with torch.inference_mode():
    first = pipe.encode_prompt("a cat", negative_prompt="blurry")
    second = pipe.encode_prompt("a house", prompt_2="on a hill", negative_prompt="blurry")
    embeds, negative, pooled, negative_pooled = [a.lerp_(b, 0.4) for a, b in zip(first, second)]
    images = pipe(prompt_embeds=embeds, negative_prompt_embeds=negative,
                  pooled_prompt_embeds=pooled, negative_pooled_prompt_embeds=negative_pooled,
                  num_inference_steps=3, generator=torch.manual_seed(3)).images
"""

CALLBACKS_IN_PLACE = """
pipe = d.StableDiffusionPipeline.from_pretrained(SD, safety_checker=None)
pipe.set_progress_bar_config(disable=True)
frames, seen = [], []

def noisier(pipe, step, timestep, kwargs):
    latents = kwargs["latents"]
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(step))
    assert torch.randn_like(latents).dtype == latents.dtype
    latents.mul_(0.95).add_(0.1 * noise.to(latents.device))
    seen.append((step, timestep.item()))
    return kwargs

def shifted(pipe, step, timestep, kwargs):
    if timestep > 500:
        kwargs["prompt_embeds"][1:, 1:4] *= 0.5
        kwargs["latents"][:, 0] -= kwargs["latents"][:, 0].mean()
    return {}

def preview(pipe, step, timestep, kwargs):
    with torch.no_grad():
        image = pipe.vae.decode(kwargs["latents"] / pipe.vae.config.scaling_factor).sample
    image = (image / 2 + 0.5).clamp(0, 1)
    frames.append(image.cpu().permute(0, 2, 3, 1).float().numpy()[0])
    return kwargs

def older(step, timestep, latents):
    latents.mul_(0.9)
    frames.append(latents.detach().cpu().numpy()[0, :3].copy() / 10)

images = []
for callback in (noisier, shifted, preview):
    images += pipe("a cat", num_inference_steps=4, generator=torch.manual_seed(1),
                   callback_on_step_end=callback,
                   callback_on_step_end_tensor_inputs=["latents", "prompt_embeds"]).images
images += pipe("a cat", num_inference_steps=4, generator=torch.manual_seed(1), callback=older,
               callback_steps=1).images
images += frames
numbers = seen
"""

GUIDANCE_BY_HAND = """
pipe = d.StableDiffusionPipeline.from_pretrained(SD, safety_checker=None)
device = torch.device("cpu")
pipe = pipe.to(device)
pipe.enable_attention_slicing()
scheduler = d.EulerDiscreteScheduler.from_config(pipe.scheduler.config)
scheduler.set_timesteps(4, device=device)
guidance_scale, guidance_rescale = 6.0, 0.7
generator = torch.Generator(device).manual_seed(5)

with torch.inference_mode(), torch.autocast("cpu", enabled=False):
    embeds, negative = pipe.encode_prompt("a red fox", device, 2, True, negative_prompt="grey")
    context = torch.cat([negative, embeds])
    latents = torch.randn((2, pipe.unet.config.in_channels, 8, 8), generator=generator,
                          device=device, dtype=embeds.dtype)
    latents = latents * scheduler.init_noise_sigma
    predicted = []
    for i, t in enumerate(scheduler.timesteps.to(device)):
        sigma = scheduler.sigmas[i]
        model_input = torch.cat([latents] * 2)
        scaled = scheduler.scale_model_input(model_input, t)
        assert torch.allclose(scaled, model_input / ((sigma**2 + 1) ** 0.5), atol=1e-5)
        noise_pred = pipe.unet(scaled, t.expand(scaled.shape[0]), encoder_hidden_states=context,
                               return_dict=False)[0]
        plain, prompted = noise_pred.chunk(2)
        guided = plain + guidance_scale * (prompted - plain)
        std = prompted.std(dim=[1, 2, 3], keepdim=True) / guided.std(dim=[1, 2, 3], keepdim=True)
        guided = guided * (guidance_rescale * std + 1 - guidance_rescale)
        predicted.append(latents - sigma * guided)
        latents = scheduler.step(guided, t, latents).prev_sample
    image = pipe.vae.decode(latents / pipe.vae.config.scaling_factor, return_dict=False)[0]
    rough = pipe.vae.decode(predicted[1] / pipe.vae.config.scaling_factor).sample
images = [*pipe.image_processor.postprocess(image, output_type="pil"),
          *pipe.image_processor.postprocess(rough.detach(), output_type="pt")]
"""

INVERSION = """
pipe = d.StableDiffusionPipeline.from_pretrained(SD, safety_checker=None)
pipe.scheduler = d.DDIMScheduler.from_config(pipe.scheduler.config)
input_image = load_image(INIT).resize((64, 64))
steps = 8
with torch.no_grad():
    pixels = pipe.image_processor.preprocess(input_image).to("cpu", dtype=torch.float32)
    latents = pipe.vae.encode(pixels)
    latents = 0.18215 * latents.latent_dist.mean
    embeds, negative = pipe.encode_prompt("a picture", "cpu", 1, True, "")
    pipe.scheduler.set_timesteps(steps, device="cpu")
    timesteps = list(reversed(pipe.scheduler.timesteps))
    alphas = pipe.scheduler.alphas_cumprod.to("cpu")
    for i in range(1, steps):
        t = timesteps[i]
        both = torch.cat([latents] * 2)
        plain, prompted = pipe.unet(both, t, torch.cat([negative, embeds])).sample.chunk(2)
        noise = plain + 2.0 * (prompted - plain)
        current = max(0, t.item() - (1000 // steps))
        alpha, alpha_next = alphas[current], alphas[t]
        latents = (latents - (1 - alpha).sqrt() * noise) * (alpha_next.sqrt() / alpha.sqrt())
        latents = latents + (1 - alpha_next).sqrt() * noise
    image = pipe.vae.decode(latents / pipe.vae.config.scaling_factor).sample
    image = (image / 2 + 0.5).clamp(0, 1).detach().cpu().permute(0, 2, 3, 1).numpy()
images = [image[0]]
"""

LATENTS_ENLARGED = """
pipe = d.StableDiffusionPipeline.from_pretrained(SD, safety_checker=None)
again = d.StableDiffusionImg2ImgPipeline.from_pipe(pipe)
for own in (pipe, again):
    own.set_progress_bar_config(disable=True)
latents = pipe("a house", height=64, width=64, num_inference_steps=3, output_type="latent",
               generator=torch.manual_seed(1)).images
shape = tuple(latents.shape)
with torch.inference_mode():
    larger = torch.nn.functional.interpolate(latents, scale_factor=2, mode="bilinear")
images = again("a house", image=larger, strength=0.6, num_inference_steps=5,
               generator=torch.manual_seed(2)).images
again.vae.enable_tiling()
decoded = again.vae.decode(latents.float() / again.vae.config.scaling_factor, return_dict=False)[0]
images += again.image_processor.postprocess(decoded.detach(), output_type="pil")
(plain,) = pipe("a house", height=64, width=64, num_inference_steps=3, output_type="pt",
                generator=torch.manual_seed(1), return_dict=False)[:1]
images += [plain.mul(0.5).add(0.25).clamp(0, 1).permute(0, 2, 3, 1)[0]]
numbers = shape, tuple(larger.shape), plain.dtype == torch.float32
"""

LATENTS_BETWEEN = """
import numpy

def slerp(v0, v1, t):
    a, b = v0.flatten(), v1.flatten()
    dot = torch.sum(a / a.norm() * b / b.norm()).clamp(-1, 1)
    theta = torch.acos(dot)
    return (torch.sin((1 - t) * theta) * v0 + torch.sin(t * theta) * v1) / torch.sin(theta)

pipe = d.StableDiffusionPipeline.from_pretrained(SD, torch_dtype=torch.float32)
pipe.set_progress_bar_config(disable=True)
shape = (1, pipe.unet.config.in_channels, 16, 16)
one, two = (torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
start, _ = pipe.encode_prompt("a cat", "cpu", 1, False)
end, _ = pipe.encode_prompt("a dog", "cpu", 1, False)
negative = pipe.encode_prompt("", "cpu", 1, False)[0]
images = []
for step in numpy.linspace(0, 1, 3):
    step = float(step)
    images += pipe(prompt_embeds=slerp(start, end, step), negative_prompt_embeds=negative,
                   latents=slerp(one, two, step), num_inference_steps=2, height=64, width=64).images
"""

TENSORS_SAVED = """
import os
os.makedirs(SAVED)
pipe = d.StableDiffusionPipeline.from_pretrained(SD, safety_checker=None)
pipe.set_progress_bar_config(disable=True)
embeds, negative = pipe.encode_prompt("a cat", "cpu", 1, True)
torch.save({"prompt": embeds, "negative": negative}, SAVED + "/embeds.pt")
latents = pipe(prompt_embeds=embeds, negative_prompt_embeds=negative, num_inference_steps=2,
               output_type="latent", generator=torch.manual_seed(1))[0]
torch.save(latents.cpu().clone(), SAVED + "/latents.pt")
found, latents = torch.load(SAVED + "/embeds.pt"), torch.load(SAVED + "/latents.pt")
images = pipe(prompt_embeds=found["prompt"], negative_prompt_embeds=found["negative"],
              num_inference_steps=2, latents=latents.half().float()).images
"""

VARIATIONS = """
pipe = d.AutoPipelineForImage2Image.from_pretrained(SD, torch_dtype=torch.float32)
pipe.set_progress_bar_config(disable=True)
image = load_image(INIT).resize((64, 64))
generator = [torch.Generator("cpu").manual_seed(seed) for seed in (11, 12, 13)]
with torch.autocast("cpu", enabled=False):
    images = pipe(["a fox"] * 3, image=image, strength=0.7, num_inference_steps=4,
                  generator=generator).images
pixels = pipe.image_processor.preprocess([image] * 2, height=64, width=64)
pixels[1] = pixels[1].flip(-1)
images.extend(pipe(["a fox", "an owl"], image=pixels, strength=0.7, num_inference_steps=4,
                   negative_prompt=["grey"] * 2, generator=generator[:2], output_type="pt").images)
latents = pipe.vae.encode(pixels).latent_dist.mode() * pipe.vae.config.scaling_factor
images.extend(pipe(["a fox", "an owl"], image=latents, strength=0.7, num_inference_steps=4,
                   generator=torch.manual_seed(1), output_type="np").images)
"""

NOISE_IN_LATENTS = """
pipe = d.StableDiffusionPipeline.from_pretrained(SD, safety_checker=None)
scheduler = d.DDPMScheduler.from_config(pipe.scheduler.config)
pixels = pipe.image_processor.preprocess(load_image(INIT), height=64, width=64)
generator = torch.Generator().manual_seed(4)
with torch.no_grad():
    latents = pipe.vae.encode(pixels).latent_dist.sample(generator)
    latents = latents * pipe.vae.config.scaling_factor
    noise = torch.randn(latents.shape, generator=generator)
    timesteps = torch.randint(0, scheduler.config.num_train_timesteps, (1,), generator=generator)
    noisy = scheduler.add_noise(latents, noise, timesteps.long())
    ids = pipe.tokenizer("a fox", padding="max_length", truncation=True, return_tensors="pt",
                         max_length=pipe.tokenizer.model_max_length).input_ids
    context = pipe.text_encoder(ids)[0]
    predicted = pipe.unet(noisy, timesteps, context).sample
    loss = torch.nn.functional.mse_loss(predicted.float(), noise.float(), reduction="mean")
    alpha = scheduler.alphas_cumprod[timesteps].view(-1, 1, 1, 1)
    weight = (1 - scheduler.alphas_cumprod[timesteps]).view(-1, 1, 1, 1)
    grad = weight * (predicted - noise)
    clean = (noisy - (1 - alpha).sqrt() * predicted) / alpha.sqrt()
numbers = round(loss.item(), 4)
images = [grad.numpy(), clean.double().numpy() / 8, noisy.squeeze(0)[:3].numpy()]
"""

NOTEBOOK_HELPERS = """
from tqdm.auto import tqdm

pipe = d.StableDiffusionPipeline.from_pretrained(SD, safety_checker=None)
pipe.set_progress_bar_config(disable=True)
pipe.scheduler = d.DDIMScheduler.from_config(pipe.scheduler.config)
device = pipe._execution_device if hasattr(pipe, "_execution_device") else "cpu"
generator = torch.Generator().manual_seed(1)
with torch.no_grad():
    embeddings = pipe._encode_prompt("a watercolour", "cpu", 1, True, "blurry")
    pipe.scheduler.set_timesteps(5, device="cpu")
    extra = pipe.prepare_extra_step_kwargs(generator, 0.0)
    latents = pipe.prepare_latents(1, pipe.unet.config.in_channels, 64, 64, embeddings.dtype,
                                   torch.device("cpu"), generator)
    with pipe.progress_bar(total=5) as bar:
        for i, t in enumerate(pipe.scheduler.timesteps):
            scaled = pipe.scheduler.scale_model_input(torch.cat([latents] * 2), t)
            plain, prompted = pipe.unet(scaled, t, encoder_hidden_states=embeddings).sample.chunk(2)
            noise_pred = plain + 7.5 * (prompted - plain)
            latents = pipe.scheduler.step(noise_pred, t, latents, **extra).prev_sample
            bar.update()
    rows = [int(t) for t in pipe.progress_bar(pipe.scheduler.timesteps)]
    images = pipe.numpy_to_pil(pipe.decode_latents(latents))
numbers = rows, tuple(latents.shape)
"""

FLUX_EMBEDDINGS = """
pipe = d.FluxPipeline.from_pretrained(FLUX, torch_dtype=torch.float32)
pipe.set_progress_bar_config(disable=True)
embeds, pooled, text_ids = pipe.encode_prompt("a cat", prompt_2="a cat on a hill",
                                              max_sequence_length=16)
embeds[:, 3:5] *= 0.5
pooled = pooled + 0.1 * torch.randn(pooled.shape, generator=torch.manual_seed(4))
shapes = []

def soften(pipe, step, timestep, kwargs):
    kwargs["latents"].mul_(0.97)
    shapes.append((tuple(kwargs["latents"].shape), round(timestep.item(), 2)))
    return {"latents": kwargs["latents"]}

latents = pipe(prompt_embeds=embeds, pooled_prompt_embeds=pooled, num_inference_steps=2, height=32,
               width=32, generator=torch.manual_seed(1), callback_on_step_end=soften,
               output_type="latent").images
latents = d.FluxPipeline._unpack_latents(latents, 32, 32, pipe.vae_scale_factor)
packed = d.FluxPipeline._pack_latents(latents, *latents.shape).to(pipe.device)
latents = latents.to(pipe.vae.dtype) / pipe.vae.config.scaling_factor
decoded = pipe.vae.decode(latents + pipe.vae.config.shift_factor, return_dict=False)[0]
images = [packed.detach().numpy() / 4]
images += pipe.image_processor.postprocess(decoded.detach(), output_type="pil")
numbers = shapes, text_ids.dtype == torch.float32, tuple(text_ids.shape)
"""

GENERATORS_GO_ON = """
pipe = d.StableDiffusionPipeline.from_pretrained(SD, safety_checker=None)
pipe.set_progress_bar_config(disable=True)
pipe.scheduler = d.EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)
generator = torch.Generator("cpu").manual_seed(0)
images = []
for prompt in ("a cat", "a dog"):
    images += pipe(prompt, generator=generator, num_inference_steps=2).images
torch.manual_seed(7)
for _ in range(2):
    images += pipe("a fox", num_inference_steps=2).images
numbers = torch.randn(1).item(), torch.randn(1, generator=generator).item()
"""

PROGRAMS = {
    name.lower(): text for name, text in dict(globals()).items() if name.isupper() and len(name) > 3
}
