"""Networks and pipelines on meshes of the user's own, beside one device.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python own_meshes_run.py CHECKPOINT CASE...
"""

import contextlib
import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import diffusax
from support.many_devices import split_small_arrays

FOLDER, *CASES = sys.argv[1:]
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
MESHES = {
    name: jax.make_mesh((2, 2), ("rows", "parts"), axis_types=(kind,) * 2)
    for name, kind in KINDS.items()
}
UNet = diffusax.UNet2DConditionModel
RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 4, 8, 8)).astype(np.float32)
CONTEXT = RNG.standard_normal((4, 5, 32)).astype(np.float32)
CALL = {"num_inference_steps": 2, "seed": 0, "height": 16, "width": 16}


def predict(unet, x, context):
    return unet(x, 5, context).sample


def loss(unet, x, context):
    return (predict(unet, x, context) ** 2).mean()


def close(found, expected, atol=1e-5):
    def compare(a, b):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=atol)

    jax.tree.map(compare, jax.device_get(found), jax.device_get(expected))


def split_over(sharding):
    return {axis for axis in sharding.spec if axis is not None}


def on(mesh, *arrays):
    return tuple(jax.device_put(x, NamedSharding(mesh, P("rows"))) for x in arrays)


def loaded(mesh, *split):
    with split_small_arrays():
        return UNet.from_pretrained(FOLDER, subfolder="unet", device=NamedSharding(mesh, P(*split)))


def a_model(mesh, plain):
    """Called, in jit, and its gradients, where the mesh is set and where only arrays are on it."""
    unet, given = loaded(mesh), on(mesh, X, CONTEXT)
    for is_set in (True, False):
        with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
            found = unet(given[0], 5, given[1]).sample
            close(found, plain["sample"])
            # A user's own operation, which JAX refuses for arrays of another mesh.
            close(found + given[0], plain["sample"] + X)
            assert "rows" in found.sharding.spec, found.sharding
            traced = jax.jit(predict)(unet, *given)
            close(traced, plain["sample"])
            assert "rows" in traced.sharding.spec, traced.sharding
            close(jax.jit(jax.grad(loss))(unet, *given).params, plain["gradients"])
    # A pipeline's model, which is on a mesh of the pipeline's.
    spread = diffusax.StableDiffusionPipeline.from_pretrained(FOLDER)
    close(spread.unet(given[0], 5, given[1]).sample, plain["sample"])


def shards(mesh, plain):
    """Parameters as they are read, by a sharding's axes or a function."""
    unet = loaded(mesh, "parts")
    kernel = unet.params["down_blocks"]["0"]["resnets"]["0"]["conv1"]["kernel"]
    assert split_over(kernel.sharding) == {"parts"}
    assert kernel.addressable_shards[0].data.size == kernel.size // 2
    given = on(mesh, X, CONTEXT)
    close(jax.jit(predict)(unet, *given), plain["sample"])
    close(unet(given[0], 5, given[1]).sample, plain["sample"])
    gradients = jax.jit(jax.grad(loss))(unet, *given)
    close(gradients.params, plain["gradients"])

    def place(name, shape):
        whole = name != "conv_in.kernel" or len(shape) != 4
        return NamedSharding(mesh, P() if whole else P(None, None, None, "rows"))

    chosen = UNet.from_pretrained(FOLDER, subfolder="unet", device=place)
    assert split_over(chosen.params["conv_in"]["kernel"].sharding) == {"rows"}
    assert split_over(chosen.params["conv_out"]["kernel"].sharding) == set()
    close(jax.jit(predict)(chosen, *given), plain["sample"])


def mapped_shards(mesh, plain):
    """Networks and their gradients inside of shard_map, over all axes and over one."""
    unet, given = loaded(mesh), on(mesh, X, CONTEXT)
    specs = (P(), P("rows"), P("rows"))
    for axes in ({"rows", "parts"}, {"rows"}):
        mapped = jax.shard_map(
            predict, mesh=mesh, in_specs=specs, out_specs=P("rows"), axis_names=axes
        )
        close(jax.jit(mapped)(unet, *given), plain["sample"])

    def of_all(unet, x, context):
        return jax.lax.pmean(loss(unet, x, context), "rows")

    mapped = jax.shard_map(jax.grad(of_all), mesh=mesh, in_specs=specs, out_specs=P())
    close(jax.jit(mapped)(unet, *given).params, plain["gradients"])


def pipelines(mesh, plain):
    """On the mesh of a sharding, or on the mesh; calls and their pure function."""
    make = diffusax.StableDiffusionPipeline.from_pretrained
    one = make(FOLDER, device=jax.devices()[0])
    one.set_progress_bar_config(disable=True)
    with split_small_arrays():
        made = [make(FOLDER, device=NamedSharding(mesh, P("parts"))), make(FOLDER, mesh=mesh)]
    assert [dict(pipe.mesh.shape) for pipe in made] == [
        {"data": 2, "fsdp": 2, "tensor": 1},
        {"data": 4, "fsdp": 1, "tensor": 1},
    ]
    options = {**CALL, "num_images_per_prompt": 4, "output_type": "np"}
    images = one("a cat", **options).images
    for pipe in made:
        pipe.set_progress_bar_config(disable=True)
        close(pipe("a cat", **options).images, images, 1e-4)
    inputs = one.prepare_inputs(["a cat"] * 4, **CALL)
    expected = one.generate_fn(one.params, inputs)
    rows = jax.tree.map(lambda x: P("rows") if x.shape[:1] == (4,) else P(), inputs)
    inputs = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), inputs, rows)
    params = jax.device_put(one.params, NamedSharding(mesh, P()))
    for function in (one.generate_fn, jax.jit(one.generate_fn)):
        close(function(params, inputs), expected, 1e-4)


assert jax.device_count() == 4
PLAIN = {"unet": UNet.from_pretrained(FOLDER, subfolder="unet")}
PLAIN["sample"] = np.asarray(predict(PLAIN["unet"], X, CONTEXT))
PLAIN["gradients"] = jax.jit(jax.grad(loss))(PLAIN["unet"], X, CONTEXT).params
PLAIN["spread"] = diffusax.StableDiffusionPipeline.from_pretrained(FOLDER)
PLAIN["pipe"] = diffusax.StableDiffusionPipeline.from_pretrained(FOLDER, device=jax.devices()[0])
PLAIN["pipe"].set_progress_bar_config(disable=True)
if "pipelines" in CASES:
    PLAIN["images"] = PLAIN["pipe"](
        "a cat", **CALL, num_images_per_prompt=4, output_type="np"
    ).images
for case in CASES:
    for mesh in MESHES.values():
        globals()[case](mesh, PLAIN)
    print(case)
