"""Reads the components of a pipeline from a checkpoint's folder, and writes them."""

import inspect
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from diffusax.boundary.files import load_json
from diffusax.checkpoints import read_model_index, save_network
from diffusax.checkpoints.files import (
    CallDefaults,
    component_folder,
    fitting_variant,
    numbered_folders,
    write_model_index,
    write_modular_index,
)
from diffusax.checkpoints.keywords import take_keywords
from diffusax.checkpoints.networks import LeftOut, check_saveable
from diffusax.models.encoders.token_table import without_spare_rows
from diffusax.models.network import Params, cast_shapes
from diffusax.models.quantized import parse_weights, quantized_shapes
from diffusax.networks import Model, load_network
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.families.family import (
    CONTROLNET,
    NUMBERED_ROLES,
    T2I_ADAPTER,
    Family,
    Role,
)
from diffusax.pipelines.families.placement import component_mesh
from diffusax.samplers import Scheduler, scheduler_from_config

log = logging.getLogger(__name__)

IGNORED = ("safety_checker", "feature_extractor", "image_encoder", "watermarker")
"""The components of diffusers' checkpoints that diffusax runs in none or only some classes."""
QUANTIZED = ("denoiser", "text_encoder", *NUMBERED_ROLES)
"""The roles of components that are stored in eight bits where a pipeline is."""
_SEVERAL = {"controlnet": "MultiControlNetModel", "t2i_adapter": "MultiAdapter"}

CLASSES: dict[str, Any] = {}
"""The classes of pipelines by name; each is added when it is defined."""
EDITORS: dict[str, Any] = {}
"""The classes for networks that have learned to look at images, by the names under which diffusers
opens their checkpoints; each is added when it is defined."""


def class_for(cls: Any, folder: Path) -> Any:
    """Returns the class to load a folder with: `cls`, or the one that the checkpoint names.

    The checkpoint's is used where `cls` has no family, as DiffusionPipeline. Where the denoiser's
    config says that it has learned to look at images, this is the class that looks at some.

    Raises:
        ValueError: diffusax has no such pipeline, or `cls` is for another family.
    """
    class_name, _, _ = read_model_index(folder)
    named = CLASSES.get(class_name)
    if named is None:
        raise ValueError(
            f"{folder / 'model_index.json'} asks for {class_name or 'no pipeline'}, which "
            "diffusax does not have"
        )
    if named.__name__ in EDITORS and _has_learned(folder, named.family):
        named = EDITORS[named.__name__]
    return fitting_class(cls, named, str(folder))


def _has_learned(folder: Path, family: Family) -> bool:
    path = component_folder(folder, family.names("denoiser")[0]) / "config.json"
    return path.is_file() and load_json(path).get("_references_layout") is not None


def fitting_class(cls: Any, named: Any, source: str) -> Any:
    """Returns `cls`, or for a class without a family the one that the source names.

    Raises:
        ValueError: `cls` is for another family.
    """
    if not hasattr(cls, "family"):
        return named
    if not cls.family.takes(named.family):
        raise ValueError(
            f"{cls.__name__} is for {cls.family.name}; {source} holds {named.family.name} "
            f"({named.__name__})"
        )
    return cls


