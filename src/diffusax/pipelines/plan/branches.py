"""The arrangement of the branches of guidance in the network's batch.

A network's batch has one lane for each branch of each image. In a run of its own an image's k lanes
lie beside each other. In a running batch they lie anywhere on the device of their image, and an
image has as many of them as it needs.

Shapes in the docstrings: b images, k branches of guidance, m lanes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from diffusax.pipelines.plan.plan import StepInputs
from diffusax.runtime.devices.mesh import BATCH_AXES, batch_size


class Branches(Protocol):
    """The lanes of a batch of images."""

    def from_images(self, y: jax.Array) -> jax.Array:
        """Gives each lane the value of its image, b ... -> m ...."""

    def from_branches(self, y: jax.Array) -> jax.Array:
        """Gives each lane the value of its branch, b k ... -> m ...."""

    def to_branches(self, y: jax.Array) -> jax.Array:
        """Returns the lanes' values by image and branch, m ... -> b k ...."""


@dataclasses.dataclass(frozen=True)
class AdjacentLanes:
    """The lanes of b images with k branches each, of which those of an image are neighbours."""

    k: int

    def from_images(self, y: jax.Array) -> jax.Array:
        """Gives each lane the value of its image, b ... -> m ...."""
        return repeat_branches(y[:, None], self.k)

    def from_branches(self, y: jax.Array) -> jax.Array:
        """Gives each lane the value of its branch, b (k or 1) ... -> m ...."""
        return repeat_branches(y, self.k)

    def to_branches(self, y: jax.Array) -> jax.Array:
        """Returns the lanes' values by image and branch, m ... -> b k ...."""
        return y.reshape(-1, self.k, *y.shape[1:])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScatteredLanes:
    """Lanes that belong to images by indices, which are data.

    On a mesh the lanes of an image lie on its device, and indices count from that device's first.
    """

    owner: Any
    """m, the image of each lane; any image for a lane that is free."""
    branch: Any
    """m, the branch of each lane."""
    lanes: Any
    """b k, the lane of each branch; the number of lanes where the image lacks the branch."""

    def from_images(self, y: jax.Array) -> jax.Array:
        """Gives each lane the value of its image, b ... -> m ...."""
        return _on_each_device(lambda y, owner: y[owner], y, self.owner)

    def from_branches(self, y: jax.Array) -> jax.Array:
        """Gives each lane the value of its branch, b k ... -> m ...."""
        return _on_each_device(lambda y, i, j: y[i, j], y, self.owner, self.branch)

    def taken(self) -> jax.Array:
        """Returns which lanes are a branch of an image, m."""

        def own(owner: jax.Array, lanes: jax.Array) -> jax.Array:
            return (lanes.reshape(-1) == jnp.arange(len(owner))[:, None]).any(1)

        return _on_each_device(own, self.owner, self.lanes)

    def to_branches(self, y: jax.Array) -> jax.Array:
        """Returns the lanes' values by image and branch, m ... -> b k ....

        A missing branch equals the first.

        They are gathered, never scattered and never multiplied by zero, so that an image's values
        are the same bits whatever the other lanes hold.
        """

        def gather(y: jax.Array, lanes: jax.Array) -> jax.Array:
            first = jnp.minimum(lanes[:, :1], len(y) - 1)
            return y[jnp.where(lanes < len(y), lanes, first)]

        return _on_each_device(gather, y, self.lanes)


def lane_inputs(inputs: StepInputs, branches: Branches, b: int) -> StepInputs:
    """Returns a row's inputs for each lane, as a denoiser takes them.

    Args:
        inputs: the inputs of one row. control: m k r or b m k r, see `StepInputs`; freeu: 4 or b 4;
            adapters: a or b a; target: a scalar or b.
        branches: the lanes.
        b: the number of images.
    """
    control = inputs.control
    if control is not None:
        each = jnp.broadcast_to(control, (b, *control.shape[-3:]))
        control = branches.from_branches(jnp.moveaxis(each, 2, 1))

    def of_images(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else branches.from_images(jnp.broadcast_to(x, (b, x.shape[-1])))

    target = inputs.target
    if target is not None:
        target = branches.from_images(jnp.broadcast_to(target, (b,)))
    of_rows = of_images(inputs.freeu), of_images(inputs.adapters), target
    return StepInputs(None, None, control, *of_rows)


def _on_each_device(function: Callable[..., jax.Array], *arrays: Any) -> jax.Array:
    """Calls a function on each device's share of the arrays, split along their first axis.

    XLA would gather all lanes on all devices for indices that it does not know.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or batch_size(mesh) == 1:
        return function(*arrays)
    spec = PartitionSpec(BATCH_AXES)
    mapped: Callable[..., jax.Array] = functools.partial(
        jax.shard_map, in_specs=spec, out_specs=spec, axis_names=set(BATCH_AXES)
    )(function)
    return mapped(*arrays)


def repeat_branches(y: jax.Array, k: int) -> jax.Array:
    """Merges the axis of the branches into the batch, b (k or 1) ... -> (b k) ....

    The k branches of an image stay beside each other.
    """
    return jnp.broadcast_to(y, (y.shape[0], k, *y.shape[2:])).reshape(-1, *y.shape[2:])
