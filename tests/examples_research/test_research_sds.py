"""Score Distillation Sampling and its renderer, beside PyTorch by hand."""

import jax
import numpy as np
import torch
from conftest import torch_parts
from sds import random_scene, render, sds_loss

WEIGHT, TIMES = 5.0, [300, 700]


def torch_render(scene, side):
    line = torch.linspace(-1, 1, side)
    y, x = torch.meshgrid(line, line, indexing="ij")
    image, through = torch.zeros(3, side, side), torch.ones(side, side)
    for i in range(len(scene["angles"])):
        dx, dy = x - scene["centres"][i, 0], y - scene["centres"][i, 1]
        c, s = torch.cos(scene["angles"][i]), torch.sin(scene["angles"][i])
        along, across = scene["log_scales"][i].exp()
        distance = ((c * dx + s * dy) / along) ** 2 + ((c * dy - s * dx) / across) ** 2
        alpha = scene["opacities"][i].sigmoid() * torch.exp(-distance / 2)
        image = image + through * alpha * scene["colours"][i].tanh()[:, None, None]
        through = through * (1 - alpha)
    return image + through * scene["background"].tanh()[:, None, None]


def torch_gradient(pipe, image, contexts, noise):
    """The gradient of equation 3 with respect to the image's latents, and these latents."""
    vae, t = pipe.vae, torch.tensor(TIMES)
    latents = vae.encode(image[None]).latent_dist.mean * vae.config.scaling_factor
    with torch.no_grad():
        x = pipe.scheduler.add_noise(latents.repeat(2, 1, 1, 1), noise, t)
        both = [pipe.unet(x, t, context.repeat(2, 1, 1)).sample for context in contexts[:, None]]
        raw = both[1] + WEIGHT * (both[0] - both[1])
        _, predicted = torch_parts(pipe.scheduler, raw, t, x)
        w = (1 - pipe.scheduler.alphas_cumprod[t]).reshape(-1, 1, 1, 1)
        gradient = (w * (predicted - noise)).mean(0, keepdim=True)
    return latents, gradient


def test_the_image_and_the_gradient_of_a_scene_match_pytorch(sides):
    pipe, side = sides.jax, sides.torch.vae.config.sample_size
    scene = random_scene(jax.random.key(0), 6)
    scene |= {"background": np.array([0.1, -0.2, 0.3], np.float32)}
    scene["log_scales"] = np.random.default_rng(0).normal(-1, 0.3, (6, 2)).astype(np.float32)
    tensors = {k: torch.tensor(np.asarray(v)).requires_grad_() for k, v in scene.items()}
    image = torch_render(tensors, side)
    np.testing.assert_allclose(render(scene, side), image.detach(), atol=1e-5)

    contexts, noise = sides.context(2), sides.noise(2)
    latents, gradient = torch_gradient(sides.torch, image, *map(torch.tensor, (contexts, noise)))
    latents.backward(gradient)
    given = pipe.unet, pipe.vae, pipe.scheduler, contexts, WEIGHT, np.array(TIMES), noise
    found = jax.grad(sds_loss)(scene, *given)
    for name, tensor in tensors.items():
        assert tensor.grad.abs().max() > 1e-3, name
        np.testing.assert_allclose(found[name], tensor.grad, atol=1e-4, err_msg=name)
