"""What a family of checkpoints is: everything in which one kind of model differs from another."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import jax

from diffusax.models.latents import LatentFormat
from diffusax.models.network import Model, Network, Params
from diffusax.pipelines.plan import Conditions, Prompt, StepInputs, Tokens
from diffusax.runtime.mesh import Rules
from diffusax.samplers import Scheduler

Role = Literal["denoiser", "controlnet", "text_encoder", "tokenizer", "autoencoder", "scheduler"]
"""What a component is for. Loading, placing, saving and compiling go by it, and not by names."""


@dataclasses.dataclass(frozen=True)
class Component:
    """A component of a family's checkpoints."""

    name: str
    """Its name in model_index.json, and the attribute of pipelines."""
    role: Role
    kind: Any = Model
    """The class of its values. A tokenizer's has `from_folder(path)` and `save(path)`."""
    optional: bool = False
    """Whether a checkpoint may lack it."""
    tokenizer: str = ""
    """For a text encoder: the component that makes its tokens."""


CONTROLNET = Component("controlnet", "controlnet")
"""The ControlNets of the pipelines that have some, one or several."""


class Denoiser(Protocol):
    """What the sampler asks for a prediction: hashable, and without arrays."""

    @property
    def components(self) -> tuple[str, ...]:
        """The names of the parameters that it reads, the main network's first."""

    @property
    def controlnets(self) -> tuple[Network, ...]:
        """The ControlNets beside the main network."""

    @property
    def in_channels(self) -> int:
        """The channels of the main network's input."""

    @property
    def sample_size(self) -> tuple[int, int]:
        """The rows and columns of latents that the network was trained at."""

    @property
    def context_dim(self) -> int | None:
        """The width of the text embeddings; None where any will do."""

    @property
    def embeds_guidance(self) -> bool:
        """Whether the guidance scale is an input, so that one branch is enough."""

    @property
    def tensor_rules(self) -> Rules:
        """Which axes of the parameters a mesh's tensor axis splits."""

    def embed(self, params: Params, images: tuple[Any, ...]) -> tuple[jax.Array, ...]:
        """What the ControlNets make of their images, once for a run. b 1 H W 3 -> b 1 h w c."""

    def __call__(
        self,
        params: Params,
        x: jax.Array,
        timestep: jax.Array,
        conditions: Conditions,
        inputs: StepInputs | None = None,
        *,
        gradient_checkpointing: str = "none",
    ) -> jax.Array:
        """The prediction for each branch, b h w c.

        Args:
            params: by component.
            x: b h w c, the scaled latents; b counts images times branches.
            timestep: b.
            conditions: without the axis of the branches, which are in the batch.
            inputs: those of one row; None for none.
            gradient_checkpointing: "none", "blocks" or "full": what is computed again.
        """

    def guide(self, predictions: jax.Array, inputs: StepInputs) -> jax.Array:
        """One prediction of those of an image's branches: b k ... -> b ..., float32."""


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Family:
    """How the checkpoints of one kind are read, and what their networks are told.

    Nothing outside a family's own file knows its text encoders, tokens, networks or conditions.
    """

    name: str
    components: tuple[Component, ...]
    """In the order in which diffusers' pipelines have them."""
    options: tuple[tuple[str, Any], ...]
    """Options in model_index.json that this family reads, with their defaults."""
    tokenize: Callable[..., Tokens]
    """(tokenizers, texts, call, length) -> Tokens, on the host.

    texts: for each text encoder n of them. length: of the context of embeddings that these texts
    go with, or None.
    """
    tokenize_caption: Callable[..., Tokens]
    """(tokenizers, caption) -> Tokens of one caption, without an axis for it; each as long."""
    encode: Callable[..., Prompt]
    """(encoders, params, tokens, clip_skip=None) -> Prompt of n texts; pure."""
    conditions: Callable[..., Conditions]
    """(components, call, prompt, size, scales) -> Conditions.

    prompt: of the images and branches, b k ... . size: height and width in pixels. scales: b, the
    guidance scale of each image.
    """
    denoiser: Callable[[Mapping[str, Network]], Denoiser]
    """(networks of the denoiser and the ControlNets by name) -> Denoiser."""
    latents: Callable[[Any], LatentFormat] = LatentFormat.of
    """(the autoencoder's config) -> LatentFormat."""
    schedule_options: Callable[..., dict[str, Any]] | None = None
    """(components, call, size) -> options of `Scheduler.schedule`, such as mu."""
    batch_key: Callable[..., Any] | None = None
    """(components, call) -> what the prompts of images in one batch must have in common."""
    embeds: tuple[str, ...] = ("prompt_embeds",)
    """The arguments of a call that stand for a prompt, in the order of `Prompt`'s fields."""
    embedding_columns: tuple[str, ...] = ("encoder_hidden_states",)
    """The same in a cache of training's text embeddings."""
    callback_tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What callbacks may read and change of the conditions: diffusers' name -> field."""
    resizes_edits: bool = False
    """Whether InstructPix2Pix brings an image to the model's size instead of taking its own."""
    shows_kept: bool = False
    """Whether inpainting shows the image to a decoder that takes it; not beside a ControlNet."""
    micro_conditioned: bool = False
    """Whether the denoiser is told the sizes of images."""

    def __repr__(self) -> str:
        return f"Family({self.name!r})"

    def names(self, *roles: Role) -> tuple[str, ...]:
        """The names of the components that have one of these roles."""
        return tuple(c.name for c in self.components if c.role in roles)

    def role(self, name: str) -> Role:
        """The role of a component, ControlNets and numbered ones (controlnet_1) among them."""
        known = {c.name: c.role for c in (*self.components, CONTROLNET)}
        return known[name] if name in known else known[name.rpartition("_")[0]]

    @functools.cached_property
    def text_encoders(self) -> tuple[Component, ...]:
        """The text encoders, in order."""
        return tuple(c for c in self.components if c.role == "text_encoder")

    @property
    def scheduler_name(self) -> str:
        """The name of the scheduler among the components."""
        return self.names("scheduler")[0]


def diffusers_components(
    denoiser: str, *text: tuple[str, str], tokenizer: Any, optional: Sequence[str] = ()
) -> tuple[Component, ...]:
    """The components of a family in diffusers' layout.

    Args:
        denoiser: the name of the network that predicts: unet or transformer.
        *text: the names of each tokenizer and the text encoder that reads its tokens.
        tokenizer: the class of the tokenizers.
        optional: the names of those that a checkpoint may lack.
    """
    encoders = [Component(e, "text_encoder", tokenizer=t) for t, e in text]
    tokenizers = [Component(t, "tokenizer", tokenizer) for t, _ in text]
    found = (
        Component("vae", "autoencoder"),
        *encoders,
        *tokenizers,
        Component(denoiser, "denoiser"),
        Component("scheduler", "scheduler", Scheduler),
    )
    return tuple(dataclasses.replace(c, optional=c.name in optional) for c in found)
