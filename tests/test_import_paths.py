"""Programs that import diffusers' names from diffusers' paths run with the import changed."""

import importlib
import logging
import random
import sys
from pathlib import Path

import diffusers
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.optimization import get_scheduler as torch_scheduler
from diffusers.training_utils import EMAModel as TorchEMA
from diffusers.training_utils import compute_snr as torch_snr
from PIL import Image

import diffusax
from diffusax import import_paths, utils
from diffusax.optimization import get_scheduler
from diffusax.training_utils import EMAModel, cast_training_params, compute_snr, set_seed

PATHS = [
    path
    for root, below in import_paths.PATHS.items()
    for path in (root, *(f"{root}.{name}" for name in below.split()))
]
# Those of diffusers' older versions, where it has moved them.
OLDER = {"models.unet_2d_condition", "models.autoencoder_kl", "utils.import_utils"}


def test_paths_are_diffusers_and_hide_none_of_diffusax():
    package = Path(diffusax.__file__).parent
    for path in PATHS:
        if path not in OLDER:
            assert importlib.util.find_spec(f"diffusers.{path}") is not None, path
        module = importlib.import_module(f"diffusax.{path}")
        file = package.joinpath(*path.split("."))
        real = file.with_suffix(".py").exists() or file.is_dir()
        assert isinstance(module, import_paths.NamesOnly) != real, path
        assert not hasattr(module, "__file__") or real


def test_paths_give_the_same_classes():
    from diffusax.loaders import LoraLoaderMixin
    from diffusax.models.attention_processor import AttnProcessor2_0
    from diffusax.models.unets.unet_2d_condition import UNet2DConditionModel
    from diffusax.pipelines.pipeline_utils import DiffusionPipeline, ImagePipelineOutput
    from diffusax.pipelines.stable_diffusion import StableDiffusionPipelineOutput
    from diffusax.pipelines.stable_diffusion.pipeline_stable_diffusion import (
        StableDiffusionPipeline,
    )
    from diffusax.schedulers.scheduling_ddim import DDIMScheduler, DDIMSchedulerOutput

    assert StableDiffusionPipeline is diffusax.StableDiffusionPipeline
    assert UNet2DConditionModel is diffusax.UNet2DConditionModel
    assert DDIMScheduler is diffusax.schedulers.DDIMScheduler is diffusax.DDIMScheduler
    assert ImagePipelineOutput is StableDiffusionPipelineOutput
    assert issubclass(StableDiffusionPipeline, DiffusionPipeline)
    assert issubclass(StableDiffusionPipeline, LoraLoaderMixin)
    assert DDIMSchedulerOutput(prev_sample=1).prev_sample == 1
    assert AttnProcessor2_0()
    assert diffusax.EMAModel is EMAModel
    assert diffusax.VaeImageProcessor is diffusax.image_processor.VaeImageProcessor


def test_a_name_that_is_not_here_says_so():
    safety = importlib.import_module("diffusax.pipelines.stable_diffusion.safety_checker")
    with pytest.raises(ImportError, match=r"StableDiffusionSafetyChecker; no pipeline runs it"):
        _ = safety.StableDiffusionSafetyChecker
    with pytest.raises(ImportError, match="cannot import name 'StableCascade'"):
        from diffusax import StableCascade  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'FooScheduler'"):
        from diffusax.schedulers import FooScheduler  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"diffusax\.pipelines\.kandinsky"):
        importlib.import_module("diffusax.pipelines.kandinsky")


@pytest.mark.parametrize("path", PATHS)
def test_a_name_that_others_ask_all_modules_for_is_no_error(path):
    assert getattr(importlib.import_module(f"diffusax.{path}"), "torch", None) is None


