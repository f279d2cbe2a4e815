"""Our pipelines' signatures against those of diffusers: what keeps twenty classes honest."""

import inspect

import diffusers
import pytest

import diffusax
from diffusax.pipelines import classes

# diffusers has FLUX.3 as modular blocks alone, see tests/parity/test_flux3_pipelines.py.
MODULAR = {"Flux3KleinPipeline", "Flux3KleinInpaintPipeline"}
# diffusers has no pipelines that look at images for families of text to image: ours have the
# arguments of the latter and image, and the size of the image where none is given.
EDITS = {"Krea2EditPipeline": "Krea2Pipeline", "ZImageEditPipeline": "ZImagePipeline"}
NAMES = sorted({*classes.__all__} - MODULAR - {*EDITS})
# Ours, keyword-only, in every call.
OWN = {
    "seed": None,
    "noise": "jax",
    "long_prompt": False,
    "prompt_weighting": False,
    "guidance_start": 0.0,
    "guidance_end": 1.0,
    "adapters": None,
    "guide": None,
    "hooks": None,
}
# Pipelines that draw from noise alone have no prompts to read in ways of ours.
WITHOUT_TEXT = ("DDIMPipeline", "DDPMPipeline")
OWN_WITHOUT_TEXT = {"seed": None, "noise": "jax", "hooks": None}
# Language models read texts whole and as they are.
OF_CLIP = ("long_prompt", "prompt_weighting")
# Arguments of diffusers' calls that ours do not have: those that it has deprecated.
ABSENT = {"kwargs"}
# Components that diffusers' class lacks: from_pipe takes all of a Wan 2.2 of text to video.
MORE_COMPONENTS = {"WanVideoToVideoPipeline": {"transformer_2"}}
# Constructor arguments of diffusers that are no components of ours.
NO_COMPONENTS = {
    "safety_checker",
    "requires_safety_checker",
    "add_watermarker",
    "boundary_ratio",
    "expand_timesteps",
    "force_zeros_for_empty_prompt",
    "requires_aesthetics_score",
    "is_cosxl_edit",
    "is_distilled",
    "patch_size",
    "sample_sigmas",
    "text_encoder_select_layers",
}
# What diffusax does not have at all, LoRA and FreeU among it.
ABSENT_SWITCHES = {"enable_freeu", "disable_freeu"}
ABSENT_SWITCHES |= {"enable_lora", "disable_lora", "enable_lora_hotswap"}
EMPTY = inspect.Parameter.empty


def call_of(module, name):
    return inspect.signature(getattr(module, name).__call__).parameters


@pytest.mark.parametrize("name", NAMES)
def test_calls_have_the_arguments_of_diffusers_in_its_order_with_its_defaults(name):
    expected = {k: p.default for k, p in call_of(diffusers, name).items() if k not in ABSENT}
    ours = call_of(diffusax, name)
    shared = {k: p.default for k, p in ours.items() if p.kind is not p.KEYWORD_ONLY}
    assert list(shared.items()) == list(expected.items())
    own = {k: p.default for k, p in ours.items() if p.kind is p.KEYWORD_ONLY}
    if name in WITHOUT_TEXT:
        assert own == OWN_WITHOUT_TEXT
    elif name.startswith(("ZImage", "Flux", "Krea2", "QwenImage", "Wan")):
        # What the others call the scale is another name of Qwen-Image 2.1's.
        more = {"guidance_scale": None} if name == "QwenImage21Pipeline" else {}
        assert own == {k: v for k, v in OWN.items() if k not in OF_CLIP} | more
    else:
        assert own == OWN


@pytest.mark.parametrize(("name", "plain"), EDITS.items())
def test_calls_that_look_at_images_have_one_argument_more(name, plain):
    assert not hasattr(diffusers, name)
    ours, others = call_of(diffusax, name), call_of(diffusax, plain)
    names = list(others)
    names.insert(names.index("prompt") + 1, "image")
    assert list(ours) == names
    differs = {k for k, p in others.items() if ours[k].default != p.default}
    assert differs <= {"height", "width"}
    assert all(ours[k].default is None for k in ("image", "height", "width"))
    assert all(ours[k].kind is p.kind for k, p in others.items())


