"""Samplers by their names in stable-diffusion-webui, for the server's clients."""

from diffusax.infotext import samplers
from diffusax.infotext.samplers import SCHEDULES, WEBUI_SAMPLERS, to_webui
from diffusax.serving.drawings.errors import NotFound, Refused

__all__ = ["SCHEDULES", "WEBUI_SAMPLERS", "from_webui", "to_webui"]


def from_webui(sampler: str, schedule: str | None = None) -> str:
    """Returns the name of a sampler here, see `diffusax.infotext.samplers.from_webui`.

    Raises:
        NotFound: there is no such sampler.
        Refused: it has no such schedule type.
    """
    try:
        return samplers.from_webui(sampler, schedule)
    except samplers.UnknownSampler as error:
        raise NotFound(str(error), param="sampler") from None
    except samplers.UnknownSchedule as error:
        raise Refused(str(error), param="scheduler") from None
