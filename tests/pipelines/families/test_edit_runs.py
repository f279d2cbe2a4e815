"""Krea 2 and Z-Image that have learned to look at images: pipelines, commands, batches, servers."""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from support.effort import few
from support.lora import ATTENTION
from support.pairs import picture
from support.running_server import running, sent
from support.tiny_transformers import krea2_pipeline, z_image_pipeline

import diffusax
from diffusax.cli.console import main
from diffusax.lora import find_layers, read_lora, write_lora
from diffusax.pipelines.plan.plan import Conditions, StepInputs
from diffusax.runtime.programs.compilations import count_compilations
from diffusax.serving.catalogue.entries import describe_model

PROMPT = "an old house on a hill"


@dataclasses.dataclass(frozen=True)
class Kind:
    build: Callable[..., Any]
    plain: str
    editor: str
    tasks: tuple[str, ...]
    """Of a checkpoint that has not learned."""


KINDS = {
    "krea2": Kind(krea2_pipeline, "Krea2Pipeline", "Krea2EditPipeline", ("text-to-image",)),
    "z-image": Kind(
        z_image_pipeline,
        "ZImagePipeline",
        "ZImageEditPipeline",
        ("text-to-image", "image-to-image", "inpainting"),
    ),
}
CALL = {"num_inference_steps": 2, "seed": 3, "width": 64, "height": 72}
LOOKS = [picture(1, 64, 72), picture(2, 80, 48)]


def opened(folder, kind=diffusax.DiffusionPipeline, **options):
    pipe = kind.from_pretrained(folder, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@dataclasses.dataclass(frozen=True)
class Case:
    kind: Kind
    base: Any
    """The folder of a checkpoint that has not learned to look at images."""
    learned: Any
    """That of one which has."""

    @property
    def editor(self) -> Any:
        return getattr(diffusax, self.kind.editor)


@pytest.fixture(scope="module", params=few(KINDS, "krea2"))
def case(request, tmp_path_factory):
    kind = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    kind.build(folder / "base")
    pipe = opened(folder / "base", getattr(diffusax, kind.editor))
    pipe.save_pretrained(folder / "learned")
    return Case(kind, folder / "base", folder / "learned")


@pytest.fixture(scope="module")
def pipe(case):
    return opened(case.learned)


def pixels(images):
    return np.asarray(images, np.float32)


def lora_file(case, path, layout, strength=0.5):
    """A LoRA of random numbers that has learned by a layout."""
    rng, pipe = np.random.default_rng(0), opened(case.base)
    tensors = {}
    for name, kernel in pipe.transformer.state_dict().items():
        layer = name.removesuffix(".weight")
        if layer.endswith(tuple(ATTENTION)) and "refiner" not in layer and kernel.ndim == 2:
            out, width = kernel.shape
            down = rng.standard_normal((2, width)) * strength
            tensors[f"transformer.{layer}.lora_A.weight"] = down.astype(np.float32)
            up = rng.standard_normal((out, 2)) * strength
            tensors[f"transformer.{layer}.lora_B.weight"] = up.astype(np.float32)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, {"format": "pt"} | ({"references_layout": layout} if layout else {}))
    return path


def test_what_has_learned_to_look_at_images_is_opened_so(case, pipe, tmp_path):
    index = json.loads((case.learned / "model_index.json").read_text())
    assert index["_class_name"] == case.kind.plain
    assert type(pipe) is case.editor
    plain = opened(case.base)
    assert type(plain).__name__ == case.kind.plain
    for auto in (diffusax.AutoPipelineForText2Image, diffusax.AutoPipelineForImage2Image):
        assert type(auto.from_pretrained(case.learned)) is case.editor
    reference = diffusers.DiffusionPipeline.from_pretrained(case.learned)
    assert type(reference).__name__ == case.kind.plain
    # The same class of a checkpoint that says nothing, of which somebody says it.
    asked = diffusax.AutoPipelineForImage2Image.from_pretrained(
        case.base, references_layout="joint"
    )
    assert type(asked) is case.editor
    asked.save_pretrained(tmp_path)
    assert opened(tmp_path).references_layout == "joint"


@pytest.mark.slow
def test_images_and_their_layout_change_what_is_generated(case, pipe):
    call = {"prompt": PROMPT, "output_type": "np", **CALL}
    one, two = (pipe(image=x, **call).images for x in (LOOKS[0], LOOKS))
    text = opened(case.base)(**call).images
    np.testing.assert_allclose(pipe(**call).images, text, atol=1e-5)
    joint = opened(case.base, case.editor, references_layout="joint")
    found = joint(image=LOOKS, **call).images
    assert min(np.abs(x - text).max() for x in (one, two, found)) > 0.01
    assert min(np.abs(x - two).max() for x in (one, found)) > 0.003
    joint.references_layout = "blind"
    np.testing.assert_allclose(joint(image=LOOKS, **call).images, two, atol=1e-5)
    with pytest.raises(ValueError, match="references_layout must be 'blind' or 'joint'"):
        joint.references_layout = "both"