def given_components(target: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a class's constructor is given of the keywords of from_pretrained.

    Unknown ones are logged and left out, as in diffusers.

    Raises:
        ValueError: one asks for what diffusax does not have.
    """
    own = inspect.signature(target.__init__).parameters
    options = [name for name, _ in target.family.options]
    known = {*target.component_names, *options, *IGNORED, *own} - {"self", "components"}
    # Each pipeline makes its own.
    given = {name: value for name, value in keywords.items() if name != "image_processor"}
    return take_keywords(target.__name__, given, known)[0]


def component_dtype(dtype: Any, name: str) -> Any:
    """Returns the dtype to load a component in; None for the files' own.

    dtype: one for all, or a dictionary by component, with that of the others under "default".
    """
    if isinstance(dtype, Mapping):
        dtype = dtype.get(name, dtype.get("default"))
    return None if dtype == "auto" else "float32" if dtype is None else dtype


def component_weights(weights: Any, name: str, role: Role) -> str | None:
    """Returns what a component's kernels are stored as; None for its dtype.

    weights: one for the denoiser, what steers it, and the text encoders, which are most of a
        model; or a dictionary by component, with that of these others under "default". "file" is
        for all components.
    """
    if isinstance(weights, Mapping):
        if name in weights:
            return weights[name]
        weights = weights.get("default")
    return weights if role in QUANTIZED or weights == "file" else None


def component_shapes(network: Any, dtype: Any, weights: Any, name: str, role: Role) -> Params:
    """Returns the shapes of a component's parameters as they are loaded from files in a dtype.

    weights: see `component_weights`.
    """
    shapes = cast_shapes(network.shapes, dtype)
    stored = parse_weights(component_weights(weights, name, role), loading=True)
    stored = None if stored == "file" else stored
    return shapes if stored is None else quantized_shapes(shapes, stored)


def load_components(
    target: Any,
    folder: Path,
    given: Collection[str],
    dtype: Any,
    *,
    vae_dtype: Any = None,
    variant: str | None = None,
    device: Any = None,
    encoder_mesh: Mesh | None = None,
    weights: str | Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Reads a checkpoint's options for a class of pipelines, and the components not given.

    encoder_mesh: the devices for text encoders, where they are others. weights: see
    `component_weights`.

    Raises:
        ValueError: a component is missing or cannot be read; says which file and why.
    """
    _, listed, stored = read_model_index(folder)
    loaded = {k: v for k, v in stored.items() if k in dict(target.family.options)}
    for component in target.all_components:
        name, role = component.name, component.role
        if name in given:
            continue
        # Without an image encoder, a processor of images is the safety checker's.
        unused = role == "image_processor" and not {"image_encoder"} & {*listed, *given}
        if name not in listed or unused:
            if component.make is not None:
                loaded[name] = component.make()
            if component.optional or name in loaded:
                continue
            hint = f"; give {name}=" if component in target.extra_components else ""
            raise ValueError(f"{folder / 'model_index.json'} has no {name}{hint}")
        if role == "scheduler":
            loaded[name] = load_scheduler(folder, name, listed[name][1])
        elif role == "tokenizer":
            loaded[name] = component.kind.from_folder(folder / name)
        elif role == "image_processor":
            encoder = loaded.get("image_encoder")
            side = {} if encoder is None else {"image_size": encoder.config.image_size}
            loaded[name] = component.kind.from_folder(folder / name, **side)
        else:
            own = role == "autoencoder" and vae_dtype is not None
            kind = vae_dtype if own else component_dtype(dtype, name)
            own_place = role == "text_encoder" and encoder_mesh is not None
            place = encoder_mesh if own_place else device
            place = component_mesh(place, role) if isinstance(place, Mesh) else place
            options = {"dtype": kind, "device": place, "changes": dict(component.options)}
            options["weights"] = component_weights(weights, name, role)
            paths = [component_folder(folder, name)]
            if role in NUMBERED_ROLES:
                paths = numbered_folders(folder / name) or paths
            models = []
            for path in paths:
                found = fitting_variant(path, variant)
                models.append(load_network(path, variant=found, **options))
                models[-1].left_out = left_out(path, options["changes"], found)
            loaded[name] = models if len(models) > 1 else models[0]
    return loaded


def left_out(path: Path, changes: Mapping[str, Any], variant: str | None = None) -> LeftOut | None:
    """Returns what a network is loaded without; None for one that is loaded as it is.

    Args:
        path: the network's folder.
        changes: options that replace those of its config.
        variant: the variant of its files.
    """
    return LeftOut(path, tuple(changes), variant) if changes else None


def load_scheduler(folder: Path, name: str, class_name: str, **changes: Any) -> Scheduler:
    """Reads a checkpoint's scheduler.

    Args:
        folder: the checkpoint.
        name: the scheduler's name among the components.
        class_name: its class, from model_index.json, which wins over the file's, as in diffusers.
        changes: options instead of the file's.

    Raises:
        ValueError: it cannot be read; says which file and why.
    """
    path = component_folder(folder, name) / "scheduler_config.json"
    config = load_json(path)
    if config.get("_class_name", class_name) != class_name:
        log.warning(
            "%s is of %s, and model_index.json lists %s, which is taken, as in diffusers",
            path,
            config["_class_name"],
            class_name,
        )
    try:
        return scheduler_from_config({**config, "_class_name": class_name}, **changes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def with_class_options(scheduler: Scheduler, options: Mapping[str, Any]) -> Scheduler:
    """Returns a scheduler with a class's `scheduler_options`, as far as it has such options."""
    changed = {k: v for k, v in options.items() if getattr(scheduler, k, v) != v}
    return scheduler.with_options(**changed) if changed else scheduler


def save_components(
    folder: Path,
    cls: Any,
    parts: Components,
    *,
    variant: str | None,
    call_defaults: CallDefaults,
    max_shard_size: int | str | None = None,
) -> None:
    """Writes a checkpoint that diffusers opens.

    Raises:
        ValueError: a network is a PyTorch module's; nothing is written then.
    """
    for model in parts.models.values():
        check_saveable(model)
    # diffusers' pipelines of texts expect these, empty or not.
    others = IGNORED[:3] if parts.family.text_encoders else ()
    listed: dict[str, Any] = dict.fromkeys((*others, *cls.component_names))
    for name, model in parts.models.items():
        options: dict[str, Any] = {"variant": variant, "max_shard_size": max_shard_size}
        save_network(_saved(parts, name, model), folder / name, **options)
        encodes = parts.family.role(name) in ("text_encoder", "image_encoder")
        library = "transformers" if encodes else "diffusers"
        listed[name] = (library, model.network.upstream_name)
    for name, tokenizer in parts.tokenizers.items():
        tokenizer.save(folder / name)
        own = getattr(tokenizer, "listed_name", "") or type(tokenizer).__name__
        listed[name] = ("transformers", own)
    for several in (CONTROLNET, T2I_ADAPTER):
        if len(names := parts.of_role(several.role)) > 1:
            listed = {k: v for k, v in listed.items() if k not in names}
            listed[several.name] = ("diffusers", _SEVERAL[several.role])
    name = parts.family.scheduler_name
    if parts.scheduler is not None:
        parts.scheduler.save_config(folder / name)
        listed[name] = ("diffusers", parts.scheduler.to_config()["_class_name"])
    name = cls.diffusers_name or cls.__name__
    write_model_index(folder, name, listed, call_defaults=call_defaults, **parts.options)
    if (modular := cls.modular_name(parts)) is not None:
        present = {k: v for k, v in listed.items() if v is not None}
        write_modular_index(folder, modular, present)


def _saved(parts: Components, name: str, model: Model) -> Model:
    """Returns the model to write: a text encoder without the spare rows of its table."""
    tokenizers = {e.name: parts.tokenizers.get(e.tokenizer) for e in parts.family.text_encoders}
    tokenizer = tokenizers.get(name)
    # Tokenizers of other kinds than CLIP's take no words.
    last = getattr(tokenizer, "max_id", None)
    return model if last is None else without_spare_rows(model, last + 1)
