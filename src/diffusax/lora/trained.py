"""The LoRA that a run trains: its layers, parameters and files, and networks that use it."""

import dataclasses
import difflib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import numpy as np
from msgspec import Meta

from diffusax.boundary.options import Options
from diffusax.lora.files import WEIGHT_NAME, FileLayers, LoraFile, Parts, read_lora
from diffusax.lora.keys import find_layers
from diffusax.lora.lora import Lora, layers_of_arrays, lora_of_layers, pair_of
from diffusax.lora.write import write_lora
from diffusax.models.adapters.low_rank import AdaptedNetwork, kernel_shapes
from diffusax.models.adapters.trained import TrainedAdapters, column_lengths
from diffusax.models.network import Params, cast_params
from diffusax.models.parameter_tree import ordered_leaves, path_name

log = logging.getLogger(__name__)

KOHYA_NAME = "kohya.safetensors"
"""The name of the result in kohya's format."""
COMFYUI_NAME = "comfyui.safetensors"
"""The name of the result in ComfyUI's format."""
ALL = "all"
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
TEXT_ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")
_PARTS = {"down", "up", "mid", "alpha", "magnitude", "dora_scale"}
"""The tensors of a layer that can be trained further."""


@dataclasses.dataclass(frozen=True)
class LoRAConfig(Options):
    """Train low-rank adapters (LoRA, Hu et al. 2021) in the place of the networks."""

    group: ClassVar[str] = "lora."

    rank: Annotated[int, Meta(ge=0, le=4096)] = 0
    """The rank of the adapters; 0 trains the networks themselves."""
    alpha: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    """The scale of the adapters times their rank; by default the rank."""
    targets: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    """The ends of the names of the layers that get adapters, or "all" for every linear layer and
    convolution; by default those of attention, to_q, to_k, to_v and to_out.0, in text encoders
    q_proj, k_proj, v_proj and out_proj."""
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """The share of a layer's inputs that its adapter does not see."""
    init: Literal["gaussian", "kaiming"] = "gaussian"
    """How A begins, while B is zero: gaussian is that of diffusers' scripts, kaiming PEFT's own."""
    dora: bool = False
    """Learn the lengths of the kernels' columns, too (DoRA, Liu et al. 2024)."""
    path: str | None = None
    """A LoRA to go on from, in any format that load_lora_weights reads: a file, a folder or a Hub
    repository id. Its layers, ranks and alphas are kept."""
    format: Literal["diffusers", "kohya", "both", "comfyui"] = "diffusers"
    """The format of the result's file: pytorch_lora_weights.safetensors of diffusers,
    kohya.safetensors of kohya's scripts, or both; or comfyui.safetensors with the keys of ComfyUI
    and ai-toolkit, for a transformer alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("rank", "alpha", "targets", "init", "dora")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        given = [name for name in names if getattr(self, name) != defaults[name]]
        if self.path is not None and given:
            raise ValueError(
                f"lora.{given[0]} cannot be given with lora.path, whose layers are trained further "
                "as they are"
            )
        others = [n for n, v in defaults.items() if n != "rank" and getattr(self, n) != v]
        if others and not self.on:
            raise ValueError(f"lora.{others[0]} does nothing without lora.rank or lora.path")

    @property
    def on(self) -> bool:
        """Whether adapters are trained."""
        return self.rank > 0 or self.path is not None


class LayerPlan(NamedTuple):
    """The adapter of a layer, without its parameters."""

    rank: int
    scale: float
    """alpha / rank."""
    dora: bool = False


@dataclasses.dataclass(frozen=True)
class TrainedLora:
    """The LoRA of a run, without its parameters.

    The parameters are, by component and by the layer's path in its tree, down: ... c r (A), up: r d
    (B) and with DoRA magnitude: d. All are float32.
    """

    plans: Mapping[str, Mapping[str, LayerPlan]]
    """The adapters by component and by the layer's path."""
    dropout: float = 0.0

    @classmethod
    def of(cls, config: LoRAConfig, networks: Mapping[str, Any]) -> "TrainedLora":
        """Returns the adapters that the options ask for in these networks.

        networks: the networks to adapt, by component.

        Raises:
            ValueError: a target is the end of no layer's name, or a network has no target.
        """
        alpha = config.rank if config.alpha is None else config.alpha
        plan = LayerPlan(config.rank, alpha / config.rank, config.dora)
        plans = {
            name: dict.fromkeys(_targeted(name, network, config.targets), plan)
            for name, network in networks.items()
        }
        _check_targets(config.targets, plans, networks)
        return cls(plans, config.dropout)

    @property
    def alphas(self) -> dict[str, float]:
        """The alpha of each layer by its component and path."""
        return {
            f"{name}.{path}": plan.scale * plan.rank
            for name, plans in self.plans.items()
            for path, plan in plans.items()
        }

    def shapes(self, networks: Mapping[str, Any]) -> Params:
        """Returns the parameters as shapes; nothing is computed."""

        def layer(plan: LayerPlan, kernel: tuple[int, ...]) -> Params:
            *inputs, outputs = kernel
            found = {"down": (*inputs, plan.rank), "up": (plan.rank, outputs)}
            if plan.dora:
                found["magnitude"] = (outputs,)
            return {k: jax.ShapeDtypeStruct(shape, np.float32) for k, shape in found.items()}

        found = {}
        for name, plans in self.plans.items():
            kernels = kernel_shapes(networks[name])
            found[name] = {path: layer(plan, kernels[path]) for path, plan in plans.items()}
        return found

    def initial(
        self,
        config: LoRAConfig,
        networks: Mapping[str, Any],
        *,
        seed: int,
        load: Callable[..., Any],
    ) -> Params:
        """Draws the first parameters, with which the networks do what they did.

        A is drawn as PEFT does it (tuners/lora/layer.py, reset_lora_parameters), B is zero, and
        DoRA's lengths are those of the kernels.

        load: returns a component's parameters, float32; it is called with DoRA alone.
        """
        rng = np.random.default_rng(seed)
        found = {}
        for name, layers in self.shapes(networks).items():
            drawn = {path: _first(shapes, config.init, rng) for path, shapes in layers.items()}
            if config.dora:
                lengths = kernel_lengths(load(name), layers)
                drawn = {path: {**own, "magnitude": lengths[path]} for path, own in drawn.items()}
            found[name] = drawn
        return found

    def adapted(
        self, networks: Mapping[str, Any], params: Params, dtype: Any, keys: Any = None
    ) -> dict[str, Any]:
        """Returns the networks with these adapters, and those unchanged that have none; in a trace.

        Args:
            networks: the networks by name.
            params: the adapters' parameters.
            dtype: the dtype that the networks compute in.
            keys: a random key for each row of a batch, b; None where nothing is dropped.
        """
        found = dict(networks)
        for number, (name, plans) in enumerate(self.plans.items()):
            own = None if keys is None else _folded(keys, number)
            layers = {path: _cast(layer, dtype) for path, layer in params[name].items()}
            scales = {path: plan.scale for path, plan in plans.items()}
            adapters = TrainedAdapters(layers, scales, self.dropout, own)
            found[name] = AdaptedNetwork(networks[name], adapters)
        return found


