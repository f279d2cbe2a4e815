"""The same call on a PyTorch diffusers pipeline and on ours, and the difference of the pictures."""

import contextlib
import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

import diffusax
from support.tiny import TinyCheckpoints

# Largest difference of a pixel in [0, 1]; float32 sums in another order explain about 1e-5.
TOLERANCE = 1e-4
PROMPTS = ["a red apple, on a table", "Two DOGS running!"]
NEGATIVES = ["blurry", "a very ugly hat"]
SAMPLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
    "dpm++2m-karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    "unipc": ("UniPCMultistepScheduler", {}),
    "sa-solver": ("SASolverScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "euler-ancestral": ("EulerAncestralDiscreteScheduler", {}),
    "ddim": ("DDIMScheduler", {"clip_sample": False}),
    "euler": ("EulerDiscreteScheduler", {}),
    "lcm": ("LCMScheduler", {}),
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """One checkpoint as a class of diffusers and as the class of the same name here."""

    reference: Any
    ours: Any

    @contextlib.contextmanager
    def sampler(self, name: str | None, **changes: Any) -> Iterator[None]:
        """Swaps both schedulers as every diffusers tutorial does, and puts them back."""
        if name is None:
            yield
            return
        class_name, options = SAMPLERS[name]
        with self.scheduler(class_name, **{**options, **changes}):
            yield

    @contextlib.contextmanager
    def scheduler(self, class_name: str, **options: Any) -> Iterator[None]:
        """Makes both schedulers of another class from the config of theirs, for a while."""
        originals = self.reference.scheduler, self.ours.scheduler
        for pipe, module in ((self.reference, diffusers), (self.ours, diffusax)):
            make = getattr(module, class_name).from_config
            pipe.scheduler = make(pipe.scheduler.config, **options)
        try:
            yield
        finally:
            self.reference.scheduler, self.ours.scheduler = originals

    def draw(
        self, sampler: str | None = None, seed: int | list[int] = 7, **call: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Both results of one call, from the same numbers of torch; `seed` may be one per image."""
        call = {"num_inference_steps": 4, "output_type": "np", **call}
        with self.sampler(sampler):
            extra = {} if "generator" in call else {"generator": generators(seed)}
            # Z-Image's pipelines write into lists of prompts.
            copied = {k: list(v) if isinstance(v, list) else v for k, v in call.items()}
            expected = self.reference(**copied, **extra).images
            extra = {} if "generator" in call else {"generator": generators(seed)}
            actual = self.ours(**call, **extra).images
        return np.asarray(expected, np.float32), np.asarray(actual, np.float32)

    def check(self, *, tolerance: float = TOLERANCE, **call: Any) -> np.ndarray:
        """Asserts that both draw the same, and a picture that is neither flat nor saturated.

        Returns:
            diffusers' pictures, b h w c in [0, 1], or its latents.
        """
        expected, actual = self.draw(**call)
        assert actual.shape == expected.shape
        assert expected.std() > 0.03
        if call.get("output_type") != "latent":
            assert ((expected > 0) & (expected < 1)).mean() > 0.2
        assert np.isfinite(expected).all()
        difference = np.abs(actual - expected).max()
        assert difference < tolerance, f"{difference:.2e}"
        return expected

    def check_one_prompt(self, **call: Any) -> None:
        """Asserts that one prompt is for each of two images, where diffusers needs it twice."""
        call = {"num_inference_steps": 4, "output_type": "np", **call}
        given = {"prompt": PROMPTS[0], "negative_prompt": NEGATIVES[0]}
        twice = {name: [text] * 2 for name, text in given.items()}
        expected, _ = self.draw(**{**call, **twice})
        actual = self.ours(**{**call, **given}, generator=generators(7)).images
        assert np.abs(actual - expected).max() < TOLERANCE


class Pairs:
    """Pairs of pipelines, each loaded once; the networks are read once for every checkpoint."""

    def __init__(self, checkpoints: TinyCheckpoints):
        self.checkpoints = checkpoints
        self._made: dict[tuple, Pair] = {}

    def __call__(
        self,
        class_name: str,
        kind: str,
        variation: str = "a",
        controls: int = 0,
        t2i: tuple[str, ...] = (),
        **options: Any,
    ) -> Pair:
        key = (class_name, kind, variation, controls, t2i, *sorted(options.items()))
        if key not in self._made:
            folder, built = self.checkpoints.pipeline(kind, variation)
            theirs, ours = dict(options), dict(options)
            if controls:
                theirs["controlnet"], ours["controlnet"] = self._controls(kind, variation, controls)
            if t2i:
                theirs["adapter"], ours["adapter"] = self._t2i_adapters(t2i)
            components = built.components | {"scheduler": _scheduler(folder)} | theirs
            _prepare(components)
            if "Diffusion" in class_name and "XL" not in class_name:
                components["requires_safety_checker"] = False
            if "XL" in class_name:
                configured = ("force_zeros_for_empty_prompt", "requires_aesthetics_score")
                for name in (*configured, "is_cosxl_edit"):
                    if name in built.config and name not in components:
                        components[name] = built.config[name]
            components = _accepted(getattr(diffusers, class_name), components)
            reference = getattr(diffusers, class_name)(**components)
            reference.set_progress_bar_config(disable=True)
            pipe = getattr(diffusax, class_name).from_pretrained(folder, **ours)
            pipe.set_progress_bar_config(disable=True)
            self._made[key] = Pair(reference, pipe)
        return self._made[key]

    def _controls(self, kind: str, variation: str, number: int) -> tuple[Any, Any]:
        family = "xl" if kind.startswith("xl") else "sd"
        theirs, ours = [], []
        for seed in range(number):
            folder, network = self.checkpoints.controlnet(family, variation, seed)
            theirs.append(network)
            ours.append(diffusax.ControlNetModel.from_pretrained(folder))
        return (theirs, ours) if number > 1 else (theirs[0], ours[0])

    def _t2i_adapters(self, kinds: tuple[str, ...]) -> tuple[Any, Any]:
        found = [self.checkpoints.t2i_adapter(kind, seed) for seed, kind in enumerate(kinds)]
        ours = [diffusax.T2IAdapter.from_pretrained(folder) for folder, _ in found]
        theirs = [network for _, network in found]
        if len(found) == 1:
            return theirs[0], ours[0]
        return diffusers.MultiAdapter(theirs), ours


def with_ddim(folder: Path) -> tuple[Any, Any]:
    """Returns PyTorch's pipeline and ours of a folder of Stable Diffusion, both with DDIM."""
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    ours = diffusax.StableDiffusionPipeline.from_pretrained(folder)
    for pipe, module in ((theirs, diffusers), (ours, diffusax)):
        config = pipe.scheduler.config
        pipe.scheduler = module.DDIMScheduler.from_config(config, clip_sample=False)
        pipe.set_progress_bar_config(disable=True)
    return theirs, ours


def _scheduler(folder: Path) -> Any:
    """The scheduler as it is read: diffusers remembers which options the file leaves out."""
    index = json.loads((folder / "model_index.json").read_text())
    return getattr(diffusers, index["scheduler"][1]).from_pretrained(folder / "scheduler")


def _prepare(components: dict[str, Any]) -> None:
    for component in components.values():
        if isinstance(component, torch.nn.Module):
            component.requires_grad_(False)
    encoder = components.get("text_encoder")
    if encoder is not None and not hasattr(encoder, "text_model"):
        # diffusers' clip_skip looks for the norm where transformers had it before version 5.
        object.__setattr__(encoder, "text_model", encoder)


def _accepted(constructor: Callable, components: dict[str, Any]) -> dict[str, Any]:
    known = inspect.signature(constructor.__init__).parameters
    return {name: value for name, value in components.items() if name in known}


def slow(*case: Any) -> Any:
    """A case of a test that repeats on other checkpoints what is tested anyway."""
    return pytest.param(*case, marks=pytest.mark.slow)


def generators(seed: int | list[int]) -> Any:
    """Fresh torch generators: one for the batch, or one for each image."""
    if isinstance(seed, list):
        return [torch.Generator().manual_seed(s) for s in seed]
    return torch.Generator().manual_seed(seed)


def picture(seed: int = 0, width: int = 64, height: int = 64) -> Image.Image:
    """A smooth coloured picture with some noise in it."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int32)
    noisy = smooth + rng.integers(-20, 20, smooth.shape)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def mask(seed: int = 0, width: int = 64, height: int = 64) -> Image.Image:
    """A white rectangle with a soft edge on black: 255 where to draw."""
    rng = np.random.default_rng(seed)
    left, top = (int(v) for v in rng.integers(4, width // 3, 2))
    values = np.zeros((height, width), np.uint8)
    values[top : top + height // 2, left : left + width // 2] = 255
    values[top + 3 : top + 6, left : left + width // 2 + 3] = 140
    return Image.fromarray(values)
