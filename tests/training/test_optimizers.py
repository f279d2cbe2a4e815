"""Optimizers against PyTorch's, learning rates against diffusers' schedules."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from diffusers.optimization import get_scheduler

from diffusax.training.optimizers import OptimizerConfig, learning_rate, make_optimizer

STEPS, WARMUP = 50, 7


@pytest.mark.parametrize("warmup", [0, WARMUP])
@pytest.mark.parametrize("name", ["constant", "cosine", "linear"])
def test_learning_rates_match_diffusers(name, warmup):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    upstream = "constant_with_warmup" if name == "constant" else name
    scheduler = get_scheduler(
        upstream, optimizer, num_warmup_steps=warmup, num_training_steps=STEPS
    )
    ours = learning_rate(OptimizerConfig(lr=0.3, lr_schedule=name, lr_warmup_steps=warmup), STEPS)
    for step in range(STEPS):
        assert float(ours(step)) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-6)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("max_norm", [0.5, float("inf")])
def test_adamw_with_clipping_matches_pytorch(max_norm):
    rng = np.random.default_rng(0)
    start = rng.standard_normal((4, 3)).astype(np.float32)
    config = OptimizerConfig(lr=0.05, weight_decay=0.1, beta2=0.95, max_grad_norm=max_norm)
    optimizer = make_optimizer(config, STEPS)
    params, state = jnp.asarray(start), optimizer.init(jnp.asarray(start))
    theirs = torch.nn.Parameter(torch.tensor(start))
    torch_optimizer = torch.optim.AdamW([theirs], lr=0.05, weight_decay=0.1, betas=(0.9, 0.95))
    for _ in range(10):
        gradient = rng.standard_normal((4, 3)).astype(np.float32)
        updates, state = optimizer.update(jnp.asarray(gradient), state, params)
        params = optax.apply_updates(params, updates)
        theirs.grad = torch.tensor(gradient)
        torch.nn.utils.clip_grad_norm_([theirs], max_norm)
        torch_optimizer.step()
    np.testing.assert_allclose(params, theirs.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion"])
def test_every_optimizer_goes_downhill(name):
    optimizer = make_optimizer(OptimizerConfig(optimizer=name, lr=0.05, beta2=0.99), 100)
    params = jnp.ones((8, 8))
    state = optimizer.init(params)
    for _ in range(40):
        updates, state = optimizer.update(2 * params, state, params)
        params = optax.apply_updates(params, updates)
    assert float((params**2).mean()) < 0.5


@pytest.mark.parametrize(
    "options", [{"optimizer": "sgd"}, {"lr_schedule": "step"}, {"max_grad_norm": 0}]
)
def test_options_that_cannot_be(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        OptimizerConfig(**options)
