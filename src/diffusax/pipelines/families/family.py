"""The description of a family of checkpoints: everything in which kinds of models differ."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from diffusax.images.image_processor import CLIPImageProcessor
from diffusax.models.autoencoders.kl import AutoencoderKLConfig
from diffusax.models.autoencoders.latents import LatentFormat
from diffusax.models.network import Network
from diffusax.networks import Model
from diffusax.pipelines.families.denoiser import Denoiser
from diffusax.pipelines.families.embeddings import OneLength
from diffusax.pipelines.families.policies import (
    Channels,
    ClassifierFree,
    Inpaint,
    KeepSize,
    WholeSteps,
    negatives_first,
    sample_each,
)
from diffusax.pipelines.plan.plan import Conditions, HiddenLayers, Prompt, Tokens
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
TEXT_COMPONENTS = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")
"""The names of what reads prompts, which a checkpoint for embeddings alone may lack."""
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
    make: Callable[[], Any] | None = None
    """A function that makes the component for a checkpoint without one; None where none does."""
    options: tuple[tuple[str, Any], ...] = ()
    """Options of a network that replace those of its file: vision_config=None leaves out what a
    language model reads images with."""


CONTROLNET = Component("controlnet", "controlnet")
"""The component for the ControlNets of a pipeline, one or several."""
T2I_ADAPTER = Component("adapter", "t2i_adapter")
"""The component for the T2I-Adapters of a pipeline, one or several."""
IMAGE_PROMPTS: tuple[Component, ...] = (
    Component("image_encoder", "image_encoder", optional=True),
    Component("feature_extractor", "image_processor", CLIPImageProcessor, optional=True),
)
"""The components with which IP-Adapters read images."""


def any_length(components: Any, call: Any) -> None:
    """Returns None: prompts of all lengths may share a batch."""


def usual_layers(components: Any) -> HiddenLayers | None:
    """Returns None: the checkpoints of a family read the same hidden states."""
    return None


def none_unused(components: Any, call: Any, run: Any) -> tuple[()]:
    """Returns nothing: no family's own argument is without effect."""
    return ()


