"""Writes the result of a run: folders that diffusers opens, with a model card."""

import dataclasses
import json
import logging
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
from diffusax.training.options import read_config, to_yaml
from diffusax.training.recipes.recipe import Recipe
from diffusax.training.step.step import TrainState

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
        folder: the folder to write to.
        recipe: the recipe of the run.
        config: the options of the run.
        steps: the number of steps that the model was trained for.
        address: the Hub repository that it is uploaded to.
        average: how its parameters are averaged, in words.
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
    """Returns the part of a card that says how to use the model."""
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


def create_on_hub(repo: str) -> None:
    """Creates the repository unless it exists, so that a mistake shows before the training.

    Raises:
        ValueError: the Hub refuses; says why.
    """
    create_repository(huggingface_hub.HfApi(), repo)


def push_to_hub(folder: Path, repo: str) -> None:
    """Uploads the folder as a model, with the stored login or HF_TOKEN.

    Raises:
        ValueError: the Hub refuses; says why.
    """
    api = huggingface_hub.HfApi()
    upload_folder(api, create_repository(api, repo), folder)


log = logging.getLogger(__name__)

CONFIG = "config.yaml"
"""The name of the file with a run's options in its folder."""


def leave_finished(recipe: Recipe, config: TrainConfig, step: int, state: TrainState) -> TrainState:
    """Logs that the run has done its steps, and returns its state.

    Nothing in its folder changes, except that a missing result is written, with the options that
    the run had.

    Args:
        recipe: the recipe of the run.
        config: the options of this start.
        step: the step that the run has reached.
        state: the state at that step.
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
