"""What all families of transformers have: running batches, offline runs, adapters, saved programs.

Parity with PyTorch is tests/parity's, meshes are test_family_meshes.py's.
"""

import dataclasses
import functools
import shutil
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from support.compiled_programs import forget_executables
from support.effort import few
from support.lora import add_lora, lora_layers
from support.offline_runs import pictures, pixels, run
from support.pairs import mask, picture
from support.tiny_flux3 import flux3_pipeline
from support.tiny_transformers import (
    flux_controlnet,
    flux_pipeline,
    klein_pipeline,
    krea2_pipeline,
    qwen_image21_pipeline,
    qwen_image_pipeline,
    z_image_pipeline,
)

import diffusax
from diffusax import offline
from diffusax.cli.console import main
from diffusax.offline.requests import Requests
from diffusax.pipelines.pipeline import ahead
from diffusax.runtime.programs.compilations import count_compilations

PROMPT = "an old house on a hill"
LONG = "an old house on a hill by the sea, and two dogs that run before it"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A family with a tiny checkpoint of it."""

    build: Callable[..., Any]
    """Makes a pipeline of PyTorch, saved in a folder."""
    classes: tuple[str, ...]
    """The classes for text to image, image to image and inpainting, as far as there are some."""
    texts: dict[str, Any]
    """Arguments of a call that make its texts quick."""
    guided: dict[str, Any]
    """Arguments of a guided call."""
    unguided: dict[str, Any]
    scale: float
    """The guidance scale that a call has by default."""
    layer: str
    """Part of the name of a layer that adapters change."""
    whole: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of `build` for calls that leave `texts` out."""
    embeds: tuple[str, ...] = ()
    """The arguments that are given what encode_prompt returns; by default the family's `embeds`."""
    joins: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of a call in a batch of guided ones."""
    sides: tuple[int, int] = (24, 40)
    """Height and width."""

    @property
    def size(self) -> dict[str, int]:
        return dict(zip(("height", "width"), self.sides))

    @property
    def call(self) -> dict[str, Any]:
        return {"output_type": "np", **self.size, **self.texts}


KINDS = {
    "flux": Kind(
        flux_pipeline,
        ("FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline"),
        {"max_sequence_length": 32},
        {"negative_prompt": "a hat", "true_cfg_scale": 2.0},
        {"guidance_scale": 1.0},
        3.5,
        "proj_out",
        joins={"guidance_scale": 2.0},
    ),
    "klein": Kind(
        klein_pipeline,
        ("Flux2KleinPipeline", "Flux2KleinPipeline", "Flux2KleinInpaintPipeline"),
        {"text_encoder_out_layers": (1, 2, 3), "max_sequence_length": 64},
        {"guidance_scale": 3.0},
        {"guidance_scale": 1.0},
        4.0,
        "to_qkv_mlp_proj",
        whole={"layers": 28},
        joins={"text_encoder_out_layers": (3, 1, 0)},
    ),
    "krea2": Kind(
        krea2_pipeline,
        ("Krea2Pipeline",),
        {},
        {"guidance_scale": 2.0, "negative_prompt": "a hat"},
        {"guidance_scale": 0.0},
        4.5,
        "text_fusion",
        embeds=("prompt_embeds", "prompt_embeds_mask"),
    ),
    "qwen-image": Kind(
        qwen_image_pipeline,
        ("QwenImagePipeline", "QwenImageImg2ImgPipeline", "QwenImageInpaintPipeline"),
        {},
        {"true_cfg_scale": 2.0, "negative_prompt": "a hat"},
        {"true_cfg_scale": 1.0},
        1.0,
        "img_mlp",
        embeds=("prompt_embeds", "prompt_embeds_mask"),
    ),
    "qwen-image21": Kind(
        qwen_image21_pipeline,
        ("QwenImage21Pipeline",),
        {},
        {"true_cfg_scale": 2.0, "negative_prompt": "a hat"},
        {"true_cfg_scale": 1.0},
        1.0,
        "img_mlp",
        embeds=("prompt_embeds", "prompt_embeds_mask"),
        sides=(32, 64),
    ),
    "klein-3": Kind(
        flux3_pipeline,
        ("Flux3KleinPipeline", "Flux3KleinPipeline", "Flux3KleinInpaintPipeline"),
        {"text_encoder_out_layers": (1, 2, 4)},
        {"guidance_scale": 3.0, "negative_prompt": "a hat"},
        {"guidance_scale": 1.0},
        3.5,
        "mode_blocks.image",
        whole={"layers": 32},
        joins={"text_encoder_out_layers": (3, 1, 0)},
    ),
    "klein-3-distilled": Kind(
        functools.partial(flux3_pipeline, distilled=True),
        ("Flux3KleinPipeline", "Flux3KleinPipeline", "Flux3KleinInpaintPipeline"),
        {"text_encoder_out_layers": (1, 2, 4)},
        {},
        {"guidance_scale": 1.0},
        3.5,
        "mode_blocks.image",
        whole={"layers": 32},
    ),
    "z-image": Kind(
        z_image_pipeline,
        ("ZImagePipeline", "ZImageImg2ImgPipeline", "ZImageInpaintPipeline"),
        {},
        {"guidance_scale": 2.0, "negative_prompt": "a hat"},
        {"guidance_scale": 0.0},
        5.0,
        "context_refiner",
        joins={"cfg_normalization": 0.9, "cfg_truncation": 0.5},
    ),
}


def opened(folder, **options):
    pipe = diffusax.DiffusionPipeline.from_pretrained(folder, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Both pipelines of a family, and their folder."""
    found = {}

    def of(name):
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            found[name] = KINDS[name].build(folder), opened(folder), folder
        return found[name]

    return of


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a checkpoint for calls with the texts' default arguments."""
    found = {}

    def of(name):
        if name not in found:
            found[name] = tmp_path_factory.mktemp(f"whole-{name}")
            KINDS[name].build(found[name], **KINDS[name].whole)
        return found[name]

    return of


