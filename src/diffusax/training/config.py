"""The options that recipes share: all of them, those of a denoiser, those of a checkpoint's."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from diffusax.boundary.options import Count, Options, Seed
from diffusax.lora.trained import LoRAConfig
from diffusax.runtime.devices.mesh import parse_mesh
from diffusax.samplers.processes import Flow, FlowWeighting, Process, Scheme
from diffusax.training.data.options import DataConfig
from diffusax.training.ema.update import EMAConfig
from diffusax.training.optimizers import FineTuningOptimizerConfig, OptimizerConfig, Rate
from diffusax.training.options import ComputeDtype


@dataclasses.dataclass(frozen=True)
class ValidationConfig(Options):
    """Images that show what the parameters can do."""

    group: ClassVar[str] = "validation."

    every: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """The number of steps from one set of validation images to the next; 0 generates none."""


@dataclasses.dataclass(frozen=True)
class TrainConfig(Options):
    """The options that all recipes have in common."""

    output: Annotated[str, Meta(min_length=1)] = "out/train"
    """The folder for checkpoints, logs and the result. A run that stopped there is continued."""
    steps: Count = 1000
    """The number of updates of the parameters."""
    batch_size: Count = 16
    """The number of examples of an update, over all devices and microbatches."""
    accumulate: Count = 1
    """The number of microbatches that an update is made of, one after the other."""
    seed: Seed = 0
    """The random seed: it decides the order of the data and all random numbers."""
    mesh: str = "data=-1"
    """The number of devices along each axis of the mesh, such as data=4,fsdp=2: data holds copies
    of the parameters, fsdp splits them, tensor splits each layer's work; -1 means all that remain.
    """
    distributed: bool = False
    """Run as one of several processes, which find each other on TPU pods and under Slurm by
    themselves, elsewhere through JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."""
    checkpoint_every: Count = 500
    """The number of steps from one checkpoint to the next."""
    keep: Count = 2
    """The number of checkpoints to keep. With two or more, a damaged checkpoint costs only the
    steps since the one before."""
    resume: bool = True
    """Continue from the last checkpoint in the output folder; if off, a checkpoint there is an
    error."""
    log_every: Count = 10
    """The number of steps from one line of metrics.jsonl to the next."""
    report_to: tuple[Literal["tensorboard", "wandb", "none"], ...] = ("tensorboard",)
    """Where to report besides metrics.jsonl: tensorboard, wandb, both or none."""
    peak_tflops: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    """The peak TFLOP/s of a device, for the model FLOP utilisation where diffusax does not
    know it."""
    push_to_hub: str | None = None
    """A Hub repository to upload the result to; it is created before the first step."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """The options of the data set."""
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """The options of the optimizer."""
    ema: EMAConfig = dataclasses.field(default_factory=EMAConfig)
    """The options of the parameters' average."""
    validation: ValidationConfig = dataclasses.field(default_factory=ValidationConfig)
    """The options of the images that are generated during the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_mesh(self.mesh)
        if "none" in self.report_to:
            if len(self.report_to) > 1:
                raise ValueError(
                    f"report_to={','.join(self.report_to)} is none and others; give one"
                )
            object.__setattr__(self, "report_to", ())
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size={self.batch_size} must be divisible by accumulate={self.accumulate}"
            )

    @property
    def data_path(self) -> str:
        """The name of the data set."""
        return self.data.path

    @property
    def chosen_optimizer(self) -> OptimizerConfig:
        """The options of the optimizer, with what a recipe chooses where none is given."""
        return self.optimizer

    @property
    def component_rates(self) -> Mapping[str, float]:
        """The learning rates of components that have their own, by the beginning of their names."""
        return {}

    @property
    def trains_adapters(self) -> bool:
        """Whether low-rank adapters are trained in the place of networks."""
        return False


_READ_BY = {
    "multiplier": ("earlier", "later", "range"),
    "portion": ("earlier", "later"),
    "begin": ("range",),
    "end": ("range",),
}
"""The strategies that read an option."""


@dataclasses.dataclass(frozen=True)
class TimestepBiasConfig(Options):
    """Which timesteps are drawn more often. The loss has no weights that make up for it."""

    group: ClassVar[str] = "timestep_bias."

    strategy: Literal["none", "earlier", "later", "range"] = "none"
    """Which timesteps are drawn more often: none, earlier (the least noisy), later (the noisiest)
    or range (from begin to end)."""
    multiplier: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """The number of times as often as the others that they are drawn."""
    portion: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """The share of all timesteps that earlier and later stand for."""
    begin: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """The first timestep of range."""
    end: Count = 1000
    """The timestep after the last of range."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.begin >= self.end:
            raise ValueError(
                f"timestep_bias.begin={self.begin} must be below timestep_bias.end={self.end}"
            )
        for name, strategies in _READ_BY.items():
            value = getattr(self, name)
            if value != getattr(type(self), name) and self.strategy not in strategies:
                raise ValueError(
                    f"timestep_bias.{name}={value} does nothing without timestep_bias.strategy="
                    f"{' or '.join(strategies)}; give both"
                )


_OF_SCHEMES = {"logit_mean": "logit_normal", "logit_std": "logit_normal", "mode_scale": "mode"}
"""The options of weighting schemes."""


