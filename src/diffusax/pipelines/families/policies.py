"""Policies: how a family guides, starts from images, edits and inpaints.

They are where diffusers' pipelines differ. Tasks, training and serving call them, and ask nothing
else about what kind of family there is.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.images.conversion import Box, nearest
from diffusax.images.references import as_images, reference_image
from diffusax.pipelines.plan.guidance import above_one, weights_by_row
from diffusax.pipelines.plan.plan import Conditions, DecoderCondition


@dataclasses.dataclass(frozen=True)
class ClassifierFree:
    """Classifier-free guidance by guidance_scale (Ho and Salimans 2022).

    One branch is enough where the scale is an input of the network or was distilled into it.
    """

    weigh: Callable[[float], tuple[float, ...]] = above_one
    """A function (scale) -> the weights of guidance, empty for none; see `plan.guidance`."""

    argument: ClassVar[str] = "guidance_scale"
    """The argument of calls that is the scale."""

    @property
    def off(self) -> float:
        """A scale without guidance, 1 or 0."""
        return 0.0 if self.weigh(1.0) else 1.0

    def scale(self, call: Any) -> float:
        """Returns the scale of a call."""
        scale = getattr(call, self.argument)
        return 1.0 if scale is None else float(scale)

    def branches(self, components: Any) -> int:
        """Returns the most branches of an image. `is_distilled` is FLUX.2 klein's option."""
        distilled = components.denoiser.embeds_guidance or components.options.get("is_distilled")
        return 1 if distilled else 2

    def weights(self, components: Any, call: Any) -> tuple[float, ...]:
        """Returns the weights of guidance of a call, empty for none."""
        return self.weigh(self.scale(call)) if self.branches(components) > 1 else ()

    def by_row(
        self,
        components: Any,
        call: Any,
        weights: Sequence[float],
        timesteps: np.ndarray,
        padded: int,
    ) -> np.ndarray:
        """Returns the weights of guidance at each row, see `plan.guidance.weights_by_row`."""
        return weights_by_row(call, weights, timesteps, padded)

    def told(self, components: Any) -> tuple[str, ...]:
        """Returns the arguments that change nothing in a network without an input for them."""
        return ("guidance_scale",) if self.branches(components) == 1 else ()

    def check_rule(self, components: Any, weights: tuple[float, ...]) -> None:
        """Raises ValueError where a call's own rule of guidance has nothing to combine."""
        if components.denoiser.embeds_guidance:
            raise ValueError(
                "guide combines predictions with and without the prompt, and this network is given "
                "the guidance scale instead; leave it out"
            )

    def why_off(self, components: Any, call: Any) -> str:
        """Returns why a call is not guided."""
        if self.branches(components) == 1:
            return "this network needs no guidance, so that there is one prediction without any"
        return f"{self.argument}={self.scale(call):g} turns guidance off"


@dataclasses.dataclass(frozen=True)
class TwoBranches(ClassifierFree):
    """Classifier-free guidance by guidance_scale of all checkpoints, also of distilled ones."""

    def branches(self, components: Any) -> int:
        return 2


@dataclasses.dataclass(frozen=True)
class TrueCFG(ClassifierFree):
    """Classifier-free guidance by true_cfg_scale, where a negative prompt is given.

    It applies beside guidance_scale, which networks that were distilled from guided ones are told.
    """

    embeds: tuple[str, ...] = ("negative_prompt_embeds",)
    """The arguments that together replace a negative prompt."""

    argument = "true_cfg_scale"

    def scale(self, call: Any) -> float:
        return float(call.true_cfg_scale) if self._has_negative(call) else 1.0

    def _has_negative(self, call: Any) -> bool:
        embedded = all(getattr(call, name) is not None for name in self.embeds)
        return call.negative_prompt is not None or embedded

    def branches(self, components: Any) -> int:
        return 2

    def told(self, components: Any) -> tuple[str, ...]:
        return ("guidance_scale",)

    def check_rule(self, components: Any, weights: tuple[float, ...]) -> None:
        if not weights:
            raise ValueError(
                "guide combines predictions for the prompt and for a negative one; give "
                "negative_prompt and a true_cfg_scale above 1, or leave guide out"
            )

    def why_off(self, components: Any, call: Any) -> str:
        if call.true_cfg_scale > 1:
            return f"guidance needs negative_prompt, or {' and '.join(self.embeds)}"
        return f"true_cfg_scale={call.true_cfg_scale:g} turns guidance off"


