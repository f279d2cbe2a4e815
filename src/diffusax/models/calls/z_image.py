"""Z-Image's transformer, called as in diffusers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from diffusax.boundary.tensors import as_numpy
from diffusax.models.calls.arguments import check_absent, result, take_numbers
from diffusax.models.calls.outputs import Transformer2DModelOutput
from diffusax.models.network import Model

_MULTIPLE = 32


class ZImageTransformer(Model):
    """The transformer, called as diffusers' ZImageTransformer2DModel."""

    class_names = ("ZImageTransformer2DModel",)

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
    ) -> Any:
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

        Raises:
            ValueError: an argument has another shape or value.
        """
        for value in (controlnet_block_samples, siglip_feats, image_noise_mask):
            check_absent(
                value,
                "controlnet_block_samples, siglip_feats and image_noise_mask must be None: the "
                "transformer reads a caption and an image",
            )
        check_absent(
            joint_attention_kwargs,
            "joint_attention_kwargs must be None: adapters belong to pipelines, see `adapters=`",
        )
        if (patch_size, f_patch_size) != (2, 1):
            raise ValueError(
                f"patch_size and f_patch_size must be 2 and 1 (got {patch_size}, {f_patch_size})"
            )
        latents = _latents(x, self.config.in_channels)
        captions, lengths = _captions(cap_feats, len(latents), self.config.cap_feat_dim)
        times = np.broadcast_to(take_numbers("t", t, len(latents)), len(latents))
        y = self.run(latents.transpose(0, 2, 3, 1), times, captions, lengths)
        sample = list(y.transpose(0, 3, 1, 2)[:, :, None])
        return result(Transformer2DModelOutput(sample), return_dict, *x)


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
