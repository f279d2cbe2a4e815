"""Language models, called as in transformers."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from diffusax.boundary.tensors import as_array
from diffusax.models.encoders.qwen3_vl_vision import VisionOutput, encode_each
from diffusax.models.table import MODELS
from diffusax.networks.arguments import ATTENTIONS, check_absent, result, take_grids, take_ids
from diffusax.networks.model import Model
from diffusax.networks.outputs import (
    BaseModelOutput,
    BaseModelOutputWithDeepstackFeatures,
    BaseModelOutputWithPooling,
    CausalLMOutput,
)
from diffusax.networks.pretrained import FromSingleFile
from diffusax.text.image_tokens import image_positions


class _DecoderModel(FromSingleFile, Model):
    component = "text_encoder"

    def __call__(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        *,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = True,
    ) -> Any:
        """Reads tokens. The first entry, `[0]`, is `.logits` with a head.

        Without a head it is `.last_hidden_state`.

        Args:
            input_ids: the tokens, b t.
            attention_mask: b t, ones where tokens are read and zeros for pads; None for ones. The
                states of pads are transformers' where pads follow the tokens, else they have no
                meaning.
            position_ids: b t, the positions of the tokens; None for 0 to t - 1. For models that see
                also 3 b t (frame, row and column), or 4 b t, of which the first are not read.
            output_attentions: None or False.
            output_hidden_states: whether to return `.hidden_states`: the embeddings and each
                layer's output, b t c, the last one after the final norm unless the config's
                tie_last_hidden_states is False.
            use_cache: accepted, changes nothing: all tokens are read at once.
            return_dict: whether to return an object instead of a tuple.

        Raises:
            ValueError: the tokens are no integers b t or not in the vocabulary, the mask or the
                positions have another form, or an argument is given that the network has no meaning
                for.
        """
        check_absent(output_attentions or None, ATTENTIONS)
        ids = take_ids(input_ids, self.config)
        found = self.run(ids, **_read(ids.shape, attention_mask, position_ids))
        return _output(found, output_hidden_states, return_dict, input_ids)


class Qwen3Model(_DecoderModel):
    """The language model of Z-Image and FLUX.2 klein, with or without its head."""

    module_class = MODELS["Qwen3Model"]


class Qwen3ForCausalLM(Qwen3Model):
    """The language model of Z-Image and FLUX.2 klein, with its head."""

    module_class = MODELS["Qwen3ForCausalLM"]


class _SeeingModel(_DecoderModel):
    def __call__(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        *,
        pixel_values: Any = None,
        image_grid_thw: Any = None,
        mm_token_type_ids: Any = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = True,
    ) -> Any:
        """Reads tokens, some of which may stand for images.

        The first entry, `[0]`, is `.logits` with a head, else `.last_hidden_state`.

        Args:
            input_ids: the tokens, b t; the config's image_token_id stands for a part of an image.
            attention_mask: b t, ones where tokens are read and zeros for pads; None for ones. The
                states of pads are transformers' where pads follow the tokens, else they have no
                meaning.
            position_ids: b t, the positions of the tokens, 3 b t (frame, row and column), or 4 b t,
                of which the first are not read; None for 0 to t - 1, or with images for those by
                mm_token_type_ids.
            pixel_values: the patches of all images in a row, n p, as the checkpoint's processor
                makes them.
            image_grid_thw: for each image the numbers of frames, and of rows and columns of
                patches, k 3.
            mm_token_type_ids: b t, one where a token stands for a part of an image, else zero.
            output_attentions: None or False.
            output_hidden_states: whether to return `.hidden_states`: the embeddings and each
                layer's output, b t c, the last one after the final norm unless the config's
                tie_last_hidden_states is False.
            use_cache: accepted, changes nothing: all tokens are read at once.
            return_dict: whether to return an object instead of a tuple.

        Raises:
            ValueError: the tokens are no integers b t or not in the vocabulary, the mask or the
                positions have another form, the images are not those that the tokens stand for, the
                model was loaded without what images need, or an argument is given that the network
                has no meaning for.
        """
        check_absent(output_attentions or None, ATTENTIONS)
        ids = take_ids(input_ids, self.config)
        options: dict[str, Any] = {}
        if pixel_values is not None:
            grids = take_grids("image_grid_thw", image_grid_thw)
            found = _encode(self, pixel_values, grids, method="encode_images")
            mask = np.asarray(ids) == self.config.image_token_id
            _check_count(int(mask.sum()), len(found.pooler_output))
            options["images"] = found.tokens(mask)
            if position_ids is None:
                merge = self.config.vision_config.spatial_merge_size
                position_ids = _image_positions(mm_token_type_ids, grids, attention_mask, merge)
        found = self.run(ids, **_read(ids.shape, attention_mask, position_ids), **options)
        return _output(found, output_hidden_states, return_dict, input_ids)


class Qwen2_5_VLTextModel(_DecoderModel):
    """The language model of Qwen2.5-VL, without its head."""

    module_class = MODELS["Qwen2_5_VLTextModel"]


class Qwen2_5_VLModel(_SeeingModel):
    """Qwen2.5-VL, which Qwen-Image conditions on; perhaps with a head.

    `from_pretrained(..., vision_config=None)` leaves out what only images need.
    """

    module_class = MODELS["Qwen2_5_VLModel"]


class Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLModel):
    """Qwen2.5-VL, which Qwen-Image conditions on, with its head."""

    module_class = MODELS["Qwen2_5_VLForConditionalGeneration"]


class Qwen3VLTextModel(_DecoderModel):
    """The language model of Qwen3-VL, without its head."""

    module_class = MODELS["Qwen3VLTextModel"]


class Qwen3VLModel(_SeeingModel):
    """Qwen3-VL, which FLUX.3 klein, Krea 2 and Qwen-Image 2.1 condition on; perhaps with a head.

    `from_pretrained(..., vision_config=None)` leaves out what only images need.
    """

    module_class = MODELS["Qwen3VLModel"]


class Qwen3VLForConditionalGeneration(Qwen3VLModel):
    """Qwen3-VL, which FLUX.3 klein, Krea 2 and Qwen-Image 2.1 condition on, with its head."""

    module_class = MODELS["Qwen3VLForConditionalGeneration"]


class _VisionModel(Model):
    def __call__(
        self, hidden_states: Any = None, grid_thw: Any = None, *, return_dict: bool | None = True
    ) -> Any:
        """Encodes images of any sizes. The first entry, `[0]`, is `.last_hidden_state`.

        `.pooler_output` is what the language model reads, Qwen3-VL's `.deepstack_features` what is
        added in its first layers. Images of as many patches are encoded together.

        Args:
            hidden_states: the patches of all images in a row, n p, see `Qwen2VLImageProcessor`.
            grid_thw: for each image the numbers of frames, and of rows and columns of patches, k 3.
            return_dict: whether to return an object instead of a tuple.

        Raises:
            ValueError: there are more or fewer patches than the images have, or of another size.
        """
        found = _encode(self, hidden_states, take_grids("grid_thw", grid_thw))
        return result(self._output(found), return_dict is not False, hidden_states)

    @staticmethod
    def _output(found: VisionOutput) -> Any:
        return BaseModelOutputWithPooling(found.last_hidden_state, found.pooler_output)


class Qwen2_5_VisionTransformerPretrainedModel(_VisionModel):
    """Qwen2.5-VL's vision network."""

    module_class = MODELS["Qwen2_5_VisionTransformerPretrainedModel"]


