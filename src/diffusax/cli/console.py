"""The entry point of `diffusax` and `python -m diffusax`: commands, warnings, exit codes."""

import gc
import importlib
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
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


PAGES_OF_LINUX = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_LARGE_PAGES = "glibc.malloc.hugetlb"


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command that the arguments name, by default those of the process.

    A mistake ends with a message on stderr and exit code 2, Ctrl-C with 130, and a pipe that its
    reader has closed with 141 and no message.
    """
    if args is None and sys.argv[1:2] == ["train"]:
        restart_with_large_pages()
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


def restart_with_large_pages() -> None:
    """Starts this process again with memory in large pages, where Linux and glibc have them.

    On CPUs XLA asks for the memory of a training step in each step, and so Linux maps all of its
    pages in each, which takes as long as a quarter of the step if they are small. glibc reads the
    variable when a process starts; one that says something of large pages stays.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if _LARGE_PAGES in tunables or not sys.executable or not has_large_pages():
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, f"{_LARGE_PAGES}=1")))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def has_large_pages() -> bool:
    """Returns whether Linux gives large pages to a program that asks, and glibc can ask."""
    name, version = platform.libc_ver()
    try:
        choices = PAGES_OF_LINUX.read_text("ascii")
    except OSError:
        return False
    return (
        name == "glibc"
        and tuple(map(int, version.split("."))) >= (2, 35)
        and "[never]" not in choices
    )


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
