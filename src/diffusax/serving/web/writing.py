"""What a page asks for while somebody writes: how long a prompt is, and pictures of LoRAs."""

import dataclasses
from typing import Annotated, Any

from msgspec import Meta
from starlette.concurrency import run_in_threadpool as in_thread
from starlette.requests import Request
from starlette.responses import Response

from diffusax.serving.requests.errors import NotFound, Refused
from diffusax.serving.requests.generation import Name, Prompt
from diffusax.serving.web.bodies import read_json
from diffusax.serving.web.fields import read_fields
from diffusax.serving.web.openapi import operation
from diffusax.serving.web.replies import Json
from diffusax.serving.web.security import check_most
from diffusax.serving.web.service import service_of
from diffusax.text.extra_networks import read_tags
from diffusax.text.prompts import window_lengths
from diffusax.text.tokenizer import CLIPTokenizer

_KINDS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokensFields:
    """A prompt, and the model that reads it."""

    prompt: Prompt
    model: Annotated[Name, Meta(description="A model's name; the default model for none.")] = ""
    prompt_weighting: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokensAnswer:
    """How long a prompt is."""

    tokens: int | None
    """Without what stands around a text; None while the model is not in memory."""
    most: int | None
    """The tokens that are read: of CLIP those of as many windows as it takes. None if unknown."""
    window: int | None
    """The tokens of one window, which are all that is read where long_prompt is off."""


@operation(
    "POST",
    "/tokens",
    "The number of tokens of a prompt, for a model that is in memory.",
    group="Server",
    body=TokensFields,
    answer=TokensAnswer,
    errors=(404, 413, 422),
)
async def tokens(request: Request) -> Response:
    """Counts the tokens of a prompt."""
    service = service_of(request)
    fields = read_fields(TokensFields, await read_json(request))
    check_most("prompt", len(fields.prompt), service.settings.most_prompt, "characters")
    found = service.catalogue.tokenizer(fields.model)
    if found is None:
        return Json({"tokens": None, "most": None, "window": None})
    try:
        counted = await in_thread(count_tokens, *found, fields.prompt, fields.prompt_weighting)
    except ValueError as error:
        raise Refused(str(error), param="prompt") from None
    return Json(vars(counted))


def count_tokens(
    tokenizer: Any, most: int | None, prompt: str, weighting: bool = True
) -> TokensAnswer:
    """Returns how many tokens a prompt has, and how many are read of it.

    Args:
        tokenizer: a CLIPTokenizer, or another that is called as transformers' are.
        most: the tokens that a model with another tokenizer reads.
        prompt: the text; what it says of LoRAs is not counted.
        weighting: whether parentheses are syntax.

    Raises:
        ValueError: a LoRA's tag cannot be read, or the prompt has more than 64 windows.
    """
    text, _ = read_tags(prompt)
    if not isinstance(tokenizer, CLIPTokenizer):
        count = len(tokenizer([text], add_special_tokens=False).input_ids[0])
        return TokensAnswer(tokens=count, most=most, window=most)
    lengths = window_lengths(tokenizer, text, weighting=weighting)
    room = tokenizer.model_max_length - 2
    return TokensAnswer(tokens=sum(lengths), most=len(lengths) * room, window=room)


@operation(
    "GET",
    "/loras/{name:path}/preview",
    "The picture beside a LoRA's file, where there is one.",
    group="Server",
    answer="image/*",
    errors=(404,),
)
async def lora_preview(request: Request) -> Response:
    """Sends the picture of a LoRA."""
    entry = service_of(request).catalogue.lora(request.path_params["name"])
    if entry.preview is None:
        raise NotFound(f"there is no picture beside the file of the LoRA {entry.name!r}")
    try:
        data = await in_thread(entry.preview.read_bytes)
    except OSError:
        raise NotFound(f"the picture of the LoRA {entry.name!r} is gone") from None
    kind = _KINDS[entry.preview.suffix]
    return Response(data, media_type=f"image/{kind}")


OPERATIONS = (tokens, lora_preview)
