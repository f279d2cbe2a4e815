"""Generates images with the programs in this folder, without diffusax: python draw.py "a prompt".

It needs jax, numpy, pillow, safetensors and tokenizers.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from PIL import Image
from safetensors.flax import load_file
from tokenizers import Tokenizer

HERE = Path(__file__).parent


def run(name: str, arguments: dict[str, Any]) -> Any:
    """The results of a program; its parameters are added to the arguments."""
    index = json.loads((HERE / "programs.json").read_text("utf-8"))[f"{name}.stablehlo"]
    for prefix, file in index["parameters"].items():
        tensors = load_file(HERE / file)
        arguments |= {prefix + key: tensors[key] for key in tensors}
    program = export.deserialize(bytearray((HERE / f"{name}.stablehlo").read_bytes()))
    return program.call({key: arguments[key] for key in index["arguments"]})


def main() -> None:
    """Generates the images that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--negative-prompt", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="picture-{}.png")
    options = parser.parse_args()

    # The sampler's table, guidance and sizes of the call that was exported; b images.
    inputs = load_file(HERE / "inputs.safetensors")
    b, *shape = inputs["plan.latents"].shape
    guided = inputs["plan.step_inputs.weights"].shape[-1]

    # Texts to tokens to embeddings: of the prompt and, with guidance, of the negative prompt.
    texts = [options.prompt, options.negative_prompt][: 1 + guided]
    files = map(str, sorted(HERE.glob("tokenizer*.json")))
    ids = [[e.ids for e in Tokenizer.from_file(file).encode_batch(texts)] for file in files]
    tokens = {f"tokens.ids.{i}": jnp.array(rows, jnp.int32)[:, None] for i, rows in enumerate(ids)}
    encoded = zip(*run("encode_texts", tokens))
    context, *pooled = (jnp.repeat(jnp.stack(parts, 1), b, 0) for parts in encoded)
    inputs["plan.conditions.context"] = context
    if pooled:
        inputs["plan.conditions.pooled"] = pooled[0]

    # Noise: a key for each image, also for samplers that draw more on the way.
    seed = jax.random.key(options.seed, impl="threefry2x32")
    keys = jax.vmap(lambda i: jax.random.fold_in(seed, i))(jnp.arange(b))
    firsts = jax.vmap(lambda key: jax.random.fold_in(key, 0))(keys)
    noise = jax.vmap(lambda key: jax.random.normal(key, shape, jnp.float32))(firsts)
    latents = inputs["init_noise_sigma"] * noise
    inputs["plan.noise"] = jax.random.key_data(keys)

    # The state is the latents and five slots of the sampler's own.
    inputs["state"] = jnp.zeros((6, *latents.shape), jnp.float32).at[0].set(latents)
    state = run("denoise", inputs)
    images, _ = run("decode", {"latents": state[0]})
    for i, image in enumerate(np.asarray(images)):
        Image.fromarray((image * 255).round().astype(np.uint8)).save(options.output.format(i))


if __name__ == "__main__":
    main()