def test_the_result_has_the_size_of_the_first_image(pipe):
    # Of which sides are rounded to multiples of a token's.
    multiple = pipe.parts.latents.multiple
    image = picture(1, 10 * multiple + 1, 6 * multiple - 1)
    (found,) = pipe(PROMPT, image=[image, LOOKS[0]], num_inference_steps=1, seed=0).images
    assert found.size == (10 * multiple, 6 * multiple)


def test_a_run_computes_what_is_read_of_images_once_unless_they_see_all(case, pipe):
    channels, width = pipe.parts.latents.channels, pipe.parts.denoiser.context_dim
    image = jnp.zeros((1, 4, 6, channels))
    given = Conditions(jnp.zeros((1, 7, width)), lengths=jnp.array([5]))
    looking = given._replace(added={"references": (image,)})

    def kept(pipe, conditions):
        denoiser, none = pipe.parts.denoiser, StepInputs(None, None)
        prepare = functools.partial(denoiser.prepare, inputs=none)
        return set(jax.eval_shape(prepare, pipe.params, conditions).keys)

    joint = opened(case.base, case.editor, references_layout="joint")
    assert kept(pipe, looking) == {"transformer", "references"}
    assert kept(pipe, given) == kept(joint, looking) == {"transformer"}


def test_other_images_of_the_same_sizes_compile_nothing(pipe):
    call = {"num_inference_steps": 2, "prompt": "a hat", "width": 64, "height": 72}
    pipe(image=[picture(1, 64, 72), picture(2, 80, 48)], seed=0, **call)
    with count_compilations() as compiled:
        pipe(image=[picture(3, 64, 72), picture(4, 80, 48)], seed=1, **call)
    assert compiled == []


def test_a_running_batch_generates_what_the_pipeline_alone_does(pipe):
    calls = [
        {"prompt": PROMPT, "image": LOOKS, **CALL},
        {"prompt": "a hat", "image": LOOKS, **CALL, "seed": 2, "num_inference_steps": 3},
        {"prompt": "a hat", **CALL},
    ]
    calls = [{**call, "output_type": "np"} for call in calls]
    with diffusax.RunningBatch(pipe) as batch:
        futures = [batch.submit(**call) for call in calls]
        found = [future.result(200).images[0] for future in futures]
    for image, call in zip(found, calls, strict=True):
        np.testing.assert_allclose(image, pipe(**call).images[0], atol=1e-4)
    given = {k: v for k, v in calls[0].items() if k != "output_type"}
    images = jax.jit(pipe.generate_fn)(pipe.params, pipe.prepare_inputs(**given))
    np.testing.assert_allclose(images, pipe(**calls[0]).images, atol=1e-5)


def difference(image, expected):
    return np.abs(np.asarray(image, np.int32) - np.asarray(expected, np.int32)).max()


def test_the_server_edits_with_a_checkpoint_that_has_learned(case, pipe):
    assert "image-to-image" in describe_model(case.learned, "m", "M").entry.tasks
    fields = {"prompt": PROMPT, "size": "64x72", "num_inference_steps": 2, "seed": 3}
    with running(str(case.learned)) as server:
        body = {**fields, "image": [sent(x) for x in LOOKS], "response_format": "url"}
        answer = server.post("/v1/images/edits", body).json
        path = answer["data"][0]["url"].split("/", 3)[3]
        found = server.get(f"/{path}").image.convert("RGB")
    assert difference(found, pipe(prompt=PROMPT, image=LOOKS, **CALL).images[0]) <= 1


@pytest.mark.slow
def test_the_server_edits_with_a_lora_that_has_learned(case, tmp_path):
    assert describe_model(case.base, "m", "M").entry.tasks == case.kind.tasks
    for layout in ("blind", "joint"):
        lora_file(case, tmp_path / "loras" / f"{layout}.safetensors", layout)
    fields = {"prompt": PROMPT, "size": "64x72", "num_inference_steps": 2, "seed": 3}
    body = {**fields, "image": [sent(LOOKS[0])], "response_format": "url"}
    found = {}
    with running(str(case.base), str(tmp_path)) as server:
        for layout in ("joint", "blind"):
            answer = server.post("/v1/images/edits", {**body, "adapters": {layout: 1.0}}).json
            path = answer["data"][0]["url"].split("/", 3)[3]
            found[layout] = server.get(f"/{path}").image.convert("RGB")
        both = {**body, "adapters": {"joint": 1.0, "blind": 1.0}}
        refused = server.post("/v1/images/edits", both).json["error"]["message"]
    assert "adapters must have learned to look at images in one way" in refused
    for layout, image in found.items():
        pipe = opened(case.base, case.editor, references_layout=layout)
        pipe.load_lora_weights(tmp_path / "loras" / f"{layout}.safetensors")
        assert difference(image, pipe(prompt=PROMPT, image=LOOKS[0], **CALL).images[0]) <= 1
    assert difference(found["joint"], found["blind"]) > 1


