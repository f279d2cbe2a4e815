"""The description of a family of checkpoints: everything in which kinds of models differ."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import jax

from diffusax.images.image_processor import CLIPImageProcessor
from diffusax.models.autoencoders.kl import AutoencoderKLConfig
from diffusax.models.autoencoders.latents import LatentFormat
from diffusax.models.network import Network, Params
from diffusax.networks import Model
from diffusax.pipelines.plan.guidance import above_one
from diffusax.pipelines.plan.plan import Conditions, Prompt, StepInputs, Tokens
from diffusax.runtime.devices.mesh import Rules
from diffusax.samplers import Scheduler

Role = Literal[
    "denoiser",
    "controlnet",
    "t2i_adapter",
    "text_encoder",
    "tokenizer",
    "image_encoder",
    "image_processor",
    "autoencoder",
    "scheduler",
]
"""The role of a component, which decides how it is loaded, placed, saved and compiled."""
NUMBERED_ROLES: tuple[Role, ...] = ("controlnet", "t2i_adapter")
"""The roles of components that may be several networks: controlnet, controlnet_1 and so on."""


@dataclasses.dataclass(frozen=True)
class Component:
    """A component of a family's checkpoints."""

    name: str
    """The name in model_index.json, which is also the attribute of pipelines."""
    role: Role
    kind: Any = Model
    """The class of its values. A tokenizer's or image processor's has `from_folder` and `save`."""
    optional: bool = False
    """Whether a checkpoint may lack it."""
    tokenizer: str = ""
    """For a text encoder: the name of its tokenizer among the components."""


CONTROLNET = Component("controlnet", "controlnet")
"""The component for the ControlNets of a pipeline, one or several."""
T2I_ADAPTER = Component("adapter", "t2i_adapter")
"""The component for the T2I-Adapters of a pipeline, one or several."""
IMAGE_PROMPTS: tuple[Component, ...] = (
    Component("image_encoder", "image_encoder", optional=True),
    Component("feature_extractor", "image_processor", CLIPImageProcessor, optional=True),
)
"""The components with which IP-Adapters read images."""


