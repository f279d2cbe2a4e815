"""CLIP for the Flax pipelines: transformers' Flax classes over diffusax's text encoder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from diffusax.interop.flax.models import FlaxModelMixin
from diffusax.interop.flax.outputs import FlaxCLIPTextOutput
from diffusax.models.layers.inputs import check_token_ids
from diffusax.models.network import Params
from diffusax.networks import CLIPTextModel, CLIPTextModelWithProjection
from diffusax.samplers.schedulers.options import Options
from diffusax.text.prompts import tokenize_prompts
from diffusax.text.tokenizer import CLIPTokenizer


class FlaxCLIPTextModel(FlaxModelMixin):
    """CLIP's text encoder, called with its parameters: `text_encoder(ids, params=params)`.

    Attributes:
        params: the parameters that this class's own `from_pretrained` loaded, else None.
    """

    network_class = CLIPTextModel

    @property
    def params(self) -> Params:
        """The parameters that the call uses where none are given."""
        return self._params

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path,
        dtype: Any = np.float32,
        *,
        _do_init: bool = True,
        **kwargs: Any,
    ) -> "Self | tuple[Self, Params]":
        """Loads the text encoder alone with its parameters in `model.params`, as transformers does.

        With _do_init=False it returns (model, params). The other arguments are those of
        `FlaxModelMixin.from_pretrained`.
        """
        model, params = super().from_pretrained(pretrained_model_name_or_path, dtype, **kwargs)
        if not _do_init:
            return model, params
        model._params = params
        return model

    def __call__(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        params: Params = None,
        dropout_rng: Any = None,
        train: bool = False,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        return_dict: bool = True,
    ) -> Any:
        """Encodes token ids, b t.

        attention_mask, position_ids, dropout_rng, train and output_attentions change nothing:
        Stable Diffusion's encoders attend to all 77 tokens in order, and have no dropout.

        Raises:
            ValueError: there are no parameters, or an id, in a NumPy array, is not in the
                vocabulary.
        """
        if isinstance(input_ids, np.ndarray):
            check_token_ids(self.network.config, input_ids)
        bound = self if params is None else self.bind({"params": params})
        result = bound._run("__call__", input_ids)
        output = FlaxCLIPTextOutput(
            text_embeds=result.text_embeds,
            last_hidden_state=result.last_hidden_state,
            pooler_output=result.pooler_output if result.text_embeds is None else None,
            hidden_states=result.hidden_states if output_hidden_states else None,
        )
        return output if return_dict else output.to_tuple()

    @classmethod
    def _check_class(cls, config: Mapping[str, Any], folder: Path) -> None:
        names = config.get("architectures") or [cls.network_class.__name__]
        if names[0].removeprefix("Flax") not in ("CLIPTextModel", "CLIPTextModelWithProjection"):
            raise ValueError(f"{folder} holds a {names[0]}, not a {cls.__name__}")


class FlaxCLIPTextModelWithProjection(FlaxCLIPTextModel):
    """CLIP's text encoder with its projection, as the second one of SDXL."""

    network_class = CLIPTextModelWithProjection


class PromptTokenizer:
    """A tokenizer that is called as transformers' is: texts to `.input_ids`."""

    def __init__(self, tokenizer: CLIPTokenizer):
        self.tokenizer = tokenizer

    @property
    def model_max_length(self) -> int:
        """The number of tokens of a window, 77."""
        return self.tokenizer.model_max_length

    def __call__(self, text: Any, **options: Any) -> Options:
        """Returns {"input_ids": n t, int32}, padded and cut to model_max_length.

        options: accepted without effect.
        """
        return Options({"input_ids": tokenize_prompts(self.tokenizer, text).input_ids[:, 0]})

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Writes the files that transformers opens."""
        self.tokenizer.save(save_directory)


def prompt_ids(tokenizer: Any, prompt: Any) -> np.ndarray:
    """Returns the ids of prompts by this tokenizer, diffusax's or one of transformers': n t.

    Raises:
        ValueError: `prompt` is neither a string nor a list.
    """
    if not isinstance(prompt, str | list):
        raise ValueError(f"`prompt` has to be of type `str` or `list` but is {type(prompt)}")
    length = tokenizer.model_max_length
    options = {"padding": "max_length", "max_length": length, "truncation": True}
    return np.asarray(tokenizer(prompt, **options, return_tensors="np").input_ids)


def empty_ids(tokenizer: Any, ids: jax.Array) -> np.ndarray:
    """Returns the ids of the empty text, as many rows as there are prompts: n t."""
    return np.broadcast_to(prompt_ids(tokenizer, "")[:, : ids.shape[-1]], ids.shape)
