"""The catalogue: what it lists, what it refuses, and what it keeps in memory."""

import os
import shutil
import time

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file
from support.single_files import hollow, model_shapes, original_shapes

from diffusax.checkpoints.hub import EMBEDDED
from diffusax.checkpoints.single_file import configs
from diffusax.serving.catalogue.calls import adapters_of
from diffusax.serving.catalogue.catalogue import Catalogue
from diffusax.serving.catalogue.entries import describe_model
from diffusax.serving.requests.errors import NotFound, Refused
from diffusax.serving.requests.generation import Control, Generation
from diffusax.training.recipes.base_model import BaseModel

PICTURE = Image.new("RGB", (70, 65), "navy")
MASK = Image.new("L", (70, 65), 255)
LORA = {"lora_unet_mid_block.lora_down.weight": np.ones((1, 4), np.float32)}


def embedding(path, width=192, words=1):
    values = np.random.default_rng(0).standard_normal((words, width)).astype(np.float32)
    save_file({"emb_params": 0.1 * values}, path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as A1111 has it, with whole checkpoints and files without their numbers."""
    root = tmp_path_factory.mktemp("webui")
    for name in ("Stable-diffusion/old", "Lora/more", "ControlNet"):
        (root / "models" / name).mkdir(parents=True)
    (root / "embeddings").mkdir()
    models = root / "models" / "Stable-diffusion"
    (models / "emoji").symlink_to(EMBEDDED["emoji"])
    shutil.copytree(EMBEDDED["emoji"], models / "old" / "emoji")
    (models / "edit").symlink_to(EMBEDDED["emoji-edit"])
    for name, family, channels in (
        ("sd1", "sd1", 4),
        ("Paint", "sd1", 9),
        ("xl", "sdxl", 4),
        ("refiner", "refiner", 4),
        ("sd2", "sd2", 4),
    ):
        hollow(models / f"{name}.safetensors", model_shapes(family, channels))
    (root / "models" / "ControlNet" / "edges").symlink_to(EMBEDDED["emoji-control"])
    shapes = original_shapes(configs.controlnet_like(configs.UNETS["sd1"]))
    hollow(root / "models" / "ControlNet" / "canny.safetensors", shapes)
    save_file(LORA, root / "models" / "Lora" / "style.safetensors")
    save_file(LORA, root / "models" / "Lora" / "more" / "style.safetensors")
    (root / "models" / "Lora" / "pickle.pt").write_bytes(b"")
    embedding(root / "embeddings" / "sks.safetensors")
    embedding(root / "embeddings" / "large.safetensors", 768)
    return root


@pytest.fixture(scope="module")
def catalogue(folder):
    return Catalogue("emoji", folder)


def acquire(catalogue, generation):
    return catalogue.acquire(catalogue.check(generation))


def refusal(catalogue, error=Refused, **fields):
    with pytest.raises(error) as caught:
        catalogue.check(Generation(**fields))
    return caught.value


def test_a_folder_of_a1111_is_listed(catalogue):
    models = {entry.name: entry for entry in catalogue.models}
    assert catalogue.models[0].name == "emoji"
    assert set(models) == {"emoji", "old/emoji", "edit", "sd1", "Paint", "xl", "refiner"}
    assert {name: entry.kind for name, entry in models.items() if name not in ("sd1", "xl")} == {
        "emoji": "text-to-image",
        "old/emoji": "text-to-image",
        "edit": "edit",
        "Paint": "inpainting",
        "refiner": "image-to-image",
    }
    xl, emoji, edit = models["xl"], models["emoji"], models["edit"]
    assert (xl.width, xl.height, xl.multiple, xl.family) == (1024, 1024, 8, "Stable Diffusion XL")
    assert (emoji.guidance_scale, emoji.steps, emoji.sampler) == (2.0, 50, "ddim")
    assert (emoji.pixels, xl.pixels) == ((32**2 + 1, 128**2 - 1), (512**2 + 1, 2048**2 - 1))
    assert (edit.image_guidance_scale, edit.tasks) == (1.5, ("edit",))
    assert "euler_a" in xl.samplers
    assert "flow_euler" not in xl.samplers
    assert {one.name for one in catalogue.loras} == {"style", "more/style"}
    assert {one.name for one in catalogue.embeddings} == {"sks", "large"}
    assert {one.name: one.context_dim for one in catalogue.controlnets} == {
        "edges": 192,
        "canny": 768,
    }
    (reason,) = catalogue.unreadable.values()
    assert "does not say what its UNet predicts" in reason


def test_any_folder_is_listed_by_what_files_hold(tmp_path, folder):
    for name in ("Stable-diffusion/xl", "ControlNet/canny", "Lora/style"):
        source = folder / "models" / f"{name}.safetensors"
        (tmp_path / source.name).symlink_to(source)
    embedding(tmp_path / "word.safetensors")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "emoji").symlink_to(EMBEDDED["emoji"])
    (tmp_path / "more" / "edges").symlink_to(EMBEDDED["emoji-control"])
    (tmp_path / "more" / "again").symlink_to(tmp_path)
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    found = Catalogue(None, tmp_path)
    assert [entry.name for entry in found.models] == ["emoji", "xl"]
    assert [entry.name for entry in found.controlnets] == ["canny", "edges"]
    assert [entry.name for entry in found.loras] == ["style"]
    assert [entry.name for entry in found.embeddings] == ["word"]
    assert [path.name for path in found.unreadable] == ["broken.safetensors"]


def test_models_are_found_by_names_alone(catalogue, folder):
    assert catalogue.entry().name == "emoji"
    assert catalogue.entry("paint.SAFETENSORS").name == catalogue.entry("paint").name == "Paint"
    assert catalogue.entry("old/emoji").title == "old/emoji"
    for name in ("nothing", str(folder), "../embeddings/sks", "", "emoji/"):
        if name:
            with pytest.raises(NotFound, match="is not listed; it is one of"):
                catalogue.entry(name)
    assert refusal(catalogue, NotFound, model="/etc/passwd").param == "model"


def test_drawings_get_the_defaults_of_their_model(catalogue):
    drawn = catalogue.check(Generation(prompt="a red apple"))
    values = drawn.num_inference_steps, drawn.guidance_scale, drawn.sampler, drawn.strength
    assert values == (50, 2.0, "ddim", None)
    assert (drawn.width, drawn.height, drawn.model, drawn.task) == (
        64,
        64,
        "emoji",
        "text-to-image",
    )
    over = catalogue.check(Generation(image=PICTURE, height=128))
    assert (over.width, over.height, over.strength, over.task) == (64, 128, 0.8, "image-to-image")
    painted = catalogue.check(Generation(image=PICTURE, mask_image=MASK, padding_mask_crop=4))
    assert (painted.width, painted.height, painted.task) == (64, 64, "inpainting")
    edit = catalogue.check(Generation(model="edit", image=PICTURE))
    assert (edit.image_guidance_scale, edit.task) == (1.5, "edit")
    assert catalogue.check(drawn) == drawn


def test_pictures_are_resampled_once(monkeypatch):
    catalogue = Catalogue("emoji")

    def fail(*_, **__):
        raise AssertionError("resampled for nothing")

    monkeypatch.setattr("diffusax.serving.catalogue.calls.blur", fail)
    over = catalogue.check(Generation(image=PICTURE))
    painted = catalogue.check(Generation(image=PICTURE, mask_image=MASK, mask_blur=4))
    assert (over.image.size, painted.image.size) == ((64, 64), (70, 65))
    monkeypatch.setattr("diffusax.serving.catalogue.calls.resize", fail)
    pipe, arguments = catalogue.acquire(over)
    catalogue.release(pipe)
    assert arguments["image"] is over.image


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"width": 65}, "width", "width must be divisible by 8 (got 65); use 64 or 72"),
        ({"width": "x"}, "width", "width must be a whole number"),
        ({"prompt": 3}, "prompt", "prompt must be a text of length 1000000 at most (got 3)"),
        ({"seed": -1}, "seed", "seed must be a whole number from 0"),
        ({"num_images": 0}, "num_images", "from 1 up to"),
        ({"guidance_rescale": 2}, "guidance_rescale", "up to 1"),
        ({"sampler": "flow_euler"}, "sampler", "sampler must be one that suits 'emoji'"),
        ({"strength": 0.5}, "strength", "strength needs image"),
        ({"seed": 2**64}, "seed", "seed must be a whole number up to 18446744073709551615"),
        ({"sampler": "euler", "eta": 0.5}, "eta", "eta must be 0 for the sampler 'euler'"),
        (
            {"image": PICTURE, "strength": 0.2, "num_inference_steps": 4},
            *("strength", "strength leaves none of num_inference_steps=4 (got 0.2)"),
        ),
        ({"mask_image": MASK}, "mask_image", "mask_image needs image"),
        ({"image": "/etc/hostname"}, "image", "image must be a PIL image (got str)"),
        ({"image": PICTURE, "mask_blur": 2.0}, "mask_blur", "mask_blur needs mask_image"),
        ({"model": "edit"}, "image", "'edit' is made for edits, not for text to image; give it an"),
        ({"model": "paint", "image": PICTURE}, "mask_image", "made for inpainting"),
        ({"model": "refiner"}, "image", "made for image to image"),
        ({"adapters": {"x": 1}}, "adapters", "adapters names the LoRA 'x', which is not listed"),
        ({"prompt": "a <lora:x:1>"}, "adapters", "the LoRA 'x'"),
        ({"prompt": "a <lora:style:y>"}, "prompt", "must have a number from -100 to 100"),
        (
            {"image": PICTURE, "guidance_rescale": 0.5},
            "guidance_rescale",
            "must be left out for image to",
        ),
        ({"controls": (Control(model="x", image=PICTURE),)}, "controls", "the ControlNet 'x'"),
        ({"controls": (Control(model="canny", image=PICTURE),)}, "controls", "of 768 numbers"),
        (
            {"controls": (Control(model="edges", image=PICTURE, scale="x"),)},
            *("controls", "controls: scale must be a number"),
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused_at_once(catalogue, fields, param, message):
    error = refusal(catalogue, **fields)
    assert error.param == param
    assert message in str(error)
    assert not any(entry.loaded for entry in catalogue.models)


CONTROL = Control(model="edges", image=PICTURE, scale=0.5, end=0.9)
BRIEF = {"num_inference_steps": 2, "prompt": "sks apple"}
TASKS = {
    "StableDiffusionControlNetInpaintPipeline": Generation(
        image=PICTURE, mask_image=MASK, mask_blur=1.0, controls=(CONTROL, CONTROL), **BRIEF
    ),
    "StableDiffusionPipeline": Generation(width=128, height=64, **BRIEF),
    "StableDiffusionImg2ImgPipeline": Generation(image=PICTURE, strength=1.0, **BRIEF),
    "StableDiffusionControlNetPipeline": Generation(controls=(CONTROL,), **BRIEF),
    "StableDiffusionInstructPix2PixPipeline": Generation(model="edit", image=PICTURE, **BRIEF),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_pipelines_draw_each_task(folder, name):
    catalogue, generation = Catalogue("emoji", folder), TASKS[name]
    pipe, arguments = acquire(catalogue, generation)
    image = pipe(**arguments, seed=1, adapters={}).images[0]
    assert (type(pipe).__name__, image.size) == (name, (generation.width or 64, 64))
    # The model for edits has another text encoder, which the embedding does not fit.
    assert list(pipe.tokenizer.words) == (["sks"] if generation.model == "" else [])


def test_pipelines_share_what_is_loaded(folder):
    catalogue = Catalogue("emoji", folder)
    for name, generation in TASKS.items():
        pipe, arguments = acquire(catalogue, generation)
        assert type(pipe).__name__ == name
        if generation.model == "":
            assert pipe.params["unet"] is acquire(catalogue, Generation())[0].params["unet"]
            assert arguments["prompt"] == "sks apple"


def test_kernels_of_eight_bits_leave_room_for_more_models(folder):
    pipe, _ = acquire(Catalogue("emoji", folder), Generation())
    plain = sum(x.nbytes for params in pipe.params.values() for x in _leaves(params))
    catalogue = Catalogue("emoji", folder, weights="int8", memory=plain)
    own, _ = acquire(catalogue, Generation())
    kernel = own.params["unet"]["down_blocks"]["0"]["resnets"]["0"]["conv1"]["kernel"]
    assert kernel.values.dtype == np.int8
    size = sum(x.nbytes for params in own.params.values() for x in _leaves(params))
    assert size < 0.5 * plain
    acquire(catalogue, Generation(model="edit", image=PICTURE))
    assert {entry.name for entry in catalogue.models if entry.loaded} == {"emoji", "edit"}


def test_what_is_least_recently_used_leaves_memory(folder):
    alone = Catalogue("emoji", folder)
    pipe, _ = acquire(alone, Generation())
    size = sum(x.nbytes for params in pipe.params.values() for x in _leaves(params))
    catalogue = Catalogue("emoji", folder, memory=int(size * 1.9))
    loaded = lambda: {entry.name for entry in catalogue.models if entry.loaded}  # noqa: E731
    plain, _ = acquire(catalogue, Generation())
    again, _ = acquire(catalogue, Generation())
    assert again is plain
    edit, _ = acquire(catalogue, Generation(model="edit", image=PICTURE))
    assert loaded() == {"emoji", "edit"}
    catalogue.release(plain)
    assert loaded() == {"emoji", "edit"}
    catalogue.release(again)
    acquire(catalogue, Generation(model="old/emoji"))
    assert loaded() == {"edit", "old/emoji"}
    # What is in use stays, and a pipeline that was let go once too often hurts nobody.
    catalogue.release(plain)
    acquire(catalogue, Generation())
    assert loaded() == {"emoji", "edit", "old/emoji"}
    catalogue.release(edit)
    assert loaded() == {"emoji", "old/emoji"}


def test_what_was_used_again_stays(folder):
    pipe, _ = acquire(Catalogue("emoji", folder), Generation())
    size = sum(x.nbytes for params in pipe.params.values() for x in _leaves(params))
    catalogue = Catalogue("emoji", folder, memory=int(size * 2.1))
    for model in ("emoji", "edit", "emoji", "old/emoji"):
        image = PICTURE if model == "edit" else None
        pipe, _ = acquire(catalogue, Generation(model=model, image=image))
        catalogue.release(pipe)
    assert {entry.name for entry in catalogue.models if entry.loaded} == {"emoji", "old/emoji"}


def test_loras_are_called_by_the_names_in_their_headers(tmp_path):
    folder = tmp_path / "Lora"
    folder.mkdir()
    names = {"a_v1": "owl", "b_v1": "cat", "b_v2": "cat", "d": "e", "e": None, "f": "None"}
    for stem, alias in names.items():
        metadata = {"format": "pt"} | ({"ss_output_name": alias} if alias else {})
        save_file(LORA, folder / f"{stem}.safetensors", metadata=metadata)
    catalogue = Catalogue("emoji", tmp_path)
    # A file's name wins, and a name of two headers calls none (A1111's forbidden aliases).
    assert {name: catalogue.lora(name).name for name in ("owl", "a_v1", "e", "d")} == {
        **{"owl": "a_v1", "a_v1": "a_v1"},
        **{"e": "e", "d": "d"},
    }
    for name in ("cat", "None"):
        with pytest.raises(NotFound, match="is not listed"):
            catalogue.lora(name)
    generation = Generation(prompt="a <lora:owl:0.5:0.25> <lora:a_v1:1>")
    assert adapters_of(generation).keys() == {"owl", "a_v1"}
    # What a header says is read again when the file changes.
    save_file(LORA, folder / "b_v1.safetensors", metadata={"ss_output_name": "dog"})
    catalogue.refresh()
    assert [catalogue.lora(name).name for name in ("cat", "dog")] == ["b_v2", "b_v1"]


def test_a_folder_is_read_anew(tmp_path, folder):
    models = tmp_path / "checkpoints"
    models.mkdir()
    shutil.copytree(EMBEDDED["emoji"], models / "one")
    catalogue = Catalogue("one", tmp_path)
    pipe, _ = acquire(catalogue, Generation())
    shutil.copytree(EMBEDDED["emoji"], models / "two")
    (tmp_path / "lora").mkdir()
    save_file(LORA, tmp_path / "lora" / "new.safetensors")
    catalogue.refresh()
    assert [entry.name for entry in catalogue.models] == ["one", "two"]
    assert catalogue.lora("new").path.name == "new.safetensors"
    assert catalogue.entry("one").loaded
    (models / "one" / "model_index.json").touch()
    catalogue.refresh()
    assert not catalogue.entry("one").loaded
    other, _ = acquire(catalogue, Generation())
    assert other is not pipe
    shutil.rmtree(models / "one")
    with pytest.raises(ValueError, match="model 'one' is no longer in"):
        catalogue.refresh()
    assert [entry.name for entry in catalogue.models] == ["one", "two"]


def test_what_has_changed_is_loaded_anew(tmp_path):
    (tmp_path / "embeddings").mkdir()
    for name, source in (("checkpoints/one", "emoji"), ("controlnet/edges", "emoji-control")):
        shutil.copytree(EMBEDDED[source], tmp_path / name)
    catalogue = Catalogue("one", tmp_path)
    steered = Generation(controls=(Control(model="edges", image=PICTURE),))
    pipe, _ = acquire(catalogue, steered)
    catalogue.refresh()
    assert acquire(catalogue, steered)[0] is pipe
    config = tmp_path / "controlnet" / "edges" / "config.json"
    os.utime(config, ns=(0, time.time_ns() + 10**9))
    catalogue.refresh()
    other, _ = acquire(catalogue, steered)
    assert other.params["controlnet"] is not pipe.params["controlnet"]
    assert other.params["unet"] is pipe.params["unet"]
    embedding(tmp_path / "embeddings" / "sks.safetensors")
    for words in (["sks"], []):
        catalogue.refresh()
        assert list(acquire(catalogue, Generation())[0].tokenizer.words) == words
        (tmp_path / "embeddings" / "sks.safetensors").unlink(missing_ok=True)


def test_a_single_file_is_as_new_as_its_own_last_change(tmp_path):
    file = tmp_path / "sd1.safetensors"
    hollow(file, model_shapes("sd1", 4))
    os.utime(file, ns=(0, 5 * 10**9))
    assert describe_model(file, "sd1", "sd1.safetensors").changed == 5 * 10**9


def test_a_model_of_the_hub_is_fetched_when_it_is_needed(hub, tmp_path, monkeypatch):
    folder = EMBEDDED["emoji"]
    files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    asked = hub({"models/someone/emoji": files}).requested
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    catalogue = Catalogue("someone/emoji")
    assert catalogue.entry().title == "emoji"
    assert catalogue.check(Generation()).model == "someone/emoji"
    assert not any(path.endswith(".safetensors") for path in asked)
    pipe, _ = acquire(catalogue, Generation())
    assert any(path.endswith(".safetensors") for path in asked)
    catalogue.refresh()
    assert acquire(catalogue, Generation())[0] is pipe


def test_a_model_that_cannot_be_loaded_says_so(tmp_path):
    shutil.copytree(EMBEDDED["emoji"], tmp_path / "bad")
    next((tmp_path / "bad" / "vae").glob("*.safetensors")).unlink()
    catalogue = Catalogue(tmp_path / "bad")
    with pytest.raises(Refused, match=r"model 'bad' cannot be loaded: .*vae") as caught:
        acquire(catalogue, Generation())
    assert caught.value.status == 500


@pytest.mark.parametrize("read", [lambda path: describe_model(path, "", ""), BaseModel.open])
def test_a_scheduler_that_cannot_be_read_is_named_with_its_file(tmp_path, read):
    for part in EMBEDDED["emoji"].iterdir():
        (tmp_path / part.name).symlink_to(part)
    (tmp_path / "scheduler").unlink()
    path = tmp_path / "scheduler" / "scheduler_config.json"
    path.parent.mkdir()
    path.write_text('{"beta_schedule": "steep"}')
    with pytest.raises(ValueError, match=rf"^{path}: .*beta_schedule"):
        read(str(tmp_path))


def _leaves(tree):
    import jax

    return jax.tree.leaves(tree)
