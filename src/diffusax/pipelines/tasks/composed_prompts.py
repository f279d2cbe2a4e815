"""Prompts in A1111's syntax as parts of a run: texts that AND joins are branches of guidance, and
texts that change from step to step are conditions that follow each other.

Both are data of the compiled programs, but for the number of branches.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.pipelines.components.components import Components
from diffusax.pipelines.plan.arguments import Call, as_list
from diffusax.pipelines.plan.plan import Conditions, Later, Prompt
from diffusax.pipelines.tasks.prompts import count_tokens, embed_prompts
from diffusax.pipelines.tasks.setup import Setup
from diffusax.text.prompt_schedules import schedule, split_parts, text_at

_Texts = tuple[tuple[str, ...], ...]
_SYNTAX = re.compile(r"AND|[\[:]|\s\Z")
"""What a text has that is not the same at all rows, or is read as something else than text."""


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Rows of a run that have the same texts."""

    row: int
    """The first of them."""
    parts: _Texts
    """The texts of each of m parts, for n prompts."""
    negative: tuple[str, ...] | None
    """The negative prompts; None where the call has none."""

    def calls(self, call: Call) -> list[Call]:
        """Returns a call for each part, the negative prompts in the first."""
        negative = None if self.negative is None else list(self.negative)
        return [
            dataclasses.replace(call, prompt=list(texts), negative_prompt=negative)
            for texts in self.parts
        ]


@dataclasses.dataclass(frozen=True)
class Composition:
    """The texts of a call, and what they count for."""

    weights: tuple[float, ...]
    """The weights of m parts."""
    stretches: tuple[Stretch, ...]

    @property
    def is_plain(self) -> bool:
        """Whether one prompt has the whole weight."""
        return self.weights == (1.0,)

    def guidance(self, scale: float) -> tuple[float, ...]:
        """Returns the weights of guidance over the m parts and the negative prompt, see `guidance`.

        The guided prediction is u + scale * sum_i w_i (c_i - u) for predictions c_i of the parts
        and u of the negative prompt (stable-diffusion-webui, modules/sd_samplers_cfg_denoiser.py,
        combine_denoised; Liu et al. 2022).
        """
        return (*(-scale * w for w in self.weights[1:]), scale * sum(self.weights) - 1.0)


def compose(c: Components, call: Call, rows: int) -> Composition | None:
    """Returns what a call's prompts are at each row; None where they are not in A1111's syntax.

    rows: the number of rows of the run.

    Raises:
        ValueError: the prompts of a call are joined of parts with different weights.
    """
    if not call.prompt_weighting or call.prompt is None:
        return None
    texts = [*as_list(call.prompt), *as_list(call.negative_prompt or "")]
    if not any(map(_SYNTAX.search, texts)):
        return None
    prompts = [split_parts(text) for text in as_list(call.prompt)]
    weights = {tuple(part.weight for part in parts) for parts in prompts}
    if len(weights) > 1:
        raise ValueError(
            "prompt has prompts that AND joins of parts with different numbers or weights; "
            "generate them in calls of their own"
        )
    steps = _steps(call) * c.scheduler.order
    spans = [[schedule(part.text, steps) for part in parts] for parts in prompts]
    given = call.negative_prompt
    negatives = None if given is None else [schedule(text, steps) for text in as_list(given)]
    found: list[Stretch] = []
    for row in range(max(rows, 1)):
        parts = tuple(tuple(text_at(s, row) for s in part) for part in zip(*spans))
        negative = None if negatives is None else tuple(text_at(s, row) for s in negatives)
        if not found or (found[-1].parts, found[-1].negative) != (parts, negative):
            found.append(Stretch(row, parts, negative))
    return Composition(weights.pop(), tuple(found))


def embed_composition(setup: Setup, composition: Composition, branches: int) -> list[Prompt]:
    """Returns the embeddings of each stretch, b k ...; all have as many tokens.

    branches: k, the parts and one for the negative prompt; 1 for the prompt alone.
    """
    c, call = setup.c, setup.call
    stretches = composition.stretches
    calls = [stretch.calls(call) for stretch in stretches]
    several = len(stretches) > 1 or branches > 2
    if several and c.encoded is not None:
        raise ValueError(
            "prompt has AND or text that changes from step to step, of which encode_first has not "
            "encoded the parts; load the pipeline without it"
        )
    counts = (count_tokens(c, one, setup.prompts) for parts in calls for one in parts)
    length = max(counts) if several else None
    made: dict[Any, Prompt] = {}
    for stretch, parts in zip(stretches, calls):
        key = stretch.parts, stretch.negative
        if key not in made:
            made[key] = _embedded(setup, parts, branches, length)
    return [made[stretch.parts, stretch.negative] for stretch in stretches]


def later_conditions(
    composition: Composition, conditions: Sequence[Conditions]
) -> tuple[Later, ...]:
    """Returns what replaces a run's conditions, and from which rows on."""
    pairs = zip(composition.stretches[1:], conditions[1:])
    return tuple(Later(stretch.row, own) for stretch, own in pairs)


def with_equal_sizes(conditions: Conditions, parts: int) -> Conditions:
    """Returns conditions in which all parts of a prompt have the first's micro-conditioning.

    parts: how many of the branches are parts; the others are those of the negative prompt.
    """
    ids = (conditions.added or {}).get("time_ids")
    if ids is None:
        return conditions
    equal = np.array(ids)
    equal[:, 1:parts] = equal[:, :1]
    return conditions._replace(added={**(conditions.added or {}), "time_ids": equal})


def _embedded(setup: Setup, calls: Sequence[Call], branches: int, length: int | None) -> Prompt:
    """Returns the embeddings of the parts of a prompt and of its negative prompt, b k ... ."""

    def embed(call: Call, branches: int) -> Prompt:
        own: dict[str, Any] = {"adapters": setup.adapters, "length": length}
        return embed_prompts(setup.c, call, setup.prompts, branches=branches, **own)

    if len(calls) == 1:
        return embed(calls[0], branches)
    first, *others = (embed(one, 1 if i else 2) for i, one in enumerate(calls))
    joined: Prompt = _join(first, tuple(others))
    return joined


@jax.jit
def _join(first: Prompt, others: tuple[Prompt, ...]) -> Prompt:
    """Puts the branches of other parts between those of the first part and the negative prompt."""
    return jax.tree.map(
        lambda x, *more: jnp.concatenate([x[:, :1], *more, x[:, 1:]], axis=1), first, *others
    )


def _steps(call: Call) -> int:
    given = call.timesteps or call.sigmas
    return (call.num_inference_steps if given is None else len(given)) or 1