class Denoiser(Protocol):
    """A denoiser as the sampler calls it. It is hashable and holds no arrays."""

    @property
    def components(self) -> tuple[str, ...]:
        """The names of the components whose parameters it reads, the main network's first."""

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
        """The width of the text embeddings; None where any width is accepted."""

    @property
    def embeds_guidance(self) -> bool:
        """Whether the guidance scale is an input, so that one branch is enough."""

    @property
    def tensor_rules(self) -> Rules:
        """The axes of the parameters that a mesh's tensor axis splits."""

    def embed(
        self, params: Params, images: tuple[Any, ...], weights: Any = None
    ) -> tuple[Any, ...]:
        """Computes once per run what follows from images alone, b 1 H W c in [0, 1] each.

        Returns b 1 h w c for each ControlNet, then a tuple of such maps for each T2I-Adapter.

        weights: the weights of a adapters, b a; it is given only in calls with adapters.
        """

    def prepare(self, params: Params, conditions: Conditions, inputs: StepInputs) -> Conditions:
        """Returns the conditions with what a run computes from them once, in its program.

        Arguments as those of a call. It may return them as they are.
        """

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
        """Predicts for each branch, b h w c.

        Args:
            params: the parameters by component, and in calls with some, under "adapters" the
                layers of adapters by component (`models.adapters.low_rank.Layers`), and under
                "ip_adapters" those of IP-Adapters (`models.adapters.image_prompts.Layers`).
            x: b h w c, the scaled latents; b counts images times branches.
            timestep: b.
            conditions: conditions without the axis of the branches, which is merged into the batch.
            inputs: those of one row for each entry of the batch, such as adapters: b a; None for
                none.
            gradient_checkpointing: "none", "blocks" or "full": what is computed again for
                gradients.
        """

    def guide(self, predictions: jax.Array, inputs: StepInputs) -> jax.Array:
        """Combines the predictions of the branches by guidance: b k ... -> b ..., float32."""


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Family:
    """The functions and names by which the checkpoints of one family are read and run.

    Only the files of a family know its text encoders, tokens, networks and conditions.
    """

    name: str
    components: tuple[Component, ...]
    """The components, in the order in which diffusers' pipelines have them."""
    options: tuple[tuple[str, Any], ...]
    """The options in model_index.json that this family reads, with their defaults."""
    tokenize: Callable[..., Tokens]
    """A function (tokenizers, texts, call, length) -> Tokens, run on the host.

    texts: n texts for each text encoder. length: the number of tokens of embeddings in the same
    batch, or None.
    """
    tokenize_caption: Callable[..., Tokens]
    """A function (tokenizers, caption) -> Tokens of one caption without a batch axis, of fixed
    length."""
    encode: Callable[..., Prompt]
    """A pure function (encoders, params, tokens, clip_skip=None) -> Prompt of n texts."""
    conditions: Callable[..., Conditions]
    """A function (components, call, prompt, size, scales) -> Conditions.

    prompt: embeddings b k ... of images and branches. size: height and width in pixels. scales: b,
    the guidance scale of each image.
    """
    denoiser: Callable[[Mapping[str, Network]], Denoiser]
    """A function (networks of the denoiser and those that steer it by name) -> Denoiser."""
    latents: Callable[[Any], LatentFormat] = LatentFormat.of
    """A function (the autoencoder's config) -> LatentFormat."""
    usual_autoencoder: Any = None
    """The config of the autoencoder that checkpoints have, which says what latents are in a
    pipeline that was loaded without one."""
    schedule_options: Callable[..., dict[str, Any]] | None = None
    """A function (components, call, size) -> options of `Scheduler.schedule`, such as mu."""
    guidance: Callable[[float], tuple[float, ...]] = above_one
    """A function (guidance_scale) -> the weights of guidance, empty for none."""
    true_guidance: bool = False
    """Whether classifier-free guidance is by true_cfg_scale instead of guidance_scale, and only
    where a negative prompt is given."""
    pad_embeds: Callable[[Sequence[Any]], Prompt] | None = None
    """A function (n arrays t d of a call) -> Prompt of one length, where prompts have lengths of
    their own; None where all are of one length."""
    batch_key: Callable[..., Any] | None = None
    """A function (components, call) -> a key that the prompts of one batch must have in common."""
    embeds: tuple[str, ...] = ("prompt_embeds",)
    """The arguments of a call that replace a prompt, in the order of `Prompt`'s fields."""
    embedding_columns: tuple[str, ...] = ("encoder_hidden_states",)
    """The columns of the same embeddings in a training cache."""
    default_size: Callable[..., tuple[int, int]] | None = None
    """A function (components, call) -> the height and width in pixels of a call that gives none;
    None for those that the denoiser was trained at."""
    callback_tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The conditions that callbacks may read and change, from diffusers' name to the field."""
    prompts_alone: bool = False
    """Whether callbacks are given the conditions of the prompts without those of the negative
    prompts, which diffusers' other pipelines put before them."""
    resizes_edits: bool = False
    """Whether InstructPix2Pix resizes an image to the model's size instead of keeping its own."""
    resizes_images: bool = False
    """Whether image to image resizes images to the model's size instead of keeping their own, where
    the call gives none."""
    keeps_size: bool = False
    """Whether inpainting keeps the size of the image instead of resizing it to the model's."""
    blends_own_noise: bool = False
    """Whether inpainting from given latents puts the image back with noise of its own, which is
    drawn before the image is encoded, instead of with those latents (pipeline_z_image_inpaint.py,
    prepare_latents)."""
    begins_early: bool = False
    """Whether a run that starts from an image makes a step of which the strength gives a part, as
    diffusers' pipelines of flow matching do (pipeline_stable_diffusion_3_img2img.py,
    get_timesteps); others leave it out."""
    samples_once: bool = False
    """Whether image to image samples an image's latents once for all images that start from it,
    even if these have seeds of their own."""
    encodes_to_mode: bool = False
    """Whether images are encoded to the mode of the autoencoder's distribution of latents instead
    of to samples of it, also in training."""
    looks_at_images: bool = False
    """Whether text to image takes images to look at. The denoiser is given their latents among
    `Conditions.added` as "references", a tuple of arrays b 1 h w c."""
    soft_masks: bool = False
    """Whether inpainting mixes the old and the new latents at the rim of the mask."""
    shows_kept: bool = False
    """Whether inpainting gives the image to a decoder that reads it; not beside a ControlNet."""
    micro_conditioned: bool = False
    """Whether the sizes of images are inputs of the denoiser."""

    def __repr__(self) -> str:
        return f"Family({self.name!r})"

    def __eq__(self, other: object) -> bool:
        # Saved programs belong to a family that was pickled, which is another object.
        if not isinstance(other, Family):
            return False
        names = (field.name for field in dataclasses.fields(self))
        return self is other or all(getattr(self, n) == getattr(other, n) for n in names)

    def __hash__(self) -> int:
        return hash(self.name)

    def names(self, *roles: Role) -> tuple[str, ...]:
        """Returns the names of the components that have one of these roles."""
        return tuple(c.name for c in self.components if c.role in roles)

    def role(self, name: str) -> Role:
        """The role of a component, also of those that steer, and numbered ones (controlnet_1)."""
        others = (CONTROLNET, T2I_ADAPTER, *IMAGE_PROMPTS)
        known = {c.name: c.role for c in (*self.components, *others)}
        return known[name] if name in known else known[name.rpartition("_")[0]]

    @property
    def unguided(self) -> float:
        """A guidance scale without guidance, 1 or 0."""
        return 0.0 if self.guidance(1.0) else 1.0

    @functools.cached_property
    def text_encoders(self) -> tuple[Component, ...]:
        """The text encoders, in order."""
        return tuple(c for c in self.components if c.role == "text_encoder")

    @property
    def scheduler_name(self) -> str:
        """The name of the scheduler among the components."""
        return self.names("scheduler")[0]


