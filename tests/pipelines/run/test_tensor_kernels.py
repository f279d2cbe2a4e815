"""Kernels of several layers on a mesh with a tensor axis, before the sampler's loop and in it."""

import jax
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType
from support.many_devices import run_on_devices
from support.runs import RUNS
from support.tiny import build_stable_diffusion
from support.tiny_transformers import flux_pipeline, klein_pipeline

import diffusax
from diffusax.pipelines.pipeline import ahead
from diffusax.pipelines.run.programs import run_rows

FAMILIES = {
    "sd1": (build_stable_diffusion, {}),
    "flux": (flux_pipeline, {"max_sequence_length": 32}),
    "klein": (klein_pipeline, {"text_encoder_out_layers": (1, 2, 3), "max_sequence_length": 64}),
}


def constrained(jaxpr, inside: bool = False):
    """The shapes of all arrays that are placed on devices, and whether that is in a loop."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "sharding_constraint":
            yield equation.outvars[0].aval.shape, inside
        looped = inside or equation.primitive.name in ("while", "scan")
        for inner in jaxprs_in_params(equation.params):
            yield from constrained(inner, looped)


def is_kernel(shape) -> bool:
    # Modulations have a row for each of one or two images.
    return len(shape) == 2 and min(shape) > 2


@pytest.mark.parametrize("name", FAMILIES)
def test_kernels_are_arranged_before_the_loop(tmp_path, name):
    build, options = FAMILIES[name]
    build(tmp_path)
    pipe = ahead.shapes_only(diffusax.DiffusionPipeline, tmp_path, dtype="float32")
    call = ahead.example_call(pipe, 1, (32, 32), options)
    found = {r.program.name: r for r in ahead.requests(pipe.parts, pipe.task, call, None)}
    request = found["denoise"]
    ((_, denoiser),) = request.static
    traced = {}
    for sizes in ((1, 1, 1), (1, 1, 2)):
        mesh = AbstractMesh(sizes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
        with jax.sharding.use_abstract_mesh(mesh):
            jaxpr = jax.make_jaxpr(lambda *given: run_rows(denoiser, *given))(*request.dynamic[:-1])
        traced[sizes[-1]] = [inside for size, inside in constrained(jaxpr.jaxpr) if is_kernel(size)]
    assert traced[1] == []
    assert len(traced[2]) >= 4
    assert not any(traced[2])


def test_kernels_in_the_order_of_the_devices_are_those_of_one(tmp_path):
    klein_pipeline(tmp_path / "klein")
    found = run_on_devices(RUNS / "arranged_on_mesh.py", tmp_path / "klein", tmp_path / "out")
    assert found == ["loaded", "saved", "moved", "written", "fused", "quantised"]