@dataclasses.dataclass(frozen=True, repr=False)
class Family:
    """What the checkpoints of one family are, and how they are run: its functions and policies.

    Only the files of a family know its text encoders, tokens, networks and conditions. The policies
    are small objects and functions of `diffusax.pipelines.families.policies`, or one's own.
    """

    name: str
    components: tuple[Component, ...]
    """The components, in the order in which diffusers' pipelines have them."""
    tokenize: Callable[..., Tokens]
    """A function (tokenizers, texts, call, length) -> Tokens, run on the host.

    texts: n texts for each text encoder. length: the number of tokens of embeddings in the same
    batch, or None.
    """
    tokenize_caption: Callable[..., Tokens]
    """A function (tokenizers, caption) -> Tokens of one caption without a batch axis.

    They are of a fixed length: the family's own, or length, which is given for checkpoints with a
    max_sequence_length of their own."""
    encode: Callable[..., Prompt]
    """A pure function (encoders, params, tokens, clip_skip=None) -> Prompt of n texts."""
    conditions: Callable[..., Conditions]
    """A function (components, call, prompt, size, scales) -> Conditions.

    prompt: embeddings b k ... of images and branches. size: height and width in pixels. scales: b,
    the guidance scale of each image.
    """
    denoiser: Callable[[Mapping[str, Network]], Denoiser]
    """A function (networks of the denoiser and those that steer it by name) -> Denoiser."""
    options: tuple[tuple[str, Any], ...] = ()
    """The options in model_index.json that this family reads, with their defaults."""
    latents: Callable[[Any], LatentFormat] = LatentFormat.of
    """A function (the autoencoder's config) -> LatentFormat."""
    usual_autoencoder: Any = None
    """The config of the autoencoder that checkpoints have, which says what latents are in a
    pipeline that was loaded without one."""
    embeds: tuple[str, ...] = ("prompt_embeds",)
    """The arguments of a call that replace a prompt, in the order of `Prompt`'s fields."""
    lengths: OneLength = dataclasses.field(default_factory=OneLength)
    """How long the embeddings of a call's prompts are: `OneLength` or `OwnLengths`."""
    hidden_layers: Callable[[Any], HiddenLayers | None] = usual_layers
    """A function (components) -> the hidden states that a checkpoint asks for; None for those that
    `tokenize` gives, or the family's own."""
    batch_key: Callable[..., Any] = any_length
    """A function (components, call) -> a key that the prompts of one batch must have in common."""
    default_size: Callable[..., tuple[int, int]] | None = None
    """A function (components, call) -> the height and width in pixels of a call that gives none;
    None for those that the denoiser was trained at."""
    frame_rate: Callable[[Mapping[str, Any]], int] | None = None
    """A function (the checkpoint's options) -> the frames per second that it was trained at; None
    for images."""
    schedule_options: Callable[..., dict[str, Any]] | None = None
    """A function (components, call, size) -> options of `Scheduler.schedule`, such as mu; None
    where the noise levels are the scheduler's own."""
    guidance: ClassifierFree = dataclasses.field(default_factory=ClassifierFree)
    """How the predictions of branches are guided: `ClassifierFree` or `TrueCFG`."""
    start: WholeSteps = dataclasses.field(default_factory=WholeSteps)
    """Where a run that starts from an image begins: `WholeSteps` or `FlowSteps`."""
    encoding: Callable[[Callable[[int], Any], int, int], Any] = sample_each
    """The noise that samples the latents of images: `sample_each`, `sample_once` or `take_mode`."""
    resize: KeepSize = dataclasses.field(default_factory=KeepSize)
    """How image to image resizes images: `KeepSize` or `ModelSize`."""
    edits: Channels = dataclasses.field(default_factory=Channels)
    """How the denoiser is given an image to edit or to look at: `Channels` or `References`."""
    inpaint: Inpaint = dataclasses.field(default_factory=Inpaint)
    """How inpainting blends the image with what is generated."""
    size_inputs: tuple[str, ...] = ()
    """The inputs of the denoiser that say the sizes of an image, in training b 6."""
    callback_tensors: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"prompt_embeds": "context"}
    )
    """The conditions that callbacks may read and change, from diffusers' name to the field."""
    callback_view: Callable[[Any, Any], Any] = negatives_first
    """The order in which callbacks read them: `negatives_first` or `prompts_alone`."""
    unused: Callable[..., Iterable[tuple[Sequence[str], str]]] = none_unused
    """A function (components, call, run) -> names of the family's own arguments that change nothing
    in a run, with the reason."""
    extends: "Family | None" = None
    """The family whose checkpoints do as well, as what this one has besides is optional."""

    def __repr__(self) -> str:
        return f"Family({self.name!r})"

    # Families are compared by their fields: those of saved programs are other objects.
    def __hash__(self) -> int:
        return hash(self.name)

    def takes(self, other: "Family") -> bool:
        """Returns whether this family's pipelines are made of the components of another's."""
        own = (self, self.extends)
        return any(one is not None and one.components == other.components for one in own)

    @property
    def draws_videos(self) -> bool:
        """Whether latents are of videos."""
        return self.frame_rate is not None

    def names(self, *roles: Role) -> tuple[str, ...]:
        """Returns the names of the components that have one of these roles."""
        return tuple(c.name for c in self.components if c.role in roles)

    def role(self, name: str) -> Role:
        """The role of a component, also of those that steer, and numbered ones (controlnet_1)."""
        others = (CONTROLNET, T2I_ADAPTER, *IMAGE_PROMPTS)
        known = {c.name: c.role for c in (*self.components, *others)}
        return known[name] if name in known else known[name.rpartition("_")[0]]

    def changes(self, name: str) -> dict[str, Any]:
        """Returns the options of a component's network that replace those of its file."""
        return next((dict(c.options) for c in self.components if c.name == name), {})

    @property
    def embedding_columns(self) -> tuple[str, ...]:
        """The columns of embeddings in a training cache, in the order of `Prompt`'s fields."""
        return ("encoder_hidden_states", "text_embeds")[: len(self.embeds)]

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
    denoiser: str,
    *text: tuple[str, str],
    tokenizer: Any,
    optional: Sequence[str] = (),
    scheduler: Callable[[], Any] | None = None,
    text_options: tuple[tuple[str, Any], ...] = (),
) -> tuple[Component, ...]:
    """Returns the components of a family in diffusers' layout.

    Args:
        denoiser: the name of the denoiser's network, unet or transformer.
        *text: the names of each tokenizer and of the text encoder that reads its tokens.
        tokenizer: the class of the tokenizers, or a tuple with one for each.
        optional: the names of those that a checkpoint may lack.
        scheduler: a function that makes the scheduler for checkpoints without one.
        text_options: options of the text encoders, see `Component.options`.
    """
    encoders = [Component(e, "text_encoder", tokenizer=t, options=text_options) for t, e in text]
    kinds = tokenizer if isinstance(tokenizer, tuple) else (tokenizer,) * len(text)
    tokenizers = [Component(t, "tokenizer", kind) for (t, _), kind in zip(text, kinds, strict=True)]
    found = (
        Component("vae", "autoencoder"),
        *encoders,
        *tokenizers,
        Component(denoiser, "denoiser"),
        Component("scheduler", "scheduler", Scheduler, make=scheduler),
    )
    return tuple(dataclasses.replace(c, optional=c.name in optional) for c in found)
