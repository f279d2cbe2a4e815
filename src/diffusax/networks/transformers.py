"""The transformers of Krea 2, Qwen-Image and Z-Image, called as in diffusers."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from diffusax.boundary.tensors import as_array, as_numpy
from diffusax.models.autoencoders.latents import patchify, unpatchify
from diffusax.models.table import MODELS
from diffusax.models.transformers.blocks import rotary_positions
from diffusax.models.transformers.qwen_image import PATCH
from diffusax.networks.arguments import (
    check_absent,
    check_no_adapters,
    check_rows,
    result,
    spread,
    take_positions,
)
from diffusax.networks.model import Model
from diffusax.networks.outputs import Transformer2DModelOutput
from diffusax.networks.pretrained import FromSingleFile

_MULTIPLE = 32
"""Z-Image's captions are padded to a multiple of so many tokens."""


class Krea2Transformer2DModel(FromSingleFile, Model):
    """The transformer of Krea 2."""

    module_class = MODELS["Krea2Transformer2DModel"]
    component = "transformer"

    def __call__(
        self,
        hidden_states: Any,
        encoder_hidden_states: Any,
        timestep: Any,
        position_ids: Any,
        encoder_attention_mask: Any = None,
        attention_kwargs: None = None,
        return_dict: bool = True,
        *,
        hooks: Mapping[str, Any] | None = None,
    ) -> Transformer2DModelOutput:
        """Predicts the velocity from images to noise: `.sample`, b t c.

        Args:
            hidden_states: the image's tokens, b t c.
            encoder_hidden_states: the text's hidden states, b s l d, l of each token.
            timestep: the times, from 1 for noise to 0 for images, one number or b.
            position_ids: the positions of the text's tokens, then of the image's, (s + t) 3
                integers.
            encoder_attention_mask: which of the text's tokens are read, b s; None for all.
            attention_kwargs: None; the weights of LoRAs are an argument of pipelines.
            return_dict: whether to return a Transformer2DModelOutput instead of a tuple.
            hooks: functions that read or change what passes through layers, see `as_hooks`; what
                they keep is the result's `kept`.

        Raises:
            ValueError: an argument has another shape or value.
        """
        check_no_adapters("attention_kwargs", attention_kwargs)
        x, text = as_array(hidden_states), as_array(encoder_hidden_states)
        check_rows("encoder_hidden_states", text, len(x))
        s, t = text.shape[1], x.shape[1]
        ids = take_positions("position_ids", position_ids, s + t, 3)
        text, order, lengths = _read_first(text, encoder_attention_mask)
        placed = np.concatenate([np.broadcast_to(ids[s:], (len(x), t, 3)), ids[:s][order]], axis=1)
        rotation = rotary_positions(
            list(np.moveaxis(placed, -1, 0)),
            list(ids.max(axis=0) + 1),
            self.config.axes_dims_rope,
            self.config.rope_theta,
            angle_dtype=np.float64,
        )
        fused = self.run(text, lengths, method="fuse_text")
        call = x, spread("timestep", timestep, len(x)), fused, lengths, rotation
        y, kept = self.run_with_hooks(hooks, *call, method="predict_tokens")
        return result(Transformer2DModelOutput(y, kept), return_dict, hidden_states)


