"""The norm of arrays that four devices share.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python norm_of_shares.py
"""

import functools

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from diffusax.runtime.devices.mesh import make_mesh
from diffusax.training.optimizers import global_norm_of_shares

SPECS = {
    "whole": ((3, 3, 4, 6), PartitionSpec()),
    "fsdp": ((8, 6), PartitionSpec("fsdp")),
    "both": ((8, 6), PartitionSpec("tensor", "fsdp")),
    "together": ((12,), PartitionSpec(("fsdp", "tensor"))),
    "bias": ((6,), PartitionSpec()),
}

mesh = make_mesh("data=1,fsdp=2,tensor=2")
rng = np.random.default_rng(0)
tree = {name: rng.standard_normal(shape).astype(np.float32) for name, (shape, _) in SPECS.items()}
shardings = {name: NamedSharding(mesh, spec) for name, (_, spec) in SPECS.items()}
expected = np.linalg.norm(np.concatenate([x.ravel() for x in tree.values()]))
for stored in (True, False):
    with jax.set_mesh(mesh):
        norm = jax.jit(functools.partial(global_norm_of_shares, shardings=shardings, stored=stored))
        np.testing.assert_allclose(norm(jax.device_put(tree, shardings)), expected, rtol=1e-6)
        # The compiler may have them otherwise before.
        np.testing.assert_allclose(norm(tree), expected, rtol=1e-6)
print("equal")
