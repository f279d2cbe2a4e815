"""Quantised single files draw what PyTorch draws from the numbers that they stand for."""

import json
import shutil
import subprocess
import sys

import diffusers
import numpy as np
import pytest
import torch
import transformers
from diffusers.loaders import single_file_model
from diffusers.loaders import single_file_utils as upstream
from safetensors.torch import load_file, save_file
from support.effort import few
from support.quantised import ENCODINGS, encoded, save_gguf
from support.runs import RUNS
from support.tiny import build_stable_diffusion, randomize
from support.tiny_transformers import (
    FLUX_CLIP,
    FLUX_SIZE,
    FLUX_T5,
    FLUX_VAE,
    Z_IMAGE_LANGUAGE,
    Z_IMAGE_SIZE,
    flux_components,
    qwen_tokenizer,
    z_image_transformer,
)
from support.upstream_widths import for_tiny

import diffusax
from diffusax.checkpoints.converting import pack_single_file
from diffusax.checkpoints.gguf.blocks import BLOCKS

PREFIX = "model.diffusion_model."
WIDE = {"attention_head_dim": 32, "num_attention_heads": 2}
PIXELS = 1e-4
"""Two steps of the networks in float32, in another order of sums."""


def flux(folder):
    """A pipeline whose matrices have 64 rows and columns or multiples of them."""
    parts = flux_components(
        **WIDE, axes_dims_rope=(8, 12, 12), joint_attention_dim=64, pooled_projection_dim=64
    )
    clip = transformers.CLIPTextConfig(**{**FLUX_CLIP, "hidden_size": 64})
    t5 = transformers.T5Config(**{**FLUX_T5, "d_model": 64, "d_kv": 32, "d_ff": 128})
    parts["text_encoder"] = randomize(transformers.CLIPTextModel(clip), 2)
    parts["text_encoder_2"] = randomize(transformers.T5EncoderModel(t5), 4)
    diffusers.FluxPipeline(**parts).save_pretrained(folder)


def z_image(folder):
    widths = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    language = transformers.Qwen3Config(**{**Z_IMAGE_LANGUAGE, **widths})
    pipe = diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=randomize(diffusers.AutoencoderKL(**FLUX_VAE), 1),
        text_encoder=randomize(transformers.Qwen3Model(language), 2),
        tokenizer=qwen_tokenizer(),
        transformer=z_image_transformer(3, dim=64, cap_feat_dim=64, axes_dims=[12, 8, 12]),
    )
    pipe.save_pretrained(folder)


def stable_diffusion(folder):
    unet = {"block_out_channels": (64, 128), "cross_attention_dim": 64}
    build_stable_diffusion(folder, unet=unet, text={"hidden_size": 64})


MODELS = {
    "flux": (flux, "transformer", "FluxTransformer2DModel", FLUX_SIZE),
    "z-image": (z_image, "transformer", "ZImageTransformer2DModel", Z_IMAGE_SIZE),
    "sd": (stable_diffusion, "unet", "UNet2DConditionModel", {"height": 32, "width": 32}),
}
ARCHITECTURES = {"flux": "flux", "z-image": "lumina2", "sd": "sd1"}