class QwenImageTransformer2DModel(FromSingleFile, Model):
    """The transformer of Qwen-Image."""

    module_class = MODELS["QwenImageTransformer2DModel"]
    component = "transformer"

    def __call__(
        self,
        hidden_states: Any,
        encoder_hidden_states: Any = None,
        encoder_hidden_states_mask: Any = None,
        timestep: Any = None,
        img_shapes: Sequence[Sequence[tuple[int, int, int]]] | None = None,
        guidance: None = None,
        attention_kwargs: None = None,
        controlnet_block_samples: None = None,
        additional_t_cond: None = None,
        return_dict: bool = True,
        *,
        hooks: Mapping[str, Any] | None = None,
    ) -> Transformer2DModelOutput:
        """Predicts the velocity from images to noise: `.sample`, b t c, of the first image alone.

        Args:
            hidden_states: the tokens of the image and of those to look at, b t c.
            encoder_hidden_states: the text's hidden states, b s d.
            encoder_hidden_states_mask: which of them are no padding, which comes last, b s; None
                for all.
            timestep: the times, from 1 for noise to 0 for images, one number or b.
            img_shapes: for each row 1, rows and columns of each image's tokens, the same for all.
            guidance: None, because no checkpoint has an input for it.
            attention_kwargs: None; the weights of LoRAs are an argument of pipelines.
            controlnet_block_samples: None, because there are no ControlNets here.
            additional_t_cond: None, because images have no layers here.
            return_dict: whether to return a Transformer2DModelOutput instead of a tuple.
            hooks: functions that read or change what passes through layers, see `as_hooks`; what
                they keep is the result's `kept`.

        Raises:
            ValueError: an argument has another shape or value.
        """
        check_no_adapters("attention_kwargs", attention_kwargs)
        for value in (guidance, controlnet_block_samples, additional_t_cond):
            check_absent(
                value,
                "guidance, controlnet_block_samples and additional_t_cond must be None: the "
                "transformer reads a text and images",
            )
        x, text = as_array(hidden_states), as_array(encoder_hidden_states)
        check_rows("encoder_hidden_states", text, len(x))
        sizes = _sizes(img_shapes, x.shape[1])
        lengths = _leading("encoder_hidden_states_mask", encoder_hidden_states_mask, text.shape[:2])
        ends = np.cumsum([rows * columns for rows, columns in sizes])
        maps = [
            unpatchify(tokens, PATCH, PATCH * rows, PATCH * columns, channels_first=True)
            for tokens, (rows, columns) in zip(jnp.split(x, ends[:-1], axis=1), sizes)
        ]
        given = maps[0], spread("timestep", timestep, len(x)), text, lengths
        y, kept = self.run_with_hooks(hooks, *given, references=tuple(maps[1:]))
        y = patchify(y, PATCH, channels_first=True)
        return result(Transformer2DModelOutput(y, kept), return_dict, hidden_states)


