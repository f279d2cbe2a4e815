"""Components that are left out, copied, or come from diffusers and transformers."""

import copy
import logging
import pickle

import diffusers
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from diffusers.models.controlnets.multicontrolnet import MultiControlNetModel

import diffusax

CALL = {"prompt": "a cat", "num_inference_steps": 2, "output_type": "latent", "generator": 3}


@pytest.fixture(scope="module")
def folder(tiny_checkpoints):
    return tiny_checkpoints.pipeline("sd")[0]


@pytest.fixture(scope="module")
def theirs(folder):
    return diffusers.StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)


@pytest.fixture(scope="module")
def loaded(folder):
    return diffusax.StableDiffusionPipeline.from_pretrained(folder)


@pytest.fixture
def pipe(loaded):
    """A pipeline of each test's own, whose arrays all tests share."""
    return copy.copy(loaded)


@pytest.fixture(scope="module")
def expected(loaded):
    return np.asarray(loaded(**CALL).images)


def load(folder, **options):
    return diffusax.StableDiffusionPipeline.from_pretrained(folder, **options)


def test_texts_are_encoded_without_the_other_networks(folder, pipe):
    alone = load(folder, unet=None, vae=None, scheduler=None)
    ask = "a cat", "cpu", 1, True
    for found, wanted in zip(alone.encode_prompt(*ask), pipe.encode_prompt(*ask)):
        np.testing.assert_array_equal(found, wanted)
    assert alone.unet is alone.vae is alone.scheduler is None
    assert alone.dtype == jnp.float32
    with pytest.raises(ValueError, match=r"has no unet, .* assign one, pipe\.unet = \.\.\., or"):
        alone("a cat")
    alone.unet, alone.vae = pipe.unet, pipe.vae
    with pytest.raises(ValueError, match="this pipeline has no scheduler"):
        alone("a cat")


def test_latents_are_made_without_the_autoencoder(folder, theirs, pipe, expected):
    pipe.vae = None
    del pipe.image_encoder
    np.testing.assert_array_equal(pipe(**CALL).images, expected)
    with pytest.raises(ValueError, match="this pipeline has no vae"):
        pipe(**{**CALL, "output_type": "np"})
    # Without a config it is eight pixels per latent, as in diffusers.
    never = load(folder, vae=None)
    without = diffusers.StableDiffusionPipeline.from_pretrained(
        folder, vae=None, safety_checker=None
    )
    assert never.vae_scale_factor == without.vae_scale_factor
    assert never(**CALL).images.shape == expected.shape
    del never.text_encoder
    with pytest.raises(ValueError, match="no text encoder; give prompt_embeds"):
        never("a cat", output_type="latent")


@pytest.mark.slow
def test_a_missing_text_encoder_is_told_before_the_network_runs(tiny_checkpoints):
    options = {"text_encoder": None, "tokenizer": None, "vae": None}
    folder = tiny_checkpoints.pipeline("xl")[0]
    alone = diffusax.StableDiffusionXLPipeline.from_pretrained(folder, **options)
    with pytest.raises(ValueError, match=r"width of 24, and the unet attends to 56; load the pipe"):
        alone("a cat", output_type="latent")
    options = {"text_encoder_2": None, "tokenizer_2": None, "vae": None}
    alone = diffusax.StableDiffusionXLPipeline.from_pretrained(folder, **options)
    with pytest.raises(ValueError, match="no pooled embedding, which text_encoder_2 does; load"):
        alone("a cat", output_type="latent")


@pytest.mark.slow
def test_devices_are_no_part_of_a_pickle(pipe, expected):
    mesh = pipe.spread_over("data=1").mesh
    assert copy.deepcopy(pipe).mesh is mesh
    again = pickle.loads(pickle.dumps(pipe))
    assert again.mesh is None
    np.testing.assert_array_equal(again(**CALL).images, expected)


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.deepcopy,
        pytest.param(copy.copy, marks=pytest.mark.slow),
        pytest.param(lambda pipe: pickle.loads(pickle.dumps(pipe)), marks=pytest.mark.slow),
    ],
    ids=["deepcopy", "copy", "pickle"],
)
def test_copies_run_alike_and_are_changed_alone(pipe, expected, duplicate):
    again = duplicate(pipe)
    np.testing.assert_array_equal(again(**CALL).images, expected)
    scheduler, params = pipe.scheduler, pipe.unet.params
    again.scheduler = diffusax.DDIMScheduler.from_config(pipe.scheduler.config)
    again.unet.to(dtype="float16")
    again.vae = None
    assert pipe.scheduler is scheduler
    assert pipe.unet.params is params
    assert pipe.vae is not None
    assert again.unet.dtype == jnp.float16
    shared = duplicate is copy.copy
    assert (again.parts.adapters is pipe.parts.adapters) == shared


