"""The options of a run: dataclasses, YAML files and key=value pairs."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from diffusax.training.data import DataConfig
from diffusax.training.ema import EMAConfig
from diffusax.training.optimizers import OptimizerConfig

C = TypeVar("C", bound="TrainConfig")


@dataclasses.dataclass(frozen=True)
class TrainConfig(DataConfig, OptimizerConfig, EMAConfig):
    """What all recipes have in common. One flat set of names, on the command line and in files."""

    output: str = "out/train"
    """The folder for checkpoints, logs and the result. A run that stopped there is continued."""
    steps: int = 1000
    """Updates of the parameters."""
    batch_size: int = 16
    """Examples of an update, over all devices and microbatches."""
    accumulate: int = 1
    """Microbatches that an update is made of, one after the other."""
    seed: int = 0
    """Of the order of the data and of all that is drawn."""
    fsdp: int = 1
    """Devices that share one copy of the parameters; -1 is all."""
    distributed: bool = False
    """Be one of several processes, which find each other on TPU pods and under Slurm by themselves,
    elsewhere through JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."""
    checkpoint_every: int = 500
    """Steps from one checkpoint to the next."""
    keep: int = 2
    """Checkpoints to keep."""
    resume: bool = True
    """Continue from the last checkpoint in the output folder; off, one there is an error."""
    log_every: int = 10
    """Steps from one line of metrics.jsonl to the next."""
    validate_every: int = 0
    """Steps from one set of validation pictures to the next; 0 draws none."""
    report_to: tuple[str, ...] = ("tensorboard",)
    """tensorboard, wandb, both or none, besides metrics.jsonl."""
    peak_tflops: float | None = None
    """Of a device, for the model FLOP utilisation, where it is not known."""
    push_to_hub: str | None = None
    """A Hub repository to upload the result to."""

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        EMAConfig.__post_init__(self)
        for name in ("steps", "batch_size", "accumulate", "checkpoint_every", "keep", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 (got {getattr(self, name)})")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size={self.batch_size} must be divisible by accumulate={self.accumulate}"
            )
        for name in self.report_to:
            if name not in ("tensorboard", "wandb"):
                raise ValueError(f"report_to={name!r} is not known; use tensorboard or wandb")


def read_config(cls: type[C], path: Path | None, pairs: Sequence[str] = ()) -> C:
    """The options of a YAML file, then those of "name=value" pairs.

    Raises:
        ValueError: the file cannot be read, or an option is unknown or has the wrong type.
    """
    import yaml

    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = yaml.safe_load(path.read_text("utf-8")) or {}
        except (OSError, yaml.YAMLError) as error:
            raise ValueError(f"--config {path}: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"--config {path} must be a mapping of options to values")
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"--set takes name=value (got {pair!r})")
        values[name.strip().replace("-", "_")] = yaml.safe_load(text)
    return cls(**_typed(cls, values))


def write_config(config: TrainConfig, path: Path) -> None:
    """All options as YAML."""
    import yaml

    data = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(config).items()}
    path.write_text(yaml.safe_dump(data, sort_keys=False), "utf-8")


def _typed(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    typed = {}
    for name, value in values.items():
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            mend = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{cls.__name__} has no option {name!r}{mend}")
        typed[name] = _convert(name, value, hints[name])
    return typed


def _convert(name: str, value: Any, hint: Any) -> Any:
    """A YAML value as the field's type. YAML reads 1e-4, without a point, as a text."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    kind = next(option for option in options if option is not type(None))
    if typing.get_origin(kind) is tuple:
        return tuple(value) if isinstance(value, list | tuple) else (value,)
    try:
        if kind is float and not isinstance(value, bool):
            return float(value)
        if kind is int and not isinstance(value, bool) and float(value) == int(float(value)):
            return int(float(value))
    except (TypeError, ValueError):
        pass
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise ValueError(f"{name} must be of type {kind.__name__} (got {value!r})")
