"""Opens a single file as a folder in diffusers' layout, whose parameters stay in the file.

The folder holds configs and tokenizers only. What reads a network from it takes the tensors from
the file, where `part_of` says so, so that all that opens folders opens single files.
"""

import atexit
import contextlib
import dataclasses
import logging
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from diffusax.boundary.files import load_json, write_json
from diffusax.checkpoints.files import (
    is_modular,
    read_call_defaults,
    read_model_index,
    write_model_index,
)
from diffusax.checkpoints.single_file import configs
from diffusax.checkpoints.single_file.contents import Contents, Part, read_contents
from diffusax.checkpoints.single_file.transformer_configs import repository, transformer_config
from diffusax.checkpoints.tensors import TensorFile
from diffusax.text.clip_vocabulary import write_clip_vocabulary

log = logging.getLogger(__name__)

PREDICTION_TYPES = ("epsilon", "v_prediction", "sample")
_NEVER = ("safety_checker", "feature_extractor", "image_encoder")
"""The components that single files never hold, and pipelines run without."""
_TOKENIZERS = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}
_NAMES = {
    "unet": "a UNet (model.diffusion_model.)",
    "transformer": "a transformer (model.diffusion_model.)",
    "vae": "an autoencoder (first_stage_model. or vae.)",
    "text_encoder": "a text encoder (cond_stage_model., conditioner. or text_encoders.)",
    "text_encoder_2": "a second text encoder (conditioner.embedders.1. or text_encoders.)",
    "transformer_2": "a second transformer, that of the less noisy steps,",
}

_UNKNOWN_SCALE = (
    "%s does not say whose autoencoder it is, and gets the scaling factor of %s; for %s, or "
    "config= with its folder or repository"
)
_SCALES = {
    4: ("SD 1 and 2", "SDXL's pass scaling_factor=0.13025"),
    16: ("FLUX.1 and Z-Image", "SD 3's pass scaling_factor=1.5305 and shift_factor=0.0609"),
}
"""The models that an autoencoder without a model is taken for, and others, by its channels."""

_parts: dict[Path, Part] = {}
"""The part of a file for each folder that stands for a network."""
_lasting: dict[tuple[Any, ...], Path] = {}
"""The views that last as long as the process, by their files."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """How to read a single file."""

    config: Path | None = None
    """A folder with the model's configs in diffusers' layout; None for those in the package."""
    prediction_type: str | None = None
    """What the UNet predicts; None for what the file says."""
    use_ema: bool = False
    """Whether to read the UNet's averaged parameters."""
    given: frozenset[str] = frozenset()
    """The components that need not be in the file."""
    changes: tuple[tuple[str, Any], ...] = ()
    """Options of a network's config that replace those in it, for a network that is read alone."""
    class_name: str | None = None
    """The class of a network that is read alone, where files of several are alike."""

    def __post_init__(self) -> None:
        if self.prediction_type not in (None, *PREDICTION_TYPES):
            raise ValueError(
                f"prediction_type must be 'epsilon', 'v_prediction' or 'sample' "
                f"(got {self.prediction_type!r})"
            )


def part_of(folder: Path) -> Part | None:
    """Returns the part of a single file that a folder stands for; None for any other folder."""
    return _parts.get(folder)


@contextlib.contextmanager
def opened_view(path: Path, reading: Reading, component: str | None = None) -> Iterator[Path]:
    """Yields a folder in diffusers' layout for a file, of a pipeline or of one network alone.

    Args:
        path: the file.
        reading: how to read it.
        component: the network to open alone, such as "unet"; None for the pipeline.

    Raises:
        ValueError: the file, or a config, cannot be read, or does not hold what is asked for.
    """
    with tempfile.TemporaryDirectory(prefix="diffusax-") as root:
        folder = Path(root) / path.name
        try:
            _write(read_contents(path), folder, reading, component)
            yield folder
        except ValueError as error:
            # The folder is gone when the user reads this; what it says is about the file.
            raise ValueError(str(error).replace(str(folder), str(path))) from None
        finally:
            for known in [known for known in list(_parts) if known.is_relative_to(folder)]:
                del _parts[known]


