"""The entry point of `diffusax` and `python -m diffusax`: commands, warnings, exit codes."""

import gc
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from diffusax._version import __version__
from diffusax.boundary.messages import escaped, require_extra
from diffusax.cli.parsing import choose

COMMANDS = {
    "generate": "Generate images from a prompt, an image, a mask or control maps.",
    "edit": "Change an image as an instruction says (InstructPix2Pix).",
    "serve": "Serve images over HTTP: a page, jobs, and APIs that clients speak.",
    "info": "Show what a checkpoint holds, the devices, and the names of the samplers.",
    "compile": "Compile a model's programs ahead of time, here or for TPUs elsewhere.",
    "export": "Write a model's programs as StableHLO, for any platform.",
    "convert": "Make a text-to-image checkpoint into one of another task.",
    "download": "Download a data set of the Hub, or this machine's part of it.",
    "train": "Train a denoiser or an autoencoder.",
    "ema": "Make another average of a training run's parameters.",
    "cache-latents": "Encode a data set once, to train from faster.",
    "evaluate": "Measure how good a model is.",
}
# For each command, a package that its extra installs, and the extra.
EXTRAS = dict.fromkeys(("train", "ema", "cache-latents", "evaluate"), ("optax", "train"))
EXTRAS["serve"] = ("uvicorn", "serve")


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command that the arguments name, by default those of the process.

    A mistake ends with a message on stderr and exit code 2, Ctrl-C with 130, and a pipe that its
    reader has closed with 141 and no message.
    """
    args = sys.argv[1:] if args is None else list(args)
    # Imports and traces make many objects that stay; collecting garbage among them is slow.
    gc.set_threshold(100_000, 50, 100)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            _run(args)
            sys.stdout.flush()
        except KeyboardInterrupt:
            _end("interrupted", 130)
        except BrokenPipeError:
            # Writing the rest of the buffer would fail again when Python exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(141)
        except (ValueError, FloatingPointError, OSError, ImportError, MemoryError) as error:
            _end(f"error: {error or type(error).__name__}", 2)


def _run(args: list[str]) -> None:
    if args[:1] == ["--version"]:
        print(f"diffusax {__version__}")
        return
    description = "Run, edit with and train diffusion models. --version shows the version."
    choose(COMMANDS, args, _load, prog="diffusax", description=description).run()


def _load(name: str, args: list[str]) -> Any:
    """Imports a command's module only now, and reads its arguments."""
    if name in EXTRAS:
        require_extra(*EXTRAS[name])
    module = importlib.import_module(f"diffusax.cli.{name.replace('-', '_')}")
    return module.command(args)


def _end(message: str, code: int) -> NoReturn:
    print(f"diffusax: {escaped(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(code)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"diffusax: warning: {escaped(' '.join(str(message).split()))}", file=sys.stderr)
