"""Gradients of group norms as training on GPUs takes them, against PyTorch's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from diffusax.models.ops.norms import group_norm
from diffusax.runtime.devices.lowering import backward_alone, lowering_for
from diffusax.training.step.step import initial_state, make_train_step

GROUPS, EPS = 4, 1e-5


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def inputs(size: int, shifted: bool) -> list[np.ndarray]:
    """A map whose mean is far from zero, the scale, the bias and perhaps a shift."""
    given = [3 + drawn(0, 2, size, size, 8), drawn(1, 8), drawn(2, 8)]
    return [*given, drawn(3, 2, 8)] if shifted else given


def loss(*given: jax.Array) -> jax.Array:
    y = group_norm(*given, groups=GROUPS, eps=EPS)
    return jnp.sum(jnp.sin(y) * drawn(4, *y.shape))


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("size", [3, 8, 40])
def test_gradients_are_those_of_pytorch(size, shifted):
    given = inputs(size, shifted)
    theirs = [torch.from_numpy(x).requires_grad_() for x in given]
    x = theirs[0] if not shifted else theirs[0] + theirs[3][:, None, None]
    normed = torch.nn.functional.group_norm(x.permute(0, 3, 1, 2), GROUPS, *theirs[1:3], EPS)
    y = normed.permute(0, 2, 3, 1)
    (torch.sin(y) * torch.from_numpy(drawn(4, *y.shape))).sum().backward()
    with lowering_for(["cuda"]), backward_alone():
        found = jax.grad(loss, tuple(range(len(given))))(*map(jnp.asarray, given))
    for ours, own in zip(found, theirs, strict=True):
        wanted = own.grad.numpy()
        np.testing.assert_allclose(ours, wanted, atol=2e-5 * np.abs(wanted).max())


def test_only_training_has_gradients_of_its_own():
    given = list(map(jnp.asarray, inputs(4, False)))
    with lowering_for(["cuda"]):
        jax.jvp(loss, given, given)
        with backward_alone(), pytest.raises(TypeError, match="custom_vjp"):
            jax.jvp(loss, given, given)
    optimizer = optax.sgd(0.1)

    def of_batch(params, frozen, batch, keys):
        return loss(batch["x"], params["scale"], params["bias"])[None]

    step = make_train_step(of_batch, optimizer)
    state = initial_state({"scale": given[1], "bias": given[2]}, optimizer, seed=0)
    for platform, count in (("cuda", 2), ("tpu", 0)):
        with lowering_for([platform]):
            traced = str(jax.make_jaxpr(lambda *a: step(*a))(state, {}, {"x": given[0]}))
        # Sums that come together: those of the moments, and those of the gradient of its own.
        assert traced.count(" reduce[") == count, platform