class Model:
    """A tiny model in both libraries, whose denoiser is exchanged."""

    def __init__(self, kind, root):
        build, self.name, self.class_name, size = MODELS[kind]
        self.folder = root / kind
        build(self.folder)
        self.call = {"num_inference_steps": 2, "output_type": "np", **size}
        self.theirs = diffusers.DiffusionPipeline.from_pretrained(self.folder)
        self.ours = diffusax.DiffusionPipeline.from_pretrained(self.folder)
        for pipe in (self.theirs, self.ours):
            pipe.set_progress_bar_config(disable=True)
        pack_single_file(self.folder / self.name, root / f"{kind}.safetensors")
        found = load_file(root / f"{kind}.safetensors")
        self.tensors = {key.removeprefix(PREFIX): tensor for key, tensor in found.items()}

    def draw(self, path):
        """Our picture with the denoiser of a file."""
        network = getattr(diffusax, self.class_name)
        setattr(self.ours, self.name, network.from_single_file(path, config=self.folder))
        generator = torch.Generator().manual_seed(0)
        return self.ours("a red apple", generator=generator, **self.call).images[0]

    def expect(self, tensors, path):
        """PyTorch's picture with a denoiser of such tensors."""
        own = {PREFIX + key: tensor.contiguous() for key, tensor in tensors.items()}
        save_file(own, path)
        network = getattr(diffusers, self.class_name).from_single_file(
            str(path), config=str(self.folder), subfolder=self.name, local_files_only=True
        )
        setattr(self.theirs, self.name, network)
        generator = torch.Generator().manual_seed(0)
        return self.theirs("a red apple", generator=generator, **self.call).images[0]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function that gives a model, made once."""
    root, found = tmp_path_factory.mktemp("quantised"), {}
    convert = for_tiny(upstream.convert_flux_transformer_checkpoint_to_diffusers, **WIDE)
    entry = single_file_model.SINGLE_FILE_LOADABLE_CLASSES["FluxTransformer2DModel"]

    def model(kind):
        if kind not in found:
            found[kind] = Model(kind, root)
        return found[kind]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(entry, "checkpoint_mapping_fn", convert)
        yield model


def cases(kinds):
    """All models with all encodings, of which everybody runs each encoding with one model."""
    names = list(MODELS)
    kept = [(names[i % 3], kind) for i, kind in enumerate(kinds)]
    return few([(name, kind) for name in names for kind in kinds], *kept)


@pytest.mark.parametrize(("name", "kind"), cases([*ENCODINGS]))
def test_safetensors_draw_what_pytorch_draws(models, tmp_path, name, kind):
    model, path = models(name), tmp_path / "quantised.safetensors"
    stored, expected = encoded(model.tensors, kind)
    changed = [key for key, x in expected.items() if x is not model.tensors[key]]
    assert len(changed) > 10
    save_file({PREFIX + key: x for key, x in stored.items()}, path)
    theirs = model.expect(expected, tmp_path / "plain.safetensors")
    np.testing.assert_allclose(model.draw(path), theirs, atol=PIXELS)


@pytest.mark.parametrize(("name", "kind"), cases([*BLOCKS, "BF16", "F16"]))
def test_gguf_files_draw_what_pytorch_draws(models, tmp_path, name, kind):
    model, path = models(name), tmp_path / "quantised.gguf"
    expected = save_gguf(
        path, model.tensors, kind, architecture=ARCHITECTURES[name], wide=kind.endswith("_K")
    )
    theirs = model.expect(expected, tmp_path / "plain.safetensors")
    np.testing.assert_allclose(model.draw(path), theirs, atol=PIXELS)


@pytest.mark.parametrize(
    ("first", "last"),
    [
        pytest.param(0, 40, id="40 cases"),
        pytest.param(40, 300, id="260 cases", marks=pytest.mark.slow),
    ],
)
def test_a_broken_file_is_one_sentence_or_the_picture(models, tmp_path, first, last):
    folder = tmp_path / "whole"
    shutil.copytree(models("flux").folder, folder)
    (folder / "files").mkdir()
    tensors = models("flux").tensors
    for kind in ENCODINGS:
        stored, _ = encoded(tensors, kind)
        save_file(stored, folder / "files" / f"{kind}.safetensors")
    for kind in BLOCKS:
        options = {"architecture": "flux", "wide": kind.endswith("_K")}
        save_gguf(folder / "files" / f"{kind}.gguf", tensors, kind, **options)
    program = RUNS / "damaged_encodings.py"
    done = subprocess.run(
        [sys.executable, str(program), str(folder), str(tmp_path / "s"), str(first), str(last)],
        capture_output=True,
        text=True,
        timeout=60 + 5 * (last - first),
    )
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (reports[-1:], done.stderr[-2000:])
    assert len(reports) == last - first
    # Weights may be what is not finite, of which a call says a sentence of its own.
    ends = "drawn", "ValueError", "FloatingPointError"
    assert not [r for r in reports if r["result"] not in ends]
    assert len([r for r in reports if r["result"] == "FloatingPointError"]) < 4
    refused = [r for r in reports if r["result"] == "ValueError"]
    assert len(reports) / 3 < len(refused) < len(reports)
    said = [r["message"] for r in refused] + [r["kind"] for r in reports if "kind" in r]
    assert not [text for text in said if "\n" in text or len(text) > 3000]
    assert not [text for text in said if str(tmp_path / "s") not in text]
    assert max(r["seconds"] for r in reports[1:]) < 20
    assert max(r["kibibytes"] for r in reports) < 2**20 * 2
