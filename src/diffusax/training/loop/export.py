"""Writes results of a run as folders that diffusers opens: the model, and averages made later."""

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import numpy as np
import yaml
from jax.experimental import multihost_utils

from diffusax._version import __version__
from diffusax.checkpoints.publishing import create_repository, upload_folder
from diffusax.models.network import Params
from diffusax.runtime.devices.mesh import to_host
from diffusax.training.config import TrainConfig
from diffusax.training.ema.posthoc import (
    MAX_ERROR,
    LateAverage,
    PowerFunction,
    Stored,
    Wanted,
    solve,
)
from diffusax.training.ema.snapshots import AVERAGES, Snapshot, combine, read_snapshots
from diffusax.training.options import read_config, to_yaml
from diffusax.training.recipes.recipe import Recipe
from diffusax.training.step.step import TrainState

log = logging.getLogger(__name__)

CONFIG = "config.yaml"
"""The name of the file with a run's options in its folder."""

_CARD = """---
{front}---

# {title}

Trained with diffusax {version}, recipe `{recipe}`{base}, for
{steps} steps of {batch_size} examples on `{data}`.{average}

{usage}
## Options of the run

```yaml
{options}```
"""

_USAGE = """```python
import diffusax

pipe = diffusax.DiffusionPipeline.from_pretrained("{location}")
pipe({call}).images[0].save("picture.png")
```

PyTorch diffusers opens the same folder.
"""

_LORA_USAGE = """The adapters go beside the model that they were trained on:

```python
import diffusax

pipe = diffusax.DiffusionPipeline.from_pretrained("{base}")
pipe.load_lora_weights("{location}")
pipe({call}).images[0].save("picture.png")
```

PyTorch diffusers loads them by the same method.
"""

_CONTROLNET_LORA_USAGE = """The adapters go beside the ControlNet that they were trained on:

```python
import diffusax

controlnet = diffusax.ControlNetModel.from_pretrained("{controlnet}")
pipe = diffusax.AutoPipelineForText2Image.from_pretrained("{base}", controlnet=controlnet)
pipe.load_lora_weights("{location}")
pipe("a prompt", image="edges.png").images[0].save("picture.png")
```

PyTorch diffusers has no loader for adapters of a ControlNet; PEFT's `set_peft_model_state_dict`
puts them into one.
"""

_CALLS = {
    "text-to-image": '"a prompt"',
    "image-to-image": '"make it snowy", image="photo.png"',
    "unconditional-image-generation": "",
}
"""The example call of a card, by the model's pipeline_tag."""


def export(
    recipe: Recipe, config: TrainConfig, *, steps: int, params: Params, ema: Params | None
) -> list[Path]:
    """Writes `model`, and `model_ema` where there is an average; only the first process writes.

    With push_to_hub it uploads the average, or the model where there is none.
    """
    if jax.process_index():
        return []
    folders = result_folders(config, averaged=ema is not None)
    for folder, saved in zip(folders, [params, ema]):
        recipe.save(saved, folder)
    for folder in folders:
        address = config.push_to_hub if folder == folders[-1] else None
        average = config.ema.rule if folder != folders[0] else None
        write_model_card(folder, recipe, config, steps=steps, address=address, average=average)
    if config.push_to_hub:
        push_to_hub(folders[-1], config.push_to_hub)
    return folders


def result_folders(config: TrainConfig, *, averaged: bool) -> list[Path]:
    """Returns the folders of the model, and of its average if there is one."""
    names = ("model", "model_ema") if averaged else ("model",)
    return [Path(config.output) / name for name in names]


def write_model_card(
    folder: Path,
    recipe: Recipe,
    config: TrainConfig,
    *,
    steps: int,
    address: str | None = None,
    average: str | None = None,
) -> None:
    """Writes README.md: what the model is, and from which model, data and options it was made.

    Args:
        folder: the folder of the model.
        recipe: the recipe of the run.
        config: the options of the run.
        steps: the number of steps that the model was trained for.
        address: the Hub repository that the model is uploaded to.
        average: the words for how its parameters are averaged.
    """
    title = address or f"{Path(config.output).resolve().name}, {folder.name}"
    front = {"library_name": "diffusers", "tags": [recipe.name, "diffusax"], **recipe.card()}
    own_usage = front.pop("usage", None)
    if config.trains_adapters:
        front["tags"] = [*front["tags"], "lora"]
    base, location = front.get("base_model"), str(address or folder.resolve())
    card = _CARD.format(
        front=yaml.safe_dump(front, sort_keys=False),
        title=title,
        version=__version__,
        recipe=recipe.name,
        base=f" from `{base}`" if base else "",
        steps=steps,
        batch_size=config.batch_size,
        data=config.data_path,
        average=f" The parameters are averaged ({average})." if average else "",
        usage=own_usage.replace("{location}", location)
        if own_usage
        else _usage(front, config, location),
        options=to_yaml(config),
    )
    (folder / "README.md").write_text(card, "utf-8")


def _usage(front: dict[str, Any], config: TrainConfig, location: str) -> str:
    call = _CALLS.get(front.get("pipeline_tag", ""))
    if call is None:
        return ""
    if prompt := front.get("instance_prompt"):
        call = json.dumps(prompt, ensure_ascii=False)
    if not config.trains_adapters:
        return _USAGE.format(location=location, call=call)
    controlnet = getattr(config, "controlnet", "")
    form = _CONTROLNET_LORA_USAGE if controlnet else _LORA_USAGE
    base = front.get("base_model")
    return form.format(location=location, call=call, base=base, controlnet=controlnet)


