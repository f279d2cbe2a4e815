"""Fits a drawing of 2D Gaussians to a text by Score Distillation Sampling.

B. Poole et al., "DreamFusion: Text-to-3D using 2D Diffusion" (2022), equation 3, with a small
differentiable renderer in the place of a NeRF: Gaussians on a plane, blended from front to back.

    python examples/research/sds.py --prompt "a red apple on a green background"
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import tyro

import diffusax
from diffusax.utils import labelled_grid


def random_scene(key, count):
    """Returns the parameters of random Gaussians, a dict of arrays with `count` rows."""
    keys = jax.random.split(key, 3)
    return {
        "centres": jax.random.uniform(keys[0], (count, 2), minval=-1),
        "log_scales": jnp.full((count, 2), jnp.log(0.12)),
        "angles": jax.random.uniform(keys[1], (count,), maxval=jnp.pi),
        "colours": 0.3 * jax.random.normal(keys[2], (count, 3)),
        "opacities": jnp.full((count,), -1.0),
        "background": jnp.zeros(3),
    }


def render(scene, side):
    """Returns the image, 3 side side in [-1, 1], of Gaussians of which the first is in front."""
    line = jnp.linspace(-1, 1, side)
    offsets = jnp.stack(jnp.meshgrid(line, line), -1) - scene["centres"][:, None, None]
    c, s = jnp.cos(scene["angles"]), jnp.sin(scene["angles"])
    turned = jnp.einsum("nhwi,ijn->nhwj", offsets, jnp.array([[c, -s], [s, c]]))
    distances = ((turned / jnp.exp(scene["log_scales"])[:, None, None]) ** 2).sum(-1)
    alpha = jax.nn.sigmoid(scene["opacities"])[:, None, None] * jnp.exp(-distances / 2)
    through = jnp.cumprod(1 - alpha, 0)
    weights = alpha * jnp.concatenate([jnp.ones_like(through[:1]), through[:-1]])
    image = jnp.einsum("nhw,nc->chw", weights, jnp.tanh(scene["colours"]))
    return image + through[-1] * jnp.tanh(scene["background"])[:, None, None]


def sds_loss(scene, unet, vae, scheduler, contexts, weight, t, noise):
    """Returns a number whose gradient is SDS's: w(t) (noise_hat - noise) dx/dscene.

    contexts: of the prompt and without, 2 s d. t: n. noise: n c h w; one image, n noises.
    """
    image = render(scene, vae.config.sample_size)
    latents = vae.encode(image[None]).latent_dist.mean * vae.config.scaling_factor
    x = scheduler.add_noise(jnp.repeat(latents, len(t), 0), noise, t)
    raw = unet(jnp.tile(x, (2, 1, 1, 1)), jnp.tile(t, 2), jnp.repeat(contexts, len(t), 0)).sample
    with_prompt, without = jnp.split(raw, 2)
    raw = without + weight * (with_prompt - without)
    w = 1 - scheduler.alphas_cumprod[t][:, None, None, None]
    gradient = (w * (scheduler.get_predicted_noise(raw, t, x) - noise)).mean(0)
    return (jax.lax.stop_gradient(gradient) * latents).sum()


def main(
    model: str = "emoji",
    prompt: str = "a red apple on a green background",
    guidance: float = 10.0,
    gaussians: int = 256,
    iterations: int = 600,
    batch: int = 4,
    learning_rate: float = 0.02,
    output: Path = Path("out/sds.png"),
):
    """Optimizes a scene, and draws it at the beginning, in between, and at the end."""
    pipe = diffusax.DiffusionPipeline.from_pretrained(model)
    contexts = jnp.concatenate(pipe.encode_prompt(prompt))
    side, optimizer = pipe.unet.config.sample_size, optax.adam(learning_rate)

    @jax.jit
    def update(scene, state, unet, vae, key):
        for_t, for_noise = jax.random.split(key)
        t = jax.random.randint(for_t, (batch,), 20, 980)
        noise = jax.random.normal(for_noise, (batch, unet.config.in_channels, side, side))
        given = unet, vae, pipe.scheduler, contexts, guidance, t, noise
        updates, state = optimizer.update(jax.grad(sds_loss)(scene, *given), state)
        return optax.apply_updates(scene, updates), state

    scene = random_scene(jax.random.key(0), gaussians)
    state, shown = optimizer.init(scene), {}
    for i in range(iterations + 1):
        if i % max(1, iterations // 5) == 0:
            shown[str(i)] = render(scene, pipe.vae.config.sample_size)
        scene, state = update(scene, state, pipe.unet, pipe.vae, jax.random.key(1 + i))
    images = pipe.image_processor.postprocess(jnp.stack([*shown.values()]))
    output.parent.mkdir(parents=True, exist_ok=True)
    labelled_grid([images], [], [*shown]).save(output)


if __name__ == "__main__":
    tyro.cli(main)
