"""The base class of all pipelines: components, their parameters and devices."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from jax.sharding import Mesh

from diffusax.boundary import messages
from diffusax.boundary.messages import hinting
from diffusax.checkpoints.files import CallDefaults
from diffusax.models.network import Params, cast_params, floating_dtype
from diffusax.models.quantized import Weights
from diffusax.pipelines.components.adapters import resolve_adapters
from diffusax.pipelines.components.attributes import ComponentAttribute
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.components.loading import (
    CLASSES,
    EDITORS,
    IGNORED,
    QUANTIZED,
    with_class_options,
)
from diffusax.pipelines.families import Component, Family
from diffusax.pipelines.families.family import CONTROLNET, T2I_ADAPTER
from diffusax.pipelines.pipeline.ahead_of_time import AheadOfTime
from diffusax.pipelines.pipeline.call import check_complete
from diffusax.pipelines.pipeline.diffusers_methods import DiffusersMethods
from diffusax.pipelines.pipeline.functional import Inputs, generate_fn, prepare_inputs
from diffusax.pipelines.pipeline.ip_adapter_methods import IPAdapterMethods
from diffusax.pipelines.pipeline.lora_methods import LoraMethods
from diffusax.pipelines.pipeline.offloading import Offloading
from diffusax.pipelines.pipeline.pretrained import Pretrained
from diffusax.pipelines.pipeline.single_file import SingleFile
from diffusax.pipelines.pipeline.textual_inversion import TextualInversion
from diffusax.pipelines.plan.arguments import as_list, read_call
from diffusax.runtime.devices.mesh import check_processes, make_mesh, mesh_of
from diffusax.runtime.programs.cache import enable_compilation_cache
from diffusax.runtime.switches import in_mesh, under_own_switches
from diffusax.samplers.schedulers.options import Options


@hinting(messages.PIPELINE)
class DiffusionPipeline(
    DiffusersMethods,
    LoraMethods,
    IPAdapterMethods,
    Pretrained,
    SingleFile,
    Offloading,
    TextualInversion,
    AheadOfTime,
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
    diffusers_name: ClassVar[str | None] = None
    """The class of diffusers that opens what this one saves; None for that of the same name."""
    other_names: ClassVar[tuple[str, ...]] = ()
    """The names of modular pipelines of diffusers whose checkpoints the first such class loads."""
    scheduler_options: ClassVar[dict[str, Any]] = {}
    """The options that diffusers sets in the config of an old checkpoint's scheduler."""
    parts: Components

    if TYPE_CHECKING:
        # Which components there are is known to the classes of families alone.
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init_subclass__(cls) -> None:
        if not hasattr(cls, "family"):
            raise TypeError(
                f"{cls.__name__} must have a family, such as that of StableDiffusionPipeline, from "
                "which it could derive"
            )
        cls.all_components = (*cls.family.components, *cls.extra_components)
        cls.component_names = tuple(component.name for component in cls.all_components)
        steering = [c for c in (CONTROLNET, T2I_ADAPTER) if c in cls.all_components][:1]
        kinds = ("denoiser", "autoencoder")
        needed = [c for c in cls.family.components if c.role in kinds and not c.optional]
        roles = [(c.name, c.role == "autoencoder") for c in needed + steering]
        # What every call needs is missed first.
        cls.needed_components = tuple(sorted(roles, key=lambda role: role[1]))
        for component in cls.all_components:
            setattr(cls, component.name, ComponentAttribute(component))
        if hasattr(cls, "task"):
            CLASSES[cls.__name__] = cls
            if cls.diffusers_name is not None:
                EDITORS[cls.diffusers_name] = cls
            for name in cls.other_names:
                CLASSES.setdefault(name, cls)

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
        self.call_defaults: CallDefaults = {}
        self._guidance_scale: float | None = None
        self._num_timesteps, self._interrupt = 0, False
        self.tensors = None
        for name, value in components.items():
            if name in options:
                options[name] = _like(options[name], value)
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

    @classmethod
    def modular_name(cls, parts: Components) -> str | None:
        """Returns the modular pipeline of diffusers that opens saved components; None for none."""
        return None

    @property
    def own_defaults(self) -> dict[str, Any]:
        """The arguments of calls that have another default with these components."""
        return {}

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
            self.parts.options[name] = _like(dict(self.family.options)[name], value)
        self.parts.forget()

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Casts the parameters to a floating-point dtype, given by name or PyTorch's; returns self.

        Devices are accepted and change nothing: JAX has placed the parameters already.
        """
        dtypes = map(floating_dtype, (*args, kwargs.get("dtype"), kwargs.get("torch_dtype")))
        dtype = next((d for d in dtypes if d is not None), None)
        if dtype is not None:
            self.params = {k: cast_params(p, dtype) for k, p in self.params.items()}
        return self

    def quantize(
        self, weights: Weights = "int8", components: str | Sequence[str] | None = None
    ) -> Self:
        """Stores kernels in eight bits, which halves what they take in bfloat16; returns self.

        Each kernel is freed when it is replaced, unless another pipeline shares it. Calls compute
        in the same dtype as before, and compile once more.

        Args:
            weights: "int8", "int8_convrot" or "fp8", see `Model.quantize`.
            components: names of components; by default the denoiser, ControlNets and text encoders.

        Raises:
            ValueError: there is no such component, or it is a PyTorch module.
        """
        names = [n for n in self.parts.models if self.family.role(n) in QUANTIZED]
        for name in names if components is None else as_list(components):
            if name not in self.parts.models:
                there = ", ".join(self.parts.models)
                raise ValueError(f"components has {name!r}; those here are {there}")
            if self.parts.params[name]:
                self.parts.models[name].quantize(weights)
        return self

    @property
    def is_double(self) -> bool:
        """Whether some parameters are of 64 bits."""
        return any(model.is_double for model in self.parts.models.values())

    @property
    def generate_fn(self) -> Callable[..., Any]:
        """The whole call as a pure function, to jit, vmap or differentiate.

        `pipe.generate_fn(pipe.params, pipe.prepare_inputs("a prompt"))` returns images b H W 3 in
        [0, 1], and for a call with hooks the pair of these and of what the hooks have kept. With
        rematerialize=False, a gradient keeps every row's activations in memory instead of computing
        them again (`jax.checkpoint`): faster, for networks that are small enough.
        """
        return generate_fn(self.parts)

    @under_own_switches
    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Inputs:
        """Returns the inputs of `generate_fn` for the arguments of a call."""
        call = read_call(self, args, kwargs, pure=True)
        check_complete(self)
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


def _like(default: Any, value: Any) -> Any:
    """Returns an option of model_index.json, as True or False where its default is one of them."""
    return bool(value) if isinstance(default, bool) else value
