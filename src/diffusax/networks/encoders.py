"""CLIP's encoders of texts and images, and other vision transformers, called as in transformers."""

from typing import Any, ClassVar

import numpy as np

from diffusax.boundary.tensors import alike, as_array
from diffusax.models.table import MODELS
from diffusax.networks.arguments import ATTENTIONS, check_absent, result, take_ids, take_map
from diffusax.networks.model import Model
from diffusax.networks.outputs import (
    BaseModelOutputWithPooling,
    CLIPOutput,
    CLIPTextModelOutput,
    CLIPVisionModelOutput,
)
from diffusax.networks.pretrained import FromSingleFile


class CLIPTextModel(FromSingleFile, Model):
    """CLIP's text encoder."""

    module_class = MODELS["CLIPTextModel"]
    component = "text_encoder"
    tower = True

    def __call__(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = True,
    ) -> Any:
        """Encodes tokens. The first entry, `[0]`, is `.text_embeds` with a projection.

        Without a projection it is `.last_hidden_state`, and there is `.pooler_output`.

        Args:
            input_ids: the tokens, b t.
            attention_mask: None or ones: padding is read, too, as Stable Diffusion was trained.
            position_ids: None.
            output_attentions: None or False.
            output_hidden_states: whether to return `.hidden_states`: the embeddings and each
                layer's output, b t d.
            return_dict: whether to return an object instead of a tuple.

        Raises:
            ValueError: the tokens are no integers b t or not in the vocabulary, or an argument is
                given that the network has no meaning for.
        """
        check_absent(output_attentions or None, ATTENTIONS)
        check_absent(position_ids, "position_ids must be None: tokens are read in their order")
        if attention_mask is not None and not np.asarray(as_array(attention_mask)).all():
            raise ValueError(
                "attention_mask must be None or ones: the encoder reads padding, too, as Stable "
                "Diffusion was trained; leave it out"
            )
        found = self.run(take_ids(input_ids, self.config))
        output = _clip_output(
            CLIPTextModelOutput, found.text_embeds, found, bool(output_hidden_states)
        )
        return result(output, return_dict is not False, input_ids)


class CLIPTextModelWithProjection(CLIPTextModel):
    """CLIP's text encoder with its projection."""

    module_class = MODELS["CLIPTextModelWithProjection"]
    component = "text_encoder_2"


def _clip_output(projected: Any, embeds: Any, found: Any, hidden_states: bool) -> Any:
    """Returns the output of one of CLIP's encoders, of the class `projected` with a projection.

    embeds: the projected embeddings, or None. found: what the network has computed. hidden_states:
    whether the states after all layers are part of the output.
    """
    hidden = found.hidden_states if hidden_states else None
    if embeds is not None:
        return projected(embeds, found.last_hidden_state, hidden)
    return BaseModelOutputWithPooling(found.last_hidden_state, found.pooler_output, hidden)


class CLIPVisionModel(Model):
    """CLIP's vision network."""

    module_class = MODELS["CLIPVisionModel"]
    tower = True

    def __call__(
        self,
        pixel_values: Any = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        interpolate_pos_encoding: bool = False,
        return_dict: bool | None = True,
    ) -> Any:
        """Encodes images. The first entry, `[0]`, is `.image_embeds` with a projection.

        Without a projection it is `.last_hidden_state`, and there is `.pooler_output`.

        Args:
            pixel_values: images, normalised by the checkpoint's processor, b 3 H W.
            output_attentions: None or False.
            output_hidden_states: whether to return `.hidden_states`: the embeddings and each
                layer's output, b t d.
            interpolate_pos_encoding: False.
            return_dict: whether to return an object instead of a tuple.

        Raises:
            ValueError: the images do not have the network's size, or an argument is given that the
                network has no meaning for.
        """
        check_absent(output_attentions or None, ATTENTIONS)
        check_absent(
            interpolate_pos_encoding or None,
            "interpolate_pos_encoding must be False: give images of the network's size",
        )
        pixels = _pixels(pixel_values, self.config)
        found = self.run(pixels, channels_first=True)
        output = _clip_output(
            CLIPVisionModelOutput, found.image_embeds, found, bool(output_hidden_states)
        )
        return result(output, return_dict is not False, pixel_values)


class CLIPVisionModelWithProjection(CLIPVisionModel):
    """CLIP's vision network with its projection."""

    module_class = MODELS["CLIPVisionModelWithProjection"]