def test_commands_look_at_images(case, pipe, tmp_path):
    looks = [str(tmp_path / f"{i}.png") for i in range(2)]
    for path, image in zip(looks, LOOKS, strict=True):
        image.save(path)
    common = ["--model", str(case.learned), "--steps", "2", "--seed", "3"]
    size = ["--width", "64", "--height", "72"]
    out = str(tmp_path / "out.png")
    run = ["generate", PROMPT, *common, *size, "--image", looks[0], "--output", out]
    main([*run, "--reference", looks[1]])
    expected = pipe(prompt=PROMPT, image=LOOKS, **CALL).images[0]
    assert difference(diffusax.load_image(out), expected) <= 1
    main(["edit", looks[0], PROMPT, *common, "--output", out])
    expected = pipe(prompt=PROMPT, image=LOOKS[0], num_inference_steps=2, seed=3).images[0]
    assert difference(diffusax.load_image(out), expected) <= 1


def test_commands_look_at_images_with_a_lora_that_has_learned(case, tmp_path):
    lora = lora_file(case, tmp_path / "loras" / "look.safetensors", "joint")
    LOOKS[0].save(tmp_path / "look.png")
    pipe = opened(case.base, case.editor, references_layout="joint")
    pipe.load_lora_weights(lora)
    expected = pipe(prompt=PROMPT, image=LOOKS[0], **CALL).images[0]
    prompt, out = f"{PROMPT} <lora:look:1>", str(tmp_path / "out.png")
    common = ["--model", str(case.base), "--lora-dir", str(lora.parent), "--steps", "2"]
    common += ["--seed", "3", "--output", out]
    size, image = ["--width", "64", "--height", "72"], str(tmp_path / "look.png")
    main(["generate", prompt, "--image", image, *common, *size])
    assert difference(diffusax.load_image(out), expected) <= 1
    main(["edit", image, prompt, *common])
    assert difference(diffusax.load_image(out), expected) <= 1


def test_a_lora_says_by_which_layout_it_has_learned(case, pipe, tmp_path):
    lora = lora_file(case, tmp_path / "joint.safetensors", "joint")
    message = r"joint\.safetensors was trained with images to look at that see all tokens \(joint\)"
    with pytest.raises(ValueError, match=message + r".*; assign pipe\.references_layout = 'joint'"):
        pipe.load_lora_weights(lora)
    # A pipeline that looks at no images takes it, and tells the one that does.
    plain = opened(case.base)
    plain.load_lora_weights(lora)
    editor = diffusax.AutoPipelineForImage2Image.from_pipe(plain)
    assert (type(editor), editor.references_layout) == (case.editor, "joint")
    with pytest.raises(ValueError, match="must be 'joint' for the LoRA 'default_0'"):
        editor.references_layout = "blind"
    # One that says nothing is taken as it is.
    pipe = opened(case.learned)
    pipe.load_lora_weights(lora_file(case, tmp_path / "none.safetensors", None))


@pytest.mark.parametrize("form", ["diffusers", "kohya", "comfyui"])
def test_files_of_every_format_keep_the_layout_and_fit(case, tmp_path, form):
    lora = lora_file(case, tmp_path / "in.safetensors", None)
    out = tmp_path / "out.safetensors"
    run = ["convert", "lora", str(lora), str(out), "--to", form, "--model", str(case.base)]
    main([*run, "--references-layout", "blind"])
    with safe_open(out, "np") as file:
        assert file.metadata()["references_layout"] == "blind"
        keys = list(file.keys())
    original = "blocks.0.attn.wq" if case.kind.plain == "Krea2Pipeline" else None
    original = original or "layers.0.attention.to_q"
    if form == "comfyui":
        assert f"diffusion_model.{original}.lora_A.weight" in keys
    if form == "kohya":
        assert f"lora_unet_{original.replace('.', '_')}.lora_down.weight" in keys
    networks = {"transformer": opened(case.base).transformer.network}
    before, after = (find_layers(read_lora(path), networks) for path in (lora, out))
    assert before.keys() == after.keys()
    for key, parts in before.items():
        for name in ("down", "up"):
            np.testing.assert_array_equal(parts[name], after[key][name])
    # Written again, it says the same.
    write_lora(tmp_path / "again.safetensors", after, "diffusers")
    assert load_file(tmp_path / "again.safetensors").keys() == load_file(lora).keys()


def test_diffusers_opens_a_lora_with_a_layout(case, tmp_path):
    lora = lora_file(case, tmp_path / "in.safetensors", "blind")
    reference = diffusers.DiffusionPipeline.from_pretrained(case.learned)
    reference.load_lora_weights(lora)
    assert reference.get_list_adapters()
