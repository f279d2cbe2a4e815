"""LoRAs in whole pipelines against diffusers and PEFT, all weights random."""

import diffusers
import numpy as np
import pytest
from support.lora import ATTENTION, TEXT_ATTENTION, add_lora, lora_layers, weighed
from support.pairs import NEGATIVES, PROMPTS, TOLERANCE, generators, picture
from support.tiny import build_controlnet, build_stable_diffusion, build_stable_diffusion_xl

import diffusax

CALL = {"num_inference_steps": 3, "output_type": "np", "guidance_scale": 4.0}
BOTH = {"prompt": PROMPTS, "negative_prompt": NEGATIVES}
# The rows of one batch take different adapters.
ROWS = [{"style": 0.8}, {"style": -0.3, "face": 0.7}]


@pytest.fixture(scope="module", params=["sd", "xl"])
def pair(request, tmp_path_factory):
    """diffusers' pipeline with two LoRAs on UNet and text encoders, and ours with the same."""
    kind = request.param
    build = build_stable_diffusion if kind == "sd" else build_stable_diffusion_xl
    folder = tmp_path_factory.mktemp("adapters") / kind
    theirs = build(folder, scheduler=diffusers.DDIMScheduler(clip_sample=False))
    ours = diffusax.DiffusionPipeline.from_pretrained(folder)
    ours.set_progress_bar_config(disable=True)
    encoders = ["text_encoder"] if kind == "sd" else ["text_encoder", "text_encoder_2"]
    found = {"style": {}, "face": {}}
    for seed, name in enumerate(["unet", *encoders]):
        network = getattr(theirs, name)
        add_lora(network, "style", 4, ATTENTION if name == "unet" else TEXT_ATTENTION, seed=seed)
        add_lora(network, "face", 6, seed=9 + seed)
        for adapter, layers in found.items():
            layers[name] = lora_layers(network, adapter)
    if not hasattr(theirs.text_encoder, "text_model"):
        # diffusers' clip_skip looks for the norm where transformers had it before version 5.
        object.__setattr__(theirs.text_encoder, "text_model", theirs.text_encoder)
    for name, layers in found.items():
        ours.add_adapter(name, layers)
    return theirs, ours, [getattr(theirs, name) for name in ["unet", *encoders]]


def their_images(pair, row, index, **call):
    theirs, _, networks = pair
    texts = {name: [texts[index]] for name, texts in BOTH.items()}
    call = {**CALL, "generator": generators([7 + index]), **call}
    with weighed(row, *networks):
        return theirs(**texts, **call).images


def test_prompts_of_one_call_take_different_adapters(pair):
    _, ours, _ = pair
    given = {**BOTH, **CALL, "generator": generators([7, 8])}
    actual = ours(**given, adapters=ROWS).images
    for i, row in enumerate(ROWS):
        expected, plain = (their_images(pair, r, i)[0] for r in (row, {}))
        assert np.abs(actual[i] - expected).max() < TOLERANCE
        assert np.abs(expected - plain).max() > 0.02


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"clip_skip": 1}, {"num_images_per_prompt": 2}])
def test_calls_of_other_kinds(pair, more):
    _, ours, _ = pair
    actual = []
    for i, row in enumerate(ROWS):
        given = {name: texts[i] for name, texts in BOTH.items()}
        count = more.get("num_images_per_prompt", 1)
        seeds = [5 + n for n in range(count)]
        options = {**CALL, **more, "generator": generators(seeds)}
        actual += list(ours(**given, **options, adapters=row).images)
        expected = their_images(pair, row, i, **more, generator=generators(seeds))
        assert np.abs(np.asarray(actual[-count:]) - expected).max() < TOLERANCE
    if "num_images_per_prompt" in more:
        seeds = generators([5, 6, 5, 6])
        together = ours(**BOTH, **CALL, **more, generator=seeds, adapters=ROWS).images
        assert np.abs(together - np.asarray(actual)).max() < TOLERANCE


def test_adapters_of_a_controlnet(tmp_path):
    pipe = build_stable_diffusion(
        tmp_path / "sd", scheduler=diffusers.DDIMScheduler(clip_sample=False)
    )
    net = build_controlnet(tmp_path / "net", "sd", "a")
    ours = diffusax.StableDiffusionControlNetPipeline.from_pretrained(
        tmp_path / "sd", controlnet=diffusax.ControlNetModel.from_pretrained(tmp_path / "net")
    )
    ours.set_progress_bar_config(disable=True)
    # On all layers, those of the control image among them.
    for seed, (name, network) in enumerate({"controlnet": net, "unet": pipe.unet}.items()):
        add_lora(network, "style", 3, seed=seed)
        add_lora(network, "face", 2, ATTENTION, seed=4 + seed)
        for adapter in ("style", "face"):
            layers = {name: lora_layers(network, adapter)}
            ours.add_adapter(f"{adapter} of {name}", layers)
    rows = [{"style of controlnet": 0.9, "face of unet": 0.5}, {"face of controlnet": -0.6}]
    theirs = diffusers.StableDiffusionControlNetPipeline(
        **pipe.components, controlnet=net, requires_safety_checker=False
    )
    theirs.set_progress_bar_config(disable=True)
    options = {**CALL, "controlnet_conditioning_scale": 0.8}
    images = [picture(1), picture(2)]
    actual = ours(**BOTH, image=images, **options, generator=generators([7, 8]), adapters=rows)
    for i, row in enumerate(rows):
        own = {
            name: {key.split()[0]: w for key, w in row.items() if key.endswith(f"of {name}")}
            for name in ("controlnet", "unet")
        }
        texts = {name: [given[i]] for name, given in BOTH.items()}
        with weighed(own["controlnet"], net), weighed(own["unet"], pipe.unet):
            expected = theirs(
                **texts, image=images[i], **options, generator=generators([7 + i])
            ).images[0]
        assert np.abs(actual.images[i] - expected).max() < TOLERANCE
