"""Loads and saves models: the methods that all of them share."""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from diffusax.boundary.config import config_to_dict
from diffusax.boundary.files import load_json
from diffusax.checkpoints.hub import resolve
from diffusax.checkpoints.keywords import OF_HUB, stored_as, take_keywords
from diffusax.checkpoints.networks import (
    check_safe,
    class_name_of,
    network_of,
    read_parameters,
    save_network,
)
from diffusax.checkpoints.publishing import Publishing, publishing_keywords
from diffusax.checkpoints.single_file import Reading, opened_view
from diffusax.checkpoints.single_file.original_config import prediction_of
from diffusax.checkpoints.weight_file import config_folder, find_file
from diffusax.models import MODELS
from diffusax.models.encoders.clip_vision import tower
from diffusax.models.network import Network, Params, initialize_params, parse_dtype, upstream_name

_WITHOUT_MEANING = ("num_in_channels", "upcast_attention", "image_size", "checkpoint")
"""The arguments of diffusers' from_single_file that are accepted and change nothing."""


class Pretrained(Publishing):
    """The methods of models that load, make and save them, as diffusers' and transformers' do."""

    kinds: ClassVar[dict[str, Any]]
    module_class: ClassVar[Any]
    tower: ClassVar[bool] = False
    """Whether it is a part of a CLIPModel, and can be loaded from one."""

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | Path,
        *,
        subfolder: str | None = None,
        torch_dtype: Any = None,
        dtype: Any = "float32",
        variant: str | None = None,
        device: Any = None,
        weights: str | None = "file",
        ignore_mismatched_sizes: bool = False,
        **keywords: Any,
    ) -> Self:
        """Loads a network from a folder or Hub repository.

        Args:
            path_or_repo: a folder or a Hub repository id.
            subfolder: the folder inside it, such as "unet" for a pipeline's checkpoint.
            torch_dtype: diffusers' name for `dtype`; may be one of PyTorch's dtypes.
            dtype: the dtype of parameters and computation, a name or a JAX dtype; "auto" keeps the
                file's.
            variant: a variant such as "fp16", if the checkpoint has one.
            device: where to put the parameters as they are read: a device; a sharding, whose axes
                of the mesh split each large parameter along its largest dimension; or a function
                (name, shape) -> device or sharding, for names such as "conv_in.kernel".
            weights: "int8", "int8_convrot" or "fp8" to store kernels inside of blocks so, see
                `quantize`; "file" for those that a quantised file has in eight bits or fewer, with
                the same numbers; None for the dtype. diffusers' quantization_config is understood.
            ignore_mismatched_sizes: whether tensors that the file lacks, or has in another shape
                than the options ask for, are drawn anew as PyTorch's layers do, and named in a
                warning, such as the first layer with in_channels=9; otherwise they are an error.
            **keywords: revision, token, local_files_only, cache_dir and force_download; options
                that replace those of the config, such as num_hidden_layers=11, where tensors that
                the network does not have then are left out; and diffusers' other keywords, which
                change nothing here. Unknown ones are logged and left out.

        Raises:
            ValueError: the network cannot be found or read, or is of another class; says which and
                why.
        """
        wanted = dtype if torch_dtype is None else torch_dtype
        if (told := keywords.pop("quantization_config", None)) is not None:
            weights = stored_as(told)
        network, params = read_parameters(
            path_or_repo,
            subfolder=subfolder,
            dtype=None if wanted == "auto" else wanted,
            variant=variant,
            device=device,
            weights=weights,
            ignore_mismatched_sizes=ignore_mismatched_sizes,
            own_class=cls.module_class,
            **_load_keywords(cls, keywords),
        )
        if network.class_name == "CLIPModel" and cls.tower:
            network = tower(network, cls.module_class)
            params = {name: params[name] for name in network.shapes}
        if network.class_name not in cls._class_names():
            raise ValueError(f"{path_or_repo} holds a {network.class_name}, not a {cls._named()}")
        return cast(Any, cls)(network, params)

    @classmethod
    def from_config(
        cls, config: Any, *, seed: int = 0, dtype: Any = "float32", **changes: Any
    ) -> Self:
        """Makes a network of a config, with random parameters.

        Args:
            config: the options: a parsed config.json of diffusers or transformers, or the `config`
                of a model, theirs too.
            seed: the seed of the parameters.
            dtype: the dtype of the parameters, a name or a JAX dtype.
            **changes: options that replace those of the config.

        Raises:
            ValueError: an option is unknown or has a value that is not supported, or the config is
                another network's.
        """
        return cast(Any, cls)(config, seed=seed, dtype=dtype, **changes)

    @classmethod
    def _drawn(
        cls, config: Any, *, seed: int = 0, dtype: Any = "float32", **changes: Any
    ) -> tuple[Network, Params]:
        """Returns the network of a config and random parameters, see `from_config`."""
        data = _options_of(config)
        options = {k: v for k, v in data.items() if not k.startswith("_")}
        network = network_of(cls._class_of(data), {**options, **changes}, source="config")
        params = initialize_params(network.shapes, seed=seed, dtype=parse_dtype(dtype))
        return network, params

    @classmethod
    def load_config(
        cls, path_or_repo: str | Path, *, subfolder: str | None = None, **hub: Any
    ) -> dict[str, Any]:
        """Returns the parsed config.json of a network in a folder or Hub repository.

        Args:
            path_or_repo: a folder or a Hub repository id.
            subfolder: the folder inside it, such as "unet" for a pipeline's checkpoint.
            **hub: revision, token, local_files_only, cache_dir.

        Raises:
            ValueError: there is none, or it cannot be read.
        """
        own, more = take_keywords(f"{cls.__name__}.load_config", hub, OF_HUB)
        folder = resolve(path_or_repo, subfolder=subfolder, weights=False, **own, **more)
        return load_json(folder / "config.json")

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        save_function: Any = None,
        safe_serialization: bool = True,
        variant: str | None = None,
        max_shard_size: int | str | None = None,
        push_to_hub: bool = False,
        **hub: Any,
    ) -> None:
        """Writes a folder that diffusers or transformers opens.

        Args:
            save_directory: the folder.
            is_main_process: whether this process writes.
            save_function: must be None; files are always safetensors.
            safe_serialization: must be True.
            variant: a variant such as "fp16", for the names of the files.
            max_shard_size: the size above which the file is split, in bytes or as "5GB".
            push_to_hub: whether to upload the files, too.
            **hub: options of `push_to_hub`, and repo_id, by default the folder's name.

        Raises:
            ValueError: safe_serialization is False, but diffusax writes only safetensors.
        """
        check_safe(safe_serialization and save_function is None)
        if not is_main_process:
            return
        save_network(self, save_directory, variant=variant, max_shard_size=max_shard_size)
        owner = getattr(self, "class_name", type(self).__name__)
        options = publishing_keywords(f"{owner}.save_pretrained", hub)
        if push_to_hub:
            name = options.pop("repo_id", Path(save_directory).name)
            self.push_to_hub(name, variant=variant, **options)

    @classmethod
    def _class_names(cls) -> Collection[str]:
        """Returns the names of the networks that the class loads; without a module class, all."""
        if cls.module_class is None:
            return MODELS
        own = cls.module_class.__name__
        return [name for name, kind in cls.kinds.items() if issubclass(kind, cls)] or [own]

    @classmethod
    def _named(cls) -> str:
        return " or ".join(cls._class_names())

    @classmethod
    def _class_of(cls, config: Any) -> str:
        """Returns the class of the network to make of a config.

        Raises:
            ValueError: the config is for another class, or does not say for which.
        """
        data, own = _options_of(config), cls.module_class
        # An encoder's config is the same with a projection and without.
        if own and (cls.tower or not (data.get("_class_name") or data.get("architectures"))):
            name: str = own.__name__
            return name
        name = class_name_of(data, "config")
        if own and upstream_name(own) == name:
            return str(own.__name__)
        if name not in cls._class_names():
            raise ValueError(f"config is for a {name}, not a {cls._named()}")
        return name


