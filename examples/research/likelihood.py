"""Says how likely pictures are under prompts, by the probability flow ODE (Song et al. 2021, 4.3).

In y = x / signal, the clean latents plus sigma times noise, the flow is dy / dsigma = the predicted
noise. log p of the latents is that of the noise at the end, plus the integral of the divergence on
the way, which one random probe estimates (Hutchinson; equations 39 and 40).
"""

import argparse

import diffrax
import jax
import jax.numpy as jnp
import numpy as np

import diffusax
from diffusax.utils import captioned, contact_sheet

WORDS = ("a red apple", "a full moon", "a grinning face", "a red heart")
LAST = 940
"""The timestep at which the flow ends; at the last one of this checkpoint there is no signal."""


def noise_at(unet, scheduler, y, log_sigma, text):
    """Returns the noise that a network for v predicts in y, b h w c, at a log sigma."""
    alphas = scheduler.alphas_cumprod[: LAST + 1]
    t = jnp.interp(log_sigma, 0.5 * jnp.log((1 - alphas) / alphas), jnp.arange(LAST + 1.0))
    sigma = jnp.exp(log_sigma)
    scale = jnp.sqrt(1 + sigma**2)
    x = y / scale
    return (unet.run(x, t[None], text) + sigma * x) / scale


def log_likelihood(unet, scheduler, latents, text, probe, steps):
    """Returns log p(latents | text) in nats for each image: b. probe: -1 or 1, as latents."""
    alphas = scheduler.alphas_cumprod
    start, end = (0.5 * jnp.log((1 - alphas[t]) / alphas[t]) for t in (0, LAST))

    def flow(log_sigma, carry, _):
        def slope(y):
            return jnp.exp(log_sigma) * noise_at(unet, scheduler, y, log_sigma, text)

        change, pulled = jax.vjp(slope, carry[0])
        return change, (pulled(probe)[0] * probe).sum((1, 2, 3))

    terms, first = diffrax.ODETerm(flow), (latents / jnp.sqrt(alphas[0]), jnp.zeros(len(latents)))
    solution = diffrax.diffeqsolve(
        terms, diffrax.Heun(), start, end, (end - start) / steps, first, max_steps=steps + 1
    )
    (noise, divergence) = (leaf[0] for leaf in solution.ys)
    variance = 1 + jnp.exp(2 * end)
    prior = -0.5 * (noise**2 / variance + jnp.log(2 * jnp.pi * variance)).sum((1, 2, 3))
    return prior + divergence - 0.5 * latents[0].size * jnp.log(alphas[0])


def main():
    """Writes a sheet: emoji, and how many bits each prompt takes for a number of their latents."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="likelihood.png")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
    found = jnp.asarray(pipe(list(WORDS), seed=0, output_type="latent").images)
    pictures = pipe.image_processor.postprocess(
        pipe.vae.decode(found / pipe.vae.config["scaling_factor"]).sample
    )
    latents = jnp.moveaxis(found, 1, -1)
    probe = jax.random.rademacher(jax.random.key(0), latents.shape, jnp.float32)
    measure = jax.jit(log_likelihood, static_argnums=(1, 5))
    nats = [
        measure(pipe.unet, pipe.scheduler, latents, jnp.repeat(text, 4, 0), probe, args.steps)
        for text in (pipe.encode_prompt(words)[0] for words in WORDS)
    ]
    bits = -np.array(nats).T / latents[0].size / np.log(2)
    texts = ["; ".join(f"{w} {b:.2f}" for w, b in zip(WORDS, row, strict=True)) for row in bits]
    print("bits for a number of the latents", *texts, sep="\n")
    large = [picture.resize((160, 160)) for picture in pictures]
    contact_sheet(captioned(large, texts), columns=4).save(args.output)


if __name__ == "__main__":
    main()
