"""`diffusax train RECIPE`."""

import dataclasses
import functools
import sys
from typing import Annotated, Any, ClassVar

import diffusax.training
from diffusax.boundary.messages import escaped
from diffusax.checkpoints import resolve
from diffusax.cli.fits import print_head, print_line
from diffusax.cli.messages import show_messages
from diffusax.cli.parsing import OWN, FromFiles, choose, parse_with_files
from diffusax.runtime.devices.processes import initialize
from diffusax.runtime.programs.topology import topology_mesh
from diffusax.runtime.switches import in_mesh
from diffusax.training import (
    AutoencoderConfig,
    ControlNetConfig,
    DreamBoothConfig,
    InstructPix2PixConfig,
    Preempted,
    Recipe,
    TextToImageConfig,
    TextToVideoConfig,
    TextualInversionConfig,
    TrainConfig,
    UnconditionalConfig,
    read_config,
    train,
)
from diffusax.training.loop.program import lower_step, step_work


@dataclasses.dataclass(frozen=True)
class Command(FromFiles):
    """The options of all recipes' commands besides those of the recipes."""

    essentials: ClassVar[tuple[str, ...]] = (
        *("model", "controlnet", "instance_data", "instance_prompt", "class_prompt"),
        *("class_data", "class_images"),
        *("data.path", "data.split", "data.resolution", "data.image_column"),
        *("data.caption_column", "data.original_image_column", "data.edit_prompt_column"),
        *("data.edited_image_column", "data.reference_columns", "data.conditioning_image_column"),
        *("output", "steps", "batch_size", "accumulate", "optimizer.learning_rate"),
        *("optimizer.name", "compute_dtype", "gradient_checkpointing", "lora.rank", "mesh", "seed"),
        *("config", "set"),
    )

    topology: Annotated[str | None, OWN] = None
    """Do not train: compile the step for TPUs or GPUs that are elsewhere, such as v5e:4x4 or
    h100:8, and print what it takes on each and whether it fits. Only the model's configs and one
    row of the data are read."""

    def run(self) -> None:
        """Trains, or compiles the step for devices that are elsewhere."""
        name, config_class = next((n, c) for n, (kind, c) in RECIPES.items() if kind is type(self))
        show_messages()
        config: Any = plain(self, config_class)
        if self.topology:
            if config.model:
                config = dataclasses.replace(
                    config, model=str(resolve(config.model, weights=False))
                )
            _compile(make_recipe(name, config, compile_only=True), config, self.topology)
            return
        if config.distributed:
            initialize()
        try:
            state = train(make_recipe(name, config), config)
        except Preempted as stopped:
            print(f"diffusax: {stopped}; start the same command again to go on", file=sys.stderr)
            sys.exit(stopped.exit_code)
        print(f"{escaped(config.output)} holds the result of step {int(state.step)}")


@dataclasses.dataclass(frozen=True)
class TextToImage(Command, TextToImageConfig):
    """Train the denoiser of a checkpoint on images with captions."""


@dataclasses.dataclass(frozen=True)
class TextToVideo(Command, TextToVideoConfig):
    """Train a checkpoint of videos on clips with captions."""

    essentials: ClassVar[tuple[str, ...]] = (
        *("model", "expert", "data.path", "data.split", "data.resolution", "data.bucket_step"),
        *("data.num_frames", "data.fps", "data.frame_extraction", "data.caption_column"),
        *Command.essentials[Command.essentials.index("output") :],
    )


@dataclasses.dataclass(frozen=True)
class InstructPix2Pix(Command, InstructPix2PixConfig):
    """Train the denoiser of a checkpoint to edit images as a text says."""


@dataclasses.dataclass(frozen=True)
class ControlNet(Command, ControlNetConfig):
    """Train a ControlNet, which steers a checkpoint by images."""


@dataclasses.dataclass(frozen=True)
class DreamBooth(Command, DreamBoothConfig):
    """Teach a checkpoint a subject from a few images of it."""


@dataclasses.dataclass(frozen=True)
class TextualInversion(Command, TextualInversionConfig):
    """Train the embeddings of a new word on a few images; nothing else changes."""

    essentials: ClassVar[tuple[str, ...]] = (
        *("placeholder_token", "initializer_token", "num_vectors", "learnable_property"),
        *(name for name in Command.essentials if name != "lora.rank"),
    )


@dataclasses.dataclass(frozen=True)
class Autoencoder(Command, AutoencoderConfig):
    """Train the autoencoder of a checkpoint on images."""


@dataclasses.dataclass(frozen=True)
class Unconditional(Command, UnconditionalConfig):
    """Train a model that generates from noise alone, on images without captions."""


RECIPES: dict[str, tuple[type, type]] = {
    "text-to-image": (TextToImage, TextToImageConfig),
    "text-to-video": (TextToVideo, TextToVideoConfig),
    "instruct-pix2pix": (InstructPix2Pix, InstructPix2PixConfig),
    "controlnet": (ControlNet, ControlNetConfig),
    "dreambooth": (DreamBooth, DreamBoothConfig),
    "textual-inversion": (TextualInversion, TextualInversionConfig),
    "autoencoder": (Autoencoder, AutoencoderConfig),
    "unconditional": (Unconditional, UnconditionalConfig),
}


OTHER_NAMES = {"edit": "instruct-pix2pix", "image-to-video": "text-to-video"}
"""What else recipes may be called: networks that look at images are not InstructPix2Pix's, and a
checkpoint says itself whether its videos begin with an image."""


def command(args: list[str]) -> Any:
    """Reads the recipe and its options from the arguments."""
    args = [*(OTHER_NAMES.get(name, name) for name in args[:1]), *args[1:]]
    texts = {name: kind.__doc__ or "" for name, (kind, _) in RECIPES.items()}
    return choose(texts, args, read_recipe, prog="diffusax train", description="Train a network.")


def read_recipe(name: str, args: list[str]) -> Any:
    """Reads a recipe's options from the arguments and the files among them."""
    kind, config_class = RECIPES[name]
    read = functools.partial(read_config, config_class)
    return parse_with_files(kind, args, read, prog=f"diffusax train {name}")


def plain(options: Any, config_class: type) -> Any:
    """Returns the recipe's options without those of the command."""
    names = [field.name for field in dataclasses.fields(config_class)]
    return config_class(**{name: getattr(options, name) for name in names})


def make_recipe(name: str, config: Any, *, compile_only: bool = False) -> Recipe:
    """Makes a recipe; the function that makes it has the recipe's name.

    compile_only: whether it is not trained, so that it needs no images of DreamBooth's class.
    """
    make = getattr(diffusax.training, name.replace("-", "_"))
    if name == "dreambooth":
        return make(config, generate=not compile_only)
    if name in ("autoencoder", "unconditional"):
        return make(config)
    return make(config, compile_only=compile_only)


def _compile(recipe: Recipe, config: TrainConfig, topology: str) -> None:
    """Prints what a step takes on devices that are elsewhere."""
    mesh = topology_mesh(topology, config.mesh)
    lowered = lower_step(recipe, config, mesh)
    print_head(mesh, "so of microbatches one")
    with in_mesh(mesh):
        name = f"training step, {config.batch_size} examples"
        print_line(name, lowered, mesh, lambda: step_work(recipe, config, mesh).operations)
