"""Components as attributes of pipelines: `pipe.unet`, `pipe.vae = other`."""

from typing import Any, Generic, TypeVar, cast

from diffusax.checkpoints.files import numbered
from diffusax.models.unet.t2i_adapter import check_alike
from diffusax.networks import MultiAdapter
from diffusax.pipelines.components.components import MultiControlNetModel
from diffusax.pipelines.components.foreign import full_name, own_component
from diffusax.pipelines.families import Component
from diffusax.pipelines.families.family import NUMBERED_ROLES
from diffusax.pipelines.plan.arguments import as_list

_JOINING = ("MultiControlNetModel", "FluxMultiControlNetModel", "MultiAdapter")
_EXAMPLES = {
    "scheduler": "EulerDiscreteScheduler",
    "tokenizer": "CLIPTokenizer",
    "image_encoder": "CLIPVisionModelWithProjection.from_pretrained(...)",
    "image_processor": "CLIPImageProcessor.from_folder(...)",
    "denoiser": "UNet2DConditionModel.from_pretrained(...)",
    "controlnet": "ControlNetModel.from_pretrained(...)",
    "text_encoder": "CLIPTextModel.from_pretrained(...)",
}


T = TypeVar("T")


class ComponentAttribute(Generic[T]):
    """A component of a pipeline as an attribute; reads and writes go to the pipeline's `parts`.

    T is its class, for type checkers; what is assigned may also be something that is converted.
    """

    def __init__(self, component: Component):
        self.component = component
        self.__doc__ = f"The {component.role.replace('_', ' ')}."

    def __get__(self, pipe: Any, owner: Any = None) -> T:
        """Returns the component, or None where the checkpoint lacks it."""
        return cast(T, self if pipe is None else self._value(pipe))

    def _value(self, pipe: Any) -> Any:
        parts, name = pipe.parts, self.component.name
        match self.component.role:
            case "scheduler":
                return parts.scheduler
            case "tokenizer" | "image_processor":
                return parts.tokenizers.get(name)
            case "controlnet" | "t2i_adapter" as role:
                nets = [parts.models[n] for n in parts.of_role(role)]
                several = MultiAdapter if role == "t2i_adapter" else MultiControlNetModel
                if not nets:
                    return None
                return nets[0] if len(nets) == 1 else several(nets)
        return parts.models.get(name)

    def __set__(self, pipe: Any, value: Any) -> None:
        """Replaces the component from the next call on; None takes it out and frees its memory.

        Tokenizers, schedulers, image processors and networks of diffusers and transformers are
        converted. A call that needs a component that is None says so.

        Raises:
            ValueError: the value is of another kind, or diffusax has nothing like it.
        """
        parts, name, role = pipe.parts, self.component.name, self.component.role
        if role in NUMBERED_ROLES and value is not None:
            self._set_numbered(parts, value)
            return
        own = None if value is None else self._checked(value)
        parts.forget()
        match role:
            case "scheduler":
                parts.scheduler = own
            case "tokenizer" | "image_processor" if own is None:
                parts.tokenizers.pop(name, None)
            case "tokenizer" | "image_processor":
                parts.tokenizers[name] = own
            case _ if own is None:
                if role == "autoencoder" and name in parts.models:
                    # Latents stay what they are.
                    parts.latent_config = parts.models[name].config
                for one in parts.of_role(role) if role in NUMBERED_ROLES else [name]:
                    _remove_model(parts, one)
            case _:
                self._set_model(parts, name, own)

    def __delete__(self, pipe: Any) -> None:
        """Takes the component out, as setting it to None does."""
        self.__set__(pipe, None)

    def _set_numbered(self, parts: Any, value: Any) -> None:
        own, role = self.component.name, self.component.role
        nets = [self._own(net) for net in _several(value)]
        if role == "t2i_adapter":
            _check_t2i_adapters(nets)
        nets = [self._checked(net) for net in nets]
        if not nets:
            raise ValueError(f"{own} is an empty list; give at least one")
        parts.forget()
        for name in parts.of_role(role):
            _remove_model(parts, name)
        for name, net in zip(numbered(own, len(nets)), nets):
            self._set_model(parts, name, net)

    def _set_model(self, parts: Any, name: str, model: Any) -> None:
        _remove_model(parts, name)
        parts.models[name] = model.bound_to(parts.params, name)
        parts.params[name] = parts.placed(name, parts.params[name])

    def _own(self, value: Any) -> Any:
        return own_component(self.component, value)

    def _checked(self, value: Any) -> Any:
        kind, name = self.component.kind, self.component.name
        own = self._own(value)
        if isinstance(own, kind):
            return own
        example = _EXAMPLES.get(self.component.role, "AutoencoderKL.from_pretrained(...)")
        raise ValueError(
            f"{name} must be a {kind.__name__} of diffusax, as {example} gives, or what can be "
            f"converted to one (got {full_name(value)})"
        )


def _several(value: Any) -> list[Any]:
    """Returns the networks in a list, in what joins several (diffusers' too), or a single one."""
    if type(value).__name__ not in _JOINING:
        return as_list(value)
    return list(getattr(value, "nets", None) or value.adapters)


def _check_t2i_adapters(nets: list[Any]) -> None:
    """Raises ValueError unless all are T2IAdapters whose maps can be added up."""
    for net in nets:
        found = getattr(net, "class_name", type(net).__name__)
        if found != "T2IAdapter":
            raise ValueError(
                "adapter must be a T2IAdapter, as T2IAdapter.from_pretrained(...) gives, or a list "
                f"of them (got a {found})"
            )
    check_alike([net.config for net in nets])


def _remove_model(parts: Any, name: str) -> None:
    if name in parts.models:
        # A caller that still holds the model can assign it again.
        parts.models[name].keep_params()
    for held in (parts.models, parts.params, parts.fused):
        held.pop(name, None)
