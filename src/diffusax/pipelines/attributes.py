"""Components as attributes of pipelines: `pipe.unet`, `pipe.vae = other`."""

from typing import Any

from diffusax.checkpoints.files import numbered
from diffusax.checkpoints.multi_adapter import MultiAdapter
from diffusax.models.t2i_adapter import check_alike
from diffusax.pipelines.arguments import as_list
from diffusax.pipelines.components import MultiControlNetModel
from diffusax.pipelines.families import Component

_EXAMPLES = {
    "scheduler": "EulerDiscreteScheduler",
    "tokenizer": "CLIPTokenizer",
    "image_encoder": "CLIPVisionModelWithProjection.from_pretrained(...)",
    "image_processor": "CLIPImageProcessor.from_folder(...)",
}


class ComponentAttribute:
    """A component of a pipeline as an attribute; reads and writes go to the pipeline's `parts`."""

    def __init__(self, component: Component):
        self.component = component
        self.__doc__ = f"The {component.role.replace('_', ' ')}."

    def __get__(self, pipe: Any, owner: Any = None) -> Any:
        """Returns the component, or None where the checkpoint lacks it."""
        if pipe is None:
            return self
        parts, name = pipe.parts, self.component.name
        match self.component.role:
            case "scheduler":
                return parts.scheduler
            case "tokenizer" | "image_processor":
                return parts.tokenizers.get(name)
            case "controlnet" | "t2i_adapter" as role:
                nets = [parts.models[n] for n in parts.of_role(role)]
                several = MultiAdapter if role == "t2i_adapter" else MultiControlNetModel
                return nets[0] if len(nets) == 1 else several(nets)
        return parts.models.get(name)

    def __set__(self, pipe: Any, value: Any) -> None:
        """Replaces the component from the next call on.

        Raises:
            ValueError: the value is of another kind, or None where the component is required.
        """
        parts, name = pipe.parts, self.component.name
        parts.forget()
        match self.component.role:
            case "scheduler":
                parts.scheduler = self._checked(value)
            case "tokenizer" | "image_processor" if value is None:
                parts.tokenizers.pop(name, None)
            case "tokenizer":
                parts.tokenizers[name] = self._checked(value)
            case "image_processor":
                # transformers' processors are dictionaries of the same options.
                given = value.to_dict() if hasattr(value, "to_dict") else None
                own = value if given is None else self.component.kind.from_dict(given)
                parts.tokenizers[name] = self._checked(own)
            case "controlnet" | "t2i_adapter":
                self._set_numbered(parts, value)
            case _ if value is None and self.component.optional:
                _remove_model(parts, name)
            case _:
                self._set_model(parts, name, value)

    def _set_numbered(self, parts: Any, value: Any) -> None:
        own, role = self.component.name, self.component.role
        nets = _several(value)
        if role == "t2i_adapter":
            _check_t2i_adapters(nets)
        for name in parts.of_role(role):
            _remove_model(parts, name)
        if not nets:
            raise ValueError(f"{own} is an empty list; give at least one")
        for name, net in zip(numbered(own, len(nets)), nets):
            self._set_model(parts, name, net)

    def _set_model(self, parts: Any, name: str, value: Any) -> None:
        model = self._checked(value)
        _remove_model(parts, name)
        parts.models[name] = model.bound_to(parts.params, name)
        parts.params[name] = parts.settled(name, parts.params[name])

    def _checked(self, value: Any) -> Any:
        kind, name = self.component.kind, self.component.name
        if isinstance(value, kind):
            return value
        example = _EXAMPLES.get(self.component.role, "AutoencoderKL.from_pretrained(...)")
        raise ValueError(
            f"{name} must be a {kind.__name__}, as {example} gives (got {type(value).__name__})"
        )


def _several(value: Any) -> list[Any]:
    """Returns the networks in a list, in what joins several, or a single one."""
    if isinstance(value, MultiControlNetModel):
        return value.nets
    return value.adapters if isinstance(value, MultiAdapter) else as_list(value)


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