def _options_of(config: Any) -> Mapping[str, Any]:
    """Returns the options of a parsed config.json, or of a model's config.

    Raises:
        ValueError: it is neither.
    """
    data: Any = {} if config is None else config
    # transformers' configs are dataclasses, too.
    if hasattr(config, "to_dict"):
        data = config.to_dict()
    elif dataclasses.is_dataclass(config):
        data = config_to_dict(cast(Any, config))
    if not isinstance(data, Mapping):
        raise ValueError(
            f"config must be a mapping of options or a model's config (got {config!r:.200})"
        )
    return data


def _options(cls: Any) -> set[str]:
    """Returns the names of the options of the networks that a class loads."""
    configs: list[Any] = [cls.module_class] if cls.module_class else [*MODELS.values()]
    return {option for own in configs for option in own.config_class.__dataclass_fields__}


def _load_keywords(cls: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `read_parameters` among further keywords of from_pretrained."""
    options = _options(cls)
    own, more = take_keywords(f"{cls.__name__}.from_pretrained", keywords, {*OF_HUB, *options})
    hub = {name: value for name, value in own.items() if name in OF_HUB}
    return {**hub, **more, "changes": {k: v for k, v in own.items() if k in options}}


class FromSingleFile(Pretrained):
    """The method of models that single files hold, alone or with the rest of a pipeline."""

    component: ClassVar[str]
    """The network's name in a pipeline's checkpoint."""

    @classmethod
    def from_single_file(
        cls,
        path_or_address: str | Path,
        *,
        config: str | Path | None = None,
        original_config: Any = None,
        subfolder: str | None = None,
        torch_dtype: Any = None,
        dtype: Any = "float32",
        use_ema: bool = False,
        extract_ema: bool = False,
        device: Any = None,
        weights: str | None = "file",
        revision: str | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        cache_dir: str | Path | None = None,
        **changes: Any,
    ) -> Self:
        """Loads a network from a .safetensors or .gguf file, in the original layout or diffusers'.

        Of PyTorch's own files those named .pth are read, without running what is in them.

        The file may hold a whole model. Its config is in the package, so that nothing is fetched.

        Args:
            path_or_address: the file's path, its address on the Hub, or "owner/name/file".
            config: a folder or Hub repository with the network's config.json, at its top, in
                `subfolder` or under the network's name in a pipeline.
            original_config: a YAML file of the original code, or its contents; see
                `DiffusionPipeline.from_single_file`.
            subfolder: the folder in `config`.
            torch_dtype: diffusers' name for `dtype`; may be one of PyTorch's dtypes.
            dtype: the dtype of parameters and computation, a name or a JAX dtype; "auto" keeps the
                file's.
            use_ema: whether to read a UNet's averaged parameters (`model_ema.`).
            extract_ema: diffusers' name for `use_ema`.
            device: a device or sharding to put the parameters on.
            weights: see `from_pretrained`.
            revision: a branch, tag or commit of the file's repository.
            token: the token for private and gated repositories; by default the stored login.
            local_files_only: whether to use only files that were downloaded before.
            cache_dir: the folder of downloads, instead of the one in HF_HOME.
            **changes: options that replace those of the config, such as `scaling_factor`.

        Raises:
            ValueError: the file cannot be found or read, does not hold this network, or holds one
                of which the package has no config; says what to pass.
        """
        hub: dict[str, Any] = {
            **{"token": token, "cache_dir": cache_dir},
            **{"local_files_only": local_files_only, "revision": revision},
        }
        if (told := changes.pop("quantization_config", None)) is not None:
            weights = stored_as(told)
        changes = {k: v for k, v in changes.items() if k not in _WITHOUT_MEANING}
        original_config = changes.pop("original_config_file", original_config)
        changes, more = take_keywords(f"{cls.__name__}.from_single_file", changes, _options(cls))
        hub |= more
        reading = Reading(
            config_folder(config, subfolder=subfolder, **hub),
            prediction_of(original_config),
            use_ema or extract_ema,
            changes=tuple(changes.items()),
            class_name=upstream_name(cls.module_class),
        )
        with opened_view(find_file(path_or_address, **hub), reading, cls.component) as folder:
            options: dict[str, Any] = {"torch_dtype": torch_dtype, "dtype": dtype}
            return cls.from_pretrained(folder, device=device, weights=weights, **options)
