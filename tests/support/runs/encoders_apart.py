"""Text encoders on other devices than the transformer, against all networks on one.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python encoders_apart.py FOLDER [argument=value]
"""

import ast
import sys

import jax
import numpy as np

import diffusax
from diffusax.models.adapters.low_rank import kernel_shapes
from diffusax.pipelines.pipeline.ahead import example_call, requests
from diffusax.runtime.devices.mesh import make_mesh
from diffusax.runtime.programs.compilations import count_compilations

FOLDER, *OPTIONS = sys.argv[1:]
GIVEN = {k: ast.literal_eval(v) for k, v in (option.split("=", 1) for option in OPTIONS)}
PROMPTS = ["a red apple", "an old house on a hill"]
CALL = {"num_inference_steps": 2, "height": 24, "width": 40, "output_type": "np", **GIVEN}
DEVICES = jax.devices()


def opened(**places):
    pipe = diffusax.DiffusionPipeline.from_pretrained(FOLDER, **places)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def devices_of(params):
    return set().union(*(x.devices() for x in jax.tree.leaves(params)))


def check(name, pipe, encoders, others):
    """The images are those of one device, and the parameters are where they belong."""
    for component in pipe.family.names("text_encoder"):
        assert devices_of(pipe.params[component]) == encoders, component
    for component in ("transformer", "vae"):
        assert devices_of(pipe.params[component]) == others, component
    found = pipe(prompt=PROMPTS, seed=3, **CALL)[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    print(name)


alone = opened(device=DEVICES[0])
expected = alone(prompt=PROMPTS, seed=3, **CALL)[0]
seven = set(DEVICES[1:])
apart = opened(encoder_device=DEVICES[0])
check("one and seven", apart, {DEVICES[0]}, seven)
pair = make_mesh("tensor=2", devices=DEVICES[6:])
split = opened(encoder_device=pair, mesh=make_mesh("data=2,context=2", devices=DEVICES[:4]))
check("two and four", split, set(DEVICES[6:]), set(DEVICES[:4]))
single = opened(encoder_device=DEVICES[5], device=DEVICES[2])
check("one and one", single, {DEVICES[5]}, {DEVICES[2]})
check("another class", type(single).from_pipe(single), {DEVICES[5]}, {DEVICES[2]})
with diffusax.RunningBatch(single) as batch:
    futures = [batch.submit(prompt=p, seed=3, **CALL) for p in PROMPTS]
    for future, prompt in zip(futures, PROMPTS, strict=True):
        own = single(prompt=prompt, seed=3, **CALL)[0]
        np.testing.assert_allclose(future.result(200)[0], own, atol=1e-4)
print("a running batch")
single.compile(sizes=[(32, 24)], **GIVEN)
with count_compilations() as compiled:
    single(prompt=PROMPTS[0], **{**CALL, "height": 32, "width": 24})
assert not {"denoise", "encode_texts", "decode"} & set(compiled), compiled
print("compiled ahead")
elsewhere = make_mesh("data=2", devices=DEVICES[3:5])
call = example_call(single, 2, (32, 24), GIVEN)
for request in requests(single.parts, single.task, call, elsewhere):
    shardings = [x.sharding for x in jax.tree.leaves(request.dynamic) if x.sharding is not None]
    assert {sharding.mesh for sharding in shardings} == {elsewhere}, request.program.name
print("on devices that are elsewhere")
if not GIVEN.get("text_encoder_out_layers"):
    first = opened(encoder_device=DEVICES[5], device=DEVICES[2], encode_first=PROMPTS)
    options = {k: v for k, v in CALL.items() if k != "max_sequence_length"}
    ours = first(prompt=PROMPTS, seed=3, **options)[0]
    np.testing.assert_allclose(ours, alone(prompt=PROMPTS, seed=3, **options)[0], atol=1e-5)
name = single.family.names("text_encoder")[0]
rng = np.random.default_rng(0)
layers = {
    path: tuple(
        rng.standard_normal(size).astype(np.float32) / 4 for size in ((shape[0], 2), (2, shape[1]))
    )
    for path, shape in kernel_shapes(single.parts.models[name].network).items()
    if len(shape) == 2
}
for pipe in (single, alone):
    pipe.add_adapter("style", {name: layers})
images = [
    pipe(prompt=PROMPTS, seed=3, adapters={"style": 1.0}, **CALL)[0] for pipe in (single, alone)
]
np.testing.assert_allclose(*images, atol=1e-5)
assert np.abs(images[0] - expected).max() > 0.01
print("adapters")
try:
    single.prepare_inputs(prompt=PROMPTS, **CALL)
except ValueError as error:
    assert "without encoder_device" in str(error)  # noqa: PT017
    print("generate_fn says no")
