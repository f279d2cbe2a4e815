"""What the denoisers of transformers share."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from diffusax.boundary.convert import checked_texts
from diffusax.pipelines.families.denoiser import Denoiser
from diffusax.pipelines.families.embeddings import padded_embeds
from diffusax.pipelines.plan.plan import Prompt, Tokens
from diffusax.samplers.noise_levels import dynamic_mu

_SHORTEST = 64
DESCRIBING_CHAT = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity,"
    " text, spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n",
    "<|im_end|>\n<|im_start|>assistant\n",
)
"""What stands before and behind a prompt for Qwen-Image and Krea 2."""


@dataclasses.dataclass(frozen=True)
class TransformerDenoiser(Denoiser):
    """A transformer of images of 1024x1024, diffusers' default, that reads a text beside them."""

    sample_size = (128, 128)

    @property
    def context_dim(self) -> int:
        """The width of the text's embeddings."""
        return int(self.network.config.joint_attention_dim)


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


def most_tokens(components: Any, call: Any, read: Callable[[Any, str], Sequence[int]]) -> int:
    """Returns the most tokens of a call's prompt and negative prompt.

    read: a function (tokenizer, text) -> its tokens.
    """
    tokenizer, _, _ = components.text_encoders[0]
    texts = checked_texts([call.prompt or "", call.negative_prompt or ""])
    return max(len(read(tokenizer, text)) for text in texts)


def padded_tokens(tokenizer: Any, rows: Sequence[Sequence[int]], length: int) -> Tokens:
    """Returns ids filled up to a length, n length, and how many of each are no padding."""
    ids = np.full((len(rows), length), tokenizer.pad_token_id, np.int32)
    for filled, row in zip(ids, rows):
        filled[: len(row)] = row
    return Tokens((ids,), lengths=np.array(list(map(len, rows)), np.int32))


def padded_length(tokens: int, most: int | None = None) -> int:
    """Returns the length that texts of so many tokens are filled up to: 64, 128, 256, 512, ....

    most: the most tokens of a text; the length is at most this, in steps of 32.
    """
    length = max(_SHORTEST, 1 << max(tokens - 1, 0).bit_length())
    return length if most is None else min(length, -(-most // 32) * 32)


def pad_embeds(embeds: Sequence[Any]) -> Prompt:
    """Returns hidden states of different lengths, t d each, as n s d with their lengths."""
    return padded_embeds(embeds, padded_length)


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
    return options | even_sigmas(scheduler, call, np.float32) if even else options


def even_sigmas(scheduler: Any, call: Any, dtype: Any) -> dict[str, Any]:
    """Returns the sigmas from 1 to 1/steps as options, where a call leaves them to the pipeline."""
    steps = call.num_inference_steps
    given = call.sigmas is not None or call.timesteps is not None
    if "sigmas" not in scheduler.custom or given or not steps:
        return {}
    sigmas = np.linspace(1.0, 1 / steps, steps, dtype=dtype)
    return {"steps": None, "sigmas": tuple(map(float, sigmas))}


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