def push_to_hub(folder: Path, repo: str) -> None:
    """Uploads the folder as a model, with the stored login or HF_TOKEN.

    Raises:
        ValueError: the Hub refuses; says why.
    """
    api = huggingface_hub.HfApi()
    upload_folder(api, create_repository(api, repo), folder)


def leave_finished(recipe: Recipe, config: TrainConfig, step: int, state: TrainState) -> TrainState:
    """Leaves a run that has done its steps as it is, and returns its state.

    Only a missing result is written, with the options that the run had.
    """
    folders = result_folders(config, averaged=state.ema is not None)
    # The card of each is written last.
    missing = _agreed(not all((folder / "README.md").is_file() for folder in folders))
    done = "; its result was missing and is written now" if missing else ", and stays as it is"
    log.info("the run in %s is finished at step %d%s", config.output, step, done)
    if missing:
        export(recipe, _own_options(config), steps=step, **results(state))
    elif config.push_to_hub and jax.process_index() == 0:
        push_to_hub(folders[-1], config.push_to_hub)
    return state


def results(state: TrainState) -> dict[str, Params | None]:
    """Returns the parameters and their average on the host; all processes must call it."""
    ema = None if state.ema is None else to_host(state.ema.params)
    return {"params": to_host(state.params), "ema": ema}


def _own_options(config: TrainConfig) -> TrainConfig:
    """Reads the options in the run's folder; returns the given ones where they cannot be read."""
    try:
        own = read_config(type(config), Path(config.output) / CONFIG)
    except ValueError:
        return config
    return dataclasses.replace(own, output=config.output, push_to_hub=config.push_to_hub)


def _agreed(value: bool) -> bool:
    """Returns the first process's value."""
    if jax.process_count() == 1:
        return value
    return bool(multihost_utils.broadcast_one_to_all(np.int32(value)))


def make_average(
    recipe: Recipe,
    config: TrainConfig,
    folder: Path,
    *,
    length: float | None = None,
    start: int | float | None = None,
    decay: float | None = None,
    step: int | None = None,
) -> float:
    """Writes the model with another average of the parameters of the run in config.output.

    Give either `length` or `start`.

    Args:
        recipe: the recipe of the run.
        config: the options of the run.
        folder: the folder to write to.
        length: the sigma_rel of a power-function average.
        start: where a late average starts: the step, or a fraction of the steps up to its end.
        decay: the decay of the late average's weights into the past, by update; by default all
            weights are equal.
        step: the last step of the average, at which the run stored its averages; by default the
            last of those.

    Returns:
        The error of the profile, see `diffusax.training.ema.posthoc.Sum`.

    Raises:
        ValueError: the run stored no averages, or none at this step; or the error of the average
            would be more than a tenth.
    """
    snapshots = read_snapshots(Path(config.output) / AVERAGES)
    step = _last_step(snapshots, step)
    snapshots = [snapshot for snapshot in snapshots if snapshot.step <= step]
    last = snapshots[-1]
    wanted: Wanted
    if length is not None:
        wanted, what = PowerFunction(length), f"length {length:g}"
    elif start is not None:
        wanted, what = _late(last, start, decay), f"late from {start:g}"
    else:
        raise ValueError("either length or start must be given")
    stored = [Stored(snapshot.length, snapshot.updates) for snapshot in snapshots]
    weights, error = solve(stored, wanted, last.updates)
    if error > MAX_ERROR:
        raise ValueError(
            f"the average ({what}, up to step {step}) cannot be made of those stored: the nearest "
            f"differs by {error:.0%}, and {MAX_ERROR:.0%} is the most; start it at one of the "
            f"steps {_steps(snapshots)}, or train with a smaller ema.snapshot_every"
        )
    recipe.save(combine(snapshots, weights, recipe.shapes()), folder)
    write_model_card(folder, recipe, config, steps=step, average=f"{what}, made after the run")
    return error


def _last_step(snapshots: Sequence[Snapshot], step: int | None) -> int:
    if step is None:
        return snapshots[-1].step
    if all(snapshot.step != step for snapshot in snapshots):
        raise ValueError(f"step={step} has no stored averages; use one of {_steps(snapshots)}")
    return step


def _late(last: Snapshot, start: int | float, decay: float | None) -> LateAverage:
    """Returns the late average in updates; steps that were skipped are spread evenly."""
    step = start if isinstance(start, int) else round(start * last.step)
    if not last.start <= step < last.step:
        raise ValueError(
            f"start={start} must be from {last.start}, where averaging began, to before "
            f"{last.step}, where it ends; a whole number is a step, a number with a point a "
            "fraction"
        )
    share = (step - last.start) / (last.step - last.start)
    return LateAverage(min(round(share * last.updates), last.updates - 1), decay)


def _steps(snapshots: Sequence[Snapshot]) -> str:
    """Lists the steps of snapshots, or the last few of them, as text."""
    steps = sorted({snapshot.step for snapshot in snapshots})
    few = ", ".join(map(str, steps[-10:]))
    return few if len(steps) <= 10 else f"..., {few}"
