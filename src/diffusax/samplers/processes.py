"""The processes that networks are trained for: a sampler suits the networks of one process only.

A sampler of flow matching would give other times to a network that predicts noise, and take the
noise for a velocity. Nothing would fail, but the images would be noise.
"""

import dataclasses
import math
from typing import Any, ClassVar, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.samplers import noise_levels

Scheme = Literal["logit_normal", "mode", "cosmap", "sigma_sqrt", "none"]
"""logit_normal and mode are densities of the levels. cosmap and sigma_sqrt are weights of levels
that are all drawn alike. none is neither."""


@dataclasses.dataclass(frozen=True)
class FlowWeighting:
    """The density of the training levels, and the weights of their errors."""

    scheme: Scheme = "logit_normal"
    logit_mean: float = 0.0
    """Of logit_normal: the mean of the logit of 1 - sigma, so that numbers below 0 mean more
    noise, as in diffusers."""
    logit_std: float = 1.0
    """Of logit_normal: the deviation of the logit."""
    mode_scale: float = 1.29
    """Of mode: how much more often levels in the middle are drawn, from -1 to 2 / (pi - 2)."""

    def sample(self, key: jax.Array, within: tuple[float, float] | None = None) -> jax.Array:
        """Returns a random sigma from 0 to 1, without any shift.

        within: the least and the highest; the density between them is the same but for a factor.
        """
        if self.scheme == "logit_normal":
            if within is None:
                drawn = jax.random.normal(key, dtype=jnp.float32)
            else:
                least, most = map(self._normal_of, within)
                drawn = jax.random.truncated_normal(key, least, most, dtype=jnp.float32)
            return jax.nn.sigmoid(self.logit_std * drawn - self.logit_mean)
        least, most = (0.0, 1.0) if within is None else map(self._uniform_of, within)
        u = jax.random.uniform(key, dtype=jnp.float32, minval=least, maxval=most)
        return self._of_mode(u, jnp.cos) if self.scheme == "mode" else u

    def _normal_of(self, sigma: float) -> float:
        """Returns the number of a normal distribution that becomes a sigma."""
        if sigma <= 0 or sigma >= 1:
            return -math.inf if sigma <= 0 else math.inf
        return (math.log(sigma / (1 - sigma)) + self.logit_mean) / self.logit_std

    def _uniform_of(self, sigma: float) -> float:
        """Returns the number from 0 to 1 that becomes a sigma, which grows with it."""
        if self.scheme != "mode":
            return sigma
        low, high = 0.0, 1.0
        for _ in range(53):
            middle = (low + high) / 2
            low, high = (middle, high) if self._of_mode(middle, math.cos) < sigma else (low, middle)
        return high

    def _of_mode(self, u: Any, cos: Any) -> Any:
        return u + self.mode_scale * (cos(math.pi * u / 2) ** 2 - 1 + u)

    def weight(self, sigmas: jax.Array) -> jax.Array:
        """Returns what the errors at these levels count for, n."""
        if self.scheme == "sigma_sqrt":
            return sigmas**-2.0
        if self.scheme == "cosmap":
            return 2 / (math.pi * (1 - 2 * sigmas + 2 * sigmas**2))
        return jnp.ones_like(sigmas)


Kind = Literal["diffusion", "flow", "edm", "continuous"]
"""diffusion: the discrete noise levels of a list of betas. flow: flow matching. edm: the
preconditioning of Karras et al. 2022. continuous: v prediction at continuous noise levels, which is
that preconditioning with sigma_data=1."""

_TRAINED: dict[Kind, str] = {
    "diffusion": "at discrete noise levels",
    "flow": "with flow matching",
    "edm": "with EDM's preconditioning",
    "continuous": "to predict v at continuous noise levels",
}
_FITTING: dict[Kind, str] = {
    "diffusion": "EulerDiscreteScheduler ('euler')",
    "flow": "FlowMatchEulerDiscreteScheduler ('flow_euler'), or prediction_type='flow_prediction'",
    "edm": "EDMEulerScheduler ('edm_euler') with the checkpoint's sigma_data",
    "continuous": "EulerDiscreteScheduler ('euler') with timestep_type='continuous'",
}


def samples(process: Kind) -> str:
    """Describes the networks of a process in words."""
    return f"networks trained {_TRAINED[process]}"


