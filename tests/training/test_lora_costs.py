"""What a step with LoRA takes, by the compiler: no gradient of a frozen kernel, no second copy."""

import jax
import numpy as np
import pytest
from test_text_to_image import prepared

from diffusax.runtime.flops import count_flops, count_training_flops
from diffusax.runtime.mesh import make_mesh
from diffusax.training import LoRAConfig, TextToImageConfig, text_to_image
from diffusax.training.memory import bytes_on_device
from diffusax.training.program import abstract_arguments, lower_step


def compiled_step(checkpoint, pictures, **options):
    """A step of a run on one device, its arguments as shapes, and its recipe."""
    config = TextToImageConfig(
        model=str(checkpoint),
        data=prepared(pictures),
        batch_size=4,
        compute_dtype="float32",
        **options,
    )
    recipe, mesh = text_to_image(config), make_mesh("data=1", devices=jax.local_devices()[:1])
    arguments = abstract_arguments(recipe, config, mesh)
    return lower_step(recipe, config, mesh).compile(), arguments, recipe


def network_flops(recipe, arguments) -> tuple[int, int]:
    """Operations of the loss alone, and of the loss with the gradients that are needed."""
    state, frozen, batch = arguments
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 4))
    given = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state.params, frozen, batch)
    )
    return count_flops(recipe.loss, *given, keys), count_training_flops(recipe.loss, *given, keys)


@pytest.mark.slow
def test_no_gradient_of_a_frozen_kernel_is_computed(checkpoint, pictures):
    lora = LoRAConfig(rank=4)
    counts, needed, forward = {}, {}, {}
    for name, options in (("lora", {"lora": lora}), ("full", {})):
        step, arguments, recipe = compiled_step(checkpoint, pictures, **options)
        counts[name] = step.cost_analysis()["flops"]
        forward[name], needed[name] = network_flops(recipe, arguments)
    print(counts, needed, forward)
    assert counts["lora"] < 1.05 * needed["lora"]


@pytest.mark.slow
def test_a_step_needs_memory_for_adapters_and_activations_alone(checkpoint, pictures):
    step, arguments, recipe = compiled_step(
        checkpoint, pictures, lora=LoRAConfig(rank=16, targets=("all",))
    )
    state, frozen, batch = arguments
    memory = step.memory_analysis()
    adapters = bytes_on_device(state.params)
    given = memory.argument_size_in_bytes - bytes_on_device(frozen) - bytes_on_device(batch)
    print(
        given,
        adapters,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        bytes_on_device(frozen),
    )
    assert abs(given - 3 * adapters) < 0.02 * adapters
