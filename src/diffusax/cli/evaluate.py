"""`diffusax evaluate TASK`."""

import importlib
from typing import Any

from diffusax.cli.parsing import choose

TASKS = {
    "edits": "Measure how much edits keep of their images and how well they follow their "
    "instructions, or write them for the judges of GEdit-Bench and ImgEdit-Bench.",
    "text-to-image": "Measure how well images fit their captions, and how far they are from "
    "reference images, or write them for the judges of GenEval and DPG-Bench.",
    "instruct-pix2pix": "Measure edits over image guidance scales, as figure 8 of its paper does.",
}
LAYOUTS = {
    **dict.fromkeys(("gedit", "imgedit"), "edits"),
    **dict.fromkeys(("geneval", "dpg"), "text-to-image"),
}
"""The task to which each benchmark's layout belongs."""


def command(args: list[str]) -> Any:
    """Reads the task and its options from the arguments."""
    description = "Measure how good a model is."
    return choose(TASKS, args, _load, prog="diffusax evaluate", description=description)


def _load(name: str, args: list[str]) -> Any:
    edits = name != "text-to-image"
    _check_layout(name, args)
    args = _as_train(args, "--data" if edits else "--images")
    if edits:
        args = _model_first(args)
    module = importlib.import_module(f"diffusax.cli.evaluate_{name.replace('-', '_')}")
    return module.command(args)


def _check_layout(name: str, args: list[str]) -> None:
    """Raises ValueError for the layout of a benchmark of another task, whose command it names."""
    for arg, after in zip(args, [*args[1:], ""], strict=True):
        if not _is(arg, "--layout"):
            continue
        layout = arg.partition("=")[2] or after
        task = LAYOUTS.get(layout, name)
        if (task == "text-to-image") != (name == "text-to-image"):
            kind = "of prompts" if task == "text-to-image" else "of edits"
            raise ValueError(
                f"{layout} is a benchmark {kind}; use diffusax evaluate {task} --layout {layout}"
            )


def _as_train(args: list[str], data: str) -> list[str]:
    """Renames options of the data set from those of `diffusax train` to those of these commands.

    `diffusax train` calls them --data.path, --data.image-column and so on.
    """
    names = [
        arg.replace("--data.path", data, 1) if _is(arg, "--data.path") else arg for arg in args
    ]
    return [
        f"--{arg.removeprefix('--data.')}" if arg.startswith("--data.") else arg for arg in names
    ]


def _model_first(args: list[str]) -> list[str]:
    """Moves the model of --model DIR to the first argument, which means the same."""
    for i, arg in enumerate(args):
        if _is(arg, "--model"):
            _, equals, value = arg.partition("=")
            rest = args[:i] + args[i + (1 if equals else 2) :]
            return [*([value] if equals else args[i + 1 : i + 2]), *rest]
    return args


def _is(arg: str, name: str) -> bool:
    return arg.split("=")[0] == name