@dataclasses.dataclass(frozen=True)
class EitherScale(TrueCFG):
    """Classifier-free guidance by true_cfg_scale, or by guidance_scale as in other families.

    No network is told the latter. Where it is given alone, a missing negative prompt is an empty
    one.
    """

    argument = "guidance_scale"

    def scale(self, call: Any) -> float:
        if self._is_named_otherwise(call):
            return float(call.guidance_scale)
        return super().scale(call)

    def told(self, components: Any) -> tuple[str, ...]:
        return ()

    def why_off(self, components: Any, call: Any) -> str:
        if self._is_named_otherwise(call):
            return f"guidance_scale={call.guidance_scale:g} turns guidance off"
        return super().why_off(components, call)

    def _is_named_otherwise(self, call: Any) -> bool:
        return call.guidance_scale is not None and "true_cfg_scale" not in call.named


@dataclasses.dataclass(frozen=True)
class KeepSize:
    """Images keep their size unless the call gives another."""

    def __call__(self, components: Any, call: Any, model_size: Callable[..., Any]) -> Any:
        """Returns the call with the height and width that its images are brought to.

        None leaves them their own. model_size: a function (components, call) -> the height and
        width of the call, by default the model's.
        """
        return call

    def keeping(self, height: int, width: int) -> dict[str, int]:
        """Returns the arguments of a call that leave an image of this size as large as it is."""
        return {}


@dataclasses.dataclass(frozen=True)
class ModelSize(KeepSize):
    """Images are brought to the size that the model was trained at, unless the call gives one."""

    def __call__(self, components: Any, call: Any, model_size: Callable[..., Any]) -> Any:
        height, width = model_size(components, call)
        return dataclasses.replace(call, height=height, width=width)

    def keeping(self, height: int, width: int) -> dict[str, int]:
        return {"height": height, "width": width}


@dataclasses.dataclass(frozen=True)
class WholeSteps:
    """A run from an image leaves out a step of which the strength gives only a part.

    Upstream: pipeline_stable_diffusion_img2img.py, get_timesteps.
    """

    def first_step(self, steps: int, strength: float) -> int:
        """Returns the step at which a run of so many begins; `steps` where none is left."""
        return steps - int(min(steps * strength, float(steps)))

    def is_noise(self, strength: float) -> bool:
        """Returns whether inpainting begins with noise alone, of the scheduler's own level."""
        return strength == 1


@dataclasses.dataclass(frozen=True)
class FlowSteps(WholeSteps):
    """A run from an image makes a step of which the strength gives a part, as in flow matching.

    It begins at the first level of its schedule even if that is not pure noise. Upstream:
    pipeline_stable_diffusion_3_img2img.py, get_timesteps.
    """

    def first_step(self, steps: int, strength: float) -> int:
        return int(steps - min(steps * strength, float(steps)))

    def is_noise(self, strength: float) -> bool:
        return False


def sample_each(draw: Callable[[int], Any], images: int, results: int) -> Any:
    """Returns the noise that samples the latents of images: another for each result.

    draw: a function (n) -> the noise of n images. results: the number of those that start from the
    images and have seeds of their own.
    """
    return draw(results)


def sample_once(draw: Callable[[int], Any], images: int, results: int) -> Any:
    """Returns the noise that samples the latents of images, which all results start from."""
    return draw(images)


def take_mode(draw: Callable[[int], Any], images: int, results: int) -> Any:
    """Returns None: the latents of images are the mode of the autoencoder's distribution."""
    return None


@dataclasses.dataclass(frozen=True)
class Channels:
    """The image that is edited is further channels of the input (Brooks et al. 2023)."""

    resize: KeepSize = dataclasses.field(default_factory=KeepSize)
    most: int = 1
    """The most images that are edited or looked at together."""
    reads_with_text: ClassVar[bool] = False
    """Whether the text encoder reads the images with the prompt."""
    optional: ClassVar[bool] = False
    """Whether the denoiser also takes no image, for text to image."""

    def channels(self, latents: int) -> int:
        """Returns the channels of the input for latents of so many."""
        return 2 * latents

    def dropout(self, share: float) -> dict[str, float]:
        """Returns which conditions training drops; see `DenoisingLoss`."""
        return {"conditioning_dropout": share}

    def encoding(self, usual: Any) -> Any:
        """Returns how training samples the latents of edited images, see `Family.encoding`.

        usual: how it samples those of images without another one.
        """
        return usual

    def arguments(self, height: int, width: int) -> dict[str, Any]:
        """Returns arguments of a call that shows images to look at in the size of the result.

        Args:
            height: that of the result in pixels.
            width: that of the result in pixels.
        """
        return {}

    def condition(
        self, given: Conditions, latents: Sequence[Any], scaled: Callable[[Any], Any]
    ) -> Conditions:
        """Returns conditions with the images that are edited or looked at.

        Args:
            given: the other conditions.
            latents: the modes of each image's latents, b h w z, as the autoencoder has them.
            scaled: a function from these to latents as the denoiser has them.
        """
        (channels,) = latents
        return given._replace(channels=channels)

    def references(self, call: Any, multiple: int) -> Sequence[np.ndarray]:
        """Returns the images that text to image looks at, 1 H W 3 in [-1, 1] each.

        Raises:
            ValueError: one cannot be read or has an impossible size.
        """
        return ()

    def kept_part(self, call: Any, multiple: int) -> Box | None:
        """Returns the part of generated images that a call with `references` returns; None for all.

        It is left, top, right and bottom in pixels.
        """
        return None

    def inpainted(self, latents: Any) -> Sequence[Any]:
        """Returns the latents that inpainting looks at, of those of the image, b h w c."""
        return ()


