"""Names of diffusers that are not here say what is."""

import diffusers
import pytest
import torch

import diffusax
from diffusax import samplers
from diffusax.missing import NETWORK, PIPELINE, SCHEDULER
from diffusax.models.network import Model
from diffusax.samplers import SCHEDULERS

PIPELINES = ("StableDiffusionPipeline", "StableDiffusionXLControlNetInpaintPipeline")
STEPPING = [
    "set_timesteps",
    "timesteps",
    "sigmas",
    "init_noise_sigma",
    "order",
    "scale_model_input",
    "step",
    "add_noise",
    "scale_noise",
    "get_velocity",
    "set_begin_index",
    "begin_index",
    "step_index",
    "index_for_timestep",
]
LOADERS = ("lora", "adapter", "textual_inversion", "single_file")


@pytest.fixture(scope="module")
def pipe(tiny_checkpoints):
    return diffusax.DiffusionPipeline.from_pretrained(tiny_checkpoints.pipeline("sd")[0])


def test_hasattr_stays_false(pipe):
    xl = diffusax.StableDiffusionXLImg2ImgPipeline
    for owner, hints in (
        (xl, PIPELINE),
        (pipe.unet, NETWORK),
        (Model, NETWORK),
        (pipe.scheduler, SCHEDULER),
        *((cls, SCHEDULER) for cls in SCHEDULERS.values()),
    ):
        assert [name for name in hints if hasattr(owner, name)] == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lora_state_dict", "load_lora_weights, set_adapters, fuse_lora and their like are its"),
        ("check_inputs", "docs/functional.md"),
        ("from_ckpt", "from_single_file"),
    ],
)
def test_pipelines_name_what_there_is_instead(pipe, name, hint):
    message = f"'StableDiffusionPipeline' has no attribute '{name}'; .*{hint}"
    for owner in (pipe, type(pipe)):
        with pytest.raises(AttributeError, match=message):
            getattr(owner, name)


def test_networks_and_schedulers_do_too(pipe):
    with pytest.raises(AttributeError, match=r"'UNet' has no attribute 'load_attn_procs'; .*LoRA"):
        _ = pipe.unet.load_attn_procs
    with pytest.raises(AttributeError, match=r"scheduler\.schedule\(steps\)\.rows"):
        _ = pipe.scheduler.convert_model_output
    with pytest.raises(AttributeError, match="UNet2DConditionModel, AutoencoderKL and ControlNetM"):
        diffusax.AutoencoderTiny.from_single_file("taesd.safetensors")


def test_a_name_that_nobody_has_is_refused_as_ever(pipe):
    for owner in (pipe, pipe.unet, pipe.scheduler):
        with pytest.raises(AttributeError, match="no attribute 'unett'"):
            _ = owner.unett


def test_every_loader_of_diffusers_has_a_hint():
    for name in PIPELINES:
        theirs, ours = getattr(diffusers, name), getattr(diffusax, name)
        names = {n for n in dir(theirs) if n[0] != "_" and any(part in n for part in LOADERS)}
        assert {n for n in names if not hasattr(ours, n)} <= set(PIPELINE)
    theirs = set(dir(diffusers.UNet2DConditionModel)) - set(dir(torch.nn.Module))
    names = {n for n in theirs if n[0] != "_" and any(part in n for part in (*LOADERS, "attn"))}
    assert {n for n in names if not hasattr(Model, n)} <= set(NETWORK)
    for name in SCHEDULERS:
        theirs, ours = (getattr(module, name)() for module in (diffusers, samplers))
        assert [n for n in STEPPING if hasattr(theirs, n) and not hasattr(ours, n)] == []


def test_words_that_diffusers_taught_are_known_here(tiny_checkpoints, tmp_path):
    folder, _ = tiny_checkpoints.pipeline("sd")
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    torch.manual_seed(0)
    embedding = torch.randn(theirs.text_encoder.config.hidden_size)
    theirs.load_textual_inversion({"<toy>": embedding})
    theirs.save_pretrained(tmp_path)
    ours = diffusax.StableDiffusionPipeline.from_pretrained(tmp_path)
    options = {"device": "cpu", "num_images_per_prompt": 1, "do_classifier_free_guidance": False}
    expected = theirs.encode_prompt("a <toy> here", **options)[0].detach().numpy()
    found, other = (
        ours.encode_prompt(text, **options)[0].numpy() for text in ("a <toy> here", "a toy here")
    )
    assert abs(found - expected).max() < 1e-4
    assert abs(other - expected).max() > 1e-2
