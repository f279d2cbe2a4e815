"""Writes what an exported pipeline needs besides its programs: parameters, inputs, a script."""

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from diffusax.boundary.files import written_whole
from diffusax.checkpoints.tensors import write_tensors
from diffusax.models.parameter_tree import ordered_leaves, path_name
from diffusax.networks import load_network
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.families.family import Family
from diffusax.pipelines.plan.arguments import Call
from diffusax.pipelines.tasks.tasks import Task
from diffusax.runtime.programs.exporting import flat_arguments
from diffusax.runtime.programs.program import Request


def parameter_files(c: Components, request: Request) -> dict[str, str]:
    """Returns the files of a program's parameters, by the prefix of their arguments' names."""
    static = dict(request.static)
    if "denoiser" in static:
        given = request.dynamic[request.program.dynamic.index("params")]
        return {f"params.{name}.": f"{name}.safetensors" for name in given}
    if "encoders" in static:
        names = (name for _, _, name in c.text_encoders)
        return {f"params.{i}.": f"{name}.safetensors" for i, name in enumerate(names)}
    return {"params.": f"{c.autoencoder_name}.safetensors"} if c.autoencoder_name else {}


def write_parameters(
    checkpoint: Path, family: Family, components: Sequence[str], folder: Path, *, dtype: Any
) -> Iterator[Path]:
    """Writes the parameters of a checkpoint's networks one by one, and yields the paths.

    The networks are those of a family's pipelines. Kernels have the layout of the programs, not of
    the checkpoint.

    Raises:
        ValueError: a component cannot be read; says which and why.
    """
    for name in components:
        changes = family.changes(name)
        params = load_network(checkpoint / name, dtype=dtype, changes=changes).params
        path = folder / f"{name}.safetensors"
        leaves = ordered_leaves(params)
        write_tensors(path, {path_name(key): np.asarray(leaf) for key, leaf in leaves})
        yield path


def reads_plain_texts(c: Components) -> bool:
    """Returns whether `write_example` can: whether all texts are CLIP's, without a chat or T5's."""
    return all(hasattr(tokenizer, "windows") for tokenizer in c.tokenizers.values())


def write_example(
    c: Components, task: Task, call: Call, denoise: Request, folder: Path
) -> list[Path]:
    """Writes draw.py, and the files that it reads besides programs and parameters.

    Args:
        c: the components of the pipeline; the parameters may be shapes.
        task: text to image.
        call: the call that draw.py repeats with any prompt; its own prompts are not used.
        denoise: the request of the program of that name for a call like this.
        folder: the folder for the files.
    """
    plan = denoise.dynamic[denoise.program.dynamic.index("plan")]
    run = task(c, _embedded(call, plan.conditions))
    rows = np.int32(0), np.int32(len(run.schedule))
    inputs = flat_arguments(denoise, ({}, np.zeros(0, np.float32), run.plan, *rows))
    computed = ("state", "plan.conditions.context", "plan.conditions.pooled")
    tensors = {name: np.asarray(x) for name, x in inputs.items() if name not in computed}
    tensors["init_noise_sigma"] = np.array(run.schedule.init_noise_sigma, np.float32)
    write_tensors(folder / "inputs.safetensors", tensors)
    files = [folder / "inputs.safetensors"]
    for number, (tokenizer, _, _) in enumerate(c.text_encoders):
        files.append(folder / f"tokenizer_{number}.json")
        _write_tokenizer(tokenizer, files[-1])
    shutil.copyfile(Path(__file__).with_name("draw_exported.py"), folder / "draw.py")
    return [*files, folder / "draw.py"]


def _embedded(call: Call, conditions: Any) -> Call:
    """Returns the call with zeros for embeddings, which need no text encoder."""

    def zeros(shape: Any) -> np.ndarray:
        return np.zeros((1, *shape.shape[2:]), np.float32)

    changes: dict[str, Any] = {"prompt": None, "negative_prompt": None}
    for prefix in ("", "negative_"):
        changes[f"{prefix}prompt_embeds"] = zeros(conditions.context)
        if conditions.pooled is not None:
            changes[f"{prefix}pooled_prompt_embeds"] = zeros(conditions.pooled)
    return dataclasses.replace(call, **changes)


def _write_tokenizer(tokenizer: Any, path: Path) -> None:
    """Writes the tokenizer with its padding and truncation as a tokenizer.json."""
    whole = Tokenizer.from_str(tokenizer.tokenizer.to_str())
    length = tokenizer.model_max_length
    whole.enable_truncation(length)
    pad = {"pad_id": tokenizer.pad_token_id, "pad_token": tokenizer.pad_token}
    whole.enable_padding(length=length, **pad)
    with written_whole(path) as partial:
        partial.write_text(whole.to_str(), "utf-8")