def test_a_module_whose_extra_is_missing_is_an_error_that_pickle_expects(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [
        n for n in sys.modules if n.startswith(("diffusax.torch", "diffusax.interop.torch"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(diffusax, "torch", raising=False)
    with pytest.raises(AttributeError, match=r"torch is needed here; .* 'diffusax\[torch\]'"):
        _ = diffusax.torch
    with pytest.raises(ImportError, match="torch is needed here"):
        from diffusax import torch  # noqa: F401


def test_verbosity_and_bars():
    logger = logging.getLogger("diffusax")
    before = logger.level
    try:
        diffusax.utils.logging.set_verbosity_error()
        assert not logging.getLogger("diffusax.checkpoints").isEnabledFor(logging.WARNING)
        utils.logging.set_verbosity_info()
        assert utils.get_logger("diffusax.x").isEnabledFor(logging.INFO)
        assert utils.logging.get_verbosity() == logging.INFO
        utils.logging.disable_progress_bar()
        assert utils.logging.tqdm(range(2)).disable
        utils.logging.enable_progress_bar()
        assert utils.logging.is_progress_bar_enabled()
    finally:
        logger.setLevel(before)


def test_images_become_what_diffusers_makes_of_them(tmp_path):
    pixels = np.random.default_rng(0).random((2, 5, 4, 3), np.float32)
    scaled = torch.from_numpy(pixels * 2 - 1).permute(0, 3, 1, 2)
    for name, value in (("numpy_to_pil", pixels), ("pt_to_pil", scaled)):
        expected = getattr(diffusers.utils, name)(value)
        assert list(map(np.asarray, getattr(utils, name)(value)))[1].tolist() == (
            np.asarray(expected[1]).tolist()
        )
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "lime", "blue")]
    theirs = diffusers.utils.export_to_gif(frames, str(tmp_path / "theirs.gif"), fps=5)
    ours = utils.export_to_gif(frames, tmp_path / "ours.gif", fps=5)
    assert Path(ours).read_bytes() == Path(theirs).read_bytes()


def test_a_video_is_written_and_read_back(tmp_path, monkeypatch):
    pytest.importorskip("imageio_ffmpeg")
    ramp = np.linspace(0, 1, 4)[:, None, None, None] * np.ones((4, 20, 36, 3))
    path = utils.export_to_video(list(ramp), tmp_path / "clip.mp4", fps=5, quality=9)
    frames, fps = utils.load_video(path, return_fps=True)
    assert (len(frames), frames[0].size, fps) == (4, (48, 32), 5)
    found = np.stack([np.asarray(frame) for frame in frames]) / 255
    np.testing.assert_allclose(found.mean((1, 2)), ramp.mean((1, 2)), atol=0.02)
    noise = np.random.default_rng(0).random((4, 32, 32, 3))
    small, large = (
        Path(utils.export_to_video(list(noise), tmp_path / f"{q}.mp4", quality=q)) for q in (2, 9)
    )
    assert small.stat().st_size < large.stat().st_size
    plain = utils.export_to_video(list(ramp), macro_block_size=None)
    assert utils.load_video(plain)[0].size == (36, 20)
    Path(plain).unlink()
    (tmp_path / "text.mp4").write_text("no video")
    with pytest.raises(ValueError, match="cannot read the video"):
        utils.load_video(tmp_path / "text.mp4")
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ImportError, match="imageio_ffmpeg is needed here"):
        utils.export_to_video(list(ramp))


@pytest.mark.parametrize("seeds", [[3], [1, 2]])
def test_random_tensors_are_diffusers(seeds):
    def draw(function, **options):
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        return function((2, 3, 4), generators, **options)

    expected = draw(diffusers.utils.torch_utils.randn_tensor, dtype=torch.float32)
    assert torch.equal(draw(utils.randn_tensor, dtype=torch.float32), expected)
    numbers = utils.randn_tensor((2, 3, 4), seeds)
    assert isinstance(numbers, jnp.ndarray)
    np.testing.assert_allclose(numbers, expected, atol=2e-6)


def test_guidance_and_timesteps_for_loops_by_hand():
    from diffusax.pipelines.stable_diffusion.pipeline_stable_diffusion import (
        rescale_noise_cfg,
        retrieve_timesteps,
    )

    theirs = diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion
    guided, text = torch.randn(2, 2, 3, 4, 4)
    expected = theirs.rescale_noise_cfg(guided, text, 0.7)
    torch.testing.assert_close(rescale_noise_cfg(guided, text, 0.7), expected)
    ours = rescale_noise_cfg(jnp.asarray(guided.numpy()), jnp.asarray(text.numpy()), 0.7)
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    for options in ({"num_inference_steps": 4}, {"sigmas": [1.0, 0.6, 0.2]}):
        pairs = [
            function(module.FlowMatchEulerDiscreteScheduler(), **options)
            for function, module in (
                (theirs.retrieve_timesteps, diffusers),
                (retrieve_timesteps, diffusax),
            )
        ]
        (expected, steps), (found, number) = pairs
        assert number == steps
        np.testing.assert_allclose(found, expected, rtol=1e-6)


SCHEDULES = {
    "constant": {},
    "constant_with_warmup": {"num_warmup_steps": 3},
    "linear": {"num_warmup_steps": 3, "num_training_steps": 12},
    "cosine": {"num_warmup_steps": 0, "num_training_steps": 12},
    "cosine_with_restarts": {"num_warmup_steps": 2, "num_training_steps": 12, "num_cycles": 3},
    "polynomial": {"num_warmup_steps": 2, "num_training_steps": 10, "power": 2.0},
    "piecewise_constant": {"step_rules": "1:3,0.1:7,0.01"},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rates_are_diffusers_step_by_step(name):
    options = SCHEDULES[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-3)
    theirs, ours = torch_scheduler(name, optimizer, **options), get_scheduler(name, 2e-3, **options)
    expected, stepped = [], []
    for _ in range(15):
        expected.append(theirs.get_last_lr()[0])
        stepped.append(ours.get_last_lr()[0])
        optimizer.step()
        theirs.step()
        ours.step()
    np.testing.assert_allclose(stepped, expected, rtol=2e-6, atol=1e-9)
    np.testing.assert_allclose(ours(jnp.arange(15)), expected, rtol=2e-6, atol=1e-9)


def test_a_schedule_says_what_it_lacks():
    with pytest.raises(ValueError, match="num_training_steps must be given for the schedule cos"):
        get_scheduler("cosine", 1e-4, num_warmup_steps=1)
    with pytest.raises(ValueError, match="name must be one of linear, cosine"):
        get_scheduler("cosin", 1e-4)
    with pytest.raises(ValueError, match=r"step_rules must be factors .* \(got '1:x,2'\)"):
        get_scheduler("piecewise_constant", 1e-4, step_rules="1:x,2")
    with pytest.raises(ValueError, match="optimizer must be the learning rate"):
        get_scheduler("constant", object())


@pytest.mark.parametrize(
    "options", [{}, {"use_ema_warmup": True, "power": 0.75, "min_decay": 0.3}, {"decay": 0.5}]
)
def test_averages_follow_diffusers_step_by_step(options):
    layer = torch.nn.Linear(3, 2)
    theirs = TorchEMA(layer.parameters(), update_after_step=1, **options)
    ours = EMAModel(
        [p.detach().numpy() for p in layer.parameters()], update_after_step=1, **options
    )
    for _ in range(6):
        for parameter in layer.parameters():
            parameter.data += torch.randn_like(parameter)
        theirs.step(layer.parameters())
        ours.step([p.detach().numpy() for p in layer.parameters()])
        assert ours.cur_decay_value == theirs.cur_decay_value
        for mine, other in zip(ours.shadow_params, theirs.shadow_params):
            np.testing.assert_allclose(mine, other, atol=1e-6)
    state = {k: v for k, v in ours.state_dict().items() if k != "shadow_params"}
    assert state == {k: v for k, v in theirs.state_dict().items() if k != "shadow_params"}


@pytest.mark.slow
def test_an_average_is_a_models_for_a_while(tiny_checkpoints, tmp_path):
    folder, _ = tiny_checkpoints.pipeline("sd")
    vae = diffusax.AutoencoderKL.from_pretrained(folder, subfolder="vae")
    ema = EMAModel(vae.parameters(), model_cls=diffusax.AutoencoderKL, model_config=vae.config)
    name, first = next(vae.named_parameters())
    before = first.clone()
    first.copy_(before + 1)
    assert np.array_equal(vae.state_dict()[name], before + 1)
    ema.store(vae.parameters())
    ema.copy_to(vae.parameters())
    assert np.array_equal(vae.state_dict()[name], before)
    ema.restore(vae.parameters())
    assert np.array_equal(vae.state_dict()[name], before + 1)
    with pytest.raises(RuntimeError, match="call store first"):
        ema.restore(vae.parameters())
    ema.save_pretrained(tmp_path)
    again = diffusers.AutoencoderKL.from_pretrained(tmp_path)
    assert np.array_equal(again.state_dict()[name], before)
    tree = {"a": jnp.ones(2)}
    assert EMAModel(tree).copy_to(tree)["a"].tolist() == [1, 1]


def test_snr_seeds_and_casts(tiny_checkpoints):
    timesteps = torch.tensor([0, 10, 500, 999])
    expected = torch_snr(diffusers.DDPMScheduler(), timesteps)
    found = compute_snr(diffusax.DDPMScheduler(), timesteps)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    set_seed(3)
    drawn = random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002
    diffusers.training_utils.set_seed(3)
    assert drawn == (random.random(), np.random.rand(), torch.rand(1).item())  # noqa: NPY002
    folder, _ = tiny_checkpoints.pipeline("sd")
    options = {"subfolder": "vae", "dtype": "float16"}
    frozen, trained = (diffusax.AutoencoderKL.from_pretrained(folder, **options) for _ in "ab")
    cast_training_params([frozen.requires_grad_(False), trained])
    assert (frozen.dtype, trained.dtype) == (jnp.float16, jnp.float32)


def test_libraries_are_there_as_python_finds_them():
    assert utils.is_torch_available()
    assert not utils.is_xformers_available()
    assert utils.is_torch_version(">=", "2.0")
    assert not utils.is_torch_version("<", "2.0")
    assert not utils.is_no_such_library_available()
    with pytest.raises(AttributeError, match="no attribute 'is_torch'"):
        _ = utils.is_torch
    with pytest.warns(FutureWarning, match="`x` is deprecated and will be removed in version 9"):
        assert utils.deprecate("x", "9", "Use y.", take_from={"x": 3}) == 3
