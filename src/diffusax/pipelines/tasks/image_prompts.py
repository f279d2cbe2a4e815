"""The images of IP-Adapters in a call, from images or embeddings to `Conditions.images`.

Shapes in the docstrings: p prompts, or 1 where all share their images; b images to generate; n
images of an IP-Adapter; k branches of guidance.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.boundary.tensors import as_numpy
from diffusax.checkpoints.ip_adapter import IPAdapter
from diffusax.images.conversion import to_control, to_pil
from diffusax.images.image_processor import CLIPImageProcessor
from diffusax.images.image_prompt_masks import downsample_mask
from diffusax.images.reading import load_image
from diffusax.models.adapters.image_prompts import ImagePrompt, cross_attentions
from diffusax.models.network import Network, Params
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.plan.arguments import Call, read_numbers
from diffusax.pipelines.tasks.setup import Setup
from diffusax.runtime.programs.program import Program


class Features(NamedTuple):
    """What the image encoder finds in the images of one IP-Adapter, p n e or p n s e each."""

    images: Any
    blank: Any
    """The same for images of zeros, which the branches without the prompt see."""


def image_prompts(setup: Setup, branches: int) -> tuple[ImagePrompt, ...]:
    """Returns what each IP-Adapter sees in each image and branch.

    Raises:
        ValueError: no IP-Adapter is loaded, or the arguments do not fit those that are.
    """
    c, call, prompts = setup.c, setup.call, setup.prompts
    if call.ip_adapter_image is None and call.ip_adapter_image_embeds is None:
        raise ValueError("ip_adapter_masks need ip_adapter_image or ip_adapter_image_embeds")
    store = c.ip_adapters
    found = call_features(c, call, branches)
    projections = store.placed(c).projections
    masks = _read_masks(call.ip_adapter_masks, len(store))
    _check_unet(c)
    repeats, made = call.num_images_per_prompt or 1, []
    for i, (adapter, params, features) in enumerate(
        zip(store.adapters, projections, found, strict=True)
    ):
        if len(features.images) not in (1, prompts):
            raise ValueError(
                f"ip_adapter_image_embeds has {len(features.images)} entries for {prompts} prompts "
                f"at index {i}; give 1 or {prompts}"
            )
        rows = repeats * prompts // len(features.images)
        tokens = project_images(
            adapter.projection, params, features, branches=branches, repeats=rows
        )
        made.append(_image_prompt(setup, tokens, store.scales[i], masks[i], i))
    return tuple(made)


def call_features(c: Components, call: Call, branches: int) -> list[Features]:
    """Returns the features of a call's images, for each IP-Adapter.

    Raises:
        ValueError: no IP-Adapter is loaded, both kinds of images are given, or not as many as
            IP-Adapters, or they have another shape.
    """
    store = c.ip_adapters
    name = "ip_adapter_image" if call.ip_adapter_image is not None else "ip_adapter_image_embeds"
    given = getattr(call, name)
    if not len(store):
        raise ValueError(f"{name} needs an IP-Adapter; load_ip_adapter loads one")
    if call.ip_adapter_image is not None and call.ip_adapter_image_embeds is not None:
        raise ValueError("only one of ip_adapter_image and ip_adapter_image_embeds can be given")
    if name == "ip_adapter_image":
        several = list(given) if isinstance(given, list | tuple) else [given]
    elif not isinstance(several := given, list | tuple):
        raise ValueError(f"{name} must be a list with one array for each IP-Adapter")
    if len(several) != len(store):
        raise ValueError(
            f"{name} must have one entry for each of {len(store)} IP-Adapters (got {len(several)})"
        )
    if name == "ip_adapter_image":
        return [
            _fitting(c, adapter, encode_images(c, one, hidden=_reads_hidden(adapter)))
            for adapter, one in zip(store.adapters, several)
        ]
    pairs = enumerate(zip(store.adapters, several))
    return [_given(c, adapter, one, branches, i) for i, (adapter, one) in pairs]


def encode_images(c: Components, images: Any, *, hidden: bool) -> Features:
    """Returns the features of the images of one IP-Adapter, 1 n e or 1 n s e.

    Args:
        c: the components.
        images: one image or a list; or a tensor of PyTorch n 3 h w of pixels that the feature
            extractor has prepared.
        hidden: whether to return the last but one hidden states instead of the embeddings.

    Raises:
        ValueError: the pipeline has no image encoder, or what is given is no image.
    """
    if "image_encoder" not in c.networks:
        raise ValueError(
            "this pipeline has no image_encoder to read ip_adapter_image with; load the IP-Adapter "
            "with image_encoder_folder, or give ip_adapter_image_embeds"
        )
    network, params = c.networks["image_encoder"], c.ready("image_encoder")
    pixels = _pixel_values(c, images, network.config.image_size)
    found = encode_prompt_images(network, params, pixels, hidden=hidden)
    return Features(*(x[None] for x in found))


@functools.partial(Program, static=("network", "hidden"), shape_of="prompt_images")
def encode_prompt_images(
    network: Network, params: Params, prompt_images: jax.Array, *, hidden: bool
) -> tuple[jax.Array, jax.Array]:
    """Encodes pixels n h w 3 by CLIP's vision network, for an IP-Adapter.

    Returns their features and those for the branches without a prompt: the embeddings n e and
    zeros; or the last but one hidden states n s e and those of zero pixels.
    """
    output = network.apply(params, prompt_images)
    if not hidden:
        return output.image_embeds, jnp.zeros_like(output.image_embeds)
    found = output.hidden_states[-2]
    blank = network.apply(params, jnp.zeros_like(prompt_images[:1])).hidden_states[-2]
    return found, jnp.broadcast_to(blank, found.shape)


@functools.partial(Program, static=("network", "branches", "repeats"), shape_of="features")
def project_images(
    network: Network, params: Params, features: Features, *, branches: int, repeats: int
) -> jax.Array:
    """Projects the features of images to an IP-Adapter's tokens, (p repeats) k n t d.

    branches: k; all but the first see zeros. repeats: the images to
    generate for each prompt, which stay beside each other.
    """

    def project(x: jax.Array) -> jax.Array:
        tokens = network.apply(params, x.reshape(-1, *x.shape[2:]))
        return tokens.reshape(*x.shape[:2], *tokens.shape[1:])

    images = project(features.images)
    blank = [project(features.blank)] * (branches - 1) if branches > 1 else []
    return jnp.repeat(jnp.stack([images, *blank], axis=1), repeats, axis=0)


def _check_unet(c: Components) -> None:
    """Raises ValueError where the UNet is another one than the IP-Adapters are for."""
    wanted = cross_attentions(c.networks[c.denoiser.components[0]])
    for adapter in c.ip_adapters.adapters:
        if wanted != {path: own.to_k.shape for path, own in adapter.layers.items()}:
            raise ValueError(
                "the IP-Adapter does not fit the unet, which was assigned after it was loaded; "
                "load it again"
            )


def _reads_hidden(adapter: IPAdapter) -> bool:
    hidden: bool = adapter.projection.module_class.hidden
    return hidden


def _fitting(c: Components, adapter: IPAdapter, found: Features) -> Features:
    """Raises ValueError where the image encoder is not the IP-Adapter's."""
    width, wanted = found.images.shape[-1], adapter.projection.config.embed_dim
    if width != wanted:
        raise ValueError(
            f"the IP-Adapter reads features of width {wanted}, but image_encoder gives {width}; "
            "set image_encoder to the one that belongs to it, such as models/image_encoder "
            "(ViT-H) or sdxl_models/image_encoder (ViT-bigG) of h94/IP-Adapter"
        )
    return found


