"""Training of diffusion models; it needs the extra `train`."""

from diffusax.lora.trained import LoRAConfig
from diffusax.training.config import (
    DenoiserValidationConfig,
    TimestepBiasConfig,
    TrainConfig,
    ValidationConfig,
)
from diffusax.training.data.batches import Batches
from diffusax.training.data.options import (
    CaptionedDataConfig,
    ControlDataConfig,
    DataConfig,
    EditDataConfig,
    ImageDataConfig,
    VideoDataConfig,
)
from diffusax.training.ema.snapshots import AVERAGES, remove_snapshots_after, write_snapshots
from diffusax.training.ema.update import EMAConfig, EMAState, copy_as_average, update_ema
from diffusax.training.loop.export import make_average
from diffusax.training.loop.loop import train
from diffusax.training.loop.signals import Preempted
from diffusax.training.optimizers import (
    FineTuningOptimizerConfig,
    OptimizerConfig,
    make_optimizer,
)
from diffusax.training.options import read_config, to_yaml
from diffusax.training.recipes.autoencoder import (
    AutoencoderConfig,
    AutoencoderValidationConfig,
    autoencoder,
)
from diffusax.training.recipes.caching import CacheConfig, CacheDataConfig, cache_latents
from diffusax.training.recipes.controlnet import (
    ControlNetConfig,
    ControlNetValidationConfig,
    controlnet,
)
from diffusax.training.recipes.dreambooth import (
    DreamBoothConfig,
    DreamBoothDataConfig,
    dreambooth,
)
from diffusax.training.recipes.instruct_pix2pix import (
    InstructPix2PixConfig,
    InstructPix2PixValidationConfig,
    instruct_pix2pix,
)
from diffusax.training.recipes.recipe import Recipe
from diffusax.training.recipes.text_to_image import TextToImageConfig, text_to_image
from diffusax.training.recipes.text_to_video import (
    TextToVideoConfig,
    VideoValidationConfig,
    text_to_video,
)
from diffusax.training.recipes.textual_inversion import (
    TextualInversionConfig,
    TextualInversionDataConfig,
    TextualInversionOptimizerConfig,
    textual_inversion,
)
from diffusax.training.recipes.unconditional import (
    UnconditionalConfig,
    UnconditionalValidationConfig,
    unconditional,
)
from diffusax.training.step.draws import Draws
from diffusax.training.step.encoding import encode_pixels
from diffusax.training.step.step import Batch, TrainState, initial_state, make_train_step

__all__ = [
    "AVERAGES",
    "AutoencoderConfig",
    "AutoencoderValidationConfig",
    "Batch",
    "Batches",
    "CacheConfig",
    "CacheDataConfig",
    "CaptionedDataConfig",
    "ControlDataConfig",
    "ControlNetConfig",
    "ControlNetValidationConfig",
    "DataConfig",
    "DenoiserValidationConfig",
    "Draws",
    "DreamBoothConfig",
    "DreamBoothDataConfig",
    "EMAConfig",
    "EMAState",
    "EditDataConfig",
    "FineTuningOptimizerConfig",
    "ImageDataConfig",
    "InstructPix2PixConfig",
    "InstructPix2PixValidationConfig",
    "LoRAConfig",
    "OptimizerConfig",
    "Preempted",
    "Recipe",
    "TextToImageConfig",
    "TextToVideoConfig",
    "TextualInversionConfig",
    "TextualInversionDataConfig",
    "TextualInversionOptimizerConfig",
    "TimestepBiasConfig",
    "TrainConfig",
    "TrainState",
    "UnconditionalConfig",
    "UnconditionalValidationConfig",
    "ValidationConfig",
    "VideoDataConfig",
    "VideoValidationConfig",
    "autoencoder",
    "cache_latents",
    "controlnet",
    "copy_as_average",
    "dreambooth",
    "encode_pixels",
    "initial_state",
    "instruct_pix2pix",
    "make_average",
    "make_optimizer",
    "make_train_step",
    "read_config",
    "remove_snapshots_after",
    "text_to_image",
    "text_to_video",
    "textual_inversion",
    "to_yaml",
    "train",
    "unconditional",
    "update_ema",
    "write_snapshots",
]
