"""The arguments of `step` in the classes where diffusers has others than `Stepped.step`."""

from typing import Any

from diffusax.samplers.schedulers.stepped import Stepped


def step_without_noise(
    self: Stepped, model_output: Any, timestep: Any, sample: Any, return_dict: bool = True
) -> Any:
    """Returns the sample after the row of this timestep; see `Stepped.step`."""
    return self._step(model_output, timestep, sample, return_dict)


def step_with_churn(
    self: Stepped,
    model_output: Any,
    timestep: Any,
    sample: Any,
    s_churn: float = 0.0,
    s_tmin: float = 0.0,
    s_tmax: float = float("inf"),
    s_noise: float = 1.0,
    generator: Any = None,
    return_dict: bool = True,
) -> Any:
    """Returns the sample after the row of this timestep; see `Stepped.step`.

    s_churn must be 0, because rows cannot hold it, and then s_tmin, s_tmax and s_noise say nothing.

    Raises:
        ValueError: s_churn is not 0.
    """
    if s_churn:
        raise ValueError(
            f"s_churn must be 0 (got {s_churn:g}); for noise in every step use "
            "EulerAncestralDiscreteScheduler"
        )
    return self._step(model_output, timestep, sample, return_dict, generator=generator)


def step_with_variance_noise(
    self: Stepped,
    model_output: Any,
    timestep: Any,
    sample: Any,
    generator: Any = None,
    variance_noise: Any = None,
    return_dict: bool = True,
) -> Any:
    """Returns the sample after the row of this timestep; see `Stepped.step`.

    variance_noise is the noise itself, of the sample's shape, instead of a generator.
    """
    options = {"generator": generator, "variance_noise": variance_noise}
    return self._step(model_output, timestep, sample, return_dict, **options)
