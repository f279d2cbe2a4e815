"""`python -m diffusax`."""

from diffusax.cli import main

main()
