"""Many prompts to many pictures, on as many machines as there are."""

from diffusax.offline.requests import Settings
from diffusax.offline.run import Stopped, Summary, generate

__all__ = ["Settings", "Stopped", "Summary", "generate"]
