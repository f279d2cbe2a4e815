"""What both distillations share: steps of DDIM, and samples of few steps beside those of many."""

import jax.numpy as jnp

from diffusax.utils import labelled_grid

PROMPTS = ("a red apple", "a lion", "a pizza", "a fire engine", "a dog face", "a sunflower")


def levels(scheduler, t):
    """Returns (alpha, sigma), n 1 1 1, at timesteps n; a run ends at -1, with the level of 0."""
    alpha_bar = scheduler.alphas_cumprod[jnp.maximum(t, 0)][:, None, None, None]
    return jnp.sqrt(alpha_bar), jnp.sqrt(1 - alpha_bar)


def ddim(unet, scheduler, x, t, after, context):
    """Returns x at the timesteps `after`, n, by one step of DDIM from the timesteps t, n."""
    raw = unet(x, t, context).sample
    alpha, sigma = levels(scheduler, after)
    x0 = scheduler.get_predicted_original_sample(raw, t, x)
    return alpha * x0 + sigma * scheduler.get_predicted_noise(raw, t, x)


def sample(pipe, unet, noise, context, steps, output_type="latent"):
    """Returns what the pipeline draws with another network: latents b c h w, or pictures."""
    pipe.unet = unet
    options = {"num_inference_steps": steps, "guidance_scale": 1.0, "output_type": output_type}
    return pipe(prompt_embeds=context, latents=noise, **options).images


def report(pipe, networks, noise, context, output):
    """Prints how far samples are from the first network's, and draws them; names end in steps."""
    rows, first = [], None
    for name, unet in networks.items():
        given = pipe, unet, noise, context, int(name.split()[-1])
        found = sample(*given)
        first = found if first is None else first
        print(f"{name}: squared distance {((found - first) ** 2).mean():.4f}")
        rows.append(sample(*given, output_type="pil"))
    output.parent.mkdir(parents=True, exist_ok=True)
    labelled_grid(rows, [*networks]).save(output)