@dataclasses.dataclass(frozen=True)
class DenoisingConfig(TrainConfig):
    """The options of all recipes whose loss is the error of a denoiser."""

    model: str = ""
    """The checkpoint to start from: a folder in diffusers' layout, a .safetensors file, or a Hub
    repository id."""
    from_scratch: bool = False
    """Draw the trained networks' parameters afresh; the checkpoint gives their configs."""
    prediction_type: Literal["epsilon", "v_prediction", "sample"] | None = None
    """What the network predicts, also of the result; by default the checkpoint's own."""
    snr_gamma: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    """The gamma of Min-SNR loss weights (Hang et al. 2023); 5 is usual; by default all errors
    weigh alike."""
    noise_offset: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """The deviation of a mean that the noise gets per image and channel, so that dark and bright
    images are learnt; 0.1 is usual."""
    gradient_checkpointing: Literal["none", "blocks", "full"] = "none"
    """What is computed again for the gradient to save memory: none; blocks (each resnet and
    transformer); full (levels too: the least memory, the most time)."""
    compute_dtype: ComputeDtype = "bfloat16"
    """The dtype that the networks compute in; parameters are float32."""
    weights: Literal["int8", "int8_convrot", "fp8"] | None = None
    """Store the kernels of frozen denoisers and text encoders in eight bits, which halves what they
    take in bfloat16; with lora or textual inversion, where the large networks are frozen."""
    timestep_bias: TimestepBiasConfig = dataclasses.field(default_factory=TimestepBiasConfig)
    """Timesteps drawn more often."""
    weighting_scheme: Scheme | None = None
    """Of flow matching: the density of the noise levels (logit_normal, the default, or mode), or
    the weight of their errors (sigma_sqrt or cosmap, all levels drawn alike), or none of both."""
    logit_mean: Annotated[float, Meta(ge=-100, le=100)] = 0.0
    """Of logit_normal: the mean, below 0 for more noise."""
    logit_std: Annotated[float, Meta(gt=0, le=100)] = 1.0
    """Of logit_normal: the deviation."""
    mode_scale: Annotated[float, Meta(ge=-1, le=1.75)] = 1.29
    """Of mode: how much more often levels in the middle are drawn."""
    timestep_shift: Annotated[float, Meta(gt=0, le=1000)] | None = None
    """Of flow matching: how far the noise levels are moved towards noise, 1 for not at all; by
    default as the checkpoint's scheduler moves those of all images, and not at all where it moves
    them by an image's size, as in diffusers' scripts."""
    shift_by_size: bool = False
    """Of flow matching: move the noise levels as pipelines do, for checkpoints whose scheduler
    moves them by an image's size."""
    guidance_scale: Annotated[float, Meta(ge=0, le=1000)] = 3.5
    """The guidance scale that a network is told while it is trained, for those that read it, such
    as FLUX.1-dev's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        scheme = self.weighting_scheme
        for name, its in _OF_SCHEMES.items():
            if scheme != its and getattr(self, name) != getattr(type(self), name):
                raise ValueError(f"{name} does nothing without weighting_scheme={its}; give both")
        if self.timestep_shift is not None and self.shift_by_size:
            raise ValueError(
                f"timestep_shift={self.timestep_shift} and shift_by_size are two shifts; leave one "
                "of them out"
            )

    def weighted(self, process: Process) -> Process:
        """Returns the process with these options' shift, densities and weights of noise levels.

        Raises:
            ValueError: one of these is given, and the process has discrete noise levels.
        """
        names = ("weighting_scheme", "timestep_shift", "shift_by_size")
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if not given:
            return process
        if not isinstance(process, Flow):
            raise ValueError(
                f"{given[0]}={getattr(self, given[0])} is for networks of flow matching, and this "
                "checkpoint has discrete noise levels; leave it out, see timestep_bias and "
                "snr_gamma"
            )
        if self.timestep_shift is not None:
            process = dataclasses.replace(process, shift=self.timestep_shift)
        if self.weighting_scheme is None:
            return process
        numbers = {name: getattr(self, name) for name in _OF_SCHEMES}
        weighting = FlowWeighting(self.weighting_scheme, **numbers)
        return dataclasses.replace(process, weighting=weighting)


@dataclasses.dataclass(frozen=True)
class DenoiserValidationConfig(ValidationConfig):
    """Images generated from prompts, always from the same noise."""

    prompts: tuple[str, ...] = ()
    """What to show."""
    steps: Annotated[int, Meta(ge=1, le=1000)] = 20
    """The number of sampler steps."""
    guidance: Annotated[float, Meta(ge=0, le=1000)] = 7.5
    """The guidance scale."""
    height: Annotated[int, Meta(ge=8, le=8192)] | None = None
    """The height of the images in pixels; by default data.resolution, or the model's own."""
    width: Annotated[int, Meta(ge=8, le=8192)] | None = None
    """The width of the images in pixels; by default data.resolution, or the model's own."""


@dataclasses.dataclass(frozen=True)
class ImagesValidationConfig(DenoiserValidationConfig):
    """Images generated from prompts and from other images."""

    images: tuple[str, ...] = ()
    """The images to edit, or those that steer: one, or one for each of the prompts."""

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
    """The images that are generated during the run."""

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