def kernel_lengths(params: Params, paths: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Returns the lengths of the columns of a network's kernels by the layers' paths, d each."""
    leaves = ordered_leaves(params)
    kernels = {path_name(path[:-1]): leaf for path, leaf in leaves if path[-1].key == "kernel"}
    chosen = {path: kernels[path] for path in paths}
    return jax.jit(lambda tree: {path: column_lengths(x) for path, x in tree.items()})(chosen)


def plan_of_file(
    path: str,
    networks: Mapping[str, Any],
    *,
    train_text_encoder: bool,
    dropout: float = 0.0,
    references_layout: str | None = None,
) -> TrainedLora:
    """Returns the adapters of a LoRA that training goes on from, of all components that it has.

    Args:
        path: a file, a folder or a Hub repository id, in any format of `load_lora_weights`.
        networks: the networks that the file may have layers of, by component.
        train_text_encoder: whether text encoders are trained. It must be so just where the file has
            layers of one.
        dropout: that of the training.
        references_layout: the layout by which it learns to look at images, if it does, which must
            be the file's own where that says one.

    Raises:
        ValueError: it cannot be read, has learned another layout, does not fit the networks, has
            layers of text encoders that
            are not trained or none of those that are, or layers of a kind that is no product of low
            rank.
    """
    file = read_lora(path)
    learned = file.references_layout
    if learned != references_layout and None not in (learned, references_layout):
        raise ValueError(
            f"{file.name} was trained with references_layout={learned!r}, and this training has "
            f"{references_layout!r}; give the same, or begin anew with lora.rank"
        )
    layers = find_layers(file, networks)
    # This checks the shapes of all tensors.
    lora_of_layers(layers, file, networks)
    found = [name for name in networks if any(name == component for component, _ in layers)]
    encoders = [name for name in found if name.startswith("text_encoder")]
    if train_text_encoder and not encoders:
        raise ValueError(
            f"{file.name} has no layers of text encoders; leave out train_text_encoder, or begin "
            "anew with lora.rank"
        )
    if encoders and not train_text_encoder:
        raise ValueError(
            f"{file.name} has layers of {' and '.join(encoders)}; give train_text_encoder, so that "
            "they are trained further"
        )
    if untrained := [name for name in networks if train_text_encoder and name not in found]:
        log.info("%s has no layers of %s to train", file.name, " and ".join(untrained))
    plans: dict[str, dict[str, LayerPlan]] = {name: {} for name in found}
    kernels = {name: kernel_shapes(networks[name]) for name in found}
    for (component, layer), parts in layers.items():
        product = {"down", "up"} <= set(parts) <= _PARTS and layer in kernels[component]
        if not product or _of_columns(parts.get("dora_scale")):
            raise ValueError(
                f"{file.name}: {component}'s {layer} has {', '.join(sorted(parts))}, which is no "
                "product of low rank beside a kernel; only such can be trained further"
            )
        plans[component][layer] = _plan(parts)
    return TrainedLora(plans, dropout)


def params_of_file(path: str, networks: Mapping[str, Any]) -> Params:
    """Returns the parameters of a LoRA that training goes on from, see `plan_of_file`."""
    found: Params = {}
    for (component, layer), parts in find_layers(read_lora(path), networks).items():
        pair = pair_of(parts, kernel_shapes(networks[component])[layer])
        own = dict(zip(("down", "up"), map(np.ascontiguousarray, pair)))
        lengths = _lengths(parts)
        if lengths is not None:
            own["magnitude"] = lengths.astype(np.float32).reshape(-1)
        found.setdefault(component, {})[layer] = own
    return found


def write_result(
    lora: TrainedLora,
    params: Params,
    folder: Path,
    *,
    kind: str,
    encoders: int,
    networks: Mapping[str, Any],
    references_layout: str | None = None,
) -> list[Path]:
    """Writes the adapters to a folder, in diffusers' format, kohya's or both, or in ComfyUI's;
    returns the files.

    Args:
        lora: the adapters.
        params: their parameters.
        folder: the folder.
        kind: "diffusers", "kohya", "both" of these, or "comfyui".
        encoders: the number of the model's text encoders; see `write_lora`.
        networks: the model's networks by component.
        references_layout: the layout by which they have learned to look at images; None where they
            have not.

    Raises:
        ValueError: the format has no such layers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = {"diffusers": WEIGHT_NAME, "kohya": KOHYA_NAME, "comfyui": COMFYUI_NAME}
    chosen = ["diffusers", "kohya"] if kind == "both" else [kind]
    layers = to_layers(lora, params)
    options: dict[str, Any] = {"encoders": encoders, "references_layout": references_layout}
    if "unet" in networks:
        options["unet"] = networks["unet"].config
    if "transformer" in networks:
        options["transformer"] = networks["transformer"].class_name
    for name in chosen:
        write_lora(folder / names[name], layers, name, **options)
    return [folder / names[name] for name in chosen]


def to_lora(lora: TrainedLora, params: Params, networks: Mapping[str, Any]) -> Lora:
    """Returns the LoRA as pipelines hold it that have loaded the result's file."""
    return lora_of_layers(to_layers(lora, params), LoraFile({}, {}, "the LoRA"), networks)


def to_layers(lora: TrainedLora, params: Params) -> FileLayers:
    """Returns the adapters as a file has them, in PyTorch's layout."""
    found: FileLayers = {}
    for component, plans in lora.plans.items():
        own = {
            path: {k: np.asarray(x) for k, x in params[component][path].items()} for path in plans
        }
        pairs = {path: (layer["down"], layer["up"]) for path, layer in own.items()}
        for (_, path), parts in layers_of_arrays(component, pairs).items():
            plan, lengths = plans[path], own[path].get("magnitude")
            more = {"alpha": np.array(plan.scale * plan.rank, np.float32)}
            if lengths is not None:
                # PEFT has those of a convolution on the axis of its channels.
                ones = (1,) * (parts["down"].ndim - 2)
                more["magnitude"] = lengths.reshape(1, -1, *ones) if ones else lengths
            found[component, path] = {**parts, **more}
    return found


def _first(shapes: Params, init: str, rng: np.random.Generator) -> Params:
    """Draws A, and makes B zero."""
    down, up = shapes["down"].shape, shapes["up"].shape
    if init == "gaussian":
        a = rng.standard_normal(down, np.float32) / np.float32(down[-1])
    else:
        limit = math.prod(down[:-1]) ** -0.5
        a = rng.uniform(-limit, limit, down).astype(np.float32)
    return {"down": a, "up": np.zeros(up, np.float32)}


def _folded(keys: jax.Array, number: int) -> jax.Array:
    return jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)


