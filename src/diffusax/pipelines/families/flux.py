"""FLUX.1 (Black Forest Labs 2024): a transformer over the tokens of a text and of an image.

The text's tokens are T5's, with padding, which is attended to; CLIP's pooled output is added to the
time. The guidance scale is an input of networks that were distilled from guided ones. Beside it,
classifier-free guidance applies by `true_cfg_scale` where a negative prompt is given.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.images.references import KONTEXT_SIZES
from diffusax.models.adapters.low_rank import adapter_options
from diffusax.models.autoencoders.latents import LatentFormat, patchify, unpatchify
from diffusax.models.network import Network, Params
from diffusax.models.ops.rotation import Rotation
from diffusax.models.transformers.flux import PATCH, image_rotation
from diffusax.pipelines.families import policies, transformer
from diffusax.pipelines.families.denoiser import DenoiserInputs
from diffusax.pipelines.families.family import (
    TEXT_COMPONENTS,
    Family,
    diffusers_components,
    usual_autoencoder,
)
from diffusax.pipelines.families.transformer import TransformerDenoiser
from diffusax.pipelines.plan.plan import Conditions, Encoders, Prompt, StepInputs, Texts, Tokens
from diffusax.text.language_tokenizer import T5Tokenizer
from diffusax.text.tokenizer import CLIPTokenizer

_LONGEST = 512


@dataclasses.dataclass(frozen=True)
class FluxDenoiser(TransformerDenoiser):
    """FLUX.1's transformer with its ControlNets.

    A negative prompt takes a branch, beside the scale that the network embeds.
    """

    references_layout = "joint"

    def _steering(self, images: int) -> list[tuple[Network, str]]:
        """Returns the ControlNet of each image and its name; the only one may see several images.

        Upstream: diffusers controlnet_flux.py, FluxMultiControlNetModel.
        """
        nets = list(zip(self.controlnets, self.control_names))
        return nets * images if len(nets) == 1 else nets

    @property
    def embeds_guidance(self) -> bool:
        """Whether the guidance scale is an input of any of the networks."""
        return any(net.config.guidance_embeds for net in (self.network, *self.controlnets))

    def guidance_inputs(self, scales: Any) -> dict[str, Any]:
        """Returns the guidance scales, b or b 1, as an input of networks that read them."""
        return {"guidance": scales} if self.embeds_guidance else {}

    @property
    def in_channels(self) -> int:
        """The channels of latents, with further ones such as masks, of which a patch is a token."""
        return int(self.network.config.in_channels) // PATCH**2

    def embed(
        self, params: Params, images: tuple[Any, ...], weights: Any = None
    ) -> tuple[Any, ...]:
        """Embeds the images of ControlNets, once per run: b 1 t c each.

        Args:
            params: the parameters by component.
            images: for each ControlNet, or several for the only one, the latents of its image,
                b 1 h w c, or pixels in [-1, 1], b 1 H W 3, where it reads these.
            weights: the weights of a low-rank adapters, b a.
        """
        hints = []
        for (net, name), image in zip(self._steering(len(images)), images, strict=True):
            cond = image[:, 0]
            if net.config.conditioning_embedding_channels is None:
                cond = patchify(cond, PATCH, channels_first=True)
            options = adapter_options(params, name, weights)
            hint = net.apply(params[name], cond, method="embed_condition", **options)
            hints.append(hint[:, None])
        return tuple(hints)

    def predict(self, params: Params, given: DenoiserInputs, options: dict[str, Any]) -> jax.Array:
        """Predicts the velocity from images to noise for each branch, b h w c; see `Denoiser`.

        Of the conditions it reads the texts, b s d, their pooled outputs, b p, and among the added
        ones "guidance", b, and "references", the latents of images to look at, b h w c each; see
        `control_conditions` for ControlNets. Of the inputs it reads adapters: b a; control: b m 1.
        """
        x, timestep, conditions, inputs = given
        options |= adapter_options(params, "transformer", inputs.adapters)
        added = conditions.added or {}
        h, w = x.shape[1:3]
        if conditions.channels is not None:
            x = jnp.concatenate([x, conditions.channels.astype(x.dtype)], axis=-1)
        images = [x, *(image.astype(x.dtype) for image in added.get("references", ()))]
        tokens = [patchify(image, PATCH, channels_first=True) for image in images]
        sizes = [(image.shape[1] // PATCH, image.shape[2] // PATCH) for image in images]
        dims = self.network.config.axes_dims_rope
        x, time = jnp.concatenate(tokens, axis=1), timestep.astype(jnp.float32) / 1000
        rotation = image_rotation(dims, conditions.context.shape[1], *sizes)
        last = rotation, added.get("guidance")
        if conditions.control:
            options |= self._residuals(params, (x, time), last, conditions, inputs)
        read = x, time, conditions.context, conditions.pooled, *last
        y = self.network.apply(params["transformer"], *read, **options)
        return unpatchify(y[:, : tokens[0].shape[1]], PATCH, h, w, channels_first=True)

    def _residuals(
        self,
        params: Params,
        first: tuple[jax.Array, jax.Array],
        last: tuple[Rotation, jax.Array | None],
        conditions: Conditions,
        inputs: StepInputs,
    ) -> dict[str, Any]:
        """Returns the residuals of all ControlNets as arguments of the transformer.

        first, last: the networks' arguments before and after the texts.
        """
        added, total = conditions.added or {}, None
        given = *first, added["control_context"], added["control_pooled"], *last
        assert inputs.control is not None
        hints = conditions.control
        for m, ((net, name), hint) in enumerate(zip(self._steering(len(hints)), hints)):
            options = {"cond_embedding": hint, **adapter_options(params, name, inputs.adapters)}
            if net.config.num_mode is not None:
                options["mode"] = added["control_mode"][:, m]
            found = net.apply(params[name], *given, **options)
            scale = inputs.control[:, m, 0][:, None, None]
            own = jax.tree.map(lambda r, s=scale: r * s.astype(r.dtype), found)
            total = own if total is None else jax.tree.map(jnp.add, total, own)
        assert total is not None
        pixels = self.controlnets[0].config.conditioning_embedding_channels is not None
        block, single = total
        return {
            "block_residuals": block,
            "single_residuals": single,
            "cycle_residuals": pixels,
        }


def control_conditions(
    conditions: Conditions, hints: tuple[Any, ...], modes: Sequence[int]
) -> Conditions:
    """Returns the conditions with those of ControlNets.

    ControlNets read the prompt in all branches (pipeline_flux_controlnet.py, the denoising loop).

    Args:
        conditions: the conditions of a call, b k ....
        hints: see `FluxDenoiser.embed`.
        modes: the kind of each image; zero for one that knows one kind.
    """
    b = conditions.context.shape[0]
    own = {
        "control_context": conditions.context[:, :1],
        "control_pooled": conditions.pooled[:, :1],
        "control_mode": np.tile(np.array(modes, np.int32), (b, 1, 1)),
    }
    return conditions._replace(control=hints, added={**(conditions.added or {}), **own})


def conditions(
    components: Any, call: Any, prompt: Prompt, size: tuple[int, int], scales: np.ndarray
) -> Conditions:
    """Returns the texts with, for a distilled network, the guidance scales, b 1.

    Raises:
        ValueError: an image is given for an IP-Adapter, which FLUX.1 has none of here, or the
            negative prompt's embeddings lack their pooled output.
    """
    if call.negative_prompt_embeds is not None and call.negative_pooled_prompt_embeds is None:
        raise ValueError(
            "negative_pooled_prompt_embeds must be given with negative_prompt_embeds, or there is "
            "no guidance; encode_prompt of the negative text returns both"
        )
    ours = ("ip_adapter_image", "ip_adapter_image_embeds")
    for name in (*ours, *(f"negative_{name}" for name in ours)):
        if getattr(call, name) is not None:
            raise ValueError(f"{name} must be None: there are no IP-Adapters for FLUX.1 here")
    added = components.denoiser.guidance_inputs(np.asarray(scales, np.float32)[:, None])
    return Conditions(prompt.context, prompt.pooled, added=added or None)


def schedule_options(components: Any, call: Any, size: tuple[int, int]) -> dict[str, Any]:
    """Returns evenly spaced sigmas from 1 to 1/steps, and mu where the shift depends on the size.

    Text to image leaves the sigmas to a scheduler that has its own of flow matching, and the other
    tasks do not (pipeline_flux.py, use_flow_sigmas).
    """
    own = getattr(components.scheduler, "use_flow_sigmas", False)
    given = call.image is not None or call.control_image is not None
    return transformer.schedule_options(components, call, size, even=given or not own)


def tokenize(
    tokenizers: Sequence[Any], texts: Texts, call: Any, length: int | None = None
) -> Tokens:
    """Returns the ids of texts for CLIP, n t, and for T5, n max_sequence_length.

    length has no effect, as T5's texts are as long as the call says.

    Raises:
        ValueError: one of the text encoders is missing, or texts may be longer than 512 tokens.
    """
    if len(tokenizers) != 2:
        raise ValueError(
            "this pipeline has only one of text_encoder and text_encoder_2; give prompt_embeds and "
            "pooled_prompt_embeds"
        )
    most = call.max_sequence_length
    if most > _LONGEST:
        raise ValueError(f"max_sequence_length must be at most {_LONGEST} (got {most})")
    clip, t5 = tokenizers
    return Tokens((clip.windows(list(texts[0])), _t5_ids(t5, list(texts[1]), most)))


def tokenize_caption(tokenizers: Sequence[Any], caption: str, length: int | None = None) -> Tokens:
    """Returns the ids of a caption for CLIP and for T5, t of a fixed length each."""
    clip, t5 = tokenizers
    return Tokens((clip.windows([caption])[0], _t5_ids(t5, [caption], length or _LONGEST)[0]))


def _t5_ids(tokenizer: Any, texts: list[str], length: int) -> np.ndarray:
    given = {"padding": "max_length", "truncation": True, "max_length": length}
    return np.asarray(tokenizer(texts, return_tensors="np", **given).input_ids, np.int32)


def encode(
    encoders: Encoders, params: tuple[Params, ...], tokens: Tokens, clip_skip: int | None = None
) -> Prompt:
    """Encodes tokens to T5's hidden states, n s d, and CLIP's pooled output, n p.

    T5 reads the padding, too, and clip_skip has no effect, as in diffusers.
    """
    clip, t5 = encoders
    pooled = clip.apply(params[0], tokens.ids[0]).pooler_output
    (hidden,) = t5.apply(params[1], tokens.ids[1], method="hidden_states", layers=(-1,))
    return Prompt(hidden, pooled)


@dataclasses.dataclass(frozen=True)
class Kontext(policies.References):
    """Kontext looks at one image, for which it has a task of its own; others look at none."""

    most: int = 1
    preferred: tuple[tuple[int, int], ...] = KONTEXT_SIZES
    fixed_area: bool = True

    def arguments(self, height: int, width: int) -> dict[str, Any]:
        return {"max_area": height * width, "auto_resize": False}

    def references(self, call: Any, multiple: int) -> Sequence[np.ndarray]:
        return ()

    def inpainted(self, latents: Any) -> Sequence[Any]:
        return ()


FLUX = Family(
    name="FLUX.1",
    components=diffusers_components(
        "transformer",
        ("tokenizer", "text_encoder"),
        ("tokenizer_2", "text_encoder_2"),
        tokenizer=(CLIPTokenizer, T5Tokenizer),
        optional=TEXT_COMPONENTS,
    ),
    tokenize=tokenize,
    tokenize_caption=tokenize_caption,
    encode=encode,
    conditions=conditions,
    denoiser=FluxDenoiser.of,
    usual_autoencoder=usual_autoencoder(16),
    latents=functools.partial(LatentFormat.of, patch=PATCH, packed=True),
    schedule_options=schedule_options,
    embeds=("prompt_embeds", "pooled_prompt_embeds"),
    batch_key=transformer.longest_text,
    guidance=policies.TrueCFG(embeds=("negative_prompt_embeds", "negative_pooled_prompt_embeds")),
    start=policies.FlowSteps(),
    encoding=policies.sample_once,
    resize=policies.ModelSize(),
    edits=Kontext(),
    callback_view=policies.prompts_alone,
)
"""FLUX.1-dev, -schnell, Fill and Kontext."""
