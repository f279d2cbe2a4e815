"""Examples of research on runs of samplers, beside PyTorch's diffusers written by hand."""

import itertools
import sys

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.repository import ROOT

import diffusax
from diffusax.checkpoints.tree import params_to_tensors

STEPS, SCALE = 3, 3.0


@pytest.fixture(scope="module")
def pair(tiny_checkpoints):
    """A network of ours and PyTorch's, and embeddings b t d and latents b h w c as in a run."""
    folder = tiny_checkpoints.pipeline("sd")[0]
    ours = diffusax.UNet2DConditionModel.from_pretrained(folder, subfolder="unet")
    theirs = diffusers.UNet2DConditionModel.from_pretrained(folder, subfolder="unet")
    theirs.requires_grad_(False)
    rng = np.random.default_rng(0)
    size = (1, 7, ours.config["cross_attention_dim"])
    text, empty = (rng.standard_normal(size).astype(np.float32) for _ in range(2))
    latents = rng.standard_normal((1, 16, 16, 4)).astype(np.float32)
    return ours, theirs, latents, text, empty


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples/research")
    yield
    for name in ("ddim_inversion", "likelihood", "ddpo"):
        sys.modules.pop(name, None)


def torch_of(array):
    """Latents b h w c as PyTorch has them, other arrays as they are."""
    tensor = torch.tensor(np.asarray(array))
    return tensor.movedim(-1, 1) if tensor.ndim == 4 else tensor


def jax_of(tensor):
    return tensor.detach().movedim(1, -1).numpy()


def close(actual, expected, tolerance=1e-4):
    """Asserts that arrays are the same to a share of the largest number."""
    expected = np.asarray(expected)
    difference = np.abs(np.asarray(actual) - expected).max()
    assert difference <= tolerance * np.abs(expected).max(), difference


@pytest.mark.slow
def test_inversions_equal_pytorch(pair):
    import ddim_inversion as example

    ours, theirs, latents, text, empty = pair
    options = {"timestep_spacing": "leading", "clip_sample": False}
    options |= {"set_alpha_to_one": False, "steps_offset": 1}
    scheduler, inverse = diffusax.DDIMScheduler(**options), diffusax.DDIMInverseScheduler(**options)
    forwards = diffusers.DDIMScheduler(**options)
    backwards = diffusers.DDIMInverseScheduler(**options)

    def guided(x, t, text, empty, scale):
        without, given = theirs(torch.cat([x, x]), t, torch.cat([empty, text])).sample.chunk(2)
        return without + scale * (given - without)

    x, words, nothing = map(torch_of, (latents, text, empty))
    backwards.set_timesteps(STEPS)
    expected = [x]
    for t in backwards.timesteps:
        x = backwards.step(guided(x, t, words, words, 1.0), t, x).prev_sample
        expected.append(x)
    levels = jax.jit(example.invert, static_argnums=(1, 4))(ours, inverse, latents, text, STEPS)
    close(levels, np.stack([jax_of(x) for x in expected]))

    forwards.set_timesteps(STEPS)
    state, table, step = scheduler.functional(STEPS, levels[-1])
    row = jax.tree.map(lambda column: column[0], table)

    def loss(empty):
        prediction = example.guided(ours, state[0], row, text, empty, SCALE)
        return jnp.mean((step(state, row, prediction)[0] - levels[-2]) ** 2)

    nothing.requires_grad_()
    x, t = torch_of(levels[-1]), forwards.timesteps[0]
    after = forwards.step(guided(x, t, words, nothing, SCALE), t, x).prev_sample
    torch.nn.functional.mse_loss(after, torch_of(levels[-2])).backward()
    close(jax.jit(jax.grad(loss))(empty), nothing.grad)

    # Adam's first steps are signs, and the sign of almost nothing is rounding: the mean counts.
    learn = jax.jit(example.null_text, static_argnums=1)
    learnt = learn(ours, scheduler, levels, text, empty, SCALE, 3)
    x, nothing = torch_of(levels[-1]), torch_of(empty)
    for i, t in enumerate(forwards.timesteps):
        nothing = nothing.detach().requires_grad_()
        adam = torch.optim.Adam([nothing], 1e-2)
        target = torch_of(levels[STEPS - 1 - i])
        for _ in range(3):
            adam.zero_grad()
            after = forwards.step(guided(x, t, words, nothing, SCALE), t, x).prev_sample
            torch.nn.functional.mse_loss(after, target).backward()
            adam.step()
        assert np.abs(learnt[i] - nothing.detach().numpy()).mean() < 1e-4
        x = forwards.step(guided(x, t, words, nothing, SCALE), t, x).prev_sample.detach()
    drawn = jax.jit(example.generate, static_argnums=1)(
        ours, scheduler, levels[-1], text, learnt, SCALE
    )
    close(drawn, jax_of(x), 2e-3)
    plain = jnp.broadcast_to(empty, learnt.shape)
    worse = example.generate(ours, scheduler, levels[-1], text, plain, SCALE)
    assert jnp.mean((drawn - latents) ** 2) < 0.9 * jnp.mean((worse - latents) ** 2)


