"""The methods that the pipelines of a family share, with diffusers' arguments and results."""

from typing import Any

import numpy as np

from diffusax.boundary.tensors import alike, as_numpy, as_tensor, is_tensor
from diffusax.checkpoints.files import DISTILLED_STEPS
from diffusax.models.autoencoders.latents import patchify, unpatchify
from diffusax.models.transformers.flux import PATCH
from diffusax.models.transformers.flux2 import text_ids
from diffusax.pipelines.components.references import lora_layout, set_layout
from diffusax.pipelines.families import (
    FLUX,
    FLUX2_KLEIN,
    FLUX3_KLEIN,
    IMAGE_PROMPTS,
    KREA2,
    QWEN_IMAGE,
    QWEN_IMAGE21,
    QWEN_IMAGE_EDIT,
    STABLE_DIFFUSION,
    STABLE_DIFFUSION_XL,
    WAN,
    Z_IMAGE,
)
from diffusax.pipelines.pipeline.lora_methods import LoraMethods, write_layers
from diffusax.pipelines.pipeline.pipeline import DiffusionPipeline
from diffusax.pipelines.tasks.prompts import encodes_prompts

# fmt: off


def _positions(ids, embeds):
    """Returns the positions of tokens as a tensor where their embeddings are one."""
    return as_tensor(ids) if is_tensor(embeds) else ids


def padded_rows(found):
    """Returns arrays t d of different lengths as n t d, and which rows of them count, n t."""
    lengths = list(map(len, found))
    rows = [np.pad(as_numpy(x), ((0, max(lengths) - len(x)), (0, 0))) for x in found]
    return np.stack(rows), np.arange(max(lengths)) < np.array(lengths)[:, None]



def _with_mask(found):
    """Returns embeddings as n t d, and which tokens count, n t; None where all do."""
    embeds, mask = padded_rows(found)
    return embeds, None if mask.all() else mask


class StableDiffusion(DiffusionPipeline):
    """Pipelines of Stable Diffusion 1.x and 2.x."""

    family = STABLE_DIFFUSION
    extra_components = IMAGE_PROMPTS
    returns_flags = True
    safety_checker = None

    @encodes_prompts
    def encode_prompt(
        self, prompt=None, device=None, num_images_per_prompt=1, do_classifier_free_guidance=True,
        negative_prompt=None, prompt_embeds=None, negative_prompt_embeds=None, lora_scale=None,
        clip_skip=None, **options,
    ):
        """Returns the embeddings of prompts and of negative prompts, (prompts images) t d each.

        The second is None without guidance. device changes nothing; lora_scale multiplies the
        weights of LoRAs. options: long_prompt, prompt_weighting and adapters.
        """


    def _encode_prompt(
        self, prompt, device, num_images_per_prompt, do_classifier_free_guidance,
        negative_prompt=None, prompt_embeds=None, negative_prompt_embeds=None, lora_scale=None,
        **options,
    ):
        """Returns the embeddings of negative prompts, then those of prompts, one array n t d.

        See `encode_prompt`, which old programs use by this name. Without guidance they are those of
        the prompts alone.
        """
        prompts, negatives = self.encode_prompt(
            prompt, device, num_images_per_prompt, do_classifier_free_guidance, negative_prompt,
            prompt_embeds, negative_prompt_embeds, lora_scale, **options,
        )
        if negatives is None:
            return prompts
        return alike(np.concatenate([as_numpy(negatives), as_numpy(prompts)]), prompts)

    def decode_latents(self, latents):
        """Decodes latents of a run, b c h w, to a NumPy array b H W 3 in [0, 1], for old programs.

        Raises:
            ValueError: latents have another shape.
        """
        images = self.vae.decode(latents / self.vae.config.scaling_factor).sample
        return self.image_processor.postprocess(images, output_type="np")


class StableDiffusionXL(DiffusionPipeline):
    """Pipelines of Stable Diffusion XL."""

    family = STABLE_DIFFUSION_XL
    extra_components = IMAGE_PROMPTS

    @encodes_prompts
    def encode_prompt(
        self, prompt=None, prompt_2=None, device=None, num_images_per_prompt=1,
        do_classifier_free_guidance=True, negative_prompt=None, negative_prompt_2=None,
        prompt_embeds=None, negative_prompt_embeds=None, pooled_prompt_embeds=None,
        negative_pooled_prompt_embeds=None, lora_scale=None, clip_skip=None, **options,
    ):
        """Returns the embeddings of prompts and of negative prompts, then their pooled outputs.

        Those of negative prompts are None without guidance. device changes nothing; lora_scale
        multiplies the weights of LoRAs. options: long_prompt, prompt_weighting and adapters.
        """


