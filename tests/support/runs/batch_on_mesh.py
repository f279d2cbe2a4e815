"""Runs mixed calls in running batches on meshes of eight devices, and each alone on one device.

python batch_on_mesh.py CHECKPOINTS OUT.json 'TASK MESH' ...
"""

import json
import re
import sys
from pathlib import Path

import jax
import numpy as np

import diffusax
from diffusax.batch import programs as programs
from diffusax.batch.image import Image, prepare_images
from diffusax.batch.run import BatchRun
from diffusax.pipelines.plan.arguments import check_call
from diffusax.runtime.programs.program import lower, recorded_requests
from diffusax.runtime.switches import in_mesh
from support.data_sets import smooth_picture
from support.hooks import defined

CALLS = [
    {"prompt": "a cat", "num_inference_steps": 4, "sampler": "euler_a", "guidance_scale": 4.0},
    {"prompt": "a dog", "num_inference_steps": 6, "sampler": "heun", "guidance_scale": 1.0},
    {"prompt": "two owls", "num_inference_steps": 3, "sampler": "ddim", "guidance_end": 0.4},
    {"prompt": "a boat", "num_inference_steps": 5, "sampler": "unipc"},
    {"prompt": "a frog", "num_inference_steps": 7, "sampler": "lcm", "guidance_scale": 1.0},
    {"prompt": "a fox", "num_inference_steps": 2, "sampler": "dpm++2m_sde"},
]
COLLECTIVES = r"= (\S+) (all-gather|all-to-all|collective-permute|all-reduce)\("


def load(root: Path, **options) -> dict[str, diffusax.DiffusionPipeline]:
    """Text to image, and the same with a ControlNet and with a rule of guidance."""
    text = diffusax.StableDiffusionPipeline.from_pretrained(root / "sd", **options)
    net = diffusax.ControlNetModel.from_pretrained(root / "controlnet")
    control = diffusax.StableDiffusionControlNetPipeline.from_pipe(text, controlnet=net)
    for pipe in (text, control):
        pipe.set_progress_bar_config(disable=True)
    return {"text": text, "control": control, "rule": text}


def calls(task: str) -> list[dict]:
    """The calls of a task."""
    (projected,) = defined("AdaptiveProjectedGuidance")
    rule = {"guide": projected(eta=0.3, norm_threshold=9)}
    more = {"control": {"image": smooth_picture(0)}, "rule": rule}.get(task, {})
    return [{**call, **more, "seed": i, "output_type": "np"} for i, call in enumerate(CALLS)]


def alone(pipe: diffusax.DiffusionPipeline, call: dict) -> np.ndarray:
    """The image of a call."""
    own, call = pipe.scheduler, dict(call)
    pipe.scheduler = diffusax.samplers.scheduler_from_name(call.pop("sampler"), own)
    image = pipe(**call).images
    pipe.scheduler = own
    return image


def moved(requests: list, mesh: jax.sharding.Mesh) -> list[list[str]]:
    """The shapes that the devices exchange in a step of the batch."""
    (request,) = [r for r in requests if r.program is programs.advance_batch][:1]
    with in_mesh(mesh):
        text = lower(request).compile().as_text()
    return sorted({(shape, name) for shape, name in re.findall(COLLECTIVES, text)})


def main() -> None:
    """Writes the largest difference of a pixel for each case, and what is exchanged."""
    root, out, *cases = sys.argv[1:]
    single = load(Path(root), device=jax.devices()[0])
    differences, exchanged = {}, {}
    for case in cases:
        task, mesh = case.split()
        expected = [alone(single[task], call) for call in calls(task)]
        pipe = load(Path(root), mesh=mesh)[task]
        lanes = 4 * pipe.mesh.shape["data"] * pipe.mesh.shape["fsdp"]
        with diffusax.RunningBatch(pipe, lanes=lanes, smallest=lanes) as batch:
            futures = [batch.submit(**call) for call in calls(task)]
            found = [future.result(300).images for future in futures]
        pairs = zip(found, expected, strict=True)
        differences[case] = float(max(np.abs(a - b).max() for a, b in pairs))
        if task == "text":
            # So few that CPUs compute attention as accelerators do, and not head by head.
            exchanged[mesh] = exchange(pipe, lanes // 2)
    Path(out).write_text(json.dumps({"differences": differences, "exchanged": exchanged}))


def exchange(pipe: diffusax.DiffusionPipeline, lanes: int) -> list[list[str]]:
    """What the devices exchange in a step of text to image."""
    c = pipe.parts
    with in_mesh(c.local_mesh):
        run = pipe.task(c, check_call({"prompt": "a cat", "num_inference_steps": 2, "seed": 0}))
    (one,) = prepare_images(c, pipe.task, run)
    batch = BatchRun(c, one, lanes)
    batch.join(Image(None, 0, one, batch.kind), batch.lanes.find(one.branches))
    with recorded_requests() as requests:
        batch.advance(1)
    return moved(requests, c.mesh)


if __name__ == "__main__":
    main()
