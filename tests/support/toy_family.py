"""A family of checkpoints that src/ knows nothing of: what it takes to add one.

A transformer over image and text tokens, three text encoders whose prompts have lengths of their
own, bytes as tokens, flow matching, and a rule of guidance that keeps the norm.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import diffusax
from diffusax.models import MODELS
from diffusax.models.autoencoders.kl import AutoencoderKL, AutoencoderKLConfig
from diffusax.models.layers.embeddings import timestep_embedding
from diffusax.models.layers.layers import Embedding, Linear
from diffusax.networks import initialize
from diffusax.pipelines.families import Denoiser, Family, diffusers_components
from diffusax.pipelines.pipeline.call import documented
from diffusax.pipelines.plan.guidance import apply_guidance
from diffusax.pipelines.plan.plan import Conditions, Prompt, Tokens
from diffusax.pipelines.tasks import tasks

LONGEST = 48


@dataclasses.dataclass(frozen=True)
class ToyTransformerConfig:
    class_name: ClassVar[str] = "ToyTransformer"
    fixed: ClassVar[dict] = {}
    ignored: ClassVar[frozenset] = frozenset()

    in_channels: int = 4
    width: int = 16
    context_dim: int = 8
    pooled_dim: int = 16
    sample_size: int = 16


class ToyTransformer(nnx.Module):
    """x: b h w c, timestep b, context b s d of which lengths b count, pooled b p -> b h w c."""

    config_class = ToyTransformerConfig
    tensor_rules = ((r"up\.kernel", 1), (r"down\.kernel", 0))

    def __init__(self, config, *, rngs):
        d = config.width
        self.x_in, self.context_in = (
            Linear(4, d, rngs=rngs),
            Linear(config.context_dim, d, rngs=rngs),
        )
        self.time, self.pooled = Linear(8, d, rngs=rngs), Linear(config.pooled_dim, d, rngs=rngs)
        self.qkv, self.out = Linear(d, 3 * d, rngs=rngs), Linear(d, d, rngs=rngs)
        self.up, self.down = Linear(d, 4 * d, rngs=rngs), Linear(4 * d, d, rngs=rngs)
        self.x_out = Linear(d, config.in_channels, rngs=rngs)

    def __call__(self, x, timestep, context, lengths, pooled):
        b, h, w, _ = x.shape
        vector = self.time(timestep_embedding(timestep, 8)) + self.pooled(pooled)
        tokens = self.x_in(x).reshape(b, h * w, -1) + vector[:, None]
        joint = jnp.concatenate([self.context_in(context), tokens], axis=1)
        q, k, v = jnp.split(self.qkv(joint), 3, axis=-1)
        known = jnp.arange(joint.shape[1]) - context.shape[1]
        seen = (known[None] >= 0) | (jnp.arange(joint.shape[1])[None] < lengths[:, None])
        scores = jnp.where(seen[:, None], q @ k.mT / q.shape[-1] ** 0.5, -jnp.inf)
        joint = joint + self.out(jax.nn.softmax(scores) @ v)
        joint = joint + self.down(nnx.gelu(self.up(joint)))
        return self.x_out(joint[:, context.shape[1] :]).reshape(b, h, w, -1)


@dataclasses.dataclass(frozen=True)
class ToyTextEncoderConfig:
    class_name: ClassVar[str] = "ToyTextEncoder"
    fixed: ClassVar[dict] = {}
    ignored: ClassVar[frozenset] = frozenset()

    width: int = 8


class ToyTextEncoder(nnx.Module):
    """Bytes n t -> n t d."""

    config_class = ToyTextEncoderConfig

    def __init__(self, config, *, rngs):
        self.table = Embedding(257, config.width, rngs=rngs)
        self.mix = Linear(config.width, config.width, rngs=rngs)

    def __call__(self, ids):
        return nnx.tanh(self.mix(20 * self.table(ids)))


MODELS |= {"ToyTransformer": ToyTransformer, "ToyTextEncoder": ToyTextEncoder}


class ToyTokenizer:
    """Texts to their bytes; 256 fills up to the longest, in steps of eight."""

    @classmethod
    def from_folder(cls, path):
        assert json.loads((Path(path) / "toy.json").read_text()) == {"kind": "bytes"}
        return cls()

    def save(self, path):
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "toy.json").write_text('{"kind": "bytes"}')

    def __call__(self, texts, length=None):
        coded = [list(text.encode())[:LONGEST] or [32] for text in texts]
        size = length or -(-max(map(len, coded)) // 8) * 8
        ids = np.full((len(coded), size), 256, np.int32)
        for row, codes in zip(ids, coded):
            row[: len(codes)] = codes
        return ids


def tokenize(tokenizers, texts, call, length=None):
    first, second, third = (t(x) for t, x in zip(tokenizers, texts))
    third = third if length is None else tokenizers[2](texts[2], length)
    return Tokens((first, second, third), lengths=(third < 256).sum(1).astype(np.int32))


def tokenize_caption(tokenizers, caption):
    first, second, third = (t([caption], LONGEST)[0] for t in tokenizers)
    return Tokens((first, second, third), lengths=np.int32((third < 256).sum()))


def encode(encoders, params, tokens, clip_skip=None):
    states = [net.apply(p, ids) for net, p, ids in zip(encoders, params, tokens.ids)]
    counted = [(ids < 256)[..., None] for ids in tokens.ids[:2]]
    pooled = [(x * m).sum(1) / m.sum(1) for x, m in zip(states, counted)]
    return Prompt(states[2], jnp.concatenate(pooled, axis=-1), tokens.lengths)


def conditions(components, call, prompt, size, scales):
    lengths = prompt.lengths
    if lengths is None:
        lengths = np.full(prompt.context.shape[:2], prompt.context.shape[2], np.int32)
    return Conditions(prompt.context, prompt.pooled, lengths)


class ToyDenoiser(Denoiser):
    context_dim = 8
    sample_size = property(lambda self: (self.network.config.sample_size,) * 2)

    def __call__(self, params, x, timestep, conditions, inputs=None, *, gradient_checkpointing=""):
        told = conditions.context, conditions.lengths, conditions.pooled
        return self.network.apply(params["transformer"], x, timestep / 1000, *told)

    def guide(self, predictions, inputs):
        guided = apply_guidance(predictions, inputs.weights, inputs.rescale)
        norms = (jnp.linalg.norm(y, axis=-1, keepdims=True) for y in (predictions[:, 0], guided))
        return guided * jnp.divide(*norms)


def schedule_options(components, call, size):
    if not components.scheduler.use_dynamic_shifting:
        return {}
    rows, columns, _ = components.latents.shape(*size)
    return {"mu": components.scheduler.dynamic_mu(rows * columns)}


def batch_key(components, call):
    lengths = [len((t or "").encode()) for t in (call.prompt, call.negative_prompt)]
    return -(-max(lengths) // 8)


TOY = Family(
    name="Toy",
    components=diffusers_components(
        "transformer",
        *((f"tokenizer{n}", f"text_encoder{n}") for n in ("", "_2", "_3")),
        tokenizer=ToyTokenizer,
    ),
    tokenize=tokenize,
    tokenize_caption=tokenize_caption,
    encode=encode,
    conditions=conditions,
    denoiser=ToyDenoiser.of,
    schedule_options=schedule_options,
    batch_key=batch_key,
    embeds=("prompt_embeds", "pooled_prompt_embeds"),
)
# fmt: off


class ToyPipeline(diffusax.DiffusionPipeline):
    """Prompts to images."""

    family = TOY
    task = staticmethod(tasks.text_to_image)

    @documented
    def __call__(
        self, prompt=None, prompt_2=None, prompt_3=None, height=None, width=None,
        num_inference_steps=4, guidance_scale=3.0, negative_prompt=None, num_images_per_prompt=1,
        latents=None, output_type="np", return_dict=True, callback_on_step_end=None, *, seed=None,
        noise="jax",
    ):
        """Generates images of the prompts."""


class ToyImg2ImgPipeline(diffusax.DiffusionPipeline):
    """Images changed as a prompt says."""

    family = TOY
    task = staticmethod(tasks.image_to_image)

    @documented
    def __call__(
        self, prompt=None, image=None, strength=0.5, num_inference_steps=4, guidance_scale=3.0,
        negative_prompt=None, output_type="np", return_dict=True, *, seed=None, noise="jax",
    ):
        """Changes images."""


# fmt: on
def random(module, config, seed):
    """A model all of whose parameters are random."""
    model = initialize(module, config, seed=seed)
    rng = np.random.default_rng(seed)
    model.params = jax.tree.map(
        lambda x: jnp.asarray(x + 0.1 * rng.standard_normal(x.shape), jnp.float32), model.params
    )
    return model


@functools.cache
def toy_pipeline(**scheduler):
    """A pipeline with random parameters."""
    vae = AutoencoderKLConfig(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        norm_num_groups=4,
    )
    encoders = {
        f"text_encoder{n}": random(ToyTextEncoder, ToyTextEncoderConfig(), seed)
        for seed, n in enumerate(("", "_2", "_3"))
    }
    tokenizers = {f"tokenizer{n}": ToyTokenizer() for n in ("", "_2", "_3")}
    pipe = ToyPipeline(
        vae=random(AutoencoderKL, vae, 3),
        transformer=random(ToyTransformer, ToyTransformerConfig(), 4),
        scheduler=diffusax.FlowMatchEulerDiscreteScheduler(**scheduler),
        **encoders,
        **tokenizers,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe
