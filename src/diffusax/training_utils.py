"""Pieces of loops of one's own that train, under the names of `diffusers.training_utils`."""

import gc
import math
import random
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.boundary.tensors import alike, as_numpy
from diffusax.models.network import cast_params
from diffusax.models.parameter_tree import fill, ordered_leaves
from diffusax.networks import Model
from diffusax.runtime.random.noise import draw_from
from diffusax.samplers.processes import FlowWeighting

_RULES = (
    "decay",
    "min_decay",
    "optimization_step",
    "update_after_step",
    "use_ema_warmup",
    "inv_gamma",
    "power",
)


class EMAModel:
    """An exponential moving average of parameters, as diffusers' class of this name.

    Parameters are given as a model's `parameters()`, as a model, or as a tree of arrays, which
    `copy_to` and `restore` return with other values, because JAX's arrays do not change.
    """

    def __init__(
        self,
        parameters: Any,
        decay: float = 0.9999,
        min_decay: float = 0.0,
        update_after_step: int = 0,
        use_ema_warmup: bool = False,
        inv_gamma: float = 1.0,
        power: float = 2 / 3,
        foreach: bool = False,
        model_cls: Any = None,
        model_config: Any = None,
    ):
        """Begins with a copy of the parameters.

        Args:
            parameters: the parameters.
            decay: the most that the decay becomes.
            min_decay: the least of it, once averaging has begun.
            update_after_step: the steps after which averaging begins.
            use_ema_warmup: whether the decay is 1 - (1 + n / inv_gamma)^-power rather than
                (1 + n) / (10 + n).
            inv_gamma: see use_ema_warmup.
            power: see use_ema_warmup.
            foreach: accepted, as diffusers' argument; one program updates all parameters.
            model_cls: the model's class, for `save_pretrained`.
            model_config: the model's config, for `save_pretrained`.
        """
        self.decay, self.min_decay = decay, min_decay
        self.update_after_step, self.use_ema_warmup = update_after_step, use_ema_warmup
        self.inv_gamma, self.power = inv_gamma, power
        self.optimization_step = 0
        self.cur_decay_value: float | None = None
        self.temp_stored_params: list[Any] | None = None
        self.model_cls, self.model_config = model_cls, model_config
        self.shadow_params = list(map(jnp.array, _arrays(parameters)))

    @classmethod
    def from_pretrained(cls, path: Any, model_cls: Any, foreach: bool = False) -> "EMAModel":
        """Reads an average that `save_pretrained` has written, diffusers' too, with its options."""
        config = model_cls.load_config(path)
        model = model_cls.from_pretrained(path)
        ema = cls(model.parameters(), model_cls=model_cls, model_config=model.config)
        ema.load_state_dict({name: config[name] for name in _RULES if name in config})
        return ema

    def save_pretrained(self, path: Any) -> None:
        """Writes the average as a model that diffusers opens.

        Raises:
            ValueError: model_cls and model_config were not given.
        """
        if self.model_cls is None or self.model_config is None:
            raise ValueError("model_cls and model_config must be given to EMAModel to save it")
        model = self.model_cls.from_config(self.model_config)
        self.copy_to(model.parameters())
        model.save_pretrained(path)

    def get_decay(self, optimization_step: int) -> float:
        """Returns the decay of a step, counted from 1."""
        step = max(0, optimization_step - self.update_after_step - 1)
        if step <= 0:
            return 0.0
        value = (1 + step) / (10 + step)
        if self.use_ema_warmup:
            value = 1 - (1 + step / self.inv_gamma) ** -self.power
        return max(min(value, self.decay), self.min_decay)

    def step(self, parameters: Any) -> None:
        """Moves the average towards the parameters; those without a gradient are copied."""
        self.optimization_step += 1
        self.cur_decay_value = self.get_decay(self.optimization_step)
        given = list(_leaves(parameters))
        rests = [
            1 - self.cur_decay_value if getattr(x, "requires_grad", True) else 1.0 for x in given
        ]
        self.shadow_params = _moved(self.shadow_params, list(_arrays(given)), rests)

    def copy_to(self, parameters: Any) -> Any:
        """Puts the average into a model, or returns a tree with its values."""
        return _filled(parameters, self.shadow_params)

    def store(self, parameters: Any) -> None:
        """Keeps parameters for `restore`."""
        self.temp_stored_params = list(_arrays(parameters))

    def restore(self, parameters: Any) -> Any:
        """Puts back what `store` has kept, as `copy_to` does.

        Raises:
            RuntimeError: nothing was stored.
        """
        if self.temp_stored_params is None:
            raise RuntimeError("there are no parameters to restore; call store first")
        kept, self.temp_stored_params = self.temp_stored_params, None
        return _filled(parameters, kept)

    def to(self, device: Any = None, dtype: Any = None, non_blocking: bool = False) -> None:
        """Casts the average, where a dtype is given; devices are accepted and change nothing."""
        if dtype is not None:
            self.shadow_params = cast_params(self.shadow_params, dtype)

    def pin_memory(self) -> None:
        """Does nothing, because JAX places arrays; diffusers' programs call it."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the options, the number of steps and the average."""
        return {name: getattr(self, name) for name in _RULES} | {
            "shadow_params": self.shadow_params
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what `state_dict` returns.

        Raises:
            ValueError: the decay is not from 0 to 1, or there are other numbers of parameters.
        """
        if not 0 <= state_dict.get("decay", self.decay) <= 1:
            raise ValueError(f"decay must be from 0 to 1 (got {state_dict['decay']!r})")
        for name in _RULES:
            setattr(self, name, state_dict.get(name, getattr(self, name)))
        shadow = state_dict.get("shadow_params")
        if shadow is not None:
            if len(shadow) != len(self.shadow_params):
                raise ValueError(
                    f"shadow_params must be {len(self.shadow_params)} arrays (got {len(shadow)})"
                )
            self.shadow_params = [jnp.asarray(as_numpy(x)) for x in shadow]


def compute_snr(noise_scheduler: Any, timesteps: Any) -> Any:
    """Returns the signal-to-noise ratio at timesteps, alpha-bar / (1 - alpha-bar), like timesteps.

    Args:
        noise_scheduler: a scheduler with `alphas_cumprod`.
        timesteps: integers, n.
    """
    alphas = as_numpy(noise_scheduler.alphas_cumprod)[as_numpy(timesteps).astype(int)]
    return alike(jnp.asarray(alphas / (1 - alphas), jnp.float32), timesteps)


def compute_density_for_timestep_sampling(
    weighting_scheme: str,
    batch_size: int,
    logit_mean: float = 0.0,
    logit_std: float = 1.0,
    mode_scale: float = 1.29,
    device: Any = "cpu",
    generator: Any = None,
) -> Any:
    """Draws places u in [0, 1) on a scheduler's timesteps, b (Esser et al. 2024, section 3.1).

    Args:
        weighting_scheme: "logit_normal", "mode", or another for uniform ones.
        batch_size: their number.
        logit_mean: the mean of the logit, for logit_normal.
        logit_std: the deviation of the logit.
        mode_scale: how much more often the middle is drawn, for mode.
        device: accepted, as diffusers' argument.
        generator: a key of `jax.random` or a seed; None takes a seed from the system.
    """
    normal = jnp.asarray(
        draw_from(random.getrandbits(32) if generator is None else generator, (batch_size,))
    )
    if weighting_scheme == "logit_normal":
        return jax.nn.sigmoid(logit_mean + logit_std * normal)
    u = jax.scipy.stats.norm.cdf(normal)
    if weighting_scheme == "mode":
        return 1 - u - mode_scale * (jnp.cos(math.pi * u / 2) ** 2 - 1 + u)
    return u


def compute_loss_weighting_for_sd3(weighting_scheme: str, sigmas: Any = None) -> Any:
    """Returns what the errors at noise levels count for, like sigmas, n.

    weighting_scheme: "sigma_sqrt", "cosmap", or another for ones.
    """
    scheme: Any = weighting_scheme if weighting_scheme in ("sigma_sqrt", "cosmap") else "none"
    weights = FlowWeighting(scheme).weight(jnp.asarray(as_numpy(sigmas)))
    return alike(weights, sigmas)


def set_seed(seed: int) -> None:
    """Seeds Python's and NumPy's random numbers, and PyTorch's if the program has imported it.

    JAX has no seed of its own: calls take `seed=` or `generator=`.
    """
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


def cast_training_params(model: Model | list[Model], dtype: Any = jnp.float32) -> None:
    """Casts the parameters of models that are to be trained; `requires_grad_(False)` excludes one.

    Args:
        model: a model or a list.
        dtype: the dtype, by default float32.
    """
    for one in model if isinstance(model, list) else [model]:
        if one.switches.trainable:
            one.to(dtype)


def free_memory() -> None:
    """Frees what nothing refers to any more."""
    gc.collect()


@jax.jit
def _moved(shadow: list[Any], params: list[Any], rests: list[float]) -> list[Any]:
    return [s - rest * (s - p.astype(s.dtype)) for s, p, rest in zip(shadow, params, rests)]


def _leaves(parameters: Any) -> Iterable[Any]:
    """Returns parameters one by one: those of a model, of an iterator, or of a tree."""
    if isinstance(parameters, Model):
        return parameters.parameters()  # type: ignore[attr-defined]
    if isinstance(parameters, Mapping):
        return [leaf for _, leaf in ordered_leaves(parameters)]
    return parameters


def _arrays(parameters: Any) -> Iterable[Any]:
    return (getattr(leaf, "value", leaf) for leaf in _leaves(parameters))


def _filled(parameters: Any, values: list[Any]) -> Any:
    """Puts values into a model's parameters, or returns a tree or a list of them."""
    if isinstance(parameters, Mapping):
        return fill(parameters, values)
    for leaf, value in zip(_leaves(parameters), values, strict=True):
        if not hasattr(leaf, "value"):
            return list(values)
        leaf.value = value
    return None
