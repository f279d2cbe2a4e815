"""What a step with LoRA takes, by the compiler: no gradient of a frozen kernel, no second copy."""

from typing import Any

import jax
import pytest
from support.training_runs import prepared

from diffusax.runtime.devices.mesh import make_mesh
from diffusax.runtime.programs.flops import count_training_flops
from diffusax.training import LoRAConfig, TextToImageConfig, text_to_image
from diffusax.training.loop.program import (
    abstract_arguments,
    bytes_on_device,
    optimizer_of,
    step_program,
)

BATCH = 4


class Step:
    """A step of a run on one device, compiled."""

    def __init__(self, checkpoint, pictures, **options: Any):
        self.config = config = TextToImageConfig(
            model=str(checkpoint),
            data=prepared(pictures),
            batch_size=BATCH,
            compute_dtype="float32",
            **options,
        )
        self.recipe = text_to_image(config)
        self.mesh = make_mesh("data=1", devices=jax.local_devices()[:1])
        self.state, self.frozen, self.batch = abstract_arguments(self.recipe, config, self.mesh)
        self.keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), BATCH))
        optimizer = optimizer_of(config)
        program = step_program(self.recipe, config, optimizer, self.mesh, self.state)
        with jax.set_mesh(self.mesh):
            self.compiled = program.lower(self.state, self.frozen, self.batch).compile()

    def flops(self) -> tuple[float, int]:
        """Those of the program, and those of the loss and the gradients that are needed."""
        given = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
            (self.state.params, self.frozen, self.batch),
        )
        needed = count_training_flops(self.recipe.loss, *given, self.keys)
        return self.compiled.cost_analysis()["flops"], needed

    def activations(self) -> int:
        """The bytes that loss and gradient need besides their arguments and results."""
        gradient = jax.grad(lambda *args: self.recipe.loss(*args).mean())
        with jax.set_mesh(self.mesh):
            lowered = jax.jit(gradient).lower(self.state.params, self.frozen, self.batch, self.keys)
        return int(lowered.compile().memory_analysis().temp_size_in_bytes)


def test_what_a_step_changes_is_not_copied_before(checkpoint, pictures):
    text = Step(checkpoint, pictures, lora=LoRAConfig(rank=4)).compiled.as_text()
    assert "(%state_" in text
    assert " copy(%state_" not in text


@pytest.mark.slow
def test_no_gradient_of_a_frozen_kernel_is_computed(checkpoint, pictures):
    (own, needed), (whole, needed_whole) = (
        Step(checkpoint, pictures, **options).flops()
        for options in ({"lora": LoRAConfig(rank=4)}, {})
    )
    # XLA does not count what a convolution multiplies with its padding.
    assert own / needed < 1.01 * whole / needed_whole
    assert own < 0.8 * whole


@pytest.mark.slow
def test_a_step_needs_memory_for_adapters_and_activations_alone(checkpoint, pictures):
    step = Step(checkpoint, pictures, lora=LoRAConfig(rank=64, targets=("all",)))
    adapters, memory = bytes_on_device(step.state.params), step.compiled.memory_analysis()
    # What is donated: the adapters and their two moments.
    assert memory.alias_size_in_bytes < 1.01 * 3 * adapters
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 0.01 * adapters
    taken = memory.alias_size_in_bytes + memory.temp_size_in_bytes
    assert taken < 1.1 * (4 * adapters + step.activations())


@pytest.mark.slow
def test_a_step_holds_no_copy_of_the_frozen_model(checkpoint, pictures):
    step = Step(checkpoint, pictures, lora=LoRAConfig(rank=4))
    adapters = bytes_on_device(step.state.params)
    # Adapters on attention hold what the whole network's training holds, and their gradients. A
    # copy of the frozen parameters, each made where it is used, would be 10% more.
    expected = Step(checkpoint, pictures).activations() + adapters
    assert step.compiled.memory_analysis().temp_size_in_bytes < 1.05 * expected
