"""Optimizers against PyTorch's, learning rates against diffusers' schedules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from diffusers.optimization import get_scheduler
from support.effort import first

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
    ours = learning_rate(
        OptimizerConfig(learning_rate=0.3, schedule=name, warmup_steps=warmup), STEPS
    )
    for step in range(STEPS):
        assert float(ours(step)) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-6)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("max_norm", [0.5, float("inf")])
def test_adamw_with_clipping_matches_pytorch(max_norm):
    rng = np.random.default_rng(0)
    start = rng.standard_normal((4, 3)).astype(np.float32)
    config = OptimizerConfig(
        learning_rate=0.05, weight_decay=0.1, beta2=0.95, max_grad_norm=max_norm
    )
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


def test_components_with_their_own_rate_are_pytorchs_groups_of_parameters():
    rng = np.random.default_rng(0)
    draw = lambda: rng.standard_normal((4, 3)).astype(np.float32)  # noqa: E731
    params = start = {"unet": draw(), "text_encoder": draw(), "text_encoder_2": draw()}
    config = OptimizerConfig(learning_rate=0.05, weight_decay=0.1, schedule="linear")
    optimizer = make_optimizer(config, STEPS, {"text_encoder": 0.002})
    state = optimizer.init(params)
    plain = make_optimizer(config, STEPS).init(params)
    assert jax.tree.structure(state) == jax.tree.structure(plain)
    theirs = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in start.items()}
    groups = [{"params": [x], "lr": 0.05 if n == "unet" else 0.002} for n, x in theirs.items()]
    torch_optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
    scheduler = get_scheduler(
        "linear", torch_optimizer, num_warmup_steps=0, num_training_steps=STEPS
    )
    for _ in range(10):
        gradient = {name: draw() for name in params}
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        for name, parameter in theirs.items():
            parameter.grad = torch.tensor(gradient[name])
        torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)
        torch_optimizer.step()
        scheduler.step()
    for name, parameter in theirs.items():
        np.testing.assert_allclose(params[name], parameter.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", first(["adamw", "adafactor", "lion", "muon"], 2))
def test_every_optimizer_goes_downhill(name):
    optimizer = make_optimizer(OptimizerConfig(name=name, learning_rate=0.05, beta2=0.99), 100)
    params = start = {"linear": {"kernel": 3 * jnp.eye(8), "bias": jnp.ones(8)}}
    state = optimizer.init(params)
    for _ in range(60):
        updates, state = optimizer.update(jax.tree.map(lambda p: 2 * p, params), state, params)
        params = optax.apply_updates(params, updates)
    for before, after in zip(jax.tree.leaves(start), jax.tree.leaves(params), strict=True):
        assert (after**2).mean() < 0.6 * (before**2).mean()


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "muon"])
def test_the_decay_follows_the_learning_rate(name):
    config = OptimizerConfig(name=name, learning_rate=0.1, schedule="linear", weight_decay=0.5)
    optimizer = make_optimizer(config, 4)
    params = {"linear": {"kernel": jnp.ones((8, 8))}}
    state = optimizer.init(params)
    for step in range(4):
        updates, state = optimizer.update(jax.tree.map(jnp.zeros_like, params), state, params)
        decay = 0.5 * float(learning_rate(config, 4)(step))
        np.testing.assert_allclose(updates["linear"]["kernel"], -decay, rtol=1e-5)


@pytest.mark.slow
def test_muon_moves_kernels_by_orthogonal_matrices_and_all_else_as_adamw():
    """Against torch.optim.Muon, which takes 2-D parameters, with the kernels as in PyTorch."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    params = {
        "conv_in": {"kernel": draw(3, 3, 4, 8), "bias": draw(8)},
        "conv1": {"kernel": draw(3, 3, 8, 16)},
        "proj": {"kernel": draw(12, 6)},
        "tokens": {"embedding": draw(10, 4)},
    }
    config = OptimizerConfig(
        name="muon", learning_rate=0.01, weight_decay=0.1, beta2=0.99, max_grad_norm=float("inf")
    )
    optimizer = make_optimizer(config, STEPS)
    state = optimizer.init(jax.tree.map(jnp.asarray, params))
    muon = {name: _matrix(params[name]["kernel"]) for name in ("conv1", "proj")}
    theirs = torch.optim.Muon(
        muon.values(), lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adamw = optax.adamw(0.01, b2=0.99, weight_decay=0, nesterov=True)
    start = params
    rest = {name: params[name] for name in ("conv_in", "tokens")}
    rest_state = adamw.init(rest)
    for _ in range(10):
        gradient = jax.tree.map(lambda x: draw(*x.shape), params)
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        for name, parameter in muon.items():
            parameter.grad = _matrix(gradient[name]["kernel"]).detach()
        theirs.step()
        updates, rest_state = adamw.update({n: gradient[n] for n in rest}, rest_state, rest)
        rest = optax.apply_updates(rest, updates)
    for name, parameter in muon.items():
        ours, before = (_matrix(p[name]["kernel"]).detach() for p in (params, start))
        # PyTorch iterates in bfloat16.
        error = torch.linalg.norm(ours - parameter.detach())
        assert error < 0.05 * torch.linalg.norm(ours - before)
    for name in rest:
        for a, b in zip(jax.tree.leaves(rest[name]), jax.tree.leaves(params[name]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


def _matrix(kernel) -> torch.nn.Parameter:
    """A kernel as PyTorch has it, outputs by inputs."""
    kernel = np.asarray(kernel)
    return torch.nn.Parameter(torch.tensor(kernel.reshape(-1, kernel.shape[-1]).T.copy()))


@pytest.mark.parametrize("options", [{"name": "sgd"}, {"schedule": "step"}, {"max_grad_norm": 0}])
def test_options_that_cannot_be(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        OptimizerConfig(**options)
