"""Prompt-to-prompt, DAAM and DIFT, beside PyTorch by hand."""

import contextlib
import importlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from PIL import Image
from support.attention_processors import CrossProcessor, outputs, processed
from support.pairs import with_ddim
from support.repository import ROOT
from support.tiny import SMALLEST_VAE, UNET, build_stable_diffusion

EXAMPLES = ROOT / "examples" / "research"
sys.path.insert(0, str(EXAMPLES))
daam, dift, prompt_to_prompt = map(importlib.import_module, ("daam", "dift", "prompt_to_prompt"))

SIDE = 8
SMALL = {"block_out_channels": (8, 16), "norm_num_groups": 4, "attention_head_dim": 2}
SOURCE, TARGET = "a red apple on a hat", "a green apple on a very ugly hat"
# Which token of the source each one of the target is drawn as: "green" is drawn as "red", and "very
# ugly" as nothing. Padding stays where it is.
PLACES = {**{i: i for i in range(6)}, 8: 6, 9: 7, **{i: i for i in range(10, 77)}}
UGLY = 7
STEPS = 4


@pytest.fixture(scope="module")
def pipes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inside") / "model"
    unet, vae = {**UNET["sd1"], **SMALL, "sample_size": SIDE}, SMALLEST_VAE | {"sample_size": SIDE}
    build_stable_diffusion(folder, unet=unet, vae=vae)
    return with_ddim(folder)


@contextlib.contextmanager
def with_processors(unet, make):
    """Gives all attentions of a UNet processors; make: name -> one."""
    names = [n for n, _ in unet.named_modules() if n.endswith(("attn1", "attn2"))]
    with contextlib.ExitStack() as stack:
        yield {n: stack.enter_context(processed(unet.get_submodule(n), make(n))) for n in names}


class PromptToPrompt(CrossProcessor):
    """Changes the maps of the prompts, which diffusers has after the negative ones, in time."""

    def __init__(self, change, rows):
        super().__init__()
        self.change, self.rows = change, rows

    def read(self, *given):
        early = len(self.maps) < self.rows
        self.edit = lambda probs: torch.cat([probs[:2], self.change(probs[2:], early)])
        return super().read(*given)


def test_prompt_to_prompt_draws_what_processors_in_pytorch_do(pipes):
    theirs, ours = pipes

    def cross(probs, early):
        source, target = probs
        changed = target.clone()
        for j, i in PLACES.items():
            changed[..., j] = source[..., i] if early else target[..., j]
        changed[..., UGLY] *= 3
        return torch.stack([source, changed])

    def own(probs, early):
        return torch.stack([probs[0], probs[0]]) if early else probs

    def processor(name):
        return PromptToPrompt(cross, 3) if name.endswith("attn2") else PromptToPrompt(own, 2)

    latents = np.random.default_rng(0).standard_normal((1, 4, SIDE, SIDE), np.float32)
    latents = np.repeat(latents, 2, axis=0)
    call = {"num_inference_steps": STEPS, "guidance_scale": 5.0, "output_type": "np"}
    call["prompt"] = [SOURCE, TARGET]
    with with_processors(theirs.unet, processor):
        expected = theirs(**call, latents=torch.from_numpy(latents)).images
    rows = {"cross_rows": 3, "self_rows": 2}
    hooks = prompt_to_prompt.edits(ours.tokenizer, SOURCE, TARGET, weights={"ugly": 3}, **rows)
    found = ours(**call, latents=latents, hooks=hooks).images
    np.testing.assert_allclose(found, expected, atol=1e-4)
    plain = ours(**call, latents=latents).images
    np.testing.assert_allclose(found[0], plain[0], atol=1e-4)
    assert np.abs(found[1] - plain[1]).max() > 0.01


def test_heat_maps_are_sums_of_pytorchs_maps(pipes):
    theirs, ours = pipes
    call = {"num_inference_steps": STEPS, "guidance_scale": 5.0, "output_type": "np"}
    latents = np.random.default_rng(1).standard_normal((2, 4, SIDE, SIDE), np.float32)
    prompts = [SOURCE, TARGET]
    with with_processors(theirs.unet, lambda name: CrossProcessor()) as read:
        theirs(prompts, **call, latents=torch.from_numpy(latents))
    expected = torch.zeros(2, 77, SIDE, SIDE)
    for name, processor in read.items():
        for maps in processor.maps if name.endswith("attn2") else ():
            rows = int(maps.shape[2] ** 0.5)
            maps = maps[2:].mean(1).unflatten(1, (rows, rows)).permute(0, 3, 1, 2)
            expected += torch.nn.functional.interpolate(maps, (SIDE, SIDE), mode="bilinear")
    _, found = daam.heat_maps(ours, prompts, **call, latents=latents)
    np.testing.assert_allclose(found, expected.permute(0, 2, 3, 1), atol=1e-4)
    assert found.std((1, 2)).max() > 0.01
    assert daam.places(ours.tokenizer, TARGET, "very ugly") == [6, UGLY]
    with pytest.raises(ValueError, match="'dog', which is not in the prompt"):
        daam.places(ours.tokenizer, SOURCE, "dog")


@torch.no_grad()
def test_features_and_matches_are_those_of_pytorch(pipes):
    theirs, ours = pipes
    pixels = np.random.default_rng(2).uniform(-1, 1, (3, 3, SIDE, SIDE)).astype(np.float32)
    block, t, key = "up_blocks.1.resnets.0", 301, jax.random.key(3)
    x0 = theirs.vae.encode(torch.from_numpy(pixels)).latent_dist.mode()
    x0 *= theirs.vae.config.scaling_factor
    context, _ = theirs.encode_prompt("a hat", "cpu", 1, False)
    with outputs(theirs.unet.get_submodule(block)) as found:
        for own in jax.random.split(key, 2):
            noise = torch.from_numpy(np.array(jax.random.normal(own, x0.shape)))
            x = theirs.scheduler.add_noise(x0, noise, torch.tensor([t]))
            theirs.unet(x, t, context.expand(3, -1, -1))
    expected = sum(found) / 2
    features = dift.dift(ours, pixels, "a hat", block=block, t=t, draws=2, key=key)
    np.testing.assert_allclose(features, expected.permute(0, 2, 3, 1), atol=1e-4)

    points, side = np.array([[1, 3], [6, 5], [4, 0]]), 2 * SIDE
    large = torch.nn.functional.interpolate(expected, (side, side), mode="bilinear")
    large = torch.nn.functional.normalize(large, dim=1)
    wanted = large[0, :, points[:, 1], points[:, 0]]
    best = torch.einsum("cn,bchw->bnhw", wanted, large).flatten(2).argmax(-1)
    best = torch.stack([best % side, best // side], -1)
    places = dift.matches(jnp.asarray(features), points, side)
    np.testing.assert_array_equal(places, best)
    np.testing.assert_array_equal(places[0], points)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "width"),
    [
        ("prompt_to_prompt", ("--weights", "0", "2"), 5 * 132 - 4),
        ("daam", ("--words", "cat", "purple"), 3 * 164 - 4),
        ("dift", ("--draws", "2"), 4 * 196 - 4),
    ],
)
def test_an_example_writes_its_picture(name, options, width, tmp_path):
    output = tmp_path / "picture.png"
    script = [sys.executable, EXAMPLES / f"{name}.py", "--steps", "2", "--output", output]
    done = subprocess.run([*script, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    picture = Image.open(output)
    assert picture.width == width
    assert len(np.unique(np.asarray(picture).reshape(-1, 3), axis=0)) > 500
