"""The options that the recipes share that train a checkpoint's denoiser."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta

from diffusax.lora.trained import LoRAConfig
from diffusax.training.config import ValidationConfig
from diffusax.training.optimizers import FineTuningOptimizerConfig, OptimizerConfig, Rate
from diffusax.training.step.denoising import DenoisingConfig


@dataclasses.dataclass(frozen=True)
class DenoiserValidationConfig(ValidationConfig):
    """Pictures of prompts, always from the same noise."""

    prompts: tuple[str, ...] = ()
    """What to draw."""
    steps: Annotated[int, Meta(ge=1, le=1000)] = 20
    """The number of sampler steps."""
    guidance: Annotated[float, Meta(ge=0, le=1000)] = 7.5
    """The guidance scale."""
    height: Annotated[int, Meta(ge=8, le=8192)] | None = None
    """The height of the pictures in pixels; by default data.resolution, or the model's own."""
    width: Annotated[int, Meta(ge=8, le=8192)] | None = None
    """The width of the pictures in pixels; by default data.resolution, or the model's own."""


@dataclasses.dataclass(frozen=True)
class PicturesValidationConfig(DenoiserValidationConfig):
    """Pictures made of prompts and of other pictures."""

    images: tuple[str, ...] = ()
    """The pictures to begin with: one, or one for each of the prompts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        images, prompts = len(self.images), len(self.prompts)
        if bool(images) != bool(prompts) or (images > 1 and images != prompts):
            raise ValueError(
                f"validation.images must be one or as many as validation.prompts (got {images} for "
                f"{prompts})"
            )


@dataclasses.dataclass(frozen=True)
class DenoiserConfig(DenoisingConfig):
    """The options of all recipes that train a checkpoint's denoiser."""

    refused: ClassVar[tuple[str, ...]] = ()
    """The options that the recipe has no use for; "lora" stands for all of that group."""
    refusal: ClassVar[str] = ""
    """Why it has none."""

    train_text_encoder: bool = False
    """Train the text encoder too, with SDXL both of them."""
    text_encoder_learning_rate: Rate | None = None
    """The learning rate of the text encoders after warm-up; by default the optimizer's."""
    lora: LoRAConfig = dataclasses.field(default_factory=LoRAConfig)
    """The options of low-rank adapters, which are trained in the place of the networks."""
    validation: DenoiserValidationConfig = dataclasses.field(
        default_factory=DenoiserValidationConfig
    )
    """The pictures that are drawn during the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_refused()
        if self.text_encoder_learning_rate is not None:
            if not self.train_text_encoder:
                raise ValueError(
                    "text_encoder_learning_rate does nothing without train_text_encoder; give both"
                )
            if self.optimizer.learning_rate == 0:
                raise ValueError(
                    "optimizer.learning_rate must be above 0 with text_encoder_learning_rate, "
                    "which follows its schedule (got 0.0)"
                )
        if self.lora.on and self.from_scratch:
            raise ValueError(
                "from_scratch cannot be given with lora.rank: adapters change a network that is "
                "trained already"
            )

    def _check_refused(self) -> None:
        values = {name: getattr(self, name) for name in self.refused}
        lora = values.pop("lora", None)
        given = [name for name, value in values.items() if value not in (None, False)]
        if lora is not None and lora.on:
            given.append("lora.path" if lora.path else "lora.rank")
        if given:
            raise ValueError(f"{' and '.join(given)} cannot be given: {self.refusal}")

    @property
    def chosen_optimizer(self) -> OptimizerConfig:
        """The options of the optimizer, with the recipe's learning rate where none is given."""
        if isinstance(self.optimizer, FineTuningOptimizerConfig):
            return self.optimizer.with_rate(lora=self.lora.on)
        return self.optimizer

    @property
    def component_rates(self) -> Mapping[str, float]:
        """The learning rate of the text encoders, if it is another."""
        rate = self.text_encoder_learning_rate
        return {} if rate is None else {"text_encoder": rate}

    @property
    def trains_adapters(self) -> bool:
        """Whether low-rank adapters are trained in the place of networks."""
        return self.lora.on