def check_process(name: str, scheduler: Any, trained: Kind) -> None:
    """Raises an error where a sampler is for networks that were trained for another process.

    Args:
        name: the sampler's name in the error.
        scheduler: the sampler.
        trained: the networks' process, which is that of the sampler that the checkpoint names.

    Raises:
        ValueError: the sampler is for another process.
    """
    if scheduler.process != trained:
        raise ValueError(
            f"{name} is for {samples(scheduler.process)}, and the scheduler that this checkpoint "
            f"came with is for {samples(trained)}; use {_FITTING[trained]} or another for those, "
            "or give scheduler= where the pipeline is made if its networks were trained otherwise"
        )


class Process(Protocol):
    """The process that turns clean latents into noise, x_t = signal x_0 + noise eps.

    t are n training times of the process: of `Diffusion` indices of timesteps, of `Flow` sigmas.
    """

    @property
    def prediction_types(self) -> tuple[str, ...]:
        """What networks can be trained to predict."""

    def levels(self, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The (signal, noise) at these times, n each."""

    def timesteps(self, t: jax.Array) -> jax.Array:
        """What the network is told of these times, n."""

    def sample_time(self, key: jax.Array, probabilities: np.ndarray | None = None) -> jax.Array:
        """A random training time, a scalar. probabilities: of each timestep."""

    def target(
        self, x0: jax.Array, noise: jax.Array, t: jax.Array, prediction_type: str
    ) -> jax.Array:
        """What the network shall predict, n ...."""

    def weight(self, t: jax.Array, prediction_type: str, snr_gamma: float | None) -> jax.Array:
        """What each example's error counts for, n."""


def add_noise(process: Process, x0: jax.Array, noise: jax.Array, t: jax.Array) -> jax.Array:
    """Returns x_t for clean latents x0 and noise, n ... each, at times t, n."""
    signal, deviation = (spread_level(level, x0) for level in process.levels(t))
    return signal * x0 + deviation * noise


@dataclasses.dataclass(frozen=True, eq=False)
class Diffusion:
    """Discrete noise levels (Ho et al. 2020): signal sqrt(a_t), noise sqrt(1 - a_t)."""

    alphas_cumprod: np.ndarray
    """a_t for each training timestep, float64."""

    prediction_types: ClassVar[tuple[str, ...]] = ("epsilon", "v_prediction", "sample")

    @property
    def sigmas(self) -> np.ndarray:
        """sqrt((1 - a) / a) for each training timestep, ascending (Song et al. 2021)."""
        return noise_levels.all_sigmas(self.alphas_cumprod)

    def alpha(self, t: jax.Array) -> jax.Array:
        """a_t, float32."""
        return jnp.asarray(self.alphas_cumprod, jnp.float32)[t]

    def levels(self, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `Process`."""
        alpha = self.alpha(t)
        return jnp.sqrt(alpha), jnp.sqrt(1 - alpha)

    def timesteps(self, t: jax.Array) -> jax.Array:
        """The indices themselves."""
        return t

    def sample_time(self, key: jax.Array, probabilities: np.ndarray | None = None) -> jax.Array:
        """An index from 0 to the last, int32; all alike without probabilities."""
        count = len(self.alphas_cumprod)
        if probabilities is None:
            return jax.random.randint(key, (), 0, count, jnp.int32)
        below = jnp.asarray(np.cumsum(probabilities)[:-1], jnp.float32)
        drawn = jnp.searchsorted(below, jax.random.uniform(key, dtype=jnp.float32), side="right")
        return drawn.astype(jnp.int32)

    def target(
        self, x0: jax.Array, noise: jax.Array, t: jax.Array, prediction_type: str
    ) -> jax.Array:
        """The noise, x_0, or v = sqrt(a) noise - sqrt(1 - a) x_0 (Salimans and Ho 2022).

        Raises:
            ValueError: the prediction_type is unknown.
        """
        _check_prediction(self, prediction_type)
        if prediction_type == "epsilon":
            return noise
        if prediction_type == "sample":
            return x0
        signal, deviation = (spread_level(level, x0) for level in self.levels(t))
        return signal * noise - deviation * x0

    def predicted(
        self, raw: jax.Array, x: jax.Array, t: jax.Array, prediction_type: str
    ) -> tuple[jax.Array, jax.Array]:
        """(x_0, noise) that a network's prediction `raw` for x_t stands for, n ... each.

        At a = 0 the noise that a network predicts says nothing of x_0, which is not finite there.

        Raises:
            ValueError: the prediction_type is unknown.
        """
        _check_prediction(self, prediction_type)
        signal, deviation = (spread_level(level, x) for level in self.levels(t))
        if prediction_type == "epsilon":
            return (x - deviation * raw) / signal, raw
        if prediction_type == "sample":
            return raw, (x - signal * raw) / deviation
        return signal * x - deviation * raw, deviation * x + signal * raw

    def weight(self, t: jax.Array, prediction_type: str, snr_gamma: float | None) -> jax.Array:
        """The weight min(SNR, gamma) in terms of the prediction (Hang et al. 2023, section 3.4).

        SNR = a / (1 - a). The weight is divided by SNR for epsilon and by SNR + 1 for v, not for
        x_0. At a = 0 the weight of epsilon is its limit, 1. Without a gamma all weigh 1.
        """
        alpha = self.alpha(t)
        if snr_gamma is None:
            return jnp.ones_like(alpha)
        snr = alpha / (1 - alpha)
        if prediction_type == "epsilon":
            return jnp.minimum(1.0, snr_gamma * (1 - alpha) / jnp.maximum(alpha, 1e-12))
        if prediction_type == "v_prediction":
            return jnp.minimum(snr, snr_gamma) * (1 - alpha)
        return jnp.minimum(snr, snr_gamma)


@dataclasses.dataclass(frozen=True)
class Flow:
    """Flow matching (Lipman et al. 2023): signal 1 - sigma, noise sigma, prediction eps - x_0."""

    shift: float = 1.0
    """How far the sigmas are moved towards noise (Esser et al. 2024, equation 23)."""
    num_train_timesteps: int = 1000
    weighting: FlowWeighting = dataclasses.field(default_factory=FlowWeighting)
    """Which levels are trained, and what their errors count for."""
    within: tuple[float, float] | None = None
    """The least and the highest sigma of the training, shifted; None for all."""

    prediction_types: ClassVar[tuple[str, ...]] = ("flow_prediction",)

    def shifted(self, sigmas: Any) -> Any:
        """Sigmas with the shift."""
        return noise_levels.shifted(sigmas, self.shift)

    def ends(self) -> tuple[float, float]:
        """The highest and the lowest sigma of the training timesteps, shifted, in float32."""
        return noise_levels.ends(self.num_train_timesteps, self.shift)

    def levels(self, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `Process`."""
        return 1 - t, t

    def timesteps(self, t: jax.Array) -> jax.Array:
        """Sigmas times the number of training timesteps."""
        return t * self.num_train_timesteps

    def sample_time(self, key: jax.Array, probabilities: np.ndarray | None = None) -> jax.Array:
        """A sigma of the weighting's density, shifted; none is below the last training timestep's.

        Raises:
            ValueError: probabilities of timesteps are given; the times here are continuous.
        """
        if probabilities is not None:
            raise ValueError(
                "timestep_bias is for discrete timesteps and flow matching has none; leave it out"
            )
        lowest = 1 / self.num_train_timesteps
        if self.within is None:
            return self.shifted(jnp.maximum(self.weighting.sample(key), lowest))
        ends = [max(self._unshifted(sigma), lowest) for sigma in self.within]
        sigma = self.shifted(self.weighting.sample(key, (ends[0], ends[1])))
        return jnp.clip(sigma, *self.within)

    def _unshifted(self, sigma: float) -> float:
        """Inverts `shifted`."""
        return sigma / (self.shift - (self.shift - 1) * sigma)

    def target(
        self, x0: jax.Array, noise: jax.Array, t: jax.Array, prediction_type: str
    ) -> jax.Array:
        """The velocity from the sample to the noise.

        Raises:
            ValueError: the prediction_type is another.
        """
        _check_prediction(self, prediction_type)
        return noise - x0

    def weight(self, t: jax.Array, prediction_type: str, snr_gamma: float | None) -> jax.Array:
        """The weighting's; one for all by default.

        Raises:
            ValueError: snr_gamma is given.
        """
        if snr_gamma is not None:
            raise ValueError(
                "snr_gamma weighs the errors of discrete noise levels and flow matching has none; "
                "leave it out"
            )
        return self.weighting.weight(t)


def _check_prediction(process: Process, prediction_type: str) -> None:
    if prediction_type not in process.prediction_types:
        raise ValueError(
            f"prediction_type={prediction_type!r} is not supported; use "
            f"{', '.join(process.prediction_types)}"
        )


def spread_level(level: jax.Array, x: jax.Array) -> jax.Array:
    """Returns a level of each image, n, or of all, as n 1 ..., to multiply x, n ..., by."""
    return level.reshape(level.shape + (1,) * (x.ndim - level.ndim))
