"""Live PyTorch pipelines made into ours, whose networks are all ones that diffusax has."""

import diffusers
import jax
import numpy as np
import pytest
import torch
from support.effort import first
from support.pairs import NEGATIVES, PROMPTS, Pair, mask, picture

import diffusax
import diffusax.interop.torch
from diffusax.models.network import Network

SEEN = {
    "sd1": ("StableDiffusionPipeline", "sd", "a", 0),
    "sd2": ("StableDiffusionPipeline", "sd", "b", 0),
    "xl": ("StableDiffusionXLPipeline", "xl", "b", 0),
    "img2img": ("StableDiffusionImg2ImgPipeline", "sd", "a", 0),
    "inpaint": ("StableDiffusionInpaintPipeline", "sd-inpaint", "a", 0),
    "instruct": ("StableDiffusionInstructPix2PixPipeline", "sd-instruct", "a", 0),
    "controlnet": ("StableDiffusionControlNetPipeline", "sd", "a", 2),
    "t2i-adapter": ("StableDiffusionAdapterPipeline", "sd", "a", 0, ("sd", "sd")),
}
"""Classes, kinds and variations of tiny.py, the number of ControlNets, and T2I-Adapters."""
READ = {
    "lcm": ("LatentConsistencyModelPipeline", "lcm", "c", 0),
    "refiner": ("StableDiffusionXLImg2ImgPipeline", "xl-refiner", "a", 0),
}
CALLS = {
    "img2img": {"image": picture(1), "strength": 0.6},
    "inpaint": {"image": picture(1), "mask_image": mask(1)},
    "instruct": {"image": picture(1), "image_guidance_scale": 1.7},
    "controlnet": {
        "image": [picture(2), picture(3)],
        "controlnet_conditioning_scale": [0.7, 0.4],
        "control_guidance_end": 0.8,
    },
    "t2i-adapter": {
        "image": [picture(2), picture(3)],
        "adapter_conditioning_scale": [0.7, 0.4],
    },
}


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Halves the time, most of which is compilation; later tests get programs of their own."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


def converted(pipe, **options):
    ours = diffusax.DiffusionPipeline.from_torch(pipe, **options)
    ours.set_progress_bar_config(disable=True)
    return ours


def assert_same(ours, expected):
    """Asserts that two pipelines have the same parts; equal networks share their programs."""
    assert type(ours) is type(expected)
    assert ours.parts.networks == expected.parts.networks
    assert all(type(network) is Network for network in ours.parts.networks.values())
    # pairs.py hands this one to some classes only.
    options = {name: ours.config[name] for name in ours.config if "safety" not in name}
    assert options.items() <= expected.config.items()
    assert ours.scheduler == expected.scheduler
    assert ours.scheduler.config == expected.scheduler.config
    assert jax.tree.structure(ours.params) == jax.tree.structure(expected.params)
    for mine, read in zip(jax.tree.leaves(ours.params), jax.tree.leaves(expected.params)):
        np.testing.assert_array_equal(mine, read)
        assert mine.dtype == read.dtype
    for name, tokenizer in expected.parts.tokenizers.items():
        tokens = ours.parts.tokenizers[name].windows(PROMPTS)
        np.testing.assert_array_equal(tokens, tokenizer.windows(PROMPTS))


@pytest.mark.parametrize("case", [*SEEN, *READ])
def test_the_parts_are_those_of_the_saved_checkpoint(pairs, case):
    pair = pairs(*{**SEEN, **READ}[case])
    assert_same(converted(pair.reference), pair.ours)


@pytest.mark.parametrize("case", first(SEEN, 2))
def test_the_pictures_are_those_of_the_torch_pipeline(pairs, case):
    reference = pairs(*SEEN[case]).reference
    call = {"prompt": PROMPTS[0], "negative_prompt": NEGATIVES[0], **CALLS.get(case, {})}
    Pair(reference, converted(reference)).check(**call)


def test_options_that_are_only_attributes_count_too(pairs):
    """diffusers does not keep this one in its config."""
    _, reference = pairs.checkpoints.pipeline("xl-cosxl", "a")
    assert converted(reference).config["is_cosxl_edit"]


def test_another_class_of_the_family_is_had_from_the_same_pipeline(pairs):
    reference = pairs(*SEEN["sd1"]).reference
    ours = diffusax.StableDiffusionImg2ImgPipeline.from_torch(reference)
    assert_same(ours, pairs(*SEEN["img2img"]).ours)
    with pytest.raises(ValueError, match="StableDiffusionXLPipeline is for Stable Diffusion XL; "):
        diffusax.StableDiffusionXLPipeline.from_torch(reference)