@pytest.mark.parametrize("name", KINDS)
def test_other_prompts_steps_guidance_and_seeds_compile_nothing(made, name):
    kind, (_, pipe, _) = KINDS[name], made(name)
    guided = {**kind.call, **kind.guided}
    pipe(prompt=PROMPT, seed=0, num_inference_steps=2, **guided)
    with count_compilations() as compiled:
        # Other layers of the language model are another program.
        call = {**guided, **kind.joins, **kind.texts}
        pipe(prompt="two dogs", seed=1, num_inference_steps=3, **call)
        pipe(prompt="a", seed=2, num_inference_steps=4, sigmas=[1.0, 0.5], **guided)
        sampler = diffusax.FlowMatchHeunDiscreteScheduler(shift=2.0)
        other = type(pipe).from_pipe(pipe, scheduler=sampler)
        other(prompt="a", seed=2, num_inference_steps=3, **guided)
    assert compiled == []


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_programs_that_are_listed_ahead_are_those_of_a_call(made, name):
    kind, (_, pipe, _) = KINDS[name], made(name)
    call = ahead.example_call(pipe, 1, kind.sides, {"prompt": PROMPT, **kind.texts})
    found = {r.program.name for r in ahead.requests(pipe.parts, pipe.task, call)}
    assert found == {"encode_texts", "denoise", "decode"}
    given = {"prompt": PROMPT, "seed": 0, "num_inference_steps": 2, **kind.call}
    inputs = pipe.prepare_inputs(**{k: v for k, v in given.items() if k != "output_type"})
    images = jax.jit(pipe.generate_fn)(pipe.params, inputs)
    np.testing.assert_allclose(images, pipe(**given).images, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_saved_programs_are_those_of_a_call(made, tmp_path, name):
    kind, (_, pipe, folder) = KINDS[name], made(name)
    call = {"prompt": PROMPT, "seed": 1, "num_inference_steps": 2, **kind.call, **kind.guided}
    expected = pipe(**call).images
    pipe.compile(sizes=[kind.sides], **kind.texts, **kind.guided)
    assert len(pipe.save_compiled(tmp_path)) >= 3
    forget_executables()
    other = opened(folder)
    assert other.load_compiled(tmp_path) >= 3
    jax.clear_caches()
    with count_compilations() as compiled:
        found = other(**call).images
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert not {"denoise", "encode_texts", "decode"} & set(compiled)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "task"), [(name, i) for name, own in KINDS.items() for i in range(len(own.classes))]
)
def test_a_running_batch_mixes_prompts_lengths_steps_and_guidance(made, name, task):
    kind, (_, pipe, _) = KINDS[name], made(name)
    own = [{}, {"image": picture(1, 80, 72)}, {"image": picture(1, 40, 24), "strength": 0.9}][task]
    own |= {"mask_image": mask(1, 40, 24)} if task == 2 else {}
    pipe = getattr(diffusax, kind.classes[task]).from_pipe(pipe)
    calls = [
        {"prompt": "a red apple", "seed": 1, "num_inference_steps": 3},
        {"prompt": LONG, "seed": 2, "num_inference_steps": 4, **kind.guided, **kind.joins},
        {"prompt": "two dogs", "seed": 3, "num_inference_steps": 2, **kind.unguided},
    ]
    if "max_sequence_length" in kind.texts:
        calls.append({"prompt": "a hat", "max_sequence_length": 80, "num_inference_steps": 2})
    calls = [{"seed": 4, **kind.call, **own, **call} for call in calls]
    with diffusax.RunningBatch(pipe) as batch:
        futures = [batch.submit(**call) for call in calls]
        found = [future.result(200).images[0] for future in futures]
    for image, call in zip(found, calls, strict=True):
        np.testing.assert_allclose(image, pipe(**call).images[0], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_whole_offline_run(whole, tmp_path, name):
    kind, pipe = KINDS[name], opened(whole(name))
    size = kind.size
    (unguided,) = kind.unguided.values()
    rows = [
        {"prompt": "a red apple", "seed": 1, **size},
        {"prompt": PROMPT * 4, "seed": 2, "steps": 3, **size},
        {"prompt": "two dogs", "seed": 3, "guidance": unguided, **size},
    ]
    assert run(pipe, rows, tmp_path) == offline.Summary(drawn=3, errors=0, finished=True)
    found = {info["line"]: pixels(data) for info, data in pictures(tmp_path)}
    for number, row in enumerate(rows, 1):
        call = {"num_inference_steps": row.get("steps", 2), "seed": row["seed"], **size}
        scale = row.get("guidance", kind.scale)
        image = pipe(prompt=row["prompt"], guidance_scale=scale, **call).images[0]
        # Programs of another batch size round otherwise, which may turn a half.
        assert np.abs(found[number].astype(int) - np.asarray(image).astype(int)).max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_texts_that_are_encoded_first(whole, name):
    kind, prompts = KINDS[name], ["a red apple", PROMPT]
    pipes = opened(whole(name), encode_first=[*prompts, "a hat"]), opened(whole(name))
    size = {**kind.size, "num_inference_steps": 2, "output_type": "np"}
    images = [pipe(prompt=prompts, seed=1, **size, **kind.guided).images for pipe in pipes]
    np.testing.assert_allclose(*images, atol=1e-5)
    for argument, value in kind.texts.items():
        with pytest.raises(ValueError, match=rf"{argument} cannot be given after encode_first"):
            pipes[0](prompt=prompts, **{argument: value}, **size)


def test_text_encoders_may_have_a_device_of_their_own(made):
    kind, (_, pipe, folder) = KINDS["z-image"], made("z-image")
    apart = opened(folder, encoder_device=jax.devices()[0])
    call = {"prompt": PROMPT, "seed": 1, "num_inference_steps": 2, **kind.call, **kind.guided}
    np.testing.assert_allclose(apart(**call).images, pipe(**call).images, atol=1e-5)
    other = diffusax.ZImageImg2ImgPipeline.from_pipe(apart)
    assert other.parts.encoder_mesh == apart.parts.encoder_mesh is not None
    with pytest.raises(ValueError, match="load the pipeline without encoder_device"):
        apart.prepare_inputs(**{k: v for k, v in call.items() if k != "output_type"})


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_embeddings_are_those_of_their_prompts(made, name):
    kind, (_, pipe, _) = KINDS[name], made(name)
    prompts, call = ["a red apple", PROMPT], {**kind.call, "num_inference_steps": 2, "seed": 1}
    expected = pipe(prompt=prompts, **{**call, **kind.unguided}).images
    found = pipe.encode_prompt(prompt=prompts, **kind.texts)
    names = kind.embeds or pipe.family.embeds
    given = dict(zip(names, found))
    again = pipe(**given, **{**call, **kind.unguided}).images
    np.testing.assert_allclose(again, expected, atol=1e-5)


@pytest.mark.parametrize("name", few(KINDS, "klein", "z-image"))
def test_adapters_are_those_of_pytorch(tmp_path_factory, name):
    kind, folder = KINDS[name], tmp_path_factory.mktemp("adapted")
    reference = kind.build(folder)
    pipe = opened(folder)
    add_lora(reference.transformer, "style", 3)
    layers = lora_layers(reference.transformer, "style")
    assert any(kind.layer in path for path in layers)
    pipe.add_adapter("style", {"transformer": layers})
    call = {"prompt": PROMPT, "num_inference_steps": 2, **kind.call}
    expected = reference(generator=torch.Generator().manual_seed(7), **call).images
    actual = pipe(generator=7, adapters={"style": 1.0}, **call).images
    assert np.abs(actual - expected).max() < 1e-4
    plain = pipe(generator=7, adapters={}, **call).images
    assert np.abs(plain - expected).max() > 0.02


@pytest.mark.parametrize("name", few(("klein-3", "krea2", "qwen-image21", "z-image"), "krea2"))
def test_what_steps_share_is_computed_once_with_adapters_too(tmp_path_factory, monkeypatch, name):
    kind, folder = KINDS[name], tmp_path_factory.mktemp("shared")
    reference = kind.build(folder)
    pipe = opened(folder)
    add_lora(reference.transformer, "style", 3)
    pipe.add_adapter("style", {"transformer": lora_layers(reference.transformer, "style")})
    call = {"prompt": [PROMPT, "a hat"], "num_inference_steps": 3, "seed": 1, **kind.call}
    call["adapters"] = [{"style": 1.0}, {"style": -0.5}]
    own, shared = type(pipe.parts.denoiser).prepare, []

    def watched(*arguments):
        found = own(*arguments)
        shared.append((arguments[-1].adapters is not None, found.keys is not None))
        return found

    images = []
    for prepare in (watched, lambda self, params, conditions, inputs: conditions):
        forget_executables()
        monkeypatch.setattr(type(pipe.parts.denoiser), "prepare", prepare)
        images.append(pipe(**call).images)
    forget_executables()
    assert set(shared) == {(True, True)}
    np.testing.assert_allclose(*images, atol=1e-5)


@pytest.mark.parametrize("name", few(KINDS, "klein", "klein-3", "z-image"))
def test_converted_from_pytorch_objects(made, name):
    kind, (reference, pipe, _) = KINDS[name], made(name)
    # FLUX.3's is diffusers' modular pipeline, and called by ours of the tests.
    converted = diffusax.DiffusionPipeline.from_torch(getattr(reference, "pipe", reference))
    converted.set_progress_bar_config(disable=True)
    assert type(converted).__name__ == kind.classes[0]
    for part in ("transformer", "vae"):
        assert getattr(converted, part).network == getattr(pipe, part).network
    for one, other in zip(converted.parts.tokenizers.values(), pipe.parts.tokenizers.values()):
        assert getattr(one, "others", None) == getattr(other, "others", None)
    call = {"prompt": PROMPT, "num_inference_steps": 2, **kind.call}
    expected = pipe(seed=3, **call).images
    np.testing.assert_array_equal(converted(seed=3, **call).images, expected)


@pytest.mark.parametrize("name", few(("flux", "klein", "z-image"), "klein", "z-image"))
def test_what_is_saved_is_opened_by_pytorch(made, tmp_path, name):
    kind, (reference, pipe, _) = KINDS[name], made(name)
    pipe.save_pretrained(tmp_path)
    again = type(reference).from_pretrained(tmp_path)
    call = {"prompt": PROMPT, "num_inference_steps": 2, **kind.call}
    theirs = again(generator=torch.Generator().manual_seed(1), **call).images
    assert np.abs(theirs - pipe(generator=1, **call).images).max() < 1e-4


@pytest.mark.parametrize("name", ["klein-3", "krea2", "qwen-image"])
def test_what_reads_images_is_saved_though_it_is_not_loaded(made, tmp_path, name, caplog):
    _, pipe, folder = made(name)
    stored = tensors_of(folder / "text_encoder")
    seeing = {key for key in stored if "visual." in key}
    assert seeing
    pipe.save_pretrained(tmp_path / "saved")
    found = tensors_of(tmp_path / "saved" / "text_encoder")
    for key in seeing:
        (own,) = (k for k in found if k.removeprefix("model.") == key.removeprefix("model."))
        np.testing.assert_array_equal(found[own], stored[key])
    config = transformers.AutoConfig.from_pretrained(tmp_path / "saved" / "text_encoder")
    kind = getattr(transformers, config.architectures[0])
    _, info = kind.from_pretrained(tmp_path / "saved" / "text_encoder", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    shutil.copytree(tmp_path / "saved", tmp_path / "moved")
    moved = opened(tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved")
    moved.save_pretrained(tmp_path / "without")
    assert "is saved as it was loaded, without a part" in caplog.text
    assert not any("visual." in k for k in tensors_of(tmp_path / "without" / "text_encoder"))


def tensors_of(folder):
    return {k: x for file in folder.glob("*.safetensors") for k, x in load_file(file).items()}


@pytest.mark.parametrize("name", KINDS)
def test_every_class_of_a_family_is_made_of_every_other(made, tmp_path, name):
    kind, (_, pipe, _) = KINDS[name], made(name)
    autos = ("Text2Image", "Image2Image", "Inpainting")
    steering = {}
    if name == "flux":
        flux_controlnet().save_pretrained(tmp_path)
        steering = {"controlnet": diffusax.FluxControlNetModel.from_pretrained(tmp_path)}
    classes = [c for c in vars(diffusax.pipelines.classes).values() if _is_of(pipe.family, c)]
    assert len(classes) >= min(2, len(kind.classes))
    for cls in classes:
        one = cls.from_pipe(pipe, **(steering if "ControlNet" in cls.__name__ else {}))
        for other in classes:
            more = {} if "ControlNet" not in other.__name__ else steering
            found = other.from_pipe(one, **more)
            assert found.params["transformer"] is pipe.params["transformer"]
    for auto, wanted in zip(autos, kind.classes, strict=False):
        found = getattr(diffusax, f"AutoPipelineFor{auto}").from_pipe(pipe)
        assert type(found).__name__ == wanted


def _is_of(family, cls):
    return isinstance(cls, type) and getattr(cls, "family", None) is family


def test_commands_refuse_a_negative_prompt_that_flux_would_not_read(whole, capsys):
    size = ["--height", "24", "--width", "40", "--steps", "1"]
    with pytest.raises(SystemExit):
        main(["generate", PROMPT, "--model", str(whole("flux")), *size, "--negative-prompt", "fog"])
    assert "reads a negative prompt only with true_cfg_scale" in capsys.readouterr().err
    pipe = diffusax.DiffusionPipeline.from_pretrained(whole("flux"))
    requests = Requests(pipe, offline.Settings(height=24, width=40))
    with pytest.raises(
        ValueError, match=r"^negative_prompt does nothing for FLUX\.1 without true_c"
    ):
        requests.of_row({"prompt": PROMPT, "negative_prompt": "fog"}, 0)
    assert requests.of_row({"prompt": PROMPT, "negative_prompt": ""}, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_commands_compile_generate_and_export(whole, tmp_path, name):
    folder, output = str(whole(name)), str(tmp_path / "a.png")
    height, width = map(str, KINDS[name].sides)
    main(
        ["compile", folder, "--sizes", f"{height}x{width}", "--output", str(tmp_path / "programs")]
    )
    size = ["--height", height, "--width", width, "--steps", "2", "--seed", "1"]
    main(["generate", PROMPT, "--model", folder, *size, "--output", output])
    first = str(tmp_path / "b.png")
    main(["generate", PROMPT, "--model", folder, *size, "--output", first, "--encode-first"])
    compiled = ["--compiled", str(tmp_path / "programs")]
    third = str(tmp_path / "c.png")
    main(["generate", PROMPT, "--model", folder, *size, "--output", third, *compiled])
    found = [np.asarray(diffusax.load_image(file), np.int32) for file in (output, first, third)]
    assert all(np.abs(image - found[0]).max() <= 1 for image in found)
    picture(1, 80, 72).save(tmp_path / "photo.png")
    seen = ["--image", str(tmp_path / "photo.png"), "--output", first]
    if len(KINDS[name].classes) > 1:
        main(["generate", PROMPT, "--model", folder, *size, *seen])
        assert diffusax.load_image(first).size == (int(width), int(height))
    if name == "flux":
        flux_controlnet().save_pretrained(tmp_path / "net")
        steering = ["--control", seen[1], "--controlnet", str(tmp_path / "net")]
        main(["generate", PROMPT, "--model", folder, *size, *steering, "--output", first])
        image = np.asarray(diffusax.load_image(first), np.int32)
        assert np.abs(image - found[0]).max() > 5
    out = tmp_path / "exported"
    options = ["--platforms", "cpu", "--size", f"{height}x{width}", "--output", str(out)]
    main(["export", folder, *options])
    assert {"denoise.stablehlo", "transformer.safetensors"} <= {f.name for f in out.iterdir()}
    assert not (out / "draw.py").exists()


@pytest.mark.parametrize(
    ("name", "call", "message"),
    [
        *((name, {"height": 26}, r"height must be divisible by (4|32) ") for name in KINDS),
        ("flux", {"max_sequence_length": 513}, "max_sequence_length must be at most 512"),
        ("flux", {"latents": np.zeros((1, 60, 16))}, r"or \(images, tokens, width\) = \(1, 60, 64"),
        ("flux", {"negative_ip_adapter_image": picture()}, "negative_ip_adapter_image must be No"),
        ("flux", {"ip_adapter_image": picture()}, "IP-Adapter"),
        ("klein", {"text_encoder_out_layers": (1, 9)}, "text_encoder_out_layers must be hidden st"),
        ("klein", {"attention_kwargs": {"x": 1}}, "attention_kwargs may hold only 'scale'"),
        ("klein", {"image": picture(1, 63, 80)}, r"at least 64 pixels.* \(got 63x80\)"),
        ("klein", {"image": picture(1, 640, 64)}, "one at most 8 times as long"),
        ("klein", {"image": []}, "image must have at least one image"),
        (
            "z-image",
            {"guide": lambda y, step: y[0], "cfg_normalization": True},
            "only one of guide and cfg",
        ),
        ("z-image", {"joint_attention_kwargs": {"x": 1}}, "joint_attention_kwargs may hold only"),
        (
            "z-image",
            {"prompt": None, "prompt_embeds": [np.zeros((3, 7))]},
            r"list of \(tokens, width\)",
        ),
    ],
)
def test_what_is_wrong_is_named(made, name, call, message):
    _, pipe, _ = made(name)
    with pytest.raises(ValueError, match=message):
        pipe(**{"prompt": PROMPT, **KINDS[name].call, **call})
