"""Runs PyTorch modules as networks inside diffusax's compiled programs."""

import dataclasses
import types
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import torch

from diffusax.interop.torch import explaining
from diffusax.interop.torch.environment import unwrap, wrap
from diffusax.interop.torch.explaining import NotTraceable
from diffusax.interop.torch.functional import named_tensors, run_traced
from diffusax.models import MODELS
from diffusax.models.encoders.clip import CLIPTextOutput
from diffusax.models.network import Params
from diffusax.runtime.devices.mesh import Rules

ALTERNATIVE = "diffusax.torch.compile(pipe) runs the PyTorch pipeline in JAX as it is"


class TorchConfig(types.SimpleNamespace):
    """A module's options as attributes; missing options are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return None


@dataclasses.dataclass(frozen=True, repr=False)
class TorchNetwork:
    """A module that stands where a `diffusax.models.Network` does: the same attributes and methods.

    Programs are compiled for the one module, as it is when it is traced. Parameters are its
    floating-point parameters and buffers by their names; other buffers are constants.
    """

    module: torch.nn.Module
    config: TorchConfig = dataclasses.field(compare=False)

    tensor_rules: ClassVar[Rules] = ()
    """A mesh's tensor axis splits none of the parameters."""

    @property
    def class_name(self) -> str:
        """The name of the module's class, or of the base class that diffusax knows."""
        names = (kind.__name__ for kind in type(self.module).__mro__)
        return next((n for n in names if n in MODELS), type(self.module).__name__)

    @property
    def upstream_name(self) -> str:
        """The same name, by which programs ask what the network is."""
        return self.class_name

    @property
    def shapes(self) -> Params:
        """The shapes of the parameters."""
        return {
            name: jax.ShapeDtypeStruct(tuple(tensor.shape), jnp.dtype(str(tensor.dtype)[6:]))
            for name, tensor in floating_tensors(self.module)
        }

    def apply(self, params: Params, *args: Any, method: str = "__call__", **kwargs: Any) -> Any:
        """Runs the named method of the network with these parameters; maps have channels last.

        Raises:
            NotTraceable: the module cannot be traced; says why.
        """
        name = "call" if method == "__call__" else method
        return getattr(self, name)(params, *args, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.module).__qualname__} at {id(self.module):#x})"

    def _run(self, params: Params, method: Callable[..., Any], *args: Any) -> Any:
        """Runs a function of tensors on arrays, with the module's parameters replaced."""
        try:
            given = jax.tree.map(wrap, args)
            return jax.tree.map(unwrap, run_traced(self.module, method, params, 0, (given, {})))
        except Exception as error:
            operation, place = explaining.where(error)
            raise NotTraceable(
                f"{type(self.module).__name__} cannot be a part of a pipeline of diffusax: "
                f"{operation} {explaining.reason(error)}{place}; {ALTERNATIVE}"
            ) from error


class TorchUNet(TorchNetwork):
    """A module that is called as diffusers' UNet2DConditionModel is."""

    def call(
        self,
        params: Params,
        sample: jax.Array,
        timestep: jax.Array,
        encoder_hidden_states: jax.Array,
        *,
        added_cond: dict[str, jax.Array] | None = None,
        down_block_additional_residuals: Any = None,
        mid_block_additional_residual: jax.Array | None = None,
        down_intrablock_additional_residuals: Any = None,
        freeu: jax.Array | None = None,
        gradient_checkpointing: str = "none",
        **conditions: jax.Array | None,
    ) -> jax.Array:
        """Predicts as `UNet2DConditionModel.__call__` does; gradient_checkpointing changes nothing.

        Raises:
            ValueError: FreeU is asked for.
        """
        if freeu is not None:
            raise ValueError(
                "FreeU is turned on with the PyTorch UNet's own enable_freeu, before from_torch"
            )
        dtype = dtype_of(params)
        down, maps = down_block_additional_residuals, down_intrablock_additional_residuals
        more: dict[str, Any] = {
            **conditions,
            "down_block_additional_residuals": None if down is None else tuple(map(_chw, down)),
            "mid_block_additional_residual": _chw(mid_block_additional_residual),
            # The module takes them out of the list one by one.
            "down_intrablock_additional_residuals": None if maps is None else list(map(_chw, maps)),
        }
        more = _cast({name: x for name, x in more.items() if x is not None}, dtype)
        if added_cond is not None:
            # Sizes stay in float32: bfloat16 cannot represent every integer above 256.
            known = {"time_ids": added_cond["time_ids"]} if "time_ids" in added_cond else {}
            more["added_cond_kwargs"] = {**_cast(added_cond, dtype), **known}

        def predict(x: Any, t: Any, context: Any, more: Any) -> Any:
            return self.module(x, t, encoder_hidden_states=context, **more, return_dict=False)[0]

        sample, context = _cast((_chw(sample), encoder_hidden_states), dtype)
        timestep = jnp.broadcast_to(timestep, sample.shape[:1])
        return _hwc(self._run(params, predict, sample, timestep, context, more))


class TorchAutoencoder(TorchNetwork):
    """A module with the methods of diffusers' autoencoders."""

    def encode(self, params: Params, pixels: jax.Array) -> Any:
        """Encodes b H W 3 to mean and logvar, b h w z, or to latents without a distribution."""

        def encode(x: Any) -> Any:
            encoded = self.module.encode(x)  # type: ignore[operator]
            if not hasattr(encoded, "latent_dist"):
                return encoded.latents
            return encoded.latent_dist.mean, encoded.latent_dist.logvar

        pixels = _cast(_chw(pixels), dtype_of(params))
        return jax.tree.map(_hwc, self._run(params, encode, pixels))

    def decode(self, params: Params, z: jax.Array, **shown: jax.Array) -> jax.Array:
        """Decodes b h w z to b H W 3. shown: the image and mask for an AsymmetricAutoencoderKL."""

        def decode(z: Any, shown: Any) -> Any:
            return self.module.decode(z, return_dict=False, **shown)[0]  # type: ignore[operator]

        args = _cast(jax.tree.map(_chw, (z, shown)), dtype_of(params))
        return _hwc(self._run(params, decode, *args))


class TorchTextEncoder(TorchNetwork):
    """A module that is called as transformers' CLIPTextModel is."""

    def call(self, params: Params, input_ids: jax.Array) -> CLIPTextOutput:
        """Encodes token ids. input_ids: b t."""
        return CLIPTextOutput(*self._run(params, self._outputs, input_ids))

    def encode(
        self, params: Params, input_ids: jax.Array, *, clip_skip: int | None = None
    ) -> jax.Array:
        """Encodes prompts, see `CLIPTextModel.encode`.

        Raises:
            ValueError: clip_skip leaves no layer, or the module has no final norm to apply after
                it.
        """
        if not clip_skip:
            return self.call(params, input_ids).last_hidden_state
        norms = {n.rpartition(".")[-1]: part for n, part in self.module.named_modules()}
        if "final_layer_norm" not in norms:
            raise ValueError(f"clip_skip needs a final_layer_norm, which {self!r} does not have")

        def skip(ids: Any) -> Any:
            return norms["final_layer_norm"](self._outputs(ids)[1][-(clip_skip + 1)])

        layers = self.config.num_hidden_layers
        if layers is not None and not 0 <= clip_skip <= layers:
            raise ValueError(f"clip_skip must be from 0 to {layers} (got {clip_skip})")
        return self._run(params, skip, input_ids)

    def _outputs(self, ids: Any) -> tuple[Any, ...]:
        found = self.module(ids, output_hidden_states=True, return_dict=True)
        pooled = (getattr(found, name, None) for name in ("pooler_output", "text_embeds"))
        return found.last_hidden_state, tuple(found.hidden_states), *pooled


def floating_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns the parameters and buffers that are parameters of the network, by name."""
    return [(name, tensor) for name, tensor in named_tensors(module) if tensor.is_floating_point()]


def dtype_of(params: Params) -> Any:
    """Returns the dtype in which the network computes."""
    return jax.tree.leaves(params)[0].dtype


def _cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def _chw(x: Any) -> Any:
    return None if x is None else x.transpose(0, 3, 1, 2)


def _hwc(x: jax.Array) -> jax.Array:
    return x.transpose(0, 2, 3, 1)
