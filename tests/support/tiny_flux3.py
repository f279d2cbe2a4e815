"""A tiny FLUX.3 in PyTorch: two blocks of each kind, and all weights random."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers.guiders import ClassifierFreeGuidance
from diffusers.modular_pipelines.flux3 import Flux3AutoBlocks, Flux3DistilledAutoBlocks
from diffusers.modular_pipelines.flux3.before_denoise import _prepare_image_ids
from diffusers.modular_pipelines.flux3.image_processor import Flux3ImageProcessor
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput

from support.processors import qwen3_processor
from support.tiny import randomize
from support.tiny_language import QWEN3_VL, QWEN3_VL_VISION
from support.tiny_tokenizers import QWEN_TOKENS
from support.tiny_transformers import klein_autoencoder

FLUX3: dict[str, Any] = {
    "in_channels": 16,
    "cond_in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 48,
    "timestep_channels": 32,
    "axes_dims_rope": (4, 4, 4, 4),
}


def flux3_transformer(seed: int = 0, **changes: Any) -> Any:
    """A transformer whose blocks all have weights of their own."""
    network = diffusers.Flux3Transformer2DModel(**{**FLUX3, **changes})
    return randomize(network, seed).requires_grad_(False)


@dataclasses.dataclass(frozen=True)
class Flux3Inputs:
    """Two images with latents b h w c, times b, texts b s d, targets b, and references."""

    latents: np.ndarray
    times: np.ndarray
    text: np.ndarray
    targets: np.ndarray
    references: tuple[np.ndarray, ...] = ()

    def arguments(self, *, flow_map: bool = False) -> dict[str, Any]:
        """The arguments of diffusers' call."""
        text_ids = torch.zeros(self.text.shape[1], 4)
        text_ids[:, 3] = torch.arange(self.text.shape[1])
        found = {
            "hidden_states": _tokens(self.latents),
            "encoder_hidden_states": torch.tensor(self.text),
            "timestep": torch.tensor(self.times),
            "img_ids": _prepare_image_ids(*self.latents.shape[1:3], 0.5),
            "txt_ids": text_ids,
        }
        if self.references:
            ids = [
                _prepare_image_ids(*x.shape[1:3], 0.5, -(1 + i))
                for i, x in enumerate(self.references)
            ]
            found["image_cond_hidden_states"] = torch.cat(list(map(_tokens, self.references)), 1)
            found["image_cond_ids"] = torch.cat(ids)
        return found | ({"target_timestep": torch.tensor(self.targets)} if flow_map else {})


def _tokens(latents: np.ndarray) -> torch.Tensor:
    return torch.tensor(latents.reshape(len(latents), -1, latents.shape[-1]))


def flux3_inputs(
    *references: tuple[int, int],
    size: tuple[int, int] = (3, 5),
    text: int = 7,
    channels: int = 16,
    text_width: int = 48,
) -> Flux3Inputs:
    """Random inputs for the network. references: the rows and columns of each."""
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    times, targets = np.array([0.3, 0.9], np.float32), np.array([0.1, 0.7], np.float32)
    maps = tuple(normal(2, *shape, channels) for shape in references)
    words = normal(2, text, text_width)
    return Flux3Inputs(normal(2, *size, channels), times, words, targets, maps)


def upstream_flux3(network: Any, given: Flux3Inputs, dtype: Any = torch.float32) -> np.ndarray:
    """PyTorch's prediction for the images, b h w c."""
    call = given.arguments(flow_map=network.config.flow_map)
    for name in call:
        if name.endswith("hidden_states"):
            call[name] = call[name].to(dtype)
    with torch.no_grad():
        y = network(**call).sample.float().numpy()
    return y.reshape(given.latents.shape)