def test_components_of_diffusers_and_transformers_are_converted(folder, theirs, pipe, expected):
    given = {name: value for name, value in theirs.components.items() if value is not None}
    made = diffusax.StableDiffusionPipeline(**given)
    for name, value in given.items():
        setattr(pipe, name, value)
    img2img = diffusax.AutoPipelineForImage2Image.from_pipe(theirs)
    assert type(img2img) is diffusax.StableDiffusionImg2ImgPipeline
    again = diffusax.StableDiffusionPipeline.from_pipe(img2img)
    names = ("tokenizer", "text_encoder", "scheduler")
    loaded = load(folder, **{name: given[name] for name in names})
    for found in (made, pipe, again, loaded):
        assert isinstance(found.tokenizer, diffusax.CLIPTokenizer)
        assert isinstance(found.unet, diffusax.UNet2DConditionModel)
        np.testing.assert_array_equal(found(**CALL).images, expected)


@pytest.mark.slow
def test_models_that_pytorch_compiles_are_the_models(pipe, expected):
    unet = pipe.unet
    pipe.unet = torch.compile(unet, mode="reduce-overhead", fullgraph=True)
    assert pipe.unet.network == unet.network
    np.testing.assert_array_equal(pipe(**CALL).images, expected)


@pytest.mark.slow
def test_several_controlnets_of_diffusers_are_converted(theirs):
    net = diffusers.ControlNetModel.from_unet(theirs.unet)
    joined = MultiControlNetModel([net, net])
    for value in (joined, [net, net]):
        made = diffusax.StableDiffusionControlNetPipeline.from_pipe(theirs, controlnet=value)
        assert [one.class_name for one in made.controlnet.nets] == ["ControlNetModel"] * 2


def test_what_cannot_be_converted_is_named_with_its_module(pipe, theirs):
    match = (
        r"tokenizer must be a CLIPTokenizer of diffusax, .* \(got transformers\..*CLIPTextModel\)"
    )
    with pytest.raises(ValueError, match=match):
        pipe.tokenizer = theirs.text_encoder
    with pytest.raises(ValueError, match=r"unet must be a Model .* \(got diffusers\..*PNDMSched"):
        pipe.unet = theirs.scheduler
    other = transformers.T5Tokenizer(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)])
    with pytest.raises(ValueError, match=r"tokenizer=transformers\..*T5Tokenizer cannot"):
        pipe.tokenizer = other
    assert isinstance(pipe.tokenizer, diffusax.CLIPTokenizer)


@pytest.mark.slow
def test_dtypes_are_by_component(folder):
    pipe = load(folder, torch_dtype={"unet": torch.float16, "vae": "auto", "default": "bfloat16"})
    assert pipe.unet.dtype == jnp.float16
    assert pipe.vae.dtype == jnp.float32
    assert pipe.text_encoder.dtype == jnp.bfloat16
    assert load(folder, torch_dtype={"unet": "float16"}).vae.dtype == jnp.float32


FINE = {
    **dict.fromkeys(("force_download", "resume_download", "use_safetensors"), True),
    **{"low_cpu_mem_usage": False, "device_map": "balanced", "proxies": None, "mirror": "x"},
    **{"custom_revision": "main", "use_onnx": False, "quantization_config": None},
    **{"safety_checker": None, "requires_safety_checker": False, "feature_extractor": None},
    **{"local_files_only": True, "cache_dir": None, "use_auth_token": None, "max_memory": {0: 1}},
}


def test_keywords_of_diffusers_are_taken_and_unknown_ones_logged(folder, caplog, tmp_path):
    with caplog.at_level(logging.WARNING):
        pipe = load(folder, **FINE)
        options = {"subfolder": "vae", "force_download": True, "low_cpu_mem_usage": True}
        diffusax.AutoencoderKL.from_pretrained(folder, **options)
        diffusax.CLIPTokenizer.from_pretrained(folder, subfolder="tokenizer", use_fast=False)
        diffusax.AutoPipelineForText2Image.from_pretrained(folder, force_download=True)
        diffusax.DiffusionPipeline.download(folder, resume_download=True)
    assert not caplog.records

    def pipe_saved(**keywords):
        pipe.save_pretrained(tmp_path, **keywords)

    def vae_saved(**keywords):
        pipe.vae.save_pretrained(tmp_path / "vae", **keywords)

    cases = [
        (lambda **k: load(folder, **k), "StableDiffusionPipeline"),
        (
            lambda **k: diffusax.AutoencoderKL.from_pretrained(folder, subfolder="vae", **k),
            "AutoencoderKL.from_pretrained",
        ),
        (
            lambda **k: diffusax.DDIMScheduler.from_pretrained(folder, subfolder="scheduler", **k),
            "DDIMScheduler",
        ),
        (
            lambda **k: diffusax.CLIPTokenizer.from_pretrained(folder, subfolder="tokenizer", **k),
            "CLIPTokenizer.from_pretrained",
        ),
        (
            lambda **k: pipe.save_pretrained(tmp_path, **k),
            "StableDiffusionPipeline.save_pretrained",
        ),
        (
            lambda **k: pipe.vae.save_pretrained(tmp_path / "v", **k),
            "AutoencoderKL.save_pretrained",
        ),
    ]
    for function, owner in cases:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            function(foo=3)
        told = [record.getMessage() for record in caplog.records]
        wanted = f"Keyword arguments {{'foo': 3}} are not expected by {owner} and will be ignored"
        assert told == [wanted]
    caplog.clear()
    load(folder, savety_checker=None)
    assert "savety_checker may be meant to be safety_checker" in caplog.text