class QwenImage21Transformer2DModel(FromSingleFile, Model):
    """The transformer of Qwen-Image 2.1."""

    module_class = MODELS["QwenImage21Transformer2DModel"]
    component = "transformer"

    def __call__(
        self,
        hidden_states: Any,
        encoder_hidden_states: Any,
        timestep: Any,
        img_shapes: Sequence[Sequence[tuple[int, int, int]]],
        img_mask: Any,
        encoder_hidden_states_mask: Any = None,
        attention_kwargs: None = None,
        kv_cache: None = None,
        kv_cache_mode: None = None,
        return_dict: bool = True,
        *,
        hooks: Mapping[str, Any] | None = None,
    ) -> Transformer2DModelOutput:
        """Predicts the velocity from images to noise: `.sample`, b t c, of the last image alone.

        Prompts of different lengths are predicted as each would be by itself; in diffusers the
        image's position depends on the longest of them.

        Args:
            hidden_states: the tokens of images to look at and of the image, b t c.
            encoder_hidden_states: the language model's hidden states, b s d.
            timestep: the times, from 1 for noise to 0 for images, one number or b.
            img_shapes: for each row 1, rows and columns of each image's tokens, the same for all.
            img_mask: which hidden states are places of images, and a place for each four tokens of
                the image behind them, b s', the same for all.
            encoder_hidden_states_mask: which hidden states are no padding, which comes last, b s;
                by default all.
            attention_kwargs: None; the weights of LoRAs are an argument of pipelines.
            kv_cache: None, because keys are not kept between calls here; see the method "prefix"
                of `network.module`.
            kv_cache_mode: None, likewise.
            return_dict: whether to return a Transformer2DModelOutput instead of a tuple.
            hooks: functions that read or change what passes through layers, see `as_hooks`; what
                they keep is the result's `kept`.

        Raises:
            ValueError: an argument has another shape or value.
        """
        check_no_adapters("attention_kwargs", attention_kwargs)
        check_absent(
            kv_cache or kv_cache_mode or None,
            "kv_cache and kv_cache_mode must be left out: keys are not kept between calls",
        )
        x, context = as_array(hidden_states), as_array(encoder_hidden_states)
        check_rows("encoder_hidden_states", context, len(x))
        *looked_at, (_, h, w) = img_shapes[0]
        places = as_numpy(img_mask)[0, : context.shape[1]].astype(bool)
        texts = _texts_before(places, [rows * columns // 4 for _, rows, columns in looked_at])
        references, begin = list[Any](), 0
        for (start, end), (_, rows, columns) in zip(texts, looked_at):
            tokens = x[:, begin : begin + rows * columns]
            references.append((context[:, start:end], tokens.reshape(len(x), rows, columns, -1)))
            begin += rows * columns
        start, end = texts[-1]
        lengths = np.full(len(x), end - start, np.int32)
        if encoder_hidden_states_mask is not None:
            lengths = as_numpy(encoder_hidden_states_mask)[:, start:end].astype(np.int32).sum(1)
        image = x[:, begin:].reshape(len(x), h, w, -1)
        given = image, spread("timestep", timestep, len(x)), context[:, start:end], lengths
        y, kept = self.run_with_hooks(hooks, *given, references=tuple(references))
        y = y.reshape(len(x), h * w, -1)
        return result(Transformer2DModelOutput(y, kept), return_dict, hidden_states)


class ZImageTransformer2DModel(FromSingleFile, Model):
    """The transformer of Z-Image."""

    module_class = MODELS["ZImageTransformer2DModel"]
    component = "transformer"

    def __call__(
        self,
        x: Sequence[Any],
        t: Any,
        cap_feats: Sequence[Any],
        return_dict: bool = True,
        controlnet_block_samples: None = None,
        siglip_feats: None = None,
        image_noise_mask: None = None,
        patch_size: int = 2,
        f_patch_size: int = 1,
        joint_attention_kwargs: None = None,
        *,
        hooks: Mapping[str, Any] | None = None,
    ) -> Transformer2DModelOutput:
        """Predicts the velocity: `.sample`, a list with an array c 1 h w for each image.

        Args:
            x: the latents of images of one size, c 1 h w each.
            t: the times, from 0 for noise to 1 for images, one for each image.
            cap_feats: the text encoder's hidden states for each image, s d, s of its own.
            return_dict: whether to return a Transformer2DModelOutput instead of a tuple.
            controlnet_block_samples: None, because there are no ControlNets here.
            siglip_feats: None, because images are not conditions here.
            image_noise_mask: None, likewise.
            patch_size: 2.
            f_patch_size: 1.
            joint_attention_kwargs: None; the weights of LoRAs are an argument of pipelines.
            hooks: functions that read or change what passes through layers, see `as_hooks`; what
                they keep is the result's `kept`.

        Raises:
            ValueError: an argument has another shape or value.
        """
        for value in (controlnet_block_samples, siglip_feats, image_noise_mask):
            check_absent(
                value,
                "controlnet_block_samples, siglip_feats and image_noise_mask must be None: the "
                "transformer reads a caption and an image",
            )
        check_no_adapters("joint_attention_kwargs", joint_attention_kwargs)
        if (patch_size, f_patch_size) != (2, 1):
            raise ValueError(
                f"patch_size and f_patch_size must be 2 and 1 (got {patch_size}, {f_patch_size})"
            )
        latents = _latents(x, self.config.in_channels)
        captions, lengths = _captions(cap_feats, len(latents), self.config.cap_feat_dim)
        times = spread("t", t, len(latents))
        y, kept = self.run_with_hooks(
            hooks, latents.transpose(0, 2, 3, 1), times, captions, lengths
        )
        sample = list(y.transpose(0, 3, 1, 2)[:, :, None])
        return result(Transformer2DModelOutput(sample, kept), return_dict, *x)


def _read_first(text: Any, mask: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    """Puts those tokens of texts first that are read.

    Args:
        text: b s ....
        mask: which tokens are read, b s; None for all.

    Returns:
        The texts, the places where the tokens were, b s, and the numbers of those that are read, b.
    """
    shape = tuple(text.shape[:2])
    read = np.ones(shape, bool) if mask is None else as_numpy(mask).astype(bool)
    if read.shape != shape:
        raise ValueError(f"encoder_attention_mask must have shape {shape} (got {read.shape})")
    order = np.argsort(~read, axis=1, kind="stable")
    rows = np.arange(shape[0])[:, None]
    return text[rows, order], order, read.sum(axis=1).astype(np.int32)


def _sizes(img_shapes: Any, count: int) -> list[tuple[int, int]]:
    """Returns the rows and columns of tokens of each image, which are so many in all.

    Raises:
        ValueError: the shapes are missing, or the images of rows differ, or have other tokens.
    """
    shapes = [[(int(h), int(w)) for _, h, w in row] for row in img_shapes or ()]
    sizes = shapes[0] if shapes else []
    tokens = sum(rows * columns for rows, columns in sizes)
    if any(row != sizes for row in shapes) or tokens != count:
        raise ValueError(
            f"img_shapes must be the same for all rows, of {count} tokens in all (got {img_shapes})"
        )
    return sizes


def _leading(name: str, mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Returns how many of the first tokens of each text are read, b. mask: b s; None for all.

    Raises:
        ValueError: the mask has another shape, or tokens that are read follow others.
    """
    read = np.ones(shape, bool) if mask is None else as_numpy(mask).astype(bool)
    lengths = read.sum(axis=1).astype(np.int32) if read.shape == shape else np.zeros(1)
    if read.shape != shape or not lengths.all() or (np.diff(read.astype(int)) > 0).any():
        raise ValueError(
            f"{name} must have shape {shape}, with ones before zeros in each row (got shape "
            f"{read.shape})"
        )
    return lengths


def _texts_before(places: np.ndarray, counts: Sequence[int]) -> list[tuple[int, int]]:
    """Returns where the text before each image begins and ends, and that behind the last one.

    places: which tokens are places of images. counts: how many of them each image has.
    """
    found, start = list[tuple[int, int]](), 0
    for count in counts:
        end = start + int(places[start:].argmax())
        found.append((start, end))
        start = end + count
    return [*found, (start, len(places))]


def _latents(x: Sequence[Any], channels: int) -> np.ndarray:
    arrays = [as_numpy(one) for one in x]
    shapes = {array.shape for array in arrays}
    shape = next(iter(shapes), ())
    if len(shapes) != 1 or len(shape) != 4 or shape[:2] != (channels, 1):
        raise ValueError(
            f"x must be a list of latents of one shape ({channels}, 1, height, width) "
            f"(got {sorted(shapes)})"
        )
    return np.stack(arrays)[:, :, 0]


def _captions(cap_feats: Sequence[Any], count: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns captions with padding, b s d, and their lengths, b."""
    arrays = [as_numpy(one) for one in cap_feats]
    if len(arrays) != count or any(a.ndim != 2 or a.shape[1] != width for a in arrays):
        raise ValueError(
            f"cap_feats must be a list of {count} arrays (tokens, {width}) "
            f"(got {[a.shape for a in arrays]})"
        )
    lengths = np.array([len(array) for array in arrays], np.int32)
    longest = -(-lengths.max() // _MULTIPLE) * _MULTIPLE
    rows = [np.pad(array, ((0, longest - len(array)), (0, 0))) for array in arrays]
    return np.stack(rows), lengths
