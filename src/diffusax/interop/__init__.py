"""Other libraries' interfaces over diffusax's own programs."""