def test_what_would_load_something_else_is_an_error(folder):
    four = diffusers.BitsAndBytesConfig(load_in_4bit=True)
    for name, value in (("use_onnx", True), ("quantization_config", four)):
        with pytest.raises(ValueError, match=f"{name} must"):
            load(folder, **{name: value})
        with pytest.raises(ValueError, match=f"{name} must"):
            diffusax.AutoencoderKL.from_pretrained(folder, subfolder="vae", **{name: value})
    with pytest.raises(ValueError, match="StableDiffusionPipeline has no component 'foo'"):
        diffusax.StableDiffusionPipeline(foo=3)


@pytest.mark.parametrize(
    "numbers",
    [
        {"height": 64.0, "width": np.int64(64), "num_inference_steps": np.array(2)},
        {"height": jnp.asarray(64), "num_images_per_prompt": 1.0, "clip_skip": None},
    ],
)
def test_whole_numbers_of_any_kind_are_integers(pipe, expected, numbers):
    np.testing.assert_array_equal(pipe(**{**CALL, **numbers}).images, expected)
    with pytest.raises(ValueError, match=r"width must be an integer \(got 64.5\)"):
        pipe(**CALL, width=64.5)


def test_shards_are_of_the_size_that_is_asked_for(pipe, tmp_path):
    pipe.vae.save_pretrained(tmp_path, max_shard_size="200KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    again = diffusers.AutoencoderKL.from_pretrained(tmp_path)
    assert torch.equal(
        again.state_dict()["decoder.conv_in.bias"],
        torch.tensor(pipe.vae.state_dict()["decoder.conv_in.bias"]),
    )
    with pytest.raises(ValueError, match="max_shard_size must be a number of bytes or"):
        pipe.vae.save_pretrained(tmp_path, max_shard_size="much")


def test_pieces_of_a_loop_by_hand_are_diffusers(pipe, theirs):
    theirs_generator, ours_generator = (torch.Generator().manual_seed(5) for _ in "ab")
    size = 16 * theirs.vae_scale_factor
    ask = 2, 4, size, size, torch.float32, "cpu"
    expected = theirs.prepare_latents(*ask, theirs_generator)
    np.testing.assert_allclose(pipe.prepare_latents(*ask, ours_generator), expected, atol=2e-6)
    with pytest.warns(FutureWarning):
        together = theirs._encode_prompt("a cat", "cpu", 1, True).detach()
    np.testing.assert_allclose(pipe._encode_prompt("a cat", "cpu", 1, True), together, atol=1e-5)
    pipe.scheduler = diffusax.DDIMScheduler.from_config(pipe.scheduler.config)
    assert pipe.prepare_extra_step_kwargs(None, 0.5) == {"eta": 0.5, "generator": None}
    theirs_scheduler = diffusers.DDIMScheduler.from_config(theirs.scheduler.config)
    mine = diffusers.StableDiffusionImg2ImgPipeline(
        **{**theirs.components, "scheduler": theirs_scheduler}, requires_safety_checker=False
    )
    for scheduler in (theirs_scheduler, pipe.scheduler):
        scheduler.set_timesteps(10)
    expected, steps = mine.get_timesteps(10, 0.4, "cpu")
    found, number = pipe.get_timesteps(10, 0.4)
    assert number == steps
    np.testing.assert_array_equal(found, expected)
    w = torch.tensor([6.5])
    torch.testing.assert_close(
        pipe.get_guidance_scale_embedding(w, 16), theirs.get_guidance_scale_embedding(w, 16)
    )
    pipe.check_inputs("a cat", size, size, 1)
    with pytest.raises(ValueError, match="height must be divisible by"):
        pipe.check_inputs("a cat", size + 1, size, 1)
    with pytest.raises(ValueError, match="only one of prompt and prompt_embeds"):
        pipe.check_inputs("a cat", size, size, prompt_embeds=np.zeros((1, 77, 32), np.float32))


def test_the_pipeline_tells_of_its_last_call(pipe, folder):
    assert (pipe.clip_skip, pipe.guidance_rescale, pipe.cross_attention_kwargs) == (None, 0.0, None)
    seen = []

    def note(view, step, timestep, tensors):
        seen.append((view.clip_skip, view.guidance_scale, view.current_timestep == timestep))
        return tensors

    pipe(**CALL, clip_skip=1, guidance_scale=4.0, callback_on_step_end=note)
    assert set(seen) == {(1, 4.0, True)}
    assert pipe.clip_skip == 1
    assert pipe._execution_device == pipe.device
    assert pipe.config._name_or_path == pipe.name_or_path == str(folder)
    assert pipe.config["requires_safety_checker"] is False
    pipe.set_progress_bar_config(disable=True)
    assert list(pipe.progress_bar(range(2))) == [0, 1]
    pipe.register_modules(vae=None, scheduler=diffusax.DDIMScheduler())
    assert pipe.vae is None
    assert type(pipe.scheduler) is diffusax.DDIMScheduler