class Qwen3VLVisionModel(_VisionModel):
    """Qwen3-VL's vision network."""

    module_class = MODELS["Qwen3VLVisionModel"]

    @staticmethod
    def _output(found: VisionOutput) -> Any:
        return BaseModelOutputWithDeepstackFeatures(*found)


class T5EncoderModel(FromSingleFile, Model):
    """T5's encoder, which FLUX.1 and Stable Diffusion 3 condition on."""

    module_class = MODELS["T5EncoderModel"]
    component = "text_encoder_2"

    def __call__(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        *,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = True,
    ) -> BaseModelOutput:
        """Reads tokens. The first entry, `[0]`, is `.last_hidden_state`.

        Args:
            input_ids: the tokens, b t.
            attention_mask: b t, ones where tokens are read and zeros for the pads that follow them;
                None for ones.
            output_attentions: None or False.
            output_hidden_states: whether to return `.hidden_states`: the embeddings and each
                layer's output, b t c, the last one after the final norm.
            use_cache: accepted, changes nothing: all tokens are read at once.
            return_dict: whether to return an object instead of a tuple.

        Raises:
            ValueError: the tokens are no integers b t or not in the vocabulary, the mask is of
                another form, or an argument is given that the network has no meaning for.
        """
        check_absent(output_attentions or None, ATTENTIONS)
        ids = take_ids(input_ids, self.config)
        lengths = None if attention_mask is None else _lengths(attention_mask, ids.shape)
        return _output(self.run(ids, lengths), output_hidden_states, return_dict, input_ids)