def _pixel_values(c: Components, images: Any, side: int) -> np.ndarray:
    """Returns pixels for the image encoder, n h w 3."""
    if hasattr(images, "detach") and images.ndim == 4:
        pixels = as_numpy(images).transpose(0, 2, 3, 1).astype(np.float32)
    else:
        process = c.tokenizers.get("feature_extractor") or CLIPImageProcessor.of_size(side)
        several = images if isinstance(images, list | tuple) else [images]
        if not several:
            raise ValueError("ip_adapter_image must not be an empty list")
        found = [one for image in several for one in _pil_images(image)]
        pixels = np.stack([process.pixels(image) for image in found])
    if pixels.shape[1:] != (side, side, 3):
        raise ValueError(
            f"the image encoder takes {side}x{side} pixels, but the feature extractor makes "
            f"{pixels.shape[2]}x{pixels.shape[1]} of ip_adapter_image; assign "
            f"feature_extractor = CLIPImageProcessor.from_dict({{'size': {side}, "
            f"'crop_size': {side}}})"
        )
    return pixels


def _pil_images(image: Any) -> list[Any]:
    """Returns PIL images of a path, a PIL image, or an array h w 3 or b h w 3."""
    if not hasattr(image, "shape"):
        return [load_image(image)]
    return to_pil(to_control(image, factor=1))