def usual_autoencoder(latent_channels: int = 4) -> AutoencoderKLConfig:
    """Returns the config of an autoencoder of Stable Diffusion or FLUX.1: eight pixels a latent."""
    down: Any = ("DownEncoderBlock2D",) * 4
    up: Any = ("UpDecoderBlock2D",) * 4
    return AutoencoderKLConfig(
        down_block_types=down,
        up_block_types=up,
        block_out_channels=(128, 256, 512, 512),
        latent_channels=latent_channels,
    )


def diffusers_components(
    denoiser: str, *text: tuple[str, str], tokenizer: Any, optional: Sequence[str] = ()
) -> tuple[Component, ...]:
    """Returns the components of a family in diffusers' layout.

    Args:
        denoiser: the name of the denoiser's network, unet or transformer.
        *text: the names of each tokenizer and of the text encoder that reads its tokens.
        tokenizer: the class of the tokenizers, or a tuple with one for each.
        optional: the names of those that a checkpoint may lack.
    """
    encoders = [Component(e, "text_encoder", tokenizer=t) for t, e in text]
    kinds = tokenizer if isinstance(tokenizer, tuple) else (tokenizer,) * len(text)
    tokenizers = [Component(t, "tokenizer", kind) for (t, _), kind in zip(text, kinds, strict=True)]
    found = (
        Component("vae", "autoencoder"),
        *encoders,
        *tokenizers,
        Component(denoiser, "denoiser"),
        Component("scheduler", "scheduler", Scheduler),
    )
    return tuple(dataclasses.replace(c, optional=c.name in optional) for c in found)
