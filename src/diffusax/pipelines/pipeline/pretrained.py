"""Pipelines from checkpoints and from other pipelines, and back to checkpoints."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from jax.sharding import Mesh

from diffusax.checkpoints import read_call_defaults, resolve
from diffusax.checkpoints.files import CallDefaults
from diffusax.checkpoints.keywords import NO_EFFECT, hub_keywords, stored_as
from diffusax.checkpoints.networks import check_safe
from diffusax.checkpoints.publishing import Publishing, publishing_keywords
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.components.foreign import CONVERTERS, own_pipeline
from diffusax.pipelines.components.loading import class_for, given_components, save_components
from diffusax.pipelines.families import Family
from diffusax.pipelines.pipeline.encoding_first import load_encoding_first
from diffusax.pipelines.pipeline.single_file import custom_class
from diffusax.runtime.devices.mesh import devices_for, mesh_on


class Pretrained(Publishing):
    """The methods of pipelines that load, share and save checkpoints."""

    family: ClassVar[Family]
    component_names: ClassVar[tuple[str, ...]]
    parts: Components
    call_defaults: CallDefaults
    progress_bar_options: dict[str, Any]

    @classmethod
    def from_pipe(cls, pipe: Any, **components: Any) -> Self:
        """Makes a pipeline of this class from another's components; nothing is copied or compiled.

        A pipeline of PyTorch diffusers is converted first, see `from_torch`.

        Raises:
            ValueError: the pipeline is of another family, or lacks a component.
        """
        pipe = own_pipeline(Pretrained, pipe)
        if not cls.family.takes(pipe.family):
            raise ValueError(
                f"{cls.__name__} is for {cls.family.name}; the pipeline is {pipe.family.name}"
            )
        dtype = components.pop("torch_dtype", None)
        shared = {n: v for n, v in pipe.components.items() if n in cls.component_names}
        if pipe.parts.encoder_mesh is not None:
            components.setdefault("encoder_mesh", pipe.parts.encoder_mesh)
        new: Any = cls(**{**shared, **pipe.parts.options, **components})
        if "scheduler" not in components:
            new.parts.process = pipe.parts.process
        new.parts.adapters, new.parts.fused = pipe.parts.adapters, dict(pipe.parts.fused)
        new.parts.ip_adapters, new.parts.encoded = pipe.parts.ip_adapters, pipe.parts.encoded
        new._offload_like(pipe, components)
        new.progress_bar_options, new.tensors = dict(pipe.progress_bar_options), pipe.tensors
        new.call_defaults = dict(pipe.call_defaults)
        made: Self = new if dtype is None else new.to(dtype)
        return made

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
        weights: str | Mapping[str, Any] | None = "file",
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
            device: a device to put the parameters on; only that one is used then. Or a sharding:
                the axes of its mesh that it names split the parameters, and the others batches.
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
            weights: "int8", "int8_convrot" or "fp8" to store the kernels of the denoiser, of
                ControlNets and of text encoders in eight bits, which halves what they take in
                bfloat16; computation keeps its dtype, see `quantize`. "file" stores what quantised
                files have in eight bits or fewer in eight, with the same numbers, and all else in
                the dtype; None stores everything in the dtype. Or a dictionary of them by
                component, with that of the others under "default". diffusers' quantization_config
                is understood, too.
            **components: components to use instead of the checkpoint's (`vae=`, `unet=`,
                `scheduler=`, `controlnet=` or `adapter=` a model or a list), also diffusers' and
                transformers' own, or None for those that are not needed. Then force_download,
                options of model_index.json, and diffusers' other keywords, most of which change
                nothing here. Unknown ones are logged and left out.

        Raises:
            ValueError: the checkpoint cannot be found or read; says which file and why.
        """
        if (config := components.pop("quantization_config", None)) is not None:
            weights = stored_as(config)
        hub: dict[str, Any] = {"revision": revision, "token": token, "cache_dir": cache_dir}
        hub |= {"variant": variant, "local_files_only": local_files_only}
        hub |= hub_keywords(components)
        encoder_mesh = None if encoder_device is None else mesh_on(encoder_device, "encoder_device")
        devices = devices_for(device, mesh, without=encoder_mesh)
        custom = None
        if custom_pipeline is not None:
            consent = {"trust_remote_code": trust_remote_code}
            custom = custom_class(Pretrained, custom_pipeline, **consent)
        folder = resolve(path_or_repo, skip=tuple(components), **hub)
        target = custom or class_for(cls, folder)
        given = given_components(target, components)
        wanted = torch_dtype if dtype is None else dtype
        places: dict[str, Any] = {"vae_dtype": vae_dtype, "variant": variant, "device": devices}
        places["weights"] = weights
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
