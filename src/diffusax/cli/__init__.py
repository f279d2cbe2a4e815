"""The command line, one file per command."""

from diffusax.cli.console import main

__all__ = ["main"]
