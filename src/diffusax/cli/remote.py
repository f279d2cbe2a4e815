"""`diffusax generate --server`: lets a server generate the images."""

import contextlib
import io
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from diffusax.cli import generation
from diffusax.cli.parsing import given_flags
from diffusax.images.clips import VideoFile
from diffusax.serving.client import ENDED, Client

_OURS = (
    *("backend", "dtype", "vae_dtype", "weights", "step_cache", "variant", "revision"),
    *("vae_tiling", "mesh", "compiled", "lora_dir", "embeddings", "profile", "noise"),
    "encode_first",
)
"""Options that say how this machine would generate."""
_AT_ONCE = 16
"""The most jobs that are at the server at the same time."""
_SECONDS = 0.2
"""The seconds between two looks at a job."""


def check(options: Any) -> None:
    """Raises ValueError where an option is given that is the server's to choose."""
    if flags := given_flags(options, _OURS):
        raise ValueError(f"{flags[0]} is for the machine that generates; leave it to --server")
    if options.reference:
        raise ValueError("--reference cannot be with --server; its /v1/images/edits takes several")


def generate(options: Any, runs: Sequence[Any], seed: int) -> Iterator[tuple[list[Any], list[str]]]:
    """Yields the images of each run and their settings, which a server generates together.

    Of a model of videos they are `VideoFile`s, which have their settings in them.

    Args:
        options: the options of `diffusax generate`.
        runs: the same with the prompt, and what a grid varies, of each run.
        seed: the seed of runs that name none.

    Raises:
        ValueError: the server does not answer, or refuses a run; says why.
    """
    from tqdm import tqdm

    client = Client(options.server, options.api_key or os.environ.get("DIFFUSAX_API_KEY"))
    _check_kind(client, options)
    waiting = deque(_fields(run, seed) for run in runs)
    jobs: deque[dict[str, Any]] = deque()
    with tqdm(total=0, unit="step", delay=0.5) as bar:
        try:
            while waiting or jobs:
                while waiting and len(jobs) < _AT_ONCE:
                    job = client.submit(waiting.popleft())
                    bar.total += job["steps"]
                    jobs.append({**job, "steps_done": 0})
                yield _images(client, jobs, bar)
        finally:
            for job in jobs:
                with contextlib.suppress(ValueError):
                    client.cancel(job["id"])


def _check_kind(client: Client, options: Any) -> None:
    """Raises ValueError where options of videos are given for a model of images, or otherwise."""
    models = client.capabilities()["models"]
    named = [one for one in models if one["name"] == options.model] if options.model else models
    if named:
        videos = named[0].get("fps") is not None
        generation.check_kind(options, named[0]["name"], videos=videos)


def _images(client: Client, jobs: deque[dict[str, Any]], bar: Any) -> Any:
    """Waits for the first of the jobs, and returns its images and their settings."""
    while jobs[0]["state"] not in ENDED:
        time.sleep(_SECONDS)
        for i, before in enumerate(jobs):
            if before["state"] not in ENDED:
                jobs[i] = _looked_at(client, before, bar)
        bar.set_description(_description(jobs[0]))
    first = jobs.popleft()
    if first["state"] != "done":
        raise ValueError((first["error"] or {}).get("message") or "the server cancelled the job")
    if first["videos"]:
        return [VideoFile.of(data) for data in first["files"]], []
    images = list(map(_opened, first["files"]))
    return images, [str(image.text.get("parameters", "")) for image in images]


def _looked_at(client: Client, before: dict[str, Any], bar: Any) -> dict[str, Any]:
    """Returns how far a job is, with its files once it is done."""
    now = client.job(before["id"])
    bar.update(now["steps_done"] - before["steps_done"])
    if now["state"] == "done":
        # The server keeps results for a while only, and others may be waited for longer.
        fetch, made = (
            (client.video, now["videos"]) if now["videos"] else (client.image, now["images"])
        )
        now["files"] = [fetch(now["id"], i) for i in range(len(made))]
    return now


def _opened(file: bytes) -> Any:
    from PIL import Image

    image = Image.open(io.BytesIO(file), formats=["PNG"])
    image.load()
    return image


def _description(job: dict[str, Any]) -> str:
    if job["state"] == "queued":
        return f"waiting ({job['position']} before)"
    return str(job["state"])


def _fields(options: Any, seed: int) -> dict[str, Any]:
    """Returns the fields of a request; those that are not given are left out."""
    from diffusax.images.masks import mask_of
    from diffusax.images.reading import load_image

    scales = options.control_scale or (1.0,)
    scales = scales if len(scales) > 1 else scales * len(options.control)
    given = {
        "prompt": options.prompt,
        "negative_prompt": options.negative_prompt,
        "model": options.model,
        "width": options.width,
        "height": options.height,
        "num_inference_steps": options.steps,
        "guidance_scale": options.guidance,
        "sampler": options.sampler,
        "seed": seed if options.seed is None else options.seed,
        "num_images": options.num_images,
        "num_frames": options.frames,
        "fps": options.fps,
        "image": options.image and load_image(options.image),
        "strength": options.strength,
        "mask_image": options.mask and mask_of(options.mask),
        "mask_blur": options.mask_blur or None,
        "padding_mask_crop": options.mask_crop,
        "controls": [
            {"model": model, "image": load_image(path), "scale": scale}
            for model, path, scale in zip(options.controlnet, options.control, scales)
        ],
        "clip_skip": options.clip_skip,
        "prompt_weighting": options.prompt_weighting,
        "long_prompt": options.long_prompt,
    }
    return {name: value for name, value in given.items() if value not in (None, [])}