@pytest.mark.slow
def test_the_likelihood_equals_pytorch(pair):
    import likelihood as example

    ours, theirs, latents, text, _ = pair
    scheduler = diffusax.DDIMScheduler(prediction_type="v_prediction")
    probe = np.sign(np.random.default_rng(1).standard_normal(latents.shape)).astype(np.float32)
    measure = jax.jit(example.log_likelihood, static_argnums=(1, 5))
    actual = measure(ours, scheduler, latents, text, probe, STEPS)

    alphas = diffusers.DDIMScheduler().alphas_cumprod[: example.LAST + 1].double()
    every = 0.5 * ((1 - alphas) / alphas).log()
    signs, words = torch_of(probe), torch_of(text)

    def flow(y, u):
        """The slope, and what the probe says of its divergence."""
        y = y.detach().requires_grad_()
        t = float(np.interp(u, every.numpy(), np.arange(example.LAST + 1)))
        sigma = float(np.exp(u))
        x = y / np.hypot(1, sigma)
        v = theirs(x, torch.tensor([t]), words).sample
        slope = sigma * (v + sigma * x) / np.hypot(1, sigma)
        (pulled,) = torch.autograd.grad(slope, y, signs)
        return slope.detach(), (pulled * signs).sum((1, 2, 3))

    y, total = torch_of(latents) / alphas[0].sqrt().float(), 0.0
    places = np.linspace(float(every[0]), float(every[-1]), STEPS + 1)
    for u, after in itertools.pairwise(places):
        h = after - u
        slope, divergence = flow(y, u)
        second, later = flow(y + h * slope, after)
        y, total = y + h * (slope + second) / 2, total + h * (divergence + later) / 2
    deviation = float(np.hypot(1, np.exp(places[-1])))
    prior = torch.distributions.Normal(0.0, deviation).log_prob(y).sum((1, 2, 3))
    expected = prior + total - 0.5 * latents[0].size * alphas[0].log()
    close(actual, expected)


@pytest.mark.slow
def test_the_policy_gradient_equals_pytorch(pair):
    import ddpo as example

    ours, theirs, _, text, empty = pair
    # Betas whose last step has some noise: gradients are divided by its variance.
    options = {"beta_start": 0.01, "steps_offset": 20}
    options |= {"clip_sample": False, "set_alpha_to_one": False}
    scheduler = diffusax.DDIMScheduler(**options)
    texts = np.concatenate([text, empty])
    key = jax.random.key(3)
    latents, old = example.sample(ours, scheduler, texts, key, STEPS)
    # A policy that has moved since: some ratios are clipped.
    old = old + np.linspace(-0.3, 0.2, old.size).reshape(old.shape).astype(np.float32)
    advantages = np.array([1.3, -0.7], np.float32)
    value, gradient = jax.jit(jax.value_and_grad(example.policy_loss), static_argnums=1)(
        ours, scheduler, texts, latents, old, advantages
    )

    reference = diffusers.DDIMScheduler(**options)
    reference.set_timesteps(STEPS)
    theirs.requires_grad_(True)
    total, scores = 0.0, torch.tensor(advantages)
    for i, t in enumerate(reference.timesteps):
        x, after = torch_of(latents[i]), torch_of(latents[i + 1])
        prediction = theirs(x, t, torch_of(texts)).sample
        still = {"eta": 1.0, "variance_noise": torch.zeros_like(x)}
        mean = reference.step(prediction, t, x, **still).prev_sample
        deviation = reference._get_variance(t, t - 1000 // STEPS) ** 0.5
        found = torch.distributions.Normal(mean, deviation).log_prob(after).mean((1, 2, 3))
        ratio = (found - torch.tensor(np.asarray(old[i]))).exp()
        clipped = ratio.clamp(1 - example.CLIP, 1 + example.CLIP)
        total = total - torch.minimum(scores * ratio, scores * clipped).mean() / STEPS
    total.backward()
    theirs.requires_grad_(False)
    np.testing.assert_allclose(value, total.item(), rtol=1e-4)
    mine = params_to_tensors(gradient.params)
    largest = max(float(p.grad.abs().max()) for p in theirs.parameters())
    for name, parameter in theirs.named_parameters():
        difference = np.abs(mine[name] - parameter.grad.numpy()).max()
        assert difference <= 1e-4 * largest, name
