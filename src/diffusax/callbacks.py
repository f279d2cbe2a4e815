"""Callbacks for `callback_on_step_end`, under the names of `diffusers.callbacks`."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar


@dataclasses.dataclass(frozen=True)
class CallbackConfig:
    """When a callback acts: at a fraction of the steps, or at a step."""

    cutoff_step_ratio: float | None
    cutoff_step_index: int | None


class PipelineCallback:
    """A callback that names the tensors it needs; inherit from it to write one.

    Subclasses set `tensor_inputs`, the names of the tensors, and define
    `callback_fn(pipeline, step_index, timestep, callback_kwargs)`, which returns the tensors.
    """

    tensor_inputs: ClassVar[Sequence[str]]
    callback_fn: Any

    def __init__(self, cutoff_step_ratio: float | None = 1.0, cutoff_step_index: int | None = None):
        """Sets `config`, which says at which step the callback acts.

        Args:
            cutoff_step_ratio: the fraction of the steps, from 0.0 to 1.0, or None.
            cutoff_step_index: the step, counted from 0, instead of the fraction.

        Raises:
            ValueError: both or neither are given, or the fraction is not in [0, 1].
        """
        if (cutoff_step_ratio is None) == (cutoff_step_index is None):
            raise ValueError(
                "give either cutoff_step_ratio, or cutoff_step_index with cutoff_step_ratio=None "
                f"(got {cutoff_step_ratio} and {cutoff_step_index})"
            )
        if cutoff_step_ratio is not None and not (
            isinstance(cutoff_step_ratio, float) and 0 <= cutoff_step_ratio <= 1
        ):
            raise ValueError(
                f"cutoff_step_ratio must be a float from 0.0 to 1.0 (got {cutoff_step_ratio!r})"
            )
        self.config = CallbackConfig(cutoff_step_ratio, cutoff_step_index)

    def cutoff_step(self, pipeline: Any) -> int:
        """Returns the step after which the callback acts, in the run that `pipeline` is doing."""
        ratio, index = self.config.cutoff_step_ratio, self.config.cutoff_step_index
        return int(pipeline.num_timesteps * ratio) if index is None else index

    def __call__(
        self, pipeline: Any, step_index: int, timestep: Any, callback_kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Calls `callback_fn` and returns its result."""
        return self.callback_fn(pipeline, step_index, timestep, callback_kwargs)


class MultiPipelineCallbacks:
    """Several callbacks in the place of one, which are called in their order."""

    def __init__(self, callbacks: Sequence[PipelineCallback]):
        self.callbacks = list(callbacks)

    @property
    def tensor_inputs(self) -> list[str]:
        """The names of the tensors that any of the callbacks needs."""
        return list(dict.fromkeys(name for one in self.callbacks for name in one.tensor_inputs))

    def __call__(
        self, pipeline: Any, step_index: int, timestep: Any, callback_kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Calls each callback with the result of the one before, and returns the last result."""
        for callback in self.callbacks:
            callback_kwargs = callback(pipeline, step_index, timestep, callback_kwargs)
        return callback_kwargs


class SDCFGCutoffCallback(PipelineCallback):
    """Turns guidance off after a step, for pipelines of Stable Diffusion."""

    tensor_inputs: ClassVar[Sequence[str]] = ("prompt_embeds",)

    def callback_fn(
        self, pipeline: Any, step_index: int, timestep: Any, callback_kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Sets the pipeline's `_guidance_scale` to 0 at the step; does not change the tensors."""
        if step_index == self.cutoff_step(pipeline):
            pipeline._guidance_scale = 0.0
        return callback_kwargs


class SDXLCFGCutoffCallback(SDCFGCutoffCallback):
    """Turns guidance off after a step, for pipelines of SDXL."""

    tensor_inputs = ("prompt_embeds", "add_text_embeds", "add_time_ids")


class SDXLControlnetCFGCutoffCallback(SDCFGCutoffCallback):
    """Turns guidance off after a step, for ControlNet pipelines of SDXL."""

    tensor_inputs = ("prompt_embeds", "add_text_embeds", "add_time_ids", "image")