class UMT5EncoderModel(T5EncoderModel):
    """UMT5's encoder, which Wan conditions on."""

    module_class = MODELS["UMT5EncoderModel"]
    component = "text_encoder"
    model_type = "umt5"
    """The kind of model in its config.json, as in transformers."""


def _encode(model: Model, pixel_values: Any, grids: np.ndarray, **options: Any) -> Any:
    """Encodes images with a network, see `encode_each`.

    Raises:
        ValueError: there are more or fewer patches than the grids have.
    """
    patches, places = as_array(pixel_values), np.repeat(grids[:, 1:], grids[:, 0], axis=0)
    counts = places.prod(axis=1)
    if patches.ndim != 2 or len(patches) != counts.sum():
        raise ValueError(
            f"pixel_values must have {counts.sum()} rows, the patches of the grids (got shape "
            f"{tuple(patches.shape)})"
        )
    frames = jnp.split(patches, np.cumsum(counts)[:-1])
    return encode_each(partial(model.run, **options), frames, places)


def _check_count(tokens: int, parts: int) -> None:
    if tokens != parts:
        raise ValueError(
            f"input_ids must have a token for each part of an image, {parts} (got {tokens}); use "
            "the checkpoint's processor"
        )


def _image_positions(types: Any, grids: np.ndarray, attention_mask: Any, merge: int) -> np.ndarray:
    if types is None:
        raise ValueError(
            "mm_token_type_ids must be given with pixel_values, or position_ids; the processor "
            "returns them"
        )
    mask = None if attention_mask is None else np.asarray(as_array(attention_mask))
    return image_positions(np.asarray(as_array(types)), grids, mask=mask, merge=merge)


def _read(shape: tuple[int, ...], attention_mask: Any, position_ids: Any) -> dict[str, Any]:
    """Returns a mask and positions as the arguments of a decoder, see `DecoderModel`.

    Raises:
        ValueError: they have another form.
    """
    given: dict[str, Any] = {}
    if attention_mask is not None:
        mask = _mask(attention_mask, shape)
        lengths = mask.sum(-1, dtype=np.int32)
        right = np.array_equal(mask, _first(lengths, shape))
        given = {"key_lengths": lengths} if right else {"attention_mask": mask}
    if position_ids is not None:
        given["position_ids"] = _positions(position_ids, shape)
    return given


def _output(
    found: Any, output_hidden_states: bool | None, return_dict: bool | None, input_ids: Any
) -> Any:
    hidden = found.hidden_states if output_hidden_states else None
    output: Any
    if found.logits is not None:
        output = CausalLMOutput(found.logits, hidden)
    else:
        output = BaseModelOutput(found.last_hidden_state, hidden)
    return result(output, return_dict is not False, input_ids)


def _mask(attention_mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a mask as zeros and ones, int32 of a shape.

    Raises:
        ValueError: it has another shape, or a text without tokens.
    """
    mask = np.asarray(as_array(attention_mask)) != 0
    if mask.shape != shape or not mask.any(-1).all():
        raise ValueError(
            f"attention_mask must be {shape[0]} rows of {shape[1]} zeros and ones, a one at least "
            f"in each (got shape {mask.shape})"
        )
    return mask.astype(np.int32)


def _first(lengths: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a mask of ones for the first tokens of each text, as many as its length."""
    return np.arange(shape[-1]) < lengths[:, None]


def _positions(position_ids: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Returns positions as int32, b t or 3 b t.

    Raises:
        ValueError: they are no integers of such a shape.
    """
    positions = np.asarray(as_array(position_ids))
    axes = positions.shape[:-2]
    fitting = axes in ((), (1,), (3,), (4,)) and positions.shape[-1] == shape[1]
    if not (fitting and positions.shape[-2] in (1, shape[0])) or positions.dtype.kind not in "iu":
        raise ValueError(
            f"position_ids must be integers {shape[0]} {shape[1]} or 3 {shape[0]} {shape[1]} (got "
            f"{positions.dtype} of shape {positions.shape})"
        )
    if axes:
        positions = positions[-3:] if axes[0] > 1 else positions[0]
    return np.broadcast_to(positions, (*positions.shape[:-2], *shape)).astype(np.int32)


def _lengths(attention_mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the number of tokens of each text that a mask of ones, then zeros, has read: b.

    Raises:
        ValueError: it has another shape or form, or a text without tokens.
    """
    mask = _mask(attention_mask, shape)
    lengths = mask.sum(-1, dtype=np.int32)
    if not np.array_equal(mask, _first(lengths, shape)):
        raise ValueError(
            f"attention_mask must be ones followed by zeros, {shape[0]} rows of {shape[1]} that "
            "begin with a one; pad on the right (padding_side='right')"
        )
    return lengths