def _cast(layer: Params, dtype: Any) -> Params:
    """Casts A and B. DoRA's lengths keep all digits, because their change is what counts."""
    return {k: x if k == "magnitude" else cast_params(x, dtype) for k, x in layer.items()}


def _targeted(component: str, network: Any, targets: Sequence[str]) -> list[str]:
    """Returns the paths of the layers that get adapters."""
    if not targets:
        targets = TEXT_ATTENTION if component.startswith("text_encoder") else ATTENTION
    paths = list(kernel_shapes(network))
    if ALL in targets:
        return paths
    return [path for path in paths if any(_ends(path, target) for target in targets)]


def _ends(path: str, target: str) -> bool:
    return f".{path}".endswith(f".{target}")


def _check_targets(
    targets: Sequence[str], plans: Mapping[str, Mapping[str, Any]], networks: Mapping[str, Any]
) -> None:
    known = [path for network in networks.values() for path in kernel_shapes(network)]
    for target in targets:
        if target != ALL and not any(_ends(path, target) for path in known):
            near = ", ".join(difflib.get_close_matches(target, known, n=3, cutoff=0))
            raise ValueError(
                f"lora.targets has {target!r}, the end of no layer's name in "
                f"{' or '.join(networks)}; the nearest are {near}"
            )
    for name, own in plans.items():
        if not own:
            raise ValueError(
                f"lora.targets has no layer of {name}; add some such as "
                f"{', '.join(list(kernel_shapes(networks[name]))[-2:])}"
            )


def _plan(parts: Parts) -> LayerPlan:
    rank = len(parts["down"])
    alpha = float(parts["alpha"].astype(np.float32).reshape(())) if "alpha" in parts else rank
    return LayerPlan(rank, alpha / rank, _lengths(parts) is not None)


def _lengths(parts: Parts) -> np.ndarray | None:
    return parts.get("magnitude", parts.get("dora_scale"))


def _of_columns(lengths: np.ndarray | None) -> bool:
    """Returns whether DoRA's lengths are those of a kernel's inputs, as some programs have it."""
    return lengths is not None and lengths.shape[0] == 1 and lengths.size > 1
