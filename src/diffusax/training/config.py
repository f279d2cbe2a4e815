"""The options that all recipes have in common."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from diffusax.boundary.options import Count, Options, Seed
from diffusax.runtime.devices.mesh import parse_mesh
from diffusax.training.data.batches import DataConfig
from diffusax.training.ema.update import EMAConfig
from diffusax.training.optimizers import OptimizerConfig


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
