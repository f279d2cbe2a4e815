"""`diffusax train RECIPE`."""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

from diffusax.boundary.messages import escaped
from diffusax.checkpoints import resolve
from diffusax.cli.fits import print_head, print_line
from diffusax.cli.messages import show_messages
from diffusax.cli.parsing import OWN, FromFiles, choose, parse_with_files
from diffusax.runtime.devices.mesh import in_mesh
from diffusax.runtime.devices.processes import initialize
from diffusax.runtime.programs.topology import topology_mesh
from diffusax.training import (
    AutoencoderConfig,
    ControlNetConfig,
    DreamBoothConfig,
    InstructPix2PixConfig,
    Preempted,
    Recipe,
    TextToImageConfig,
    TextualInversionConfig,
    TrainConfig,
    UnconditionalConfig,
    autoencoder,
    controlnet,
    dreambooth,
    instruct_pix2pix,
    read_config,
    text_to_image,
    textual_inversion,
    train,
    unconditional,
)
from diffusax.training.loop.program import lower_step, step_operations


@dataclasses.dataclass(frozen=True)
class Command(FromFiles):
    """The options of all recipes' commands besides those of the recipes."""

    essentials: ClassVar[tuple[str, ...]] = (
        *("model", "controlnet", "instance_data", "instance_prompt", "class_prompt"),
        *("class_data", "class_images"),
        *("data.path", "data.split", "data.resolution", "data.image_column"),
        *("data.caption_column", "data.original_image_column", "data.edit_prompt_column"),
        *("data.edited_image_column", "data.conditioning_image_column"),
        *("output", "steps", "batch_size", "accumulate", "optimizer.learning_rate"),
        *("optimizer.name", "compute_dtype", "gradient_checkpointing", "lora.rank", "mesh", "seed"),
        *("config", "set"),
    )

    topology: Annotated[str | None, OWN] = None
    """Do not train: compile the step for TPUs or GPUs that are elsewhere, such as v5e:4x4 or
    h100:8, and print what it takes on each and whether it fits. Only the model's configs and one
    row of the data are read."""


@dataclasses.dataclass(frozen=True)
class TextToImage(Command, TextToImageConfig):
    """Train the denoiser of a checkpoint on images with captions."""

    def run(self) -> None:
        """Trains."""
        _train(text_to_image, self, TextToImageConfig, compile_only=bool(self.topology))


@dataclasses.dataclass(frozen=True)
class InstructPix2Pix(Command, InstructPix2PixConfig):
    """Train the denoiser of a checkpoint to edit images as a text says."""

    def run(self) -> None:
        """Trains."""
        _train(instruct_pix2pix, self, InstructPix2PixConfig, compile_only=bool(self.topology))


@dataclasses.dataclass(frozen=True)
class ControlNet(Command, ControlNetConfig):
    """Train a ControlNet, which steers a checkpoint by images."""

    def run(self) -> None:
        """Trains."""
        _train(controlnet, self, ControlNetConfig, compile_only=bool(self.topology))


@dataclasses.dataclass(frozen=True)
class DreamBooth(Command, DreamBoothConfig):
    """Teach a checkpoint a subject from a few pictures of it."""

    def run(self) -> None:
        """Trains, after drawing the pictures of the class that are missing."""
        _train(dreambooth, self, DreamBoothConfig, generate=not self.topology)


@dataclasses.dataclass(frozen=True)
class TextualInversion(Command, TextualInversionConfig):
    """Train the embeddings of a new word on a few images; nothing else changes."""

    essentials: ClassVar[tuple[str, ...]] = (
        *("placeholder_token", "initializer_token", "num_vectors", "learnable_property"),
        *(name for name in Command.essentials if name != "lora.rank"),
    )

    def run(self) -> None:
        """Trains."""
        _train(textual_inversion, self, TextualInversionConfig, compile_only=bool(self.topology))


@dataclasses.dataclass(frozen=True)
class Autoencoder(Command, AutoencoderConfig):
    """Train the autoencoder of a checkpoint on images."""

    def run(self) -> None:
        """Trains."""
        _train(autoencoder, self, AutoencoderConfig)


@dataclasses.dataclass(frozen=True)
class Unconditional(Command, UnconditionalConfig):
    """Train a model that draws from noise alone, on images without captions."""

    def run(self) -> None:
        """Trains."""
        _train(unconditional, self, UnconditionalConfig)


RECIPES: dict[str, tuple[type, type]] = {
    "text-to-image": (TextToImage, TextToImageConfig),
    "instruct-pix2pix": (InstructPix2Pix, InstructPix2PixConfig),
    "controlnet": (ControlNet, ControlNetConfig),
    "dreambooth": (DreamBooth, DreamBoothConfig),
    "textual-inversion": (TextualInversion, TextualInversionConfig),
    "autoencoder": (Autoencoder, AutoencoderConfig),
    "unconditional": (Unconditional, UnconditionalConfig),
}


def command(args: list[str]) -> Any:
    """Reads the recipe and its options from the arguments."""
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


def _train(
    make: Callable[..., Any], options: Any, config_class: type[TrainConfig], **how: Any
) -> None:
    """how: arguments of the recipe's function besides the config."""
    config, make = plain(options, config_class), functools.partial(make, **how)
    show_messages()
    if options.topology:
        if options.model:
            config = dataclasses.replace(config, model=str(resolve(options.model, weights=False)))
        _compile(make(config), config, options.topology)
        return
    if config.distributed:
        initialize()
    try:
        state = train(make(config), config)
    except Preempted as stopped:
        print(f"diffusax: {stopped}; start the same command again to go on", file=sys.stderr)
        sys.exit(stopped.exit_code)
    print(f"{escaped(config.output)} holds the result of step {int(state.step)}")


def _compile(recipe: Recipe, config: TrainConfig, topology: str) -> None:
    """Prints what a step takes on devices that are elsewhere."""
    mesh = topology_mesh(topology, config.mesh)
    lowered = lower_step(recipe, config, mesh)
    print_head(mesh, "so of microbatches one")
    with in_mesh(mesh):
        operations = functools.partial(step_operations, recipe, config, mesh)
        print_line(f"training step, {config.batch_size} examples", lowered, mesh, operations)
