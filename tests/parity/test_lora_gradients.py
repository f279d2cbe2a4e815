"""Gradients of adapters against PEFT's in live PyTorch, on the same weights and draws.

The loss is that of diffusers' scripts with LoRA (train_text_to_image_lora.py and its kin), see
test_training_conditions.py.
"""

import dataclasses

import jax
import numpy as np
import pytest
from support.effort import few
from support.lora import ATTENTION, TEXT_ATTENTION
from support.lora_training import ALPHA, add_trained, trained_tree
from test_training_conditions import (
    GRADIENT,
    LOSS,
    Case,
    build,
    draw_batch,
    our_loss,
    torch_loss,
)

from diffusax.lora.trained import LayerPlan, TrainedLora

RANK = 4


@dataclasses.dataclass(frozen=True)
class Adapted:
    case: Case
    everything: bool
    """Whether every layer has an adapter, or those of attention alone."""
    dora: bool = False


CASES = {
    "sd1-attention": Adapted(Case("sd1", "epsilon", False), False),
    "sd1-dora": Adapted(Case("sd1", "v_prediction", False, texts=True), True, dora=True),
    "sd1-control": Adapted(Case("sd1", "epsilon", False, control=True), True),
    "sd1-edit": Adapted(Case("sd1", "epsilon", True), True),
    "xl-everything": Adapted(Case("xl", "epsilon", False, texts=True), True),
    "xl-dora": Adapted(Case("xl", "epsilon", False, texts=True), True, dora=True),
}


@pytest.mark.parametrize("name", few(CASES, "sd1-attention"))
def test_gradients_of_adapters_are_those_of_peft(tmp_path, name):
    adapted = CASES[name]
    case = adapted.case
    pipe, batch = build(tmp_path / "model", case), draw_batch()
    encoders = [n for n in ("text_encoder", "text_encoder_2") if case.texts and hasattr(pipe, n)]
    networks = {n: getattr(pipe, n) for n in (case.trained, *encoders)}
    for n in ("unet", "vae", "text_encoder", "text_encoder_2"):
        if hasattr(pipe, n):
            getattr(pipe, n).requires_grad_(False)
    for seed, (n, network) in enumerate(networks.items()):
        ends = TEXT_ATTENTION if n in encoders else ATTENTION
        targets = None if adapted.everything else ends
        add_trained(network, RANK, targets, dora=adapted.dora, seed=seed)

    expected = torch_loss(pipe, batch, case)
    expected.mean().backward()
    adapters = {n: trained_tree(network) for n, network in networks.items()}
    plan = LayerPlan(RANK, ALPHA, adapted.dora)
    lora = TrainedLora({n: dict.fromkeys(own, plan) for n, own in adapters.items()})
    losses, gradient = our_loss(tmp_path / "model", batch, case, lora, adapters)

    np.testing.assert_allclose(losses, expected.detach(), rtol=LOSS)
    theirs = {n: trained_tree(network, gradients=True) for n, network in networks.items()}
    assert jax.tree.structure(gradient) == jax.tree.structure(theirs)
    largest = max(np.abs(g).max() for g in jax.tree.leaves(theirs))
    leaves, _ = jax.tree_util.tree_flatten_with_path(theirs)
    for (path, value), own in zip(leaves, jax.tree.leaves(gradient), strict=True):
        scale = max(np.abs(value).max(), 1e-3 * largest)
        assert np.abs(np.asarray(own) - value).max() < GRADIENT * scale, path