class _TransformerLoRAs(LoraMethods):
    """LoRAs whose files diffusers opens with layers of the transformer alone."""

    @classmethod
    def save_lora_weights(
        cls, save_directory, transformer_lora_layers=None, is_main_process=True, weight_name=None,
        save_function=None, safe_serialization=True, transformer_lora_adapter_metadata=None, *,
        text_encoder_lora_layers=None,
    ):
        """Writes a LoRA that diffusers opens; see `LoraMethods.save_lora_weights`."""
        given = {
            "transformer": (transformer_lora_layers, transformer_lora_adapter_metadata),
            "text_encoder": (text_encoder_lora_layers, None),
        }
        write_layers(
            save_directory, given, is_main_process=is_main_process, weight_name=weight_name,
            safe=safe_serialization and save_function is None,
        )


class _LearnsToLook:
    """Pipelines of networks of text to image that can learn to look at images."""

    parts: Any

    @property
    def references_layout(self):
        """Which tokens those of images to look at see: "blind" for each other alone, as is usual,
        or "joint" for all. A network or a LoRA has learned one of the two.

        Assigning it takes effect at once. A ValueError says where it is neither of them, or where
        a LoRA that is loaded has learned the other.
        """
        return self.parts.denoiser.references_layout

    @references_layout.setter
    def references_layout(self, layout):
        set_layout(self.parts, layout)


class LooksAtImages:
    """Pipelines whose networks have learned to look at images."""

    parts: Any
    references_layout: Any

    def __init__(self, *, references_layout=None, **components):
        """Makes a pipeline of components, see `DiffusionPipeline`.

        references_layout: "blind" or "joint", see the attribute; by default what the network's
            config says, and "blind" where it says nothing.
        """
        super().__init__(**components)
        if "transformer" in self.parts.models:
            self.references_layout = references_layout or self.references_layout

    @classmethod
    def from_pipe(cls, pipe, **components):
        """Makes a pipeline of another's components, see `DiffusionPipeline`.

        It looks at images as the other's LoRAs have learned to, where they say so.
        """
        if (learned := lora_layout(getattr(pipe, "adapters", {}))) is not None:
            components.setdefault("references_layout", learned)
        return super().from_pipe(pipe, **components)  # type: ignore[misc]


class Flux2Klein(_TransformerLoRAs, DiffusionPipeline):
    """Pipelines of FLUX.2 klein."""

    family = FLUX2_KLEIN

    @encodes_prompts
    def _encode(
        self, prompt, device, num_images_per_prompt, prompt_embeds, max_sequence_length,
        text_encoder_out_layers, **options,
    ):
        """Returns the embeddings of prompts, and None."""

    def encode_prompt(
        self, prompt=None, device=None, num_images_per_prompt=1, prompt_embeds=None,
        max_sequence_length=512, text_encoder_out_layers=(9, 18, 27), **options,
    ):
        """Returns the embeddings of prompts, (prompts images) t d, and their tokens' positions.

        device changes nothing. options: adapters.
        """
        embeds, _ = self._encode(
            prompt, device, num_images_per_prompt, prompt_embeds, max_sequence_length,
            text_encoder_out_layers, **options,
        )
        return embeds, _positions(np.tile(text_ids(embeds.shape[1]), (len(embeds), 1, 1)), embeds)


class Krea2(_LearnsToLook, _TransformerLoRAs, DiffusionPipeline):
    """Pipelines of Krea 2."""

    family = KREA2

    @encodes_prompts
    def _encode(
        self, prompt, device, num_images_per_prompt, prompt_embeds, prompt_embeds_mask,
        max_sequence_length, **options,
    ):
        """Returns the embeddings of prompts, a list of arrays t (l d), and an empty list."""

    def encode_prompt(
        self, prompt, device=None, num_images_per_prompt=1, prompt_embeds=None,
        prompt_embeds_mask=None, max_sequence_length=512, **options,
    ):
        """Returns the embeddings of prompts, (prompts images) t l d, and which tokens count, n t.

        Padding follows a prompt's tokens. device changes nothing. options: adapters.
        """
        found, _ = self._encode(
            prompt, device, num_images_per_prompt, prompt_embeds, prompt_embeds_mask,
            max_sequence_length, **options,
        )
        embeds, mask = padded_rows(found)
        layers = self.transformer.config.num_text_layers
        return alike((embeds.reshape(*mask.shape, layers, -1), mask), *found)


