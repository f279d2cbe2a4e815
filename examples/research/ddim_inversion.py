"""Edits a picture by DDIM and null-text inversion (Song et al. 2021, 4.3; Mokady et al. 2022, 3.2).

Guidance leads DDIM elsewhere, unless the embedding of the empty prompt is learnt for each step.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from PIL import Image

import diffusax
from diffusax.utils import captioned, contact_sheet

WORDS, SCALE = "a grinning face", 4.0
EDITS = ("a grinning face on a blue background", "a crying face on a pink background")


def guided(unet, x, row, text, empty, scale):
    """Returns the guided prediction for latents x, b h w c, at a row of a table."""
    both = unet.run(jnp.concatenate([x, x]), row.timestep[None], jnp.concatenate([empty, text]))
    without, given = jnp.split(both, 2)
    return without + scale * (given - without)


def invert(unet, inverse, latents, text, steps):
    """Returns the latents at each level, from the picture's to the noise: steps+1 b h w c."""
    state, table, step = inverse.functional(steps, latents)

    def body(state, row):
        state = step(state, row, guided(unet, state[0], row, text, text, 1.0))
        return state, state[0]

    return jnp.concatenate([latents[None], jax.lax.scan(body, state, table)[1]])


def generate(unet, scheduler, noise, text, empties, scale):
    """Returns latents by DDIM, with an embedding of the empty prompt for each step, n b t d."""
    state, table, step = scheduler.functional(len(empties), noise)

    def body(state, given):
        row, empty = given
        return step(state, row, guided(unet, state[0], row, text, empty, scale)), None

    return jax.lax.scan(body, state, (table, empties))[0][0]


def null_text(unet, scheduler, levels, text, empty, scale, iterations):
    """Returns the embeddings of the empty prompt that lead back along levels: n b t d."""
    state, table, step = scheduler.functional(len(levels) - 1, levels[-1])
    adam = optax.adam(1e-2)

    def body(carry, given):
        (state, empty), (row, target) = carry, given

        def after(empty):
            return step(state, row, guided(unet, state[0], row, text, empty, scale))

        def improve(_, carry):
            slope = jax.grad(lambda e: jnp.mean((after(e)[0] - target) ** 2))(carry[0])
            change, memory = adam.update(slope, carry[1])
            return carry[0] + change, memory

        empty, _ = jax.lax.fori_loop(0, iterations, improve, (empty, adam.init(empty)))
        return (after(empty), empty), empty

    return jax.lax.scan(body, (state, empty), (table, levels[:-1][::-1]))[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="ddim_inversion.png")
    parser.add_argument("--steps", type=int, default=25)
    args = parser.parse_args()
    pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
    leading = pipe.scheduler.with_options(timestep_spacing="leading")
    inverse = diffusax.DDIMInverseScheduler.from_config(leading.config)
    picture = pipe(WORDS, seed=0).images[0].rotate(30, Image.Resampling.BICUBIC, fillcolor="white")
    encoded = pipe.vae.encode(pipe.image_processor.preprocess(picture)).latent_dist.mode()
    latents, (text, empty) = jnp.moveaxis(encoded, 1, -1), pipe.encode_prompt(WORDS)
    latents *= pipe.vae.config["scaling_factor"]
    levels = jax.jit(invert, static_argnums=(1, 4))(pipe.unet, inverse, latents, text, args.steps)
    learn, draw = jax.jit(null_text, static_argnums=1), jax.jit(generate, static_argnums=1)
    learnt = learn(pipe.unet, leading, levels, text, empty, SCALE, 10)
    plain = jnp.broadcast_to(empty, learnt.shape)
    cells, runs = {"the picture": picture}, {"DDIM": (plain, 1.0), "with guidance": (plain, SCALE)}
    for name in (*runs, "null-text", *EDITS):
        words, given = name if name in EDITS else WORDS, runs.get(name, (learnt, SCALE))
        found = draw(pipe.unet, leading, levels[-1], pipe.encode_prompt(words)[0], *given)
        print(f"{name}: mean squared error of the latents {jnp.mean((found - latents) ** 2):.4f}")
        found = jnp.moveaxis(found, -1, 1) / pipe.vae.config["scaling_factor"]
        cells[name] = pipe.image_processor.postprocess(pipe.vae.decode(found).sample)[0]
    large = [cell.resize((128, 128)) for cell in cells.values()]
    contact_sheet(captioned(large, [*cells]), columns=6).save(args.output)


if __name__ == "__main__":
    main()
