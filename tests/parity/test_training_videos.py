"""Training of Wan against a plain loop of PyTorch with diffusers' networks."""

from typing import Any

import jax
import numpy as np
import pytest
from support.effort import few
from support.lora import ATTENTION
from support.lora_training import ALPHA, add_trained, check_gradients, trained_tree
from support.video_training import (
    WAN22,
    draw_batches,
    options,
    our_losses,
    pipeline,
    torch_losses,
    write_clips,
)

from diffusax.checkpoints.tree import params_to_tensors
from diffusax.training import LoRAConfig, text_to_video

RANK, RATE = 4, 1e-3
KINDS = (
    *("text-to-video", "high_noise", "low_noise", "tokens", "tokens-first"),
    *("image-to-video", "first-and-last", "channels", WAN22),
)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return write_clips(tmp_path_factory.mktemp("clips"))


def prepared(tmp_path: Any, clips: Any, kind: str, *, adapters: bool) -> tuple[Any, Any, Any]:
    """PyTorch's pipeline, the recipe, and what is trained of both."""
    pipe = pipeline(tmp_path / "model", kind)
    name = "transformer_2" if kind == "low_noise" else "transformer"
    changes: dict[str, Any] = {"gradient_checkpointing": "blocks"}
    if kind.endswith("_noise"):
        changes["expert"] = kind
    if kind.startswith("tokens-first"):
        changes["first_frame"] = 0.5
    network = getattr(pipe, name)
    if adapters:
        add_trained(network, RANK, list(ATTENTION))
        changes["lora"] = LoRAConfig(rank=RANK, alpha=ALPHA * RANK)
    else:
        network.requires_grad_(True)
    recipe = text_to_video(options(tmp_path / "model", clips, kind, **changes))
    trained = recipe.trained()
    if adapters:
        own = {name: trained_tree(network)}
        assert jax.tree.map(np.shape, own) == jax.tree.map(np.shape, trained)
        trained = own
    return pipe, recipe, trained


def losses_alike(tmp_path: Any, clips: Any, kind: str, *, steps: int, adapters: bool) -> None:
    pipe, recipe, trained = prepared(tmp_path, clips, kind, adapters=adapters)
    run = draw_batches(kind, steps=steps)
    # The same clips again and again, so that something is learnt.
    run = [{**batch, "pixel_values": run[0]["pixel_values"]} for batch in run]
    name = recipe.base.denoiser
    # PyTorch changes its parameters, which are ours at the beginning.
    losses, first = our_losses(recipe, trained, run, adamw=RATE)
    expected, theirs = torch_losses(pipe, run, kind, adamw=RATE, adapters=adapters)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert np.ptp(expected) > 1e-3
    check_gradients(first[name] if adapters else params_to_tensors(first[name]), theirs)


FEW = ("text-to-video", "low_noise", "tokens-first", "image-to-video")


@pytest.mark.parametrize("kind", few(KINDS, *FEW))
def test_losses_and_gradients_of_adapters_are_those_of_pytorch(tmp_path, clips, kind):
    losses_alike(tmp_path, clips, kind, steps=3, adapters=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FEW)
def test_losses_of_twenty_steps_are_those_of_pytorch(tmp_path, clips, kind):
    losses_alike(tmp_path, clips, kind, steps=20, adapters=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text-to-video", "high_noise", "image-to-video"])
def test_whole_networks_are_trained_as_in_pytorch(tmp_path, clips, kind):
    losses_alike(tmp_path, clips, kind, steps=3, adapters=False)