def lasting_view(path: Path, given: Collection[str] = ()) -> Path:
    """Returns a folder in diffusers' layout for a file, which lasts until the process ends.

    A file with one network alone becomes the folder of that network.

    given: the components that need not be in the file.

    Raises:
        ValueError: the file cannot be read, or does not say what is needed.
    """
    stat = path.stat()
    key = (path.absolute(), stat.st_mtime_ns, stat.st_size, frozenset(given))
    if key not in _lasting:
        contents = read_contents(path)
        root = tempfile.mkdtemp(prefix="diffusax-")
        atexit.register(shutil.rmtree, root, ignore_errors=True)
        component = None if contents.is_pipeline else next(iter(contents.parts))
        _write(contents, Path(root) / path.name, Reading(given=frozenset(given)), component)
        _lasting[key] = Path(root) / path.name
    return _lasting[key]


def _write(contents: Contents, folder: Path, reading: Reading, component: str | None) -> None:
    folder.mkdir(parents=True)
    if component is not None:
        config = _network_config(contents, component, reading)
        _add_network(folder, contents, component, config, reading)
    elif reading.config is None:
        _write_packaged(contents, folder, reading)
    else:
        _copy_configs(contents, folder, reading, reading.config)


def _add_network(
    folder: Path, contents: Contents, name: str, config: dict[str, Any], reading: Reading
) -> None:
    """Makes a folder stand for a network in the file."""
    part = contents.parts[name].read_as(config.get("_class_name"))
    if reading.use_ema and name == "unet":
        if part.averages.keys() != part.entries.keys():
            raise ValueError(
                f"{contents.path} holds no averaged parameters (model_ema.) of its UNet; leave "
                "use_ema or extract_ema out"
            )
        part = dataclasses.replace(part, entries=part.averages)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    _parts[folder] = part


def _network_config(contents: Contents, name: str, reading: Reading) -> dict[str, Any]:
    """Returns the config of a network that is read alone."""
    if name not in contents.parts:
        has = ", ".join(contents.parts)
        raise ValueError(f"{contents.path} holds {has}, but not {_NAMES.get(name, name)}")
    if reading.config is not None:
        root = reading.config
        folder = root if (root / "config.json").is_file() else root / name
        return {**load_json(folder / "config.json"), **dict(reading.changes)}
    unet = contents.parts.get("unet")
    family = None if unet is None else unet.family
    alone = unet is None and "transformer" not in contents.parts
    part = contents.parts[name].read_as(reading.class_name)
    scaled = name == "vae" and part.class_name == "AutoencoderKL"
    if scaled and alone and "scaling_factor" not in dict(reading.changes):
        shape = part.shape("decoder.conv_in.weight") or ()
        log.warning(_UNKNOWN_SCALE, contents.path, *_SCALES[16 if shape[1:2] == (16,) else 4])
    found = _packaged(contents, part, family, reading.prediction_type)
    return {**found, **dict(reading.changes)}


def _packaged(
    contents: Contents, part: Part, family: configs.Family | None, prediction_type: str | None
) -> dict[str, Any]:
    """Returns the config that the package has for a network of the file."""
    name = part.name
    if name == "unet":
        return configs.unet_config(contents, prediction_type or contents.prediction_type)
    if name == "transformer":
        return transformer_config(part)
    if name == "controlnet":
        return configs.controlnet_config(part)
    if name == "vae":
        statistics = [_numbers(contents, key) for key in ("edm_mean", "edm_std")]
        return configs.autoencoder_config(part, family, statistics)
    found = configs.TEXT_ENCODERS[family].get(name) if family else configs.text_encoder_config(part)
    if found is None:
        raise ValueError(f"{contents.path} holds a text encoder of no known model; pass config=")
    return found