def test_a_class_of_the_user_is_taken_for_the_one_it_inherits_from(pairs):
    class Mine(diffusers.StableDiffusionPipeline):
        pass

    reference = pairs(*SEEN["sd1"]).reference
    mine = Mine(**reference.components, requires_safety_checker=False)
    ours = diffusax.interop.torch.from_torch(mine)
    assert type(ours) is diffusax.StableDiffusionPipeline


def test_a_sampler_made_in_python_is_swapped_as_in_diffusers(pairs):
    """Its options that were never given take the defaults of the one that replaces it."""
    pipe = pairs(*SEEN["sd1"]).reference
    given = {"beta_end": 0.015, "steps_offset": 1, "clip_sample": False}
    theirs = diffusers.DDIMScheduler(**given, beta_schedule="scaled_linear")
    pipe = diffusers.StableDiffusionPipeline(
        **{**pipe.components, "scheduler": theirs}, requires_safety_checker=False
    )
    ours = converted(pipe).scheduler
    swapped = diffusers.EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    actual = diffusax.EulerDiscreteScheduler.from_config(ours.config)
    names = ("beta_end", "beta_schedule", "timestep_spacing", "steps_offset")
    assert [actual.config[n] for n in names] == [swapped.config[n] for n in names]


def test_parameters_keep_the_modules_dtype_or_take_the_one_given(pairs):
    pair = pairs(*SEEN["sd2"])
    expected = diffusax.DiffusionPipeline.from_pretrained(
        pairs.checkpoints.pipeline("sd", "b")[0], dtype="bfloat16"
    )
    assert_same(converted(pair.reference, dtype=torch.bfloat16), expected)
    half = diffusers.StableDiffusionPipeline(
        **pair.reference.components | {"unet": cast(pair.reference.unet, torch.bfloat16)},
        requires_safety_checker=False,
    )
    ours = converted(half)
    assert (ours.unet.dtype, ours.vae.dtype) == ("bfloat16", "float32")
    for mine, read in zip(
        jax.tree.leaves(ours.params["unet"]), jax.tree.leaves(expected.params["unet"])
    ):
        np.testing.assert_array_equal(mine, read)


def cast(module, dtype):
    """A copy of a module in another dtype."""
    new = type(module).from_config(module.config)
    new.load_state_dict(module.state_dict())
    return new.to(dtype).eval()


def test_changing_a_module_afterwards_changes_nothing_here(pairs):
    pipe = pairs(*SEEN["sd1"]).reference
    unet = cast(pipe.unet, torch.float32)
    pipe = diffusers.StableDiffusionPipeline(
        **pipe.components | {"unet": unet}, requires_safety_checker=False
    )
    ours = converted(pipe)
    before = jax.tree.map(np.array, ours.params["unet"])
    for parameter in unet.parameters():
        parameter.data.zero_()
    jax.tree.map(np.testing.assert_array_equal, ours.params["unet"], before)


def test_tiling_and_freeu_stay_on(pairs):
    pipe = pairs(*SEEN["sd1"]).reference
    parts = {name: cast(getattr(pipe, name), torch.float32) for name in ("unet", "vae")}
    pipe = diffusers.StableDiffusionPipeline(
        **pipe.components | parts, requires_safety_checker=False
    )
    pipe.vae.enable_tiling()
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    ours = converted(pipe)
    assert ours.vae.tiling
    assert tuple(ours.unet.switches.freeu) == (0.9, 0.2, 1.2, 1.4)


def test_what_diffusax_does_not_have_is_said_in_one_sentence(pairs):
    pipe = pairs(*SEEN["sd1"]).reference
    other = diffusers.ConsistencyModelPipeline(
        unet=diffusers.UNet2DModel(
            block_out_channels=(8,),
            down_block_types=("DownBlock2D",),
            up_block_types=("UpBlock2D",),
            norm_num_groups=4,
        ),
        scheduler=diffusers.CMStochasticIterativeScheduler(),
    )
    name = "ConsistencyModelPipeline"
    with pytest.raises(
        ValueError, match=rf"^diffusax has no {name} of its own; diffusax\.torch\.compile"
    ):
        converted(other)

    class Scheduler(diffusers.DDIMScheduler):
        pass

    strange = {**pipe.components, "scheduler": Scheduler()}
    strange = diffusers.StableDiffusionPipeline(**strange, requires_safety_checker=False)
    with pytest.raises(ValueError, match=r"^scheduler 'Scheduler' is not supported"):
        converted(strange)


def test_parameters_that_are_not_in_memory_are_refused(pairs):
    pipe = pairs(*SEEN["sd1"]).reference
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel.from_config(pipe.unet.config)
    pipe = diffusers.StableDiffusionPipeline(
        **pipe.components | {"unet": unet}, requires_safety_checker=False
    )
    with pytest.raises(ValueError, match=r"^unet has parameters that are not in memory"):
        converted(pipe)
