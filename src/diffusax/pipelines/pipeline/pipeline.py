"""Pipelines: components and their parameters, loaded, shared and saved."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
from jax.sharding import Mesh

from diffusax.boundary import messages
from diffusax.boundary.messages import hinting
from diffusax.checkpoints import read_call_defaults, resolve
from diffusax.checkpoints.keywords import NO_EFFECT, hub_keywords
from diffusax.checkpoints.networks import check_safe
from diffusax.checkpoints.publishing import Publishing, publishing_keywords
from diffusax.models.network import Params, cast_params, floating_dtype
from diffusax.pipelines.components.adapters import resolve_adapters
from diffusax.pipelines.components.attributes import ComponentAttribute
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.components.foreign import CONVERTERS, own_pipeline
from diffusax.pipelines.components.loading import (
    CLASSES,
    IGNORED,
    class_for,
    given_components,
    save_components,
    with_class_options,
)
from diffusax.pipelines.families import Component, Family
from diffusax.pipelines.families.family import CONTROLNET, T2I_ADAPTER
from diffusax.pipelines.pipeline.ahead_of_time import AheadOfTime
from diffusax.pipelines.pipeline.diffusers_methods import LAST_CALL, DiffusersMethods
from diffusax.pipelines.pipeline.encoding_first import load_encoding_first
from diffusax.pipelines.pipeline.functional import Inputs, generate_fn, prepare_inputs
from diffusax.pipelines.pipeline.ip_adapter_methods import IPAdapterMethods
from diffusax.pipelines.pipeline.lora_methods import LoraMethods
from diffusax.pipelines.pipeline.offloading import Offloading
from diffusax.pipelines.pipeline.single_file import SingleFile, custom_class
from diffusax.pipelines.pipeline.textual_inversion import TextualInversion
from diffusax.pipelines.plan.arguments import Call, read_call, with_default_generator
from diffusax.pipelines.plan.plan import PreparedRun
from diffusax.pipelines.run.callbacks import row_callback
from diffusax.pipelines.run.images import decode_result
from diffusax.pipelines.run.sample import run_plan
from diffusax.pipelines.tasks.prepare import prepare_call
from diffusax.runtime.devices.mesh import (
    check_processes,
    devices_for,
    make_mesh,
    mesh_of,
    mesh_on,
)
from diffusax.runtime.programs.cache import enable_compilation_cache
from diffusax.runtime.switches import in_mesh, under_own_switches
from diffusax.samplers.schedulers.options import Options


@hinting(messages.PIPELINE)
class DiffusionPipeline(
    DiffusersMethods,
    LoraMethods,
    IPAdapterMethods,
    SingleFile,
    Offloading,
    TextualInversion,
    AheadOfTime,
    Publishing,
):
    """The base class of all pipelines; `from_pretrained` returns the one that a checkpoint names.

    Components are attributes: `pipe.unet`, `pipe.vae = other`. Assigning one, the scheduler too,
    takes effect at once and compiles nothing for networks of the same architecture. `params` holds
    the parameters by component. `call_defaults` holds arguments that suit the checkpoint better
    than diffusers' defaults; the command line uses them where an option is not given.
    """

    family: ClassVar[Family]
    task: ClassVar[Any]
    """The task of a call, a function of `diffusax.pipelines.tasks.tasks`."""
    more_tasks: ClassVar[tuple[Any, ...]] = ()
    """Further tasks that the same call does where it is given images."""
    __call__: Any
    extra_components: ClassVar[tuple[Component, ...]] = ()
    """The components that this class has besides its family's."""
    all_components: ClassVar[tuple[Component, ...]] = ()
    """The components of this class, in diffusers' order."""
    component_names: ClassVar[tuple[str, ...]] = ()
    """The names of the components of this class."""
    needed_components: ClassVar[tuple[tuple[str, bool], ...]] = ()
    """The networks that every call needs: their names, and whether only decoding needs them."""
    returns_flags: ClassVar[bool] = False
    """Whether a call with return_dict=False returns a second value, a safety checker's result."""
    scheduler_options: ClassVar[dict[str, Any]] = {}
    """The options that diffusers sets in the config of an old checkpoint's scheduler."""
    parts: Components

    if TYPE_CHECKING:
        # Components are attributes that no type checker sees.
        def __getattr__(self, name: str) -> Any: ...

    def __init_subclass__(cls) -> None:
        if not hasattr(cls, "family"):
            raise TypeError(
                f"{cls.__name__} must have a family, such as that of StableDiffusionPipeline, from "
                "which it could derive"
            )
        cls.all_components = (*cls.family.components, *cls.extra_components)
        cls.component_names = tuple(component.name for component in cls.all_components)
        steering = [c for c in (CONTROLNET, T2I_ADAPTER) if c in cls.all_components][:1]
        needed = [c for c in cls.family.components if c.role in ("denoiser", "autoencoder")]
        roles = [(c.name, c.role == "autoencoder") for c in needed + steering]
        # What every call needs is missed first.
        cls.needed_components = tuple(sorted(roles, key=lambda role: role[1]))
        for component in cls.all_components:
            setattr(cls, component.name, ComponentAttribute(component))
        if hasattr(cls, "task"):
            CLASSES[cls.__name__] = cls

    def __init__(self, **components: Any):
        """Makes a pipeline of components, which are given under their names in a checkpoint.

        Those of diffusers and transformers are converted. None leaves a component out, to save
        memory: what needs it says so.

        encoder_mesh: the mesh of the text encoders, where they are on devices of their own.

        Raises:
            ValueError: one is missing, unknown, or of the wrong type.
        """
        enable_compilation_cache()
        options, encoder_mesh = dict(self.family.options), components.pop("encoder_mesh", None)
        self.parts = Components(self.family, {}, {}, {}, None, options, encoder_mesh=encoder_mesh)
        self.progress_bar_options: dict[str, Any] = {}
        self.call_defaults: dict[str, float] = {}
        self._guidance_scale: float | None = None
        self._num_timesteps, self._interrupt = 0, False
        self.tensors = None
        for name, value in components.items():
            if name in options:
                options[name] = bool(value)
            elif name in self.component_names:
                setattr(self, name, value)
            elif name not in IGNORED:
                raise ValueError(f"{type(self).__name__} has no component {name!r}")
        for component in self.all_components:
            if not component.optional and component.name not in components:
                raise ValueError(f"{type(self).__name__} needs {component.name}")
        self._check_tokenizers()
        # The denoiser's mesh comes first: others may have only this process's part of it.
        first = self.family.names("denoiser")[0]
        known = sorted(self.parts.params, key=lambda name: name != first)
        if encoder_mesh is not None:
            known = [n for n in known if self.family.role(n) != "text_encoder"]
        meshes = (mesh_of(self.parts.params[name]) for name in known)
        self.spread_over(next((mesh for mesh in meshes if mesh is not None), None))
        if (scheduler := self.parts.scheduler) is not None:
            self.parts.scheduler = with_class_options(scheduler, self.scheduler_options)
            # One that is assigned later may not say it: `FlowMatchEulerDiscreteScheduler()`.
            self.parts.process = scheduler.process

    def spread_over(self, mesh: Mesh | str | None) -> Self:
        """Splits batches and parameters over a mesh, as `from_pretrained(mesh=)`, and returns self.

        Raises:
            ValueError: the mesh does not fit the devices.
        """
        if mesh is not None:
            mesh = make_mesh(mesh)
            check_processes(mesh)
            self.parts.mesh = mesh
            self.parts.forget()
            self.params = dict(self.parts.params)
        return self

    @property
    def mesh(self) -> Mesh | None:
        """The devices that a batch is split over; None for a single one."""
        return self.parts.mesh

    @property
    def params(self) -> dict[str, Params]:
        """The parameters by component; the pipeline keeps no other copy of them."""
        return self.parts.params

    @params.setter
    def params(self, params: dict[str, Params]) -> None:
        if set(params) != set(self.parts.params):
            raise ValueError(
                f"params must have the components {', '.join(self.parts.params)} "
                f"(got {', '.join(params)})"
            )
        self.parts.params.update({name: self.parts.placed(name, p) for name, p in params.items()})
        # The parameters before a merge are no longer those to go back to.
        self.parts.fused.clear()

    @property
    def components(self) -> dict[str, Any]:
        """Every component by name, to build another pipeline with: `Other(**pipe.components)`."""
        return {name: getattr(self, name) for name in self.component_names}

    @property
    def config(self) -> Options:
        """The options in model_index.json, by key and by attribute, and what was loaded."""
        named = {} if self.name_or_path is None else {"_name_or_path": self.name_or_path}
        return Options({"_class_name": type(self).__name__, **named, **self.parts.options})

    def register_to_config(self, **options: Any) -> None:
        """Sets options of model_index.json, such as `requires_aesthetics_score`."""
        for name, value in options.items():
            if name not in self.parts.options:
                raise ValueError(f"{type(self).__name__} has no option {name!r}")
            self.parts.options[name] = bool(value)
        self.parts.forget()

    @classmethod
    def from_pipe(cls, pipe: "DiffusionPipeline", **components: Any) -> Self:
        """Makes a pipeline of this class from another's components; nothing is copied or compiled.

        A pipeline of PyTorch diffusers is converted first, see `from_torch`.

        Raises:
            ValueError: the pipeline is of another family, or lacks a component.
        """
        pipe = own_pipeline(DiffusionPipeline, pipe)
        if pipe.family.components != cls.family.components:
            raise ValueError(
                f"{cls.__name__} is for {cls.family.name}; the pipeline is {pipe.family.name}"
            )
        dtype = components.pop("torch_dtype", None)
        shared = {n: v for n, v in pipe.components.items() if n in cls.component_names}
        if pipe.parts.encoder_mesh is not None:
            components.setdefault("encoder_mesh", pipe.parts.encoder_mesh)
        new = cls(**{**shared, **pipe.parts.options, **components})
        if "scheduler" not in components:
            new.parts.process = pipe.parts.process
        new.parts.adapters, new.parts.fused = pipe.parts.adapters, dict(pipe.parts.fused)
        new.parts.ip_adapters, new.parts.encoded = pipe.parts.ip_adapters, pipe.parts.encoded
        new._offload_like(pipe, components)
        new.progress_bar_options, new.tensors = dict(pipe.progress_bar_options), pipe.tensors
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
        custom_pipeline: str | Path | None = None,
        trust_remote_code: bool = False,
        encode_first: Sequence[str | Mapping[str, Any]] | None = None,
        encoder_device: Any = None,
        **components: Any,
    ) -> Self:
        """Loads a checkpoint in diffusers' layout; any of the class's family is accepted.

        Args:
            path_or_repo: a folder, a Hub repository id, or "emoji" for the model in the package.
            torch_dtype: diffusers' name for `dtype`; PyTorch's dtypes are understood.
            dtype: the dtype of parameters and computation, a name or a JAX dtype; float32 by
                default, and "auto" keeps the files'. Or a dictionary of them by component, with
                that of the others under "default".
            vae_dtype: the autoencoder's dtype, where it should differ.
            variant: the variant of the files, such as "fp16", where the checkpoint has one.
            revision: a branch, tag or commit of the repository.
            token: the token for private and gated repositories; by default the stored login.
            local_files_only: whether to use only files that were downloaded before.
            cache_dir: the folder of downloads, instead of the one in HF_HOME.
            device: a device to put the parameters on; only that one is used then.
            mesh: the devices to split batches and parameters over, such as "data=4,tensor=2", see
                `diffusax.make_mesh`. By default every device of this process generates
                its share of the images, with a copy of the parameters.
            custom_pipeline: a .py file, or a folder with a pipeline.py, that defines the class to
                load the checkpoint with.
            trust_remote_code: whether to run that file, which may do whatever you may.
            encode_first: all prompts and negative prompts that calls will have, or dictionaries of
                the calls' arguments: their texts, as prompt_2, and max_sequence_length. They are
                encoded and the text encoders freed before other networks are read, so that less
                memory does; calls with other texts are an error.
            encoder_device: a device, or a mesh of devices, for the text encoders alone, whose
                embeddings are copied from there; others are for the other networks then.
            **components: components to use instead of the checkpoint's (`vae=`, `unet=`,
                `scheduler=`, `controlnet=` or `adapter=` a model or a list), also diffusers' and
                transformers' own, or None for those that are not needed. Then force_download,
                options of model_index.json, and diffusers' other keywords, most of which change
                nothing here. Unknown ones are logged and left out.

        Raises:
            ValueError: the checkpoint cannot be found or read; says which file and why.
        """
        hub: dict[str, Any] = {"revision": revision, "token": token, "cache_dir": cache_dir}
        hub |= {"variant": variant, "local_files_only": local_files_only}
        hub |= hub_keywords(components)
        encoder_mesh = None if encoder_device is None else mesh_on(encoder_device, "encoder_device")
        devices = devices_for(device, mesh, without=encoder_mesh)
        custom = None
        if custom_pipeline is not None:
            consent = {"trust_remote_code": trust_remote_code}
            custom = custom_class(DiffusionPipeline, custom_pipeline, **consent)
        folder = resolve(path_or_repo, skip=tuple(components), **hub)
        target = custom or class_for(cls, folder)
        given = given_components(target, components)
        wanted = torch_dtype if dtype is None else dtype
        places: dict[str, Any] = {"vae_dtype": vae_dtype, "variant": variant, "device": devices}
        if encoder_mesh is not None:
            given["encoder_mesh"] = places["encoder_mesh"] = encoder_mesh
        first = encode_first, given, wanted
        loaded, encoded = load_encoding_first(target, folder, *first, **places)
        try:
            pipe = target(**{**loaded, **given})
            pipe.spread_over(devices if isinstance(devices, Mesh) else None)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
        pipe.call_defaults, pipe.parts.encoded = read_call_defaults(folder), encoded
        vars(pipe)["_name_or_path"] = str(path_or_repo)
        return pipe

    @classmethod
    def download(cls, path_or_repo: str | Path, **options: Any) -> str:
        """Downloads a checkpoint without loading it, and returns its folder.

        Args:
            path_or_repo: a Hub repository id; a folder is returned as it is.
            **options: variant, revision, token, local_files_only, cache_dir, force_download, and
                components, such as `vae=None`, that are not needed.

        Raises:
            ValueError: the checkpoint cannot be found or fetched; says why.
        """
        names = ("variant", "revision", "token", "local_files_only", "cache_dir")
        hub = {name: options.pop(name) for name in names if name in options}
        hub |= hub_keywords(options)
        skip = [name for name in options if name not in {*NO_EFFECT, "torch_dtype", "dtype"}]
        return str(resolve(path_or_repo, skip=skip, **hub))

    @classmethod
    def from_torch(
        cls, pipe: Any, *, dtype: Any = None, device: Any = None, mesh: Mesh | str | None = None
    ) -> Self:
        """Converts a PyTorch pipeline of diffusers to the diffusax pipeline of the same class.

        Parameters are copied out of its modules. A denoiser, autoencoder or text encoder that
        diffusax does not have is traced from the PyTorch module, and runs in the same programs.

        Args:
            pipe: a pipeline of diffusers, or of a class that inherits from one.
            dtype: the dtype of parameters and computation; None keeps the modules' own.
            device: see `from_pretrained`.
            mesh: see `from_pretrained`.

        Raises:
            ValueError: diffusax lacks the class or a component; says which.
            ImportError: torch or torchax is missing, or diffusax.pipelines was imported alone.
        """
        if "torch" not in CONVERTERS:
            raise ImportError("from_torch needs the whole package: import diffusax.torch first")
        devices = devices_for(device, mesh)
        made: Self = CONVERTERS["torch"](cls, pipe, dtype=dtype, devices=devices)
        return made

    def save_pretrained(
        self,
        save_directory: str | Path,
        safe_serialization: bool = True,
        variant: str | None = None,
        max_shard_size: int | str | None = None,
        push_to_hub: bool = False,
        **hub: Any,
    ) -> None:
        """Writes a checkpoint that diffusers opens, with the parameters in `self.params`.

        Args:
            save_directory: the folder.
            safe_serialization: must be True.
            variant: a variant such as "fp16", for the names of the files.
            max_shard_size: the size above which a network's file is split, in bytes or as "5GB".
            push_to_hub: whether to upload the files, too.
            **hub: options of `push_to_hub`, and repo_id, by default the folder's name.

        Raises:
            ValueError: safe_serialization is off, or a network is a PyTorch module's.
        """
        check_safe(safe_serialization)
        options: dict[str, Any] = {"variant": variant, "call_defaults": self.call_defaults}
        options["max_shard_size"] = max_shard_size
        folder = Path(save_directory)
        save_components(folder, type(self), self.parts, **options)
        pushed = publishing_keywords(f"{type(self).__name__}.save_pretrained", hub)
        if push_to_hub:
            self.push_to_hub(pushed.pop("repo_id", folder.name), variant=variant, **pushed)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Casts the parameters to a floating-point dtype, given by name or PyTorch's; returns self.

        Devices are accepted and change nothing: JAX has placed the parameters already.
        """
        dtypes = map(floating_dtype, (*args, kwargs.get("dtype"), kwargs.get("torch_dtype")))
        dtype = next((d for d in dtypes if d is not None), None)
        if dtype is not None:
            self.params = {k: cast_params(p, dtype) for k, p in self.params.items()}
        return self

    @property
    def is_double(self) -> bool:
        """Whether some parameters are of 64 bits."""
        return any(model.is_double for model in self.parts.models.values())

    @property
    def generate_fn(self) -> Callable[[Params, Inputs], jax.Array]:
        """The whole call as a pure function, to jit, vmap or differentiate.

        `pipe.generate_fn(pipe.params, pipe.prepare_inputs("a prompt"))` returns images b H W 3 in
        [0, 1].
        """
        return generate_fn(self.parts)

    @under_own_switches
    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Inputs:
        """Returns the inputs of `generate_fn` for the arguments of a call."""
        call = read_call(self, args, kwargs, pure=True)
        self._check_complete()
        if call.generators:
            raise ValueError(
                "generator stands for PyTorch's numbers, which generate_fn, for which inputs are "
                "prepared, does not draw; give seed, or latents with these numbers"
            )
        with in_mesh(self.parts.local_mesh):
            c, call = resolve_adapters(self.parts, call)
            if c is not self.parts:
                raise ValueError(
                    "adapters that are no products of low rank are merged into the parameters, "
                    "which generate_fn takes as an argument; call fuse_lora first"
                )
            return prepare_inputs(c, self.task, call)

    def __copy__(self) -> Self:
        """Returns a pipeline with the same components, to which others can be assigned alone."""
        new = object.__new__(type(self))
        vars(new).update(vars(self), parts=self.parts.copied())
        return new

    def __repr__(self) -> str:
        lines = [f"  {name}: {value!r}" for name, value in self.components.items()]
        return "\n".join([f"{type(self).__name__}(", *lines, ")"])

    def _generate(self, call: Call) -> Any:
        """Returns the result of a call whose arguments are checked."""
        self._check_complete(decodes=call.output_type != "latent")
        c = self.parts
        if call.tensors:
            call = with_default_generator(call)
        if call.adapters is not None or c.adapters.active:
            c, call = resolve_adapters(c, call)
        run = prepare_call(self.task, c, call)
        self._remember(call, run)
        on_row = None if call.callback_on_step_end is None else row_callback(self, call)
        latents = run_plan(
            c, run, on_row, interrupted=lambda: self._interrupt, bar=self.progress_bar_options
        )
        result = decode_result(c, call, run, latents, flags=self.returns_flags)
        if self.parts.offloaded:
            self.maybe_free_model_hooks()
        return result

    def _remember(self, call: Call, run: PreparedRun) -> None:
        """Keeps what properties under diffusers' names tell of the last call, to callbacks too."""
        vars(self).update(
            _interrupt=False,
            _guidance_scale=call.guidance_scale,
            _num_timesteps=len(run.schedule.rows),
            _last_call=dict(zip(LAST_CALL, attrgetter(*LAST_CALL)(call))),
        )

    def _check_complete(self, *, decodes: bool = True) -> None:
        """Raises ValueError where the pipeline lacks a component that a call needs."""
        for name, is_decoder in self.needed_components:
            if name not in self.parts.models and (decodes or not is_decoder):
                self.parts.require(name)
        if self.parts.scheduler is None:
            self.parts.require(self.family.scheduler_name)

    def _check_tokenizers(self) -> None:
        parts = self.parts
        for encoder in self.family.text_encoders:
            tokenizer, model = (
                parts.tokenizers.get(encoder.tokenizer),
                parts.models.get(encoder.name),
            )
            if tokenizer is not None and model is not None and hasattr(tokenizer, "check_fits"):
                positions = getattr(model.config, "max_position_embeddings", None)
                tokenizer.check_fits(model.config.vocab_size, positions)