class QwenImage(_TransformerLoRAs, DiffusionPipeline):
    """Pipelines of Qwen-Image."""

    family = QWEN_IMAGE

    @encodes_prompts
    def _encode(
        self, prompt, device, num_images_per_prompt, prompt_embeds, prompt_embeds_mask,
        max_sequence_length, **options,
    ):
        """Returns the embeddings of prompts, a list of arrays t d, and an empty list."""

    def encode_prompt(
        self, prompt, device=None, num_images_per_prompt=1, prompt_embeds=None,
        prompt_embeds_mask=None, max_sequence_length=1024, **options,
    ):
        """Returns the embeddings of prompts, (prompts images) t d, and which tokens count.

        What counts is None where all tokens do, else n t booleans; padding follows a prompt's
        tokens. device changes nothing. options: adapters.
        """
        found, _ = self._encode(
            prompt, device, num_images_per_prompt, prompt_embeds, prompt_embeds_mask,
            max_sequence_length, **options,
        )
        return alike(_with_mask(found), *found)


class QwenImageEdit(_TransformerLoRAs, DiffusionPipeline):
    """Pipelines of Qwen-Image-Edit, which read images with prompts."""

    family = QWEN_IMAGE_EDIT

    @encodes_prompts
    def _encode(
        self, prompt, image, device, num_images_per_prompt, prompt_embeds, prompt_embeds_mask,
        max_sequence_length, **options,
    ):
        """Returns the embeddings of prompts, a list of arrays t d, and an empty list."""

    def encode_prompt(
        self, prompt, image=None, device=None, num_images_per_prompt=1, prompt_embeds=None,
        prompt_embeds_mask=None, max_sequence_length=1024, **options,
    ):
        """Returns the embeddings of prompts with images, (prompts images) t d, and which count.

        See `QwenImage.encode_prompt`. image is one that a call is given, or a list of them, which
        need not be brought to any size.
        """
        found, _ = self._encode(
            prompt, image, device, num_images_per_prompt, prompt_embeds, prompt_embeds_mask,
            max_sequence_length, **options,
        )
        return alike(_with_mask(found), *found)


class QwenImage21(_TransformerLoRAs, DiffusionPipeline):
    """Pipelines of Qwen-Image 2.1."""

    family = QWEN_IMAGE21

    @encodes_prompts
    def _encode(
        self, prompt, device, num_images_per_prompt, prompt_embeds, prompt_embeds_mask, **options,
    ):
        """Returns the embeddings of prompts, a list of arrays t d, and an empty list."""

    def encode_prompt(
        self, prompt, image=None, device=None, num_images_per_prompt=1, prompt_embeds=None,
        prompt_embeds_mask=None, image_pad_mask=None, **options,
    ):
        """Returns the embeddings of prompts, (prompts images) t d, which tokens count, and None.

        What counts is None where all tokens do, else n t booleans; padding follows a prompt's
        tokens. image and image_pad_mask must be None. device changes nothing. options: adapters.
        """
        if image is not None or image_pad_mask is not None:
            raise ValueError("image and image_pad_mask must be None: prompts alone are encoded")
        found, _ = self._encode(
            prompt, device, num_images_per_prompt, prompt_embeds, prompt_embeds_mask, **options
        )
        return alike((*_with_mask(found), None), *found)


class Flux3Klein(_TransformerLoRAs, DiffusionPipeline):
    """Pipelines of FLUX.3 klein."""

    family = FLUX3_KLEIN
    other_names = ("Flux3ModularPipeline", "Flux3DistilledModularPipeline")

    @property
    def own_defaults(self):
        """The number of steps that a distilled checkpoint was made for."""
        steps = DISTILLED_STEPS.get(self.modular_name(self.parts))
        return {} if steps is None else {"num_inference_steps": steps}

    @classmethod
    def modular_name(cls, parts):
        """Returns the modular pipeline of diffusers for a transformer, distilled or not."""
        distilled = "transformer" in parts.models and parts.denoiser.network.config.flow_map
        return cls.other_names[int(distilled)]

    @encodes_prompts
    def encode_prompt(
        self, prompt=None, device=None, do_classifier_free_guidance=True, negative_prompt=None,
        prompt_embeds=None, negative_prompt_embeds=None, max_sequence_length=8192,
        text_encoder_out_layers=(4, 8, 12, 16, 20, 24, 28, 32), **options,
    ):
        """Returns the embeddings of prompts and of negative prompts, lists of arrays t d.

        They have those of the tokens that fill them up to a multiple of 80. The second list is
        empty without guidance. device changes nothing. options: adapters.
        """