def test_every_pipeline_of_diffusers_for_these_families_is_here():
    families = ("StableDiffusion", "LatentConsistencyModel")
    tasks = ("", "Img2Img", "Inpaint", "InstructPix2Pix", "ControlNet")
    tasks += ("ControlNetImg2Img", "ControlNetInpaint", "Adapter")
    wanted = {
        f"{family}{xl}{task}Pipeline"
        for family in families
        for xl in ("", "XL")
        for task in tasks
        if hasattr(diffusers, f"{family}{xl}{task}Pipeline")
    }
    wanted |= {f"ZImage{task}Pipeline" for task in tasks[:3]}
    wanted |= {f"Flux{task}Pipeline" for task in (*tasks[:3], "Fill", "Kontext", "ControlNet")}
    wanted |= {f"Flux2Klein{task}Pipeline" for task in ("", "Inpaint", "KV")} | {"Krea2Pipeline"}
    wanted |= {f"QwenImage{task}Pipeline" for task in (*tasks[:3], "21", "Edit", "EditPlus")}
    wanted |= {f"Wan{task}Pipeline" for task in ("", "ImageToVideo", "VideoToVideo", "VACE")}
    assert set(NAMES) == wanted | set(WITHOUT_TEXT)


@pytest.mark.parametrize("name", NAMES)
def test_components_have_the_names_of_diffusers(name):
    theirs = list(inspect.signature(getattr(diffusers, name).__init__).parameters)[1:]
    ours = getattr(diffusax, name).component_names
    more = MORE_COMPONENTS.get(name, set())
    assert sorted(ours) == sorted((set(theirs) | more) - NO_COMPONENTS)


ENCODING = [n for n in NAMES if hasattr(getattr(diffusers, n), "encode_prompt")]


@pytest.mark.parametrize("name", ENCODING)
def test_encode_prompt_begins_with_the_arguments_of_diffusers(name):
    theirs = inspect.signature(getattr(diffusers, name).encode_prompt).parameters
    ours = inspect.signature(getattr(diffusax, name).encode_prompt).parameters
    missing = set(theirs) - set(ours)
    assert not {k for k in missing if not k.startswith("ip_adapter")}
    shared = [k for k in ours if k in theirs]
    assert shared == [k for k in theirs if k in ours]
    for k in shared:
        if theirs[k].default is not EMPTY:
            assert ours[k].default == theirs[k].default, k


@pytest.mark.parametrize("kind", ["sd", "xl", "lcm", "sd-instruct", "xl-refiner"])
def test_encode_prompt_returns_as_many_values_as_diffusers(tiny_checkpoints, kind):
    folder, reference = tiny_checkpoints.pipeline(kind, "a")
    ours = diffusax.DiffusionPipeline.from_pretrained(folder)
    assert type(ours).__name__ == type(reference).__name__
    given = {"device": "cpu", "num_images_per_prompt": 1, "do_classifier_free_guidance": True}
    if kind == "sd-instruct":
        # diffusers has a private method here, which returns one array.
        assert len(ours.encode_prompt("a cat", **given)) == 2
        return
    theirs = reference.encode_prompt("a cat", **given)
    assert len(ours.encode_prompt("a cat", **given)) == len(theirs)
    theirs = reference.encode_prompt("a cat", **{**given, "do_classifier_free_guidance": False})
    actual = ours.encode_prompt("a cat", **{**given, "do_classifier_free_guidance": False})
    assert [a is None for a in actual] == [t is None for t in theirs]


SWITCHES = {n for n in dir(diffusers.StableDiffusionPipeline) if n.startswith(("enable_", "dis"))}


@pytest.mark.parametrize("name", sorted(SWITCHES - ABSENT_SWITCHES))
def test_methods_that_switch_something_are_here_too(name):
    assert callable(getattr(diffusax.StableDiffusionPipeline, name, None))
