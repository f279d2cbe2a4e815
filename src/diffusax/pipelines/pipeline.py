"""Pipelines: components and their parameters, loaded, shared and saved."""

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
from jax.sharding import Mesh

from diffusax import missing
from diffusax.checkpoints import read_call_defaults, resolve
from diffusax.checkpoints.networks import check_safe
from diffusax.images.outputs import ImagePipelineOutput
from diffusax.missing import hinting, missing_attribute
from diffusax.models.network import Model, Params, cast_params, floating_dtype
from diffusax.pipelines.ahead_of_time import AheadOfTime
from diffusax.pipelines.arguments import as_list, check_call
from diffusax.pipelines.components import Components, MultiControlNetModel
from diffusax.pipelines.denoisers import control_names
from diffusax.pipelines.diffusers_methods import DiffusersMethods
from diffusax.pipelines.families import Family
from diffusax.pipelines.functional import Inputs, generate_fn, prepare_inputs
from diffusax.pipelines.loading import (
    IGNORED,
    WITHOUT_MEANING,
    class_for,
    load_components,
    save_components,
)
from diffusax.pipelines.placement import put_params
from diffusax.pipelines.run import output, run_rows
from diffusax.runtime.cache import enable_compilation_cache
from diffusax.runtime.mesh import check_processes, devices_for, in_mesh, make_mesh, mesh_of
from diffusax.samplers import Scheduler
from diffusax.text.tokenizer import CLIPTokenizer