class ZImage(_LearnsToLook, _TransformerLoRAs, DiffusionPipeline):
    """Pipelines of Z-Image."""

    family = Z_IMAGE

    @encodes_prompts
    def encode_prompt(
        self, prompt=None, device=None, do_classifier_free_guidance=True, negative_prompt=None,
        prompt_embeds=None, negative_prompt_embeds=None, max_sequence_length=512, **options,
    ):
        """Returns the embeddings of prompts and of negative prompts, lists of arrays t d.

        The second list is empty without guidance. device changes nothing. options: adapters.
        """


class Wan(_TransformerLoRAs, DiffusionPipeline):
    """Pipelines of Wan."""

    family = WAN

    @encodes_prompts
    def _encode(
        self, prompt, negative_prompt, do_classifier_free_guidance, num_images_per_prompt,
        prompt_embeds, negative_prompt_embeds, max_sequence_length, **options,
    ):
        """Returns the embeddings of prompts and of negative prompts, (prompts videos) t d each."""

    def encode_prompt(
        self, prompt, negative_prompt=None, do_classifier_free_guidance=True,
        num_videos_per_prompt=1, prompt_embeds=None, negative_prompt_embeds=None,
        max_sequence_length=226, device=None, dtype=None, **options,
    ):
        """Returns the embeddings of prompts and of negative prompts, (prompts videos) t d each.

        They are zeros behind the texts. The second is None without guidance. device and dtype
        change nothing. options: adapters.
        """
        return self._encode(
            prompt, negative_prompt, do_classifier_free_guidance, num_videos_per_prompt,
            prompt_embeds, negative_prompt_embeds, max_sequence_length, **options,
        )


class Flux(DiffusionPipeline):
    """Pipelines of FLUX.1."""

    family = FLUX
    extra_components = IMAGE_PROMPTS

    @encodes_prompts
    def _encode(
        self, prompt, prompt_2, device, num_images_per_prompt, prompt_embeds, pooled_prompt_embeds,
        max_sequence_length, lora_scale, **options,
    ):
        """Returns the embeddings of prompts, None, their pooled outputs, and None."""

    def encode_prompt(
        self, prompt, prompt_2=None, device=None, num_images_per_prompt=1, prompt_embeds=None,
        pooled_prompt_embeds=None, max_sequence_length=512, lora_scale=None, **options,
    ):
        """Returns T5's hidden states of prompts, CLIP's pooled outputs, and the tokens' positions.

        Their shapes are (prompts images) t d, (prompts images) p and t 3. device changes nothing;
        lora_scale multiplies the weights of LoRAs. options: adapters.
        """
        embeds, _, pooled, _ = self._encode(
            prompt, prompt_2, device, num_images_per_prompt, prompt_embeds, pooled_prompt_embeds,
            max_sequence_length, lora_scale, **options,
        )
        return embeds, pooled, _positions(np.zeros((embeds.shape[1], 3), np.float32), embeds)

    @staticmethod
    def _pack_latents(latents, batch_size, num_channels_latents, height, width):
        """Makes a token of each 2x2 latents, b c h w -> b (h/2 w/2) 4c; h and w in latents."""
        maps: Any = as_numpy(latents).reshape(batch_size, num_channels_latents, height, width)
        return alike(patchify(maps.transpose(0, 2, 3, 1), PATCH, channels_first=True), latents)

    @staticmethod
    def _unpack_latents(latents, height, width, vae_scale_factor):
        """Inverts `_pack_latents`; height and width are those of the image in pixels."""
        h, w = (int(side) // (vae_scale_factor * PATCH) * PATCH for side in (height, width))
        tokens: Any = as_numpy(latents)
        maps = unpatchify(tokens, PATCH, h, w, channels_first=True)
        return alike(maps.transpose(0, 3, 1, 2), latents)

    @classmethod
    def save_lora_weights(
        cls, save_directory, transformer_lora_layers=None, text_encoder_lora_layers=None,
        is_main_process=True, weight_name=None, save_function=None, safe_serialization=True,
        transformer_lora_adapter_metadata=None, text_encoder_lora_adapter_metadata=None, *,
        text_encoder_2_lora_layers=None,
    ):
        """Writes a LoRA that diffusers opens; see `LoraMethods.save_lora_weights`."""
        given = {
            "transformer": (transformer_lora_layers, transformer_lora_adapter_metadata),
            "text_encoder": (text_encoder_lora_layers, text_encoder_lora_adapter_metadata),
            "text_encoder_2": (text_encoder_2_lora_layers, None),
        }
        write_layers(
            save_directory, given, is_main_process=is_main_process, weight_name=weight_name,
            safe=safe_serialization and save_function is None,
        )