@dataclasses.dataclass(frozen=True)
class References(Channels):
    """The denoiser looks at images, whose latents are tokens beside those that it generates.

    It is given them among `Conditions.added` as "references", a tuple of arrays b 1 h w c.
    """

    most: int = 10
    optional: ClassVar[bool] = True
    read: Callable[[Any, int], np.ndarray] = reference_image
    """A function (image, multiple) -> its pixels, 1 H W 3 in [-1, 1]."""
    preferred: tuple[tuple[int, int], ...] = ()
    """The heights and widths that images are brought to, by the nearest ratio; none where they keep
    their own."""
    fixed_area: bool = False
    """Whether small images are made as large as large ones."""

    def mirrored(self, count: int) -> bool:
        """Returns whether each of so many images is kept whole, and mirrored at its borders."""
        return False

    def channels(self, latents: int) -> int:
        return latents

    def dropout(self, share: float) -> dict[str, float]:
        # Pipelines show the image in all branches.
        return {"caption_dropout": share}

    def encoding(self, usual: Any) -> Any:
        # As in diffusers' examples/dreambooth, for FLUX.1 Kontext and for klein.
        return take_mode

    def condition(
        self, given: Conditions, latents: Sequence[Any], scaled: Callable[[Any], Any]
    ) -> Conditions:
        references = tuple(map(scaled, latents))
        return given._replace(added={**(given.added or {}), "references": references})

    def references(self, call: Any, multiple: int) -> Sequence[np.ndarray]:
        images = () if call.image is None else as_images(call.image)
        return [self.read(image, multiple) for image in images]

    def inpainted(self, latents: Any) -> Sequence[Any]:
        return (latents,)


def blend_given(given: Any, draw: Callable[[], Any]) -> Any:
    """Returns the noise with which inpainting puts the image back: the call's latents.

    given: the latents, b h w c. draw: draws others.
    """
    return given


def blend_drawn(given: Any, draw: Callable[[], Any]) -> Any:
    """Returns noise with which inpainting puts the image back: not the call's latents.

    It is drawn before the image is encoded. Upstream: pipeline_z_image_inpaint.py, prepare_latents.
    """
    return draw()


def decode_alone(components: Any, image: Any, mask: Any) -> DecoderCondition | None:
    """Returns None: the decoder is given latents alone."""
    return None


@dataclasses.dataclass(frozen=True)
class Inpaint:
    """How inpainting blends an image with what is generated."""

    resize: KeepSize = dataclasses.field(default_factory=ModelSize)
    shrink: Callable[..., np.ndarray] = nearest
    """A function (mask b H W 1, height, width) -> the mask of latents: hard, or soft at its rim."""
    noise: Callable[[Any, Callable[[], Any]], Any] = blend_given
    """See `blend_given`; it is called where the call gives latents."""
    decoder: Callable[[Any, Any, Any], DecoderCondition | None] = decode_alone
    """A function (components, image, mask) -> what the decoder reads beside the latents, b H W 3
    and b H W 1."""
    normalizes: bool = False
    """Whether latents_mean and latents_std count when the image is encoded; for SDXL they do not
    (pipeline_stable_diffusion_xl_inpaint.py, _encode_vae_image)."""


def negatives_first(leaf: Any, lengths: Any = None) -> jax.Array:
    """Returns conditions b k ... as callbacks read them, (k b) ...: negative prompts, then prompts.

    lengths: the lengths of prompts of different lengths, b k; None for others.
    """
    leaf = jnp.asarray(leaf)
    return jnp.concatenate([leaf[:, j] for j in reversed(range(leaf.shape[1]))])


def prompts_alone(leaf: Any, lengths: Any = None) -> Any:
    """Returns conditions of the prompts alone as callbacks read them; see `of_branch`."""
    return of_branch(leaf, lengths, 0)


def of_branch(leaf: Any, lengths: Any, branch: int) -> Any:
    """Returns the conditions of a branch, b ..., or with lengths a list of b arrays t d."""
    if lengths is None:
        return leaf[:, branch]
    return [x[:n] for x, n in zip(leaf[:, branch], np.asarray(lengths)[:, branch])]