class CLIPModel(Model):
    """CLIP's text encoder and vision network, with their projections."""

    module_class = MODELS["CLIPModel"]

    def __call__(
        self, input_ids: Any = None, pixel_values: Any = None, return_dict: bool | None = True
    ) -> CLIPOutput:
        """Compares texts and images: `.logits_per_image`, images texts, and the embeddings.

        Args:
            input_ids: the tokens of the texts, n t.
            pixel_values: images, normalised by the checkpoint's processor, b 3 H W.
            return_dict: whether to return a CLIPOutput instead of a tuple.

        Raises:
            ValueError: the tokens or images do not have the network's shapes.
        """
        ids = take_ids(input_ids, self.config.text_config)
        pixels = _pixels(pixel_values, self.config.vision_config)
        logits, texts, images = self.run(ids, pixels, channels_first=True)
        output = CLIPOutput(logits, logits.T, texts, images)
        return result(output, return_dict is not False, input_ids)

    def get_text_features(self, input_ids: Any) -> Any:
        """Returns the features of texts, n p, as transformers before version 5.

        Raises:
            ValueError: the tokens are no integers n t or not in the vocabulary.
        """
        ids = take_ids(input_ids, self.config.text_config)
        return alike(self.run(ids, method="get_text_features"), input_ids)

    def get_image_features(self, pixel_values: Any) -> Any:
        """Returns the features of images, b p, as transformers before version 5.

        Raises:
            ValueError: the images do not have the network's size.
        """
        pixels = _pixels(pixel_values, self.config.vision_config)
        features = self.run(pixels, method="get_image_features", channels_first=True)
        return alike(features, pixel_values)


class ViTModel(Model):
    """A vision transformer, such as DINO's, without a pooler."""

    module_class = MODELS["ViTModel"]
    any_size: ClassVar[bool] = False
    """Whether positions are always interpolated for images of other sizes."""

    def __call__(
        self,
        pixel_values: Any = None,
        bool_masked_pos: Any = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        interpolate_pos_encoding: bool | None = None,
        return_dict: bool | None = True,
    ) -> BaseModelOutputWithPooling:
        """Encodes images. The first entry, `[0]`, is `.last_hidden_state`, b 1+n d.

        `.pooler_output` is None, as the network has no pooler; `.last_hidden_state[:, 0]` is the
        class token after the final norm, which is DINO's feature of an image.

        Args:
            pixel_values: images, normalised by the checkpoint's processor, b 3 H W.
            bool_masked_pos: None.
            output_attentions: None or False.
            output_hidden_states: whether to return `.hidden_states`: the embeddings and each
                layer's output, b t d.
            interpolate_pos_encoding: whether images may have another size than the config's.
            return_dict: whether to return an object instead of a tuple.

        Raises:
            ValueError: the images do not have the network's size, or an argument is given that the
                network has no meaning for.
        """
        check_absent(output_attentions or None, ATTENTIONS)
        check_absent(bool_masked_pos, "bool_masked_pos must be None: no patches are hidden")
        if self.any_size or interpolate_pos_encoding:
            pixels = take_map("pixel_values", pixel_values, self.config.num_channels)
        else:
            pixels = _pixels(pixel_values, self.config)
        found = self.run(pixels, channels_first=True)
        hidden = found.hidden_states if output_hidden_states else None
        last = found.last_hidden_state
        output = BaseModelOutputWithPooling(last, self._pool(last), hidden)
        return result(output, return_dict is not False, pixel_values)

    def _pool(self, last_hidden_state: Any) -> Any:
        return None


class Dinov2Model(ViTModel):
    """DINOv2's vision transformer, for images of any size of at least a patch.

    `.pooler_output`, b d, is the class token after the final norm.
    """

    module_class = MODELS["Dinov2Model"]
    any_size = True

    def _pool(self, last_hidden_state: Any) -> Any:
        return last_hidden_state[:, 0]


def _pixels(pixel_values: Any, config: Any) -> Any:
    """Converts images to an array, and checks their shape.

    Raises:
        ValueError: they do not have the network's channels and size.
    """
    x = take_map("pixel_values", pixel_values, config.num_channels)
    if x.shape[2:] != (config.image_size, config.image_size):
        raise ValueError(
            f"pixel_values must have {config.image_size}x{config.image_size} pixels for this "
            f"network (got {x.shape[2]}x{x.shape[3]})"
        )
    return x
