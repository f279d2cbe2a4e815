"""Which pipeline classes the installed diffusers has, by what their calls take and return."""

import importlib.util
import inspect
import re
from typing import Any

import diffusers

# Arguments that say what is to be drawn, and pictures that a call can begin with.
WORDS = ("prompt", "class_labels", "task_prompt", "editing_prompt", "image_embeds")
PICTURES = ("image", "input_images", "original_image", "reference_image", "images")
# Classes that load others, which are called instead.
BASES = ("DiffusionPipeline", "VersatileDiffusionPipeline")


def all_pipelines() -> dict[str, Any]:
    """Every pipeline class of diffusers' top level that the installed packages let one import.

    Modular pipelines, which are made of blocks, and bases of other classes are left out.
    """
    found = {}
    for name in sorted(dir(diffusers)):
        # With onnxruntime, diffusers names classes that it no longer has.
        value = getattr(diffusers, name, None)
        if inspect.isclass(value) and issubclass(value, diffusers.DiffusionPipeline):
            found[name] = value
    return {
        name: value
        for name, value in found.items()
        if name not in BASES and not issubclass(value, diffusers.ModularPipeline)
    }


def missing_pipelines() -> dict[str, str]:
    """Pipeline classes that diffusers names and cannot import, and what that needs."""
    modules = {"opencv": "cv2", "onnx": "onnxruntime", "note_seq": "note_seq"}
    missing = {}
    for name in sorted(dir(diffusers)):
        value = getattr(diffusers, name, None)
        if "Pipeline" in name and ".dummy_" in getattr(value, "__module__", ""):
            backends = [modules.get(backend, backend) for backend in value._backends]
            lacking = [b for b in backends if importlib.util.find_spec(b) is None]
            missing[name] = f"needs {', '.join(lacking)}"
    return missing


def makes_images(pipeline_class: Any) -> bool:
    """Whether a call returns pictures: its source ends in an output with `images`."""
    source = inspect.getsource(pipeline_class.__call__)
    returned = re.findall(r"return \w*Output\(\s*(\w+)\s*=", source)
    takes = inspect.signature(pipeline_class.__call__).parameters
    return bool({"images", "image", "rgb"} & set(returned)) or (
        not returned and "num_images_per_prompt" in takes
    )


def all_image_pipelines() -> dict[str, str]:
    """Names of the classes that draw from words or pictures; each "text" or "image".

    Those are "image" whose call cannot be made without a picture, or takes one beside the words.
    """
    kinds = {}
    for name, value in all_pipelines().items():
        takes = inspect.signature(value.__call__).parameters
        pictured = any(argument in takes for argument in PICTURES)
        worded = any(argument in takes for argument in WORDS)
        if makes_images(value) and (pictured or worded):
            kinds[name] = "image" if pictured else "text"
    return kinds
