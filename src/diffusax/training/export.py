"""The end of a run: folders that diffusers opens, with a model card."""

import os
from pathlib import Path

import huggingface_hub
import jax
import yaml

import diffusax
from diffusax.checkpoints.hub import hub_errors
from diffusax.models.network import Params
from diffusax.training.config import TrainConfig
from diffusax.training.options import to_yaml
from diffusax.training.recipe import Recipe

_CARD = """---
{front}---

# {title}

Trained with [diffusax](https://pypi.org/project/diffusax/) {version}, recipe `{recipe}`{base}, for
{steps} steps of {batch_size} examples on `{data}`.{average}

{usage}
## Options of the run

```yaml
{options}```
"""

_USAGE = """```python
import diffusax

pipe = diffusax.DiffusionPipeline.from_pretrained("{title}")
pipe("a prompt").images[0].save("picture.png")
```

PyTorch diffusers opens the same folder.
"""


def export(
    recipe: Recipe, config: TrainConfig, *, params: Params, ema: Params | None
) -> list[Path]:
    """Writes `model`, and `model_ema` where there is an average; the first process does.

    With push_to_hub the average, or the model where there is none, is uploaded.
    """
    if jax.process_index():
        return []
    folders = []
    for name, tree in (("model", params), ("model_ema", ema)):
        if tree is not None:
            folder = Path(config.output) / name
            recipe.save(tree, folder)
            write_model_card(folder, recipe, config, averaged=name == "model_ema")
            folders.append(folder)
    if config.push_to_hub:
        push_to_hub(folders[-1], config.push_to_hub)
    return folders


def write_model_card(folder: Path, recipe: Recipe, config: TrainConfig, *, averaged: bool) -> None:
    """README.md: what the model is, from what, on what data, with which options."""
    title = config.push_to_hub or Path(config.output).resolve().name
    front = {"library_name": "diffusers", "tags": [recipe.name, "diffusax"], **recipe.info}
    if recipe.name == "text-to-image":
        front["pipeline_tag"] = recipe.name
    base = recipe.info.get("base_model")
    card = _CARD.format(
        front=yaml.safe_dump(front, sort_keys=False),
        title=title,
        version=diffusax.__version__,
        recipe=recipe.name,
        base=f" from `{base}`" if base else "",
        steps=config.steps,
        batch_size=config.batch_size,
        data=config.data,
        average=f" The parameters are averaged ({config.ema})." if averaged else "",
        usage=_USAGE.format(title=title) if recipe.name == "text-to-image" else "",
        options=to_yaml(config),
    )
    (folder / "README.md").write_text(card, "utf-8")


def push_to_hub(folder: Path, repo: str) -> None:
    """Uploads the folder as a model, with the stored login or HF_TOKEN.

    Raises:
        ValueError: the Hub refuses; says why.
    """
    with hub_errors(repo):
        api = huggingface_hub.HfApi(token=os.environ.get("HF_TOKEN"))
        api.create_repo(repo, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder)