@hinting(missing.PIPELINE)
class DiffusionPipeline(DiffusersMethods, AheadOfTime):
    """What all pipelines share; its `from_pretrained` gives the one that a checkpoint names.

    Components are attributes: `pipe.unet`, `pipe.vae = other`. Assigning one, the scheduler too,
    takes effect at once and compiles nothing for networks of the same architecture. `params` holds
    the parameters by component, `call_defaults` arguments that suit the checkpoint better than
    diffusers' defaults; the command line uses them where an option is not given.
    """

    family: ClassVar[Family]
    task: ClassVar[Any]
    """What the call does, a function of `diffusax.pipelines.tasks`."""
    __call__: Any
    extra_components: ClassVar[tuple[str, ...]] = ()
    component_names: ClassVar[tuple[str, ...]] = ()
    """The components that this class has, in diffusers' order."""
    scheduler_options: ClassVar[dict[str, Any]] = {}
    """What diffusers sets in the config of an old checkpoint's scheduler."""
    parts: Components

    def __init_subclass__(cls) -> None:
        tokenizers, encoders = zip(*cls.family.text)
        names = ("vae", *encoders, *tokenizers, "unet", "scheduler")
        cls.component_names = (*names, *cls.extra_components)

    def __init__(self, **components: Any):
        """The pipeline of these components, under the names in a checkpoint.

        Raises:
            ValueError: one is missing, unknown, or of the wrong type.
        """
        enable_compilation_cache()
        names = self.component_names
        options = dict(self.family.options)
        self.__dict__["parts"] = Components(self.family, {}, {}, {}, None, options)
        self.__dict__["_models"] = {}
        self.progress_bar_options: dict[str, Any] = {}
        self.call_defaults: dict[str, float] = {}
        self._guidance_scale: float | None = None
        self._num_timesteps, self._interrupt = 0, False
        for name, value in components.items():
            if name in options:
                options[name] = bool(value)
            elif name in names:
                setattr(self, name, value)
            elif name not in IGNORED:
                raise ValueError(f"{type(self).__name__} has no component {name!r}")
        for name in names:
            if name not in self.family.optional and components.get(name) is None:
                raise ValueError(f"{type(self).__name__} needs {name}")
        for tokenizer, encoder in self.family.text:
            if tokenizer in self.parts.tokenizers and encoder in self.parts.networks:
                config = self.parts.networks[encoder].config
                limits = config.vocab_size, config.max_position_embeddings
                self.parts.tokenizers[tokenizer].check_fits(*limits)
        # The UNet's first: that of the others may be only this process's part of it.
        known = sorted(self.parts.params, key=lambda name: name != "unet")
        meshes = (mesh_of(self.parts.params[name]) for name in known)
        self.spread_over(next((mesh for mesh in meshes if mesh is not None), None))
        scheduler = self.parts.scheduler
        old = {k: v for k, v in self.scheduler_options.items() if getattr(scheduler, k, v) != v}
        if old:
            self.scheduler = type(scheduler).from_config(scheduler.config, **old)
        # Those that are assigned later may have lost it: `FlowMatchEulerDiscreteScheduler()`.
        self.parts.process = self.scheduler.process

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.component_names:
            object.__setattr__(self, name, value)
            return
        self.parts.forget()
        if name == "scheduler":
            self.parts.scheduler = _checked(name, value, Scheduler, "EulerDiscreteScheduler")
        elif name.startswith("tokenizer"):
            tokenizers = self.parts.tokenizers
            if value is None:
                tokenizers.pop(name, None)
            else:
                tokenizers[name] = _checked(name, value, CLIPTokenizer, "CLIPTokenizer")
        elif name == "controlnet":
            self._set_controlnets(value)
        else:
            self._set_model(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in self.component_names:
            raise missing_attribute(type(self), name)
        if name == "scheduler":
            return self.parts.scheduler
        if name.startswith("tokenizer"):
            return self.parts.tokenizers.get(name)
        if name == "controlnet":
            nets = [self._models[n] for n in self._models if n.startswith("controlnet")]
            return nets[0] if len(nets) == 1 else MultiControlNetModel(nets)
        return self._models.get(name)

    def spread_over(self, mesh: Mesh | str | None) -> Self:
        """The pipeline itself, with its parameters over a mesh, as `from_pretrained(mesh=)` has it.

        Raises:
            ValueError: the mesh does not fit the devices.
        """
        if mesh is not None:
            mesh = make_mesh(mesh)
            check_processes(mesh)
            self.parts.mesh = mesh
            self.parts.forget()
            for name, network in self.parts.networks.items():
                params = put_params(self.parts.mesh, name, network, self.parts.params[name])
                self.parts.params[name] = params
        return self

    @property
    def mesh(self) -> Mesh | None:
        """The devices that a batch is spread over; None for a single one."""
        return self.parts.mesh

    @property
    def params(self) -> dict[str, Params]:
        """The parameters by component, the only place where they are kept."""
        return self.parts.params

    @params.setter
    def params(self, params: dict[str, Params]) -> None:
        if set(params) != set(self.parts.params):
            raise ValueError(
                f"params must have the components {', '.join(self.parts.params)} "
                f"(got {', '.join(params)})"
            )
        mesh, networks = self.parts.mesh, self.parts.networks
        if mesh is not None:
            params = {k: put_params(mesh, k, networks[k], p) for k, p in params.items()}
        self.parts.params.update(params)

    @property
    def components(self) -> dict[str, Any]:
        """Every component by name, to build another pipeline with: `Other(**pipe.components)`."""
        return {name: getattr(self, name) for name in self.component_names}

    @property
    def config(self) -> dict[str, Any]:
        """The options in model_index.json."""
        return self.parts.options

    def register_to_config(self, **options: Any) -> None:
        """Sets options of model_index.json, such as `requires_aesthetics_score`."""
        for name, value in options.items():
            if name not in self.parts.options:
                raise ValueError(f"{type(self).__name__} has no option {name!r}")
            self.parts.options[name] = bool(value)

    @classmethod
    def from_pipe(cls, pipe: "DiffusionPipeline", **components: Any) -> Self:
        """This class on another pipeline's components; nothing is copied or compiled again.

        Raises:
            ValueError: the pipeline is of another family, or lacks a component.
        """
        if pipe.family is not cls.family:
            raise ValueError(
                f"{cls.__name__} is for {cls.family.name}; the pipeline is {pipe.family.name}"
            )
        dtype = components.pop("torch_dtype", None)
        shared = {n: v for n, v in pipe.components.items() if n in cls.component_names}
        new = cls(**{**shared, **pipe.config, **components})
        if "scheduler" not in components:
            new.parts.process = pipe.parts.process
        new.progress_bar_options = dict(pipe.progress_bar_options)
        new.call_defaults = dict(pipe.call_defaults)
        return new if dtype is None else new.to(dtype)

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | Path,
        *,
        torch_dtype: Any = None,
        dtype: Any = None,
        vae_dtype: Any = None,
        variant: str | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        cache_dir: str | Path | None = None,
        device: Any = None,
        mesh: Mesh | str | None = None,
        **components: Any,
    ) -> Self:
        """Loads a checkpoint in diffusers' layout; any of the class's family will do.

        Args:
            path_or_repo: a folder, a Hub repository id, or "emoji" for the model in the package.
            torch_dtype: diffusers' name for `dtype`; PyTorch's dtypes are understood.
            dtype: of parameters and computation, a name or a JAX dtype; float32 by default, "auto"
                keeps the files'.
            vae_dtype: the autoencoder's, where it should differ.
            variant: such as "fp16", where the checkpoint has one.
            revision: a branch, tag or commit of the repository.
            token: for private and gated repositories; by default the stored login.
            local_files_only: use the cache only.
            cache_dir: instead of HF_HOME.
            device: a device to put the parameters on; only that one is used then.
            mesh: the devices to spread batches and parameters over, such as "data=4,tensor=2", see
                `diffusax.runtime.mesh.make_mesh`. By default every device of this process draws
                its share of the images, with a copy of the parameters.
            **components: to use instead of the checkpoint's (`vae=`, `unet=`, `scheduler=`,
                `controlnet=` a model or a list), or None for those that can be missing.

        Raises:
            ValueError: the checkpoint cannot be had or read; says which file and why.
        """
        hub: dict[str, Any] = {"revision": revision, "token": token, "cache_dir": cache_dir}
        hub |= {"variant": variant, "local_files_only": local_files_only}
        devices = devices_for(device, mesh)
        folder = resolve(path_or_repo, skip=tuple(components), **hub)
        target = class_for(cls, folder, DiffusionPipeline)
        given = {k: v for k, v in components.items() if k not in WITHOUT_MEANING}
        wanted = torch_dtype if dtype is None else dtype
        wanted = None if wanted == "auto" else "float32" if wanted is None else wanted
        loaded = load_components(
            target, folder, given, wanted, vae_dtype=vae_dtype, variant=variant, device=devices
        )
        try:
            pipe = target(**{**loaded, **given})
            pipe.spread_over(devices if isinstance(devices, Mesh) else None)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
        pipe.call_defaults = read_call_defaults(folder)
        return pipe

    @classmethod
    def from_torch(
        cls, pipe: Any, *, dtype: Any = None, device: Any = None, mesh: Mesh | str | None = None
    ) -> Self:
        """The pipeline of the same class with the weights of a PyTorch diffusers pipeline.

        Parameters are copied out of its modules. A UNet, autoencoder or text encoder that diffusax
        does not have is traced as the PyTorch module that it is, and runs in the same programs.

        Args:
            pipe: a pipeline of diffusers, or of a class that inherits from one.
            dtype: of parameters and computation; None keeps the modules' own.
            device: see `from_pretrained`.
            mesh: see `from_pretrained`.

        Raises:
            ValueError: diffusax lacks the class or a component; says which.
            ImportError: torch or torchax is missing.
        """
        # From a layer above, which needs PyTorch.
        native = importlib.import_module("diffusax.interop.torch.native")
        devices = devices_for(device, mesh)
        return native.convert(cls, DiffusionPipeline, pipe, dtype=dtype, devices=devices)

    def save_pretrained(
        self,
        save_directory: str | Path,
        safe_serialization: bool = True,
        variant: str | None = None,
    ) -> None:
        """Writes a checkpoint that diffusers opens, with the parameters in `self.params`.

        Raises:
            ValueError: safe_serialization is off, or a network is a PyTorch module's.
        """
        check_safe(safe_serialization)
        options: dict[str, Any] = {"variant": variant, "call_defaults": self.call_defaults}
        save_components(Path(save_directory), type(self), self.parts, self._models, **options)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The pipeline itself, cast where a floating-point dtype is given, by name or PyTorch's.

        Devices are accepted and change nothing: JAX has placed the parameters already.
        """
        dtypes = map(floating_dtype, (*args, kwargs.get("dtype"), kwargs.get("torch_dtype")))
        dtype = next((d for d in dtypes if d is not None), None)
        if dtype is not None:
            self.params = {k: cast_params(p, dtype) for k, p in self.params.items()}
        return self

    @property
    def generate_fn(self) -> Callable[[Params, Inputs], jax.Array]:
        """The whole call as a pure function, to jit, vmap or differentiate.

        `pipe.generate_fn(pipe.params, pipe.prepare_inputs("a prompt"))` are pictures b H W 3 in
        [0, 1].
        """
        return generate_fn(self.parts)

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Inputs:
        """The inputs of `generate_fn` for the arguments of a call."""
        bound = inspect.signature(type(self).__call__).bind(self, *args, **kwargs)
        bound.apply_defaults()
        with in_mesh(self.parts.local_mesh):
            return prepare_inputs(self.parts, self.task, check_call(bound.arguments))

    def __repr__(self) -> str:
        lines = [f"  {name}: {value!r}" for name, value in self.components.items()]
        return "\n".join([f"{type(self).__name__}(", *lines, ")"])

    def _draw(self, given: dict[str, Any]) -> Any:
        """A call: `given` holds its arguments, as `locals()` has them."""
        call = check_call(given)
        mesh = self.parts.local_mesh
        with in_mesh(mesh):
            job = self.task(self.parts, call)
        # What callbacks ask the pipeline for.
        vars(self).update(_guidance_scale=call.guidance_scale, _interrupt=False)
        vars(self)["_num_timesteps"] = len(job.schedule)
        latents = run_rows(self, job, call)
        options: dict[str, Any] = {"normalized": job.normalized, "kept": job.kept}
        options["tiled"] = self._models["vae"].tiling
        images = output(self.parts, latents, call.output_type, **options)
        images = images if job.finish is None else job.finish(images)
        if call.return_dict:
            return ImagePipelineOutput(images)
        return (images,) if self.family.pooled else (images, None)

    def _set_model(self, name: str, value: Any) -> None:
        if value is None and name in self.family.optional:
            self._remove_model(name)
            return
        model = _checked(name, value, Model, "AutoencoderKL.from_pretrained(...)")
        self._remove_model(name)
        self.parts.networks[name] = model.network
        self._models[name] = model.bound_to(self.parts.params, name)
        self.parts.switches[name] = self._models[name].switches
        if (mesh := self.parts.mesh) is not None:
            self.parts.params[name] = put_params(mesh, name, model.network, model.params)

    def _remove_model(self, name: str) -> None:
        parts = self.parts
        if name in self._models:
            # Whoever holds it can put it back.
            self._models[name].keep_params()
        for held in (self._models, parts.networks, parts.params, parts.switches):
            held.pop(name, None)

    def _set_controlnets(self, value: Any) -> None:
        nets = value.nets if isinstance(value, MultiControlNetModel) else as_list(value)
        for name in [n for n in self._models if n.startswith("controlnet")]:
            self._remove_model(name)
        if not nets:
            raise ValueError("controlnet is an empty list; give at least one")
        for name, net in zip(control_names(len(nets)), nets):
            self._set_model(name, net)


def _checked(name: str, value: Any, kind: Any, example: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(
            f"{name} must be a {kind.__name__}, as {example} gives (got {type(value).__name__})"
        )
    return value
