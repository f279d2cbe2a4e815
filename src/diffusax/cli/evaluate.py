"""`diffusax evaluate TASK`."""

import importlib
from typing import Any

from diffusax.cli.parsing import choose

TASKS = {
    "instruct-pix2pix": "Measure how much edits keep of their pictures and how well they follow "
    "their captions, over image guidance scales.",
    "text-to-image": "Measure how well pictures fit their captions, and how far they are from "
    "reference pictures.",
}


def command(args: list[str]) -> Any:
    """What the arguments ask for."""
    description = "Measure how good a model is."
    return choose(TASKS, args, _load, prog="diffusax evaluate", description=description)


def _load(name: str, args: list[str]) -> Any:
    module = importlib.import_module(f"diffusax.cli.evaluate_{name.replace('-', '_')}")
    return module.command(args)
