"""Draws each task on one device and on meshes of eight, in one process of eight devices.

python mesh_run.py CHECKPOINTS OUT.json 'TASK MESH [SAMPLER]' ...

CHECKPOINTS holds tiny checkpoints by kind.
"""

import functools
import json
import sys
from pathlib import Path

import jax
import numpy as np
from flax import nnx

import diffusax
from diffusax.models.layers.rngs import ShapeRngs
from diffusax.models.layers.transformer import TENSOR_RULES, BasicTransformerBlock
from diffusax.models.ops import attention
from diffusax.models.ops.attention_kernels import Operands
from diffusax.pipelines.run import autoencoding
from diffusax.runtime.devices import mesh as meshes
from diffusax.runtime.devices.mesh import make_mesh
from diffusax.runtime.programs.program import lower
from diffusax.runtime.switches import in_mesh
from support.adapted import random_adapter
from support.compiled_programs import compiled_programs
from support.data_sets import smooth_picture
from support.hooks import defined
from support.many_devices import split_small_arrays

MESHES = ("data=8", "fsdp=8", "data=2,fsdp=2,tensor=2", "data=4,tensor=2")
CALL = {"num_inference_steps": 2, "output_type": "np", "seed": 3, "guidance_scale": 3.0}
PROMPTS = ["a frog", "a boat", "two dogs"]
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
ADAPTERS = [{"style": 0.8}, {"face": -0.5, "style": 0.2}, {}]


def tasks() -> dict[str, tuple[str, str, dict]]:
    """Class, kind of checkpoint and arguments of each task."""
    image = {"image": smooth_picture(0)}
    (projected,) = defined("AdaptiveProjectedGuidance")
    masked = {**image, "mask_image": smooth_picture(1).convert("L")}
    return {
        "text": ("StableDiffusionPipeline", "sd", {}),
        "xl": ("StableDiffusionXLPipeline", "xl", {}),
        "img2img": ("StableDiffusionImg2ImgPipeline", "sd", {**image, "strength": 1.0}),
        "several": (
            "StableDiffusionImg2ImgPipeline",
            "sd",
            {"image": [smooth_picture(i) for i in range(len(PROMPTS))], "strength": 0.9},
        ),
        "inpaint": ("StableDiffusionInpaintPipeline", "sd", masked),
        "inpaint9": ("StableDiffusionInpaintPipeline", "sd-inpaint", masked),
        "instruct": ("StableDiffusionInstructPix2PixPipeline", "sd-instruct", image),
        "rule": ("StableDiffusionPipeline", "sd", {"guide": projected(eta=0.3, norm_threshold=9)}),
        "freeu": ("StableDiffusionPipeline", "sd", {}),
        "asymmetric": ("StableDiffusionInpaintPipeline", "sd", masked),
        "control": ("StableDiffusionControlNetPipeline", "sd", image),
        "t2i": ("StableDiffusionAdapterPipeline", "sd", image),
        "adapters": ("StableDiffusionPipeline", "sd", {"adapters": ADAPTERS}),
        "images": ("StableDiffusionPipeline", "sd", {"ip_adapter_image": smooth_picture(2)}),
        "adapters_of_control": (
            "StableDiffusionControlNetPipeline",
            "sd",
            {**image, "adapters": ADAPTERS},
        ),
    }


def draw(root: Path, task: str, sampler: str | None = None, **options) -> np.ndarray:
    """The pictures of three prompts, a number that no mesh divides."""
    name, kind, arguments = tasks()[task]
    if "control" in task:
        net = diffusax.ControlNetModel.from_pretrained(root / "controlnet")
        options["controlnet"] = net
    if task == "t2i":
        options["adapter"] = diffusax.T2IAdapter.from_pretrained(root / task)
    if task == "asymmetric":
        options["vae"] = diffusax.AsymmetricAutoencoderKL.from_pretrained(root / task)
    pipe = getattr(diffusax, name).from_pretrained(root / kind, **options)
    if task == "freeu":
        pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    if "adapters" in task:
        add_adapters(pipe)
    if task == "images":
        pipe.load_ip_adapter(root / "ip_adapters" / "plus.safetensors")
    pipe.set_progress_bar_config(disable=True)
    calls: list[int] = []
    if sampler:
        # Numbers handed in row by row, and a callback that reads and changes what is padded.
        pipe.scheduler = getattr(diffusax, sampler).from_config(pipe.scheduler.config)

        def change(pipe, row, timestep, tensors):
            calls.append(row)
            assert tensors["latents"].shape[0] == len(PROMPTS)
            return {"latents": tensors["latents"] * 0.9}

        arguments = {**arguments, "noise": "torch", "callback_on_step_end": change}
    images = pipe(PROMPTS, **arguments, **CALL).images
    assert len(calls) == (CALL["num_inference_steps"] if sampler else 0)
    return images


def add_adapters(pipe) -> None:
    """Adds two LoRAs that change every layer; their arrays are split, small as they are."""
    networks = {k: v for k, v in pipe.parts.networks.items() if k != "vae"}
    for seed, name in enumerate(("style", "face")):
        layers: dict = {}
        for component, network in networks.items():
            layers |= random_adapter(network, component, 3 + seed, seed=seed).components
        pipe.add_adapter(name, layers)
    with split_small_arrays():
        stacks = dict(pipe.parts.adapters.stacked(pipe.parts, dict(pipe.adapters)))
    if (mesh := pipe.mesh) is not None and mesh.shape["tensor"] > 1:
        specs = [leaf.sharding.spec for leaf in jax.tree.leaves(stacks["unet"])]
        assert sum("tensor" in spec for spec in specs) > 10, specs


