"""What the denoisers of transformers share."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import numpy as np

from diffusax.models.network import Network, Params
from diffusax.pipelines.plan.guidance import apply_guidance
from diffusax.pipelines.plan.plan import Conditions, StepInputs, Tokens
from diffusax.runtime.devices.mesh import Rules
from diffusax.samplers.noise_levels import dynamic_mu


@dataclasses.dataclass(frozen=True)
class TransformerDenoiser:
    """A transformer as the sampler calls it, see `Denoiser`. It is hashable and holds no arrays."""

    transformer: Network
    controlnets: tuple[Network, ...] = ()

    sample_size: ClassVar[tuple[int, int]] = (128, 128)
    """The rows and columns of latents of an image of 1024x1024, diffusers' default."""
    embeds_guidance: ClassVar[bool] = False

    @classmethod
    def of(cls, networks: Mapping[str, Network]) -> Self:
        """Returns the denoiser of a checkpoint's networks, which are given by name."""
        return cls(networks["transformer"])

    @property
    def components(self) -> tuple[str, ...]:
        """The names of the components whose parameters it reads."""
        return ("transformer",)

    @property
    def in_channels(self) -> int:
        """The channels of the latents."""
        return int(self.transformer.config.in_channels)

    @property
    def context_dim(self) -> int:
        """The width of the text's embeddings."""
        return int(self.transformer.config.joint_attention_dim)

    @property
    def tensor_rules(self) -> Rules:
        """The axes of the parameters that a mesh's tensor axis splits."""
        return self.transformer.tensor_rules

    def embed(
        self, params: Params, images: tuple[Any, ...], weights: Any = None
    ) -> tuple[Any, ...]:
        """Returns nothing, as no images steer the network."""
        return ()

    def prepare(self, params: Params, conditions: Conditions, inputs: StepInputs) -> Conditions:
        """Returns the conditions as they are."""
        return conditions

    def guide(self, predictions: jax.Array, inputs: StepInputs) -> jax.Array:
        """Applies classifier-free guidance; see `apply_guidance`."""
        return apply_guidance(predictions, inputs.weights, inputs.rescale)


def chat_tokens(tokenizer: Any, text: str, most: int, *, thinking: bool = True) -> list[int]:
    """Returns the ids of a prompt in the form of a chat, at most so many.

    thinking: whether the answer may begin with thoughts; otherwise the chat has empty ones.
    """
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=thinking,
    )
    return list(tokenizer(chat, truncation=True, max_length=most).input_ids)


def padded_tokens(tokenizer: Any, rows: Sequence[Sequence[int]], length: int) -> Tokens:
    """Returns ids filled up to a length, n length, and how many of each are no padding."""
    ids = np.full((len(rows), length), tokenizer.pad_token_id, np.int32)
    for filled, row in zip(ids, rows):
        filled[: len(row)] = row
    return Tokens((ids,), lengths=np.array(list(map(len, rows)), np.int32))


def schedule_options(
    components: Any, call: Any, size: tuple[int, int], *, even: bool = True
) -> dict[str, Any]:
    """Returns evenly spaced sigmas from 1 to 1/steps, and mu where the shift depends on the size.

    Upstream: pipeline_flux.py, and pipeline_z_image.py, get_default_z_image_sigmas.

    Args:
        components: the components.
        call: the call.
        size: height and width in pixels.
        even: False leaves the sigmas to the scheduler.

    Raises:
        ValueError: the scheduler cannot shift as the checkpoint's own does.
    """
    scheduler, options = components.scheduler, dict[str, Any]()
    if shifts_by_size(scheduler):
        rows, columns, _ = components.latents.shape(*size)
        options["mu"] = dynamic_mu(scheduler.config, (rows // 2) * (columns // 2))
    steps = call.num_inference_steps
    takes = even and "sigmas" in scheduler.custom
    if takes and call.sigmas is None and call.timesteps is None and steps:
        sigmas = np.linspace(1.0, 1 / steps, steps, dtype=np.float32)
        options |= {"steps": None, "sigmas": tuple(map(float, sigmas))}
    return options


def shifts_by_size(scheduler: Any) -> bool:
    """Returns whether a scheduler asks for a mu, by which it shifts the noise levels of an image.

    Raises:
        ValueError: its config says so, but it has no such option.
    """
    shifts = bool(scheduler.config.get("use_dynamic_shifting"))
    if shifts and not hasattr(scheduler, "use_dynamic_shifting"):
        raise ValueError(
            f"{scheduler.class_name} cannot shift noise levels by the size of an image, which the "
            "config that it was made from asks for (use_dynamic_shifting=True); use "
            f"FlowMatchEulerDiscreteScheduler, or make one of a fixed shift: "
            f"{scheduler.class_name}(shift=3.0)"
        )
    return shifts


def longest_text(components: Any, call: Any) -> int:
    """Returns the length that all of a call's texts are filled up to."""
    return int(call.max_sequence_length)