def _write_packaged(contents: Contents, folder: Path, reading: Reading) -> None:
    """Writes the folder of a pipeline from the configs in the package."""
    if "transformer" in contents.parts:
        part = contents.parts["transformer"]
        raise ValueError(
            f"{contents.path} holds a {part.class_name}, for which the package has no tokenizer; "
            "pass config= with a folder or Hub repository in diffusers' layout, such as "
            f"{repository(part)!r}, of which only configs and tokenizers are read; for commands, "
            f"convert it first with `diffusax convert {contents.path.name} FOLDER --model-config "
            "REPOSITORY`"
        )
    if "unet" not in contents.parts:
        raise ValueError(
            f"{contents.path} holds only {', '.join(contents.parts)}, not the UNet of a pipeline; "
            "load it with from_single_file of the network's class"
        )
    unet = contents.parts["unet"]
    prediction_type = _prediction_type(contents, reading)
    unet_config = configs.unet_config(contents, prediction_type)
    family = unet.family
    assert family is not None  # unet_config knows only these
    listed: dict[str, Any] = dict.fromkeys(_NEVER)
    for name in ("unet", "vae", *configs.TEXT_ENCODERS[family]):
        if name in reading.given:
            continue
        _check_there(contents, name)
        own = contents.parts[name]
        config = unet_config if name == "unet" else _packaged(contents, own, family, None)
        _add_network(folder / name, contents, name, config, reading)
        class_name = config.get("_class_name") or config["architectures"][0]
        listed[name] = ("diffusers" if "_class_name" in config else "transformers", class_name)
    for name in configs.TEXT_ENCODERS[family]:
        pad = "<|endoftext|>" if name == "text_encoder" and family != "sd2" else "!"
        write_clip_vocabulary(folder / _TOKENIZERS[name], pad)
        listed[_TOKENIZERS[name]] = ("transformers", "CLIPTokenizer")
    scheduler = configs.scheduler_config(contents, prediction_type, _levels(contents))
    (folder / "scheduler").mkdir()
    write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    listed["scheduler"] = ("diffusers", scheduler["_class_name"])
    options: dict[str, Any] = configs.pipeline_options(contents)
    write_model_index(folder, configs.pipeline_class(unet), listed, **options)


def _copy_configs(contents: Contents, folder: Path, reading: Reading, source: Path) -> None:
    """Writes the folder of a pipeline from configs in diffusers' layout."""
    pipeline, listed, options = read_model_index(source)
    # What a modular pipeline lists may be elsewhere.
    lacks = {name for name in listed if is_modular(source) and not (source / name).is_dir()}
    listed = {name: kind for name, kind in listed.items() if name not in {*_NEVER, *lacks}}
    components = {**dict.fromkeys(_NEVER), **listed}
    defaults = read_call_defaults(source)
    write_model_index(folder, pipeline, components, call_defaults=defaults, **options)
    for name, (_, class_name) in listed.items():
        own = folder / name
        if name in reading.given:
            continue
        if not (source / name).is_dir():
            raise ValueError(f"there is no folder {source / name}, which model_index.json names")
        own.mkdir()
        for file in (source / name).iterdir():
            if file.suffix in (".json", ".txt", ".jinja") and file.is_file():
                shutil.copyfile(file, own / file.name)
        if name in _NAMES:
            _check_there(contents, name)
            _add_network(own, contents, name, load_json(source / name / "config.json"), reading)
        if class_name.endswith("Scheduler") and reading.prediction_type is not None:
            file = own / "scheduler_config.json"
            write_json(file, {**load_json(file), "prediction_type": reading.prediction_type})


def _check_there(contents: Contents, name: str) -> None:
    if name not in contents.parts:
        raise ValueError(f"{contents.path} does not hold {_NAMES[name]}; give {name}=")


def _prediction_type(contents: Contents, reading: Reading) -> str | None:
    """Returns what the UNet predicts; None for a family of which nearly all predict the noise."""
    unet = contents.parts["unet"]
    found = reading.prediction_type or contents.prediction_type
    if found is None and unet.family == "sd2" and unet.in_channels != 9:
        raise ValueError(
            f"{contents.path} holds Stable Diffusion 2, but does not say what its UNet predicts: "
            "pass prediction_type='v_prediction' for a model of 768 pixels (2.0, 2.1), "
            "prediction_type='epsilon' for one of 512 pixels (2.0-base, 2.1-base); for commands, "
            f"convert it first with `diffusax convert {contents.path.name} FOLDER "
            "--prediction-type v_prediction`"
        )
    return found


def _levels(contents: Contents) -> tuple[float, float] | None:
    """Returns sigma_min and sigma_max, where the file has continuous noise levels."""
    highest = _numbers(contents, "edm_vpred.sigma_max")
    lowest = _numbers(contents, "edm_vpred.sigma_min") or [0.002]
    return (lowest[0], highest[0]) if highest else None


def _numbers(contents: Contents, name: str) -> list[float] | None:
    """Returns the numbers in a small tensor; None where there is no such tensor."""
    entry = contents.entries.get(name)
    if entry is None or not entry.nbytes:
        return None
    view = TensorFile(contents.path).view(entry)
    return np.asarray(view, np.float64).ravel()[:16].tolist()