def check_ahead(root: Path, mesh: str) -> None:
    """What is compiled ahead on a mesh is what a call with adapters runs."""
    options = {"controlnet": diffusax.ControlNetModel.from_pretrained(root / "controlnet")}
    pipe = diffusax.StableDiffusionControlNetPipeline.from_pretrained(
        root / "sd", mesh=mesh, **options
    )
    add_adapters(pipe)
    pipe.set_progress_bar_config(disable=True)
    call = {"num_images_per_prompt": 3, "image": smooth_picture(0), **CALL}
    with split_small_arrays():
        pipe.params = pipe.params
        pipe.compile((3,), adapters=ADAPTERS[1], guidance_scale=CALL["guidance_scale"])
    with compiled_programs() as compiled:
        pipe("a frog", adapters=ADAPTERS[1], **call)
    assert compiled == [], compiled


def check_split(root: Path, mesh: str) -> dict[str, int]:
    """How many of the UNet's arrays are split over each axis of the mesh."""
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(root / "sd", mesh=mesh)
    specs = [leaf.sharding.spec for leaf in jax.tree.leaves(pipe.params["unet"])]
    return {axis: sum(axis in spec for spec in specs) for axis in ("fsdp", "tensor")}


def encoding_share(root: Path) -> float:
    """How much of encoding three pictures each of four devices does."""
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(root / "sd", mesh="data=4,tensor=2")
    vae, params = pipe.parts.networks["vae"], pipe.params["vae"]
    pixels = np.zeros((3, 64, 64, 3), np.float32)
    request = autoencoding.encode_image.request(vae, params, pixels, None)
    flops = []
    for mesh in (None, pipe.parts.mesh):
        with in_mesh(mesh):
            flops.append(lower(request).compile().cost_analysis()["flops"])
    return flops[1] / flops[0]


def kernel_shares(heads: int) -> tuple[list[int], float]:
    """A device's queries, b t h d, of a kernel for attention on data=2,tensor=4, and its error."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, t, heads, 8), np.float32) for t in (16, 24, 24))
    seen: list[list[int]] = []

    def plain(of):
        seen.append(list(of.q.shape))
        return jax.nn.dot_product_attention(of.q, of.k, of.v, scale=of.scale)

    with jax.set_mesh(make_mesh("data=2,tensor=4")):
        run = jax.jit(lambda *qkv: attention.on_each_device(plain, Operands(*qkv, 0.3)))
        found = run(q, k, v)
    expected = jax.nn.dot_product_attention(q, k, v, scale=0.3)
    return seen[0], float(np.abs(np.asarray(found) - np.asarray(expected)).max())


def chunks_gathered() -> tuple[int, float]:
    """How often large chunks of attention gather images that two devices share, and their error."""
    rng = np.random.default_rng(0)
    mesh = make_mesh("data=2", devices=jax.devices()[:2])
    given = (rng.standard_normal((2, t, 2, 8), np.float32) for t in (12, 9, 9))
    given = [jax.device_put(x, meshes.batch_sharding(mesh)) for x in given]
    large = functools.partial(attention.LOWERINGS["large_chunks"], limit=30)
    with jax.set_mesh(mesh):
        run = jax.jit(lambda *qkv: large(Operands(*qkv, 0.3)))
        text = run.lower(*given).compile().as_text()
        found = run(*given)
    expected = jax.nn.dot_product_attention(*map(np.asarray, given), scale=0.3)
    return text.count("all-gather("), float(np.abs(np.asarray(found) - expected).max())


def messages(rules: meshes.Rules) -> int:
    """How many collectives four devices need for a block whose three heads they do not divide."""
    block = BasicTransformerBlock(
        24, heads=3, head_dim=8, context_dim=24, only_cross_attention=False, rngs=ShapeRngs()
    )
    graph, state = nnx.split(block)
    params = nnx.to_pure_dict(state)
    mesh = make_mesh("tensor=4", devices=jax.devices()[:4])
    with split_small_arrays(), in_mesh(mesh):
        places = meshes.tree_sharding(mesh, params, rules)
        arguments = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), params, places
        )
        x = jax.ShapeDtypeStruct((1, 16, 24), np.float32, sharding=meshes.replicated(mesh))
        run = jax.jit(lambda params, x: nnx.merge(graph, params)(x, x))
        text = run.lower(arguments, x).compile().as_text()
    return sum(text.count(f" {name}(") for name in COLLECTIVES)


def main(root: Path, out: Path, *cases: str) -> None:
    """Writes the greatest difference from one device, for each case: a task and a mesh."""
    one = jax.devices()[0]
    found = {"split": {mesh: check_split(root, mesh) for mesh in MESHES}, "differences": {}}
    found["encoding"] = encoding_share(root)
    counts = {"heads": {"attn1": 3, "attn2": 3}}
    kinds = {"cut": TENSOR_RULES, "whole": meshes.counted_rules(TENSOR_RULES, counts)}
    found["messages"] = {kind: messages(rules) for kind, rules in kinds.items()}
    found["kernel"] = {heads: kernel_shares(heads) for heads in (4, 5)}
    found["chunks"] = chunks_gathered()
    if any("adapters" in case for case in cases):
        check_ahead(root, MESHES[2])
    alone = {}
    for case in cases:
        task, mesh, sampler = (*case.split(" "), "")[:3]
        options = {"sampler": sampler} if sampler else {}
        if (task, sampler) not in alone:
            alone[task, sampler] = draw(root, task, device=one, **options)
        expected = alone[task, sampler]
        assert expected.std() > 0.1
        drawn = draw(root, task, **({} if mesh == "default" else {"mesh": mesh}), **options)
        assert drawn.shape == expected.shape, (drawn.shape, expected.shape)
        found["differences"][case] = float(np.abs(drawn - expected).max())
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
