"""IP-Adapters in whole pipelines against diffusers, all weights random."""

import diffusers
import numpy as np
import pytest
import torch
from diffusers.image_processor import IPAdapterMaskProcessor
from support.ip_adapters import load_both, set_both, write_ip_adapters
from support.pairs import NEGATIVES, PROMPTS, TOLERANCE, generators, mask, picture
from support.tiny import build_controlnet, build_stable_diffusion, build_stable_diffusion_xl

import diffusax
from diffusax import image_processor
from diffusax.runtime.programs.compilations import count_compilations

CALL = {"num_inference_steps": 2, "output_type": "np", "guidance_scale": 3.0}
TEXTS = {"prompt": PROMPTS[0], "negative_prompt": NEGATIVES[0]}
# Of the tiny UNets' transformers: SD's are in down block 0 and up block 1, SDXL's in 1 and 0.
BY_BLOCK = {
    "sd": {"down": {"block_0": 0.3}, "up": {"block_1": [0.9, -0.4]}},
    "xl": {"mid": 0.7, "up": {"block_0": [0.2, 0.8]}},
}


class Both:
    """diffusers' pipeline and ours, with the same IP-Adapters."""

    def __init__(self, kind, root):
        self.kind, self.folder = kind, root / "adapters"
        build = build_stable_diffusion if kind == "sd" else build_stable_diffusion_xl
        scheduler = diffusers.DDIMScheduler(clip_sample=False)
        self.theirs = build(root / "checkpoint", scheduler=scheduler)
        self.ours = diffusax.DiffusionPipeline.from_pretrained(root / "checkpoint")
        self.ours.set_progress_bar_config(disable=True)
        write_ip_adapters(self.folder, self.theirs.unet)

    def load(self, *kinds):
        load_both(self.theirs, self.ours, self.folder, *kinds)
        return self

    def check(self, *, theirs=None, ours=None, seed=7, **call):
        """Asserts that both generate the same; returns diffusers' images."""
        theirs, ours = theirs or self.theirs, ours or self.ours
        call = {**CALL, **TEXTS, **call}
        expected = theirs(**call, generator=generators(seed)).images
        actual = ours(**call, generator=generators(seed)).images
        assert expected.std() > 0.03
        difference = np.abs(actual - expected).max()
        assert difference < TOLERANCE, f"{difference:.2e}"
        return expected


@pytest.fixture(scope="module")
def sd(tmp_path_factory):
    return Both("sd", tmp_path_factory.mktemp("sd"))


@pytest.fixture(scope="module")
def xl(tmp_path_factory):
    return Both("xl", tmp_path_factory.mktemp("xl"))


def far(a, b):
    return np.abs(a - b).max() > 0.01


def test_other_images_scales_and_weights_by_block_compile_nothing(sd):
    sd.load("plain")
    first = sd.check(ip_adapter_image=picture(1))
    with count_compilations() as compiled:
        assert far(sd.check(ip_adapter_image=picture(2)), first)
        set_both(sd.theirs, sd.ours, 0.4)
        assert far(sd.check(ip_adapter_image=picture(1)), first)
        set_both(sd.theirs, sd.ours, BY_BLOCK["sd"])
        assert far(sd.check(ip_adapter_image=picture(1)), first)
    assert not compiled


@pytest.mark.slow
def test_several_ip_adapters_and_several_images_of_one(sd):
    sd.load("plus", "plain", "full")
    set_both(sd.theirs, sd.ours, [0.7, BY_BLOCK["sd"], -0.5])
    images = [[picture(1), picture(2, 80, 50)], picture(3), picture(4)]
    sd.check(ip_adapter_image=images, num_images_per_prompt=2, seed=[1, 2])


def masks_of(*seeds, height=64, width=64):
    """Masks for two IP-Adapters' images, as diffusers and as we prepare them."""
    pictures = [mask(seed, width, height) for seed in seeds]
    theirs = IPAdapterMaskProcessor().preprocess(pictures, height=height, width=width)
    ours = image_processor.IPAdapterMaskProcessor().preprocess(pictures, height, width)
    np.testing.assert_array_equal(theirs.numpy(), ours)
    return theirs.reshape(1, len(seeds), height, width), ours.reshape(1, -1, height, width)