LANGUAGE: dict[str, Any] = {
    "vocab_size": len(QWEN_TOKENS),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32768,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
FLUX3_SIZE = {"height": 24, "width": 40}
"""Of 6x10 latents, which are tokens."""
FLUX3_CALL = {"text_encoder_out_layers": (1, 2, 4), **FLUX3_SIZE}
"""What makes calls of tiny checkpoints quick; their language model has four layers."""
NULL = {
    "prompt_upsampler": [None, None, None],
    "prompt_upsampler_processor": [
        None,
        None,
        {"type_hint": ["transformers", "AutoProcessor"], "pretrained_model_name_or_path": None},
    ],
}
"""How a modular index lists what was not loaded."""


def _language(layers: int) -> Any:
    text = {**LANGUAGE, "num_hidden_layers": layers}
    config = transformers.Qwen3VLConfig(
        text_config=text,
        vision_config={**QWEN3_VL_VISION, "out_hidden_size": 16},
        **{k: v for k, v in QWEN3_VL.items() if k.endswith("_id")},
    )
    return randomize(transformers.Qwen3VLForConditionalGeneration(config), 2).requires_grad_(False)


@dataclasses.dataclass
class ModularFlux3:
    """diffusers' modular pipeline without its prompt upsampler, called as other pipelines are.

    It takes one prompt at a time, so that several are several runs.
    """

    pipe: Any
    distilled: bool

    @property
    def scheduler(self) -> Any:
        """The scheduler."""
        return self.pipe.scheduler

    @scheduler.setter
    def scheduler(self, value: Any) -> None:
        self.pipe.update_components(scheduler=value)

    def __getattr__(self, name: str) -> Any:
        # Networks and methods are the modular pipeline's.
        return getattr(self.pipe, name)

    def __call__(
        self,
        prompt: Any = None,
        negative_prompt: Any = None,
        guidance_scale: float = 3.5,
        generator: Any = None,
        **call: Any,
    ) -> Any:
        """Runs the blocks for each prompt. generator: of all, or a list with one for each."""
        prompts = prompt if isinstance(prompt, list) else [prompt]
        listed = isinstance(negative_prompt, list)
        negatives = negative_prompt if listed else [negative_prompt] * len(prompts)
        if not self.distilled:
            guider = ClassifierFreeGuidance(guidance_scale=guidance_scale)
            self.pipe.update_components(guider=guider)
        latents, images = call.pop("latents", None), []
        for i, (text, other) in enumerate(zip(prompts, negatives)):
            own = dict(call)
            if not self.distilled and guidance_scale != 1:
                own["negative_prompt"] = other
            if latents is not None:
                own["latents"] = latents[i : i + 1]
            own["generator"] = generator[i] if isinstance(generator, list) else generator
            images += list(self.pipe(prompt=text, **own).get("images"))
        return ImagePipelineOutput(images)


def flux3_pipeline(folder: Path, distilled: bool = False, layers: int = 4) -> ModularFlux3:
    """A tiny modular pipeline of PyTorch, saved in `folder` as the Hub's checkpoints are.

    layers: those of the language model; 32 for calls with the default text_encoder_out_layers.
    """
    kind = Flux3DistilledAutoBlocks if distilled else Flux3AutoBlocks
    blocks = kind()
    blocks.sub_blocks.pop("prompt_upsampler")
    pipe = blocks.init_pipeline()
    width = 16 * (8 if layers > 4 else 3)
    parts = {
        "transformer": flux3_transformer(3, flow_map=distilled, joint_attention_dim=width),
        "vae": klein_autoencoder(),
        "text_encoder": _language(layers),
    }
    processor = Flux3ImageProcessor(vae_scale_factor=4)
    tokenizer = qwen3_processor()
    pipe.update_components(**parts, tokenizer=tokenizer, image_processor=processor)
    pipe.set_progress_bar_config(disable=True)
    libraries = {"text_encoder": "transformers"}
    index: dict[str, Any] = {
        "_blocks_class_name": kind.__name__,
        "_class_name": f"Flux3{'Distilled' if distilled else ''}ModularPipeline",
        **NULL,
    }
    for name, part in parts.items():
        part.save_pretrained(folder / name)
        index[name] = [libraries.get(name, "diffusers"), type(part).__name__, _source(name)]
    tokenizer.tokenizer.save_pretrained(folder / "tokenizer")
    tokenizer.image_processor.save_pretrained(folder / "tokenizer")
    hint = {"type_hint": ["transformers", "AutoProcessor"]}
    index["tokenizer"] = [None, None, {**_source("tokenizer"), **hint}]
    (folder / "modular_model_index.json").write_text(json.dumps(index))
    return ModularFlux3(pipe, distilled)


def _source(name: str) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": "bfl/flux-3-image-klein", "subfolder": name}
