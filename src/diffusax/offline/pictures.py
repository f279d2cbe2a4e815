"""Images of a run over many prompts, checked before any of them is generated."""

import dataclasses
from typing import Any

from diffusax.pipelines import guidance
from diffusax.pipelines.adapter_store import call_adapters
from diffusax.pipelines.adapters import RANKS, stack_shapes
from diffusax.pipelines.arguments import Call
from diffusax.pipelines.components import Components
from diffusax.pipelines.composed_prompts import compose
from diffusax.pipelines.entries import table_height
from diffusax.pipelines.schedules import make_schedule
from diffusax.pipelines.sizes import image_size, require_channels
from diffusax.pipelines.tasks import guidance_weights
from diffusax.samplers import Schedule


@dataclasses.dataclass(frozen=True)
class Picture:
    """A checked image to generate from a prompt."""

    call: Call
    """A call with one prompt and one seed."""
    scheduler: Any
    schedule: Schedule
    """The rows of its sampler."""
    kind: tuple[Any, ...]
    """The key that all images of a batch have in common; it begins with height and width."""
    branches: int
    """The lanes that it needs at first."""
    guided_until: int
    """The row from which on it needs one lane."""
    adapters: tuple[str, ...] = ()
    """The adapters that lie side by side in its batch; their order decides bits."""
    number: int = 0
    """The index of the image; image i of a seed is the same as that of a pipeline's call."""

    @property
    def rows(self) -> int:
        """The number of rows of its run."""
        return len(self.schedule)


def check_picture(c: Components, call: Call, scheduler: Any, number: int = 0) -> Picture:
    """Checks the arguments of a call for one image with this sampler, and makes its schedule.

    Raises:
        ValueError: an argument is not valid; says which, and what is.
    """
    c = dataclasses.replace(c, scheduler=scheduler)
    size = image_size(c, call)
    require_channels(c, c.latents.channels, "text to image")
    if call.noise != "jax":
        raise ValueError(f"noise must be 'jax' in a batch of several seeds (got {call.noise!r})")
    if not isinstance(call.seed, int) or not 0 <= call.seed < 2**32:
        raise ValueError(f"seed must be an integer from 0 to {2**32 - 1} (got {call.seed})")
    schedule = make_schedule(c, call, size)
    texts = compose(c, call, schedule)
    if texts is not None and not (texts.is_plain and len(texts.stretches) == 1):
        raise ValueError(
            "prompt has AND, a weight of its own or text that changes from step to step, which "
            "runs over many prompts do not read; leave prompt_weighting out, or generate it alone"
        )
    rows, weights = len(schedule), guidance_weights(c, call)
    until = guidance.last_guided_row(guidance.call_rows(call, weights, schedule.timesteps, rows))
    thresholds = schedule.table().threshold is not None
    key = None if c.family.batch_key is None else c.family.batch_key(c, call)
    adapters = stacked_adapters(c, call)
    kind = (*size, key, table_height(rows), thresholds, adapters)
    branches = len(weights) + 1 if until else 1
    return Picture(call, scheduler, schedule, kind, branches, until, adapters, number)


def stacked_adapters(c: Components, call: Call) -> tuple[str, ...]:
    """Returns the names of the adapters that lie beside each other in the batch of an image.

    They are all of the pipeline, so that images with any of them share a batch, or those of the
    image where all would be more than a stack of the largest bucket.
    """
    networks = {name: c.networks[name] for name in c.denoiser.components}
    adapters = call_adapters(c, call, 1)
    if adapters is None:
        return ()
    all_names = [name for name, one in c.adapters.adapters.items() if one.names_in(networks)]
    shapes = stack_shapes([c.adapters.adapters[name] for name in all_names], networks)
    if all(shape.rank <= RANKS[-1] for shape in shapes.values()):
        return tuple(all_names)
    return tuple(name for name in all_names if c.adapters.adapters[name] in adapters.order)