def test_masks_say_where_each_image_counts(sd):
    sd.load("full", "plus")
    set_both(sd.theirs, sd.ours, [[0.9, 0.4], BY_BLOCK["sd"]])
    images = [[picture(1), picture(2)], [picture(3)]]
    both = masks_of(1, 2)
    theirs = {"ip_adapter_masks": [both[0], None]}
    # None leaves out the masks of one IP-Adapter.
    call = {"ip_adapter_image": images, **CALL, **TEXTS}
    expected = sd.theirs(**call, cross_attention_kwargs=theirs, generator=generators(7)).images
    for array in (both[1], both[0]):
        kwargs = {"cross_attention_kwargs": {"ip_adapter_masks": [array, None]}}
        actual = sd.ours(**call, **kwargs, generator=generators(7)).images
        assert np.abs(actual - expected).max() < TOLERANCE
    other = {"cross_attention_kwargs": {"ip_adapter_masks": [masks_of(3, 4)[1], None]}}
    with count_compilations() as compiled:
        assert far(sd.ours(**call, **other, generator=generators(7)).images, expected)
    assert not compiled


def test_sdxl_and_embeddings_in_the_place_of_images(xl):
    xl.load("plain", "plus")
    set_both(xl.theirs, xl.ours, [0.8, BY_BLOCK["xl"]])
    images = [picture(1), [picture(2), picture(3)]]
    drawn = xl.check(ip_adapter_image=images)
    arguments = (images, None, "cpu", 1, True)
    theirs = xl.theirs.prepare_ip_adapter_image_embeds(*arguments)
    ours = xl.ours.prepare_ip_adapter_image_embeds(*arguments)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), atol=1e-5)
    given = xl.check(ip_adapter_image_embeds=[x.detach() for x in theirs])
    np.testing.assert_allclose(given, drawn, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "plus", "full"])
@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize("family", ["sd", "xl"])
def test_each_kind_alone_equals_diffusers(request, family, kind, guided):
    both = request.getfixturevalue(family).load(kind)
    set_both(both.theirs, both.ours, 0.8)
    both.check(ip_adapter_image=picture(1), guidance_scale=3.0 if guided else 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(64, 64), (96, 64), (48, 80)])
def test_masks_of_images_of_any_shape(sd, size):
    sd.load("plain")
    height, width = size
    theirs, _ = masks_of(1, height=height, width=width)
    kwargs = {"cross_attention_kwargs": {"ip_adapter_masks": [theirs]}}
    call = {"height": height, "width": width, "ip_adapter_image": [[picture(1)]]}
    sd.check(**call, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["Img2Img", "Inpaint", "ControlNet", "InstructPix2Pix"])
def test_other_tasks_equal_diffusers(sd, tmp_path, task):
    names = {"ControlNet": f"StableDiffusion{task}Pipeline"}
    name = names.get(task, f"StableDiffusion{task}Pipeline")
    theirs, ours, call = sd.theirs, sd.ours, {"image": picture(5)}
    if task == "InstructPix2Pix":
        own = Both.__new__(Both)
        own.kind, own.folder = "sd", sd.folder
        scheduler = diffusers.DDIMScheduler(clip_sample=False)
        theirs = build_stable_diffusion(
            tmp_path / "edits",
            unet={"in_channels": 8},
            scheduler=scheduler,
            pipeline_class=diffusers.StableDiffusionInstructPix2PixPipeline,
        )
        ours = diffusax.DiffusionPipeline.from_pretrained(tmp_path / "edits")
        ours.set_progress_bar_config(disable=True)
        load_both(theirs, ours, sd.folder, "plus")
    else:
        sd.load("plus")
        more = ({}, {})
        if task == "ControlNet":
            net = build_controlnet(tmp_path / "net", "sd", "a")
            more = (
                {"controlnet": net},
                {"controlnet": diffusax.ControlNetModel.from_pretrained(tmp_path / "net")},
            )
        options = {"requires_safety_checker": False}
        theirs = getattr(diffusers, name)(**{**theirs.components, **options, **more[0]})
        ours = getattr(diffusax, name).from_pipe(ours, **more[1])
    theirs.set_progress_bar_config(disable=True)
    if task == "Inpaint":
        call["mask_image"] = mask(1)
    if task in ("Img2Img", "Inpaint"):
        call |= {"strength": 0.8, "num_inference_steps": 3}
    plain = sd.check(theirs=theirs, ours=ours, ip_adapter_image=picture(1), **call)
    other = sd.check(theirs=theirs, ours=ours, ip_adapter_image=picture(2), **call)
    assert far(plain, other)


@pytest.mark.slow
def test_images_that_are_prepared_tensors(sd):
    sd.load("plain")
    pixels = torch.randn(2, 3, 30, 30, generator=torch.Generator().manual_seed(0))
    sd.check(ip_adapter_image=[pixels])