def _given(c: Components, adapter: IPAdapter, embeds: Any, branches: int, i: int) -> Features:
    """Returns features that are given, with the branches of guidance one after the other."""
    name = "ip_adapter_image_embeds"
    config, hidden = adapter.projection.config, _reads_hidden(adapter)
    shape = tuple(getattr(embeds, "shape", ()))
    groups = branches
    if (
        len(shape) != 3 + hidden
        or shape[-1] != config.embed_dim
        or not all(shape)
        or shape[0] % groups
    ):
        axes = "images, states, width" if hidden else "images, width"
        raise ValueError(
            f"{name} must have the shape ({groups} times prompts, {axes}) with a width of "
            f"{config.embed_dim} at index {i} (got {shape or type(embeds).__name__})"
        )
    array = embeds if isinstance(embeds, jax.Array) else read_numbers(name, embeds)
    parts = jnp.split(array.astype(c.dtype), groups)
    # diffusers has the negative ones first, but those of InstructPix2Pix last
    # (pipeline_stable_diffusion_instruct_pix2pix.py, prepare_ip_adapter_image_embeds).
    first = 1 if groups == 2 else 0
    return Features(parts[first], parts[0 if groups == 2 else -1])


def _read_masks(masks: Any, count: int) -> list[np.ndarray | None]:
    """Returns the masks of each IP-Adapter, (1 or p) n h w; None where it has none."""
    if masks is None:
        return [None] * count
    if not isinstance(masks, list | tuple):
        given = as_numpy(masks)
        # diffusers' older form, one mask for each IP-Adapter.
        masks = list(given[:, None]) if given.ndim == 4 else [given]
    if len(masks) != count:
        raise ValueError(
            f"ip_adapter_masks must have one entry for each of {count} IP-Adapters "
            f"(got {len(masks)})"
        )
    found: list[np.ndarray | None] = []
    for mask in masks:
        array = None if mask is None else read_numbers("ip_adapter_masks", mask)
        if array is not None and (array.ndim != 4 or not array.size):
            raise ValueError(
                "each of ip_adapter_masks must have the shape (1, images, height, width), as "
                f"IPAdapterMaskProcessor().preprocess makes them (got {array.shape})"
            )
        found.append(array)
    return found


def _image_prompt(
    setup: Setup, tokens: jax.Array, scales: np.ndarray, mask: np.ndarray | None, i: int
) -> ImagePrompt:
    """Returns what one IP-Adapter sees. scales: l n. mask: (1 or p) n h w, or None."""
    b, n = tokens.shape[0], tokens.shape[2]
    if mask is None:
        if scales.shape[1] > 1:
            raise ValueError(
                "an IP-Adapter's scale is a list of numbers for its images, which need "
                f"ip_adapter_masks (index {i})"
            )
        return ImagePrompt(tokens, np.tile(scales, (b, 1, 1, 1)))
    if len(mask) not in (1, setup.prompts) or mask.shape[1] != n:
        raise ValueError(
            f"ip_adapter_masks must have the shape (1, {n}, height, width) at index {i}, one mask "
            f"for each image (got {mask.shape})"
        )
    if scales.shape[1] not in (1, n):
        raise ValueError(
            f"an IP-Adapter's scale has {scales.shape[1]} numbers for {n} images with masks at "
            f"index {i}"
        )
    scales = np.broadcast_to(scales, (len(scales), n))
    smaller = (downsample_mask(mask, queries) for queries in _query_counts(setup.c, setup.size))
    masks = tuple(np.repeat(x, b // len(x), axis=0)[:, None] for x in smaller)
    return ImagePrompt(tokens, np.tile(scales, (b, 1, 1, 1)), masks)


def _query_counts(c: Components, size: tuple[int, int]) -> list[int]:
    """Returns the pixels of a UNet's maps, at each of its levels."""
    height, width = (side // c.latents.factor for side in size)
    levels = len(c.networks[c.denoiser.components[0]].config.block_out_channels)
    counts = []
    for _ in range(levels):
        counts.append(height * width)
        height, width = -(-height // 2), -(-width // 2)
    return list(dict.fromkeys(counts))
