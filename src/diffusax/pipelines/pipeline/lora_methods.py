"""The methods of pipelines that load, weigh, merge and save LoRAs, under diffusers' names."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffusax.checkpoints.keywords import take_keywords
from diffusax.checkpoints.networks import check_safe
from diffusax.lora.files import WEIGHT_NAME, FileLayers, LoraFile, read_lora
from diffusax.lora.keys import find_layers
from diffusax.lora.lora import Lora, layers_of_arrays, lora_of_layers
from diffusax.lora.stacks import Weight, WeightGroups
from diffusax.lora.write import write_lora
from diffusax.pipelines.components.adapters import adaptable_networks
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.components.merging import fuse, unfuse
from diffusax.pipelines.components.references import check_layout
from diffusax.pipelines.plan.arguments import as_list

log = logging.getLogger(__name__)


_FIRST, _SECOND = "transformer", "transformer_2"


def _of_second(file: LoraFile, networks: Mapping[str, Any], *, strict: bool) -> FileLayers:
    """Returns the layers of a LoRA for a transformer, as those of the second one.

    Raises:
        ValueError: there is no second transformer, or keys fit no layer.
    """
    if _SECOND not in networks:
        raise ValueError(
            "load_into_transformer_2 is for pipelines with two transformers, such as Wan 2.2 "
            "A14B's; leave it out"
        )
    layers = find_layers(file, {_FIRST: networks[_SECOND]}, strict=strict)
    return {(_SECOND, path): parts for (_, path), parts in layers.items()}


class LoraMethods:
    """Loads LoRAs from files, holds them by name, and says what calls use of them."""

    parts: Components

    @property
    def adapters(self) -> Mapping[str, Lora]:
        """The LoRAs that were loaded or added, by name; the mapping is read-only."""
        return self.parts.adapters.adapters

    @property
    def lora_scale(self) -> float:
        """The scale of LoRAs in calls without cross_attention_kwargs, which is 1."""
        return 1.0

    def add_adapter(self, adapter_name: str, layers: Mapping[str, Mapping[str, Any]]) -> None:
        """Adds a LoRA, which calls use that name it: `pipe("a cat", adapters={"style": 0.8})`.

        Any number of adapters run in one compiled program, with weights of their own for each
        prompt. Other adapters and other weights compile nothing, as long as the sum of their ranks
        has the same bucket (16, 32, 64, 128, 256) and they change the same kind of layers.
        Pipelines that were made by `from_pipe` share the adapters.

        Args:
            adapter_name: the name, by which calls ask for it.
            layers: for each component (unet, controlnet, text_encoder, ...) the pairs (A, B) by
                the path of a layer in `params`, joined by dots. A linear layer x W becomes
                x W + weight x A B, where A is c rank and B rank d. For a convolution A is
                kh kw c rank, a kernel of the same size, stride and padding. B includes
                alpha / rank. A third array is a bias of B, d, which includes it, too.

        Raises:
            ValueError: the name is taken, or a component, path or shape does not fit the networks.
        """
        self.parts.adapters.add(adapter_name, layers, adaptable_networks(self.parts))

    def load_lora_weights(
        self,
        pretrained_model_name_or_path_or_dict: Any,
        adapter_name: str | None = None,
        hotswap: bool = False,
        *,
        strict: bool = True,
        load_into_transformer_2: bool = False,
        weight_name: str | None = None,
        subfolder: str | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        cache_dir: str | Path | None = None,
        **keywords: Any,
    ) -> None:
        """Loads a LoRA, which later calls use with a weight of 1, or as `set_adapters` says.

        Formats: diffusers' and PEFT's, kohya's (in diffusers' layout and in the original one),
        those of transformers as ComfyUI and XLabs have them (q, k and v in one layer), and LyCORIS'
        LoHa, LoKr, IA3, full and norm, each also with DoRA or Tucker's decomposition. Those that
        are no products of low rank are merged into the parameters for the calls that use them.

        Args:
            pretrained_model_name_or_path_or_dict: a safetensors file, a folder or a Hub repository
                that holds one, or a dictionary of arrays or tensors by key.
            adapter_name: the LoRA's name; "default_0", "default_1", ... by default. One that is
                there already gets what is loaded beside what it has, where that is of other
                components.
            hotswap: whether to replace the LoRA of that name.
            strict: whether a key or a shape that fits no layer is an error; else it is left out.
            load_into_transformer_2: whether what the file has for a transformer is for the second
                one, that of Wan 2.2's less noisy steps.
            weight_name: the file's name in the folder or repository, where it has several.
            subfolder: the folder inside it.
            revision: a branch, tag or commit of the repository.
            token: the token for private and gated repositories; by default the stored login.
            local_files_only: whether to use only files that were downloaded before.
            cache_dir: the folder of downloads, instead of the one in HF_HOME.
            **keywords: force_download, and diffusers' others, which change nothing here; unknown
                ones are logged and left out.

        Raises:
            ValueError: the file cannot be found or read, or does not fit the pipeline's networks;
                says which key and, where it can be seen, which model the LoRA is for.
        """
        where: dict[str, Any] = {"weight_name": weight_name, "subfolder": subfolder}
        where |= {"revision": revision, "token": token, "cache_dir": cache_dir}
        where["local_files_only"] = local_files_only
        if keywords:
            where |= take_keywords("load_lora_weights", keywords)[1]
        file = read_lora(pretrained_model_name_or_path_or_dict, **where)
        networks = adaptable_networks(self.parts)
        lacking = [c.name for c in self.parts.family.components if c.name not in networks]
        if load_into_transformer_2:
            layers = _of_second(file, networks, strict=strict)
        else:
            layers = find_layers(file, networks, strict=strict, others=lacking)
        store, lora = self.parts.adapters, lora_of_layers(layers, file, networks, strict=strict)
        check_layout(self.parts, lora, file.name)
        if hotswap:
            store.replace(adapter_name or "", lora, networks)
            return
        unused = (f"default_{i}" for i in itertools.count() if f"default_{i}" not in store.adapters)
        name = next(unused) if adapter_name is None else adapter_name
        known = store.adapters.get(name)
        # As in PEFT, the LoRA of a component that was loaded last is the one that calls use.
        changed = set(lora.names)
        others = {n: w for n, w in store.active.items() if not changed & {*self.adapters[n].names}}
        if known is not None and not changed & {*known.names}:
            store.replace(name, known.beside(lora), networks)
        else:
            store.add(name, lora, networks)
        store.active = {**others, name: 1.0}

    @classmethod
    def lora_state_dict(
        cls, pretrained_model_name_or_path_or_dict: Any, **keywords: Any
    ) -> tuple[dict[str, Any], None]:
        """Returns the tensors of a LoRA by the keys of its file, NumPy's, and None.

        diffusers converts other formats' keys here; `load_lora_weights`, which takes the tensors,
        does so here.

        Args:
            pretrained_model_name_or_path_or_dict: see `load_lora_weights`.
            **keywords: those of `load_lora_weights` that say where the file is.

        Raises:
            ValueError: the file cannot be found or read.
        """
        names = ("weight_name", "subfolder", "revision", "token", "local_files_only", "cache_dir")
        where, more = take_keywords("lora_state_dict", keywords, names)
        file = read_lora(pretrained_model_name_or_path_or_dict, **where, **more)
        return dict(file.tensors), None

    def set_adapters(
        self,
        adapter_names: str | Sequence[str],
        adapter_weights: Weight | Sequence[Weight | None] | None = None,
    ) -> None:
        """Says which LoRAs the calls use that name none in `adapters`.

        Args:
            adapter_names: their names; the others are not used.
            adapter_weights: their weights, by default 1: one for all or a list, each a number, or
                a dictionary by component such as {"unet": 0.5}. That of a UNet may be by block:
                {"unet": {"down": 0.2, "mid": 1.0, "up": {"block_0": [0.1, 0.2, 0.3]}}}, which
                concerns the layers of attention. What is left out has a weight of 1.

        Raises:
            ValueError: a name is unknown, or there are neither one nor as many weights as names.
        """
        names = as_list(adapter_names)
        weights: Any = adapter_weights
        weights = list(weights) if isinstance(weights, list | tuple) else [weights] * len(names)
        if len(names) != len(weights):
            raise ValueError(f"there are {len(names)} adapter_names and {len(weights)} weights")
        store = self.parts.adapters
        store.require(names, "adapter_names")
        groups = WeightGroups(adaptable_networks(self.parts))
        store.active = {
            name: 1.0 if w is None else groups.check("adapter_weights", name, w)
            for name, w in zip(names, weights)
        }

    def get_active_adapters(self) -> list[str]:
        """Returns the names of the LoRAs that calls use."""
        return list(self.parts.adapters.active)

    def get_list_adapters(self) -> dict[str, list[str]]:
        """Returns the names of the LoRAs that change each component."""
        found: dict[str, list[str]] = {}
        for name, adapter in self.adapters.items():
            for component in adapter.names:
                found.setdefault(component, []).append(name)
        return found

    def disable_lora(self) -> None:
        """Makes calls that name no adapters use none."""
        self.parts.adapters.enabled = False

    def enable_lora(self) -> None:
        """Ends `disable_lora`."""
        self.parts.adapters.enabled = True

    def delete_adapters(self, adapter_names: str | list[str]) -> None:
        """Removes a LoRA, or several, by name.

        Raises:
            ValueError: there is no such LoRA; none is removed then.
        """
        self.parts.adapters.delete(as_list(adapter_names))

    def unload_lora_weights(self) -> None:
        """Removes all LoRAs. What `fuse_lora` merged stays."""
        self.parts.adapters.delete(list(self.adapters))
        self.parts.fused.clear()

    def fuse_lora(
        self,
        components: str | Sequence[str] | None = None,
        lora_scale: float = 1.0,
        safe_fusing: bool = False,
        adapter_names: Sequence[str] | None = None,
    ) -> None:
        """Merges LoRAs into the parameters, which then run, and are saved, as any others.

        Args:
            components: the components to merge into; by default all that the LoRAs change, and of
                families with a transformer this alone, as in diffusers.
            lora_scale: a factor of the LoRAs' weights.
            safe_fusing: whether to raise ValueError where a sum is not finite.
            adapter_names: the LoRAs; by default those that calls use, see `set_adapters`.

        Raises:
            ValueError: a name or component is unknown, or the LoRAs were merged already.
        """
        default = ("transformer",) if "transformer" in self.parts.models else None
        targets = default if components is None else components
        networks = adaptable_networks(self.parts)
        fuse(self.parts, networks, targets, lora_scale, adapter_names, finite=safe_fusing)

    def unfuse_lora(self, components: str | Sequence[str] | None = None) -> None:
        """Undoes `fuse_lora`: the parameters are bit for bit what they were.

        components: the components to restore; by default all.
        """
        unfuse(self.parts, adaptable_networks(self.parts), components)

    @property
    def fused_loras(self) -> set[str]:
        """The names of the LoRAs that `fuse_lora` has merged."""
        return {name for one in self.parts.fused.values() for name in one.names}

    @property
    def num_fused_loras(self) -> int:
        """The number of the LoRAs that `fuse_lora` has merged."""
        return len(self.fused_loras)

    def enable_lora_hotswap(self, target_rank: int = 128, **_: Any) -> None:
        """Compiles programs with room for LoRAs of this total rank from the next call on.

        Other LoRAs compile nothing anyway while their ranks have the same bucket.
        """
        if isinstance(target_rank, bool) or not 0 <= target_rank <= 4096:
            raise ValueError(f"target_rank must be between 0 and 4096 (got {target_rank!r})")
        self.parts.adapters.least_rank = target_rank

    def set_lora_device(self, adapter_names: Any, device: Any) -> None:
        """Changes nothing: LoRAs wait on the host, and those of the last calls are on devices."""
        log.info("set_lora_device changes nothing in diffusax: LoRAs wait on the host")

    @classmethod
    def save_lora_weights(
        cls,
        save_directory: str | Path,
        unet_lora_layers: Mapping[str, Any] | None = None,
        text_encoder_lora_layers: Mapping[str, Any] | None = None,
        text_encoder_2_lora_layers: Mapping[str, Any] | None = None,
        is_main_process: bool = True,
        weight_name: str | None = None,
        save_function: Any = None,
        safe_serialization: bool = True,
        unet_lora_adapter_metadata: Mapping[str, Any] | None = None,
        text_encoder_lora_adapter_metadata: Mapping[str, Any] | None = None,
        text_encoder_2_lora_adapter_metadata: Mapping[str, Any] | None = None,
        transformer_lora_layers: Mapping[str, Any] | None = None,
        transformer_lora_adapter_metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes a LoRA that diffusers opens.

        Args:
            save_directory: the folder.
            unet_lora_layers: the layers of the UNet: PEFT's state dictionary, or the pairs (A, B)
                by path, as `add_adapter` takes them and `pipe.adapters[name].components` has them.
            text_encoder_lora_layers: those of the text encoder.
            text_encoder_2_lora_layers: those of SDXL's second text encoder.
            is_main_process: whether this process writes.
            weight_name: the file's name; "pytorch_lora_weights.safetensors" by default.
            save_function: must be None; the file is always safetensors.
            safe_serialization: must be True.
            unet_lora_adapter_metadata: PEFT's options of the UNet's LoRA, for the file's header.
            text_encoder_lora_adapter_metadata: those of the text encoder's.
            text_encoder_2_lora_adapter_metadata: those of the second text encoder's.
            transformer_lora_layers: the layers of a transformer in the place of a UNet.
            transformer_lora_adapter_metadata: PEFT's options of the transformer's LoRA.

        Raises:
            ValueError: no layers are given, they are neither of the two, or an option is not one
                that can be.
        """
        write_layers(
            save_directory,
            {
                "unet": (unet_lora_layers, unet_lora_adapter_metadata),
                "text_encoder": (text_encoder_lora_layers, text_encoder_lora_adapter_metadata),
                "text_encoder_2": (
                    text_encoder_2_lora_layers,
                    text_encoder_2_lora_adapter_metadata,
                ),
                "transformer": (transformer_lora_layers, transformer_lora_adapter_metadata),
            },
            is_main_process=is_main_process,
            weight_name=weight_name,
            safe=safe_serialization and save_function is None,
        )


def write_layers(
    save_directory: str | Path,
    given: Mapping[str, tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]],
    *,
    is_main_process: bool,
    weight_name: str | None,
    safe: bool,
) -> None:
    """Writes a LoRA that diffusers opens; see `LoraMethods.save_lora_weights`.

    Args:
        save_directory: the folder.
        given: for each component its layers and PEFT's options, or None for either.
        is_main_process: whether this process writes.
        weight_name: the file's name; None for the usual one.
        safe: whether the call asks for safetensors.

    Raises:
        ValueError: no layers are given, they cannot be read, or another format is asked for.
    """
    check_safe(safe)
    layers = {
        k: v
        for name, (own, _) in given.items()
        for k, v in layers_of_arrays(name, own or {}).items()
    }
    if not layers:
        raise ValueError(f"there are no layers to save; give {next(iter(given))}_lora_layers")
    options = {f"{name}.{k}": v for name, (_, own) in given.items() for k, v in (own or {}).items()}
    if not is_main_process:
        return
    folder = Path(save_directory)
    folder.mkdir(parents=True, exist_ok=True)
    write_lora(folder / (weight_name or WEIGHT_NAME), layers, "diffusers", options=options)
