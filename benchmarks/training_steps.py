"""Steps of both trainings, one at a time, for train_cpu, train_ip2p_cpu and lora_training_cpu."""

from collections.abc import Callable
from typing import Any

import jax
import torch
from machine import interleaved_medians

from diffusax.runtime.devices.lowering import compiler_options
from diffusax.training.optimizers import OptimizerConfig, make_optimizer
from diffusax.training.step.denoising import DenoisingLoss
from diffusax.training.step.draws import Draws
from diffusax.training.step.step import initial_state, make_train_step

LR = 1e-4


def jax_steps(
    loss: DenoisingLoss, params: Any, frozen: Any, batch: Any, draws: Draws
) -> Callable[[], float]:
    """A function that trains with AdamW on the batch once more, and returns the loss.

    params: the trained parameters by component.
    """
    config = OptimizerConfig(learning_rate=LR)
    optimizer = make_optimizer(config, 1000)
    step = jax.jit(
        make_train_step(
            lambda p, f, batch, keys: loss.with_draws(p, f, *batch["all"]),
            optimizer,
            check_updates=not config.keeps_finite,
        ),
        donate_argnums=0,
        compiler_options=compiler_options() or None,
    )
    data = {"all": jax.device_put((batch, draws))}
    state = initial_state(params, optimizer, seed=0)

    def run() -> float:
        nonlocal state
        state, metrics = step(state, frozen, data)
        jax.block_until_ready(state)
        return float(metrics["loss"])

    return run


def torch_steps(unet: Any, compute: Callable[[], tuple[Any, Any]]) -> Callable[[], float]:
    """The same in PyTorch. compute: the prediction and the target."""
    unet.train()
    trained = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=1e-2)

    def run() -> float:
        prediction, target = compute()
        loss = torch.nn.functional.mse_loss(prediction.float(), target.float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return run


def compare(
    name: str, b: int, ours: Callable[[], float], theirs: Callable[[], float], repeats: int
) -> None:
    """Prints images per second of both, in turns, and how far the first losses differ."""
    differences = [abs(ours() / theirs() - 1) for _ in range(3)]
    medians = interleaved_medians({"diffusax": ours, "PyTorch": theirs}, repeats)
    own, other = (b / medians[system] for system in ("diffusax", "PyTorch"))
    print(
        f"{name}, batch {b}: diffusax {own:.1f}, PyTorch {other:.1f} images/s, {own / other:.2f} "
        f"times as fast (median of {repeats}; losses of the first steps differ by "
        f"{max(differences):.1e})",
        flush=True,
    )
