"""diffusers' Flax networks: inputs b c h w, parameters beside them, over diffusax's networks."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict

from diffusax.boundary.config import config_from_dict, config_to_dict
from diffusax.boundary.files import load_json
from diffusax.checkpoints import save_network
from diffusax.interop.flax.outputs import (
    FlaxAutoencoderKLOutput,
    FlaxControlNetOutput,
    FlaxDecoderOutput,
    FlaxDiagonalGaussianDistribution,
    FlaxUNet2DConditionOutput,
)
from diffusax.interop.flax.weights import fetch, load_weights
from diffusax.models.network import Network, Params, cast_params, initialize_params
from diffusax.models.unet.controlnet import scale_residuals
from diffusax.networks import AutoencoderKL, ControlNetModel, Model, UNet2DConditionModel
from diffusax.samplers.schedulers.options import Options

LOADING = frozenset(
    (
        "revision",
        "token",
        "local_files_only",
        "cache_dir",
        "force_download",
        "proxies",
        "variant",
        "use_auth_token",
        "resume_download",
    )
)
"""The arguments of from_pretrained that are for the Hub; the last five have no effect."""


class FlaxModelMixin:
    """A network without parameters, which `from_pretrained` returns and `apply` takes.

    Attributes:
        network: diffusax's network.
        config: the options, by key and by attribute.
        dtype: the dtype of the computation; parameters that are wider are cast to it.
    """

    network_class: ClassVar[Any]
    defaults: ClassVar[Mapping[str, Any]] = {}
    # Options that Flax's class alone has, and that change nothing in the result.
    flax_only: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, dtype: Any = jnp.float32, **options: Any):
        """Makes the network of the options that diffusers' Flax class of the same name has.

        Raises:
            ValueError: an option is unknown, or its value is not supported.
        """
        extra = {k: options.pop(k, v) for k, v in self.flax_only.items()}
        known = self.network_class.config_class
        config = config_from_dict(known, {**self.defaults, **options}, source=type(self).__name__)
        self.network = Network(self.network_class, config)
        self.config = Options({**extra, **config_to_dict(config)})
        self.dtype = jnp.dtype(dtype or jnp.float32)
        self._params: Params = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **overrides: Any) -> Self:
        """Makes the network of a parsed config.json, diffusers' or Flax's, or of a `config`."""
        dtype = overrides.pop("dtype", jnp.float32)
        options = {k: v for k, v in config.items() if k[0] != "_" and k != "dtype"}
        return cls(dtype=dtype, **{**options, **overrides})

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        dtype: Any = jnp.float32,
        *,
        subfolder: str | None = None,
        from_pt: bool = False,
        **kwargs: Any,
    ) -> tuple[Self, Params]:
        """Loads the network of a folder or Hub repository, and its parameters in the files' dtypes.

        Args:
            pretrained_model_name_or_path: a folder or a Hub repository id.
            dtype: the dtype of the computation.
            subfolder: the folder in it, such as "unet" for a pipeline's checkpoint.
            from_pt: whether to read PyTorch's safetensors even if there are Flax's weights.
            **kwargs: revision, token, local_files_only, cache_dir, and options that replace the
                config's.

        Raises:
            ValueError: it cannot be found or read; says why.
        """
        hub = {name: kwargs.pop(name) for name in LOADING & kwargs.keys()}
        folder = fetch(pretrained_model_name_or_path, from_pt=from_pt, subfolder=subfolder, **hub)
        config = {**load_json(folder / "config.json"), **kwargs}
        cls._check_class(config, folder)
        model = cls.from_config(config, dtype=dtype)
        return model, load_weights(model.network, folder, from_pt=from_pt)

    def save_pretrained(
        self, save_directory: str | Path, params: Params, is_main_process: bool = True
    ) -> None:
        """Writes a folder that diffusers, PyTorch's too, opens: config.json and safetensors."""
        if is_main_process:
            save_network(Model(self.network, params), save_directory)

    def init_weights(self, rng: jax.Array) -> Params:
        """Returns random initial parameters, float32."""
        if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
            rng = jax.random.key_data(rng)
        return jax.pure_callback(self._draw, self._drawn_shapes(), rng)

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Params]:
        """Returns {"params": random parameters}, as Linen's `init`; inputs are not needed."""
        return {"params": self.init_weights(rngs["params"] if isinstance(rngs, dict) else rngs)}

    def bind(self, variables: Mapping[str, Params]) -> Self:
        """Returns the network bound to its parameters, {"params": ...}, to call its methods."""
        bound = copy.copy(self)
        bound._params = self.narrowed(variables["params"])
        return bound

    def apply(
        self,
        variables: Mapping[str, Params],
        *args: Any,
        rngs: Any = None,
        method: Any = None,
        mutable: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Returns the result of a method, by default of the call, with these parameters.

        Args:
            variables: {"params": ...}.
            args: arguments of the method.
            rngs: accepted without effect; networks here use only the random keys in a method's
                arguments.
            method: one of the model's methods, its name, or a function of a bound model.
            mutable: accepted without effect; networks here have no state.
            kwargs: arguments of the method.
        """
        bound = self.bind(variables)
        if method is None or isinstance(method, str):
            return getattr(bound, method or "__call__")(*args, **kwargs)
        return getattr(method, "__func__", method)(bound, *args, **kwargs)

    def narrowed(self, params: Params) -> Params:
        """Casts the parameters to the model's dtype where theirs is wider.

        Raises:
            ValueError: there are none.
        """
        if params is None:
            raise ValueError(
                f"{type(self).__name__} holds no parameters; call apply({{'params': params}}, ...)"
            )
        if isinstance(params, FrozenDict):
            params = params.unfreeze()
        widest = max(leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
        return cast_params(params, self.dtype) if widest > self.dtype.itemsize else params

    def to_bf16(self, params: Params, mask: Any = None) -> Params:
        """Casts the parameters to bfloat16; with a mask, a tree of bools, only those it marks."""
        return _cast(params, jnp.bfloat16, mask)

    def to_fp16(self, params: Params, mask: Any = None) -> Params:
        """Casts the parameters to float16; see `to_bf16`."""
        return _cast(params, jnp.float16, mask)

    def to_fp32(self, params: Params, mask: Any = None) -> Params:
        """Casts the parameters to float32; see `to_bf16`."""
        return _cast(params, jnp.float32, mask)

    def _run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return Model(self.network, self.narrowed(self._params)).run(*args, method=method, **kwargs)

    def _draw(self, key: Any) -> Params:
        params = initialize_params(self.network.shapes, seed=np.asarray(key).tolist())
        return jax.tree.map(np.asarray, params)

    def _drawn_shapes(self) -> Params:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), self.network.shapes
        )

    @classmethod
    def _check_class(cls, config: Mapping[str, Any], folder: Path) -> None:
        named = str(config.get("_class_name", "")).removeprefix("Flax")
        if named and named != cls.network_class.__name__:
            raise ValueError(f"{folder} holds a {named}, not a {cls.network_class.__name__}")


class FlaxUNet2DConditionModel(FlaxModelMixin):
    """The UNet of Stable Diffusion and SDXL."""

    network_class = UNet2DConditionModel
    defaults: ClassVar[Mapping[str, Any]] = {"sample_size": 32}
    flax_only: ClassVar[Mapping[str, Any]] = {
        "use_memory_efficient_attention": False,
        "split_head_dim": False,
    }

    def __call__(
        self,
        sample: jax.Array,
        timesteps: Any,
        encoder_hidden_states: jax.Array,
        added_cond_kwargs: Mapping[str, jax.Array] | None = None,
        down_block_additional_residuals: Sequence[jax.Array] | None = None,
        mid_block_additional_residual: jax.Array | None = None,
        return_dict: bool = True,
        train: bool = False,
    ) -> Any:
        """Predicts from noisy latents, b c h w.

        Args:
            sample: b c h w.
            timesteps: a number or b.
            encoder_hidden_states: b s cross_attention_dim.
            added_cond_kwargs: SDXL's {"text_embeds": b p, "time_ids": b 6}.
            down_block_additional_residuals: a ControlNet's, each b h w c.
            mid_block_additional_residual: a ControlNet's, b h w c.
            return_dict: whether to return FlaxUNet2DConditionOutput instead of a tuple.
            train: accepted without effect; there is no dropout.
        """
        y = self._run(
            "__call__",
            channels_last(sample),
            jnp.asarray(timesteps),
            encoder_hidden_states,
            added_cond=added_cond_kwargs,
            down_block_additional_residuals=down_block_additional_residuals,
            mid_block_additional_residual=mid_block_additional_residual,
        )
        output = FlaxUNet2DConditionOutput(sample=channels_first(y))
        return output if return_dict else output.to_tuple()


class FlaxControlNetModel(FlaxModelMixin):
    """A ControlNet."""

    network_class = ControlNetModel
    flax_only: ClassVar[Mapping[str, Any]] = {"sample_size": 32, "dropout": 0.0}

    def __call__(
        self,
        sample: jax.Array,
        timesteps: Any,
        encoder_hidden_states: jax.Array,
        controlnet_cond: jax.Array,
        conditioning_scale: Any = 1.0,
        return_dict: bool = True,
        train: bool = False,
    ) -> Any:
        """Returns the scaled residuals, each b h w c as the UNet takes them.

        Args:
            sample: b c h w.
            timesteps: a number or b.
            encoder_hidden_states: b s cross_attention_dim.
            controlnet_cond: b 3 H W in [0, 1].
            conditioning_scale: a number, or b.
            return_dict: whether to return FlaxControlNetOutput instead of a tuple.
            train: accepted without effect; there is no dropout.
        """
        embedding = self._run("embed_condition", channels_last(controlnet_cond))
        residuals = self._run(
            "__call__",
            channels_last(sample),
            jnp.asarray(timesteps),
            encoder_hidden_states,
            cond_embedding=embedding,
        )
        scales = jnp.broadcast_to(conditioning_scale, (len(residuals[0]) + 1, sample.shape[0]))
        down, mid = scale_residuals(self.network.config, residuals, scales)
        output = FlaxControlNetOutput(down_block_res_samples=down, mid_block_res_sample=mid)
        return output if return_dict else output.to_tuple()

    def _draw(self, key: Any) -> Params:
        params = super()._draw(key)
        ends = {name: params[name] for name in params if name.startswith("controlnet_")}
        embedding = ends.pop("controlnet_cond_embedding")
        # A new ControlNet changes nothing: its last convolutions are zero (Zhang et al. 2023).
        zeros = jax.tree.map(np.zeros_like, {**ends, "conv_out": embedding["conv_out"]})
        embedding = {**embedding, "conv_out": zeros.pop("conv_out")}
        return {**params, **zeros, "controlnet_cond_embedding": embedding}


class FlaxAutoencoderKL(FlaxModelMixin):
    """The autoencoder of Stable Diffusion and SDXL."""

    network_class = AutoencoderKL

    def encode(
        self, sample: jax.Array, deterministic: bool = True, return_dict: bool = True
    ) -> Any:
        """Encodes images b 3 H W in [-1, 1] to the distribution of their latents, b h w z."""
        mean, logvar = self._run("encode", channels_last(sample))
        output = FlaxAutoencoderKLOutput(
            latent_dist=FlaxDiagonalGaussianDistribution(mean=mean, logvar=logvar)
        )
        return output if return_dict else output.to_tuple()

    def decode(
        self, latents: jax.Array, deterministic: bool = True, return_dict: bool = True
    ) -> Any:
        """Decodes latents, b z h w or b h w z, to images b 3 H W."""
        if latents.shape[-1] != self.config.latent_channels:
            latents = channels_last(latents)
        output = FlaxDecoderOutput(sample=channels_first(self._run("decode", latents)))
        return output if return_dict else output.to_tuple()

    def __call__(
        self,
        sample: jax.Array,
        sample_posterior: bool = False,
        deterministic: bool = True,
        return_dict: bool = True,
        key: jax.Array | None = None,
    ) -> Any:
        """Encodes and decodes images b 3 H W.

        sample_posterior: whether to sample the latents with `key` instead of taking their mode.
        """
        if sample_posterior and key is None:
            raise ValueError("sample_posterior=True needs key=..., a JAX random key")
        posterior = self.encode(sample).latent_dist
        latents = posterior.sample(key) if sample_posterior else posterior.mode()
        return self.decode(latents, return_dict=return_dict)

    def apply(
        self, variables: Mapping[str, Params], *args: Any, rngs: Any = None, **kwargs: Any
    ) -> Any:
        """Returns the result of a method, see `FlaxModelMixin.apply`.

        rngs: {"gaussian": key} gives the random key for sample_posterior.
        """
        if kwargs.get("sample_posterior") and rngs is not None:
            kwargs = {**kwargs, "key": rngs["gaussian"]}
        return super().apply(variables, *args, **kwargs)


def channels_last(x: jax.Array) -> jax.Array:
    """Transposes b c h w to b h w c."""
    return jnp.moveaxis(jnp.asarray(x), 1, -1)


def channels_first(x: jax.Array) -> jax.Array:
    """Transposes b h w c to b c h w."""
    return jnp.moveaxis(jnp.asarray(x), -1, 1)


def _cast(params: Params, dtype: Any, mask: Any) -> Params:
    if mask is None:
        return cast_params(params, dtype)
    return jax.tree.map(lambda x, cast: cast_params(x, dtype) if cast else x, params, mask)
